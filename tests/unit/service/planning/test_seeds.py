"""Five sizing bugs of a known engine, each impossible here, with the figures of their reports."""

import dataclasses

import pytest

from kvlease.errors import InvalidError, NeverFitsError
from kvlease.plan import (
    CachePlan,
    EngineInputs,
    LayerPlacement,
    ParallelInputs,
    PlanInputs,
    RankInputs,
)
from kvlease.spec import MLA, FullAttention, LayerSpec, StateSpace
from kvlease.strides import view_of
from kvlease.tables import kernel_block_ids
from kvleased.planning import plan

GIB = 2**30

COMPRESSED = MLA(
    name="c128",
    tokens_per_block=256,
    tokens_per_state=128,
    head_size=512,
    dtype="uint8",
    quantisation="fp8_per_tensor",
    bytes_per_state_packed=584,
    page_multiple_bytes=576,
)
"""Two states of 584 bytes in a page of 1,728, as DeepSeek V4 has them."""
COMPRESSED_BLOCKS = 30_819

SMALL = FullAttention(name="0", num_kv_heads=2, head_size=64, dtype="float32")
"""A page of 16,384 bytes with 16 tokens."""
ATTENTION = FullAttention(name="attention", num_kv_heads=2, head_size=256, dtype="bfloat16")


def two_small(device_blocks: int, *, null_blocks: int, fit: bool) -> PlanInputs:
    """Return inputs with two equal layers, so many blocks, and requests of 16,384 tokens."""
    return PlanInputs(
        layers=(SMALL, dataclasses.replace(SMALL, name="1")),
        tokens_per_block=16,
        device_blocks=device_blocks,
        null_blocks=null_blocks,
        longest_request_tokens=16_384,
        fit_longest_request=fit,
    )


def sparse_layers(num_layers: int) -> tuple[LayerSpec, ...]:
    """Return layers like DeepSeek V3.2's: latent attention of 656 bytes a token, each with an indexer of 132."""
    latent = MLA(
        name="",
        tokens_per_block=64,
        head_size=576,
        dtype="uint8",
        bytes_per_state_packed=656,
        packed_format="fp8_ds_mla",
    )
    indexer = MLA(name="", tokens_per_block=64, head_size=132, dtype="uint8", role="indexer")
    return tuple(
        dataclasses.replace(spec, name=f"{index}.{spec.role}")
        for index in range(num_layers)
        for spec in (latent, indexer)
    )


def compressed_alone() -> tuple[LayerPlacement, CachePlan]:
    """Return the compressed layer's place in a pool of its own, and the pool's plan."""
    made = plan(
        PlanInputs(
            layers=(COMPRESSED,),
            tokens_per_block=256,
            layout="LBNHC",
            device_blocks=COMPRESSED_BLOCKS,
        )
    )
    return made.layers[0], made


def test_compressed_view_needs_what_its_states_take() -> None:
    """A view of 30,819 compressed blocks needs 53,254,672 bytes of the region's 53,255,232."""
    layer, made = compressed_alone()

    view = view_of(layer, num_blocks=made.num_blocks, region_bytes=made.device_bytes)

    assert made.device_bytes == 53_255_232
    assert view.end_bytes == 53_254_672
    assert view.shape[0] == COMPRESSED_BLOCKS


def test_blocks_counted_in_tokens_are_refused_before_a_view_is_made() -> None:
    """Kernel blocks counted in tokens and not states would need 6,816,669,136 bytes, and are refused."""
    layer, made = compressed_alone()

    with pytest.raises(InvalidError) as refusal:
        view_of(layer, num_blocks=COMPRESSED_BLOCKS * 128, region_bytes=made.device_bytes)

    assert refusal.value.rule == "storage_out_of_bounds"
    assert (refusal.value.need, refusal.value.available) == (6_816_669_136, 53_255_232)


@pytest.mark.parametrize("null_blocks", [0, 1])
def test_given_blocks_rule_admission(null_blocks: int) -> None:
    """With 32 blocks of 16 tokens, requests of 16,384 tokens are refused at plan time, however large the memory."""
    with pytest.raises(NeverFitsError) as refusal:
        plan(two_small(32, null_blocks=null_blocks, fit=False))

    assert refusal.value.rule == "not_enough_memory"
    assert (refusal.value.need, refusal.value.available) == (1024, 32 - null_blocks)
    assert refusal.value.limit == 512 - 16 * null_blocks


@pytest.mark.parametrize(
    ("device_blocks", "null_blocks", "fits"),
    [
        pytest.param(32, 0, 512, id="all usable"),
        pytest.param(32, 1, 496, id="one never granted"),
        pytest.param(33, 1, 512, id="one more"),
    ],
)
def test_given_blocks_rule_the_longest_request(
    device_blocks: int, null_blocks: int, fits: int
) -> None:
    """With 32 given blocks of 16 tokens, the longest request that is fitted has 512 tokens at most."""
    made = plan(two_small(device_blocks, null_blocks=null_blocks, fit=True))

    assert made.longest_request_tokens == fits


def test_host_slots_of_unequal_layers_are_not_counted_twice() -> None:
    """If layers' pages differ, a host slot takes the sum of one block's pages, once."""
    made = plan(
        PlanInputs(
            layers=sparse_layers(61),
            tokens_per_block=64,
            device_bytes=20 * GIB,
            host_bytes=100 * GIB,
        )
    )

    assert made.bytes_per_block == 61 * (64 * 656 + 64 * 132) == 3_076_352
    assert made.bytes_per_slot == made.bytes_per_block
    assert made.num_slots == 100 * GIB // 3_076_352


def test_host_slots_hold_every_rank_that_keeps_its_own_bytes() -> None:
    """100 GiB hold 5,968 slots of four ranks with 4,497,408 bytes each, or 23,874 if all four keep the same."""
    latent = MLA(name="", tokens_per_block=64, head_size=576, dtype="bfloat16")
    layers = tuple(dataclasses.replace(latent, name=str(index)) for index in range(61))
    inputs = PlanInputs(
        layers=layers,
        tokens_per_block=64,
        device_bytes=20 * GIB,
        host_bytes=100 * GIB,
        slot_multiple_bytes=4096,
        parallel=ParallelInputs(tensor_ranks=4),
    )

    same = plan(inputs)
    split = plan(
        dataclasses.replace(inputs, parallel=ParallelInputs(tensor_ranks=4, context_ranks=4))
    )

    assert same.bytes_per_block == split.bytes_per_block == 4_497_408
    assert (same.num_slots, split.num_slots) == (23_874, 5_968)


def test_ranks_with_uneven_layers_agree_on_one_geometry() -> None:
    """Stages of 31 and 30 layers have the same number of slots, with cells that do not overlap, within the budget."""
    layers = tuple(
        FullAttention(name=str(index), num_kv_heads=8, head_size=128, dtype="bfloat16")
        for index in range(61)
    )
    made = plan(
        PlanInputs(
            layers=layers,
            tokens_per_block=16,
            host_bytes=16 * GIB,
            parallel=ParallelInputs(pipeline_ranks=2),
            ranks=(
                RankInputs(device_bytes=10 * GIB, layers=layers[:31]),
                RankInputs(device_bytes=10 * GIB, layers=layers[31:]),
            ),
        )
    )

    first, second = made.ranks
    assert second.slot_cell_offset_bytes == first.slot_cell_offset_bytes + first.slot_cell_bytes
    assert made.bytes_per_slot >= first.slot_cell_bytes + second.slot_cell_bytes
    assert made.num_slots * made.bytes_per_slot <= 16 * GIB


def test_kernel_blocks_expand_to_all_of_a_block() -> None:
    """A block of 128 tokens that a kernel reads 64 at a time is kernel blocks 2b and 2b + 1."""
    layer = dataclasses.replace(ATTENTION, backend="FLASHINFER")
    made = plan(PlanInputs(layers=(layer,), tokens_per_block=128, layout="LBNHC", device_blocks=10))
    group = made.groups[0]

    ids = kernel_block_ids([3, 7], group.kernel_blocks_per_block, group.kernel_block_stride)
    view = view_of(
        made.layers[0],
        num_blocks=made.num_blocks,
        region_bytes=made.device_bytes,
        kernel_tokens=group.kernel_tokens_per_block,
    )

    assert (group.kernel_tokens_per_block, group.kernel_blocks_per_block) == (64, 2)
    assert ids.tolist() == [6, 7, 14, 15]
    assert view.shape[0] == 20


def test_number_of_blocks_is_the_plans_whatever_the_pages() -> None:
    """Views of layers with different pages have the plan's number of blocks, and none derives it from a shape."""
    made = plan(
        PlanInputs(layers=sparse_layers(4), tokens_per_block=64, layout="LBNHC", device_bytes=2**25)
    )

    views = [
        view_of(layer, num_blocks=made.num_blocks, region_bytes=made.device_bytes)
        for layer in made.layers
    ]

    assert {layer.bytes_per_page for layer in made.layers} == {41_984, 8_448}
    assert {view.shape[0] for view in views} == {made.num_blocks}


def test_blocks_that_no_key_names_are_refused_with_both_sizes_and_the_remedy() -> None:
    """A tier for blocks of 544 tokens, with keys that stand for 557,056, is refused at plan time with a remedy."""
    state = StateSpace(
        name="state",
        tokens_per_block=32_768,
        bytes_per_page_padded=1_114_112,
        shapes=((3, 8192), (32, 128, 128)),
        dtypes=("bfloat16", "bfloat16"),
    )
    inputs = PlanInputs(
        layers=(dataclasses.replace(ATTENTION, tokens_per_block=544), state),
        tokens_per_block=544,
        layout="LBNHC",
        device_bytes=4 * GIB,
        host_bytes=4 * GIB,
        engine=EngineInputs(state_mode="none"),
    )

    with pytest.raises(InvalidError) as refusal:
        plan(inputs)

    assert refusal.value.rule == "offload_block_not_hash_aligned"
    assert (refusal.value.need, refusal.value.available) == (557_056, 544)
    assert all(part in refusal.value.message for part in ("544", "557056", "align"))
