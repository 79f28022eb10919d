"""Laws of inspect: it lists who uses a cache, a page at a time, and shows no secrets."""

import os

import pytest

from kvlease.errors import InvalidError, KVLeaseError, UnknownCacheError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.verbs.inspecting import ENTRIES_MAX
from tests.unit.service.conftest import Node, keys


async def inspect(node: Node, what: str, **page: int) -> pb.InspectResponse:
    """Inspect the cache."""
    asked = pb.InspectRequest(cache="main", what=what, **page)
    response = await node.ask("inspect", asked)
    assert isinstance(response, pb.InspectResponse)
    return response


async def test_workers_are_listed_with_their_leases(node: Node) -> None:
    """The list shows each worker's name, tenant, rank, proof of death and leases, but not its token."""
    async with node.life():
        await node.register()
        await node.register("other")
        await node.attach("other")
        worker = await node.attach(worker_name="engine", tenant="acme")
        await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)

        listed = await inspect(node, "workers")

    (one,) = listed.workers
    assert (one.worker_name, one.tenant, one.rank, one.num_leases) == ("engine", "acme", 0, 1)
    assert (one.death_proof, one.age_ms < 60_000, listed.num_total) == ("none", True, 1)
    assert worker.token not in str(listed)


async def test_age_of_a_worker_survives_a_restart(node: Node) -> None:
    """A worker's age counts from its first attach."""
    async with node.life() as daemon:
        await node.register()
        await node.attach()
        (before,) = [one.attached_at for one in daemon.registry.by_id.values()]

    async with node.life() as daemon:
        assert [one.attached_at for one in daemon.registry.by_id.values()] == [before]


async def test_leases_and_pins_are_listed(node: Node) -> None:
    """The lists show a lease's owner, phase, blocks and times, and a pin's blocks."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        reserve = pb.ReserveRequest(request_id="r", num_tokens=8)
        lease = await node.ask("reserve", reserve, worker)
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=keys(1, 2))
        await node.ask("commit", commit, worker)
        pin = await node.ask("pin", pb.PinRequest(keys=keys(1, 2)))

        leases, pins = await inspect(node, "leases"), await inspect(node, "pins")

    (one,) = leases.leases
    assert (one.lease_id, one.phase, one.num_blocks, one.num_tokens) == (
        lease.lease_id,
        "active",
        2,
        8,
    )
    assert one.HasField("age_ms")
    assert 0 < one.left_ms <= 30_000
    (pinned,) = pins.pins
    assert (pinned.pin_id, pinned.num_blocks, pinned.tenant) == (pin.pin_id, 2, "default")
    assert pinned.age_ms < 60_000
    assert one.tenant == "default"


async def test_process_of_a_worker_is_told_where_the_kernel_names_it(node: Node) -> None:
    """A worker that attached over the local socket has a process id, also after a restart; one over TCP has none."""
    async with node.life():
        await node.register()
        local = Caller(transport="local", peer_pid=os.getpid())
        await node.ask("attach", pb.AttachRequest(cache="main"), local)
        await node.attach()
        before = [one.process_id for one in (await inspect(node, "workers")).workers]

    async with node.life():
        after = [one.process_id for one in (await inspect(node, "workers")).workers]

    assert before == after == [os.getpid(), 0]


async def test_page_has_no_more_than_asked_for(node: Node) -> None:
    """A page ends at its limit and tells how many entries there are; the next page starts after its last id."""
    async with node.life():
        await node.register()
        for _ in range(3):
            await node.attach()

        first = await inspect(node, "workers", limit=2)
        second = await inspect(node, "workers", limit=2, after_id=first.workers[-1].worker_id)

    assert (len(first.workers), len(second.workers), first.num_total, second.num_total) == (
        2,
        1,
        3,
        3,
    )


@pytest.mark.parametrize(
    ("request_", "error", "resource"),
    [
        pytest.param(
            pb.InspectRequest(cache="none", what="pins"), UnknownCacheError, "cache", id="cache"
        ),
        pytest.param(pb.InspectRequest(cache="main", what="keys"), InvalidError, "what", id="list"),
        pytest.param(
            pb.InspectRequest(cache="main", what="pins", limit=ENTRIES_MAX + 1),
            InvalidError,
            "limit",
            id="limit",
        ),
        pytest.param(
            pb.InspectRequest(cache="main", what="tenants", after_id=-1),
            InvalidError,
            "after_id",
            id="id",
        ),
    ],
)
async def test_senseless_inspect_is_refused(
    node: Node, request_: pb.InspectRequest, error: type[KVLeaseError], resource: str
) -> None:
    """An unknown cache or list, a page above the limit and a negative start are refused by name."""
    async with node.life():
        await node.register()

        with pytest.raises(error) as caught:
            await node.ask("inspect", request_)

    assert caught.value.resource == resource
