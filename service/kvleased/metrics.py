"""Own what Prometheus is told: plain counters on the hot path, turned into samples only when somebody asks."""

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvlease._version import installed_version
from kvleased.movers.link import LinkFigures
from kvleased.verbs.figures import Figures

BUCKETS: Final = (
    50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1.0,
)  # fmt: skip
"""Upper bounds of the request histogram, in seconds."""

STATES: Final = ("free", "reserved", "filling", "ready", "quarantined", "scrubbing", "bad")
"""The states that add up to a pool's blocks."""

PREFIX_OUTCOMES: Final = {
    "device_hit": "prefix_tokens_device",
    "host_hit": "prefix_tokens_host",
    "disk_hit": "prefix_tokens_disk",
    "remote_hit": "prefix_tokens_remote",
    "computed": "prefix_tokens_computed",
}
"""Outcomes of prefix reuse, and the counters of the core that hold them."""

BLOCKS_MOVED: Final = {
    "device_to_host": "offloads",
    "host_to_device": "reloads",
    "host_to_disk": "disk_stores",
    "disk_to_device": "disk_loads",
    "host_to_remote": "remote_stores",
    "remote_to_device": "remote_loads",
}
"""Directions of copies, and the counters of the core of blocks that arrived."""

CACHE_COUNTERS: Final = (
    (
        "evictions",
        "kvlease_evictions",
        "Blocks that left the device pool to make room or on request.",
    ),
    ("host_evictions", "kvlease_host_evictions", "Blocks that left the host pool to make room."),
    ("disk_evictions", "kvlease_disk_evictions", "Blocks that left the disk store to make room."),
    (
        "slots_adopted",
        "kvlease_slots_adopted",
        "Blocks that an earlier life left in the disk store and that became findable again.",
    ),
    (
        "disk_slots_forgotten",
        "kvlease_disk_slots_forgotten",
        "Blocks that were lost with the disk store, which is another one now.",
    ),
    (
        "disk_failures",
        "kvlease_disk_failures",
        "Blocks that the disk store did not give back as they were written.",
    ),
    (
        "store_failures",
        "kvlease_store_failures",
        "Blocks that a store did not take.",
    ),
    (
        "remote_misses",
        "kvlease_remote_misses",
        "Blocks that the remote store said to have and did not give in time, or not as they were written.",
    ),
    ("blocks_committed", "kvlease_blocks_committed", "Blocks that became findable."),
    (
        "blocks_dropped",
        "kvlease_blocks_dropped",
        "Blocks that left the last tier that had them.",
    ),
    ("copies_failed", "kvlease_copies_failed", "Copies that their mover gave up, or died over."),
    ("copies_lost", "kvlease_copies_lost", "Copies that were not answered in time."),
    (
        "checksum_failures",
        "kvlease_checksum_failures",
        "Blocks whose bytes were not what they were.",
    ),
    ("leases_expired", "kvlease_leases_expired", "Leases that were not renewed in time."),
    ("leases_granted", "kvlease_leases_granted", "Leases that were granted."),
    ("blocks_forked", "kvlease_blocks_forked", "Blocks that were copied because of a fork."),
    (
        "blocks_given_back",
        "kvlease_blocks_given_back",
        "Blocks that left a running lease because no later token needs them.",
    ),
    ("exchanges", "kvlease_magazine_exchanges", "Exchanges of magazines."),
    ("blocks_taken", "kvlease_magazine_blocks_taken", "Blocks that magazines took to write them."),
    (
        "blocks_retracted",
        "kvlease_magazine_blocks_retracted",
        "Findable blocks that magazines took back to write them again.",
    ),
)
"""Counter of the core, metric, help."""


class Metrics:
    """All counters of the process, and the registry that shows them."""

    def __init__(self) -> None:
        """Begin at zero, with no caches to look at."""
        self.epoch = 0
        """The daemon's life."""
        self._figures: Callable[[], Mapping[str, Figures]] = dict
        self._movers: Callable[[], Mapping[str, LinkFigures]] = dict
        self._latencies: dict[tuple[str, str], _Latency] = {}
        self._codes: dict[tuple[str, str, str], int] = {}
        self._copies: dict[tuple[str, str], _Copies] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch_caches(self, figures: Callable[[], Mapping[str, Figures]]) -> None:
        """Take the gauges from `figures()`, one snapshot per cache, whenever somebody asks."""
        self._figures = figures

    def watch_movers(self, figures: Callable[[], Mapping[str, LinkFigures]]) -> None:
        """Take what the movers have to do from `figures()` whenever somebody asks."""
        self._movers = figures

    def observe(self, verb: str, transport: str, code: str, seconds: float) -> None:
        """Count one answered call; `code` is "OK" or an error's code."""
        counted = (verb, transport, code)
        self._codes[counted] = self._codes.get(counted, 0) + 1
        latency = self._latencies.get((verb, transport))
        if latency is None:
            latency = self._latencies[verb, transport] = _Latency()
        latency.counts[bisect_left(BUCKETS, seconds)] += 1
        latency.seconds += seconds

    def copied(self, direction: str, num_bytes: int, seconds: float, ok: bool) -> None:
        """Count one batch of copies that has ended; `ok` says that all of it was done."""
        named = (direction, "ok" if ok else "failed")
        copies = self._copies.get(named)
        if copies is None:
            copies = self._copies[named] = _Copies()
        copies.batches += 1
        copies.num_bytes += num_bytes
        copies.seconds += seconds

    @property
    def codes(self) -> Mapping[tuple[str, str, str], int]:
        """Answered calls so far, by verb, transport and code."""
        return self._codes

    def render(self) -> bytes:
        """Return everything in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Build the samples of one scrape."""
        yield from self._of_process()
        yield from self._of_requests()
        yield from self._of_copies()
        yield from _queues(self._movers())
        caches = self._figures()
        yield from _blocks(caches)
        yield from _tiers(caches)
        yield from _uses(caches)
        yield from _counters(caches)
        yield from _ghosts(caches)
        yield from _magazines(caches)

    def _of_process(self) -> Iterator[Metric]:
        facts = {"version": installed_version(), "python": platform.python_version()}
        yield InfoMetricFamily("kvlease_build", "The running build.", facts)
        yield GaugeMetricFamily(
            "kvlease_epoch", "The daemon's life; grows with every start.", self.epoch
        )

    def _of_requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "kvlease_requests", "Answered calls.", labels=("verb", "transport", "code")
        )
        for labels, count in self._codes.items():
            requests.add_metric(labels, count)
        yield requests
        latencies = HistogramMetricFamily(
            "kvlease_request_seconds",
            "Seconds from reading a call to writing its answer.",
            labels=("verb", "transport"),
        )
        for names, latency in self._latencies.items():
            latencies.add_metric(names, latency.buckets(), latency.seconds)
        yield latencies

    def _of_copies(self) -> Iterator[Metric]:
        labels = ("direction", "result")
        batches = CounterMetricFamily("kvlease_copies", "Batches of copies.", labels=labels)
        num_bytes = CounterMetricFamily("kvlease_copy_bytes", "Bytes copied.", labels=labels)
        seconds = CounterMetricFamily(
            "kvlease_copy_seconds", "Seconds that movers spent copying.", labels=labels
        )
        for named, copies in self._copies.items():
            batches.add_metric(named, copies.batches)
            num_bytes.add_metric(named, copies.num_bytes)
            seconds.add_metric(named, copies.seconds)
        yield from (batches, num_bytes, seconds)


class _Latency:
    """Counts of one verb over one transport; one more bucket than bounds, for what is slower."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Return the bounds and how many calls were not slower."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*map(repr, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class _Copies:
    """Counts of one direction and result."""

    __slots__ = ("batches", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.batches = 0
        self.num_bytes = 0
        self.seconds = 0.0


def _blocks(caches: Mapping[str, Figures]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "kvlease_blocks",
        "Blocks by state; the states of a tier add up to its capacity.",
        labels=("cache", "tier", "state"),
    )
    held = GaugeMetricFamily(
        "kvlease_blocks_held",
        "Ready blocks that something holds; part of the ready ones.",
        labels=("cache", "tier"),
    )
    tenants = GaugeMetricFamily(
        "kvlease_tenant_blocks",
        "Device blocks that hold a tenant's bytes: all that are used, and of these the held and the pinned ones.",
        labels=("cache", "tenant", "state"),
    )
    for cache, figures in caches.items():
        for tier, counts in figures.pools.items():
            for state in STATES:
                blocks.add_metric((cache, tier, state), counts.get(state, 0))
            held.add_metric((cache, tier), counts.get("ready_held", 0))
        for (tenant, state), count in figures.tenants.items():
            tenants.add_metric((cache, tenant, state), count)
    yield from (blocks, held, tenants)


def _tiers(caches: Mapping[str, Figures]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "kvlease_tier_up",
        "Whether a lower tier works; while it does not, everything in it is a miss.",
        labels=("cache", "tier"),
    )
    for cache, figures in caches.items():
        for tier, is_up in figures.are_up.items():
            up.add_metric((cache, tier), is_up)
    yield up


def _queues(movers: Mapping[str, LinkFigures]) -> Iterator[Metric]:
    queue = GaugeMetricFamily(
        "kvlease_mover_queue",
        "Batches of copies that are not done: waiting to be sent to their mover, or sent to it.",
        labels=("mover", "state"),
    )
    oldest = GaugeMetricFamily(
        "kvlease_mover_oldest_seconds",
        "Seconds since the oldest of them began to wait; 0 where there is none.",
        labels=("mover",),
    )
    for mover, figures in movers.items():
        queue.add_metric((mover, "waiting"), figures.num_waiting)
        queue.add_metric((mover, "sent"), figures.num_sent)
        oldest.add_metric((mover,), figures.oldest_seconds)
    yield from (queue, oldest)


def _uses(caches: Mapping[str, Figures]) -> Iterator[Metric]:
    leases = GaugeMetricFamily("kvlease_leases", "Live leases.", labels=("cache",))
    workers = GaugeMetricFamily("kvlease_workers", "Workers attached.", labels=("cache",))
    waiting = GaugeMetricFamily(
        "kvlease_waiting_requests",
        "Requests waiting for blocks, by the priority that they have come to.",
        labels=("cache", "priority"),
    )
    for cache, figures in caches.items():
        leases.add_metric((cache,), figures.census.num_leases)
        workers.add_metric((cache,), figures.census.num_workers)
        for priority, count in figures.waiting.items():
            waiting.add_metric((cache, priority), count)
    yield from (leases, workers, waiting)


def _counters(caches: Mapping[str, Figures]) -> Iterator[Metric]:
    for counter, metric, text in CACHE_COUNTERS:
        family = CounterMetricFamily(metric, text, labels=("cache",))
        for cache, figures in caches.items():
            family.add_metric((cache,), figures.census.counters.get(counter, 0))
        yield family
    prefixes = CounterMetricFamily(
        "kvlease_prefix_tokens",
        "Tokens of granted requests, by where their K and V came from.",
        labels=("cache", "outcome"),
    )
    moved = CounterMetricFamily(
        "kvlease_blocks_moved", "Blocks that arrived in a tier.", labels=("cache", "direction")
    )
    for cache, figures in caches.items():
        for outcome, counter in PREFIX_OUTCOMES.items():
            prefixes.add_metric((cache, outcome), figures.census.counters.get(counter, 0))
        for direction, counter in BLOCKS_MOVED.items():
            moved.add_metric((cache, direction), figures.census.counters.get(counter, 0))
    yield from (prefixes, moved)


def _ghosts(caches: Mapping[str, Figures]) -> Iterator[Metric]:
    labels = ("cache", "ghost")
    keys = CounterMetricFamily(
        "kvlease_ghost_keys",
        "Keys of granted requests that a ghost cache looked at.",
        labels=labels,
    )
    hits = CounterMetricFamily(
        "kvlease_ghost_hits",
        "Those of them that another policy or size would have found.",
        labels=labels,
    )
    dropped = CounterMetricFamily(
        "kvlease_ghost_dropped_keys",
        "Keys of granted requests that no ghost cache had time for.",
        labels=("cache",),
    )
    for cache, figures in caches.items():
        for ghost in figures.ghosts:
            keys.add_metric((cache, ghost.name), ghost.num_keys)
            hits.add_metric((cache, ghost.name), ghost.num_hits)
        if figures.ghosts:
            dropped.add_metric((cache,), figures.num_ghost_keys_dropped)
    yield from (keys, hits, dropped)


def _magazines(caches: Mapping[str, Figures]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "kvlease_magazine_blocks",
        "Device blocks in each magazine, by its place: private ones, and findable ones that others may hold, too.",
        labels=("cache", "magazine", "state"),
    )
    keys = CounterMetricFamily(
        "kvlease_magazine_keys",
        "Keys that magazines asked to hold: held, cached but not held yet, or missed.",
        labels=("cache", "outcome"),
    )
    for cache, figures in caches.items():
        for outcome in ("held", "cached", "missed"):
            keys.add_metric(
                (cache, outcome), figures.census.counters.get(f"magazine_keys_{outcome}", 0)
            )
        for place, num_private, num_held in figures.census.magazines:
            blocks.add_metric((cache, str(place), "private"), num_private)
            blocks.add_metric((cache, str(place), "held"), num_held)
    yield from (blocks, keys)
