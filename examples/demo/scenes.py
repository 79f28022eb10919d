"""Own what happens in the demo, scene by scene, and what must come of it; nothing here knows how a block is kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from workload import CACHE

from kvlease.errors import KVLeaseError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from processes import Daemon, Worker
    from tally import Stage
    from workload import Request

    from kvlease import AsyncClient
    from kvlease.replies import CacheStats, PoolStats

HOLD_AT: Final = 12
"""New tokens after which a request is held, to be interfered with in the middle."""
_STATE_SECONDS_MAX: Final = 60.0
_POLL_SECONDS: Final = 0.005


@dataclass(slots=True, kw_only=True)
class Play:
    """The cast: two workers, the daemon under them, and an operator who looks on."""

    stage: Stage
    daemon: Daemon
    operator: AsyncClient
    requests: dict[str, list[Request]]
    first: Worker
    second: Worker
    start_worker: Callable[[str], Awaitable[Worker]]
    _epoch: int = 0

    async def run(self) -> None:
        """Play all scenes in order; a worker that a scene replaces is in its field from then on."""
        await self._ready()
        await self._share()
        await self._preempt()
        await self._spill()
        await self._kill_worker()
        await self._kill_control()
        await self._end()

    # Scenes

    async def _ready(self) -> None:
        self.stage.begin("workers import torch, which takes a minute on a busy machine")
        told = await asyncio.gather(self.first.ready(), self.second.ready())
        pids = sorted(each["pid"] for each in told)
        self.stage.check(
            pids[0] != pids[1], f"two workers attached, processes {pids[0]} and {pids[1]}"
        )

    async def _share(self) -> None:
        self.stage.begin("sharing prefixes")
        await self._serve(self.first, self.requests["share-first"])
        requests = self.requests["share-second"]
        served = await self._serve(self.second, requests)
        hits = [done["device_hit_tokens"] for done in served]
        total = sum(len(request.token_ids) for request in requests)
        self.stage.check(
            min(hits) > 0,
            f"the second worker hit {sum(hits)} of {total} prompt tokens that the first had computed",
        )
        both = self.requests["share-together"]
        await asyncio.gather(
            self._serve(self.first, both[::2]), self._serve(self.second, both[1::2])
        )

    async def _preempt(self) -> None:
        self.stage.begin("preempting a request")
        (victim,) = self.requests["preempt-victim"]
        held = await self._hold(self.first, victim)
        evicted = await self.first.order("evict", answer="evicted")
        stats = await self._stats()
        self.stage.check(
            evicted["num_blocks"] > 0 and _device(stats).reserved == 0,
            f"evict moved a running request of {held['num_blocks']} blocks to the host pool",
        )
        await self._serve(self.second, self.requests["preempt-others"])
        reloaded = await self.first.order("reload", answer="reloaded")
        self.stage.check(
            reloaded["num_blocks"] == held["num_blocks"]
            and reloaded["num_tokens"] == len(victim.token_ids) + HOLD_AT - 1,
            f"reload brought all {reloaded['num_tokens']} tokens back, {reloaded['num_moved']} blocks to other places",
        )
        done = await self._finish(self.first, victim)
        self.stage.check(
            done["recomputes"] == 0,
            "the preempted request went on without computing anything again",
        )

    async def _spill(self) -> None:
        self.stage.begin("reloading prefixes")
        device = _device(await self._stats())
        evicted = await self.operator.evict(
            cache=CACHE, num_blocks=device.ready - device.ready_held
        )
        self.stage.check(
            evicted.num_evicted > 0, f"the operator evicted {evicted.num_evicted} cached blocks"
        )
        served = await self._serve(self.second, self.requests["spill"])
        hits = [done["host_hit_tokens"] for done in served]
        self.stage.check(
            min(hits) > 0, f"{sum(hits)} prompt tokens were reloaded from the host pool"
        )

    async def _kill_worker(self) -> None:
        self.stage.begin("killing a worker")
        (victim,) = self.requests["kill-victim"]
        first, *others = self.requests["kill-others"]
        await self._hold(self.first, first)
        held = await self._hold(self.second, victim)
        before = await self._stats()
        killed_at = await self.second.kill()
        self.stage.tally.faults.append("worker killed")
        after = await self._until(lambda stats: stats.num_workers == before.num_workers - 1)
        milliseconds = (time.monotonic() - killed_at) * 1000
        self.stage.check(
            _reusable(after) - _reusable(before) == held["num_blocks"]
            and after.num_leases == before.num_leases - 1,
            f"a worker got SIGKILL in the middle; its {held['num_blocks']} blocks were reusable "
            f"{milliseconds:.0f} ms later",
        )
        self.second = await self.start_worker("second-again")
        served = [await self._finish(self.first, first), *await self._serve(self.first, others)]
        self.stage.check(
            not any(done["recomputes"] for done in served), "the other worker did not notice"
        )
        await self.second.ready()
        (done,) = await self._serve(self.second, [victim])
        hits = done["device_hit_tokens"] + done["host_hit_tokens"]
        self.stage.check(
            hits == victim.reusable_tokens,
            f"started again, it hit {hits} of the {victim.reusable_tokens} tokens that it had committed before",
        )

    async def _kill_control(self) -> None:
        self.stage.begin("killing the control process")
        pairs = list(zip((self.first, self.second), self.requests["restart-held"], strict=True))
        for worker, request in pairs:
            await self._hold(worker, request)
        before = await self._stats()
        epoch = self._epoch
        self._count(before)
        pid = self.daemon.kill_control()
        self.stage.tally.faults.append("control process killed")
        held = await asyncio.gather(*(self._finish(worker, request) for worker, request in pairs))
        recomputes = sum(done["recomputes"] for done in held)
        await self._until(lambda _: self._epoch > epoch)
        self.stage.check(
            len(held) == len(pairs),
            f"the control process {pid} got SIGKILL in the middle of two requests; both went on, "
            f"{recomputes} computed again",
        )
        after = self.requests["restart-after"]
        served = await asyncio.gather(
            self._serve(self.first, after[::2]), self._serve(self.second, after[1::2])
        )
        flat = [done for part in served for done in part]
        hits = sum(done["device_hit_tokens"] + done["host_hit_tokens"] for done in flat)
        self.stage.check(
            hits > 0 and all(done["epoch"] > epoch and not done["recomputes"] for done in flat),
            f"the workers attached to its successor and hit {hits} prompt tokens from before",
        )

    async def _end(self) -> None:
        self.stage.begin("stopping")
        statuses = [await self.first.stop(), await self.second.stop()]
        stats = await self._stats()
        self._count(stats)
        quarantined = sum(pool.quarantined for pool in stats.pools)
        is_balanced = all(_num_by_state(pool) == pool.num_blocks for pool in stats.pools)
        statuses.append(await self.daemon.stop())
        self.stage.check(
            not (stats.num_leases or stats.num_workers or quarantined) and is_balanced,
            f"{stats.num_leases} leases and {quarantined} quarantined blocks are left",
        )
        self.stage.check(not any(statuses), f"workers and daemon ended with status {statuses}")

    # What workers are told

    async def _serve(self, worker: Worker, requests: Sequence[Request]) -> list[dict[str, Any]]:
        served = []
        for request in requests:
            await worker.begin(request)
            served.append(await self._done(worker, request))
        return served

    async def _hold(self, worker: Worker, request: Request) -> dict[str, Any]:
        await worker.begin(request, hold_at=HOLD_AT)
        return await worker.expect("held")

    async def _finish(self, worker: Worker, request: Request) -> dict[str, Any]:
        await worker.write(do="go")
        return await self._done(worker, request)

    async def _done(self, worker: Worker, request: Request) -> dict[str, Any]:
        done = await worker.expect("done")
        assert done["request_id"] == request.request_id
        self.stage.took(request, done)
        return done

    # What the operator sees

    async def _stats(self) -> CacheStats:
        stats = await self.operator.stats(CACHE)
        self._epoch = stats.epoch
        return stats.caches[0]

    async def _until(self, is_so: Callable[[CacheStats], bool]) -> CacheStats:
        async with asyncio.timeout(_STATE_SECONDS_MAX):
            while True:
                with contextlib.suppress(KVLeaseError):
                    stats = await self._stats()
                    if is_so(stats):
                        return stats
                await asyncio.sleep(_POLL_SECONDS)

    def _count(self, stats: CacheStats) -> None:
        """Add up counters that begin anew with every life of the daemon."""
        self.stage.tally.blocks_evicted += stats.counters.get("evictions", 0)
        self.stage.tally.blocks_reloaded += stats.counters.get("reloads", 0)


def _device(stats: CacheStats) -> PoolStats:
    return next(pool for pool in stats.pools if pool.tier == "device")


def _reusable(stats: CacheStats) -> int:
    device = _device(stats)
    return device.free + device.ready - device.ready_held


def _num_by_state(pool: PoolStats) -> int:
    return (
        pool.free
        + pool.reserved
        + pool.filling
        + pool.ready
        + pool.quarantined
        + pool.scrubbing
        + pool.bad
    )
