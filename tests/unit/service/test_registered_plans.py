"""A cache is registered as it was planned, for every layout of the golden vectors."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.plan import CachePlan, PlanInputs
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.config.settings import MIB, Settings
from kvleased.planning import plan_or_explain
from kvleased.verbs.differences import plan_differences
from tests.golden.words import plan_inputs_of

from .conftest import Node

_VECTORS: Final = Path(__file__).parents[2] / "golden" / "vectors" / "planning.json"
_CASES: Final = json.loads(_VECTORS.read_text())["vectors"]
_PLANNED_ONLY: Final = ("blocks_per_slot_not_supported", "keeps_nothing")
"""Rules by which a correct plan is not registered."""
_PARTS: Final = 4
_THOROUGH: Final = [pytest.param(part, marks=pytest.mark.thorough) for part in range(1, _PARTS)]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings that allow more memory than there is: these caches are deleted before it is filled."""
    return Settings(
        runtime_dir=tmp_path, max_leases=8, memory_bytes_max=1 << 60, populate_chunk_bytes=MIB
    )


@pytest.mark.parametrize("part", [0, *_THOROUGH])
async def test_every_golden_plan_is_registered_as_planned(node: Node, part: int) -> None:
    """The verbs plan and register_cache answer with the planner's own plan, field by field, or its own refusal."""
    differing: dict[str, object] = {}
    num_registered, cases = 0, _CASES[part::_PARTS]

    async with node.life():
        for case in cases:
            inputs = plan_inputs_of(case["input"])
            sent = _sent(inputs)
            if sent is None:
                continue
            expected = _outcome(inputs)
            planned = await _answer(node, "plan", sent)
            registered = await _answer(node, "register_cache", sent)
            found = [*_differences(expected, planned), *_differences(expected, registered)]
            if found:
                differing[case["id"]] = found
            num_registered += isinstance(registered, CachePlan)

    assert not differing
    assert num_registered > len(cases) // 2


async def test_plan_without_layers_is_not_registered(node: Node) -> None:
    """A model without attention can be planned, but is not registered: its workers would have no memory to share."""
    case = next(case for case in _CASES if case["id"] == "plan-043")
    inputs = plan_inputs_of(case["input"])

    async with node.life():
        planned = await _answer(node, "plan", inputs.to_proto())
        refused = await _answer(node, "register_cache", inputs.to_proto())

    assert isinstance(planned, CachePlan)
    assert isinstance(refused, InvalidError)
    assert (refused.rule, refused.resource, refused.need) == ("keeps_nothing", "layers", 1)


def _sent(inputs: PlanInputs) -> pb.PlanInputs | None:
    """Return the inputs as sent, or None if the client library refuses them first."""
    try:
        return inputs.to_proto()
    except InvalidError:
        with pytest.raises(InvalidError):
            plan_or_explain(inputs)
        return None


def _outcome(inputs: PlanInputs) -> CachePlan | KVLeaseError:
    try:
        return plan_or_explain(inputs)
    except KVLeaseError as refusal:
        return refusal


async def _answer(node: Node, verb: str, sent: pb.PlanInputs) -> CachePlan | KVLeaseError:
    """Return the plan or the refusal that a verb answers with, and delete what the call made."""
    request: Any = pb.PlanRequest(inputs=sent)
    if verb == "register_cache":
        request = pb.RegisterCacheRequest(cache="golden", inputs=sent)
    try:
        reply = await node.ask(verb, request)
    except KVLeaseError as refusal:
        return refusal
    if verb == "plan":
        return CachePlan.from_proto(reply.plan)
    entry = node.daemon.registry.cache("golden")
    violations = entry.core.check()
    await node.ask("delete_cache", pb.DeleteCacheRequest(cache="golden"))
    assert violations == []
    assert CachePlan.from_proto(reply.info.plan) == entry.plan
    return entry.plan


def _differences(expected: CachePlan | KVLeaseError, got: CachePlan | KVLeaseError) -> list[str]:
    if isinstance(expected, CachePlan) and isinstance(got, CachePlan):
        return plan_differences(expected, got)
    if isinstance(expected, KVLeaseError) and isinstance(got, KVLeaseError):
        return [] if _words(expected) == _words(got) else [f"{_words(got)}, not {_words(expected)}"]
    if isinstance(got, InvalidError) and got.rule in _PLANNED_ONLY:
        return []
    return [f"{got!r}, not {expected!r}"]


def _words(refusal: KVLeaseError) -> tuple[object, ...]:
    return (
        type(refusal), refusal.message, refusal.rule, refusal.resource,
        refusal.need, refusal.available, refusal.limit, refusal.remedies,
    )  # fmt: skip
