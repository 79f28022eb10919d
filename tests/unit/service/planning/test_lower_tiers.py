"""Laws of lower tiers: slots are whole on all ranks, cells are apart unless they are equal, and tiers are filled."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError, NeverFitsError
from kvlease.plan import CachePlan, EngineInputs, ParallelInputs, PlanInputs, RankInputs
from kvlease.spec import MLA, FullAttention, LayerSpec, RingState, StateSpace
from kvleased.movers.disk.cells import StoreShape
from kvleased.planning import plan
from kvleased.planning.groups.grouping import Group
from kvleased.planning.lower_tiers import (
    RegionUse,
    TransferRegion,
    check_groups,
    keep_same_bytes,
    num_disk_slots,
    num_slots,
    slot_geometry,
    slot_offset_bytes,
    sub_slot_offsets,
    transfer_regions,
)

FULL = FullAttention(name="f", tokens_per_block=16, num_kv_heads=2, head_size=8, dtype="float16")
LATENT = MLA(name="m", tokens_per_block=16, head_size=32, dtype="bfloat16")
RING = RingState(name="r", tokens_per_block=16, num_kv_heads=1, head_size=8, dtype="float32")
STATE = StateSpace(
    name="s", tokens_per_block=16, shapes=((100,),), dtypes=("float32",), bytes_per_page_padded=1024
)


def planned(*layers: LayerSpec, **changes: object) -> CachePlan:
    """Return a plan of ten blocks."""
    fields = {"layers": layers, "tokens_per_block": 16, "device_blocks": 10} | changes
    return plan(PlanInputs(**fields))  # type: ignore[arg-type]  # fields of several types


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    st.integers(1, 8),
    st.sampled_from([1, 64, 4096]),
)
def test_cells_lie_apart_and_fill_the_slot(
    blocks: list[int], blocks_per_slot: int, multiple: int
) -> None:
    """Each rank's cell follows the previous one, whatever each keeps, and only rounding is left over."""
    slots = slot_geometry(
        blocks,
        blocks_per_slot=blocks_per_slot,
        slot_multiple_bytes=multiple,
        is_replicated=False,
    )

    end = 0
    for offset, cell, block in zip(slots.cell_offsets_bytes, slots.cell_bytes, blocks, strict=True):
        assert (offset, cell) == (end, block * blocks_per_slot)
        end += cell
    assert slots.content_bytes == end <= slots.bytes_per_slot < end + multiple
    assert slots.bytes_per_slot % multiple == 0


@given(st.integers(1, 20_000), st.integers(1, 1 << 24))
def test_disk_slots_fill_the_file_that_a_store_makes(bytes_per_slot: int, disk_bytes: int) -> None:
    """A plan has as many slots as the store's file, headers included, with less than two slots left over."""
    slots = slot_geometry(
        (bytes_per_slot,), blocks_per_slot=1, slot_multiple_bytes=1, is_replicated=False
    )
    try:
        count = num_disk_slots(disk_bytes, slots)
    except NeverFitsError as error:
        assert error.need == slots.bytes_per_disk_slot + 4096 > disk_bytes
        return

    shape = StoreShape(layout=bytes(32), bytes_per_slot=bytes_per_slot, num_slots=count)
    assert shape.file_bytes <= disk_bytes
    assert dataclasses.replace(shape, num_slots=count + 2).file_bytes > disk_bytes


def test_ranks_that_keep_the_same_share_one_cell() -> None:
    """Ranks that keep the same bytes share one cell."""
    slots = slot_geometry(
        (1000, 1000), blocks_per_slot=2, slot_multiple_bytes=64, is_replicated=True
    )

    assert slots.cell_offsets_bytes == (0, 0)
    assert (slots.content_bytes, slots.bytes_per_slot) == (2000, 2048)


@pytest.mark.parametrize(
    ("layers", "parallel", "num_ranks", "same"),
    [
        pytest.param((LATENT,), ParallelInputs(tensor_ranks=2), 2, True, id="latent"),
        pytest.param((LATENT,), ParallelInputs(), 1, False, id="one rank"),
        pytest.param((LATENT, FULL), ParallelInputs(tensor_ranks=2), 2, False, id="heads"),
        pytest.param((), ParallelInputs(tensor_ranks=2), 2, False, id="nothing"),
        pytest.param(
            (dataclasses.replace(LATENT, tensor_shards_max=2),),
            ParallelInputs(tensor_ranks=2),
            2,
            False,
            id="two shards",
        ),
        pytest.param(
            (LATENT,), ParallelInputs(tensor_ranks=2, context_ranks=2), 2, False, id="context"
        ),
        pytest.param(
            (LATENT,), ParallelInputs(tensor_ranks=2, pipeline_ranks=2), 4, False, id="stages"
        ),
        pytest.param((LATENT,), ParallelInputs(tensor_ranks=2), 3, False, id="more than tensor"),
    ],
)
def test_only_latent_layers_on_tensor_ranks_are_the_same_bytes(
    layers: tuple[LayerSpec, ...], parallel: ParallelInputs, num_ranks: int, same: bool
) -> None:
    """Ranks keep equal bytes if all layers are latent and not split, and only heads are split among ranks."""
    assert keep_same_bytes([layers] * num_ranks, parallel) is same


def test_ranks_with_layers_of_their_own_are_not_the_same() -> None:
    """Layers with equal specs in two stages are different bytes."""
    other = dataclasses.replace(LATENT, name="n")

    assert not keep_same_bytes([(LATENT,), (other,)], ParallelInputs(tensor_ranks=2))


@pytest.mark.parametrize(
    ("tier_bytes", "bytes_per_slot", "slots"),
    [
        pytest.param(0, 64, 0, id="no tier"),
        pytest.param(100, 0, 0, id="nothing to keep"),
        pytest.param(64, 64, 1, id="one"),
        pytest.param(191, 64, 2, id="not quite three"),
    ],
)
def test_tier_is_filled_with_whole_slots(tier_bytes: int, bytes_per_slot: int, slots: int) -> None:
    """A tier has as many slots as fit into it whole."""
    assert num_slots("host_bytes", tier_bytes, bytes_per_slot) == slots


def test_tier_below_one_slot_is_refused() -> None:
    """A tier too small for one slot is refused with a slot's bytes."""
    with pytest.raises(NeverFitsError) as refusal:
        num_slots("disk_bytes", 63, 64)

    assert (refusal.value.rule, refusal.value.resource) == ("slot_does_not_fit", "disk_bytes")
    assert (refusal.value.need, refusal.value.available) == (64, 63)


def test_slots_are_no_more_than_their_ids_count() -> None:
    """Slot ids are int32, as block ids are; the refusal has the bytes that were given and the most that may be."""
    with pytest.raises(InvalidError) as refusal:
        num_slots("remote_bytes", 2**40, 64)

    limit = (2**31 - 1) * 64
    assert refusal.value.message == (
        "remote_bytes is 1099511627776 (1.00 TiB), enough for 17179869184 slots of 64 bytes; the limit is 2147483647, "
        f"which take {limit} bytes (127.99 GiB); lower it, or raise blocks_per_slot"
    )
    told = (refusal.value.resource, refusal.value.need, refusal.value.limit)
    assert told == ("remote_bytes", 2**40, limit)
    assert num_slots("remote_bytes", limit, 64) == 2**31 - 1


@pytest.mark.parametrize(
    ("changes", "resource"),
    [
        pytest.param({"blocks_per_slot": 0}, "blocks_per_slot", id="empty slots"),
        pytest.param({"blocks_per_slot": 2**17}, "blocks_per_slot", id="too many blocks"),
        pytest.param({"blocks_per_slot": "1"}, "blocks_per_slot", id="text"),
        pytest.param({"slot_multiple_bytes": 0}, "slot_multiple_bytes", id="no multiple"),
        pytest.param({"bytes_per_block": (2**53 - 1,)}, "bytes_per_slot", id="too large"),
    ],
)
def test_malformed_slots_are_refused(changes: dict[str, object], resource: str) -> None:
    """Malformed slots are refused with the field at fault."""
    fields = {
        "bytes_per_block": (64,),
        "blocks_per_slot": 1,
        "slot_multiple_bytes": 64,
        "is_replicated": False,
    } | changes

    with pytest.raises(InvalidError) as refusal:
        slot_geometry(fields.pop("bytes_per_block"), **fields)  # type: ignore[arg-type]  # wrong on purpose

    assert refusal.value.resource == resource


def test_groups_without_a_key_are_refused() -> None:
    """If no group's blocks have keys, a tier is refused, as nothing in it would be found."""
    with pytest.raises(InvalidError) as refusal:
        check_groups((Group(layers=(RING,)),), hash_block_tokens=16, context_ranks=1)

    assert refusal.value.rule == "offload_no_groups"


def test_blocks_are_whole_keys_over_all_context_ranks() -> None:
    """A block's tokens over all context ranks must be a multiple of a key's."""
    groups = (Group(layers=(FULL,)), Group(layers=(STATE,)), Group(layers=(RING,)))

    check_groups(groups[:1], hash_block_tokens=32, context_ranks=2)
    check_groups(groups, hash_block_tokens=8, context_ranks=1)
    with pytest.raises(InvalidError) as refusal:
        check_groups(groups, hash_block_tokens=32, context_ranks=2)

    assert refusal.value.rule == "offload_block_not_hash_aligned"
    assert (refusal.value.need, refusal.value.available) == (32, 16)


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC", "LHBNC"])
def test_slots_of_uneven_stages_hold_every_byte_once(layout: str) -> None:
    """Pieces of all blocks of all ranks tile the slots, however many layers each rank keeps."""
    stages = tuple(
        RankInputs(layers=tuple(dataclasses.replace(FULL, name=f"{stage}.{i}") for i in range(n)))
        for stage, n in enumerate((3, 1))
    )
    made = planned(ranks=stages, layout=layout, blocks_per_slot=2, host_bytes=2**20)

    pieces = sorted(
        (
            slot_offset_bytes(made, rank, extent, slot=slot, block_in_slot=block),
            extent.num_bytes,
        )
        for rank in made.ranks
        for extent in rank.extents
        for slot in (0, 1)
        for block in (0, 1)
    )
    end = 0
    for offset, num_bytes in pieces:
        assert offset == end
        end += num_bytes
    assert end == 2 * made.bytes_per_slot


def test_blocks_of_slots_follow_each_other() -> None:
    """Block j of slot s starts at s slots and j blocks."""
    assert sub_slot_offsets((2, 0), bytes_per_slot=128, bytes_per_block=32, blocks_per_slot=3) == (
        256,
        288,
        320,
        0,
        32,
        64,
    )


def test_whole_block_is_the_region_where_blocks_are_outermost() -> None:
    """With blocks outermost, one region has all of a block, recurrent states included."""
    made = planned(FULL, STATE, layout="BLHNC")

    regions, uses = transfer_regions(made.ranks[0], made.layout)

    assert regions == (TransferRegion(offset_bytes=0, block_stride_bytes=1024, num_bytes=1024),)
    assert uses == ((RegionUse(region=0, num_bytes=1024),),) * 2


def test_layers_over_each_other_are_one_region() -> None:
    """Layers of two groups in one place share a region, and each uses its content without padding."""
    made = planned(FULL, STATE, layout="LBHNC", engine=EngineInputs(state_mode="align"))

    regions, uses = transfer_regions(made.ranks[0], made.layout)

    assert regions == (TransferRegion(offset_bytes=0, block_stride_bytes=1024, num_bytes=1024),)
    assert uses == ((RegionUse(region=0, num_bytes=1024),), (RegionUse(region=0, num_bytes=400),))


def test_layers_with_padded_strides_are_regions_of_their_own() -> None:
    """Layers with padding between their blocks are separate regions, and each is transferred."""
    spaced = dataclasses.replace(FULL, block_stride_multiple_bytes=1536)
    made = planned(spaced, dataclasses.replace(spaced, name="g"), layout="LBHNC")

    regions, _ = transfer_regions(made.ranks[0], made.layout)

    assert [(r.offset_bytes, r.block_stride_bytes, r.num_bytes) for r in regions] == [
        (0, 1536, 1024),
        (15360, 1536, 1024),
    ]


def test_every_head_is_a_region_where_heads_are_outside_of_blocks() -> None:
    """With heads outside of blocks, a page of two heads is two regions."""
    made = planned(FULL, layout="LHBNC")

    regions, uses = transfer_regions(made.ranks[0], made.layout)

    assert [(r.offset_bytes, r.block_stride_bytes, r.num_bytes) for r in regions] == [
        (0, 512, 512),
        (5120, 512, 512),
    ]
    assert uses == ((RegionUse(region=0, num_bytes=512), RegionUse(region=1, num_bytes=512)),)


def test_rank_without_layers_has_no_regions_where_layers_are_outermost() -> None:
    """With layers outermost, a rank without layers has no regions."""
    made = planned(ranks=(RankInputs(keeps_nothing=True),), layout="LBHNC")

    assert transfer_regions(made.ranks[0], made.layout) == ((), ())
