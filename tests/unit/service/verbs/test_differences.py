"""Laws of what two registrations of one name differ in: what people changed is named, and not what follows from it."""

from dataclasses import replace

from kvlease.plan import CachePlan, PlanInputs
from kvlease.spec import FullAttention
from kvleased.planning import plan_or_explain
from kvleased.verbs.differences import plan_differences

INPUTS = PlanInputs(
    layers=(FullAttention(name="layer", num_kv_heads=1, head_size=64, dtype="float16"),),
    tokens_per_block=16,
    device_bytes=(1 << 20) + 100,
)


def _planned(inputs: PlanInputs) -> CachePlan:
    planned = plan_or_explain(inputs)
    assert isinstance(planned, CachePlan)
    return planned


def test_pool_of_another_size_differs_in_its_blocks() -> None:
    """A pool of other bytes differs in its number of blocks; its capacity and its waste follow from that."""
    other = replace(INPUTS, device_bytes=(1 << 21) + 2000)

    found = plan_differences(_planned(INPUTS), _planned(other))

    assert "num_blocks (256, not 512)" in found
    assert not [one for one in found if one.startswith(("waste", "capacity_tokens"))]


def test_what_follows_from_nothing_else_is_named() -> None:
    """Plans that differ in their waste alone are different all the same."""
    plan = _planned(INPUTS)

    assert [one.partition(" ")[0] for one in plan_differences(plan, replace(plan, waste=()))] == [
        "waste"
    ]
    assert plan_differences(plan, plan) == []
