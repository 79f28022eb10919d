"""Who may become a worker, how often and in whose place, and what an operator can undo."""

import asyncio
import errno
import os
import threading

import pytest

from kvlease.errors import (
    BusyError,
    InvalidError,
    NotYoursError,
    StaleRevisionError,
    StartingError,
    UnknownWorkerError,
    WrongStateError,
)
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.access.roles import Role
from kvleased.memory import cpu

from .conftest import Node, inputs


async def test_attach_over_the_network_is_never_answered_from_memory(node: Node) -> None:
    """Two callers that the kernel does not name become two workers, even with the same idempotency key."""
    async with node.life():
        await node.register()
        caller = Caller(transport="rest", idempotency_key="deploy-1")
        request = pb.AttachRequest(cache="main", tenant="alice")

        first, second = [await node.ask("attach", request, caller) for _ in range(2)]

        assert first.worker_id != second.worker_id
        assert first.token != second.token


async def test_remembered_attach_is_forgotten_with_its_worker(node: Node) -> None:
    """A repeated attach returns the same worker; once that worker has ended, it returns a new one."""
    async with node.life():
        await node.register()
        caller = Caller(transport="rest", idempotency_key="k", peer_pid=os.getpid())
        request = pb.AttachRequest(cache="main")
        first = await node.ask("attach", request, caller)
        again = await node.ask("attach", request, caller)
        await node.ask("detach", pb.DetachRequest(), Caller(transport="rest", token=first.token))

        other = await node.ask("attach", request, caller)

        assert again == first
        assert other.token != first.token
        await node.ask("stats", pb.StatsRequest(), Caller(transport="rest", token=other.token))


async def test_pidfd_of_another_process_is_refused(node: Node) -> None:
    """An attach with the pidfd of another process is refused: its worker's death would go unnoticed."""
    async with node.life():
        await node.register()
        pidfd = os.pidfd_open(1)
        caller = Caller(transport="local", pidfd=pidfd, peer_pid=os.getpid())

        with pytest.raises(InvalidError, match="which connected") as refused:
            await node.ask("attach", pb.AttachRequest(cache="main"), caller)

        os.close(pidfd)
        assert refused.value.rule == "other_process"


async def test_operator_can_force_the_end_of_a_watched_worker(node: Node) -> None:
    """A worker whose process lives is ended only when an operator forces it."""
    async with node.life() as daemon:
        await node.register()
        pidfd = os.pidfd_open(os.getpid())
        caller = Caller(transport="local", pidfd=pidfd, peer_pid=os.getpid())
        worker = await node.ask("attach", pb.AttachRequest(cache="main"), caller)
        os.close(pidfd)
        request = pb.DetachRequest(worker_id=worker.worker_id)

        with pytest.raises(WrongStateError, match="kvlease detach --force"):
            await node.ask("detach", request)
        request.force = True
        await node.ask("detach", request)

        assert not daemon.registry.by_id


async def test_operator_is_told_that_a_worker_is_not_there(node: Node) -> None:
    """An operator that names a missing worker is told "not found"; a worker learns nothing of other workers."""
    async with node.life():
        await node.register()
        own = await node.attach()

        with pytest.raises(UnknownWorkerError, match="kvlease workers lists them") as caught:
            await node.ask("detach", pb.DetachRequest(worker_id=99))
        with pytest.raises(NotYoursError, match="is not the caller"):
            await node.ask("detach", pb.DetachRequest(worker_id=99), own)

    assert (caught.value.code, caught.value.resource) == ("UNKNOWN_WORKER", "worker_id")
    assert (caught.value.http_status, caught.value.grpc_status) == (404, "NOT_FOUND")


async def test_operator_that_names_no_worker_is_told(node: Node) -> None:
    """0 means the caller, who is no worker; that a token is missing would lead it astray."""
    async with node.life():
        await node.register()

        with pytest.raises(InvalidError, match="name a worker, as kvlease workers lists them"):
            await node.ask("detach", pb.DetachRequest())


async def test_joiners_leave_places_over_a_restart(node: Node) -> None:
    """Joiners get at most half of the workers' places, also after the daemon has restarted."""
    node.settings = node.settings.model_copy(update={"max_workers": 4})
    joiner, request = Caller(transport="rest", role=Role.JOINER), pb.AttachRequest(cache="main")
    async with node.life():
        await node.register()
        for _ in range(2):
            await node.ask("attach", request, joiner)
    async with node.life():
        with pytest.raises(BusyError) as refused:
            await node.ask("attach", request, joiner)
        await node.attach()

    assert (refused.value.rule, refused.value.limit) == ("joiners", 2)


async def test_tenant_of_a_minimum_finds_a_place_among_the_workers(node: Node) -> None:
    """However many workers another tenant attaches, places are left for a tenant that has a minimum."""
    node.settings = node.settings.model_copy(update={"max_workers": 16})
    async with node.life():
        await node.register()
        limits = pb.TenantLimits(min_percent=50)
        await node.ask("set_tenant", pb.SetTenantRequest(tenant="chat", limits=limits, revision=1))
        for _ in range(16 - 4 - 2):
            await node.attach(tenant="flood")

        with pytest.raises(BusyError, match="kept for other tenants"):
            await node.attach(tenant="flood")
        for _ in range(4):
            await node.attach(tenant="chat")


async def test_last_revision_of_limits_can_be_removed(node: Node) -> None:
    """A tenant with the last revision is not locked: removing its limits starts the revisions anew."""
    async with node.life():
        last = 2**53 - 1

        async def told(revision: int, **limits: float) -> int:
            request = pb.SetTenantRequest(tenant="chat", revision=revision)
            request.limits.CopyFrom(pb.TenantLimits(**limits))  # type: ignore[arg-type]
            return int((await node.ask("set_tenant", request)).revision)

        with pytest.raises(InvalidError, match=f"from 0 to {last}"):
            await told(last + 1, leases_max=1)
        assert await told(last, leases_max=1) == last
        with pytest.raises(StaleRevisionError, match="remove the limits"):
            await told(last, leases_max=2)
        assert await told(last) == 0
        assert await told(1, leases_max=2) == 1


async def test_workers_end_with_a_cache_that_is_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the memory of a cache cannot be had, its workers end with it, and belong to no later cache of its name."""
    goes_on, allocate = threading.Event(), cpu.allocate

    def fail(fd: int, start: int, num_bytes: int) -> None:
        del fd, start, num_bytes
        assert goes_on.wait(10)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cpu, "allocate", fail)
    request = pb.ReserveRequest(request_id="r", num_tokens=4)
    async with node.life() as daemon:
        await node.ask("register_cache", pb.RegisterCacheRequest(cache="main", inputs=inputs()))
        worker = await node.attach()
        with pytest.raises(StartingError):
            await node.ask("reserve", request, worker)
        goes_on.set()
        async with asyncio.timeout(10):
            while "main" in daemon.registry.caches:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)

        with pytest.raises(UnknownWorkerError):
            await node.ask("reserve", request, worker)
        monkeypatch.setattr(cpu, "allocate", allocate)
        await node.register(device_blocks=12)

    async with node.life():
        with pytest.raises(UnknownWorkerError):
            await node.ask("reserve", request, worker)
