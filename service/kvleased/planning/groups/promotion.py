"""Own how layers that keep few tokens become layers that keep all, so that one table can serve a model."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Final

from kvlease.errors import InvalidError
from kvlease.geometry import floor_div
from kvlease.spec import (
    MLA,
    AttentionSpec,
    ChunkedLocal,
    FullAttention,
    LayerSpec,
    SlidingWindow,
    SlidingWindowMLA,
)
from kvleased.planning.groups.merging import mergeable, share_table

_COMMON_FIELDS: Final = tuple(field.name for field in fields(AttentionSpec))
_LATENT_FIELDS: Final = (*_COMMON_FIELDS, "packed_format", "page_multiple_bytes", "model_version")


def promoted(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return layers that one table can serve: unchanged if it can already, else with every window kept whole.

    A window or chunk becomes a record of what attention looks at. Its block becomes that of the layers that keep all
    tokens, if those agree on one.

    Raises:
        InvalidError: even then no table can serve them (rule promotion_failed), or they record several windows.
    """
    if not layers or _fit_one_table(layers):
        return tuple(layers)
    whole = keeping_all(layers)
    if _fit_one_table(whole):
        return whole
    kinds = sorted({layer.kind for layer in layers})
    message = (
        f"one_group is set, but {len(layers)} layers of {', '.join(kinds)} cannot share a table, as their windows, "
        f"states or blocks differ; set one_group to false"
    )
    raise InvalidError(message, resource="one_group", rule="promotion_failed", need=len(kinds))


def keeping_all(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with every window and chunk kept whole; unchanged if no layer keeps all tokens anyway."""
    blocks = {layer.block_tokens for layer in layers if isinstance(layer, FullAttention)}
    if not blocks:
        return tuple(layers)
    tokens_per_block = blocks.pop() if len(blocks) == 1 else None
    return tuple(_keeping_all(layer, tokens_per_block) for layer in layers)


def _fit_one_table(layers: Sequence[LayerSpec]) -> bool:
    """Tell whether the layers can have one spec or share one table.

    Raises:
        InvalidError: the layers record several windows.
    """
    return mergeable(layers) or share_table(layers)


def _keeping_all(layer: LayerSpec, tokens_per_block: int | None) -> LayerSpec:
    match layer:
        case SlidingWindowMLA():
            values = {name: getattr(layer, name) for name in _LATENT_FIELDS}
            whole: FullAttention = MLA(**values, window_tokens=layer.window_tokens)
        case SlidingWindow():
            values = {name: getattr(layer, name) for name in _COMMON_FIELDS}
            whole = FullAttention(**values, window_tokens=layer.window_tokens)
        case ChunkedLocal():
            values = {name: getattr(layer, name) for name in _COMMON_FIELDS}
            whole = FullAttention(**values, chunk_tokens=layer.chunk_tokens)
        case _:
            return layer
    return _with_block(whole, tokens_per_block or layer.block_tokens)


def _with_block(layer: FullAttention, tokens_per_block: int) -> FullAttention:
    """Return the layer with another block, and enough padding for what that block holds."""
    padded = layer.bytes_per_page_padded
    if padded is not None:
        scaled = floor_div(layer.content_bytes_per_page * tokens_per_block, layer.block_tokens)
        padded = max(padded, scaled)
    return replace(layer, tokens_per_block=tokens_per_block, bytes_per_page_padded=padded)
