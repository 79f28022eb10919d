"""Own the metrics for Prometheus: plain counters on the hot path, turned into samples only at a scrape."""

import asyncio
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from kvlease._version import installed_version
from kvleased.metrics import caches
from kvleased.metrics.caches import STATES
from kvleased.metrics.calls import (
    BUCKETS,
    Copies,
    Latency,
    Places,
    copies,
    places,
    queues,
    requests,
)
from kvleased.metrics.exposition import pieces
from kvleased.metrics.parts import Part
from kvleased.metrics.process import Pulse, ends, processes
from kvleased.movers.batches import LinkFigures
from kvleased.verbs.surveys import Surveyed

__all__ = ["BUCKETS", "STATES", "Metrics"]

TURN_SECONDS: Final = 0.001
"""Seconds after which the making of the text pauses, so that the event loop serves others."""


class Metrics:
    """All counters of the process, and the text that shows them."""

    def __init__(self) -> None:
        """Start at zero, with no caches to look at."""
        self.epoch = 0
        """The daemon's epoch."""
        self.control_restarts: Mapping[str, int] = {}
        """Control processes that were replaced, by how the old one had ended."""
        self.certificate_expires_at: float | None = None
        """Seconds since 1970 at which the certificate in use ends; None without TLS."""
        self.pulse = Pulse()
        self._mover_ends: Callable[[], Mapping[str, int]] = dict
        self._places: Callable[[], Places | None] = lambda: None
        self._caches: Callable[[], Iterable[Surveyed]] = tuple
        self._movers: Callable[[], Mapping[str, LinkFigures]] = dict
        self._pools_bytes: Callable[[], int] = int
        self._is_ready: Callable[[], bool] = lambda: True
        self._stale_credentials: Callable[[], Mapping[str, bool]] = dict
        self._latencies: dict[tuple[str, str], Latency] = {}
        self._codes: dict[tuple[str, str, str], int] = {}
        self._copies: dict[tuple[str, str], Copies] = {}
        self._process = ProcessCollector(registry=None)
        self._scrape_seconds = 0.0

    def __repr__(self) -> str:
        """Show life."""
        return f"<Metrics {sum(self._codes.values())} calls>"

    def watch_caches(self, surveys: Callable[[], Iterable[Surveyed]]) -> None:
        """Take the gauges from `surveys()`, one survey per cache, at each scrape."""
        self._caches = surveys

    def watch_movers(self, figures: Callable[[], Mapping[str, LinkFigures]]) -> None:
        """Ask `figures()` at each scrape how much the movers have to do."""
        self._movers = figures

    def watch_mover_ends(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Ask `counts()` how many movers of each kind have ended."""
        self._mover_ends = counts

    def watch_places(self, taken: Callable[[], Places]) -> None:
        """Ask `taken()` how many connections and watchers there are and may be."""
        self._places = taken

    def watch_memory(self, pools_bytes: Callable[[], int]) -> None:
        """Ask `pools_bytes()` how much memory all pools have."""
        self._pools_bytes = pools_bytes

    def watch_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Ask `is_ready()` whether calls can be granted."""
        self._is_ready = is_ready

    def watch_credentials(self, stale: Callable[[], Mapping[str, bool]]) -> None:
        """Ask `stale()` which of tokens and certificate could not be taken although their files have changed."""
        self._stale_credentials = stale

    def observe(self, verb: str, transport: str, code: str, seconds: float) -> None:
        """Count one answered call; `code` is "OK" or an error's code."""
        counted = (verb, transport, code)
        self._codes[counted] = self._codes.get(counted, 0) + 1
        latency = self._latencies.get((verb, transport))
        if latency is None:
            latency = self._latencies[verb, transport] = Latency()
        latency.observe(seconds)

    def copied(self, direction: str, num_bytes: int, seconds: float, ok: bool) -> None:
        """Count one batch of copies that has ended; `ok` says whether all of it was done."""
        named = (direction, "ok" if ok else "failed")
        counts = self._copies.get(named)
        if counts is None:
            counts = self._copies[named] = Copies()
        counts.batches += 1
        counts.num_bytes += num_bytes
        counts.seconds += seconds

    @property
    def codes(self) -> Mapping[tuple[str, str, str], int]:
        """Answered calls so far, by verb, transport and code."""
        return self._codes

    async def scrape(self) -> bytes:
        """Return all metrics in the text format of Prometheus; the event loop serves others in between."""
        turn = perf_counter()
        seconds, text = 0.0, []
        for piece in self._pieces():
            text.append(piece)
            now = perf_counter()
            if now - turn > TURN_SECONDS:
                seconds += now - turn
                await asyncio.sleep(0)
                turn = perf_counter()
        self._scrape_seconds = seconds + perf_counter() - turn
        return b"".join(text)

    def render(self) -> bytes:
        """Return the same text as `scrape`, without a pause."""
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces, each made in a moment; an empty piece only marks a place to pause."""
        found: list[Surveyed] = []
        for one in self._caches():
            found.append(one)
            yield b""
        for part in self._parts(found):
            if part is None:
                yield b""
                continue
            for family in part:
                yield from pieces(family)

    def _parts(self, found: list[Surveyed]) -> Iterator[Iterable[Metric] | None]:
        for fill in (self._daemon, self._calls):
            part = Part()
            fill(part)
            yield part
        yield self._process.collect()
        for tell in (
            caches.pools,
            caches.leases,
            caches.calls,
            caches.counters,
            caches.departures,
            caches.limits,
            caches.beside,
        ):
            part = Part()
            for one in found:
                tell(part, one)
                yield None
            yield part
        tenants = Part()
        for one in found:
            for tier in one.survey.columns:
                caches.tenants(tenants, one, tier)
                yield None
        yield tenants

    def _daemon(self, part: Part) -> None:
        part.add("build_info", 1, installed_version(), platform.python_version())
        part.add("ready", self._is_ready())
        part.add("epoch", self.epoch)
        part.begin("credentials_stale")
        for what, is_stale in self._stale_credentials().items():
            part.add("credentials_stale", is_stale, what)
        part.begin("certificate_expires_timestamp_seconds")
        if self.certificate_expires_at is not None:
            part.add("certificate_expires_timestamp_seconds", self.certificate_expires_at)
        ends(part, self.control_restarts, self._mover_ends())
        places(part, self._places())
        part.add("scrape_seconds", self._scrape_seconds)
        processes(part, self.pulse, self._pools_bytes())

    def _calls(self, part: Part) -> None:
        requests(part, self._codes, self._latencies)
        copies(part, self._copies)
        queues(part, self._movers())
