"""A resize goes on to its end, whoever leaves meanwhile."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvlease.errors import NeverFitsError, PoolFullError, UnknownCacheError, WrongStateError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.caches import host_watch
from kvleased.config.settings import Settings
from kvleased.core.effects import Tier
from kvleased.memory import holes
from kvleased.movers.engine import Engine
from kvleased.movers.protocol import Batch, Completion
from kvleased.supervision.keeper_link import KeeperLink
from tests.unit.service.conftest import OPERATOR, Node, keys
from tests.unit.service.registering import SLOT_BYTES


@pytest.fixture
def settings(tmp_path: Path, request: pytest.FixtureRequest) -> Settings:
    """Settings of a small daemon, which may have as much memory as the test says."""
    most = getattr(request, "param", 1 << 30)
    return Settings(runtime_dir=tmp_path, max_leases=8, memory_bytes_max=most)


async def test_resize_whose_caller_leaves_ends_before_the_next_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next resize waits, so it brings back nothing that a thread is still giving back."""
    began, goes_on, brings = (threading.Event() for _ in range(3))
    give_back, bring_back = holes.give_back, holes.bring_back

    def slowly(fd: int, ranges: holes.Ranges, region_bytes: int) -> None:
        began.set()
        assert goes_on.wait(10)
        give_back(fd, ranges, region_bytes)

    def soon(fd: int, ranges: holes.Ranges, region_bytes: int) -> None:
        brings.set()
        bring_back(fd, ranges, region_bytes)

    async with node.life() as daemon:
        await node.register()
        monkeypatch.setattr(holes, "give_back", slowly)
        monkeypatch.setattr(holes, "bring_back", soon)
        shrink, grow = (
            pb.ResizeRequest(cache="main", tier="device", num_blocks=count) for count in (4, 16)
        )
        left = daemon.call("resize", shrink, OPERATOR)
        assert isinstance(left, asyncio.Future)
        assert await asyncio.to_thread(began.wait, 10)
        daemon.cancel(left)
        growing = asyncio.ensure_future(node.ask("resize", grow))
        is_early = await asyncio.to_thread(brings.wait, 0.3)
        goes_on.set()
        grown = await asyncio.wait_for(growing, 10)

    assert not is_early
    assert brings.is_set()
    assert grown.num_parked == 0


async def test_limits_that_a_tenant_gets_during_a_resize_stay(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits of tenants that are set while memory is brought back are those of the larger pool, too."""
    async with node.life() as daemon:
        await node.register()
        await node.ask("resize", pb.ResizeRequest(cache="main", tier="device", num_blocks=4))
        began, goes_on = _with_memory_held_up(monkeypatch)
        grow = pb.ResizeRequest(cache="main", tier="device", num_blocks=16)
        growing = asyncio.ensure_future(node.ask("resize", grow))
        assert await asyncio.to_thread(began.wait, 10)
        half = pb.TenantLimits(max_percent=50)
        await node.ask("set_tenant", pb.SetTenantRequest(tenant="t", revision=1, limits=half))
        goes_on.set()
        await asyncio.wait_for(growing, 10)

        (limits,) = daemon.registry.cache("main").core.shape.tenants.values()
        assert limits.max_blocks == 8


async def test_cache_that_is_deleted_during_its_resize_costs_no_other_cache_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resize whose cache is deleted meanwhile is refused as that, and gives back no page of the next cache."""
    began, goes_on = threading.Event(), threading.Event()
    give_back = holes.give_back
    files = []

    def slowly(fd: int, ranges: holes.Ranges, region_bytes: int) -> None:
        began.set()
        assert goes_on.wait(10)
        files.append(os.fstat(fd).st_ino)
        give_back(fd, ranges, region_bytes)

    async with node.life() as daemon:
        parallel = pb.ParallelInputs(tensor_ranks=2)
        await node.register(parallel=parallel)
        fds = daemon.registry.cache("main").fds
        own = [os.fstat(fds[f"device.{rank}"]).st_ino for rank in range(2)]
        monkeypatch.setattr(holes, "give_back", slowly)
        shrink = pb.ResizeRequest(cache="main", tier="device", num_blocks=4)
        shrinking = asyncio.ensure_future(node.ask("resize", shrink))
        assert await asyncio.to_thread(began.wait, 10)
        await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))
        await node.register(cache="next", parallel=parallel)
        goes_on.set()

        with pytest.raises(UnknownCacheError, match="cache main was deleted"):
            await asyncio.wait_for(shrinking, 10)
        assert files == own


@pytest.mark.parametrize("settings", [1 << 16], indirect=True)
async def test_memory_that_is_being_brought_back_is_taken(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is registered while a pool grows cannot have the memory of the growing pool, too."""
    began, goes_on = _with_memory_held_up(monkeypatch)
    async with node.life() as daemon:
        await node.register(device_blocks=64, host_bytes=0)
        await node.ask("resize", pb.ResizeRequest(cache="main", tier="device", num_blocks=1))
        grow = pb.ResizeRequest(cache="main", tier="device", num_blocks=64)
        growing = asyncio.ensure_future(node.ask("resize", grow))
        assert await asyncio.to_thread(began.wait, 10)
        with pytest.raises(NeverFitsError, match="memory_bytes_max"):
            await node.register(cache="next", device_blocks=100, host_bytes=0)
        goes_on.set()
        await asyncio.wait_for(growing, 10)

        assert daemon.registry.bytes_in_use == 64 * SLOT_BYTES


@pytest.mark.parametrize("settings", [1 << 16], indirect=True)
async def test_memory_of_a_cache_that_is_being_made_is_taken(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that grows while a cache is registered cannot have the memory of that cache; a failed cache has none."""
    create, began, goes_on = KeeperLink.create, asyncio.Event(), asyncio.Event()

    async def slowly(link: KeeperLink, name: str, num_bytes: int, metadata: Any) -> int:
        began.set()
        await goes_on.wait()
        return await create(link, name, num_bytes, metadata)

    async with node.life() as daemon:
        await node.register(device_blocks=64, host_bytes=0)
        await node.ask("resize", pb.ResizeRequest(cache="main", tier="device", num_blocks=1))
        monkeypatch.setattr(KeeperLink, "create", slowly)
        making = asyncio.ensure_future(node.register(cache="next", device_blocks=100, host_bytes=0))
        await asyncio.wait_for(began.wait(), 10)
        grow = pb.ResizeRequest(cache="main", tier="device", num_blocks=64)
        with pytest.raises(PoolFullError, match="may use are left"):
            await node.ask("resize", grow)
        goes_on.set()
        await asyncio.wait_for(making, 10)
        assert daemon.registry.bytes_in_use <= daemon.settings.memory_bytes_max

        await node.ask("delete_cache", pb.DeleteCacheRequest(cache="next"))
        with pytest.raises(NeverFitsError, match="memory_bytes_max"):
            await node.register(cache="huge", device_blocks=128, host_bytes=0)
        await node.ask("resize", grow)


async def test_calls_that_wait_for_a_cache_end_with_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for copies, or for another resize, is refused once the cache is deleted; later ones go on."""
    goes_on = threading.Event()
    complete = Engine._complete

    def slowly(engine: Engine, batch: Batch) -> Completion:
        assert goes_on.wait(10)
        return complete(engine, batch)

    monkeypatch.setattr(Engine, "_complete", slowly)
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        reserve = pb.ReserveRequest(request_id="a", num_tokens=64)
        lease = await node.ask("reserve", reserve, worker)
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=64, keys=keys(1, 16))
        await node.ask("commit", commit, worker)
        await node.ask("detach", pb.DetachRequest(), worker)
        evict = pb.EvictRequest(num_blocks=4, wait_ms=60_000)
        shrink = pb.ResizeRequest(cache="main", tier="device", num_blocks=12)
        waiting = [
            asyncio.ensure_future(node.ask("evict", evict)),
            *(asyncio.ensure_future(node.ask("resize", shrink)) for _ in range(2)),
        ]
        async with asyncio.timeout(10):
            while "2 calls waiting" not in repr(daemon):  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)
        await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))
        for one in waiting:
            with pytest.raises(UnknownCacheError, match="cache main was deleted"):
                await asyncio.wait_for(one, 10)
        goes_on.set()
        await node.register(cache="next")
        shrink.cache = "next"
        resized = await asyncio.wait_for(node.ask("resize", shrink), 10)

    assert resized.num_blocks == 12


async def test_host_pool_that_was_cut_off_is_not_resized(node: Node) -> None:
    """A host pool that was cut off cannot be resized; the refusal says what to do."""
    async with node.life() as daemon:
        await node.register()
        daemon.registry.cache("main").stores[Tier.HOST] = host_watch.CUT_OFF

        with pytest.raises(WrongStateError, match="register it again"):
            await node.ask("resize", pb.ResizeRequest(cache="main", tier="host", num_blocks=1))


async def test_blocks_that_a_resize_takes_beside_a_full_host_pool_are_told_as_its_own(
    node: Node,
) -> None:
    """What finds no slot before a resize is dropped by the resize, whatever command took it off the device."""
    async with node.life():
        await node.register(host_bytes=2 * SLOT_BYTES)
        worker = await node.attach()
        for key in range(1, 5):
            reserve = pb.ReserveRequest(request_id=f"r{key}", num_tokens=4)
            lease = await node.ask("reserve", reserve, worker)
            commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=4, keys=keys(key, 1))
            await node.ask("commit", commit, worker)
            await node.ask("release", pb.ReleaseRequest(lease_id=lease.lease_id), worker)

        resize = pb.ResizeRequest(cache="main", tier="device", num_blocks=1)
        resized = await node.ask("resize", resize)
        counters = node.daemon.registry.cache("main").core.census().counters
        missed = pb.ReserveRequest(request_id="m", num_tokens=4, keys=keys(3, 1), explain=True)
        answer = await node.ask("reserve", missed, worker)

    assert resized.num_evicted == counters["blocks_dropped"] > 0
    assert [miss.reason for miss in answer.misses] == ["resized"]
    assert "a resize took them from the device tier" in answer.misses[0].why


def _with_memory_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[threading.Event, threading.Event]:
    """Have memory that is brought back tell that it was begun, and wait until it may go on."""
    began, goes_on = threading.Event(), threading.Event()
    bring_back = holes.bring_back

    def slowly(fd: int, ranges: holes.Ranges, region_bytes: int) -> None:
        began.set()
        assert goes_on.wait(10)
        bring_back(fd, ranges, region_bytes)

    monkeypatch.setattr(holes, "bring_back", slowly)
    return began, goes_on
