"""Own the figure of an attack: how long a worker that means well waits meanwhile, beside what it waits in peace."""

import sys
from pathlib import Path
from statistics import median
from typing import Final

from measure import Figure

from kvlease import Client

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.deploy.besieged import attack, besieged, percentile, until_ended  # noqa: E402  # the root is known now

NUM_REQUESTS: Final = 10_000
NUM_CALLS: Final = 3_000
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
        before = percentile(worker, NUM_CALLS)
        with attack(serving, NUM_REQUESTS) as foe:
            stormy = [percentile(worker, NUM_CALLS // 4) for _ in until_ended(foe)]
            foe.communicate()
        calm = max(before, percentile(worker, NUM_CALLS))
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
            note="floor: the worse of before and after; the hostile need a core of their own",
        )
    ]
