"""Write what values.schema.json says of settings and tenants from the daemon's own: `python helm/write_schema.py`."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel

from kvleased.config.setting_kinds import BYTES_MAX, TENANT_CHARACTERS_MAX, WRITTEN
from kvleased.config.settings import Settings, TenantSettings
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
"""What follows from other values, is of no use where TCP is loopback, or would fill the pod's small /tmp; refused below
`settings`."""
_KEPT: Final = (
    "type", "enum", "pattern", "minimum", "exclusiveMinimum", "maximum", "description",
)  # fmt: skip
"""What the chart's schema says of a value; defaults are the daemon's."""
_BOUNDS: Final = {Ge: "minimum", Gt: "exclusiveMinimum", Le: "maximum"}
_BYTES_PATTERN: Final = r"^\s*[0-9]{1,16}(\.[0-9]{1,6})?\s*([KkMmGgTt][Ii]?)?[Bb]?\s*$"
"""What `kvlease.units.parse_bytes` reads."""


def settings() -> dict[str, Any]:
    """Return what may stand below `settings`, by name."""
    found = _properties(Settings)
    # Life is shown once a second, so that less than some would end every control process.
    seconds = found["control_silent_seconds_max"]
    least = {"minimum": SECONDS_MIN, "maximum": seconds.pop("maximum")}
    del seconds["minimum"]
    seconds["anyOf"] = [{"const": 0}, least]
    return {name: one for name, one in found.items() if name not in MADE_BY_THE_CHART}


def tenants() -> dict[str, Any]:
    """Return what `tenants` is; which names are the daemon's own is told by the templates, in words."""
    return {
        "type": "object",
        "propertyNames": {"maxLength": TENANT_CHARACTERS_MAX},
        "additionalProperties": {
            "type": "object",
            "additionalProperties": False,
            "properties": _properties(TenantSettings),
        },
    }


def schema(now: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with these two as they are today."""
    return now | {
        "properties": now["properties"]
        | {
            "settings": now["properties"]["settings"] | {"properties": settings()},
            "tenants": tenants(),
        }
    }


def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return what the fields of a model may be, as JSON Schema has it; any number of bytes also with a unit."""
    described = model.model_json_schema()["properties"]
    found = {}
    for name, field in model.model_fields.items():
        one = {key: described[name][key] for key in _KEPT if key in described[name]}
        # What stands behind a validator is not in pydantic's own.
        one |= {
            key: getattr(bound, kind.__name__.lower())
            for bound in field.metadata
            for kind, key in _BOUNDS.items()
            if isinstance(bound, kind)
        }
        # Of what is written with a unit a schema cannot tell the bounds.
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
