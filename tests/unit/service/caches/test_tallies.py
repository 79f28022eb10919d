"""Laws of tallies: each refusal and each wait of a call is counted once, and the number of kinds is bounded."""

from typing import Any

import numpy as np
import pytest

from kvlease.errors import InvalidError, KVLeaseError, PoolFullError, UnknownWorkerError
from kvlease.ids import LeaseId
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.caches.tallies import OTHER, REFUSALS_MAX, WAIT_BOUNDS_SECONDS, Tally
from kvleased.core.commands import Reserve
from kvleased.core.effects import Reserved, Stepped
from tests.unit.service.conftest import Node

GRANTED = Reserved(
    lease_id=LeaseId(1),
    block_ids=b"",
    device_hit_tokens=0,
    host_hit_tokens=0,
    row=0,
    covered_tokens=0,
)
RESERVE = Reserve(worker_id=1, request_id="r", keys=b"", num_tokens=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(PoolFullError(rule="blocks", resource="device_blocks"), "blocks", id="rule"),
        pytest.param(InvalidError(resource="wait_ms"), "wait_ms", id="resource"),
        pytest.param(PoolFullError(), "unsaid", id="neither"),
    ],
)
def test_refusals_have_a_reason(error: KVLeaseError, reason: str) -> None:
    """A refusal's reason is the rule that was broken, or else the resource that ran short."""
    tally = Tally()
    tally.refused("reserve", error)

    assert dict(tally.refusals) == {("reserve", error.code, reason): 1}
    assert repr(tally) == "<Tally 1 refusals, 0 waits>"


def test_kinds_of_refusals_are_bounded() -> None:
    """Above the limit all new kinds share one name; kinds known before keep their own."""
    tally = Tally()
    for number in range(REFUSALS_MAX + 5):
        tally.refused("reserve", InvalidError(rule=str(number)))
    tally.refused("reserve", InvalidError(rule="0"))

    assert len(tally.refusals) == REFUSALS_MAX + 1
    assert tally.refusals[OTHER] == 5
    assert tally.refusals["reserve", "INVALID", "0"] == 2


def test_what_steps_refuse_is_counted() -> None:
    """Each refused reserve and operation of a step counts once, also an operation of which only the code is told."""
    full, other = PoolFullError(rule="blocks"), InvalidError.number
    codes = np.array([0, full.number, other, other], np.int32).tobytes()
    reply = Stepped(
        codes=codes, num_blocks=b"", block_ids=b"", reserves=(full, GRANTED), errors=((1, full),)
    )
    tally = Tally()

    tally.stepped(reply)

    assert dict(tally.refusals) == {
        ("step", "POOL_FULL", "blocks"): 2,
        ("step", "INVALID", "unsaid"): 2,
    }


def test_waits_are_told_by_their_end() -> None:
    """A wait ends with a grant, a refusal or a caller that leaves; a refused wait counts as a refusal, too."""
    tally = Tally()
    for result in (object(), PoolFullError(rule="blocks")):
        tally.waits_for(RESERVE).end(result)
    tally.waits_for(RESERVE).leave()

    ends = {"granted", "refused", "left"}
    assert dict(tally.waits) == {("reserve", end): 1 for end in ends}
    assert tally.refusals.total() == 1
    assert sum(tally.wait_counts["reserve"]) == 3
    assert len(tally.wait_counts["reserve"]) == len(WAIT_BOUNDS_SECONDS) + 1


def a_request(name: str, num_tokens: int, wait_ms: int = 0) -> pb.ReserveRequest:
    """Return a request for tokens."""
    return pb.ReserveRequest(request_id=name, num_tokens=num_tokens, wait_ms=wait_ms)


async def test_call_whose_worker_ends_has_left(node: Node) -> None:
    """It is no refusal, as it is none where the caller's connection ends before its worker does."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        await node.ask("reserve", a_request("all", 64), worker)
        waiting: Any = daemon.call("reserve", a_request("patient", 4, wait_ms=60_000), worker)
        await node.ask("detach", pb.DetachRequest(), worker)
        with pytest.raises(UnknownWorkerError):
            await waiting

        tally = daemon.registry.cache("main").tally

    assert dict(tally.waits) == {("reserve", "left"): 1}
    assert not tally.refusals


async def test_daemon_counts_what_becomes_of_calls(node: Node) -> None:
    """A refusal at once, a grant after a wait and a refusal after a wait all show in the stats."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        held = await node.ask("reserve", a_request("all", 64), worker)
        with pytest.raises(PoolFullError):
            await node.ask("reserve", a_request("now", 4), worker)
        with pytest.raises(PoolFullError):
            await node.ask("reserve", a_request("later", 4, wait_ms=1), worker)
        waiting: Any = daemon.call("reserve", a_request("patient", 4, wait_ms=60_000), worker)
        await node.ask("release", pb.ReleaseRequest(lease_id=held.lease_id), worker)
        await waiting

        tally = daemon.registry.cache("main").tally

    assert tally.refusals["reserve", "POOL_FULL", "blocks"] == 2
    assert dict(tally.waits) == {("reserve", "granted"): 1, ("reserve", "refused"): 1}


async def test_daemon_counts_what_steps_refuse(node: Node) -> None:
    """A step for which there is no room counts as refused, though the step itself is answered."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        held = await node.ask("reserve", a_request("most", 60), worker)
        step = pb.StepRequest(reserves=[a_request("now", 20)])
        step.verbs, step.lease_ids = bytes([1]), packed(held.lease_id, np.int64)
        step.num_tokens, step.num_keys = packed(65, np.int32), packed(0, np.int32)
        await node.ask("step", step, worker)

        tally = daemon.registry.cache("main").tally

    assert tally.refusals.total() == 2
    assert {verb for verb, _, _ in tally.refusals} == {"step"}


def packed(number: int, kind: type[np.integer[Any]]) -> bytes:
    """Return a column of one number."""
    return np.array([number], kind).tobytes()
