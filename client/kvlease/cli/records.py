"""Own how a record is written as JSON: all its fields, and of layers only those that are given."""

import dataclasses
from typing import Any

from kvlease.spec import LayerSpec, spec_to_fields


def plain(value: Any) -> Any:
    """Return a record as dictionaries, lists and other JSON values."""
    if isinstance(value, LayerSpec):
        return plain(spec_to_fields(value))
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(inner) for inner in value]
    return value
