"""Write the schema of what the chart passes on: `python helm/write_schema.py`.

In values.schema.json these are the daemon's settings and tenants, and the settings of vLLM's connectors.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel

from kvlease.integrations.vllm.settings import VLLM_SETTINGS, VLLM_TRUTHS, ConnectorSettings
from kvleased.config.setting_kinds import BYTES_MAX, TENANT_CHARACTERS_MAX, WRITTEN
from kvleased.config.settings import Settings
from kvleased.config.tenant_settings import TenantSettings
from kvleased.supervision.silence import SECONDS_MIN

SCHEMA: Final = Path(__file__).with_name("kvlease") / "values.schema.json"
MADE_BY_THE_CHART: Final = frozenset(
    {
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
)
"""Settings that follow from other values, are useless with TCP on loopback, or would fill the pod's small /tmp.

The schema refuses them below `settings`."""
_KEPT: Final = (
    "type", "enum", "pattern", "minLength", "maxLength", "minimum", "exclusiveMinimum", "maximum", "description",
)  # fmt: skip
"""JSON Schema keywords that the chart's schema keeps of a value; defaults are the daemon's."""
_BOUNDS: Final = {Ge: "minimum", Gt: "exclusiveMinimum", Le: "maximum"}
_BYTES_PATTERN: Final = r"^\s*[0-9]{1,16}(\.[0-9]{1,6})?\s*([KkMmGgTt][Ii]?)?[Bb]?\s*$"
"""The numbers of bytes that `kvlease.units.parse_bytes` reads."""


def settings() -> dict[str, Any]:
    """Return the schemas of the names below `settings`."""
    found = _properties(Settings)
    # Signs of life come once a second, so a limit below a few seconds would end every control process.
    seconds = found["control_silent_seconds_max"]
    least = {"minimum": SECONDS_MIN, "maximum": seconds.pop("maximum")}
    del seconds["minimum"]
    seconds["anyOf"] = [{"const": 0}, least]
    return {name: one for name, one in found.items() if name not in MADE_BY_THE_CHART}


def tenants() -> dict[str, Any]:
    """Return the schema of `tenants`; the templates, in words, refuse names that are the daemon's own."""
    return {
        "type": "object",
        "propertyNames": {"maxLength": TENANT_CHARACTERS_MAX},
        "additionalProperties": {
            "type": "object",
            "additionalProperties": False,
            "properties": _properties(TenantSettings),
        },
    }


def connector() -> dict[str, Any]:
    """Return the schema of `engine.connectorConfig`; the names that vLLM reads are checked by vLLM."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": _properties(ConnectorSettings)
        | {name: {} for name in sorted(VLLM_SETTINGS)}
        | {name: {"type": "boolean"} for name in VLLM_TRUTHS},
    }


def schema(now: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with up-to-date `settings`, `tenants` and `engine.connectorConfig`."""
    sections = now["properties"]
    engine = sections["engine"]
    written = {
        "settings": sections["settings"] | {"properties": settings()},
        "tenants": tenants(),
        "engine": engine | {"properties": engine["properties"] | {"connectorConfig": connector()}},
    }
    return now | {"properties": sections | written}


def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's fields as JSON Schema; a number of bytes may also have a unit."""
    described = model.model_json_schema()["properties"]
    found = {}
    for name, field in model.model_fields.items():
        one = {key: described[name][key] for key in _KEPT if key in described[name]}
        # Pydantic's schema lacks bounds that stand behind a validator.
        one |= {
            key: getattr(bound, kind.__name__.lower())
            for bound in field.metadata
            for kind, key in _BOUNDS.items()
            if isinstance(bound, kind)
        }
        # A schema cannot tell bounds of numbers written with a unit.
        if WRITTEN in field.metadata and (one["minimum"], one["maximum"]) == (0, BYTES_MAX):
            description = one.pop("description", None)
            one = {"anyOf": [one, {"type": "string", "pattern": _BYTES_PATTERN}]}
            if description:
                one["description"] = description
        found[name] = one
    return found


def main() -> int:
    """Write the schema."""
    now = json.loads(SCHEMA.read_text())
    SCHEMA.write_text(json.dumps(schema(now), indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
