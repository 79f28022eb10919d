"""Own the server in the tools' environment: the real Helm SDK and Kubernetes' schemas, asked by lines of JSON."""

import functools
import json
import sys
from typing import Any

import helm_python
import kubernetes_validate.utils
import yaml


def main() -> None:
    """Answer each line of stdin by one of stdout, until stdin ends."""
    # Each validation would read the same two megabytes of schemas again; they never change.
    for name in ("schema_contents", "all_versions"):
        once = functools.cache(getattr(kubernetes_validate.utils, name))
        setattr(kubernetes_validate.utils, name, once)
    for line in sys.stdin:
        sys.stdout.write(_answer(line))
        sys.stdout.flush()


@functools.cache
def _answer(line: str) -> str:
    """Answer a line; answers are cached, because many tests ask for the same values."""
    asked = json.loads(line)
    return json.dumps(_ANSWERS[asked.pop("ask")](**asked)) + "\n"


def _render(chart: str, values: dict[str, Any], name: str, kube_version: str) -> dict[str, Any]:
    """Render, and check the values against their schema as `helm install` does."""
    loaded = _charts.get(chart) or _charts.setdefault(chart, helm_python.Chart.load(chart))
    try:
        loaded.validate_schema(values)
        options = json.dumps({"name": name, "namespace": "inference", "kube_version": kube_version})
        # `render` has no argument for the version of Kubernetes, but the function that it calls has.
        rendered = helm_python._native.call_string(
            "helm_render",
            loaded._raw(),
            json.dumps(values),
            options,
        )
    except helm_python.HelmError as error:
        return {"error": str(error)}
    texts = rendered if isinstance(rendered, dict) else json.loads(rendered)
    return {"texts": texts, "documents": _documents(texts)}


def _documents(texts: dict[str, str]) -> list[dict[str, Any]]:
    return [
        document
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for document in yaml.load_all(text, Loader=_StrictLoader)
        if document
    ]


class _StrictLoader(yaml.CSafeLoader):
    """A loader that refuses duplicate keys, which YAML forbids but most readers accept."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError(
                None, None, f"double key in {keys}", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _lint(chart: str, values: dict[str, Any], kube_version: str) -> dict[str, Any]:
    found: dict[str, Any] = helm_python.lint(
        chart, values=values, strict=True, kube_version=kube_version
    )
    return found


def _validate(document: dict[str, Any], kube_version: str) -> str:
    """Return what is wrong with a document of Kubernetes' own kinds, or an empty string."""
    try:
        kubernetes_validate.validate(document, kube_version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _load_yaml(text: str) -> list[Any]:
    return list(yaml.load_all(text, Loader=_StrictLoader))


_charts: dict[str, Any] = {}
_ANSWERS: dict[str, Any] = {
    "render": _render,
    "lint": _lint,
    "validate": _validate,
    "load_yaml": _load_yaml,
}

if __name__ == "__main__":
    main()
