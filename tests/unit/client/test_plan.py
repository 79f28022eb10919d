"""Laws of plans as records: what goes over the wire comes back the same."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.plan import CachePlan, LayerPlacement, PlanInputs
from kvlease.spec import BYTES_PER_ELEMENT, FullAttention
from kvlease.v1 import kvlease_pb2 as pb

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SPECS = st.builds(
    FullAttention,
    name=TEXT,
    num_kv_heads=U32,
    head_size=U32,
    head_size_v=U32,
    dtype=st.sampled_from(sorted(BYTES_PER_ELEMENT)),
)
INPUTS = st.builds(
    PlanInputs,
    layers=st.lists(SPECS, max_size=3).map(tuple),
    model_config=TEXT,
    kv_dtype=TEXT,
    tokens_per_block=U32,
    device_bytes=U64,
    device_blocks=U64,
    host_bytes=U64,
    longest_request_tokens=U64,
    model_digest=TEXT,
)
PLACEMENTS = st.builds(
    LayerPlacement, name=TEXT, group=U32, offset_bytes=U64, bytes_per_page=U64, spec=SPECS
)
PLANS = st.builds(
    CachePlan,
    **dict.fromkeys((field.name for field in dataclasses.fields(CachePlan)), U64)
    | {
        "layout_fingerprint": TEXT,
        "model_digest": TEXT,
        "tokens_per_block": U32,
        "layers": st.lists(PLACEMENTS, max_size=3).map(tuple),
    },
)


@given(INPUTS)
def test_inputs_survive_the_wire(inputs: PlanInputs) -> None:
    """Inputs come back from their message as they were, every field of them."""
    message = pb.PlanInputs.FromString(inputs.to_proto().SerializeToString())

    assert PlanInputs.from_proto(message) == inputs


@given(PLANS)
def test_plans_survive_the_wire(plan: CachePlan) -> None:
    """A plan comes back from its message as it was, every field of it."""
    message = pb.CachePlan.FromString(plan.to_proto().SerializeToString())

    assert CachePlan.from_proto(message) == plan


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (PlanInputs, pb.PlanInputs),
        (LayerPlacement, pb.LayerPlacement),
        (CachePlan, pb.CachePlan),
        (FullAttention, pb.LayerSpec),
    ],
)
def test_records_have_the_fields_of_their_messages(record: type, message: type) -> None:
    """One vocabulary: a field is called the same in the library and on the wire."""
    fields = {field.name for field in dataclasses.fields(record)}

    assert fields == set(message.DESCRIPTOR.fields_by_name) - {"kind"}  # type: ignore[attr-defined]  # generated


def test_unknown_kind_of_layer_is_refused() -> None:
    """A newer peer's kind of layer is refused by name, not taken for another."""
    message = pb.PlanInputs(layers=[pb.LayerSpec(name="0", kind="sliding_window")])

    with pytest.raises(InvalidError, match="sliding_window"):
        PlanInputs.from_proto(message)


@given(PLANS.filter(lambda plan: plan.tokens_per_block > 0), st.integers(0, 10**9))
def test_plan_counts_blocks_of_its_own_size(plan: CachePlan, num_tokens: int) -> None:
    """Blocks that cover n tokens hold at least n, and full ones at most n."""
    assert plan.full_blocks(num_tokens) * plan.tokens_per_block <= num_tokens
    assert plan.blocks_covering(num_tokens) * plan.tokens_per_block >= num_tokens
