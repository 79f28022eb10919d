"""Laws of plans as records: a record that goes over the wire comes back the same."""

import dataclasses
from dataclasses import replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.layout import Layout
from kvlease.plan import (
    BackendInputs,
    CachePlan,
    EngineInputs,
    Extent,
    GroupPlan,
    LayerPlacement,
    ParallelInputs,
    PlanInputs,
    RankInputs,
    RankPlan,
    TensorPlan,
    Waste,
)
from kvlease.spec import BYTES_PER_ELEMENT, KINDS, FullAttention, LayerSpec, StateSpace
from kvlease.v1 import kvlease_pb2 as pb

U32 = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SEEN = st.characters(exclude_categories=["C", "Z"])
PRINTABLE = st.text(SEEN, max_size=20)
NAME = st.text(SEEN, min_size=1, max_size=20)
COUNT = st.integers(1, 2**16)
ATTENTION = st.builds(
    FullAttention,
    name=NAME,
    backend=PRINTABLE,
    num_kv_heads=COUNT,
    head_size=COUNT,
    head_size_v=st.none() | st.just(0) | COUNT,
    tokens_per_block=st.none() | COUNT,
    dtype=st.sampled_from(sorted(BYTES_PER_ELEMENT)),
)
STATES = st.builds(
    StateSpace,
    name=NAME,
    shapes=st.lists(st.lists(COUNT, min_size=1, max_size=3).map(tuple), min_size=1, max_size=2).map(
        tuple
    ),
    dtypes=st.lists(PRINTABLE, min_size=1, max_size=2).map(tuple),
)
SPECS = st.one_of(ATTENTION, STATES)
"""Layers of two kinds that have hardly a field in common."""


def records(record: Any) -> st.SearchStrategy[Any]:
    """Return records of a type, each field drawn by its type."""
    hints = get_type_hints(record)
    return st.builds(
        record, **{field.name: _values(hints[field.name]) for field in dataclasses.fields(record)}
    )


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is tuple:
        return st.lists(_values(get_args(hint)[0]), max_size=2).map(tuple)
    if dataclasses.is_dataclass(hint) and hint is not LayerSpec:
        return records(hint)
    by_type: dict[Any, st.SearchStrategy[Any]] = {
        LayerSpec: SPECS,
        Layout: st.sampled_from(Layout),
        bool: st.booleans(),
        str: TEXT,
        int: U32,
        int | None: st.none() | U32,
    }
    return by_type[hint]


INPUTS = records(PlanInputs)
PLANS = records(CachePlan)


@settings(max_examples=30)
@given(INPUTS)
def test_inputs_survive_the_wire(inputs: PlanInputs) -> None:
    """Inputs come back from their message as they were, with every field."""
    message = pb.PlanInputs.FromString(inputs.to_proto().SerializeToString())

    assert PlanInputs.from_proto(message) == inputs


@settings(max_examples=10)
@given(PLANS)
def test_plan_of_an_earlier_daemon_has_one_context_rank(plan: CachePlan) -> None:
    """A plan that does not say how many ranks share a request's tokens was made when none did."""
    message = plan.to_proto()
    message.ClearField("context_ranks")

    assert CachePlan.from_proto(message) == replace(plan, context_ranks=1)


def full(**changes: Any) -> FullAttention:
    """Return a layer of full attention with some fields changed."""
    fields = {"name": "a", "num_kv_heads": 1, "head_size": 64, "dtype": "float16"}
    return FullAttention(**{**fields, **changes})


@pytest.mark.parametrize(
    ("inputs", "field", "rule"),
    [
        ({"layers": (full(num_kv_heads=-1),)}, "layers[0].num_kv_heads", "out_of_range"),
        ({"layers": [full(num_kv_heads="x")]}, "layers[0].num_kv_heads", "wrong_type"),
        ({"layers": (full(), full(dtype=None))}, "layers[1].dtype", "wrong_type"),
        ({"layers": (full(backend="\n"),)}, "layers[0].backend", "bad_text"),
        (
            {"layers": (full(block_stride_multiple_bytes=2**70),)},
            "layers[0].block_stride_multiple_bytes",
            "out_of_range",
        ),
        ({"layers": 3}, "layers", "wrong_type"),
        ({"layers": (3,)}, "layers[0]", "wrong_type"),
        ({"engine": None}, "engine", "wrong_type"),
        ({"engine": EngineInputs(steps_in_flight=2**32)}, "engine.steps_in_flight", "out_of_range"),
        ({"engine": EngineInputs(match_tokens=-1)}, "engine.match_tokens", "out_of_range"),
        ({"ranks": [RankInputs(layers=(full(name=""),))]}, "ranks[0].layers[0].name", "bad_text"),
        (
            {"backends": (BackendInputs(name="b", exact_tokens=(16, 1.5)),)},
            "backends[0].exact_tokens[1]",
            "wrong_type",
        ),
        ({"device_bytes": -1}, "device_bytes", "out_of_range"),
        ({"device_blocks": True}, "device_blocks", "wrong_type"),
        ({"host_bytes": 10**5000}, "host_bytes", "out_of_range"),
        ({"layout": 3}, "layout", "wrong_type"),
        ({"model_digest": "\ud800"}, "model_digest", "bad_text"),
    ],
)
def test_inputs_of_a_wrong_type_or_range_are_refused_by_their_path(
    inputs: dict[str, Any], field: str, rule: str
) -> None:
    """An input that cannot be sent is refused before it is sent, by the field's whole path."""
    with pytest.raises(InvalidError) as refusal:
        PlanInputs(**{"tokens_per_block": 16, **inputs}).to_proto()

    assert (refusal.value.resource, refusal.value.rule) == (field, rule)
    assert refusal.value.message.startswith(f"{field} ")


def test_lists_will_do_for_tuples() -> None:
    """Inputs with lists mean the same as inputs with tuples."""
    backend = BackendInputs(name="b", exact_tokens=(16,))
    listed = replace(backend, exact_tokens=[16])  # type: ignore[arg-type]  # what is tried

    said = PlanInputs(layers=[full()], backends=[listed], tokens_per_block=16).to_proto()

    assert said == PlanInputs(layers=(full(),), backends=(backend,), tokens_per_block=16).to_proto()


@settings(max_examples=30)
@given(PLANS)
def test_plans_survive_the_wire(plan: CachePlan) -> None:
    """A plan comes back from its message as it was, with every field."""
    message = pb.CachePlan.FromString(plan.to_proto().SerializeToString())

    assert CachePlan.from_proto(message) == plan


@pytest.mark.parametrize(
    "record",
    [
        PlanInputs,
        RankInputs,
        ParallelInputs,
        EngineInputs,
        BackendInputs,
        CachePlan,
        GroupPlan,
        RankPlan,
        LayerPlacement,
        TensorPlan,
        Extent,
        Waste,
    ],
)
def test_records_have_the_fields_of_their_messages(record: type) -> None:
    """A field has the same name in the library and on the wire."""
    message = getattr(pb, record.__name__)

    assert {field.name for field in dataclasses.fields(record)} == set(
        message.DESCRIPTOR.fields_by_name
    )


def test_layers_have_the_fields_of_their_message() -> None:
    """Every field of every kind of layer has exactly one place in the message, and no place is without a field."""
    fields = {field.name for spec in KINDS.values() for field in dataclasses.fields(spec)}

    assert fields | {"kind"} == set(pb.LayerSpec.DESCRIPTOR.fields_by_name)


def test_defaults_need_not_be_said() -> None:
    """An empty message means the same as a record that is made without arguments."""
    assert PlanInputs.from_proto(pb.PlanInputs(tokens_per_block=16)) == PlanInputs(
        tokens_per_block=16
    )


def test_unknown_kind_of_layer_is_refused() -> None:
    """A kind of layer of a newer peer is refused by name, and not taken for another kind."""
    message = pb.PlanInputs(layers=[pb.LayerSpec(name="0", kind="imaginary")])

    with pytest.raises(InvalidError, match="imaginary"):
        PlanInputs.from_proto(message)


@settings(max_examples=30)
@given(PLANS.filter(lambda plan: plan.tokens_per_block > 0), st.integers(0, 10**9))
def test_plan_counts_blocks_of_its_own_size(plan: CachePlan, num_tokens: int) -> None:
    """Blocks that cover n tokens hold at least n tokens, and full blocks at most n."""
    assert plan.full_blocks(num_tokens) * plan.tokens_per_block <= num_tokens
    assert plan.blocks_covering(num_tokens) * plan.tokens_per_block >= num_tokens


@settings(max_examples=30)
@given(PLANS.filter(lambda plan: len(plan.ranks) > 0))
def test_plan_adds_up_over_ranks(plan: CachePlan) -> None:
    """Device bytes are the sum over all ranks; usable blocks are those that are not null blocks."""
    assert plan.device_bytes == sum(rank.device_bytes for rank in plan.ranks)
    assert plan.usable_blocks + plan.null_blocks == plan.num_blocks
    assert plan.host_bytes == plan.num_slots * plan.bytes_per_slot
    assert plan.layers == plan.ranks[0].layers
    assert plan.bytes_per_block == plan.ranks[0].bytes_per_block
    assert plan.concurrency * max(1, plan.blocks_per_longest_request) == pytest.approx(
        plan.usable_blocks
    )
