"""Own the figure of an attack: how long a worker's calls take meanwhile, beside their time in peace.

The figure is what strangers cost the daemon, not which of five processes gets one of two processors: real attackers
have machines of their own. So the attackers give way to all other processes (SCHED_IDLE), and in peace a process
that gives way, too, burns the remaining processor time, so that neither floor nor figure has an idle machine.
"""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Final

from measure import Figure

from kvlease import Client, Worker

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.deploy.besieged import (  # noqa: E402  # the root is known now
    attack,
    besieged,
    give_way,
    percentile,
    until_ended,
)

NUM_REQUESTS: Final = 10_000
NUM_CALLS: Final = 3_000
CALLS_A_ROUND: Final = 750
NUM_ROUNDS: Final = 8
"""Rounds before the attack, and as many after it."""
RATIO_MAX: Final = 2.0
US_PER_SECOND: Final = 1e6


def hostile(directory: Path) -> list[Figure]:
    """Measure the 99th percentile of reserve and release, in peace before and after and under hostile requests."""
    with (
        besieged(directory / "hostile") as serving,
        Client(serving.address("unix"), on_doubt="raise") as client,
        client.attach("main") as worker,
    ):
        percentile(worker, NUM_CALLS)
        before = _in_peace(worker)
        begun = time.monotonic()
        with attack(serving, NUM_REQUESTS, gives_way=True) as foe:
            stormy = [percentile(worker, CALLS_A_ROUND) for _ in until_ended(foe)]
            per_second = NUM_REQUESTS / (time.monotonic() - begun)
            foe.communicate()
        calm = median([*before, *_in_peace(worker)])
    ratio = median(stormy) / calm
    return [
        Figure(
            name=f"{NUM_REQUESTS} hostile requests: p99 of reserve + release over the local socket",
            ours=median(stormy) * US_PER_SECOND,
            floor=calm * US_PER_SECOND,
            unit="µs",
            ratio=ratio,
            goal=f"≤ {RATIO_MAX:g} x",
            holds=ratio <= RATIO_MAX,
            note=f"{per_second:.0f} requests/s; floor: before and after, beside a process that burns what is left",
        )
    ]


def _in_peace(worker: Worker) -> list[float]:
    """Return each round's percentile without an attack, beside a process that burns idle processor time."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burning:
        give_way(burning.pid)
        rounds = [percentile(worker, CALLS_A_ROUND) for _ in range(NUM_ROUNDS)]
        burning.kill()
    return rounds
