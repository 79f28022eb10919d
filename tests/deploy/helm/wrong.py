"""Tell what is wrong with what Helm has made."""

from tests.deploy.helm.custom_kinds import mistake_in
from tests.deploy.tools import Helm, Rendered


def mistakes_in(helm: Helm, rendered: Rendered, version: str) -> list[str]:
    """Return what is wrong with each document in a version of Kubernetes; nothing where all is well."""
    found = []
    for document in rendered.documents:
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            found.append(mistake_in(document))
        else:
            found.append(helm.validate(document, version))
    return [f"{version}: {mistake}" for mistake in found if mistake]
