"""Own which layers may have one spec, and which may share one table; groups are made of that elsewhere."""

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
    recorded, and the result is causal where all are. All other layers must be equal. A latent spec's page is then
    given in bytes and no longer as a multiple, and latent windows are no longer told apart by how they are quantised.

    Raises:
        InvalidError: they differ (rule specs_not_mergeable), or record several windows (rule window_size_conflict).
    """
    first, *others = (comparable(spec) for spec in dict.fromkeys(specs))
    field = _difference(first, others)
    if field:
        values = sorted({str(getattr(spec, field, None)) for spec in (first, *others)})
        message = (
            f"layer {first.name!r} and {len(others)} others cannot have one spec: {field} is {' or '.join(values)}; "
            f"give them one value, or let them be layers of different groups"
        )
        raise InvalidError(message, resource=field, rule="specs_not_mergeable")
    full = [spec for spec in (first, *others) if isinstance(spec, FullAttention)]
    return _union(full) if full else first


def mergeable(specs: Sequence[LayerSpec]) -> bool:
    """Tell whether the layers can have one spec.

    Raises:
        InvalidError: they record several windows (rule window_size_conflict).
    """
    first, *others = (comparable(spec) for spec in dict.fromkeys(specs))
    return not _difference(first, others)


def joins_spec(specs: Sequence[LayerSpec], other: LayerSpec) -> bool:
    """Tell whether another layer can have the one spec of some; all must be as `comparable` returns them.

    Beside other groups, layers that record another window are no conflict: they are a group of their own.
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
    """Tell whether another layer can be read through the table of a first one.

    They must cover the same tokens with a block, be split over ranks in the same way, and give blocks back alike.
    A latent window joins a plain one, but not the other way round.
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
    """Return the spec with all left out that is not compared between layers."""
    spec = settled(spec)
    return _unquantised(spec) if isinstance(spec, SlidingWindowMLA) else spec


def settled(spec: LayerSpec) -> LayerSpec:
    """Return the same spec with the multiple of a latent page worked into the padding."""
    if not isinstance(spec, MLA | SlidingWindowMLA) or spec.page_multiple_bytes is None:
        return spec
    is_padded = spec.bytes_per_page != spec.content_bytes_per_page
    padded = spec.bytes_per_page if is_padded else spec.bytes_per_page_padded
    return replace(spec, page_multiple_bytes=None, bytes_per_page_padded=padded)


def _unquantised(spec: SlidingWindowMLA) -> SlidingWindowMLA:
    """Return a latent window of the same bytes that says nothing of how they are quantised.

    The reference forgets it, too. Nothing but scrubbing depends on it, and then a block is scrubbed once too often.
    """
    plain = replace(spec, quantisation="none")
    if plain.head_slots != spec.head_slots:
        plain = replace(plain, num_head_slots=spec.head_slots)
    if plain.bytes_per_state != spec.bytes_per_state:
        plain = replace(plain, bytes_per_state_packed=spec.bytes_per_state)
    return plain


def _lifetime(spec: LayerSpec) -> tuple[object, ...]:
    """Return what decides, for one kind of layer, when blocks are granted and given back."""
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
    """Return a field in which specs differ that must not, or nothing.

    Raises:
        InvalidError: they record several windows.
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
    """Tell whether a layer keeps all tokens as a first one does."""
    if isinstance(first, RetainedWindow):
        is_alike = isinstance(other, RetainedWindow)
        return is_alike and not _differs(first, other, "retained_window_tokens")
    return isinstance(other, FullAttention) and first.is_latent == other.is_latent


def _conflicting(first: FullAttention, field: str) -> str:
    """Return a field of which several values are recorded.

    Raises:
        InvalidError: it is a window of attention that keeps K and V.
    """
    if first.is_latent:
        return field
    message = (
        f"layers that keep every token, {first.name!r} first, record several values of {field}; "
        f"give all of them one value, or leave it out"
    )
    raise InvalidError(message, resource=field, rule="window_size_conflict")


def _recorded(specs: Iterable[LayerSpec], field: str) -> set[int]:
    """Return the values that are given to a field of which one is allowed."""
    values = (getattr(spec, field, None) for spec in specs)
    return {value for value in values if value is not None}


def _differs(first: LayerSpec, other: LayerSpec, field: str) -> bool:
    return bool(getattr(first, field) != getattr(other, field))


def _differing(first: LayerSpec, other: LayerSpec) -> str:
    """Return a field of specs that are not equal."""
    if type(first) is not type(other):
        return "kind"
    compared = (field.name for field in fields(first) if field.compare)
    return next(name for name in compared if _differs(first, other, name))


def _union(specs: Sequence[FullAttention]) -> FullAttention:
    """Return the first spec with what any of them records."""
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
