"""Laws of recovery: caches, committed blocks, leases and live workers outlive the control process."""

import asyncio
import os
import struct
import subprocess
import sys

import pytest

from kvlease.errors import InvalidError, NotYoursError, UnknownWorkerError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.core.blocks.states import State

from .conftest import Node, keys


async def test_committed_blocks_are_found_in_the_next_life(node: Node) -> None:
    """A cache comes back under its name with its plan, and its committed blocks are found."""
    async with node.life():
        before = await node.register()
        worker = await node.attach()
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=8), worker)
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=keys(1, 2))
        await node.ask("commit", commit, worker)

    async with node.life() as daemon:
        after = await node.ask("get_cache", pb.GetCacheRequest(cache="main"))
        found = await node.ask("lookup", pb.LookupRequest(keys=keys(1, 2)))

        assert after.info.plan == before.plan
        assert after.info.status == "ready"
        assert found.num_device_blocks == 2
        assert daemon.registry.cache("main").core.check() == []


async def test_resumed_worker_keeps_what_both_ends_know(node: Node) -> None:
    """A resumed worker keeps its identity, and the leases that both it and the core still have."""
    async with node.life():
        await node.register()
        worker = await node.attach(tenant="t")
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=8), worker)
        (first,) = node.daemon.registry.by_id.values()
        before = (first.worker_id, first.tenant_key)

    async with node.life() as daemon:
        inventory = struct.pack("<2q", lease.lease_id, lease.lease_id + 1)
        request = pb.AttachRequest(cache="main", resume_token=worker.token, lease_ids=inventory)
        reply = await node.ask("attach", request, Caller(transport="rest"))

        assert (reply.worker_id, reply.tenant_key, reply.token) == (*before, worker.token)
        assert reply.lease_ids == struct.pack("<q", lease.lease_id)
        assert reply.epoch == daemon.epoch > 1_001
        await node.ask("release", pb.ReleaseRequest(lease_id=lease.lease_id), worker)


async def test_unknown_token_does_not_resume(node: Node) -> None:
    """An unknown token cannot resume and is refused, so the worker attaches anew."""
    async with node.life():
        await node.register()

        with pytest.raises(UnknownWorkerError):
            await node.ask("attach", pb.AttachRequest(cache="main", resume_token="0" * 32))


async def test_worker_that_died_meanwhile_has_no_leases(node: Node) -> None:
    """A worker that dies while there is no control process is dead to the next one, and its blocks are free."""
    with _idle_process() as process:
        pidfd = os.pidfd_open(process.pid)
        async with node.life():
            await node.register()
            request = pb.AttachRequest(cache="main")
            reply = await node.ask("attach", request, Caller(transport="local", pidfd=pidfd))
            os.close(pidfd)
            worker = Caller(transport="local", token=reply.token)
            assert reply.death_proof == "pidfd"
            await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=8), worker)
        process.kill()
        process.wait()

        async with node.life() as daemon:
            census = daemon.registry.cache("main").core.census()

            assert (census.num_workers, census.num_leases, census.device["free"]) == (0, 0, 16)


async def test_worker_without_a_pidfd_is_kept_without_a_descriptor(node: Node) -> None:
    """A worker that nothing can prove dead costs no descriptor, and is the same worker in the next life."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        (worker_id,) = daemon.registry.by_id
    assert node.noted == [f"worker/{worker_id}"]

    async with node.life() as daemon:
        assert daemon.registry.worker(worker.token).worker_id == worker_id
        await node.ask("detach", pb.DetachRequest(), worker)
    assert node.noted == []


async def test_drain_is_kept_without_a_descriptor(node: Node) -> None:
    """The drain of a daemon costs no descriptor, goes on in the next life, and ends for good where it is undone."""
    async with node.life():
        await node.ask("drain", pb.DrainRequest())
    assert len(node.noted) == 1

    async with node.life() as daemon:
        assert daemon.registry.is_draining
        await node.ask("undrain", pb.UndrainRequest())
    assert node.noted == []


@pytest.mark.parametrize("done", ["drain", "resize"])
async def test_blocks_of_a_drained_or_smaller_cache_are_copied_down(node: Node, done: str) -> None:
    """The next life copies down what the last one did not, also in a cache that was drained or made smaller."""
    async with node.life():
        await node.register(options=pb.CacheOptions(write_policy="write-through"))
        worker = await node.attach()
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=16), worker)
        request = {
            "drain": pb.DrainRequest(cache="main"),
            "resize": pb.ResizeRequest(cache="main", tier="device", num_blocks=12),
        }[done]
        await node.ask(done, request)
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=16, keys=keys(1, 4))
        await node.ask("commit", commit, worker)

    async with node.life() as daemon, asyncio.timeout(10):
        core = daemon.registry.cache("main").core
        while core.census().host["ready"] < 4:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)

        assert core.census().num_copies == 0


async def test_minima_that_fit_only_a_smaller_pool_are_kept(node: Node) -> None:
    """Minima that are set while a pool is smaller may round to more than the whole pool; its cache comes back."""
    limits = {
        "a": pb.TenantLimits(min_percent=50),
        "b": pb.TenantLimits(min_percent=50),
        "c": pb.TenantLimits(min_bytes=1),
    }
    async with node.life() as daemon:
        await node.register(device_blocks=6)
        limits["c"].min_bytes = daemon.registry.cache("main").plan.device_bytes_per_block
        await node.ask("resize", pb.ResizeRequest(cache="main", tier="device", num_blocks=5))
        for tenant, one in limits.items():
            request = pb.SetTenantRequest(tenant=tenant, revision=1, limits=one)
            await node.ask("set_tenant", request)
        before = daemon.registry.cache("main").core.shape

    async with node.life() as daemon:
        assert daemon.registry.cache("main").core.shape == before


async def test_minima_that_fit_both_sizes_of_a_resize_are_cut_for_one_between(node: Node) -> None:
    """A kill in the middle of a resize may leave a size that the minima do not fit; the cache comes back."""
    limits = {
        "a": pb.TenantLimits(min_percent=50),
        "b": pb.TenantLimits(min_percent=50),
        "c": pb.TenantLimits(min_bytes=1),
    }
    async with node.life() as daemon:
        await node.register(device_blocks=7)
        limits["c"].min_bytes = daemon.registry.cache("main").plan.device_bytes_per_block
        for tenant, one in limits.items():
            request = pb.SetTenantRequest(tenant=tenant, revision=1, limits=one)
            await node.ask("set_tenant", request)
        # The resize to 5 blocks is killed when it has parked the first of two.
        daemon.registry.cache("main").core._state.device.records.state[6] = State.PARKED

    async with node.life() as daemon:
        core = daemon.registry.cache("main").core
        assert sorted(one.min_blocks for one in core.shape.tenants.values()) == [1, 2, 3]
        await node.ask("resize", pb.ResizeRequest(cache="main", tier="device", num_blocks=5))
        assert sorted(one.min_blocks for one in core.shape.tenants.values()) == [1, 2, 2]
        assert core.check() == []


async def test_half_made_cache_is_forgotten(node: Node) -> None:
    """Regions without a registration, which a kill during registration leaves behind, are dropped."""
    async with node.life():
        await node.register()
        node.daemon._keeper.drop("cache/main/plan")

    async with node.life() as daemon:
        await node.register("other")

        assert list(daemon.registry.caches) == ["other"]
        await node.until_kept(1 + 7)


async def test_token_of_another_process_does_not_resume(node: Node) -> None:
    """A second process cannot take over a worker's leases while that worker's death is not proven."""
    with _idle_process() as process:
        own, other = os.pidfd_open(os.getpid()), os.pidfd_open(process.pid)
        if os.fstat(own).st_ino == os.fstat(other).st_ino:
            pytest.skip("this kernel cannot tell processes apart by their pidfds")
        async with node.life():
            await node.register()
            request = pb.AttachRequest(cache="main")
            reply = await node.ask("attach", request, Caller(transport="local", pidfd=own))
            resume = pb.AttachRequest(cache="main", resume_token=reply.token)

            with pytest.raises(NotYoursError):
                await node.ask("attach", resume, Caller(transport="local", pidfd=other))

            again = await node.ask("attach", resume, Caller(transport="local", pidfd=own))
            assert again.worker_id == reply.worker_id
        os.close(own)
        os.close(other)
        process.kill()


async def test_descriptor_that_is_no_pidfd_proves_nothing(node: Node) -> None:
    """An attach with a descriptor that is no pidfd is refused, as it cannot tell of the caller's death."""
    async with node.life():
        await node.register()
        caller = Caller(transport="local", pidfd=sys.stderr.fileno())
        with pytest.raises(InvalidError, match="pidfd"):
            await node.ask("attach", pb.AttachRequest(cache="main"), caller)


async def test_local_worker_gets_pool_and_tables(node: Node) -> None:
    """A local attach hands over the device pool for writing and the block table for reading only."""
    async with node.life() as daemon:
        await node.register()
        own = os.pidfd_open(os.getpid())
        reply = await node.ask(
            "attach", pb.AttachRequest(cache="main"), Caller(transport="local", pidfd=own)
        )
        os.close(own)

        device_fd, tables_fd = daemon.fds(reply.worker_id)

        assert [(region.kind, region.read_only) for region in reply.regions] == [
            ("device", False),
            ("tables", True),
        ]
        assert [os.fstat(fd).st_size for fd in (device_fd, tables_fd)] == [
            region.region_bytes for region in reply.regions
        ]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(tables_fd, b"x", 0)


def _idle_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
