"""Own how many blocks of a layer one request takes; `capacity` adds them up over groups."""

from dataclasses import dataclass

from kvlease.errors import InvalidError
from kvlease.geometry import ceil_div
from kvlease.spec import (
    ChunkedLocal,
    CrossAttention,
    EncoderOnly,
    LayerSpec,
    RingState,
    SlidingWindow,
    SlidingWindowMLA,
    StateSpace,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What decides, beside a layer's spec, how many blocks of the layer one request takes."""

    num_tokens: int
    """Tokens of the request."""
    in_flight_tokens: int = 0
    """Tokens that steps under way may be writing; windows and chunks keep them too."""
    context_ranks: int = 1
    """Ranks that share the tokens of a request while decoding."""
    encoder_tokens: int = 0
    """Tokens of the longest encoder input, for cross attention."""
    state_mode: str = "none"
    """Which states of recurrent layers are kept: "none" but the current one, block ends ("align"), or "all"."""


def blocks_per_request(spec: LayerSpec, demand: Demand) -> int:
    """Return the most blocks of a layer that a request takes while it runs.

    every token kept: ceil(num_tokens / (tokens_per_block * context ranks))
    sliding window:   ceil(min(window - 1 + retained + in flight, num_tokens) / tokens_per_block) + 1, because the
                      window may start inside of a block
    chunked local:    ceil(min(chunk + in flight, num_tokens) / tokens_per_block)
    recurrent state:  1, aligned 2 + checkpoints, each with the speculative blocks
    cross attention:  ceil(encoder tokens / tokens_per_block); a ring takes 1 and encoder-only attention none

    Raises:
        InvalidError: context parallel ranks are to share a window.
    """
    match spec:
        case StateSpace():
            return _state_blocks(spec, demand)
        case RingState():
            return 1
        case EncoderOnly():
            return 0
        case SlidingWindow() | SlidingWindowMLA():
            return _window_blocks(spec, demand)
        case ChunkedLocal() | CrossAttention():
            return ceil_div(_kept_tokens(spec, demand), spec.block_tokens)
        case _:
            return _row_blocks(spec, demand)


def table_blocks(spec: LayerSpec, demand: Demand) -> int:
    """Return the entries of a request's table row: one for every block of tokens, even if it is no longer kept.

    A row of recurrent states holds the states alone unless states are kept by position. A ring's row has one entry.
    """
    match spec:
        case RingState():
            return 1
        case StateSpace():
            if demand.state_mode == "align":
                return ceil_div(demand.num_tokens, spec.block_tokens) + spec.num_speculative_blocks
            return _state_blocks(spec, demand)
        case _:
            return _row_blocks(spec, demand)


def ranks_sharing(spec: LayerSpec, context_ranks: int) -> int:
    """Return how many ranks share the tokens of a block: context_ranks if the layer is split over them, else 1."""
    return context_ranks if spec.is_context_sharded else 1


def _row_blocks(spec: LayerSpec, demand: Demand) -> int:
    """Return how many blocks cover all tokens."""
    tokens_per_row_entry = spec.block_tokens * ranks_sharing(spec, demand.context_ranks)
    return ceil_div(demand.num_tokens, tokens_per_row_entry)


def _state_blocks(spec: StateSpace, demand: Demand) -> int:
    if demand.state_mode == "all":
        return ceil_div(demand.num_tokens, spec.block_tokens) + spec.num_speculative_blocks
    if demand.state_mode == "align":
        return 2 + spec.num_speculative_blocks + spec.num_checkpoint_blocks
    return 1 + spec.num_speculative_blocks


def _kept_tokens(spec: ChunkedLocal | CrossAttention, demand: Demand) -> int:
    if isinstance(spec, CrossAttention):
        return demand.encoder_tokens
    return min(spec.chunk_tokens + demand.in_flight_tokens, demand.num_tokens)


def _window_blocks(spec: SlidingWindow | SlidingWindowMLA, demand: Demand) -> int:
    if ranks_sharing(spec, demand.context_ranks) > 1:
        message = (
            f"layer {spec.name!r} keeps a window of {spec.window_tokens} tokens, which {demand.context_ranks} "
            f"context parallel ranks cannot share; set context_ranks to 1, or is_context_sharded to false"
        )
        raise InvalidError(
            message,
            resource="context_ranks",
            rule="dcp_sliding_window",
            need=demand.context_ranks,
            limit=1,
        )
    kept_tokens = spec.window_tokens - 1 + spec.retained_tokens + demand.in_flight_tokens
    return ceil_div(min(kept_tokens, demand.num_tokens), spec.block_tokens) + 1
