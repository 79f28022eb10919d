"""What is left of calls whose callers have gone, in a real daemon: nothing."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease import AsyncClient, Client, DeadlineError, FullAttention, PlanInputs, UnknownCacheError
from tests.acceptance.serving import Serving, served

pytestmark = pytest.mark.acceptance

LAYERS = (FullAttention(name="layer", num_kv_heads=1, head_size=16, dtype="float32"),)
INPUTS = PlanInputs(layers=LAYERS, tokens_per_block=16, device_blocks=8)
ALL_TOKENS = 8 * 16


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Serving]:
    """Give a daemon with an empty cache of eight blocks."""
    with served(tmp_path / "run") as serving:
        with Client(serving.address("unix"), on_doubt="raise") as client:
            client.register("demo", INPUTS)
            serving.until(lambda: client.get_cache("demo").status == "ready")
        yield serving


def num_there(daemon: Serving, what: str) -> int:
    """Return how many there are of what is inspected."""
    with Client(daemon.address("unix"), on_doubt="raise") as client:
        return client.inspect("demo", what).num_total  # type: ignore[arg-type]  # it can be inspected


async def test_blocks_do_not_go_to_tasks_that_were_cancelled(daemon: Serving) -> None:
    """Whoever waits behind cancelled tasks has the blocks as soon as they are free, though all happens at once."""
    async with (
        AsyncClient(daemon.address("unix"), on_doubt="raise") as client,
        await client.attach("demo") as worker,
    ):
        for number in range(10):
            holder = await worker.reserve(f"h{number}", num_tokens=ALL_TOKENS)
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

            lease = await worker.reserve(f"n{number}", num_tokens=ALL_TOKENS, wait_ms=1000)
            await lease.release()


def test_attach_past_its_deadline_leaves_the_rank_free(daemon: Serving) -> None:
    """A process whose attach was carried out too late may attach as the same rank again."""
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


async def test_cancelled_attaches_leave_no_worker(daemon: Serving) -> None:
    """A task may be cancelled at any moment of its attach."""
    async with AsyncClient(daemon.address("unix"), on_doubt="raise") as client:
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


@pytest.mark.parametrize("scheme", ["unix", "http+unix", "grpc+unix"])
def test_watch_of_a_cache_that_there_is_not_is_refused(daemon: Serving, scheme: str) -> None:
    """A mistyped name is told, over every transport, rather than watched for ever."""
    with Client(daemon.address(scheme)) as client, pytest.raises(UnknownCacheError):
        next(iter(client.watch(cache="nope")))
