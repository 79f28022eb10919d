"""Own the counts of calls and copies of the process: plain numbers on the hot path."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvleased.metrics.parts import Part
from kvleased.movers.batches import LinkFigures

BUCKETS: Final = (
    50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1.0,
)  # fmt: skip
"""Upper bounds of the histograms of calls and of the loop's lag, in seconds."""


class Latency:
    """A histogram of seconds; it has one more bucket than bounds, for slower ones."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds


class Copies:
    """The counts of copies of one direction and result."""

    __slots__ = ("batches", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.batches = 0
        self.num_bytes = 0
        self.seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The connections, watchers and bytes of key counts at one instant, and their limits."""

    connections: Mapping[str, int]
    """Connections by listener, without those of strangers."""
    connections_max: int
    """The limit of each listener."""
    watchers: int
    watchers_max: int
    key_counts_bytes: int
    key_counts_bytes_max: int
    strangers: Mapping[str, int] = field(default_factory=dict)
    """Connections of strangers, by listener."""
    turned_away: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Connections that found no place or gave way so far, by listener, and by member or stranger."""


def places(part: Part, taken: Places | None) -> None:
    """Add the connections, watchers and key counts, if they are known."""
    part.begin("connections", "connections_max", "watchers", "watchers_max")
    part.begin("key_counts_bytes", "key_counts_bytes_max")
    part.begin("stranger_connections", "connections_turned_away")
    if taken is None:
        return
    for listener, count in taken.connections.items():
        part.add("connections", count, listener)
    for listener, count in taken.strangers.items():
        part.add("stranger_connections", count, listener)
    for labels, count in taken.turned_away.items():
        part.add("connections_turned_away", count, *labels)
    part.add("connections_max", taken.connections_max)
    part.add("watchers", taken.watchers)
    part.add("watchers_max", taken.watchers_max)
    part.add("key_counts_bytes", taken.key_counts_bytes)
    part.add("key_counts_bytes_max", taken.key_counts_bytes_max)


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
    """Add how much the movers have to do."""
    part.begin("mover_queue", "mover_oldest_seconds")
    for mover, figures in movers.items():
        part.add("mover_queue", figures.num_waiting, mover, "waiting")
        part.add("mover_queue", figures.num_sent, mover, "sent")
        part.add("mover_oldest_seconds", figures.oldest_seconds, mover)
