"""Own which layers may have one spec, and which may share one table; other modules make the groups."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Final, TypeGuard

from kvlease.errors import InvalidError
from kvlease.spec import (
    MLA,
    AttentionSpec,
    ChunkedLocal,
    FullAttention,
    LayerSpec,
    RetainedWindow,
    SlidingWindow,
    SlidingWindowMLA,
    StateSpace,
)

_ATTENTION_FIELDS: Final = tuple(field.name for field in fields(AttentionSpec) if field.compare)
_LATENT_FIELDS: Final = (
    *_ATTENTION_FIELDS,
    "packed_format",
    "model_version",
    "role",
    "leads_index_group",
)


def merged(specs: Sequence[LayerSpec]) -> LayerSpec:
    """Return the one spec that stands for all, with the first one's name.

    Layers that keep every token may differ in how attention looks at the tokens: at most one window or chunk is
    recorded, and the result is causal if all layers are. All other layers must be equal. A latent spec's page is then
    given in bytes and no longer as a multiple, and latent windows no longer differ by how they are quantised.

    Raises:
        InvalidError: the layers differ (rule specs_not_mergeable), or record several windows (rule
            window_size_conflict).
    """
    first, *others = (comparable(spec) for spec in dict.fromkeys(specs))
    field = _difference(first, others)
    if field:
        values = sorted({str(getattr(spec, field, None)) for spec in (first, *others)})
        message = (
            f"layer {first.name!r} and {len(others)} others cannot have one spec: {field} is {' or '.join(values)}; "
            "give them one value, or put them in different groups"
        )
        raise InvalidError(message, resource=field, rule="specs_not_mergeable")
    full = [spec for spec in (first, *others) if isinstance(spec, FullAttention)]
    return _union(full) if full else first


def mergeable(specs: Sequence[LayerSpec]) -> bool:
    """Tell whether the layers can have one spec.

    Raises:
        InvalidError: the layers record several windows (rule window_size_conflict).
    """
    first, *others = (comparable(spec) for spec in dict.fromkeys(specs))
    return not _difference(first, others)


def joins_spec(specs: Sequence[LayerSpec], other: LayerSpec) -> bool:
    """Tell whether another layer can have the same spec as some layers; all must be as `comparable` returns them.

    If the other layer records another window, that is no conflict: the layer gets a group of its own.
    """
    first = specs[0]
    if not isinstance(first, FullAttention):
        return first == other
    try:
        return not _difference(first, (*specs[1:], other))
    except InvalidError:
        return False


def share_table(specs: Sequence[LayerSpec]) -> bool:
    """Tell whether the layers' blocks can be granted together, so that one table serves all, whatever their pages."""
    first, *others = dict.fromkeys(specs)
    return all(joins_table(first, other) for other in others)


def joins_table(first: LayerSpec, other: LayerSpec) -> bool:
    """Tell whether another layer can be read through the table of the first.

    Their blocks must cover the same tokens, be split over ranks in the same way, and be given back at the same times. A
    latent window joins a plain one, but not the other way round.
    """
    if (
        first.block_tokens != other.block_tokens
        or first.is_context_sharded != other.is_context_sharded
        or first.is_prefix_cacheable != other.is_prefix_cacheable
    ):
        return False
    if isinstance(first, FullAttention):
        return isinstance(other, FullAttention)
    if isinstance(first, SlidingWindow) and isinstance(other, SlidingWindowMLA):
        return first.window_tokens == other.window_tokens
    return type(first) is type(other) and _lifetime(first) == _lifetime(other)


def comparable(spec: LayerSpec) -> LayerSpec:
    """Return the spec without what is not compared between layers."""
    spec = settled(spec)
    return _unquantised(spec) if isinstance(spec, SlidingWindowMLA) else spec


def settled(spec: LayerSpec) -> LayerSpec:
    """Return the same spec, with the multiple of a latent page turned into padding."""
    if not isinstance(spec, MLA | SlidingWindowMLA) or spec.page_multiple_bytes is None:
        return spec
    is_padded = spec.bytes_per_page != spec.content_bytes_per_page
    padded = spec.bytes_per_page if is_padded else spec.bytes_per_page_padded
    return replace(spec, page_multiple_bytes=None, bytes_per_page_padded=padded)


def _unquantised(spec: SlidingWindowMLA) -> SlidingWindowMLA:
    """Return a latent window of the same bytes that does not say how they are quantised.

    The reference drops this fact, too. Only scrubbing depends on it, and then a block is scrubbed once too often.
    """
    plain = replace(spec, quantisation="none")
    if plain.head_slots != spec.head_slots:
        plain = replace(plain, num_head_slots=spec.head_slots)
    if plain.bytes_per_state != spec.bytes_per_state:
        plain = replace(plain, bytes_per_state_packed=spec.bytes_per_state)
    return plain


def _lifetime(spec: LayerSpec) -> tuple[object, ...]:
    """Return what decides when blocks of one kind of layer are granted and given back."""
    match spec:
        case StateSpace():
            return (
                spec.num_speculative_blocks,
                spec.num_checkpoint_blocks,
                spec.checkpoint_multiple_tokens,
                spec.is_replicated,
                spec.bytes_per_page,
            )
        case SlidingWindow() | SlidingWindowMLA():
            return (spec.window_tokens,)
        case ChunkedLocal():
            return (spec.chunk_tokens,)
        case _:
            return ()


def _difference(first: LayerSpec, others: Sequence[LayerSpec]) -> str:
    """Return a field in which the specs differ but must not, or nothing.

    Raises:
        InvalidError: the specs record several windows.
    """
    if not isinstance(first, FullAttention):
        return next((_differing(first, other) for other in others if other != first), "")
    family = [other for other in others if _is_of_family(first, other)]
    if len(family) < len(others):
        return "kind"
    for field in ("window_tokens", "chunk_tokens"):
        if len(_recorded((first, *family), field)) > 1:
            return _conflicting(first, field)
    if all(_recorded((first, *family), field) for field in ("window_tokens", "chunk_tokens")):
        return "chunk_tokens"
    names = _LATENT_FIELDS if first.is_latent else _ATTENTION_FIELDS
    return next((name for other in family for name in names if _differs(first, other, name)), "")


def _is_of_family(first: FullAttention, other: LayerSpec) -> TypeGuard[FullAttention]:
    """Tell whether another layer keeps all tokens in the same way as the first."""
    if isinstance(first, RetainedWindow):
        is_alike = isinstance(other, RetainedWindow)
        return is_alike and not _differs(first, other, "retained_window_tokens")
    return isinstance(other, FullAttention) and first.is_latent == other.is_latent


def _conflicting(first: FullAttention, field: str) -> str:
    """Return a field that has several recorded values.

    Raises:
        InvalidError: the field belongs to attention that keeps K and V.
    """
    if first.is_latent:
        return field
    message = (
        f"layers that keep every token, {first.name!r} the first of them, have several values of {field}; give all of "
        "them one value, or leave it out"
    )
    raise InvalidError(message, resource=field, rule="window_size_conflict")


def _recorded(specs: Iterable[LayerSpec], field: str) -> set[int]:
    """Return the different values recorded in a field that may have only one."""
    values = (getattr(spec, field, None) for spec in specs)
    return {value for value in values if value is not None}


def _differs(first: LayerSpec, other: LayerSpec, field: str) -> bool:
    return bool(getattr(first, field) != getattr(other, field))


def _differing(first: LayerSpec, other: LayerSpec) -> str:
    """Return a field in which two unequal specs differ."""
    if type(first) is not type(other):
        return "kind"
    compared = (field.name for field in fields(first) if field.compare)
    return next(name for name in compared if _differs(first, other, name))


def _union(specs: Sequence[FullAttention]) -> FullAttention:
    """Return the first spec, with the window, chunk and other facts that any of the specs records."""
    first = specs[0]
    union = replace(
        first,
        window_tokens=next(iter(_recorded(specs, "window_tokens")), None),
        chunk_tokens=next(iter(_recorded(specs, "chunk_tokens")), None),
        is_causal=all(spec.is_causal for spec in specs),
    )
    if not isinstance(union, MLA):
        return union
    several = any(isinstance(spec, MLA) and spec.decodes_several_tokens for spec in specs)
    return replace(union, decodes_several_tokens=several)
