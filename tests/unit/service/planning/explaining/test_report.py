"""Laws of the report: every number of a plan is told once, and its arithmetic gives it."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvlease.errors import KVLeaseError
from kvlease.layout import Layout
from kvlease.plan import (
    BackendInputs,
    CachePlan,
    EngineInputs,
    ParallelInputs,
    PlanInputs,
    RankInputs,
)
from kvlease.plan_report import Equation, PlanReport
from kvlease.spec import (
    CrossAttention,
    LayerSpec,
    RingState,
)
from kvleased.planning import plan, report
from kvleased.planning.explaining.terms import Term, common_divisor, literal, number, round_up
from tests.golden.words import plan_inputs_of
from tests.unit.service.planning.arithmetic import evaluated
from tests.unit.service.planning.specs import (
    chunk,
    full,
    hidden,
    latent,
    latent_window,
    states,
    times,
    window,
)

_VECTORS = Path(__file__).parents[4] / "golden" / "vectors" / "planning.json"
_GOLDEN = json.loads(_VECTORS.read_text())["vectors"]
_ATTENTION: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": "float16"}

KINDS: tuple[LayerSpec, ...] = (
    full(),
    full("int4", dtype="uint8", quantisation="int4_per_token_head"),
    full("fp8", dtype="float8_e4m3fn", quantisation="fp8_per_token_head"),
    full("nvfp4", dtype="uint8", quantisation="nvfp4"),
    full("packed", bytes_per_state_packed=96),
    full("padded", bytes_per_page_padded=9000),
    full("spaced", block_stride_multiple_bytes=8448),
    full("encoder", states_per_token=4),
    window(retained_tokens=3),
    chunk(),
    latent(),
    latent("compressed", tokens_per_block=64, tokens_per_state=4),
    latent("aligned", page_multiple_bytes=576),
    latent("aligned by chance", page_multiple_bytes=512, bytes_per_page_padded=1536),
    latent_window(),
    hidden(),
    states(num_speculative_blocks=1),
    states("checkpoints", num_checkpoint_blocks=2),
    RingState(name="ring", tokens_per_block=8, **_ATTENTION),
    CrossAttention(name="cross", tokens_per_block=16, **_ATTENTION),
)


@st.composite
def inputs_of_plans(draw: st.DrawFn) -> PlanInputs:
    """Draw inputs of every kind, many of which cannot be planned."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique_by=id))
    layers = tuple(layer for kind in kinds for layer in times(kind, draw(st.integers(1, 3))))
    tensor_ranks = draw(st.sampled_from([1, 1, 2]))
    num_bytes = draw(st.integers(2**18, 2**26))
    ranks = tuple(
        RankInputs(
            device_bytes=num_bytes + 4096 * rank,
            layers=layers[rank:] if draw(st.booleans()) else layers,
        )
        for rank in range(tensor_ranks)
    )
    return PlanInputs(
        layers=layers,
        tokens_per_block=16,
        layout=draw(st.sampled_from(list(Layout))),
        device_bytes=num_bytes,
        device_blocks=draw(st.sampled_from([0, 0, 64])),
        null_blocks=draw(st.integers(0, 1)),
        host_bytes=draw(st.sampled_from([0, 2**24])),
        disk_bytes=draw(st.sampled_from([0, 2**24])),
        remote_bytes=draw(st.sampled_from([0, 2**24])),
        blocks_per_slot=draw(st.integers(1, 2)),
        longest_request_tokens=draw(st.integers(0, 2000)),
        fit_longest_request=True,
        engine=EngineInputs(
            tokens_per_step=draw(st.sampled_from([64, 256])),
            steps_in_flight=draw(st.integers(1, 2)),
            encoder_tokens_max=draw(st.sampled_from([0, 1500])),
            state_mode=draw(st.sampled_from(["none", "align", "all"])),
            prefix_caching=draw(st.booleans()),
        ),
        parallel=ParallelInputs(
            tensor_ranks=tensor_ranks, context_ranks=draw(st.sampled_from([1, 1, 2]))
        ),
        ranks=ranks if draw(st.booleans()) else (),
    )


def named(found: PlanReport, name: str) -> list[Equation]:
    """Return the equations with a name."""
    return [equation for equation in found.equations if equation.name == name]


def check(inputs: PlanInputs, made: CachePlan) -> None:
    """Check that every number is told, once for each group, and that its arithmetic gives it."""
    found = report(inputs, made)
    for equation in found.equations:
        assert evaluated(equation.arithmetic) == equation.exact, equation
    for name in ("num_blocks", "usable_blocks", "longest_request_tokens"):
        assert [one.exact for one in named(found, name)] == [getattr(made, name)]
    for index, group in enumerate(made.groups):
        said = [
            one.exact for one in named(found, "blocks_per_longest_request") if index in one.groups
        ]
        assert said == [group.blocks_per_longest_request]
    assert PlanReport.from_proto(found.to_proto()) == found


@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
@given(inputs_of_plans())
def test_arithmetic_of_every_equation_gives_its_value(inputs: PlanInputs) -> None:
    """Each plan of drawn inputs has a report in which every equation holds."""
    try:
        made = plan(inputs)
    except KVLeaseError:
        assume(False)

    check(inputs, made)


@pytest.mark.parametrize("vector", _GOLDEN, ids=lambda vector: vector["id"])
def test_golden_plans_explain_themselves(vector: dict[str, Any]) -> None:
    """Each plan of the golden vectors has a report in which every equation holds."""
    inputs = plan_inputs_of(vector["input"])
    try:
        made = plan(inputs)
    except KVLeaseError:
        return

    check(inputs, made)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("layout", ["BLHNC", "LBNHC"])
def test_every_kind_of_layer_is_explained(kind: LayerSpec, mode: str, layout: str) -> None:
    """For each kind of layer the report tells what a page consists of and what a request takes."""
    inputs = PlanInputs(
        layers=tuple(times(kind, 2)),
        tokens_per_block=16,
        layout=layout,
        device_bytes=2**26,
        longest_request_tokens=100,
        engine=EngineInputs(state_mode=mode, encoder_tokens_max=1500, steps_in_flight=2),
    )

    check(inputs, plan(inputs))


def one(name: str, **changes: Any) -> Equation:
    """Return one equation from the report of a small model."""
    inputs = PlanInputs(
        layers=tuple(times(full(), 2)),
        tokens_per_block=16,
        device_bytes=10 * 2**20 + 5,
        longest_request_tokens=100,
    )
    inputs = replace(inputs, **changes)
    (equation,) = named(report(inputs, plan(inputs)), name)
    return equation


def test_equation_shows_formula_and_numbers() -> None:
    """An equation has its formula in names and the same in numbers."""
    equation = one("num_blocks")

    assert equation.formula == "floor(device_bytes / bytes_per_block)"
    assert equation.arithmetic == "floor(10485765 / 16384)"
    assert (equation.value, equation.unit, equation.groups) == (640, "blocks", ())


def test_least_rank_decides_blocks() -> None:
    """If ranks differ, the equation for the number of blocks has all of them."""
    ranks = (RankInputs(device_bytes=2**20), RankInputs(device_bytes=2**21))
    equation = one("num_blocks", ranks=ranks, parallel=ParallelInputs(tensor_ranks=2))

    assert equation.arithmetic == "min(floor(1048576 / 16384), floor(2097152 / 16384))"
    assert equation.formula == "least over ranks of floor(device_bytes / bytes_per_block)"


def test_window_is_explained_by_its_formula() -> None:
    """The formula of a window's blocks counts those that it can touch while steps are in flight."""
    layers = tuple(times(window(retained_tokens=2), 2))
    inputs = PlanInputs(
        layers=layers,
        tokens_per_block=16,
        device_bytes=2**24,
        longest_request_tokens=10**4,
        engine=EngineInputs(tokens_per_step=64, steps_in_flight=2),
    )
    of_group, _ = named(report(inputs, plan(inputs)), "blocks_per_longest_request")

    assert of_group.arithmetic == "ceil(min(128 - 1 + 2 + 64 * 2, 10000) / 16) + 1"


@pytest.mark.parametrize(
    ("layer", "asked", "source"),
    [
        pytest.param(full(), 100, "as asked for, or as the model takes", id="asked"),
        pytest.param(full(), 0, "the most that fits usable_blocks", id="blocks"),
        pytest.param(window(), 0, "the most that fits a row of the block table", id="row"),
    ],
)
def test_longest_request_is_explained_by_what_ends_it(
    layer: LayerSpec, asked: int, source: str
) -> None:
    """The longest request says whether it is as asked for, or what it was shortened to."""
    inputs = PlanInputs(
        layers=(layer,), tokens_per_block=16, device_blocks=1000, longest_request_tokens=asked
    )

    (equation,) = named(report(inputs, plan(inputs)), "longest_request_tokens")

    assert equation.formula == source


def test_compressed_token_is_an_exact_fraction() -> None:
    """Bytes per token of compressed layers are an exact fraction."""
    equation = one(
        "bytes_per_token",
        layers=(latent("c", tokens_per_block=64, tokens_per_state=128 // 2, head_size=132),),
    )

    assert equation.exact == Fraction(132, 64)
    assert equation.arithmetic == "1 * 132 / 64"


def test_equal_groups_are_said_once() -> None:
    """Groups with the same equation share it."""
    inputs = PlanInputs(
        layers=(*times(window(), 4), full("a"), full("b")),
        tokens_per_block=16,
        device_bytes=2**24,
    )
    made = plan(inputs)

    assert len(made.groups) == 3
    assert [one.groups for one in named(report(inputs, made), "bytes_per_page")] == [(0, 1, 2)]


def test_plan_without_layers_is_explained() -> None:
    """A plan without layers has no groups and still a report."""
    inputs = PlanInputs(ranks=(RankInputs(keeps_nothing=True),), tokens_per_block=16)

    check(inputs, plan(inputs))


@pytest.mark.parametrize(
    ("term", "arithmetic", "value"),
    [
        pytest.param(
            (number("a", 1) + literal(2)) * literal(3), "(1 + 2) * 3", 9, id="sum in a product"
        ),
        pytest.param(literal(8) - (literal(2) + literal(3)), "8 - (2 + 3)", 3, id="less a sum"),
        pytest.param(literal(8) / (literal(2) * literal(2)), "8 / (2 * 2)", 2, id="over a product"),
        pytest.param(round_up(literal(5), literal(4)), "round_up(5, 4)", 8, id="a call"),
        pytest.param(common_divisor([literal(4), literal(4)]), "4", 4, id="equal terms once"),
    ],
)
def test_brackets_stand_where_they_are_needed(term: Term, arithmetic: str, value: int) -> None:
    """Arithmetic has brackets where its value depends on them."""
    assert term.arithmetic == arithmetic
    assert term.value == value == evaluated(arithmetic)


def test_pages_start_at_their_elements() -> None:
    """A gap before the next layer's element is a term of the equation."""
    layers = (
        latent("narrow", tokens_per_block=1, head_size=3),
        latent("wide", tokens_per_block=1, head_size=4, dtype="float16"),
    )
    inputs = PlanInputs(layers=layers, tokens_per_block=1, device_bytes=2**20)
    (equation,) = named(report(inputs, plan(inputs)), "bytes_per_block")

    assert equation.arithmetic == "round_up(round_up(1 * 3, 2) + 1 * 8, 64)"


def test_keys_as_asked_for_are_explained_so() -> None:
    """If the caller gives the tokens of a key, the equation says so."""
    equation = one(
        "hash_block_tokens",
        layers=(full("a"), window("b", tokens_per_block=32)),
        layout="LBNHC",
        engine=EngineInputs(match_tokens=8),
        longest_request_tokens=0,
    )

    assert (equation.formula, equation.value) == ("match_tokens", 8)


@pytest.mark.parametrize(
    ("asked", "num_blocks"),
    [
        pytest.param({"null_blocks": 3}, 3, id="null blocks"),
        pytest.param({"device_blocks": 64}, 1, id="blocks as given"),
        pytest.param({"device_blocks": 64, "null_blocks": 3}, 3, id="both"),
    ],
)
def test_blocks_of_ranks_that_keep_nothing_are_explained(
    asked: dict[str, int], num_blocks: int
) -> None:
    """There is one block of no bytes, or as many as are never granted, however many are asked for."""
    inputs = PlanInputs(ranks=(RankInputs(keeps_nothing=True),), tokens_per_block=16, **asked)

    found = report(inputs, plan(inputs))

    said = {one.name: one for one in found.equations}["num_blocks"]
    assert (said.value, evaluated(said.arithmetic)) == (num_blocks, num_blocks)


def test_request_that_takes_nothing_is_explained() -> None:
    """If a request takes no block, as of an encoder without input, all blocks count as room for it."""
    cross = CrossAttention(name="cross", tokens_per_block=16, **_ATTENTION)
    given = PlanInputs(
        layers=(cross,), tokens_per_block=16, device_bytes=2**20, longest_request_tokens=100
    )
    made = plan(replace(given, engine=EngineInputs(encoder_tokens_max=16)))
    idle = replace(
        made,
        groups=tuple(replace(group, blocks_per_longest_request=0) for group in made.groups),
        ranks=tuple(replace(rank, bytes_per_longest_request=0) for rank in made.ranks),
        blocks_per_longest_request=0,
        capacity_tokens=made.usable_blocks * 100,
    )

    (equation,) = named(report(given, idle), "concurrency")

    assert equation.arithmetic == f"{made.usable_blocks} / max(1, 0)"


def test_kernel_blocks_between_other_pages_are_explained() -> None:
    """If blocks are cut and other layers' pages lie between, the kernel blocks of those pages are counted, too."""
    layer = latent("c", tokens_per_block=256, tokens_per_state=4, backend="reads 64")
    equation = one(
        "kernel_block_stride",
        layers=tuple(times(layer, 2)),
        backends=(BackendInputs(name="reads 64", exact_tokens=(64,)),),
    )

    assert equation.arithmetic == "8192 / (4096 / 4)"
    assert equation.value == 8
