"""Own how a block is split into kernel blocks: by stored states, never by tokens; the planner chooses their size."""

from kvlease.errors import InvalidError
from kvlease.geometry import exact_div, floor_div
from kvlease.spec import AttentionSpec, LayerSpec, StateSpace


def kernel_blocks_per_block(spec: LayerSpec, kernel_tokens: int | None) -> int:
    """Return how many kernel blocks of `kernel_tokens` tokens one block consists of; with None, one.

    Raises:
        InvalidError: rule kernel_block_does_not_divide or state_not_splittable.
    """
    tokens = spec.block_tokens
    if kernel_tokens is None or kernel_tokens == tokens:
        return 1
    if kernel_tokens <= 0 or tokens % kernel_tokens:
        message = (
            f"kernel blocks of {kernel_tokens} tokens do not divide the {tokens} tokens of a block of layer "
            f"{spec.name!r}; make the block a multiple of the kernel block"
        )
        rule = "kernel_block_does_not_divide"
    elif isinstance(spec, StateSpace):
        message = (
            f"a page of layer {spec.name!r} is one state, which kernel blocks of {kernel_tokens} tokens would cut; "
            f"use kernel blocks of {tokens} tokens"
        )
        rule = "state_not_splittable"
    else:
        return exact_div(tokens, kernel_tokens)
    raise InvalidError(
        message, resource="kernel_tokens", rule=rule, need=kernel_tokens, available=tokens
    )


def states_per_kernel_block(spec: LayerSpec, kernel_tokens: int | None) -> int:
    """Return the states of one head in a kernel block: floor(tokens / tokens_per_state) * states_per_token, at least 1.

    Raises:
        InvalidError: rule kernel_block_without_states or kernel_block_splits_state.
    """
    if not isinstance(spec, AttentionSpec):
        return spec.states_per_block
    tokens = kernel_tokens or spec.block_tokens
    per_state = spec.tokens_per_state
    whole = floor_div(tokens, per_state)
    if not whole:
        message = (
            f"a kernel block of {tokens} tokens holds no state of layer {spec.name!r}, which keeps one state per "
            f"{per_state} tokens; use kernel blocks of a multiple of {per_state} tokens"
        )
        rule = "kernel_block_without_states"
    elif tokens != spec.block_tokens and whole * per_state != tokens:
        message = (
            f"a kernel block of {tokens} tokens ends inside a state of layer {spec.name!r}, which keeps one state per "
            f"{per_state} tokens; use kernel blocks of a multiple of {per_state} tokens"
        )
        rule = "kernel_block_splits_state"
    else:
        return whole * spec.states_per_token
    raise InvalidError(
        message, resource="kernel_tokens", rule=rule, need=per_state, available=tokens
    )
