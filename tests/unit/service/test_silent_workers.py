"""Laws of workers without a proof of death: they end when they fall silent, but never while they have a lease."""

import asyncio
import os

import pytest

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import WorkerEntry
from kvleased.verbs.silent_workers import SilentWorkers

from .conftest import Node


class Looking:
    """A search for silent workers by the test's own clock."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.now = asyncio.get_running_loop().time()
        self.ended: list[int] = []
        self.silent = SilentWorkers(node.daemon.registry, node.settings, self._end)
        self.silent.look(self.now)

    def pass_time(self, seconds: float) -> list[int]:
        """Look once a heartbeat for so many seconds; return the workers that were ended."""
        until = self.now + seconds
        while self.now < until:
            self.now += self.node.settings.heartbeat_seconds
            self.silent.look(self.now)
        return self.ended

    def _end(self, worker: WorkerEntry) -> None:
        self.ended.append(worker.worker_id)
        self.node.daemon.registry.drop_worker(worker)


@pytest.fixture
def long(node: Node) -> float:
    """Return more seconds than a worker may be silent."""
    return 2 * node.settings.lease_seconds


async def test_worker_of_a_caller_who_has_gone_is_ended(node: Node, long: float) -> None:
    """A worker that attached over the network and whose caller has gone is ended after its silence."""
    async with node.life() as daemon:
        await node.register()
        await node.attach()
        (worker_id,) = daemon.registry.by_id

        assert Looking(node).pass_time(node.settings.lease_seconds / 2) == []
        assert Looking(node).pass_time(long) == [worker_id]


async def test_worker_with_a_lease_is_never_ended(node: Node, long: float) -> None:
    """A silent worker with a lease is never ended: it may still write into its blocks."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)

        assert Looking(node).pass_time(long) == []


async def test_worker_that_waits_is_not_silent(node: Node, long: float) -> None:
    """A worker that waits for blocks does not count as silent."""
    async with node.life():
        await node.register()
        holder, waiting = await node.attach(), await node.attach()
        info = node.daemon.registry.cache("main").info()
        num_tokens = info.plan.tokens_per_block * info.plan.num_blocks
        request = pb.ReserveRequest(request_id="r", num_tokens=num_tokens)
        await node.ask("reserve", request, holder)
        request.wait_ms = 10_000
        answer = node.daemon.call("reserve", request, waiting)

        assert isinstance(answer, asyncio.Future)
        assert Looking(node).pass_time(long) == []
        node.daemon.cancel(answer)


async def test_worker_that_calls_is_not_silent(node: Node, long: float) -> None:
    """Any call of a worker, a heartbeat included, shows that it lives."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        looking = Looking(node)
        for _ in range(8):
            await node.ask("heartbeat", pb.HeartbeatRequest(), worker)
            looking.pass_time(long / 4)

        assert looking.ended == []


async def test_worker_whose_process_is_watched_is_not_ended(node: Node, long: float) -> None:
    """A worker that has called, and whose process is watched, does not end silently: the kernel reports its death."""
    async with node.life():
        await node.register()
        worker = await _attached_here(node)
        looking = Looking(node)
        await node.ask("heartbeat", pb.HeartbeatRequest(), worker)

        assert looking.pass_time(2 * long) == []


@pytest.mark.parametrize("has_lease", [False, True])
async def test_watched_worker_that_never_called_is_ended(
    node: Node, long: float, has_lease: bool
) -> None:
    """A caller may have gone before it learnt that it attached, although its process goes on; a lease is kept."""
    async with node.life() as daemon:
        await node.register()
        worker = await _attached_here(node)
        if has_lease:
            await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)

        ended = Looking(node).pass_time(long)
        assert (len(ended), len(daemon.registry.by_id)) == (not has_lease, has_lease)


async def _attached_here(node: Node) -> Caller:
    """Attach a worker whose process is watched, as over the local socket."""
    caller = Caller(transport="local", peer_pid=os.getpid())
    reply = await node.ask("attach", pb.AttachRequest(cache="main"), caller)
    return Caller(transport="local", token=reply.token, peer_pid=os.getpid())


async def test_nobody_was_silent_while_the_daemon_stood_still(node: Node, long: float) -> None:
    """After the daemon has stood still, workers have as long as before to be heard."""
    async with node.life():
        await node.register()
        await node.attach()
        looking = Looking(node)
        looking.now += 2 * long

        assert looking.pass_time(node.settings.heartbeat_seconds) == []
        assert len(looking.pass_time(long)) == 1


async def test_daemon_looks_for_silent_workers(node: Node) -> None:
    """The daemon ends silent workers by itself, and refuses their later calls."""
    quick = {"heartbeat_seconds": 0.01, "lease_seconds": 0.05}
    node.settings = node.settings.model_copy(update=quick)
    async with node.life() as daemon:
        await node.register()
        await node.attach()

        async with asyncio.timeout(10):
            while daemon.registry.by_id:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0.01)
        assert daemon.registry.cache("main").num_workers == 0
