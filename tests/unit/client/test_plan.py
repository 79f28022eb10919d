"""Laws of plans as records: what goes over the wire comes back the same."""

import dataclasses
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
ATTENTION = st.builds(
    FullAttention,
    name=TEXT.filter(len),
    backend=TEXT,
    num_kv_heads=U32,
    head_size=U32,
    head_size_v=st.none() | U32,
    tokens_per_block=st.none() | U32,
    dtype=st.sampled_from(sorted(BYTES_PER_ELEMENT)),
)
STATES = st.builds(
    StateSpace,
    name=TEXT.filter(len),
    shapes=st.lists(st.lists(U32, max_size=3).map(tuple), min_size=1, max_size=2).map(tuple),
    dtypes=st.lists(TEXT, min_size=1, max_size=2).map(tuple),
)
SPECS = st.one_of(ATTENTION, STATES)
"""Layers of two kinds that share hardly a field."""


def records(record: Any) -> st.SearchStrategy[Any]:
    """Return records of a type, every field of them drawn by its type."""
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
    """Inputs come back from their message as they were, every field of them."""
    message = pb.PlanInputs.FromString(inputs.to_proto().SerializeToString())

    assert PlanInputs.from_proto(message) == inputs


@settings(max_examples=30)
@given(PLANS)
def test_plans_survive_the_wire(plan: CachePlan) -> None:
    """A plan comes back from its message as it was, every field of it."""
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
    """One vocabulary: a field is called the same in the library and on the wire."""
    message = getattr(pb, record.__name__)

    assert {field.name for field in dataclasses.fields(record)} == set(
        message.DESCRIPTOR.fields_by_name
    )


def test_layers_have_the_fields_of_their_message() -> None:
    """Every field of every kind of layer has one place in the message, and no place is without a field."""
    fields = {field.name for spec in KINDS.values() for field in dataclasses.fields(spec)}

    assert fields | {"kind"} == set(pb.LayerSpec.DESCRIPTOR.fields_by_name)


def test_defaults_need_not_be_said() -> None:
    """An empty message means what a record made without arguments means."""
    assert PlanInputs.from_proto(pb.PlanInputs(tokens_per_block=16)) == PlanInputs(
        tokens_per_block=16
    )


def test_unknown_kind_of_layer_is_refused() -> None:
    """A newer peer's kind of layer is refused by name, not taken for another."""
    message = pb.PlanInputs(layers=[pb.LayerSpec(name="0", kind="imaginary")])

    with pytest.raises(InvalidError, match="imaginary"):
        PlanInputs.from_proto(message)


@settings(max_examples=30)
@given(PLANS.filter(lambda plan: plan.tokens_per_block > 0), st.integers(0, 10**9))
def test_plan_counts_blocks_of_its_own_size(plan: CachePlan, num_tokens: int) -> None:
    """Blocks that cover n tokens hold at least n, and full ones at most n."""
    assert plan.full_blocks(num_tokens) * plan.tokens_per_block <= num_tokens
    assert plan.blocks_covering(num_tokens) * plan.tokens_per_block >= num_tokens


@settings(max_examples=30)
@given(PLANS.filter(lambda plan: len(plan.ranks) > 0))
def test_plan_adds_up_over_ranks(plan: CachePlan) -> None:
    """Device bytes are those of all ranks; what is usable is what is not null."""
    assert plan.device_bytes == sum(rank.device_bytes for rank in plan.ranks)
    assert plan.usable_blocks + plan.null_blocks == plan.num_blocks
    assert plan.host_bytes == plan.num_slots * plan.bytes_per_slot
    assert plan.layers == plan.ranks[0].layers
    assert plan.bytes_per_block == plan.ranks[0].bytes_per_block
    assert plan.concurrency * max(1, plan.blocks_per_longest_request) == pytest.approx(
        plan.usable_blocks
    )
