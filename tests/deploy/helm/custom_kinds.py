"""Own small schemas of the Prometheus operator's kinds that the chart uses, which the validator skips."""

from typing import Any, Final

_Shape = dict[str, Any]
_LABELS: Final[_Shape] = {"*": str}
_RULE: Final[_Shape] = {
    "expr": str,
    "alert?": str,
    "record?": str,
    "for?": str,
    "keep_firing_for?": str,
    "labels?": _LABELS,
    "annotations?": _LABELS,
}
CUSTOM_KINDS: Final[dict[str, _Shape]] = {
    "PodMonitor": {
        "selector": {"matchLabels": _LABELS},
        "podMetricsEndpoints": [
            {
                "port": str,
                "path": str,
                "interval": str,
                "scrapeTimeout": str,
                "relabelings?": [{"sourceLabels?": [str], "targetLabel": str, "replacement?": str}],
            }
        ],
    },
    "PrometheusRule": {"groups": [{"name": str, "interval?": str, "rules": [_RULE]}]},
}
"""The shape of each kind's `spec`: a name with `?` is optional, `*` is any name, and no other name is allowed."""


def mistake_in(document: dict[str, Any]) -> str:
    """Return what is wrong with a document, or an empty string."""
    shape = CUSTOM_KINDS.get(document["kind"])
    if shape is None or document["apiVersion"] != "monitoring.coreos.com/v1":
        return f"{document['apiVersion']} {document['kind']} is not known"
    return _mistake(document["spec"], shape, "spec")


def _mistake(value: object, shape: object, path: str) -> str:
    if isinstance(shape, type):
        return "" if isinstance(value, shape) else f"{path} is {value!r}, no {shape.__name__}"
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return f"{path} is no list with anything in it"
        parts = ((item, shape[0], f"{path}[{index}]") for index, item in enumerate(value))
        return next(filter(None, (_mistake(*part) for part in parts)), "")
    assert isinstance(shape, dict)
    return _mistake_in_object(value, shape, path)


def _mistake_in_object(value: object, shape: _Shape, path: str) -> str:
    if not isinstance(value, dict):
        return f"{path} is no object"
    allowed = {name.removesuffix("?"): inner for name, inner in shape.items()}
    any_name = allowed.pop("*", None)
    for name, inner in value.items():
        expected = allowed.get(name, any_name)
        if expected is None:
            return f"{path}.{name} is not known"
        if found := _mistake(inner, expected, f"{path}.{name}"):
            return found
    missing = {name for name in shape if not name.endswith("?") and name != "*"} - value.keys()
    return f"{path} lacks {sorted(missing)}" if missing else ""
