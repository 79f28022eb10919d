"""Laws of plans over generated models, memories, layouts and ranks; every refusal among them names its reason."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import InvalidError, KVLeaseError, NeverFitsError
from kvlease.layout import Layout
from kvlease.plan import CachePlan, EngineInputs, ParallelInputs, PlanInputs, RankInputs
from kvlease.spec import (
    MLA,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LayerSpec,
    RingState,
    SlidingWindow,
    SlidingWindowMLA,
    StateSpace,
)
from kvlease.strides import view_of
from kvleased.planning import plan

DTYPES = ("bfloat16", "float32", "float8_e4m3fn")
TOKENS = (8, 16, 32)

heads = st.fixed_dictionaries(
    {
        "num_kv_heads": st.sampled_from((1, 2, 4)),
        "head_size": st.sampled_from((8, 16, 24)),
        "dtype": st.sampled_from(DTYPES),
        "tokens_per_block": st.sampled_from(TOKENS),
    }
)
latents = st.fixed_dictionaries(
    {
        "head_size": st.sampled_from((8, 16)),
        "dtype": st.sampled_from(DTYPES),
        "tokens_per_block": st.sampled_from(TOKENS),
    }
)
windows = st.sampled_from((1, 20, 100))


def fulls() -> st.SearchStrategy[LayerSpec]:
    """Generate layers that keep every token, some of them padded or spaced."""
    extras = st.sampled_from(
        (
            {},
            {"bytes_per_page_padded": 2**15},
            {"block_stride_multiple_bytes": 4096},
            {"quantisation": "int8_per_token_head", "dtype": "int8"},
            {"head_size_v": 8},
        )
    )
    return st.builds(lambda of, more: FullAttention(name="", **{**of, **more}), heads, extras)


def kinds() -> st.SearchStrategy[LayerSpec]:
    """Generate a layer of any kind."""
    return st.one_of(
        fulls(),
        st.builds(lambda of, w: SlidingWindow(name="", window_tokens=w, **of), heads, windows),
        st.builds(lambda of, w: ChunkedLocal(name="", chunk_tokens=w, **of), heads, windows),
        st.builds(lambda of: CrossAttention(name="", **of), heads),
        st.builds(
            lambda of, c: MLA(name="", tokens_per_state=c, **of), latents, st.sampled_from((1, 4))
        ),
        st.builds(
            lambda of, w: SlidingWindowMLA(name="", window_tokens=w, page_multiple_bytes=192, **of),
            latents,
            windows,
        ),
        st.builds(
            lambda rows, tokens: StateSpace(
                name="",
                tokens_per_block=tokens,
                shapes=((3, rows), (2, 8, 8)),
                dtypes=("bfloat16", "float32"),
            ),
            st.sampled_from((8, 32)),
            st.sampled_from(TOKENS),
        ),
        st.builds(lambda of: RingState(name="", **of), heads),
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[LayerSpec, ...]:
    """Generate the layers of a model, of one to three kinds."""
    of_kind = draw(st.lists(kinds(), min_size=1, max_size=3))
    picks = draw(st.lists(st.integers(0, len(of_kind) - 1), min_size=1, max_size=9))
    return tuple(
        dataclasses.replace(of_kind[pick], name=f"layers.{index}")
        for index, pick in enumerate(picks)
    )


@st.composite
def inputs_of_plans(draw: st.DrawFn) -> PlanInputs:
    """Generate the inputs of plans, most of which are possible."""
    layers = draw(models())
    cut = draw(st.integers(0, len(layers) - 1))
    memory = draw(st.integers(2**16, 2**24))
    stages = (layers[:cut], layers[cut:]) if cut else ()
    return PlanInputs(
        layers=layers,
        tokens_per_block=16,
        layout=draw(st.sampled_from(tuple(Layout))),
        device_bytes=memory,
        null_blocks=draw(st.integers(0, 1)),
        host_bytes=draw(st.sampled_from((0, 0, 2**22))),
        longest_request_tokens=draw(st.sampled_from((0, 1, 100, 4096))),
        fit_longest_request=True,
        engine=EngineInputs(
            tokens_per_step=64,
            encoder_tokens_max=40,
            state_mode=draw(st.sampled_from(("none", "align"))),
            prefix_caching=draw(st.booleans()),
        ),
        parallel=ParallelInputs(pipeline_ranks=2 if cut else 1),
        ranks=tuple(
            RankInputs(layers=stage, device_bytes=memory + 1000 * index)
            for index, stage in enumerate(stages)
        ),
    )


def planned(inputs: PlanInputs) -> CachePlan | None:
    """Return the plan; None if it was refused with a rule or a resource."""
    try:
        return plan(inputs)
    except (InvalidError, NeverFitsError) as refusal:
        assert refusal.rule or refusal.resource, refusal
        return None


def page_spans(made: CachePlan, rank: int, group: int) -> list[tuple[int, int]]:
    """Return where the bytes of a group's first and last blocks lie, head by head if heads lie apart."""
    spans = []
    for layer in made.ranks[rank].layers:
        spec = layer.spec
        if layer.group != group:
            continue
        is_by_head = layer.state_stride_bytes == spec.bytes_per_state
        pieces, piece_bytes = (
            (spec.head_slots, spec.states_per_block * spec.bytes_per_state)
            if is_by_head
            else (1, spec.content_bytes_per_page)
        )
        for block in {0, min(1, made.num_blocks - 1), made.num_blocks - 1}:
            start = layer.offset_bytes + block * layer.block_stride_bytes
            spans += [
                (at, at + piece_bytes)
                for at in (start + head * layer.head_stride_bytes for head in range(pieces))
            ]
    return sorted(spans)


@settings(deadline=None)
@given(inputs_of_plans())
def test_every_view_is_in_bounds(inputs: PlanInputs) -> None:
    """Whatever is planned, every layer's view of all blocks ends inside its rank's region."""
    made = planned(inputs)
    if made is None:
        return
    for rank in made.ranks:
        for layer in rank.layers:
            view = view_of(layer, num_blocks=made.num_blocks, region_bytes=rank.device_bytes)

            assert view.shape[0] == made.num_blocks
            assert view.end_bytes <= rank.device_bytes


@settings(deadline=None)
@given(inputs_of_plans())
def test_no_two_pages_of_a_group_share_a_byte(inputs: PlanInputs) -> None:
    """In one group, the pages of all layers and blocks lie apart."""
    made = planned(inputs)
    if made is None:
        return
    for rank in range(len(made.ranks)):
        for group in range(len(made.groups)):
            for (_, end), (start, _) in pairwise(page_spans(made, rank, group)):
                assert end <= start


@settings(deadline=None)
@given(inputs_of_plans())
def test_blocks_of_different_groups_never_share_a_byte(inputs: PlanInputs) -> None:
    """No page of another block, whatever its group, reaches into a block's extents."""
    made = planned(inputs)
    if made is None:
        return
    for rank in made.ranks:
        for layer in rank.layers:
            spec = layer.spec
            for block in {0, made.num_blocks - 1}:
                first = layer.offset_bytes + block * layer.block_stride_bytes
                for head in range(spec.head_slots):
                    at = first + head * layer.head_stride_bytes

                    assert block in {
                        (at - extent.offset_bytes) // extent.block_stride_bytes
                        for extent in rank.extents
                        if extent.offset_bytes <= at
                        and (at - extent.offset_bytes) % extent.block_stride_bytes
                        < extent.num_bytes
                    }


@settings(deadline=None)
@given(inputs_of_plans())
def test_extents_cover_a_block_exactly(inputs: PlanInputs) -> None:
    """The pieces of a block follow each other in its slot without a gap, and together are as large as the block."""
    made = planned(inputs)
    if made is None:
        return
    for rank in made.ranks:
        ends = [extent.slot_offset_bytes + extent.num_bytes for extent in rank.extents]

        assert [extent.slot_offset_bytes for extent in rank.extents] == [0, *ends][: len(ends)]
        assert (ends or [0])[-1] == rank.bytes_per_block
        assert rank.slot_cell_bytes == rank.bytes_per_block * made.blocks_per_slot


@settings(deadline=None)
@given(inputs_of_plans())
def test_bytes_of_the_plan_are_those_of_the_regions(inputs: PlanInputs) -> None:
    """A rank's region is exactly its blocks and fits its memory; the plan's bytes are those of all regions together."""
    made = planned(inputs)
    if made is None:
        return
    budgets = [rank.device_bytes for rank in inputs.ranks] or [inputs.device_bytes]

    assert made.device_bytes == sum(made.num_blocks * rank.bytes_per_block for rank in made.ranks)
    assert all(
        rank.device_bytes <= (budget or 0) for rank, budget in zip(made.ranks, budgets, strict=True)
    )
    assert made.num_slots * made.bytes_per_slot == made.host_bytes <= inputs.host_bytes


@settings(deadline=None)
@given(inputs_of_plans(), st.integers(0, 2**22))
def test_more_memory_never_gives_less(inputs: PlanInputs, more_bytes: int) -> None:
    """With more memory on every rank there are no fewer blocks, and the longest request is no shorter."""
    made = planned(inputs)
    larger = planned(
        dataclasses.replace(
            inputs,
            device_bytes=inputs.device_bytes + more_bytes,
            ranks=tuple(
                dataclasses.replace(rank, device_bytes=(rank.device_bytes or 0) + more_bytes)
                for rank in inputs.ranks
            ),
        )
    )
    if made is None:
        return

    assert larger is not None
    assert larger.num_blocks >= made.num_blocks
    assert larger.longest_request_tokens >= made.longest_request_tokens


@settings(deadline=None)
@given(inputs_of_plans())
def test_fitting_admits_exactly_what_admission_admits(inputs: PlanInputs) -> None:
    """The longest request that was fitted is admitted; one token more is refused, with the fitted length as limit."""
    asked = dataclasses.replace(inputs, longest_request_tokens=2**20)
    fitted = planned(asked)
    if fitted is None or fitted.longest_request_tokens == 2**20:
        return
    longest = fitted.longest_request_tokens
    strict = dataclasses.replace(asked, fit_longest_request=False)

    assert planned(dataclasses.replace(strict, longest_request_tokens=longest)) is not None
    with pytest.raises(NeverFitsError) as refusal:
        plan(dataclasses.replace(strict, longest_request_tokens=longest + 1))
    assert refusal.value.rule == "not_enough_memory"
    assert refusal.value.limit == longest


@settings(deadline=None)
@given(
    st.lists(fulls(), min_size=1, max_size=3),
    st.sampled_from((1, 2, 4)),
    st.sampled_from(tuple(Layout)),
)
def test_tensor_split_times_ranks_is_the_whole(
    of_kind: Sequence[LayerSpec], ranks: int, layout: Layout
) -> None:
    """What tensor ranks keep of every block adds up to what one rank would keep alone."""
    shards = [
        dataclasses.replace(
            spec, name=str(index), bytes_per_page_padded=None, block_stride_multiple_bytes=None
        )
        for index, spec in enumerate(of_kind)
    ]
    wholes = [
        dataclasses.replace(shard, num_kv_heads=shard.num_kv_heads * ranks)  # type: ignore[attr-defined,call-arg]
        for shard in shards
    ]
    inputs = PlanInputs(
        layers=tuple(wholes),
        tokens_per_block=16,
        layout=layout,
        device_blocks=64,
        block_multiple_bytes=1,
    )
    whole = planned(inputs)
    split = planned(
        dataclasses.replace(
            inputs, layers=tuple(shards), parallel=ParallelInputs(tensor_ranks=ranks)
        )
    )
    if whole is None or split is None:
        return

    assert len(split.ranks) == ranks
    assert split.tensor_replicas == 1
    content = [sum(rank.spec.content_bytes_per_page for rank in r.layers) for r in split.ranks]
    assert sum(content) == sum(layer.spec.content_bytes_per_page for layer in whole.layers)


@settings(deadline=None)
@given(inputs_of_plans())
def test_no_input_ends_in_a_fault(inputs: PlanInputs) -> None:
    """A plan is made, or refused with a reason; nothing else ever happens."""
    try:
        made = plan(inputs)
    except KVLeaseError as refusal:
        assert refusal.code in {"INVALID", "NEVER_FITS"}
    else:
        assert made.usable_blocks >= made.blocks_per_longest_request
