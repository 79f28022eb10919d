"""Answer the vectors of lower tiers: slots, their division among ranks, and the copied parts of a block."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlease.errors import InvalidError, NeverFitsError
from kvlease.geometry import exact_div, floor_div
from kvlease.layout import parse_layout
from kvlease.plan import CachePlan, RankPlan
from kvlease.spec import LayerSpec
from kvleased.planning import plan as plan_of
from kvleased.planning.lower_tiers import (
    SlotGeometry,
    check_groups,
    keep_same_bytes,
    num_slots,
    slot_geometry,
    sub_slot_offsets,
)
from kvleased.planning.lower_tiers import (
    transfer_regions as regions_of,
)
from kvleased.planning.pool import bytes_per_block, place
from tests.golden.words import groups_of, plan_inputs_of

_SLOT_MULTIPLE_BYTES = 4096
"""The reference rounds slots up to this: the host's page."""


def cpu_sizing(given: dict[str, Any]) -> dict[str, Any]:
    """Return the slots of host memory, computed from what is really allocated."""
    block = _bytes_per_block(given)
    ranks = [block] * given["world_size"]
    # Only shared memory lets ranks that keep the same bytes share a cell.
    is_replicated = given["replicated_layout"] and given["shared_region"]
    geometry = slot_geometry(
        ranks,
        blocks_per_slot=given["blocks_per_chunk"],
        slot_multiple_bytes=_SLOT_MULTIPLE_BYTES,
        is_replicated=is_replicated,
    )
    return {
        "worker_kv_bytes_per_block": block,
        **_sizing_words(geometry, given["cpu_bytes_to_use"]),
        "replicated_layout": is_replicated,
        "seed_39617_num_cpu_blocks": _seed_blocks(
            ranks, given["blocks_per_chunk"], given["cpu_bytes_to_use"]
        ),
    }


def simple_cpu_sizing(given: dict[str, Any]) -> dict[str, Any]:
    """Return the blocks of host memory if every slot holds one block."""
    block = _bytes_per_block(given)
    geometry = slot_geometry(
        [block] * given["world_size"],
        blocks_per_slot=1,
        slot_multiple_bytes=1,
        is_replicated=False,
    )
    try:
        slots = num_slots("host_bytes", given["cpu_bytes_to_use"], geometry.bytes_per_slot)
    except NeverFitsError as refusal:
        # Where memory is too small, the reference takes the need of one slot; our refusal has that number.
        slots = num_slots("host_bytes", refusal.need or 0, geometry.bytes_per_slot)
    return {"num_cpu_blocks": slots, "cpu_bytes": slots * block}


def offload_plan(given: dict[str, Any]) -> dict[str, Any]:
    """Return the slots of a whole plan, as each rank sees them."""
    config = given["plan"]["config"]
    inputs = plan_inputs_of(given["plan"])
    made = plan_of(inputs)
    blocks_per_slot = _blocks_per_slot(made, given["extra_config"])
    context_ranks = config["decode_context_parallel_size"]
    is_replicated = given["shared_region"] and keep_same_bytes(_layers(made), inputs.parallel)
    check_groups(
        made.groups,  # type: ignore[arg-type]  # a group's plan says what the group does
        hash_block_tokens=made.hash_block_tokens,
        context_ranks=context_ranks,
    )
    ranks = [rank.bytes_per_block for rank in made.ranks]
    geometry = slot_geometry(
        ranks,
        blocks_per_slot=blocks_per_slot,
        slot_multiple_bytes=_SLOT_MULTIPLE_BYTES,
        is_replicated=is_replicated,
    )
    cacheable = [
        (index, group) for index, group in enumerate(made.groups) if group.is_prefix_cacheable
    ]
    host_bytes = given["extra_config"]["cpu_bytes_to_use"]
    common = {
        "tokens_per_block": [
            group.tokens_per_block * (context_ranks if group.is_context_sharded else 1)
            for _, group in cacheable
        ],
        "group_ids": [index for index, _ in cacheable],
        "tokens_per_hash": made.hash_block_tokens,
        "blocks_per_chunk": blocks_per_slot,
        "replicated_layout": is_replicated,
        "seed_39617_num_cpu_blocks": _seed_blocks(ranks, blocks_per_slot, host_bytes),
    }
    workers = [
        {
            **common,
            **_sizing_words(geometry, host_bytes, rank.rank),
            "worker_kv_bytes_per_block": rank.bytes_per_block,
        }
        for rank in made.ranks
    ]
    return {
        "num_gpu_blocks": made.num_blocks,
        "scheduler": workers[0],
        "workers": workers,
        "ranks_agree": len({worker["num_chunks"] for worker in workers}) == 1,
    }


def host_region(given: dict[str, Any]) -> dict[str, Any]:
    """Return the place of every worker's tensors in shared host memory."""
    cell, tensors = given["cpu_page_size_per_worker"], given["tensor_bytes_per_chunk"]
    geometry = slot_geometry(
        [cell] * given["num_workers"],
        blocks_per_slot=1,
        slot_multiple_bytes=given["kv_bytes_per_chunk"],
        is_replicated=False,
    )
    if sum(tensors) > cell:
        message = f"pieces of {sum(tensors)} bytes do not fit in a cell of {cell}"
        raise InvalidError(message, rule="offload_worker_area_overflow", need=sum(tensors))
    views = [
        [
            {
                "storage_offset": offset + sum(tensors[:index]),
                "shape": [given["num_chunks"], num_bytes],
                "stride": [geometry.bytes_per_slot, 1],
            }
            for index, num_bytes in enumerate(tensors)
        ]
        for offset in geometry.cell_offsets_bytes
    ]
    return {"views": views, "total_size_bytes": given["num_chunks"] * geometry.bytes_per_slot}


def sub_block_offsets(given: dict[str, Any]) -> dict[str, Any]:
    """Return the starts of the blocks of some slots."""
    blocks_per_slot = given["blocks_per_chunk"]
    offsets = sub_slot_offsets(
        given["block_ids"],
        bytes_per_slot=given["row_stride"],
        bytes_per_block=exact_div(given["row_bytes"], blocks_per_slot),
        blocks_per_slot=blocks_per_slot,
    )
    first = given["skip_count"]
    return {"byte_offsets": list(offsets[first : first + given["count"]])}


def transfer_regions(given: dict[str, Any]) -> dict[str, Any]:
    """Return the copied regions, and those that each group needs."""
    layout = parse_layout(given["kv_cache_layout"])
    groups = groups_of(given["groups"], given["specs"])
    block = bytes_per_block(groups, layout, 1)
    layers, tensors, extents = place(
        groups, layout=layout, num_blocks=given["num_blocks"], block_multiple_bytes=1
    )
    rank = RankPlan(
        rank=0,
        bytes_per_block=block,
        device_bytes=given["num_blocks"] * block,
        bytes_per_longest_request=0,
        layers=layers,
        tensors=tensors,
        extents=extents,
        slot_cell_offset_bytes=0,
        slot_cell_bytes=block,
        needs_scrub=False,
    )
    regions, uses = regions_of(rank, layout)
    return {
        "allocation_bytes": rank.device_bytes,
        "regions": [
            {
                "offset": region.offset_bytes,
                "num_blocks": given["num_blocks"],
                "page_size_bytes": region.num_bytes,
                "block_stride": region.block_stride_bytes,
            }
            for region in regions
        ],
        "group_refs": [
            [{"region": use.region, "bytes": use.num_bytes} for use in of_group]
            for of_group in uses
        ],
    }


def _bytes_per_block(given: Mapping[str, Any]) -> int:
    """Return the bytes of each block in a pool that a vector gives as a whole."""
    num_blocks = given["num_gpu_blocks"]
    return floor_div(given["total_gpu_kv_bytes"], num_blocks) if num_blocks else 0


def _sizing_words(geometry: SlotGeometry, host_bytes: int, rank: int = 0) -> dict[str, Any]:
    return {
        "num_chunks": _slots(geometry, host_bytes),
        "kv_bytes_per_chunk": geometry.bytes_per_slot,
        "cpu_page_size_per_worker": geometry.cell_bytes[rank],
    }


def _seed_blocks(ranks: Sequence[int], blocks_per_slot: int, host_bytes: int) -> int:
    """Return the slots as the reference's seed counts them: neither rounded nor shared."""
    geometry = slot_geometry(
        ranks, blocks_per_slot=blocks_per_slot, slot_multiple_bytes=1, is_replicated=False
    )
    return _slots(geometry, host_bytes)


def _slots(geometry: SlotGeometry, host_bytes: int) -> int:
    """Return the slots, or none where we refuse memory that is too small for one, as the reference does."""
    try:
        return num_slots("host_bytes", host_bytes, geometry.bytes_per_slot)
    except NeverFitsError:
        return 0


def _layers(made: CachePlan) -> list[tuple[LayerSpec, ...]]:
    """Return the layers of every rank; equal ranks share one object."""
    seen: dict[tuple[tuple[str, LayerSpec], ...], tuple[LayerSpec, ...]] = {}
    by_rank = []
    for rank in made.ranks:
        layers = tuple(layer.spec for layer in rank.layers)
        by_rank.append(seen.setdefault(tuple((spec.name, spec) for spec in layers), layers))
    return by_rank


def _blocks_per_slot(made: CachePlan, options: Mapping[str, Any]) -> int:
    """Return the blocks of a slot from one of the two options; ours always count blocks."""
    tokens, blocks = options.get("block_size"), options.get("blocks_per_chunk")
    if tokens is None:
        return 1 if blocks is None else int(blocks)
    if blocks is not None:
        message = "give block_size or blocks_per_chunk, and not both"
        raise InvalidError(message, rule="offload_chunk_both_given")
    if tokens % made.scheduler_block_tokens:
        message = f"{tokens} is no multiple of {made.scheduler_block_tokens}"
        raise InvalidError(message, rule="offload_chunk_not_multiple")
    return exact_div(tokens, made.scheduler_block_tokens)
