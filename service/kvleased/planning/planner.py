"""Own how an engine's inputs become a plan: layers, groups, memory, admission, places, lower tiers.

bytes_per_block = the widest group's pages, on each rank
num_blocks      = min over ranks of floor(device_bytes / bytes_per_block), or device_blocks as given
num_slots       = floor(host_bytes / bytes_per_slot)
capacity        = floor(usable_blocks * longest_request_tokens / blocks_per_longest_request)
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from kvlease.geometry import floor_div
from kvlease.layout import Layout, parse_layout
from kvlease.plan import CachePlan, GroupPlan, PlanInputs, RankPlan
from kvlease.spec import AttentionSpec, LayerSpec, StateSpace
from kvleased.planning.capacity import group_table_blocks
from kvleased.planning.explaining.waste import (
    HostAccount,
    PoolAccount,
    RankAccount,
    device_waste,
    host_waste,
)
from kvleased.planning.fingerprint import fingerprint
from kvleased.planning.groups.grouping import Group, group_layers
from kvleased.planning.kernels.kernels import check_views, kernel_blocks
from kvleased.planning.layers import layers_by_rank, union_of
from kvleased.planning.limits import check_inputs
from kvleased.planning.lower_tiers import (
    SlotGeometry,
    check_groups,
    keep_same_bytes,
    num_disk_slots,
    num_slots,
    slot_geometry,
)
from kvleased.planning.match_units import MatchUnits, match_units
from kvleased.planning.model_inputs import require_encoder_tokens, with_model_facts
from kvleased.planning.pool import check_blocks_apart, check_layout, place
from kvleased.planning.sizing import PoolPart, Pools, demand_of, different_specs, sized


def plan(inputs: PlanInputs) -> CachePlan:
    """Compute every number of a cache.

    Raises:
        InvalidError: the inputs contradict themselves, are out of range, or describe layers that cannot share a pool.
        NeverFitsError: the memory holds no block, or the longest request does not fit in it.
    """
    check_inputs(inputs)
    inputs = with_model_facts(inputs)
    layout = parse_layout(inputs.layout)
    layers_of_ranks = layers_by_rank(inputs)
    layers = union_of(layers_of_ranks)
    require_encoder_tokens(layers, inputs)
    groups = group_layers(layers, layout=layout, engine=inputs.engine)
    units = _match_units(inputs, groups)
    pools = sized(inputs, layout, groups, layers_of_ranks)
    _check_places(pools, layout)
    slots = _slots(pools, [rank.layers for rank in layers_of_ranks], inputs)
    _check_lower_tiers(inputs, groups, units)
    ranks = _rank_plans(pools, slots, inputs.block_multiple_bytes)
    num_host_slots = num_slots("host_bytes", inputs.host_bytes, slots.bytes_per_slot)
    return CachePlan(
        layout_fingerprint=_fingerprint(pools, slots, inputs),
        layout=layout,
        model_digest=inputs.model_digest,
        num_blocks=pools.num_blocks,
        null_blocks=inputs.null_blocks,
        longest_request_tokens=pools.longest_request_tokens,
        blocks_per_longest_request=sum(pools.blocks_by_group),
        capacity_tokens=_capacity_tokens(pools, inputs),
        tokens_per_block=_finest(groups, inputs),
        hash_block_tokens=units.hash_block_tokens,
        scheduler_block_tokens=units.scheduler_block_tokens,
        hit_alignment_tokens=units.hit_alignment_tokens,
        groups=_group_plans(pools, ranks, inputs),
        ranks=ranks,
        tensor_replicas=_tensor_replicas(groups, inputs),
        num_slots=num_host_slots,
        blocks_per_slot=inputs.blocks_per_slot,
        bytes_per_slot=slots.bytes_per_slot,
        num_disk_slots=num_disk_slots(inputs.disk_bytes, slots),
        num_remote_slots=num_slots("remote_bytes", inputs.remote_bytes, slots.bytes_per_slot),
        waste=(
            *device_waste(_pool_account(pools, layers, inputs)),
            *host_waste(_host_account(slots, num_host_slots, inputs)),
        ),
        context_ranks=inputs.parallel.context_ranks,
    )


def _capacity_tokens(pools: Pools, inputs: PlanInputs) -> int:
    """Return the tokens of the longest requests that fit in the pool at once, counting part of the last one."""
    return floor_div(
        (pools.num_blocks - inputs.null_blocks) * pools.longest_request_tokens,
        max(1, sum(pools.blocks_by_group)),
    )


def _slots(
    pools: Pools, layers_of_ranks: Sequence[tuple[LayerSpec, ...]], inputs: PlanInputs
) -> SlotGeometry:
    return slot_geometry(
        [part.bytes_per_block for part in pools.parts],
        blocks_per_slot=inputs.blocks_per_slot,
        slot_multiple_bytes=inputs.slot_multiple_bytes,
        is_replicated=keep_same_bytes(layers_of_ranks, inputs.parallel),
    )


def _check_places(pools: Pools, layout: Layout) -> None:
    """Refuse a layout that cannot place the pages of a rank, or in which its blocks would lie over each other."""
    for part in pools.different_parts:
        check_layout(part.groups, layout)
        check_blocks_apart(part.groups, layout)


def specs_of(inputs: PlanInputs) -> tuple[LayerSpec, ...]:
    """Return the checked layers of all ranks, each once, in model order, with all defaults filled in.

    Raises:
        InvalidError: the inputs give no layers or give them twice, or a layer cannot be laid out.
    """
    return union_of(layers_by_rank(inputs))


def _group_plans(
    pools: Pools, ranks: Sequence[RankPlan], inputs: PlanInputs
) -> tuple[GroupPlan, ...]:
    demand = demand_of(inputs, pools.longest_request_tokens)
    plans = []
    for index, (group, num_blocks) in enumerate(
        zip(pools.groups, pools.blocks_by_group, strict=True)
    ):
        kernels = kernel_blocks(
            index,
            group.layers,
            ranks=ranks,
            num_blocks=pools.num_blocks,
            backends=inputs.backends,
        )
        plans.append(
            GroupPlan(
                spec=group.spec,
                layer_names=group.layer_names,
                tokens_per_block=group.tokens_per_block,
                bytes_per_page=group.bytes_per_page,
                has_equal_layers=group.has_equal_layers,
                blocks_per_longest_request=num_blocks,
                table_blocks=group_table_blocks(different_specs(group), demand),
                kernel_tokens_per_block=kernels.tokens_per_block,
                kernel_blocks_per_block=kernels.blocks_per_block,
                kernel_block_stride=kernels.block_stride,
                is_prefix_cacheable=group.is_prefix_cacheable,
                is_context_sharded=group.is_context_sharded,
                is_drafted=group.is_drafted,
            )
        )
    return tuple(plans)


def _rank_plans(
    pools: Pools, slots: SlotGeometry, block_multiple_bytes: int
) -> tuple[RankPlan, ...]:
    made: dict[int, RankPlan] = {}
    plans = []
    for rank, part in enumerate(pools.parts):
        if id(part) not in made:
            made[id(part)] = _rank_plan(pools, part, block_multiple_bytes)
            check_views(made[id(part)], pools.num_blocks)
        plans.append(
            replace(
                made[id(part)],
                rank=rank,
                slot_cell_offset_bytes=slots.cell_offsets_bytes[rank],
                slot_cell_bytes=slots.cell_bytes[rank],
            )
        )
    return tuple(plans)


def _rank_plan(pools: Pools, part: PoolPart, block_multiple_bytes: int) -> RankPlan:
    layers, tensors, extents = place(
        part.groups,
        layout=pools.layout,
        num_blocks=pools.num_blocks,
        block_multiple_bytes=block_multiple_bytes,
    )
    order = {layer.name: index for index, layer in enumerate(part.layers)}
    return RankPlan(
        rank=0,
        bytes_per_block=part.bytes_per_block,
        device_bytes=pools.num_blocks * part.bytes_per_block,
        bytes_per_longest_request=sum(pools.blocks_by_group) * part.bytes_per_block,
        layers=tuple(sorted(layers, key=lambda layer: order[layer.name])),
        tensors=tensors,
        extents=extents,
        slot_cell_offset_bytes=0,
        slot_cell_bytes=0,
        # A group that has no layer on this rank counts, too: one scheduler scrubs its blocks on all ranks.
        needs_scrub=_needs_scrub(
            [layer for group in part.groups for layer in group.layers or (group.spec,)]
        ),
    )


def _needs_scrub(layers: Sequence[LayerSpec]) -> bool:
    """Tell whether a page may hold bytes that are meaningless to the layer that reads it next."""
    meanings = {
        (layer.dtype, layer.quantisation) for layer in layers if isinstance(layer, AttentionSpec)
    }
    return len(meanings) > 1 or any(isinstance(layer, StateSpace) for layer in layers)


def _fingerprint(pools: Pools, slots: SlotGeometry, inputs: PlanInputs) -> str:
    parts = pools.different_parts
    places = [
        place(
            part.groups,
            layout=pools.layout,
            num_blocks=1,
            block_multiple_bytes=inputs.block_multiple_bytes,
        )[0]
        for part in parts
    ]
    index = {id(part): number for number, part in enumerate(parts)}
    return fingerprint(
        layout=pools.layout,
        places=places,
        place_of_rank=[index[id(part)] for part in pools.parts],
        slots={
            "bytes_per_slot": slots.bytes_per_slot,
            "blocks_per_slot": inputs.blocks_per_slot,
            "cells": list(zip(slots.cell_offsets_bytes, slots.cell_bytes, strict=True)),
        },
        context_ranks=inputs.parallel.context_ranks,
    )


def _pool_account(pools: Pools, layers: Sequence[LayerSpec], inputs: PlanInputs) -> PoolAccount:
    ranks = tuple(
        RankAccount(
            groups=part.groups,
            bytes_per_block=part.bytes_per_block,
            own_blocks=own_blocks,
            budget_bytes=rank.device_bytes,
        )
        for part, own_blocks, rank in zip(pools.parts, pools.own_blocks, pools.ranks, strict=True)
    )
    return PoolAccount(
        ranks=ranks,
        layout=pools.layout,
        num_blocks=pools.num_blocks,
        null_blocks=inputs.null_blocks,
        blocks_by_group=pools.blocks_by_group,
        padding_given={
            layer.name: layer.bytes_per_page - layer.content_bytes_per_page for layer in layers
        },
    )


def _host_account(slots: SlotGeometry, num_host_slots: int, inputs: PlanInputs) -> HostAccount:
    return HostAccount(
        budget_bytes=inputs.host_bytes,
        num_slots=num_host_slots,
        bytes_per_slot=slots.bytes_per_slot,
        content_bytes=slots.content_bytes,
    )


def _tensor_replicas(groups: Sequence[Group], inputs: PlanInputs) -> int:
    """Return how many tensor ranks keep the same bytes of every layer."""
    tensor_ranks, context_ranks = inputs.parallel.tensor_ranks, inputs.parallel.context_ranks
    replicas = tensor_ranks
    for group in groups:
        for spec in different_specs(group):
            shards = spec.tensor_shards_max if isinstance(spec, AttentionSpec) else None
            is_split = shards is None or (spec.is_context_sharded and context_ranks > 1)
            replicas = gcd(
                replicas, 1 if is_split else max(1, floor_div(tensor_ranks, shards or 1))
            )
    return replicas


def _finest(groups: Sequence[Group], inputs: PlanInputs) -> int:
    """Return the fewest tokens of a block in any group that caches prefixes, or in any group if none does."""
    cacheable = [group for group in groups if group.is_prefix_cacheable] or groups
    return min((group.tokens_per_block for group in cacheable), default=inputs.tokens_per_block)


def _match_units(inputs: PlanInputs, groups: tuple[Group, ...]) -> MatchUnits:
    if groups:
        return match_units(groups, inputs.engine, inputs.parallel.context_ranks)
    return MatchUnits(
        scheduler_block_tokens=inputs.tokens_per_block,
        hash_block_tokens=inputs.tokens_per_block,
        hit_alignment_tokens=inputs.tokens_per_block,
    )


def _check_lower_tiers(inputs: PlanInputs, groups: Sequence[Group], units: MatchUnits) -> None:
    """Refuse lower tiers if blocks are found by their keys and a group's blocks cannot be named by keys."""
    is_keyed = inputs.engine.prefix_caching or inputs.engine.has_connector
    if groups and is_keyed and (inputs.host_bytes or inputs.disk_bytes or inputs.remote_bytes):
        check_groups(
            groups,
            hash_block_tokens=units.hash_block_tokens,
            context_ranks=inputs.parallel.context_ranks,
        )
