"""The library against a real daemon: one life of a request over every transport, and deaths on both sides."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease import (
    AsyncClient,
    Client,
    DeadlineError,
    Event,
    FullAttention,
    InvalidError,
    NeverFitsError,
    ParallelInputs,
    PlanInputs,
    PoolFullError,
    ReserveSpec,
    UnknownCacheError,
    Worker,
    WrongStateError,
)
from kvlease.slots import TokenRuns, run_slots
from kvlease.v1 import kvlease_pb2 as pb
from tests.acceptance.serving import DEADLINE_SECONDS, ROOT, Serving, blocks_in_use, pool_of
from tests.acceptance.standing import Standing

pytestmark = pytest.mark.acceptance

LAYERS = tuple(
    FullAttention(name=f"l{index}", num_kv_heads=1, head_size=16, dtype="float32")
    for index in range(2)
)
INPUTS = PlanInputs(layers=LAYERS, tokens_per_block=16, device_blocks=32, host_bytes=1 << 20)
TOKENS = list(range(64))


@pytest.fixture
def daemon(standing: Standing) -> Iterator[Serving]:
    """Give a daemon without any cache."""
    with standing.lent() as serving:
        yield serving


def registered(serving: Serving, scheme: str = "unix") -> Client:
    """Register the cache, and return a client of the daemon."""
    client = Client(serving.address(scheme), deadline_seconds=DEADLINE_SECONDS)
    client.register("demo", INPUTS)
    return client


def test_life_of_a_request_over_every_transport(daemon: Serving) -> None:
    """Plan, attach, reserve, commit, evict, reload, step and release say the same over all three."""
    lives = {
        scheme: life_of_a_request(daemon, scheme) for scheme in ("unix", "http+unix", "grpc+unix")
    }

    assert lives["unix"] == lives["http+unix"] == lives["grpc+unix"]


def life_of_a_request(daemon: Serving, scheme: str) -> list[object]:
    """Return all answers in one request's life."""
    said: list[object] = []
    with registered(daemon, scheme) as client:
        said += [client.plan(INPUTS), client.explain(INPUTS, "all"), client.get_cache("demo").cache]
        with client.attach("demo", tenant=scheme[:4]) as worker:
            keys = worker.keys.chain(TOKENS, 16)
            with worker.reserve("r", num_tokens=64, keys=keys) as lease:
                said += [
                    lease.hit_tokens,
                    len(lease.block_ids),
                    lease.map(),
                    lease.commit(64, keys),
                ]
                said += [lease.extend(80), len(lease.block_ids), worker.lookup(keys)]
                said += [lease.evict(), len(lease.block_ids), lease.reload(), len(lease.block_ids)]
                columns, leases = worker.step(
                    verbs=[pb.STEP_VERB_EXTEND, pb.STEP_VERB_RELEASE],
                    lease_ids=[lease.lease_id] * 2,
                    num_tokens=[96, 0],
                    reserves=[ReserveSpec(request_id="s", num_tokens=64, keys=keys)],
                )
                said += [
                    columns.codes.tolist(),
                    columns.num_blocks.tolist(),
                    lease.is_live,
                    leases[0].hit_tokens,
                ]
            pinned = worker.pin(keys)
            said += [pinned.num_blocks, worker.unpin(pinned.pin_id), worker.unpin(pinned.pin_id)]
            nothing = worker.pin(bytes(32))
            said += [nothing.num_blocks, worker.unpin(nothing.pin_id)]
            too_much = worker.reserve("t", num_tokens=10**6).refusal
            assert isinstance(too_much, NeverFitsError)
            said += [str(too_much), too_much.need, too_much.limit, worker.num_leases]
        with pytest.raises(UnknownCacheError) as unknown:
            client.get_cache("other")
        said.append(str(unknown.value))
        client.evict(num_blocks=32, cache="demo")
    return said


def test_events_read_the_same_over_every_transport(daemon: Serving) -> None:
    """A watch tells the same story over all three, blocking or not, from wherever it begins."""
    with registered(daemon) as client, client.attach("demo") as worker:
        worker.reserve("r", num_tokens=64).release()

    stories = []
    for scheme in ("unix", "http+unix", "grpc+unix"):
        with Client(daemon.address(scheme)) as client:
            stories.append(list(client.watch(cache="demo", idle_seconds=0.3)))
            assert (
                list(client.watch(after_sequence=stories[0][1].sequence, idle_seconds=0.3))
                == stories[0][2:]
            )
        stories.append(asyncio.run(watched(daemon.address(scheme))))

    assert all(story == stories[0] for story in stories)
    assert {"cache_registered", "worker_attached", "lease_granted", "lease_released"} <= {
        e.kind for e in stories[0]
    }


async def watched(address: str) -> list[Event]:
    """Return the events so far, on an event loop."""
    async with AsyncClient(address) as client:
        return [event async for event in client.watch(cache="demo", idle_seconds=0.3)]


def test_bytes_are_shared_and_survive_eviction(daemon: Serving) -> None:
    """Another worker reads what the first wrote and committed, from the device and reloaded from the host pool."""
    with (
        registered(daemon) as client,
        client.attach("demo") as writer,
        client.attach("demo") as reader,
    ):
        keys = writer.keys.chain(TOKENS, 16)
        with writer.reserve("w", num_tokens=64, keys=keys) as lease:
            pool_of(writer)[lease.block_ids] = np.arange(4, dtype=np.uint8)[:, None] + 1
            lease.commit(64, keys)

        for _ in range(2):
            with reader.reserve("r", num_tokens=80, keys=keys, wait_ms=20_000) as lease:
                assert lease.hit_tokens == 64
                assert (np.arange(4) + 1 == pool_of(reader)[lease.block_ids[:4]].T).all()
            client.evict(keys=keys)


def test_blocks_of_a_killed_worker_are_free_at_once(daemon: Serving) -> None:
    """A worker that gets SIGKILL leaves nothing behind."""
    program = f"""
import sys
from kvlease import Client
worker = Client({daemon.address("unix")!r}).attach("demo")
print(worker.reserve("r", num_tokens=320).is_live, flush=True)
sys.stdin.read()
"""
    with registered(daemon) as client:
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "True\n"
            assert blocks_in_use(client, "demo") == 20
            child.kill()
        daemon.until(lambda: blocks_in_use(client, "demo") == 0)


def test_worker_goes_on_after_the_daemon_was_killed(daemon: Serving) -> None:
    """SIGKILL of the control process costs a worker no lease and no byte, and raises nothing."""
    with registered(daemon) as client, client.attach("demo") as worker:
        keys = worker.keys.chain(TOKENS, 16)
        lease = worker.reserve("r", num_tokens=64, keys=keys)
        pool_of(worker)[lease.block_ids] = 9
        blocks, epoch = lease.block_ids.tolist(), worker.epoch

        daemon.kill_control()

        assert lease.commit(64, keys).num_committed == 4
        assert (lease.is_live, lease.block_ids.tolist()) == (True, blocks)
        assert worker.epoch > epoch
        assert lease.extend(80)
        assert (pool_of(worker)[lease.block_ids[:4]] == 9).all()
        assert worker.reserve("again", num_tokens=80, keys=keys).hit_tokens == 64


def test_silent_worker_is_kept_alive_by_its_heartbeats(daemon: Serving) -> None:
    """The heartbeat thread finds the restarted daemon by itself, and tells it what is still held."""
    with registered(daemon) as client, client.attach("demo") as worker:
        lease = worker.reserve("r", num_tokens=64)
        daemon.kill_control()
        worker.heartbeat()

        assert (lease.is_live, worker.num_leases) == (True, 1)


def test_worker_finds_its_way_into_a_daemon_that_lost_everything(daemon: Serving) -> None:
    """When the memory is gone, too, requests are misses until whoever registered the cache registers it again."""
    with (
        registered(daemon) as client,
        Client(daemon.address("unix"), deadline_seconds=DEADLINE_SECONDS) as other,
        other.attach("demo") as worker,
    ):
        lost = worker.reserve("r", num_tokens=64)
        daemon.stop()
        daemon.start()
        daemon.wait_until_ready()

        refused = worker.reserve("s", num_tokens=64)
        assert (refused.is_live, type(refused.refusal)) == (False, UnknownCacheError)
        client.register("demo", INPUTS)
        assert worker.reserve("s", num_tokens=64).is_live
        assert (lost.is_live, worker.memory_generation) == (False, 2)


def test_worker_whose_client_registered_the_cache_has_it_again(daemon: Serving) -> None:
    """When the memory is gone, too, the worker registers the cache again, and its next request is served."""
    with registered(daemon) as client, client.attach("demo") as worker:
        lost = worker.reserve("r", num_tokens=64)
        daemon.stop()
        daemon.start()
        daemon.wait_until_ready()

        daemon.until(lambda: worker.reserve("s", num_tokens=64).is_live)
        assert (lost.is_live, worker.memory_generation) == (False, 2)


def test_views_of_memory_that_ended_with_its_daemon_serve_nobody(daemon: Serving) -> None:
    """A worker that still uses views of the old memory gets no hits and commits nothing until it reads the new one."""
    with registered(daemon) as client, client.attach("demo") as worker:
        keys = worker.keys.chain(TOKENS, 16)
        stale = blocks_of(worker)
        daemon.stop()
        daemon.start()
        daemon.wait_until_ready()
        daemon.until(lambda: worker.reserve("new", num_tokens=64).is_live)

        lease = worker.reserve("r", keys=keys, num_tokens=64)
        stale[lease.block_ids] = 7
        lease.commit(64, keys)
        assert (lease.is_live, type(lease.refusal)) == (True, WrongStateError)
        lease.release()

        with client.attach("demo") as other:
            assert other.lookup(keys).hit_tokens == 0
            lease = other.reserve("s", keys=keys, num_tokens=64)
            blocks_of(other)[lease.block_ids] = 9
            lease.commit(64, keys)

        refused = worker.reserve("t", keys=keys, num_tokens=64)
        assert (refused.is_live, type(refused.refusal)) == (False, WrongStateError)
        fresh = blocks_of(worker)
        lease = worker.reserve("t", keys=keys, num_tokens=64)
        assert (lease.hit_tokens, np.unique(fresh[lease.block_ids]).tolist()) == (64, [9])


def blocks_of(worker: Worker) -> NDArray[np.uint8]:
    """Return the blocks of the memory that the worker has now."""
    assert worker.device is not None
    plan = worker.plan
    return worker.device[: plan.num_blocks * plan.bytes_per_block].reshape(plan.num_blocks, -1)


async def test_async_worker_has_its_cache_again_but_none_that_was_deleted(daemon: Serving) -> None:
    """The asynchronous client registers again, too; a cache that an operator deleted stays deleted."""
    async with (
        AsyncClient(daemon.address("unix"), deadline_seconds=DEADLINE_SECONDS) as client,
        AsyncClient(daemon.address("unix")) as operator,
    ):
        await client.register("demo", INPUTS)
        async with await client.attach("demo") as worker:
            await asyncio.to_thread(daemon.stop)
            daemon.start()
            await asyncio.to_thread(daemon.wait_until_ready)
            for _ in range(100):
                if (await worker.reserve("s", num_tokens=64)).is_live:
                    break
                await asyncio.sleep(0.1)
            assert await client.list_caches()

            await operator.detach(worker.worker_id, force=True)
            await operator.delete_cache("demo")
            refused = await worker.reserve("t", num_tokens=64)

            assert isinstance(refused.refusal, UnknownCacheError)
            assert await operator.list_caches() == ()


def test_lease_whose_answer_was_lost_is_ended_though_the_pool_is_full(tmp_path: Path) -> None:
    """A lease of the whole pool whose answer nobody got is ended: heartbeats disown it."""
    serving = Serving(tmp_path / "run", "--lease-seconds", "3", "--heartbeat-seconds", "0.5")
    try:
        serving.wait_until_ready()
        with (
            registered(serving) as client,
            Client(serving.address("unix"), deadline_seconds=1) as hasty,
            hasty.attach("demo") as worker,
        ):
            control = serving.control()
            os.kill(control, signal.SIGSTOP)
            lost = worker.reserve("lost", num_tokens=32 * 16)
            os.kill(control, signal.SIGCONT)

            # Mostly the daemon grants it and nobody learns of that; sometimes it finds that the caller has gone.
            serving.until(lambda: worker.reserve("all", num_tokens=32 * 16).is_live)

            assert isinstance(lost.refusal, DeadlineError)
            assert blocks_in_use(client, "demo") == 32
    finally:
        serving.stop()


@pytest.mark.parametrize("scheme", ["unix", "http+unix", "grpc+unix"])
def test_threads_of_a_worker_do_not_hold_each_other_back(daemon: Serving, scheme: str) -> None:
    """A reserve that waits for blocks gets them when another thread of its worker releases them."""
    with registered(daemon, scheme) as client, client.attach("demo") as worker:
        held = worker.reserve("held", num_tokens=32 * 16)
        waiting: list[bool] = []
        thread = threading.Thread(
            target=lambda: waiting.append(
                worker.reserve("waits", num_tokens=16, wait_ms=60_000).is_live
            )
        )
        thread.start()
        daemon.until(lambda: client.stats("demo").caches[0].num_waiting == 1)

        assert held.release()

        thread.join(30)
        assert waiting == [True]


async def test_async_worker_does_the_same(daemon: Serving) -> None:
    """The asynchronous client serves many requests at once, through a death of the daemon, too."""
    async with AsyncClient(daemon.address("unix"), deadline_seconds=DEADLINE_SECONDS) as client:
        await client.register("demo", INPUTS)
        async with await client.attach("demo") as worker:
            leases = await asyncio.gather(
                *(worker.reserve(f"r{n}", num_tokens=32) for n in range(8))
            )
            assert all(lease.is_live for lease in leases)
            daemon.kill_control()
            assert all(await asyncio.gather(*(lease.extend(48) for lease in leases)))
            ids = np.concatenate([lease.block_ids for lease in leases])
            assert len(set(ids.tolist())) == 24


def test_quickstart_runs(daemon: Serving) -> None:
    """The example runs, and the second request hits what the first one computed."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        env=os.environ | {"KVLEASE_ADDRESS": daemon.address("unix")},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "first: 0 of 100 tokens are cached" in run.stdout
    assert "second: 96 of 100 tokens are cached" in run.stdout


README_NEEDS = """
config_json = open("tests/fixtures/configs/llama3-8b.json").read()
tokens = list(range(100))
def prefill(tokens, block_ids):
    print(len(tokens), "tokens into", len(block_ids), "blocks")
"""


def test_code_of_the_readme_runs(daemon: Serving) -> None:
    """Run as printed, it gets blocks the first time, though memory is populated first, and hits the second time."""
    code = README_NEEDS + 2 * _code("README.md", 1)

    assert _printed(daemon, code) == ["100 tokens into 7 blocks", "4 tokens into 7 blocks"]


def test_code_of_the_pages_runs(daemon: Serving) -> None:
    """The pages' code runs as printed: the second request hits two blocks, and a step has its slots."""
    quickstart = _printed(daemon, _code("docs/quickstart.md", 1))
    concepts = _printed(daemon, _code("docs/concepts.md", 2))

    assert quickstart[-1] == "hit 32"
    assert concepts == ["(2, 3) True"]


def _code(page: str, block: int) -> str:
    """Return a block of code of a page."""
    return (ROOT / page).read_text(encoding="utf-8").split("```python\n")[block].split("```")[0]


def _printed(daemon: Serving, code: str) -> list[str]:
    """Return the lines that code prints."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"KVLEASE_ADDRESS": daemon.address("unix")},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


@pytest.mark.parametrize("scheme", ["unix", "http+unix", "grpc+unix"])
def test_operator_ends_a_worker_whose_death_cannot_be_proven(daemon: Serving, scheme: str) -> None:
    """An operator can end a worker that has no pidfd, and no other worker."""
    with (
        registered(daemon, "grpc+unix") as remote,
        registered(daemon, scheme) as operator,
        registered(daemon) as client,
        remote.attach("demo") as unwatched,
    ):
        unwatched.reserve("left", num_tokens=64)
        with client.attach("demo") as watched, pytest.raises(WrongStateError):
            operator.detach(watched.worker_id)

        num_ended = operator.detach(unwatched.worker_id)

        assert (unwatched.death_proof, num_ended) == ("none", 1)
        assert blocks_in_use(operator, "demo") == 0


@pytest.mark.parametrize("scheme", ["unix", "grpc+unix"])
def test_worker_that_closes_while_the_daemon_restarts_leaves_nothing(
    daemon: Serving, scheme: str
) -> None:
    """A close that finds no daemon waits for the next one, so no lease outlives a closed worker in a living process."""
    with registered(daemon, scheme) as client:
        with client.attach("demo") as worker:
            worker.reserve("left", num_tokens=64)
            daemon.kill_control()

        daemon.until(daemon._answers)
        assert client.inspect("demo", "workers").workers == ()
        assert blocks_in_use(client, "demo") == 0


@pytest.mark.parametrize("scheme", ["unix", "http+unix", "grpc+unix"])
def test_refused_operation_of_a_step_says_why(daemon: Serving, scheme: str) -> None:
    """Over every transport a refused operation of a step has the figures that a refused call has."""
    with registered(daemon, scheme) as client, client.attach("demo") as worker:
        num_blocks = worker.plan.num_blocks
        lease = worker.reserve("one", num_tokens=16)
        worker.reserve("rest", num_tokens=16 * (num_blocks - 3))
        lease.extend(16 * 5)
        alone = lease.refusal

        columns, _ = worker.step(
            verbs=[1, 9], lease_ids=[lease.lease_id] * 2, num_tokens=[16 * 5, 1]
        )

        full, verb = columns.errors[0], columns.errors[1]
        assert isinstance(alone, PoolFullError)
        names = ("resource", "need", "available", "limit", "rule", "message")
        assert [getattr(full, name) for name in names] == [getattr(alone, name) for name in names]
        assert (full.need, full.retry_after_ms is None) == (4, False)
        assert (type(verb), verb.resource, lease.refusal) == (InvalidError, "verbs", verb)


def test_lease_that_is_not_mapped_has_no_slots(daemon: Serving) -> None:
    """Before its first map and after a reload, a row never reads as somebody else's blocks."""
    with registered(daemon) as client, client.attach("demo") as worker:
        lease = worker.reserve("r", num_tokens=64)
        runs = TokenRuns(rows=[0], first_positions=[0], num_tokens=[3])

        def slots() -> list[int]:
            table = worker.tables.gather_blocks([lease.row], [lease.lease_id], 0, width=4)
            return run_slots(table, runs, tokens_per_block=16).tolist()

        with pytest.raises(WrongStateError, match="is not mapped"):
            slots()
        lease.map()
        assert slots() == [lease.block_ids[0] * 16 + place for place in range(3)]
        lease.evict(wait_ms=20_000)
        lease.reload(wait_ms=20_000)
        with pytest.raises(WrongStateError, match="is not mapped"):
            slots()
        lease.map()
        assert slots() == [lease.block_ids[0] * 16 + place for place in range(3)]


def test_detached_worker_stays_detached(daemon: Serving) -> None:
    """A worker that has detached gets no lease, and does not become a worker again."""
    with registered(daemon) as client, client.attach("demo") as worker:
        worker.detach()

        lease = worker.reserve("late", num_tokens=16)

        assert not lease.is_live
        assert client.stats("demo").caches[0].num_workers == 0


def test_two_ranks_evict_together_and_survive_a_kill(daemon: Serving) -> None:
    """Two ranks' processes write regions of their own; one lease moves both ranks' bytes, also over a restart."""
    inputs = replace(INPUTS, layout="LBHNC", parallel=ParallelInputs(tensor_ranks=2))
    with Client(
        daemon.address("unix"), deadline_seconds=DEADLINE_SECONDS, on_doubt="raise"
    ) as client:
        client.register("ranks", inputs)
        with client.attach("ranks", rank=0) as first, client.attach("ranks", rank=1) as second:
            while client.get_cache("ranks").status != "ready":
                time.sleep(0.01)
            lease = first.reserve("r", num_tokens=40)
            before = [_filled(worker, lease.block_ids) for worker in (first, second)]

            lease.evict()
            for worker in (first, second):
                assert worker.device is not None
                worker.device[:] = 0xEE
            daemon.kill_control()
            lease.reload()

            assert lease.is_live
            after = [_read(worker, lease.block_ids) for worker in (first, second)]
            assert after == before
            assert before[0] != before[1]
        with pytest.raises(InvalidError, match="ranks 0 to 1"):
            client.attach("ranks", rank=2)


def _filled(worker: Worker, block_ids: NDArray[np.int32]) -> list[bytes]:
    """Fill a worker's region with random bytes, and return the content of some blocks."""
    assert worker.device is not None
    random = np.random.default_rng(worker.worker_id)
    worker.device[:] = random.integers(0, 256, len(worker.device), np.uint8)
    return _read(worker, block_ids)


def _read(worker: Worker, block_ids: NDArray[np.int32]) -> list[bytes]:
    """Return all pieces of some blocks."""
    assert worker.device is not None
    return [
        bytes(worker.device[start : start + extent.num_bytes])
        for block in block_ids.tolist()
        for extent in worker.plan.ranks[0].extents
        for start in [extent.offset_bytes + block * extent.block_stride_bytes]
    ]
