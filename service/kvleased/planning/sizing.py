"""Own how many blocks the pool of every rank has, and the longest request that they admit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlease.errors import NeverFitsError
from kvlease.geometry import floor_div
from kvlease.layout import Layout
from kvlease.plan import PlanInputs
from kvlease.spec import LayerSpec
from kvlease.units import BYTES_MAX, TOKENS_MAX, checked_count, show_bytes
from kvleased.planning.capacity import Capacity, RankMemory, fewest_blocks
from kvleased.planning.demand import Demand
from kvleased.planning.groups.grouping import Group
from kvleased.planning.layers import RankLayers
from kvleased.planning.limits import check_number
from kvleased.planning.pool import bytes_per_block
from kvleased.planning.rows import covered_tokens, row_too_long


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPart:
    """What the layers of a rank take of the pool; ranks with the same layers share one PoolPart."""

    layers: tuple[LayerSpec, ...]
    groups: tuple[Group, ...]
    bytes_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools of all ranks, once their size is known."""

    layout: Layout
    groups: tuple[Group, ...]
    parts: tuple[PoolPart, ...]
    """One for each rank."""
    ranks: tuple[RankLayers, ...]
    own_blocks: tuple[int, ...]
    """Blocks that each rank would have by itself."""
    num_blocks: int
    longest_request_tokens: int
    blocks_by_group: tuple[int, ...]

    @property
    def different_parts(self) -> tuple[PoolPart, ...]:
        """The different parts, each once."""
        return tuple({id(part): part for part in self.parts}.values())


def sized(
    inputs: PlanInputs, layout: Layout, groups: tuple[Group, ...], ranks: Sequence[RankLayers]
) -> Pools:
    """Return the pools with as many blocks as every rank has room for; if no rank keeps anything, with one block.

    Raises:
        InvalidError: a block or a pool is larger than can be counted, or the longest request's row is too long.
        NeverFitsError: a rank has no usable block, or the longest request does not fit.
    """
    parts = _parts(inputs, layout, groups, ranks)
    memories = [
        _memory(inputs, rank, part, ranks[rank].device_bytes)
        for rank, part in enumerate(parts)
        if part.layers
    ]
    if not memories:
        # Blocks of no bytes: one, or as many as are never granted.
        num_blocks = max(1, inputs.null_blocks)
        return Pools(
            layout=layout,
            groups=(),
            ranks=tuple(ranks),
            parts=parts,
            own_blocks=(num_blocks,) * len(parts),
            num_blocks=num_blocks,
            longest_request_tokens=inputs.longest_request_tokens or TOKENS_MAX,
            blocks_by_group=(),
        )
    capacity = Capacity(
        specs_by_group=tuple(different_specs(group) for group in groups),
        demand=demand_of(inputs, 0),
        memory=fewest_blocks(memories),
        null_blocks=inputs.null_blocks,
    )
    longest = _longest_request(inputs, capacity)
    memory, num_blocks = capacity.memory, capacity.memory.num_blocks
    # Only a number of blocks that comes from bytes can be too large here: device_blocks are checked earlier.
    check_number(
        num_blocks, "device_bytes", memory.device_bytes, memory.bytes_per_block, unit="blocks"
    )
    by_rank = {memory.rank: memory.num_blocks for memory in memories}
    return Pools(
        layout=layout,
        groups=groups,
        ranks=tuple(ranks),
        parts=parts,
        own_blocks=tuple(by_rank.get(rank, num_blocks) for rank in range(len(parts))),
        num_blocks=num_blocks,
        longest_request_tokens=longest,
        blocks_by_group=capacity.request_blocks_by_group(longest),
    )


def demand_of(inputs: PlanInputs, num_tokens: int) -> Demand:
    """Return what a request of so many tokens demands."""
    engine = inputs.engine
    return Demand(
        num_tokens=num_tokens,
        in_flight_tokens=engine.tokens_per_step * engine.steps_in_flight,
        context_ranks=inputs.parallel.context_ranks,
        encoder_tokens=engine.encoder_tokens_max,
        state_mode=engine.state_mode,
    )


def different_specs(group: Group) -> tuple[LayerSpec, ...]:
    """Return the specs of a group's layers, each once."""
    return (group.spec,) if group.has_equal_layers else tuple(dict.fromkeys(group.layers))


def _parts(
    inputs: PlanInputs, layout: Layout, groups: tuple[Group, ...], ranks: Sequence[RankLayers]
) -> tuple[PoolPart, ...]:
    known: dict[int, PoolPart] = {}
    for rank in ranks:
        if id(rank.layers) in known:
            continue
        names = {layer.name for layer in rank.layers}
        on_rank = tuple(group.on(names) for group in groups)
        block = bytes_per_block(on_rank, layout, inputs.block_multiple_bytes)
        checked_count("bytes_per_block", block, most=BYTES_MAX)
        known[id(rank.layers)] = PoolPart(layers=rank.layers, groups=on_rank, bytes_per_block=block)
    return tuple(known[id(rank.layers)] for rank in ranks)


def _memory(inputs: PlanInputs, rank: int, part: PoolPart, device_bytes: int) -> RankMemory:
    """Return the memory that a rank has for its blocks; if `device_blocks` is given, the memory that they take."""
    if not inputs.device_blocks:
        return RankMemory(
            rank=rank, bytes_per_block=part.bytes_per_block, device_bytes=device_bytes
        )
    need = inputs.device_blocks * part.bytes_per_block
    if device_bytes and need > device_bytes:
        message = (
            f"device_blocks is {inputs.device_blocks}, which need {need} bytes ({show_bytes(need)}) on rank {rank}, "
            f"but the rank has {device_bytes} ({show_bytes(device_bytes)}), enough for "
            f"{floor_div(device_bytes, part.bytes_per_block)} blocks"
        )
        raise NeverFitsError(
            message,
            resource="device_blocks",
            rule="device_blocks_do_not_fit",
            need=need,
            available=device_bytes,
            limit=floor_div(device_bytes, part.bytes_per_block),
        )
    most = floor_div(BYTES_MAX, part.bytes_per_block)
    checked_count("device_blocks", inputs.device_blocks, most=most)
    return RankMemory(rank=rank, bytes_per_block=part.bytes_per_block, device_bytes=need)


def _longest_request(inputs: PlanInputs, capacity: Capacity) -> int:
    """Return the tokens of the longest request for which there are blocks, and places in a row of the block table."""
    asked = inputs.longest_request_tokens
    if inputs.fit_longest_request:
        longest = capacity.fit_request(asked or TOKENS_MAX)
        capacity.check_memory()
    else:
        capacity.check_memory()
        longest = asked or capacity.fit_request(TOKENS_MAX)
    demand = replace(capacity.demand, num_tokens=longest)
    covered = covered_tokens(capacity.specs_by_group, demand, longest)
    # A refusal for lack of blocks names the longest request for which there are enough: it must have places, too.
    if capacity.request_blocks(covered) > capacity.usable_blocks:
        capacity.check_request(longest)
    is_asked = asked and not inputs.fit_longest_request
    if not covered or (is_asked and covered < asked):
        raise row_too_long(capacity.specs_by_group, demand)
    return covered
