"""Traces of a real daemon: recorded, replayed and simulated, over every transport and from the command line."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvlease import AsyncClient, CacheOptions, Client, FullAttention, PlanInputs, TracedRequest
from kvlease.trace_files import read_trace, write_trace
from kvlease.traces import Trace
from tests.acceptance.serving import Serving, command
from tests.acceptance.standing import Standing
from tests.unit.service.traces.made import random_requests, trace_of

pytestmark = pytest.mark.acceptance

LAYER = FullAttention(name="l", num_kv_heads=1, head_size=16, dtype="float32")
TOKENS_PER_BLOCK = 16
NUM_BLOCKS = 64
INPUTS = PlanInputs(layers=(LAYER,), tokens_per_block=TOKENS_PER_BLOCK, device_blocks=NUM_BLOCKS)
SCHEMES = ("unix", "http+unix", "grpc+unix")
REQUESTS = random_requests(11, num_requests=400, num_keys=300, longest=12)


@pytest.fixture
def daemon(standing: Standing) -> Iterator[Serving]:
    """Give a daemon with a cache that has ghosts."""
    with standing.lent() as serving:
        with Client(serving.address("unix")) as client:
            client.register("demo", INPUTS, CacheOptions(ghosts=("leaf-lru", "fifo@32")))
            serving.until(lambda: client.get_cache("demo").status == "ready")
        yield serving


def kvlease(serving: Serving, *arguments: str) -> list[str]:
    """Return the command line of `kvlease` with this daemon's address."""
    program = str(Path(sys.executable).with_name("kvlease"))
    return [program, *arguments, "--address", serving.address("unix")]


def small_trace() -> Trace:
    """Return a trace whose keys have as many tokens as the cache's blocks."""
    trace = trace_of(REQUESTS)
    return Trace(
        times_ms=trace.times_ms,
        input_tokens=np.diff(trace.offsets) * TOKENS_PER_BLOCK,
        output_tokens=trace.output_tokens,
        offsets=trace.offsets,
        key_ids=trace.key_ids,
        tokens_per_key=TOKENS_PER_BLOCK,
    )


def test_replay_is_recorded_and_finds_what_the_simulation_finds(
    daemon: Serving, tmp_path: Path
) -> None:
    """A recorded replay equals the replayed trace, and its hits are those of the policy at the pool's size.

    The tolerance is none: requests that do not overlap find exactly the simulated keys.
    """
    source, copy = tmp_path / "source.jsonl", tmp_path / "copy.jsonl"
    write_trace(small_trace(), source)
    arguments = kvlease(daemon, "trace", "record", "--cache", "demo", "--output", str(copy))
    recorder = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert recorder.stderr is not None
    assert recorder.stderr.readline() == "recording demo; press ^C to stop\n"

    replayed = json.loads(
        command(
            daemon.address("unix"), "trace", "replay", str(source), "--cache", "demo", "--speed", "0", "--json"
        )
    )  # fmt: skip
    recorder.send_signal(signal.SIGINT)
    said, _ = recorder.communicate(timeout=20)

    assert recorder.returncode == 0
    assert said.startswith(f"{len(REQUESTS)} requests with ")
    wanted, recorded = read_trace(source), read_trace(copy)
    assert recorded.key_ids.tolist() == wanted.key_ids.tolist()
    assert recorded.offsets.tolist() == wanted.offsets.tolist()
    assert recorded.input_tokens.tolist() == wanted.input_tokens.tolist()
    assert replayed["refusals"] == {}
    simulated = json.loads(
        subprocess.run(
            [
                *kvlease(daemon, "trace", "simulate", str(copy), "--policy", "lru")[:-2],
                "--blocks",
                str(usable_blocks(daemon)),
                "--json",
            ],
            capture_output=True,
            check=True,
        ).stdout
    )
    assert recorded.hit_tokens is not None
    assert recorded.hit_tokens.sum() == replayed["hit_tokens"]["device"]
    assert 0.1 < simulated["hit_ratio"] < simulated["bound_hit_ratio"] < 0.95
    assert replayed["hit_tokens"]["device"] == simulated["num_hits"] * TOKENS_PER_BLOCK
    assert_ghosts_agree(daemon, simulated["num_keys"], simulated["num_hits"])


def test_replay_begins_at_once_whenever_its_trace_begins(daemon: Serving, tmp_path: Path) -> None:
    """Times that count from 1970 are no pause before the first request."""
    source = tmp_path / "source.jsonl"
    trace = small_trace().first(3)
    write_trace(replace(trace, times_ms=np.array([1_700_000_000_000] * 3, np.int64)), source)

    run = subprocess.run(
        kvlease(daemon, "trace", "replay", str(source), "--cache", "demo", "--json"),
        capture_output=True,
        check=True,
        timeout=60,
    )

    assert json.loads(run.stdout)["num_requests"] == 3


def test_replay_waits_through_any_pause(daemon: Serving, tmp_path: Path) -> None:
    """A pause that the system's clock has no room for is waited for, until the user ends it."""
    source = tmp_path / "source.jsonl"
    write_trace(replace(small_trace().first(2), times_ms=np.array([0, 2**62], np.int64)), source)

    with Client(daemon.address("unix")) as client:
        before = num_committed(client)
        replaying = subprocess.Popen(
            kvlease(daemon, "trace", "replay", str(source), "--cache", "demo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        daemon.until(lambda: num_committed(client) > before or replaying.poll() is not None)
    replaying.terminate()
    _, said = replaying.communicate(timeout=60)

    assert replaying.returncode == -signal.SIGTERM
    assert not said


def num_committed(client: Client) -> int:
    """Return how many blocks of the cache were ever committed."""
    return client.stats("demo").caches[0].counters.get("blocks_committed", 0)


def usable_blocks(serving: Serving) -> int:
    """Return how many blocks of the pool can be granted."""
    with Client(serving.address("unix")) as client:
        return client.get_cache("demo").plan.usable_blocks


def assert_ghosts_agree(serving: Serving, num_keys: int, num_hits: int) -> None:
    """Check that the ghost with the cache's policy and size has the cache's hits, and is shown."""
    with Client(serving.address("unix")) as client:
        serving.until(lambda: client.stats("demo").caches[0].ghosts[0].num_keys == num_keys)
        own, smaller = client.stats("demo").caches[0].ghosts
    assert (own.num_hits, own.name) == (num_hits, f"leaf-lru@{usable_blocks(serving)}")
    assert smaller.num_hits < num_hits
    assert f"leaf-lru@{usable_blocks(serving)}" in command(serving.address("unix"), "status")


def test_trace_reads_the_same_over_every_transport(daemon: Serving) -> None:
    """Each transport, blocking or not, tells the same requests, under digests of each recording's own."""
    told = {}
    for scheme in SCHEMES:
        with Client(daemon.address(scheme)) as client:
            trace = client.trace("demo", idle_seconds=20)
            assert next(trace).key_digests == b""
            asyncio.run(serve_twice(daemon))
            told[scheme] = [next(trace), next(trace)]
            trace.close()
        told[f"{scheme}, async"] = asyncio.run(traced(daemon, scheme))

    sizes = {name: [counts(one) for one in pair] for name, pair in told.items()}
    assert all(pair == [(48, 5, 16), (48, 5, 16)] for pair in sizes.values()), sizes
    digests = [pair[0].key_digests for pair in told.values()]
    assert len(set(digests)) == len(digests)
    assert all(pair[0].key_digests == pair[1].key_digests for pair in told.values())


def counts(one: TracedRequest) -> tuple[int, int, int]:
    """Return the counts that every transport must tell alike; hits grow and are left out."""
    return one.input_tokens, one.output_tokens, one.tokens_per_key


async def traced(serving: Serving, scheme: str) -> list[TracedRequest]:
    """Return two recorded requests, on an event loop."""
    async with AsyncClient(serving.address(scheme)) as client:
        trace = client.trace("demo")
        assert (await anext(trace)).key_digests == b""
        await serve_twice(serving)
        return [await anext(trace), await anext(trace)]


async def serve_twice(serving: Serving) -> None:
    """Serve one request twice, with five tokens behind its prompt."""
    async with AsyncClient(serving.address("unix"), on_doubt="raise") as client:
        worker = await client.attach("demo")
        keys = worker.keys.chain(list(range(48)), TOKENS_PER_BLOCK)
        for number in range(2):
            lease = await worker.reserve(f"r{number}", num_tokens=48, keys=keys)
            await lease.commit(48, keys)
            await lease.extend(53)
            await lease.release()
        await worker.close()


def test_replay_refuses_keys_of_another_size(daemon: Serving, tmp_path: Path) -> None:
    """A trace with keys of 512 tokens is refused for blocks of 16, and the refusal says what would do."""
    path = tmp_path / "trace.jsonl"
    write_trace(trace_of(REQUESTS), path)

    run = subprocess.run(
        kvlease(daemon, "trace", "replay", str(path), "--cache", "demo"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 2
    assert "register a cache with tokens_per_block=512" in " ".join(run.stderr.split())


@pytest.mark.parametrize("seconds", ["0.2", "0"])
def test_recording_of_nothing_writes_nothing(daemon: Serving, tmp_path: Path, seconds: str) -> None:
    """A recording of nothing ends in time, says so, and writes no file, which could not tell its tokens per key."""
    path = tmp_path / "trace.jsonl"
    arguments = kvlease(daemon, "trace", "record", "--cache", "demo", "--output", str(path))

    run = subprocess.run(
        [*arguments, "--seconds", seconds], capture_output=True, text=True, timeout=60, check=False
    )

    assert run.returncode == 2
    assert "no lease of demo ended meanwhile" in " ".join(run.stderr.split())
    assert list(tmp_path.glob("*trace.jsonl*")) == []


def test_recording_outlives_the_daemon(daemon: Serving, tmp_path: Path) -> None:
    """If the daemon ends during a recording, what was recorded stays, and the end is reported as an error."""
    path = tmp_path / "trace.jsonl"
    arguments = kvlease(daemon, "trace", "record", "--cache", "demo", "--output", str(path))
    recorder = subprocess.Popen(
        [*arguments, "--requests", "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert recorder.stderr is not None
    assert recorder.stderr.readline() == "recording demo; press ^C to stop\n"
    with Client(daemon.address("unix")) as client:
        trace = client.trace("demo", idle_seconds=20)
        next(trace)
        asyncio.run(serve_twice(daemon))
        # When one reader has a record, the other was sent it, too.
        assert [len(one.key_digests) > 0 for one in (next(trace), next(trace))] == [True, True]
        trace.close()

    daemon.kill_control()

    said, complaint = recorder.communicate(timeout=60)
    assert recorder.returncode == 1
    assert said.startswith("2 requests with ")
    assert "UNAVAILABLE" in complaint.upper()
    assert len(read_trace(path)) == 2
