"""Own the blocks of models that keep states beside tokens: one page size, and how many tokens a state covers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvlease.plan import BackendInputs
from kvlease.spec import AttentionSpec, LayerSpec, StateSpace
from kvleased.planning.kernels.block_choice import hybrid_blocks
from kvleased.planning.models.model import Model

_BACKEND: Final = BackendInputs(name="any", multiples_tokens=(16,))
"""The block sizes that a backend is assumed to read if it is not known by name."""
_BEYOND_ANY_REQUEST_TOKENS: Final = 2**20
"""Tokens that a state covers if only the newest one is kept and the model names no longest request."""


def with_equal_pages(model: Model, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with blocks so large that an attention page holds a state, and with states padded to that page.

    If only the newest state is kept (state_mode none), a state's block is longer than any request, so no prefix of a
    request can be found by it.

    Raises:
        InvalidError: rule no_common_block_size, if no block size does.
    """
    states = [layer for layer in layers if isinstance(layer, StateSpace)]
    attention = [layer for layer in layers if isinstance(layer, AttentionSpec)]
    if not states:
        return tuple(layers)
    tokens, page = model.tokens_per_block, None
    if attention:
        blocks = hybrid_blocks(
            (_BACKEND,),
            tokens_per_block=tokens,
            bytes_per_token=max(_bytes_per_token(layer) for layer in attention),
            bytes_per_state=max(layer.bytes_per_state for layer in states),
            is_latent=any(layer.is_latent for layer in attention),
        )
        tokens, page = blocks.tokens_per_block, blocks.state_bytes_per_page_padded
    state_tokens = tokens if model.engine.state_mode != "none" else _longest_request(model)
    return tuple(
        replace(layer, tokens_per_block=state_tokens, bytes_per_page_padded=page)
        if isinstance(layer, StateSpace)
        else replace(layer, tokens_per_block=tokens)
        for layer in layers
    )


def _bytes_per_token(layer: AttentionSpec) -> int:
    return replace(layer, tokens_per_block=1).content_bytes_per_page


def _longest_request(model: Model) -> int:
    return model.config.max_positions or _BEYOND_ANY_REQUEST_TOKENS
