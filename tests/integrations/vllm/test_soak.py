"""Real engines and a real daemon, killed and stopped at random: no wrong token, failure, hang or leak.

It takes three minutes, a third for each mode, or KVLEASE_SOAK_SECONDS; KVLEASE_SOAK_SEED repeats earlier faults.
"""

import contextlib
import functools
import operator
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlease import Client
from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon, Traces
from tests.integrations.vllm.engine import Job
from tests.integrations.vllm.soaking import ENGINE, Questions, Seat, Tally
from tests.integrations.vllm.torments import Tormentor

pytestmark = pytest.mark.vllm

SECONDS = float(os.environ.get("KVLEASE_SOAK_SECONDS", "180"))
SEED = int(os.environ.get("KVLEASE_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
SECONDS_TO_REST = 60.0
FAULTS_PER_SECOND = 0.5
FAULTS_OF_OURS = ("call_failed", "settling_failed", "tick_failed", "batch_refused")
"""Events of the daemon's log that always mean a bug, whatever was done to it."""
TIERS_AND_STATES = ("reserved", "filling", "ready_held", "quarantined")
SETTINGS: dict[str, Any] = {"start_seconds": 3, "retry_seconds": 0.3}


def offloading(daemon: Daemon, model: str, seat: int) -> Callable[[random.Random], Job]:
    """Return engines too small for their requests, over a pool that is too small, too."""
    del seat
    extra = {"pool_bytes": 3 << 20, "host_bytes": 3 << 20}
    return _jobs(daemon, "KVLeaseOffloadingConnector", model, 40, extra)


def owned(daemon: Daemon, model: str, seat: int) -> Callable[[random.Random], Job]:
    """Return engines that each have a cache of their own, which outlives them."""
    return _jobs(daemon, "KVLeaseOwnedConnector", model, 40, {"cache": f"seat-{seat}"})


def shared(daemon: Daemon, model: str, seat: int) -> Callable[[random.Random], Job]:
    """Return engines that share one pool with room for half of their requests."""
    del seat
    return _jobs(daemon, "KVLeaseSharedConnector", model, 65, {})


def _jobs(
    daemon: Daemon, connector: str, model: str, num_blocks: int, extra: dict[str, Any]
) -> Callable[[random.Random], Job]:
    def job(chance: random.Random) -> Job:
        return Job(
            model=model,
            engine={**ENGINE, "num_gpu_blocks_override": num_blocks},
            sampling={"logprobs": None},
            is_async=chance.random() < 0.5,
            kv_transfer_config={
                "kv_connector": connector,
                "kv_connector_module_path": "kvlease.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": daemon.address, **SETTINGS, **extra},
            },
        )

    return job


@pytest.mark.parametrize(
    ("jobs_of", "num_seats"),
    [
        pytest.param(offloading, 2, id="offload"),
        pytest.param(owned, 2, id="owned"),
        pytest.param(shared, 3, id="shared"),
    ],
)
def test_engines_say_what_they_should_whatever_is_done_to_them(
    jobs_of: Callable[[Daemon, str, int], Callable[[random.Random], Job]],
    num_seats: int,
    daemon: Daemon,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Every answer equals that of an engine without a cache and comes in time; then nothing is in use."""
    model = random.Random(f"{request.node.name} {SEED}").choice(["llama", "llama", "hybrid"])  # noqa: S311
    questions = Questions(model)
    before = Traces()
    tally = Tally()
    seats = [
        Seat(f"seat{at}", jobs_of(daemon, model, at), questions, SEED, tmp_path, tally)
        for at in range(num_seats)
    ]
    tormentor = Tormentor(f"{request.node.callspec.id} {SEED}", daemon, seats, tally)
    try:
        torment(seats, tormentor)
        rest(seats, tormentor)
        see_what_stays(daemon, before, tally)
    finally:
        tormentor.undo_all()
        for seat in seats:
            seat.kill()
        say(f"{request.node.callspec.id}, {model}, {SECONDS / 3:g} s, seed {SEED}: {tally}")
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.requests


def torment(seats: list[Seat], tormentor: Tormentor) -> None:
    """Ask all engines and inflict faults until time is up."""
    for seat in seats:
        seat.tend()
    # The very first start takes long, because it imports the engine.
    while any(seat.is_starting for seat in seats):
        for seat in seats:
            seat.tend()
        time.sleep(0.005)
    end = time.monotonic() + SECONDS / 3
    next_at = time.monotonic() + tormentor.random.expovariate(FAULTS_PER_SECOND)
    while (now := time.monotonic()) < end:
        if now >= next_at:
            next_at = now + tormentor.random.expovariate(FAULTS_PER_SECOND)
            tormentor.act()
        tormentor.undo_due()
        for seat in seats:
            seat.tend()
        time.sleep(0.005)


def rest(seats: list[Seat], tormentor: Tormentor) -> None:
    """Leave everybody alone until every engine has answered and ended."""
    tormentor.undo_all()
    busy = seats
    while busy:
        busy = [seat for seat in busy if seat.tend(is_over=True)]
        time.sleep(0.005)


def see_what_stays(daemon: Daemon, before: Traces, tally: Tally) -> None:
    """Record what the daemon counts as used, and what it keeps open."""
    daemon.wait_until_ready()
    _see(tally, lambda: in_use(daemon), {}, "blocks in use")
    control = daemon.control()
    # Descriptors of dead connections are closed in a moment.
    had = functools.reduce(operator.and_, (_descriptors(control) for _ in _every_tenth(2.0)))
    daemon.kill_control()
    until(lambda: _control(daemon) not in {0, control}, "no other control process")
    daemon.wait_until_ready()
    _see(tally, lambda: in_use(daemon), {}, "blocks in use after a restart")
    fresh = daemon.control()
    _see(tally, lambda: dict(had - _descriptors(fresh)), {}, "descriptors of control")
    with daemon.client() as client:
        _delete_all(client)
    _see(tally, before.new_names, set(), "names in /dev/shm")
    log = (daemon.folder / "daemon.log").read_text(errors="replace")
    tally.failed += [
        line for line in log.splitlines() if any(event in line for event in FAULTS_OF_OURS)
    ]


def in_use(daemon: Daemon) -> dict[str, int]:
    """Count the used blocks of every cache and tier that has any."""
    counts = {
        f"{cache.cache} {pool.tier} {state}": getattr(pool, state)
        for cache in daemon.caches()
        for pool in cache.pools
        for state in TIERS_AND_STATES
    }
    return {name: count for name, count in counts.items() if count}


def _every_tenth(seconds: float) -> Iterator[None]:
    """Yield every tenth of a second for so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


def _see(tally: Tally, look: Callable[[], object], wanted: object, what: str) -> None:
    end = time.monotonic() + SECONDS_TO_REST
    while (got := look()) != wanted and time.monotonic() < end:
        time.sleep(0.1)
    if got != wanted:
        tally.leaked.append(f"{what}: {got}")


def _control(daemon: Daemon) -> int:
    try:
        return daemon.control()
    except OSError:
        return 0


def _delete_all(client: Client) -> None:
    for cache in client.stats().caches:
        client.delete_cache(cache.cache)


def _descriptors(process_id: int) -> Counter[str]:
    """Count what a process has open, by what it is: sockets, pipes, pidfds, or the name of a memory or a file."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed by now
            found[re.sub(r"^(socket|pipe):.*", r"\1", str(link.readlink()))] += 1
    return found


def say(what: str) -> None:
    """Print a line."""
    sys.stdout.write(f"\nsoak: {what}\n")
    sys.stdout.flush()
