"""Find mistakes in rendered documents."""

from tests.deploy.helm.custom_kinds import mistake_in
from tests.deploy.tools import Helm, Rendered


def mistakes_in(helm: Helm, rendered: Rendered, version: str) -> list[str]:
    """Return the mistakes of all documents for a version of Kubernetes; an empty list if there are none."""
    found = []
    for document in rendered.documents:
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            found.append(mistake_in(document))
        else:
            found.append(helm.validate(document, version))
    return [f"{version}: {mistake}" for mistake in found if mistake]
