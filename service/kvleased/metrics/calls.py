"""Own the counts of calls and copies of the process, plain numbers on the hot path."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

from kvleased.metrics.parts import Part
from kvleased.movers.link import LinkFigures

BUCKETS: Final = (
    50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1.0,
)  # fmt: skip
"""Upper bounds of the histograms of calls and of the loop's lag, in seconds."""


class Latency:
    """Seconds of one kind; one more bucket than bounds, for what is slower."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds


class Copies:
    """Counts of one direction and result."""

    __slots__ = ("batches", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.batches = 0
        self.num_bytes = 0
        self.seconds = 0.0


def requests(
    part: Part,
    codes: Mapping[tuple[str, str, str], int],
    latencies: Mapping[tuple[str, str], Latency],
) -> None:
    """Add the answered calls."""
    part.begin("requests", "request_seconds")
    for labels, count in codes.items():
        part.add("requests", count, *labels)
    for names, latency in latencies.items():
        part.add_histogram("request_seconds", BUCKETS, latency.counts, latency.seconds, *names)


def copies(part: Part, ended: Mapping[tuple[str, str], Copies]) -> None:
    """Add the copies that have ended."""
    part.begin("copies", "copy_bytes", "copy_seconds")
    for named, counts in ended.items():
        part.add("copies", counts.batches, *named)
        part.add("copy_bytes", counts.num_bytes, *named)
        part.add("copy_seconds", counts.seconds, *named)


def queues(part: Part, movers: Mapping[str, LinkFigures]) -> None:
    """Add what the movers have to do."""
    part.begin("mover_queue", "mover_oldest_seconds")
    for mover, figures in movers.items():
        part.add("mover_queue", figures.num_waiting, mover, "waiting")
        part.add("mover_queue", figures.num_sent, mover, "sent")
        part.add("mover_oldest_seconds", figures.oldest_seconds, mover)
