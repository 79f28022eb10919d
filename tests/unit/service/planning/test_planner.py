"""Laws of the plan: pages fit, budgets hold, and what is promised is what is admitted."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError, NeverFitsError
from kvlease.plan import CachePlan, PlanInputs
from kvlease.spec import BYTES_PER_ELEMENT, FullAttention
from kvlease.units import TOKENS_MAX
from kvleased.planning import check_request, largest_request_tokens, plan

SPECS = st.builds(
    FullAttention,
    name=st.uuids().map(str),
    num_kv_heads=st.integers(1, 64),
    head_size=st.integers(1, 512),
    head_size_v=st.integers(0, 512),
    dtype=st.sampled_from(sorted(BYTES_PER_ELEMENT)),
)
LAYERS = st.lists(SPECS, min_size=1, max_size=6, unique_by=lambda spec: spec.name).map(tuple)
TOKENS_PER_BLOCK = st.integers(1, 600)
LAYER = FullAttention(name="0", num_kv_heads=2, head_size=32, dtype="float16")


def inputs(**changes: object) -> PlanInputs:
    """Return inputs of ten blocks of 4096 bytes with some fields changed."""
    fields = {"layers": (LAYER,), "tokens_per_block": 16, "device_bytes": 40960} | changes
    return PlanInputs(**fields)  # type: ignore[arg-type]  # tests pass wrong values on purpose


def admits(layout: CachePlan, num_tokens: int) -> bool:
    """Tell whether admission lets a request of `num_tokens` in, ever."""
    try:
        check_request(
            num_tokens,
            num_blocks=layout.num_blocks,
            tokens_per_block=layout.tokens_per_block,
            bytes_per_block=layout.bytes_per_block,
        )
    except NeverFitsError:
        return False
    return True


@given(LAYERS, TOKENS_PER_BLOCK)
def test_pages_are_disjoint_aligned_and_inside_the_block(
    layers: tuple[FullAttention, ...], tokens_per_block: int
) -> None:
    """Pages follow each other on their elements' boundaries, and the last one ends inside its block."""
    layout = plan(
        inputs(layers=layers, tokens_per_block=tokens_per_block, device_bytes=0, device_blocks=1)
    )
    end_bytes = 0
    for layer in layout.layers:
        assert layer.offset_bytes >= end_bytes
        assert layer.offset_bytes % layer.spec.bytes_per_element == 0
        end_bytes = layer.offset_bytes + layer.bytes_per_page

    assert end_bytes <= layout.bytes_per_block < end_bytes + 64
    assert layout.bytes_per_block % 64 == 0


@given(LAYERS, TOKENS_PER_BLOCK, st.integers(1, 2**36), st.integers(0, 2**36))
def test_plan_fills_its_budget_and_no_more(
    layers: tuple[FullAttention, ...], tokens_per_block: int, device_bytes: int, host_bytes: int
) -> None:
    """Pools hold whole blocks, stay within their budgets, and one more block would not fit."""
    wanted = inputs(
        layers=layers,
        tokens_per_block=tokens_per_block,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    )
    try:
        layout = plan(wanted)
    except NeverFitsError as refusal:
        assert refusal.need is not None
        assert refusal.limit is not None
        assert refusal.need > refusal.limit
        return

    block = layout.bytes_per_block
    assert (
        layout.device_bytes
        == layout.num_blocks * block
        <= device_bytes
        < layout.device_bytes + block
    )
    assert layout.host_bytes == layout.num_slots * block <= host_bytes < layout.host_bytes + block
    assert layout.capacity_tokens == layout.num_blocks * tokens_per_block


@given(LAYERS, TOKENS_PER_BLOCK, st.integers(1, 10**4), st.integers(0, 2**36))
def test_more_memory_never_gives_less(
    layers: tuple[FullAttention, ...], tokens_per_block: int, device_blocks: int, more_bytes: int
) -> None:
    """Blocks and the longest request grow with the budget; the layout does not change."""
    wanted = inputs(
        layers=layers,
        tokens_per_block=tokens_per_block,
        device_bytes=0,
        device_blocks=device_blocks,
    )
    less = plan(wanted)
    more_bytes += less.device_bytes
    more = plan(dataclasses.replace(wanted, device_blocks=0, device_bytes=more_bytes))

    assert more.num_blocks >= less.num_blocks
    assert more.longest_request_tokens >= less.longest_request_tokens
    assert more.layout_fingerprint == less.layout_fingerprint
    assert more.layers == less.layers


@given(TOKENS_PER_BLOCK, st.integers(1, 10**5))
def test_auto_admits_exactly_what_admission_admits(tokens_per_block: int, num_blocks: int) -> None:
    """The longest request of an automatic plan is admitted, and one token more is not."""
    layout = plan(
        inputs(tokens_per_block=tokens_per_block, device_bytes=0, device_blocks=num_blocks)
    )

    assert admits(layout, layout.longest_request_tokens)
    assert not admits(layout, layout.longest_request_tokens + 1)
    assert layout.longest_request_tokens == layout.capacity_tokens


@given(TOKENS_PER_BLOCK, st.integers(1, 10**5), st.integers(1, 10**6))
def test_asked_longest_request_is_planned_or_refused_as_admission_does(
    tokens_per_block: int, num_blocks: int, longest: int
) -> None:
    """A plan that is made holds the request that was asked for; one that is refused would not admit it."""
    wanted = inputs(
        tokens_per_block=tokens_per_block,
        device_bytes=0,
        device_blocks=num_blocks,
        longest_request_tokens=longest,
    )
    try:
        layout = plan(wanted)
    except NeverFitsError as refusal:
        assert longest > num_blocks * tokens_per_block
        assert (
            f"largest request that fits has {num_blocks * tokens_per_block} tokens"
            in refusal.message
        )
        assert (refusal.available, refusal.limit) == (num_blocks, num_blocks)
    else:
        assert longest <= layout.longest_request_tokens < longest + tokens_per_block
        assert layout.longest_request_tokens == layout.blocks_per_longest_request * tokens_per_block
        assert layout.blocks_per_longest_request <= num_blocks


def test_longest_request_stops_where_the_table_counts() -> None:
    """No pool is so large that a request's tokens would not fit in the block table's int32."""
    assert largest_request_tokens(2**31 - 1, 16) == TOKENS_MAX - TOKENS_MAX % 16


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tokens_per_block": 32}, id="tokens per block"),
        pytest.param({"layers": (dataclasses.replace(LAYER, name="1"),)}, id="name"),
        pytest.param({"layers": (dataclasses.replace(LAYER, num_kv_heads=4),)}, id="heads"),
        pytest.param({"layers": (dataclasses.replace(LAYER, head_size=64),)}, id="head size"),
        pytest.param({"layers": (dataclasses.replace(LAYER, head_size_v=64),)}, id="V head size"),
        pytest.param({"layers": (dataclasses.replace(LAYER, dtype="bfloat16"),)}, id="dtype"),
    ],
)
def test_fingerprint_tells_layouts_apart(changes: dict[str, object]) -> None:
    """Whatever changes where a byte lies or what it means changes the fingerprint."""
    assert plan(inputs(**changes)).layout_fingerprint != plan(inputs()).layout_fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"device_bytes": 81920}, id="more device memory"),
        pytest.param({"host_bytes": 8192}, id="a host tier"),
        pytest.param({"longest_request_tokens": 16}, id="longest request"),
        pytest.param({"model_digest": "abc"}, id="other weights"),
        pytest.param({"layers": (LAYER.explicit(),)}, id="a default written out"),
    ],
)
def test_fingerprint_does_not_tell_capacities_apart(changes: dict[str, object]) -> None:
    """What leaves every byte of a block where it was leaves the fingerprint."""
    assert plan(inputs(**changes)).layout_fingerprint == plan(inputs()).layout_fingerprint


@pytest.mark.parametrize(
    ("changes", "resource"),
    [
        pytest.param({"layers": ()}, "layers", id="nothing to plan"),
        pytest.param({"model_config": "{}"}, "layers", id="two sources"),
        pytest.param({"kv_dtype": "float32"}, "kv_dtype", id="dtype twice"),
        pytest.param({"layers": (LAYER, LAYER)}, "name", id="one name twice"),
        pytest.param({"layers": (LAYER,) * 5000}, "layers", id="too many layers"),
        pytest.param({"tokens_per_block": 0}, "tokens_per_block", id="empty blocks"),
        pytest.param({"device_bytes": 0}, "device_bytes", id="no budget"),
        pytest.param({"device_blocks": 5}, "device_bytes", id="two budgets"),
        pytest.param({"device_bytes": -1}, "device_bytes", id="negative budget"),
        pytest.param(
            {"device_bytes": 0, "device_blocks": 2**31}, "device_blocks", id="ids beyond int32"
        ),
        pytest.param(
            {"device_bytes": 0, "device_blocks": 2**31 - 1, "tokens_per_block": 2**16},
            "device_bytes",
            id="bytes",
        ),
        pytest.param({"host_bytes": -1}, "host_bytes", id="negative host budget"),
        pytest.param(
            {"longest_request_tokens": 2**40}, "longest_request_tokens", id="tokens beyond int32"
        ),
        pytest.param({"model_digest": "x" * 257}, "model_digest", id="long digest"),
    ],
)
def test_malformed_inputs_are_refused_by_name(changes: dict[str, object], resource: str) -> None:
    """Inputs that contradict themselves or are out of range are refused, and the refusal names the field."""
    with pytest.raises(InvalidError) as refusal:
        plan(inputs(**changes))

    assert refusal.value.resource == resource


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes"])
def test_memory_below_one_block_is_refused_with_the_block(name: str) -> None:
    """Memory that holds no block is refused with what a block takes and what there was."""
    with pytest.raises(NeverFitsError) as refusal:
        plan(inputs(**{name: 4095}))

    assert (refusal.value.resource, refusal.value.need, refusal.value.available) == (
        name,
        4096,
        4095,
    )
