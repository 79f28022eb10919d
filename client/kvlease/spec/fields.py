"""Own the conversion between a spec and its named fields, which every wire format, file and report carries."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from kvlease._checks import check_type, field_types, shown
from kvlease.errors import InvalidError
from kvlease.spec.attention import (
    AttentionSpec,
    ChunkedLocal,
    CrossAttention,
    EncoderOnly,
    FullAttention,
    RetainedWindow,
    SinkAttention,
    SlidingWindow,
)
from kvlease.spec.latent import MLA, HiddenState, SlidingWindowMLA
from kvlease.spec.layer import LayerSpec
from kvlease.spec.state import RingState, StateSpace

KINDS: Final[Mapping[str, type[LayerSpec]]] = {
    spec.kind: spec
    for spec in (
        FullAttention,
        SlidingWindow,
        ChunkedLocal,
        MLA,
        SlidingWindowMLA,
        StateSpace,
        CrossAttention,
        EncoderOnly,
        SinkAttention,
        RetainedWindow,
        HiddenState,
        RingState,
    )
}
"""Every kind of layer that can be described, by the kind's name."""

FIELDS: Final[Mapping[str, Mapping[str, dataclasses.Field[Any]]]] = {
    kind: {field.name: field for field in dataclasses.fields(spec)} for kind, spec in KINDS.items()
}
"""The fields of every kind, by name."""

_FIELD_CHARACTERS_MAX: Final = 40
"""Characters of an unknown field's name that a refusal repeats."""
_SEE: Final = "docs/specs.md says which fields a kind has"

_ALL_SHARDS: Final = 0
"""The value by which tensor_shards_max says None if the kind's default is a number, as a None would be left out."""


def spec_to_fields(spec: LayerSpec) -> dict[str, Any]:
    """Return `kind` and every field that is not at its default."""
    fields: dict[str, Any] = {"kind": spec.kind}
    for name, field in FIELDS[spec.kind].items():
        value = getattr(spec, name)
        if value != field.default:
            fields[name] = _said(spec, name) if value is None else value
    return fields


def spec_from_fields(fields: Mapping[str, Any], path: str = "") -> LayerSpec:
    """Return the spec that named fields describe; lists may stand for tuples, and `path` is the layer's place.

    The spec's own `check` covers ranges and how fields relate to each other.

    Raises:
        InvalidError: the kind is unknown, or a field is unknown to the kind, missing, or not of its type.
    """
    given = dict(fields)
    kind = given.pop("kind", "")
    prefix = f"{path}." if path else ""
    layer = f"layer {shown(given['name'])}" if "name" in given else "a layer without a name"
    if not isinstance(kind, str) or kind not in KINDS:
        message = (
            f"{prefix}kind of {layer} must be one of {', '.join(KINDS)}, not {shown(kind)}; {_SEE}"
        )
        raise InvalidError(message, resource=f"{prefix}kind", rule="unknown_kind")
    known = FIELDS[kind]
    for field in given:
        if field not in known:
            message = (
                f"{prefix}{_name(field)} of {layer} is not a field of kind {kind}, "
                f"which has {', '.join(known)}; {_SEE}"
            )
            raise InvalidError(message, resource=prefix + _name(field), rule="unknown_field")
    for field, declared in known.items():
        if declared.default is dataclasses.MISSING and field not in given:
            message = f"{prefix}{field} of {layer} is missing, and kind {kind} needs it; {_SEE}"
            raise InvalidError(message, resource=prefix + field, rule="missing_field")
    hints = field_types(KINDS[kind])
    for field, value in given.items():
        check_type(prefix + field, value, hints[field], of=f" of {layer}", sequences=(list, tuple))
        if isinstance(value, list | tuple):
            given[field] = _as_tuple(value)
    if given.get("tensor_shards_max") == _ALL_SHARDS:
        given["tensor_shards_max"] = None
    return KINDS[kind](**given)


def _as_tuple(value: Any) -> Any:
    """Return lists as tuples, nested lists included."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _name(field: object) -> str:
    return str(field)[:_FIELD_CHARACTERS_MAX]


def _said(spec: LayerSpec, name: str) -> int:
    """Return the value that stands for None in a field, as None would be left out and become the kind's default."""
    if name == "tensor_shards_max":
        return _ALL_SHARDS
    assert name == "head_size_v", "a field that cannot say None"
    assert isinstance(spec, AttentionSpec), "no other kind has it"
    return spec.value_head_size
