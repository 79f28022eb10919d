"""In a real daemon, calls whose callers have gone leave nothing behind."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvlease import (
    AsyncClient,
    Client,
    DeadlineError,
    FullAttention,
    PlanInputs,
    PoolFullError,
    UnknownCacheError,
)
from tests.acceptance.serving import Serving
from tests.acceptance.standing import Standing

pytestmark = pytest.mark.acceptance

LAYERS = (FullAttention(name="layer", num_kv_heads=1, head_size=16, dtype="float32"),)
INPUTS = PlanInputs(layers=LAYERS, tokens_per_block=16, device_blocks=8)
ALL_TOKENS = 8 * 16
SCHEMES = ("unix", "http+unix", "grpc+unix")


@pytest.fixture
def daemon(standing: Standing) -> Iterator[Serving]:
    """Give a daemon with an empty cache of eight blocks."""
    # Heartbeats come only from cancelled calls and from the tests.
    with standing.lent("--heartbeat-seconds", "300", "--lease-seconds", "900") as serving:
        with Client(serving.address("unix"), on_doubt="raise") as client:
            client.register("demo", INPUTS)
            serving.until(lambda: client.get_cache("demo").status == "ready")
        yield serving


def num_there(daemon: Serving, what: str) -> int:
    """Return how many entries an inspection lists."""
    with Client(daemon.address("unix"), on_doubt="raise") as client:
        return client.inspect("demo", what).num_total  # type: ignore[arg-type]  # it can be inspected


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_blocks_do_not_go_to_tasks_that_were_cancelled(daemon: Serving, scheme: str) -> None:
    """A caller that waits behind cancelled tasks gets the blocks as soon as they are free, even all at once."""
    async with (
        AsyncClient(daemon.address(scheme), on_doubt="raise") as client,
        await client.attach("demo") as worker,
    ):
        for number in range(10):
            # The daemon may hear of the previous round's cancellations only after the blocks are free.
            holder = await worker.reserve(f"h{number}", num_tokens=ALL_TOKENS, wait_ms=10_000)
            tasks = [
                asyncio.create_task(
                    worker.reserve(f"c{number}-{index}", num_tokens=ALL_TOKENS, wait_ms=20_000)
                )
                for index in range(4)
            ]
            await asyncio.to_thread(daemon.until, lambda: num_there(daemon, "waiting") == 4)

            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await holder.release()

            lease = await worker.reserve(f"n{number}", num_tokens=ALL_TOKENS, wait_ms=10_000)
            await lease.release()


def test_attach_past_its_deadline_leaves_the_rank_free(daemon: Serving) -> None:
    """A process whose attach missed its deadline may attach as the same rank again."""
    control = daemon.control()
    with Client(daemon.address("unix"), on_doubt="raise", deadline_seconds=0.3) as hasty:
        os.kill(control, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError):
                hasty.attach("demo", engine="vllm", rank=0)
        finally:
            os.kill(control, signal.SIGCONT)
    with Client(daemon.address("unix"), on_doubt="raise") as client:
        daemon.until(lambda: num_there(daemon, "workers") == 0)

        client.attach("demo", engine="vllm", rank=0).close()


@pytest.mark.parametrize("wait_ms", [0, 20_000], ids=["at once", "waiting"])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_cancelled_reserves_leave_no_lease(
    daemon: Serving, scheme: str, wait_ms: int
) -> None:
    """A reserve that is cancelled at any moment has its grant undone, without a heartbeat."""
    async with (
        AsyncClient(daemon.address(scheme), on_doubt="raise") as client,
        await client.attach("demo") as worker,
    ):
        for index in range(24):
            reserve = worker.reserve(f"r{index}", num_tokens=16, wait_ms=wait_ms)
            task = asyncio.create_task(reserve)
            await asyncio.sleep(index % 12 * 0.0003)
            task.cancel()
            with suppress(asyncio.CancelledError, PoolFullError):
                await (await task).release()

        await asyncio.to_thread(daemon.until, lambda: num_there(daemon, "leases") == 0)


async def test_heartbeat_ends_leases_whose_answers_were_lost(daemon: Serving) -> None:
    """A requested heartbeat ends at once all leases whose answers were lost, however young they are."""
    async with (
        AsyncClient(daemon.address("http+unix"), on_doubt="raise") as client,
        await client.attach("demo") as worker,
    ):
        kept = await worker.reserve("kept", num_tokens=16)
        lost = await worker.reserve("lost", num_tokens=16)
        worker._session.grants.pop(lost.lease_id)

        await worker.heartbeat()

        assert (kept.is_live, num_there(daemon, "leases")) == (True, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_cancelled_attaches_leave_no_worker(daemon: Serving, scheme: str) -> None:
    """An attach that is cancelled at any moment leaves no worker."""
    async with AsyncClient(daemon.address(scheme), on_doubt="raise") as client:
        workers = []
        for index in range(60):
            task = asyncio.create_task(client.attach("demo"))
            await asyncio.sleep(index * 0.0001)
            task.cancel()
            try:
                workers.append(await task)
            except asyncio.CancelledError:
                continue
        for worker in workers:
            await worker.close()

    await asyncio.to_thread(daemon.until, lambda: num_there(daemon, "workers") == 0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_watch_of_a_cache_that_there_is_not_is_refused(daemon: Serving, scheme: str) -> None:
    """A watch of a mistyped name is refused over every transport, rather than going on for ever."""
    with Client(daemon.address(scheme)) as client, pytest.raises(UnknownCacheError):
        next(iter(client.watch(cache="nope")))
