"""Own the figure of an attack: how long a worker's calls take meanwhile, beside their time in peace.

The figure is what strangers cost the daemon, not which of five processes gets one of two processors: real attackers
have machines of their own. So the attackers give way to all other processes (SCHED_IDLE), and in peace a process
that gives way, too, burns the remaining processor time, so that neither floor nor figure has an idle machine.

A second daemon shows what is left of that: nobody attacks it, and its worker's calls take turns with those of the
first. What they take longer is the processor time of the attacked process, which any server would need.
"""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from measure import Figure

from kvlease import Client, Worker

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.acceptance.serving import Serving  # noqa: E402
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
    with ExitStack() as stack:
        serving = stack.enter_context(besieged(directory / "hostile"))
        neighbour = stack.enter_context(besieged(directory / "neighbour"))
        workers = [_worker(stack, one) for one in (serving, neighbour)]
        before = [_in_peace(worker) for worker in workers]
        begun = time.monotonic()
        with attack(serving, NUM_REQUESTS, gives_way=True) as foe:
            # The two take turns.
            rounds = [
                [percentile(worker, CALLS_A_ROUND) for worker in workers] for _ in until_ended(foe)
            ]
            per_second = NUM_REQUESTS / (time.monotonic() - begun)
            foe.communicate()
        after = [_in_peace(worker) for worker in workers]
    stormy, beside = (median(side) for side in zip(*rounds, strict=True))
    calm, calm_beside = (median([*a, *b]) for a, b in zip(before, after, strict=True))
    ratio = stormy / calm
    return [
        Figure(
            name=f"{NUM_REQUESTS} hostile requests: p99 of reserve + release over the local socket",
            ours=stormy * US_PER_SECOND,
            floor=calm * US_PER_SECOND,
            unit="µs",
            ratio=ratio,
            goal=f"≤ {RATIO_MAX:g} x",
            holds=ratio <= RATIO_MAX,
            note=f"{per_second:.0f} requests/s; floor: before and after, beside a process that burns what is left",
        ),
        Figure(
            name="the same of another daemon on this machine, which nobody attacks",
            ours=beside * US_PER_SECOND,
            floor=calm_beside * US_PER_SECOND,
            unit="µs",
            ratio=beside / calm_beside,
            note="what the attacked process costs others that need a processor",
        ),
    ]


def _worker(stack: ExitStack, serving: Serving) -> Worker:
    """Return a worker of a daemon that has warmed up."""
    client = stack.enter_context(Client(serving.address("unix"), on_doubt="raise"))
    worker = stack.enter_context(client.attach("main"))
    percentile(worker, NUM_CALLS)
    return worker


def _in_peace(worker: Worker) -> list[float]:
    """Return each round's percentile without an attack, beside a process that burns idle processor time."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burning:
        give_way(burning.pid)
        rounds = [percentile(worker, CALLS_A_ROUND) for _ in range(NUM_ROUNDS)]
        burning.kill()
    return rounds
