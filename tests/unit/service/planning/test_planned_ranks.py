"""Laws of plans for several ranks, groups and tiers: what each keeps, and what all of them agree on."""

import dataclasses

import pytest

from kvlease.errors import InvalidError
from kvlease.plan import (
    BackendInputs,
    EngineInputs,
    ParallelInputs,
    RankInputs,
)
from kvlease.spec import MLA, LayerSpec, SlidingWindow, StateSpace
from kvlease.units import TOKENS_MAX
from kvleased.planning import plan, specs_of
from tests.unit.service.planning.advice.asked import LAYER, inputs

STATE = StateSpace(name="s", shapes=((3, 16), (4, 8, 8)), dtypes=("float16", "float32"))


LATENT = MLA(name="m", head_size=64, dtype="bfloat16")


TWO_TENSOR_RANKS = ParallelInputs(tensor_ranks=2)


def test_ranks_that_are_not_given_are_equal() -> None:
    """Without a list of ranks there are as many as share the heads, all alike."""
    made = plan(inputs(parallel=TWO_TENSOR_RANKS))

    assert [rank.rank for rank in made.ranks] == [0, 1]
    assert made.ranks[0].layers == made.ranks[1].layers
    assert made.device_bytes == 2 * 40960
    assert made.device_bytes_per_block == 2 * made.bytes_per_block


def test_rank_with_the_fewest_blocks_decides_for_all() -> None:
    """All ranks have as many blocks as the rank with the fewest, whatever memory they have."""
    ranks = (RankInputs(device_bytes=40960), RankInputs(device_bytes=20480))

    made = plan(inputs(ranks=ranks, layout="LBHNC"))

    assert made.num_blocks == 5
    assert [rank.device_bytes for rank in made.ranks] == [20480, 20480]
    assert [layer.block_stride_bytes for layer in made.layers] == [4096]


def test_stages_keep_their_layers_and_all_groups() -> None:
    """Groups are made over all ranks; a rank has its own layers of each group, in model order, or none."""
    other = dataclasses.replace(LAYER, name="1")
    window = SlidingWindow(
        name="w", num_kv_heads=2, head_size=32, dtype="float16", window_tokens=64
    )
    ranks = (
        RankInputs(layers=(LAYER, window)),
        RankInputs(layers=(other, dataclasses.replace(window, name="v"))),
        RankInputs(keeps_nothing=True, device_bytes=0),
    )

    made = plan(inputs(layers=(), ranks=ranks, layout="LBNHC"))

    assert [group.layer_names for group in made.groups] == [("0", "1"), ("w", "v")]
    names = [[layer.name for layer in rank.layers] for rank in made.ranks]
    assert names == [["0", "w"], ["1", "v"], []]
    assert [rank.bytes_per_block for rank in made.ranks] == [4096, 4096, 0]
    assert made.num_blocks == 10


def test_engine_that_keeps_nothing_has_one_block_of_nothing() -> None:
    """Without any layer there are no groups and no bytes, and no memory is needed."""
    made = plan(inputs(layers=(), device_bytes=0, ranks=(RankInputs(keeps_nothing=True),)))

    assert (made.num_blocks, made.device_bytes, made.groups, made.layers) == (1, 0, (), ())
    assert made.longest_request_tokens == TOKENS_MAX
    assert made.num_slots == 0


@pytest.mark.parametrize(("null_blocks", "num_blocks"), [(0, 1), (1, 1), (65, 65)])
def test_engine_that_keeps_nothing_has_the_blocks_that_are_never_granted(
    null_blocks: int, num_blocks: int
) -> None:
    """Without bytes there are at least as many blocks as are never granted, so no number is negative."""
    nothing = inputs(layers=(), device_bytes=0, ranks=(RankInputs(keeps_nothing=True),))
    made = plan(dataclasses.replace(nothing, null_blocks=null_blocks))

    assert (made.num_blocks, made.null_blocks) == (num_blocks, null_blocks)
    assert (made.usable_blocks, made.capacity_tokens) in [(0, 0), (1, TOKENS_MAX)]
    assert all(waste.num_bytes >= 0 for waste in made.waste)


def test_layer_that_two_ranks_keep_differently_is_refused() -> None:
    """A layer that two ranks keep differently is refused with both pages."""
    wider = dataclasses.replace(LAYER, num_kv_heads=4)

    with pytest.raises(InvalidError) as refusal:
        plan(inputs(ranks=(RankInputs(), RankInputs(layers=(wider,)))))

    assert refusal.value.rule == "layer_spec_differs_across_workers"
    assert (refusal.value.need, refusal.value.available) == (4096, 8192)


@pytest.mark.parametrize(
    ("layers", "needs_scrub"),
    [
        pytest.param((LAYER,), False, id="one type"),
        pytest.param((LAYER, STATE), True, id="a state"),
        pytest.param(
            (LAYER, dataclasses.replace(LAYER, name="1", dtype="bfloat16")), True, id="two types"
        ),
    ],
)
def test_blocks_are_scrubbed_where_bytes_change_their_meaning(
    layers: tuple[LayerSpec, ...], needs_scrub: bool
) -> None:
    """Granted blocks are zeroed if their old bytes could be read as another type."""
    assert plan(inputs(layers=layers)).ranks[0].needs_scrub is needs_scrub


@pytest.mark.parametrize(
    ("layers", "tensor_ranks", "context_ranks", "replicas"),
    [
        pytest.param((LATENT,), 4, 1, 4, id="latent"),
        pytest.param((LATENT,), 4, 2, 1, id="latent, tokens shared"),
        pytest.param((LAYER,), 4, 1, 1, id="heads split"),
        pytest.param(
            (dataclasses.replace(LAYER, tensor_shards_max=2),), 8, 1, 4, id="two shards of eight"
        ),
        pytest.param((dataclasses.replace(LAYER, tensor_shards_max=8),), 4, 1, 1, id="few ranks"),
    ],
)
def test_replicas_are_the_ranks_beyond_the_shards(
    layers: tuple[LayerSpec, ...], tensor_ranks: int, context_ranks: int, replicas: int
) -> None:
    """Ranks beyond the shards, which have no heads or tokens of their own, keep copies."""
    parallel = ParallelInputs(tensor_ranks=tensor_ranks, context_ranks=context_ranks)

    assert plan(inputs(layers=layers, parallel=parallel)).tensor_replicas == replicas


def test_group_tells_how_kernels_count_its_blocks() -> None:
    """A block of 64 tokens is two blocks to a kernel that reads 16 and 32, if blocks lie without gaps."""
    layer = dataclasses.replace(LAYER, backend="mine")
    backends = (BackendInputs(name="mine", exact_tokens=(16, 32)),)

    made = plan(inputs(layers=(layer,), tokens_per_block=64, layout="LBHNC", backends=backends))

    group = made.groups[0]
    assert (group.kernel_tokens_per_block, group.kernel_blocks_per_block) == (32, 2)
    assert group.kernel_block_stride == 2


def test_finest_cacheable_group_gives_the_plans_block() -> None:
    """The plan's tokens per block are the fewest of all groups with blocks that have keys."""
    window = SlidingWindow(
        name="w",
        num_kv_heads=4,
        head_size=32,
        dtype="float16",
        window_tokens=64,
        tokens_per_block=8,
    )

    made = plan(inputs(layers=(LAYER, window)))

    assert [group.tokens_per_block for group in made.groups] == [16, 8]
    assert made.tokens_per_block == 8


def test_specs_are_those_of_all_ranks_with_nothing_left_open() -> None:
    """Specs list each layer once, in order, with the plan's block for layers that gave none."""
    specs = specs_of(inputs(ranks=(RankInputs(), RankInputs(layers=(STATE,)))))

    assert [(spec.name, spec.tokens_per_block) for spec in specs] == [("0", 16), ("s", 16)]


def test_lower_tiers_count_slots_of_all_ranks() -> None:
    """Host and remote slots have every rank's block; a disk slot has one more sector for its header."""
    made = plan(
        inputs(
            parallel=TWO_TENSOR_RANKS,
            host_bytes=10 * 8192,
            remote_bytes=8192,
            disk_bytes=2 * (8192 + 4096),
        )
    )

    assert (made.bytes_per_slot, made.num_slots) == (8192, 10)
    assert (made.num_remote_slots, made.num_disk_slots) == (1, 2)
    assert [rank.slot_cell_offset_bytes for rank in made.ranks] == [0, 4096]


def test_lower_tier_of_blocks_without_keys_is_refused() -> None:
    """A state that is kept at no block's end has no key, so a lower tier for it is refused."""
    long_state = dataclasses.replace(STATE, tokens_per_block=4096)
    wanted = inputs(
        layers=(dataclasses.replace(LAYER, bytes_per_page_padded=8192), long_state),
        host_bytes=2**20,
        device_bytes=2**20,
    )

    with pytest.raises(InvalidError) as refusal:
        plan(wanted)

    assert refusal.value.rule == "offload_block_not_hash_aligned"
    unkeyed = dataclasses.replace(wanted, engine=EngineInputs(prefix_caching=False))
    assert plan(unkeyed).num_slots > 0
