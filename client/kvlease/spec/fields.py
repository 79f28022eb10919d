"""Own the way between a spec and its named fields, as every wire format, file and report carries them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

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
"""Every kind of layer that can be described, by its name."""

FIELDS: Final[Mapping[str, Mapping[str, dataclasses.Field[Any]]]] = {
    kind: {field.name: field for field in dataclasses.fields(spec)} for kind, spec in KINDS.items()
}
"""The fields of every kind, by name."""

_ALL_SHARDS: Final = 0
"""How tensor_shards_max says None, which is left out, where the kind's default is a number."""


def spec_to_fields(spec: LayerSpec) -> dict[str, Any]:
    """Return `kind` and every field that is not left at its default."""
    fields: dict[str, Any] = {"kind": spec.kind}
    for name, field in FIELDS[spec.kind].items():
        value = getattr(spec, name)
        if value != field.default:
            fields[name] = _said(spec, name) if value is None else value
    return fields


def spec_from_fields(fields: Mapping[str, Any]) -> LayerSpec:
    """Return the spec that named fields describe.

    Raises:
        InvalidError: the kind is unknown, or a field is unknown to the kind or missing.
    """
    given = dict(fields)
    kind = str(given.pop("kind", ""))
    name = str(given.get("name", ""))[:40]
    if kind not in KINDS:
        message = f"layer {name!r} is of kind {kind[:40]!r}; the kinds are {', '.join(KINDS)}"
        raise InvalidError(message, resource="kind", rule="unknown_kind")
    known = FIELDS[kind]
    for field in given:
        if field not in known:
            message = f"layer {name!r} gives {field[:40]!r}, which {kind} does not have; it has {', '.join(known)}"
            raise InvalidError(message, resource=field[:40], rule="unknown_field")
    for field, declared in known.items():
        if declared.default is dataclasses.MISSING and field not in given:
            message = f"layer {name!r} of kind {kind} lacks {field}"
            raise InvalidError(message, resource=field, rule="missing_field")
    if given.get("tensor_shards_max") == _ALL_SHARDS:
        given["tensor_shards_max"] = None
    if "shapes" in given:
        given["shapes"] = tuple(tuple(shape) for shape in given["shapes"])
        given["dtypes"] = tuple(given.get("dtypes", ()))
    return KINDS[kind](**given)


def _said(spec: LayerSpec, name: str) -> int:
    """Return what a field says in place of None, which means something else than the kind's default."""
    if name == "tensor_shards_max":
        return _ALL_SHARDS
    assert name == "head_size_v", "a field that cannot say None"
    assert isinstance(spec, AttentionSpec), "no other kind has it"
    return spec.value_head_size
