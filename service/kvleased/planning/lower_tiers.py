"""Own the slots of host, disk and remote memory: their bytes, how many there are, and where a block lies in one.

cell           = bytes_per_block * blocks_per_slot, for each rank; ranks that keep the same bytes share one
bytes_per_slot = round_up(sum of the cells, slot_multiple_bytes)
host, remote   = floor(bytes / bytes_per_slot)
disk           = floor((bytes - 4096) / (round_up(bytes_per_slot, 4096) + 128)), with a header for each slot

All ranks agree on one geometry, whatever each keeps: a slot is either whole on all ranks or absent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvlease.disk_file import bytes_per_charged_slot
from kvlease.errors import InvalidError, NeverFitsError
from kvlease.geometry import exact_div, floor_div, round_up
from kvlease.layout import Layout
from kvlease.plan import CachePlan, Extent, ParallelInputs, RankPlan
from kvlease.spec import LayerSpec
from kvlease.units import (
    BYTES_MAX,
    BYTES_PER_SECTOR,
    checked_count,
    show_bytes,
)
from kvleased.planning.groups.grouping import Group
from kvleased.planning.limits import check_number

BLOCKS_PER_SLOT_MAX: Final = 2**16
"""The most blocks of one slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGeometry:
    """How one slot is divided between ranks."""

    cell_bytes: tuple[int, ...]
    """Bytes of every rank's cell."""
    cell_offsets_bytes: tuple[int, ...]
    """Where every rank's cell starts in a slot; equal if ranks share one cell."""
    content_bytes: int
    """The sum of the different cells."""
    bytes_per_slot: int

    @property
    def bytes_per_disk_slot(self) -> int:
        """round_up(bytes_per_slot, a sector) + a header."""
        return bytes_per_charged_slot(self.bytes_per_slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRegion:
    """Pages that move together: page b has num_bytes at offset_bytes + b * block_stride_bytes."""

    offset_bytes: int
    block_stride_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionUse:
    """What a layer keeps in a page of a region."""

    region: int
    num_bytes: int
    """Bytes of content, without padding."""


def slot_geometry(
    bytes_per_block: Sequence[int],
    *,
    blocks_per_slot: int,
    slot_multiple_bytes: int,
    is_replicated: bool,
) -> SlotGeometry:
    """Return how a slot is divided between ranks, given the bytes of each rank's blocks.

    Raises:
        InvalidError: there is no block in a slot, or a slot is larger than a region can be.
    """
    _check_slot_inputs(blocks_per_slot, slot_multiple_bytes)
    cells = tuple(num_bytes * blocks_per_slot for num_bytes in bytes_per_block)
    offsets: list[int] = []
    end = 0
    for cell in cells:
        offsets.append(0 if is_replicated else end)
        end = cell if is_replicated else end + cell
    bytes_per_slot = checked_count(
        "bytes_per_slot", round_up(end, slot_multiple_bytes), most=BYTES_MAX
    )
    return SlotGeometry(
        cell_bytes=cells,
        cell_offsets_bytes=tuple(offsets),
        content_bytes=end,
        bytes_per_slot=bytes_per_slot,
    )


def keep_same_bytes(
    layers_by_rank: Sequence[tuple[LayerSpec, ...]], parallel: ParallelInputs
) -> bool:
    """Tell whether all ranks keep the same bytes: tensor ranks only, with the same latent layers of one shard."""
    if parallel.context_ranks > 1 or parallel.pipeline_ranks > 1:
        return False
    first = layers_by_rank[0]
    return (
        1 < len(layers_by_rank) == parallel.tensor_ranks
        and all(layers is first for layers in layers_by_rank)
        and bool(first)
        and all(_is_replicated(layer) for layer in first)
    )


def num_slots(name: str, tier_bytes: int, bytes_per_slot: int, *, others_bytes: int = 0) -> int:
    """Return the slots of a tier: none if it has no memory or nothing to keep, else at least one.

    `others_bytes` are the bytes of the tier that belong to no slot.

    Raises:
        InvalidError: the bytes are out of range, or there are more slots than ids can count.
        NeverFitsError: the bytes hold no slot.
    """
    checked_count(name, tier_bytes, most=BYTES_MAX)
    if not tier_bytes or not bytes_per_slot:
        return 0
    need = bytes_per_slot + others_bytes
    if tier_bytes >= need:
        slots = floor_div(tier_bytes - others_bytes, bytes_per_slot)
        check_number(slots, name, tier_bytes, bytes_per_slot, unit="slots")
        return slots
    message = (
        f"{name} is {tier_bytes} ({show_bytes(tier_bytes)}) but one slot takes {need} bytes ({show_bytes(need)}); give "
        "at least as many, or 0 for no such tier"
    )
    raise NeverFitsError(
        message,
        resource=name,
        rule="slot_does_not_fit",
        need=need,
        available=tier_bytes,
        limit=tier_bytes,
    )


def num_disk_slots(disk_bytes: int, slots: SlotGeometry) -> int:
    """Return the slots of a disk store whose file has at most so many bytes; raise what `num_slots` raises."""
    if not slots.bytes_per_slot:
        return num_slots("disk_bytes", disk_bytes, 0)
    charged = slots.bytes_per_disk_slot
    return num_slots("disk_bytes", disk_bytes, charged, others_bytes=BYTES_PER_SECTOR)


def check_groups(groups: Iterable[Group], *, hash_block_tokens: int, context_ranks: int) -> None:
    """Refuse lower tiers for groups whose blocks are not named by whole keys.

    Raises:
        InvalidError: no group's blocks can be found by prefix, or a block ends within a key's tokens.
    """
    cacheable = [group for group in groups if group.is_prefix_cacheable]
    if not cacheable:
        message = "no group's blocks can be found by prefix, so a lower tier would hold nothing; give it 0 bytes"
        raise InvalidError(message, resource="host_bytes", rule="offload_no_groups")
    for group in cacheable:
        tokens = group.tokens_per_block * (context_ranks if group.is_context_sharded else 1)
        if tokens % hash_block_tokens:
            message = (
                f"a block of layer {group.spec.name!r} covers {tokens} tokens, which is not a multiple of the "
                f"{hash_block_tokens} that one key stands for, so lower tiers cannot name it; keep recurrent states at "
                "block ends (engine.state_mode align), or give match_tokens that divide all blocks"
            )
            raise InvalidError(
                message,
                resource="tokens_per_block",
                rule="offload_block_not_hash_aligned",
                need=hash_block_tokens,
                available=tokens,
            )


def slot_offset_bytes(
    plan: CachePlan, rank: RankPlan, extent: Extent, *, slot: int, block_in_slot: int
) -> int:
    """Return where a tier keeps one piece of one block.

    slot * bytes_per_slot + slot_cell_offset_bytes + block_in_slot * bytes_per_block + slot_offset_bytes
    """
    cell = slot * plan.bytes_per_slot + rank.slot_cell_offset_bytes
    return cell + block_in_slot * rank.bytes_per_block + extent.slot_offset_bytes


def sub_slot_offsets(
    slots: Sequence[int], *, bytes_per_slot: int, bytes_per_block: int, blocks_per_slot: int
) -> tuple[int, ...]:
    """Return where every block of some slots starts: slot * bytes_per_slot + block_in_slot * bytes_per_block."""
    return tuple(
        slot * bytes_per_slot + block * bytes_per_block
        for slot in slots
        for block in range(blocks_per_slot)
    )


def transfer_regions(
    rank: RankPlan, layout: Layout
) -> tuple[tuple[TransferRegion, ...], tuple[tuple[RegionUse, ...], ...]]:
    """Return the regions of pages that an engine's own offloading moves, and what each group's layers keep in them.

    With blocks outermost, the whole block is the only region. Otherwise layers that lie over each other share a region,
    and if heads are outside of blocks, each head is a region of its own.
    """
    num_groups = max((layer.group for layer in rank.layers), default=-1) + 1
    if layout.is_block_outermost:
        block = rank.bytes_per_block
        whole = TransferRegion(offset_bytes=0, block_stride_bytes=block, num_bytes=block)
        return (whole,), ((RegionUse(region=0, num_bytes=block),),) * num_groups
    regions: dict[tuple[int, int], TransferRegion] = {}
    uses: list[list[RegionUse]] = [[] for _ in range(num_groups)]
    for layer in rank.layers:
        heads = 1 if layout.is_block_compact else layer.spec.head_slots
        for head in range(heads):
            offset = layer.offset_bytes + head * layer.head_stride_bytes
            place = (offset, layer.block_stride_bytes)
            page = exact_div(layer.bytes_per_page, heads)
            region = TransferRegion(
                offset_bytes=offset, block_stride_bytes=place[1], num_bytes=page
            )
            regions.setdefault(place, region)
            content = exact_div(layer.spec.content_bytes_per_page, heads)
            index = list(regions).index(place)
            uses[layer.group].append(RegionUse(region=index, num_bytes=content))
    return tuple(regions.values()), tuple(tuple(of_group) for of_group in uses)


def _check_slot_inputs(blocks_per_slot: int, slot_multiple_bytes: int) -> None:
    checked_count("slot_multiple_bytes", slot_multiple_bytes, least=1, most=BYTES_MAX)
    if isinstance(blocks_per_slot, int) and blocks_per_slot < 1:
        message = f"blocks_per_slot is {blocks_per_slot}; a slot must hold at least 1 block"
        raise InvalidError(
            message,
            resource="blocks_per_slot",
            rule="blocks_per_slot_not_positive",
            available=blocks_per_slot,
            need=1,
        )
    checked_count("blocks_per_slot", blocks_per_slot, least=1, most=BLOCKS_PER_SLOT_MAX)


def _is_replicated(layer: LayerSpec) -> bool:
    return layer.is_latent and getattr(layer, "tensor_shards_max", None) == 1
