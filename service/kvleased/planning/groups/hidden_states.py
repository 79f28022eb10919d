"""Own the groups of hidden states, which take pages as large as the other groups' pages."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from kvlease.geometry import ceil_div, floor_div
from kvlease.spec import HiddenState, LayerSpec
from kvleased.planning.groups.page_unity import with_longer_blocks


def with_hidden_states(
    groups: Sequence[Sequence[LayerSpec]], hidden: Sequence[HiddenState]
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Return groups of equal pages, and after them one for each layer of hidden states, with pages of the same bytes.

    If a page has no room for even one token's hidden state, all other blocks are made longer until it does.
    """
    plain = tuple(tuple(group) for group in groups)
    if not hidden:
        return plain
    bytes_per_page = plain[0][0].bytes_per_page
    bytes_per_token = max(map(_bytes_per_token, hidden))
    factor = ceil_div(bytes_per_token, bytes_per_page)
    if factor > 1:
        plain = tuple(tuple(with_longer_blocks(spec, factor) for spec in group) for group in plain)
    common_tokens = gcd(*(group[0].block_tokens for group in plain))
    return (
        *plain,
        *((_filling(layer, bytes_per_page * factor, common_tokens),) for layer in hidden),
    )


def _filling(layer: HiddenState, bytes_per_page: int, common_tokens: int) -> HiddenState:
    """Return a layer whose page, of given bytes, holds as many tokens as fit and divide the other groups' blocks."""
    room_tokens = max(1, floor_div(bytes_per_page, _bytes_per_token(layer)))
    tokens_per_block = next(
        tokens
        for tokens in range(min(room_tokens, common_tokens), 0, -1)
        if common_tokens % tokens == 0
    )
    return replace(layer, tokens_per_block=tokens_per_block, bytes_per_page_padded=bytes_per_page)


def _bytes_per_token(layer: HiddenState) -> int:
    return layer.num_kv_heads * layer.head_size * layer.bytes_per_element
