"""Laws of the plan: pages fit, budgets hold, and what is promised is admitted."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError, KVLeaseError, NeverFitsError
from kvlease.layout import Layout
from kvlease.plan import (
    CachePlan,
    EngineInputs,
    ParallelInputs,
    RankInputs,
)
from kvlease.spec import FullAttention, LayerSpec, SlidingWindow, StateSpace
from kvlease.units import TOKENS_MAX
from kvleased.planning import plan
from tests.unit.service.planning.advice.asked import LAYER, inputs

FULL = st.builds(
    FullAttention,
    name=st.just(""),
    num_kv_heads=st.integers(1, 8),
    head_size=st.integers(1, 64),
    head_size_v=st.one_of(st.none(), st.integers(0, 64)),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
)


WINDOWS = st.builds(
    SlidingWindow,
    name=st.just(""),
    num_kv_heads=st.integers(1, 4),
    head_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from(["bfloat16", "uint8"]),
    window_tokens=st.sampled_from([64, 100]),
)


STATES = st.builds(
    StateSpace,
    name=st.just(""),
    shapes=st.tuples(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 99), st.just(4))),
    dtypes=st.just(("float32", "bfloat16")),
)


LAYERS = st.lists(st.one_of(FULL, WINDOWS, STATES), min_size=1, max_size=8).map(
    lambda specs: tuple(
        dataclasses.replace(spec, name=str(index)) for index, spec in enumerate(specs)
    )
)


def bytes_of_block(made: CachePlan, layer_index: int, block: int) -> set[int]:
    """Return the places of all bytes of a layer's content in one block."""
    layer = made.layers[layer_index]
    start = layer.offset_bytes + block * layer.block_stride_bytes
    return {
        start + head * layer.head_stride_bytes + state * layer.state_stride_bytes + byte
        for head in range(layer.spec.head_slots)
        for state in range(layer.spec.states_per_block)
        for byte in range(layer.spec.bytes_per_state)
    }


def bytes_of_extents(made: CachePlan, block: int) -> list[int]:
    """Return the places of all bytes of one block's pieces."""
    return [
        extent.offset_bytes + block * extent.block_stride_bytes + byte
        for extent in made.ranks[0].extents
        for byte in range(extent.num_bytes)
    ]


@given(LAYERS, st.sampled_from(Layout), st.sampled_from([2, 4, 8]), st.integers(1, 3))
def test_block_holds_its_pages_and_no_byte_twice(
    layers: tuple[LayerSpec, ...], layout: Layout, tokens_per_block: int, num_blocks: int
) -> None:
    """Blocks' pieces tile the region; a page lies within its block's pieces, apart from others of its group."""
    wanted = inputs(
        layers=layers,
        layout=layout.value,
        tokens_per_block=tokens_per_block,
        device_bytes=0,
        device_blocks=num_blocks + 1000,
    )
    try:
        made = plan(wanted)
    except InvalidError as refusal:
        assert refusal.rule is not None
        return

    pieces = [set(bytes_of_extents(made, block)) for block in (0, 1)]
    assert len(pieces[0]) == made.bytes_per_block == len(bytes_of_extents(made, 0))
    assert not pieces[0] & pieces[1]
    taken: dict[int, set[int]] = {}
    for index, layer in enumerate(made.layers):
        page = bytes_of_block(made, index, 1)
        assert page <= pieces[1]
        assert not page & taken.setdefault(layer.group, set())
        taken[layer.group] |= page


@given(LAYERS, st.sampled_from([4, 16]), st.integers(1, 2**24), st.integers(0, 2**24))
def test_plan_fills_its_budget_and_no_more(
    layers: tuple[LayerSpec, ...], tokens_per_block: int, device_bytes: int, host_bytes: int
) -> None:
    """Pools hold whole blocks within their budgets, and one more block would not fit."""
    wanted = inputs(
        layers=layers,
        tokens_per_block=tokens_per_block,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        engine=EngineInputs(prefix_caching=False),
    )
    try:
        made = plan(wanted)
    except NeverFitsError as refusal:
        assert refusal.need is not None
        assert refusal.available is not None
        assert refusal.need > refusal.available
        return

    block, slot = made.bytes_per_block, made.bytes_per_slot
    assert made.device_bytes == made.num_blocks * block
    assert made.device_bytes <= device_bytes < made.device_bytes + block
    assert made.host_bytes == made.num_slots * slot <= host_bytes < made.host_bytes + slot
    assert made.bytes_per_block % 64 == 0


@given(LAYERS, st.integers(1, 500), st.integers(0, 3), st.integers(1, 10**5))
def test_asked_longest_request_is_planned_as_asked_or_refused_with_what_fits(
    layers: tuple[LayerSpec, ...], num_blocks: int, null_blocks: int, longest: int
) -> None:
    """A refused request would not fit; the refusal's `limit` does, and one token more does not."""
    wanted = inputs(
        layers=layers,
        device_bytes=0,
        device_blocks=num_blocks,
        null_blocks=null_blocks,
        longest_request_tokens=longest,
    )
    try:
        made = plan(wanted)
    except NeverFitsError as refusal:
        assert refusal.rule in ("not_enough_memory", "no_available_memory")
        largest = refusal.limit if refusal.rule == "not_enough_memory" else 0
        assert largest is not None
        assert largest < longest
        if largest:
            fitting = plan(dataclasses.replace(wanted, longest_request_tokens=largest))
            assert fitting.blocks_per_longest_request <= fitting.usable_blocks
        with pytest.raises(NeverFitsError):
            plan(dataclasses.replace(wanted, longest_request_tokens=largest + 1))
    else:
        assert made.longest_request_tokens == longest
        assert made.blocks_per_longest_request <= made.usable_blocks == num_blocks - null_blocks


@given(LAYERS, st.integers(1, 500), st.integers(1, 10**5))
def test_shortened_request_is_the_longest_that_is_admitted(
    layers: tuple[LayerSpec, ...], num_blocks: int, longest: int
) -> None:
    """Fitting keeps a request that fits, and else takes the refusal's limit; a limit of 0 is still refused."""
    wanted = inputs(
        layers=layers,
        device_bytes=0,
        device_blocks=num_blocks,
        null_blocks=1,
        longest_request_tokens=longest,
        fit_longest_request=True,
    )
    try:
        tokens = plan(wanted).longest_request_tokens
    except NeverFitsError as refusal:
        assert refusal.rule == "auto_fit_failed"
        tokens = 0

    assert tokens <= longest
    if tokens < longest:
        longer = dataclasses.replace(
            wanted, longest_request_tokens=tokens + 1, fit_longest_request=False
        )
        with pytest.raises(NeverFitsError):
            plan(longer)


def test_without_a_longest_request_as_much_as_fits_is_planned() -> None:
    """A longest request of 0 means the whole pool, in whole blocks without the null block."""
    made = plan(inputs(null_blocks=1))

    assert made.num_blocks == 10
    assert made.usable_blocks == 9
    assert made.longest_request_tokens == made.capacity_tokens == 9 * 16
    assert made.concurrency == 1.0


def test_longest_request_stops_where_the_table_counts() -> None:
    """The longest request is never so long that its tokens exceed the block table's int32."""
    made = plan(inputs(tokens_per_block=1024, device_bytes=0, device_blocks=2**31 - 1))

    assert made.longest_request_tokens == TOKENS_MAX


@pytest.mark.parametrize("may_shorten", [False, True])
def test_memory_for_not_even_one_token_is_refused(may_shorten: bool) -> None:
    """A window takes two blocks for its first token, so one block is refused with both numbers."""
    window = SlidingWindow(
        name="w", num_kv_heads=2, head_size=32, dtype="float16", window_tokens=64
    )

    with pytest.raises(NeverFitsError) as refusal:
        plan(inputs(layers=(window,), device_bytes=4096, fit_longest_request=may_shorten))

    assert (refusal.value.rule, refusal.value.need, refusal.value.available) == (
        "auto_fit_failed",
        2,
        1,
    )


@given(LAYERS, st.integers(1, 10**4), st.integers(0, 2**24))
def test_more_memory_never_gives_less(
    layers: tuple[LayerSpec, ...], device_blocks: int, more_bytes: int
) -> None:
    """Blocks and the longest request grow with the budget, and a block's layout stays the same."""
    wanted = inputs(layers=layers, device_bytes=0, device_blocks=device_blocks)
    try:
        less = plan(wanted)
    except KVLeaseError:
        return
    more = plan(
        dataclasses.replace(wanted, device_blocks=0, device_bytes=less.device_bytes + more_bytes)
    )

    assert more.num_blocks >= less.num_blocks
    assert more.longest_request_tokens >= less.longest_request_tokens
    assert more.layout_fingerprint == less.layout_fingerprint


def test_given_blocks_rule_over_measured_memory() -> None:
    """Blocks that are given are planned, whether memory is larger or was not measured."""
    for device_bytes in (0, 40960):
        made = plan(inputs(device_bytes=device_bytes, device_blocks=3))

        assert made.num_blocks == 3
        assert made.device_bytes == 3 * 4096


def test_given_blocks_that_do_not_fit_are_refused_with_those_that_do() -> None:
    """Blocks that are given and exceed the measured memory are refused before anything is allocated."""
    with pytest.raises(NeverFitsError) as refusal:
        plan(inputs(device_blocks=11))

    assert refusal.value.rule == "device_blocks_do_not_fit"
    assert (refusal.value.need, refusal.value.available) == (11 * 4096, 40960)
    assert refusal.value.limit == 10


@pytest.mark.parametrize(
    ("null_blocks", "device_bytes"),
    [(0, 0), (0, 4095), (1, 4096), (2, 8192)],
)
def test_memory_without_a_usable_block_is_refused(null_blocks: int, device_bytes: int) -> None:
    """Memory for no more than the blocks never granted is refused with what would be enough."""
    with pytest.raises(NeverFitsError) as refusal:
        plan(inputs(null_blocks=null_blocks, device_bytes=device_bytes))

    assert refusal.value.rule == "no_available_memory"
    assert (refusal.value.need, refusal.value.available) == (
        (null_blocks + 1) * 4096,
        device_bytes,
    )


@pytest.mark.parametrize(
    ("changes", "resource"),
    [
        pytest.param({"layers": ()}, "layers", id="nothing to plan"),
        pytest.param({"model_config": "{}"}, "layers", id="two sources"),
        pytest.param({"kv_dtype": "float32"}, "kv_dtype", id="dtype twice"),
        pytest.param({"layers": (LAYER, LAYER)}, "name", id="one name twice"),
        pytest.param({"layers": (LAYER,) * 5000}, "layers", id="too many layers"),
        pytest.param({"tokens_per_block": 0}, "tokens_per_block", id="empty blocks"),
        pytest.param({"device_bytes": -1}, "device_bytes", id="negative budget"),
        pytest.param(
            {"device_bytes": 0, "device_blocks": 2**31}, "device_blocks", id="ids beyond int32"
        ),
        pytest.param(
            {"device_bytes": 0, "device_blocks": 2**31 - 1, "tokens_per_block": 2**16},
            "device_blocks",
            id="bytes",
        ),
        pytest.param(
            {"device_bytes": 2**53 - 1, "tokens_per_block": 1}, "device_bytes", id="blocks"
        ),
        pytest.param({"host_bytes": -1}, "host_bytes", id="negative host budget"),
        pytest.param({"null_blocks": -1}, "null_blocks", id="negative null blocks"),
        pytest.param({"block_multiple_bytes": 0}, "block_multiple_bytes", id="no multiple"),
        pytest.param({"layout": "LBHCN"}, "layout", id="no such layout"),
        pytest.param(
            {"longest_request_tokens": 2**40}, "longest_request_tokens", id="tokens beyond int32"
        ),
        pytest.param({"model_digest": "x" * 257}, "model_digest", id="long digest"),
        pytest.param({"parallel": ParallelInputs(tensor_ranks=0)}, "tensor_ranks", id="no rank"),
        pytest.param({"ranks": (RankInputs(),) * 2000}, "ranks", id="too many ranks"),
        pytest.param(
            {"ranks": (RankInputs(keeps_nothing=True, layers=(LAYER,)),)},
            "keeps_nothing",
            id="something of nothing",
        ),
        pytest.param({"engine": EngineInputs(tokens_per_step=0)}, "tokens_per_step", id="no step"),
        pytest.param(
            {"engine": EngineInputs(lookahead_tokens=-1)}, "lookahead_tokens", id="looks back"
        ),
        pytest.param({"engine": EngineInputs(state_mode="some")}, "state_mode", id="state mode"),
        pytest.param(
            {"layers": (dataclasses.replace(LAYER, backend="none such"),)}, "backend", id="backend"
        ),
    ],
)
def test_malformed_inputs_are_refused_by_name(changes: dict[str, object], resource: str) -> None:
    """Inputs that contradict each other or are out of range are refused with the field."""
    with pytest.raises(InvalidError) as refusal:
        plan(inputs(**changes))

    assert refusal.value.resource == resource


def test_more_bytes_than_blocks_are_counted_is_told_in_bytes() -> None:
    """The refusal has the bytes that were given and the most that may be; with the latter there is a plan."""
    with pytest.raises(InvalidError) as refusal:
        plan(inputs(device_bytes=2**50))

    error = refusal.value
    block = plan(inputs(device_bytes=0, device_blocks=1)).device_bytes
    assert (error.resource, error.need, error.limit) == ("device_bytes", 2**50, (2**31 - 1) * block)
    assert error.message.startswith("device_bytes is 1125899906842624 (1024.00 TiB), enough for ")
    assert error.message.endswith("; lower it, or raise tokens_per_block")
    assert plan(inputs(device_bytes=error.limit)).num_blocks == 2**31 - 1


def test_model_config_gives_the_layers() -> None:
    """The text of a config.json gives the plan's layers."""
    config = (
        '{"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64, '
        '"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"}'
    )

    made = plan(inputs(layers=(), model_config=config))

    assert [layer.bytes_per_page for layer in made.layers] == [4096] * 3
