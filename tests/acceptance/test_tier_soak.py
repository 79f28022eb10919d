"""All tiers under load while everything is killed, stopped and damaged: no wrong byte, hung call or leak.

It takes a minute, or KVLEASE_SOAK_SECONDS; KVLEASE_SOAK_SEED repeats the faults of an earlier run.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kvlease import Client, KVLeaseError
from tests.acceptance.serving import Serving, served
from tests.acceptance.soaking import CACHE, DEADLINE_SECONDS, inputs_of, options_of
from tests.acceptance.tiering import child
from tests.acceptance.torments import Crew, Tormentor
from tests.servers.redis import RedisServer

pytestmark = [pytest.mark.acceptance, pytest.mark.thorough]
R = TypeVar("R")

SECONDS = float(os.environ.get("KVLEASE_SOAK_SECONDS", "40"))
SEED = int(os.environ.get("KVLEASE_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
TENANTS = ("red", "red", "blue")
OPTIONS = [
    "--mover-seconds-max",
    "1",
    "--lease-seconds",
    "3",
    "--heartbeat-seconds",
    "0.5",
    "--remote-ms-max",
    "100",
    "--tick-seconds",
    "0.1",
]
FAULTS_OF_OURS = {"call_failed", "settling_failed", "tick_failed", "batch_refused"}
"""Events of the log that always mean a bug, whatever was done to the daemon."""
SECONDS_TO_REST = 30.0
"""Seconds; longer than any lease, wait or breaker's pause in this test."""
NOTHING: dict[str, int] = {}
IN_USE = ("reserved", "filling", "ready_held", "quarantined", "scrubbing")


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """Make private directories with short names: in memory for host pools, on disk for stores."""
    host = Path(tempfile.mkdtemp(prefix="kvlease-soak-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="kvlease-soak-"))
    yield host, disk
    shutil.rmtree(host)
    shutil.rmtree(disk)


def test_tiers_serve_no_wrong_byte_whatever_is_done_to_them(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    """No worker is served a wrong byte under any fault; then nothing is held or left open, and all tiers work."""
    host_dir, disk_dir = folders
    say("soak", f"{SECONDS:g} s with seed {SEED}")
    (tmp_path / "redis").mkdir()
    redis = RedisServer(
        tmp_path / "redis", "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru"
    )
    options = [*OPTIONS, "--disk-dir", str(disk_dir), "--remote-url", redis.url]
    if SEED % 3 == 0:
        options += ["--host-dir", str(host_dir)]
    try:
        with served(tmp_path / "run", *options) as serving:
            soak(serving, tmp_path, redis, disk_dir)
    finally:
        redis.go_on()
        redis.kill()
    assert {one.name for one in host_dir.iterdir()} <= {"secret"}


def soak(serving: Serving, folder: Path, redis: RedisServer, disk_dir: Path) -> None:
    """Torment a daemon, let it come to rest, and check everything."""
    address = serving.address("unix")
    with Client(address) as client:
        client.register(CACHE, inputs_of(is_hybrid=SEED % 2 == 0), options_of(SEED))
        serving.until(lambda: all_is_well(client))
        fds = num_fds(serving)
    work = folder / "work"
    work.mkdir()
    crew = Crew(serving, work, TENANTS)
    tormentor = Tormentor(SEED, serving, crew, redis, disk_dir)
    try:
        torment(serving, crew, tormentor)
        tormentor.undo_all()
        with Client(address, deadline_seconds=DEADLINE_SECONDS) as client:
            serving.until(lambda: all_is_well(client))
            report = crew.board.totals()
            crew.end()
            counters = client.stats(CACHE).caches[0].counters
            await_equal(lambda: in_use(client), NOTHING)
            with client.attach(CACHE) as worker:
                assert worker.reserve("all", num_tokens=1024, wait_ms=20_000).is_live
            await_equal(lambda: in_use(client), NOTHING)
            await_equal(lambda: num_fds(serving), fds)
            say("bad", {one.tier: one.bad for one in client.stats(CACHE).caches[0].pools})
            client.delete_cache(CACHE)
    finally:
        tormentor.undo_all()
        crew.close()
        tell(serving, crew, tormentor)
    assert not crew.hung
    assert not crew.ended
    assert not [line for file in work.glob("wrong-*") for line in file.read_text().splitlines()]
    assert not FAULTS_OF_OURS.intersection(events(serving))
    assert counters
    assert report["requests"] > 0


def torment(serving: Serving, crew: Crew, tormentor: Tormentor) -> None:
    """Inflict faults on every process and store until time is up."""
    end = time.monotonic() + SECONDS
    next_at = time.monotonic() + 1
    while (now := time.monotonic()) < end:
        assert serving.process.poll() is None, Path(serving.log.name).read_text()
        if now >= next_at:
            next_at = now + tormentor.random.expovariate(1.5)
            tormentor.act()
        tormentor.undo_due()
        crew.tend()
        time.sleep(0.02)


def all_is_well(client: Client) -> bool:
    """Tell whether every tier works."""
    try:
        info = client.get_cache(CACHE)
    except KVLeaseError:
        return False
    return info.status == "ready" and all(tier.status == "ready" for tier in info.tiers)


def in_use(client: Client) -> dict[str, int]:
    """Count the held blocks of each tier."""
    try:
        (cache,) = client.stats(CACHE).caches
    except KVLeaseError as error:
        return {error.code: 1}
    found = {
        f"{pool.tier} {state}": getattr(pool, state) for pool in cache.pools for state in IN_USE
    }
    found |= {name: getattr(cache, name) for name in ("num_leases", "num_waiting", "num_workers")}
    return {name: count for name, count in found.items() if count}


def await_equal(look: Callable[[], R], wanted: R) -> None:
    """Wait until both are equal, long enough even for a busy machine."""
    end = time.monotonic() + SECONDS_TO_REST
    while (found := look()) != wanted:
        assert time.monotonic() < end, f"it is {found}, not {wanted}"
        time.sleep(0.05)


def num_fds(serving: Serving) -> tuple[int, int]:
    """Count the descriptors of the supervisor and of the control process."""
    processes = (serving.process.pid, child(serving, "control"))
    counts = [len(os.listdir(f"/proc/{one}/fd")) for one in processes]  # noqa: PTH208
    return counts[0], counts[1]


def events(serving: Serving) -> Counter[str]:
    """Count the events of the daemon's log."""
    found: Counter[str] = Counter()
    for line in Path(serving.log.name).read_text().splitlines():
        try:
            found[json.loads(line)["event"]] += 1
        except ValueError:
            found["no event"] += 1
    return found


def tell(serving: Serving, crew: Crew, tormentor: Tormentor) -> None:
    """Print the faults and their results."""
    say("workers", {name: count for name, count in crew.board.totals().items() if count})
    say("faults", dict(tormentor.done))
    say("log", dict(events(serving)))


def say(name: str, what: object) -> None:
    """Print a line."""
    sys.stdout.write(f"{name}: {what}\n")
