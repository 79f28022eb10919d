"""Own what a plan's groups keep of a request, as both ends count it; the counting itself is `covering`'s business.

What a group keeps follows from its spec alone, except for recurrent layers: which of their states are kept follows from
how many blocks a request holds and how many places its row has.
"""

from kvlease.geometry import exact_div
from kvlease.groups import GroupShape, Keeps
from kvlease.plan import CachePlan, GroupPlan
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


def groups_of(plan: CachePlan) -> tuple[GroupShape, ...]:
    """Return the numbers of each group."""
    kept_tokens = [_kept_tokens(group.spec) for group in plan.groups]
    for rank in plan.ranks:
        for layer in rank.layers:
            # Windows of one group may retain different numbers of tokens.
            most = max(kept_tokens[layer.group], _kept_tokens(layer.spec))
            kept_tokens[layer.group] = most
    return tuple(
        _group_shape(plan, group, most)
        for group, most in zip(plan.groups, kept_tokens, strict=True)
    )


def why_no_prefix(plan: CachePlan) -> str:
    """Return why no request finds a prefix, whatever keys it brings; empty if prefixes are found.

    A group may not keep what another request would need of a prefix. Or its layers look at an encoder's output: what
    later layers keep of the tokens depends on that output, and no key covers it.
    """
    shapes = groups_of(plan)
    names = [f"group {at} (layers of kind {one.spec.kind})" for at, one in enumerate(plan.groups)]
    for name, group, shape in zip(names, plan.groups, shapes, strict=True):
        if isinstance(group.spec, CrossAttention):
            return f"{name} depends on an encoder's output, which no key covers"
        if shape.keeps is Keeps.FIXED and isinstance(group.spec, StateSpace):
            return f"{name} keeps no state that another request could go on from"
    for name, group, shape in zip(names, plan.groups, shapes, strict=True):
        is_shared = group.is_prefix_cacheable and shape.keeps is not Keeps.FIXED
        if is_shared and not shape.keys_per_block:
            return f"the blocks of {name} do not end where keys do"
    return "" if any(shape.keys_per_block for shape in shapes) else "no group's blocks have keys"


def _group_shape(plan: CachePlan, group: GroupPlan, kept_tokens: int) -> GroupShape:
    keeps = _keeps(group)
    tokens_per_block = _tokens_per_block(plan, group)
    is_shared = group.is_prefix_cacheable and keeps is not Keeps.FIXED
    return GroupShape(
        keeps=keeps,
        tokens_per_block=tokens_per_block,
        keys_per_block=(
            exact_div(tokens_per_block, plan.hash_block_tokens)
            if is_shared and _has_keys(plan, tokens_per_block)
            else 0
        ),
        table_blocks=group.table_blocks,
        max_blocks=min(group.blocks_per_longest_request, group.table_blocks),
        kept_tokens=kept_tokens,
        extra_blocks=_extra_blocks(group, keeps),
        is_drafted=group.is_drafted,
        kernel_blocks_per_block=group.kernel_blocks_per_block,
        kernel_block_stride=group.kernel_block_stride,
    )


def _keeps(group: GroupPlan) -> Keeps:
    match group.spec:
        case StateSpace():
            return _states_kept(group, group.spec)
        case SlidingWindow() | SlidingWindowMLA():
            return Keeps.WINDOW
        case ChunkedLocal():
            return Keeps.CHUNK
        case CrossAttention() | RingState() | EncoderOnly():
            return Keeps.FIXED
        case _:
            assert group.spec.keeps_all, "a kind of layer whose blocks nobody knows how to keep"
            return Keeps.EVERYTHING


def _states_kept(group: GroupPlan, spec: StateSpace) -> Keeps:
    """Tell which states are kept, from a request's blocks and the places of its row.

    | states       | blocks                           | places                  |
    |--------------|----------------------------------|-------------------------|
    | the current  | 1 + speculative                  | 1 + speculative         |
    | aligned      | 2 + speculative + checkpoints    | positions + speculative |
    | all          | positions + speculative          | positions + speculative |

    If requests are so short that the last two cannot be told apart, every place has its block from the start and no
    other request finds any, which is right for both.
    """
    num_blocks = group.blocks_per_longest_request
    if num_blocks != group.table_blocks:
        return Keeps.STATE
    current = 1 + spec.num_speculative_blocks
    is_short = num_blocks == current + 1 + spec.num_checkpoint_blocks
    return Keeps.FIXED if num_blocks == current or is_short else Keeps.EVERYTHING


def _kept_tokens(spec: LayerSpec) -> int:
    match spec:
        case SlidingWindow() | SlidingWindowMLA():
            return spec.window_tokens - 1 + spec.retained_tokens
        case ChunkedLocal():
            return spec.chunk_tokens
        case _:
            return 0


def _extra_blocks(group: GroupPlan, keeps: Keeps) -> int:
    if isinstance(group.spec, StateSpace) and keeps is not Keeps.FIXED:
        return group.spec.num_speculative_blocks
    return 0


def _tokens_per_block(plan: CachePlan, group: GroupPlan) -> int:
    """Return the tokens that a block has on all the ranks that share them."""
    return group.tokens_per_block * (plan.context_ranks if group.is_context_sharded else 1)


def _has_keys(plan: CachePlan, tokens_per_block: int) -> bool:
    """Tell whether every block ends where a key ends; this need not be so if nobody looks for prefixes."""
    return tokens_per_block % plan.hash_block_tokens == 0
