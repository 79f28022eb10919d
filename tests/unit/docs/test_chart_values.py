"""The chart knows the daemon's settings: each by its name, none that there is not."""

import json
from pathlib import Path
from typing import Final

from kvleased.settings import Settings

_SCHEMA: Final = Path(__file__).parents[3] / "helm" / "kvlease" / "values.schema.json"
_MADE_BY_THE_CHART: Final = {
    "device",
    "device_bytes_default",
    "disk_bytes_max",
    "disk_dir",
    "host_dir",
    "insecure_tcp_without_tls",
    "joiner_token_file",
    "memory_bytes_max",
    "operator_token_file",
    "probe_host",
    "probe_port",
    "reader_token_file",
    "remote_url",
    "runtime_dir",
    "secret_file",
    "tcp_host",
    "tenants",
    "tls_cert_file",
    "tls_client_ca_file",
    "tls_key_file",
    "trace_file",
}
"""What follows from other values, is of no use where TCP is loopback, or would fill the pod's small /tmp; refused below
`settings`."""
_PEERS: Final = ("ipBlock", "namespaceSelector", "podSelector")


def test_chart_takes_every_setting() -> None:
    """A setting is either below `settings` or made of other values."""
    taken = json.loads(_SCHEMA.read_text())["properties"]["settings"]

    assert set(taken["properties"]) == set(Settings.model_fields) - _MADE_BY_THE_CHART
    assert taken["additionalProperties"] is False


def test_every_object_of_the_chart_is_closed() -> None:
    """A misspelt value is refused, wherever it stands, but in what belongs to Kubernetes or to vLLM."""
    open_ones = sorted(_open_objects(json.loads(_SCHEMA.read_text()), ""))

    assert open_ones == [
        "affinity",
        "engine.connectorConfig",
        "engine.env[].valueFrom",
        "global",
        *(f"networkPolicy.apiFrom[].{kind}" for kind in _PEERS),
        "networkPolicy.egress[].ports[]",
        *(
            f"networkPolicy.{peers}[].{kind}"
            for peers in ("egress[].to", "engineFrom", "metricsFrom")
            for kind in _PEERS
        ),
        "prometheusRule.groups[]",
        "tolerations[]",
    ]


def _open_objects(schema: dict[str, object], path: str) -> list[str]:
    found = (
        [path] if schema.get("type") == "object" and "additionalProperties" not in schema else []
    )
    properties = schema.get("properties")
    if isinstance(properties, dict):
        for name, inner in properties.items():
            found += _open_objects(inner, f"{path}.{name}" if path else name)
    items = schema.get("items")
    return found + (_open_objects(items, f"{path}[]") if isinstance(items, dict) else [])
