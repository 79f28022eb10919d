"""Own what a request takes of a layer, as terms that explain themselves; `demand` owns the numbers."""

from kvlease.plan import PlanInputs
from kvlease.spec import (
    ChunkedLocal,
    CrossAttention,
    LayerSpec,
    RingState,
    SlidingWindow,
    SlidingWindowMLA,
    StateSpace,
)
from kvleased.planning.explaining.terms import Term, ceil, least, literal, most, number


def blocks_term(spec: LayerSpec, inputs: PlanInputs, longest_request_tokens: int) -> Term:
    """Return the blocks that the longest request takes of a layer's table while it runs."""
    tokens = number("longest_request_tokens", longest_request_tokens)
    block = number("tokens_per_block", spec.block_tokens)
    match spec:
        case StateSpace():
            return _states(spec, inputs, tokens)
        case RingState():
            return number("ring", 1)
        case SlidingWindow() | SlidingWindowMLA():
            return ceil(least([_window(spec) + _in_flight(inputs), tokens]) / block) + literal(1)
        case ChunkedLocal():
            chunk = number("chunk_tokens", spec.chunk_tokens)
            return ceil(least([chunk + _in_flight(inputs), tokens]) / block)
        case CrossAttention():
            return ceil(number("encoder_tokens_max", inputs.engine.encoder_tokens_max) / block)
        case _:
            return ceil(tokens / _row_tokens(spec, inputs))


def entries_term(spec: LayerSpec, inputs: PlanInputs, longest_request_tokens: int) -> Term:
    """Return the entries of the longest request's table row; an encoder's input may be longer than the request."""
    tokens = number("longest_request_tokens", longest_request_tokens)
    encoder = number("encoder_tokens_max", inputs.engine.encoder_tokens_max)
    tokens = most([tokens, encoder]) if encoder.value else tokens
    match spec:
        case RingState():
            return number("ring", 1)
        case StateSpace() if inputs.engine.state_mode == "align":
            block = number("tokens_per_block", spec.block_tokens)
            return _with_speculative(ceil(tokens / block), spec)
        case StateSpace():
            return _states(spec, inputs, tokens)
        case _:
            return ceil(tokens / _row_tokens(spec, inputs))


def _states(spec: StateSpace, inputs: PlanInputs, tokens: Term) -> Term:
    """Return the blocks of recurrent states, according to the mode in which they are kept."""
    if inputs.engine.state_mode == "all":
        block = number("tokens_per_block", spec.block_tokens)
        return _with_speculative(ceil(tokens / block), spec)
    if inputs.engine.state_mode == "none":
        return _with_speculative(number("current_state", 1), spec)
    blocks = _with_speculative(number("current_and_aligned_states", 2), spec)
    if spec.num_checkpoint_blocks:
        blocks = blocks + number("num_checkpoint_blocks", spec.num_checkpoint_blocks)
    return blocks


def _with_speculative(blocks: Term, spec: StateSpace) -> Term:
    if not spec.num_speculative_blocks:
        return blocks
    return blocks + number("num_speculative_blocks", spec.num_speculative_blocks)


def _window(spec: SlidingWindow | SlidingWindowMLA) -> Term:
    window = number("window_tokens", spec.window_tokens) - literal(1)
    if not spec.retained_tokens:
        return window
    return window + number("retained_tokens", spec.retained_tokens)


def _in_flight(inputs: PlanInputs) -> Term:
    """Return the tokens that steps under way may be writing."""
    step = number("tokens_per_step", inputs.engine.tokens_per_step)
    if inputs.engine.steps_in_flight == 1:
        return step
    return step * number("steps_in_flight", inputs.engine.steps_in_flight)


def _row_tokens(spec: LayerSpec, inputs: PlanInputs) -> Term:
    """Return the tokens that one entry of a table row stands for, on all context ranks that share them."""
    block = number("tokens_per_block", spec.block_tokens)
    context_ranks = inputs.parallel.context_ranks
    if context_ranks == 1 or not spec.is_context_sharded:
        return block
    return block * number("context_ranks", context_ranks)
