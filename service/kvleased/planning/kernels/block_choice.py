"""Own the tokens of a block if layers of different kinds must have pages of equal bytes; the kernels' sizes are known.

token page  = bytes that one token takes of an attention layer's page
step        = max(least kernel block, tokens_per_block)
tokens      = max(tokens_per_block, step * ceil(state page / (step * token page)))
shared page = tokens * token page
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final

from kvlease.errors import InvalidError
from kvlease.geometry import ceil_div, floor_div, round_up
from kvlease.plan import BackendInputs
from kvleased.planning.kernels.kernel_blocks import sizes_of, supports_block

_LATENT_STEP_TOKENS_MIN: Final = 128
"""Blocks of latent layers beside recurrent layers grow in steps of at least this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridBlocks:
    """Blocks of a model that has recurrent and attention layers."""

    tokens_per_block: int
    state_tokens_per_block: int | None
    """Tokens of a recurrent layer's block; None if that is not decided here."""
    state_bytes_per_page_padded: int | None
    """Bytes that a recurrent layer's page is padded to; None if it needs no padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedBlocks:
    """Blocks of a model in which some layers are quantised and others are not."""

    tokens_per_block: int
    bytes_per_page: int
    """Bytes that the pages of unquantised and recurrent layers are padded to."""


def hybrid_blocks(
    backends: Sequence[BackendInputs],
    *,
    tokens_per_block: int,
    bytes_per_token: int,
    bytes_per_state: int,
    is_latent: bool = False,
    are_states_aligned: bool = False,
) -> HybridBlocks:
    """Return the smallest block whose attention page holds a recurrent state, in sizes that all backends read.

    Raises:
        InvalidError: rule no_common_block_size, if one of the backends cannot use that block.
    """
    if not bytes_per_state:
        return HybridBlocks(
            tokens_per_block=tokens_per_block,
            state_tokens_per_block=None,
            state_bytes_per_page_padded=None,
        )
    step = max(_least(backends[0]), tokens_per_block) if backends else tokens_per_block
    if is_latent:
        step = max(step, _LATENT_STEP_TOKENS_MIN)
    grown = round_up(
        step * ceil_div(bytes_per_state, step * bytes_per_token), lcm(*map(_least, backends))
    )
    tokens = max(tokens_per_block, grown)
    for backend in backends:
        if tokens != tokens_per_block and not supports_block(backend, tokens):
            message = (
                f"a state of {bytes_per_state} bytes needs blocks of {tokens} tokens, which backend {backend.name!r} "
                "cannot use; choose another backend"
            )
            raise InvalidError(
                message, resource="tokens_per_block", rule="no_common_block_size", need=tokens
            )
    page = tokens * bytes_per_token
    return HybridBlocks(
        tokens_per_block=tokens,
        state_tokens_per_block=tokens if are_states_aligned else None,
        state_bytes_per_page_padded=page if page != bytes_per_state else None,
    )


def mixed_blocks(
    backend: BackendInputs,
    *,
    tokens_per_block: int,
    bytes_per_token: int,
    bytes_per_token_unquantised: int,
    bytes_per_state_page: int = 0,
) -> MixedBlocks:
    """Return the smallest block whose quantised page holds the smallest unquantised page, and a recurrent state."""
    least = _least(backend)
    step = max(least, tokens_per_block)
    held = max(bytes_per_token_unquantised * least, bytes_per_state_page)
    tokens = step * ceil_div(held, step * bytes_per_token)
    return MixedBlocks(tokens_per_block=tokens, bytes_per_page=tokens * bytes_per_token)


def largest_block_within(
    backend: BackendInputs, *, bytes_per_token: int, bytes_per_page: int, fallback: int
) -> int:
    """Return the largest kernel block that fits a page, else the smallest; `fallback` if the backend declares none."""
    fitting = floor_div(bytes_per_page, bytes_per_token)
    candidates = [
        *backend.exact_tokens,
        *(max(base, floor_div(fitting, base) * base) for base in backend.multiples_tokens),
    ]
    within = [tokens for tokens in candidates if tokens <= fitting]
    return max(within) if within else min(candidates, default=fallback)


def _least(backend: BackendInputs) -> int:
    return min(sizes_of(backend), default=1)
