"""Own the laws of every plan, whatever it plans, so that no vector has to spell them out."""

from collections.abc import Iterator
from itertools import pairwise

from kvlease.plan import CachePlan, Extent, LayerPlacement, RankPlan
from kvlease.strides import check_disjoint, view_of


def checked(plan: CachePlan) -> CachePlan:
    """Return the plan.

    Raises:
        AssertionError: a law is broken; the message says which.
    """
    broken = list(broken_laws(plan))
    assert not broken, broken[0]
    return plan


def broken_laws(plan: CachePlan) -> Iterator[str]:
    """Yield a sentence for every law that a plan breaks."""
    everywhere = {name for group in plan.groups for name in group.layer_names}
    placed = {layer.name for rank in plan.ranks for layer in rank.layers}
    if everywhere != placed:
        yield f"layers of groups and of ranks differ: {sorted(everywhere ^ placed)[:4]}"
    if plan.blocks_per_longest_request != sum(
        group.blocks_per_longest_request for group in plan.groups
    ):
        yield "the longest request's blocks are not the sum over groups"
    if plan.groups and plan.blocks_per_longest_request > plan.usable_blocks:
        yield "the longest request does not fit"
    for group in plan.groups:
        if group.is_prefix_cacheable and plan.scheduler_block_tokens % group.tokens_per_block:
            yield f"a group's block of {group.tokens_per_block} tokens does not end at the scheduler's"
    for rank in plan.ranks:
        yield from _of_rank(rank, plan)


def _of_rank(rank: RankPlan, plan: CachePlan) -> Iterator[str]:
    if rank.device_bytes != plan.num_blocks * rank.bytes_per_block:
        yield f"rank {rank.rank}: device_bytes is not num_blocks * bytes_per_block"
    names = [layer.name for layer in rank.layers]
    if len(names) != len(set(names)):
        yield f"rank {rank.rank}: a layer is placed twice"
    for layer in rank.layers:
        check_disjoint(layer, plan.num_blocks)
        view_of(layer, num_blocks=plan.num_blocks, region_bytes=rank.device_bytes)
    for group in range(len(plan.groups)):
        pages = sorted(
            (span for layer in rank.layers if layer.group == group for span in _spans(layer, plan)),
            key=lambda span: span[0],
        )
        for (start, end), (later, _) in pairwise(pages):
            if end > later:
                yield f"rank {rank.rank}, group {group}: bytes at {start} to {end} and from {later} overlap"
    yield from _of_extents(rank, plan)


def _spans(layer: LayerPlacement, plan: CachePlan) -> Iterator[tuple[int, int]]:
    """Yield the spans of a layer's bytes in its first and last block only; the others are equally far apart."""
    spec = layer.spec
    reach = (spec.head_slots - 1) * layer.head_stride_bytes
    reach += (spec.states_per_block - 1) * layer.state_stride_bytes + spec.bytes_per_state
    for block in {0, min(1, plan.num_blocks - 1), plan.num_blocks - 1}:
        start = layer.offset_bytes + block * layer.block_stride_bytes
        if reach <= spec.bytes_per_page:
            yield start, start + spec.content_bytes_per_page
            continue
        for head in range(spec.head_slots):
            of_head = start + head * layer.head_stride_bytes
            yield of_head, of_head + spec.states_per_block * spec.bytes_per_state


def _of_extents(rank: RankPlan, plan: CachePlan) -> Iterator[str]:
    """Yield the places where the pieces of a block leave bytes out, or have bytes twice."""
    if sum(extent.num_bytes for extent in rank.extents) != rank.bytes_per_block:
        yield f"rank {rank.rank}: the extents are not bytes_per_block together"
    at = 0
    for extent in rank.extents:
        if extent.slot_offset_bytes != at:
            yield f"rank {rank.rank}: an extent starts at {extent.slot_offset_bytes} of a slot, not at {at}"
        at += extent.num_bytes
        last = (plan.num_blocks - 1) * extent.block_stride_bytes + extent.num_bytes
        if extent.offset_bytes + last > rank.device_bytes:
            yield f"rank {rank.rank}: an extent ends beyond the region"
    for layer in rank.layers:
        for start, end in _spans(layer, plan):
            if not any(_covers(extent, start, end) for extent in rank.extents):
                yield f"rank {rank.rank}: no extent has bytes {start} to {end} of layer {layer.name}"
                return


def _covers(extent: Extent, start: int, end: int) -> bool:
    """Tell whether a piece of a block has these bytes."""
    within = (start - extent.offset_bytes) % extent.block_stride_bytes
    return start >= extent.offset_bytes and within + (end - start) <= extent.num_bytes
