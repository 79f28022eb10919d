"""Own how a trace is replayed: by one worker, request by request, each at its recorded time or as soon as possible."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from blake3 import blake3

from kvlease.client import Client
from kvlease.errors import InvalidError, KVLeaseError
from kvlease.lease import Lease
from kvlease.traces import Trace
from kvlease.worker import Worker

R = TypeVar("R")

TENANT: Final = "trace-replay"
"""The tenant that asks by default, so that nobody else finds blocks that nothing was written to."""
TIERS: Final = ("device", "host", "disk", "remote")
"""Where a prefix can be found."""

_WAIT_MS: Final = 2_000
"""Milliseconds that a reserve waits for room or for copies."""
_BYTES_PER_ID: Final = 8
_SLEEP_SECONDS_MAX: Final = 3_600.0
"""Seconds slept at once; the clock of the system has no room for the longest pauses that a trace can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long one kind of call took, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a cache answered to a trace."""

    num_requests: int
    num_tokens: int
    """Tokens of the keys that were asked for."""
    hit_tokens: dict[str, int]
    """Tokens that were found, by tier."""
    hit_ratio: float
    refusals: dict[str, int]
    """Number of refused requests, by code."""
    reasons: dict[str, str]
    """The message of the first refusal of each code."""
    has_refused_for_good: bool
    """Whether a request was refused that would be refused again, however often it is sent."""
    latencies: dict[str, Latency]
    """By verb."""
    late_ms_max: float
    """Milliseconds by which requests were sent later than the trace says."""
    seconds: float


@dataclass(slots=True)
class _Tally:
    """What happened so far."""

    hits: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    has_refused_for_good: bool = False
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    num_tokens: int = 0
    late_ms_max: float = 0.0


def replay(client: Client, cache: str, trace: Trace, *, speed: float, tenant: str) -> Replayed:
    """Reserve, commit and release what each request of a trace has keys for; the first request is sent at once.

    Raises:
        InvalidError: the cache has keys of another number of tokens.
        KVLeaseError: the daemon cannot be reached, or does not know the cache.
    """
    tokens_per_key = client.get_cache(cache).plan.hash_block_tokens
    if tokens_per_key != trace.tokens_per_key:
        message = (
            f"a key of the trace stands for {trace.tokens_per_key} tokens, but a key of cache {cache} for "
            f"{tokens_per_key}; register a cache with tokens_per_block={trace.tokens_per_key}, or record a trace of "
            "this cache"
        )
        raise InvalidError(
            message, resource="tokens_per_key", need=trace.tokens_per_key, available=tokens_per_key
        )
    tally = _Tally()
    with client.attach(cache, worker_name="kvlease trace replay", tenant=tenant) as worker:
        started = time.perf_counter()
        # A trace may count from anywhere, such as 1970.
        for request, time_ms in enumerate((trace.times_ms - trace.times_ms[:1]).tolist()):
            if speed:
                _wait_until(started + time_ms / 1000 / speed, tally)
            _ask(worker, trace, request, tally)
        seconds = time.perf_counter() - started
    hits = {tier: tally.hits[tier] for tier in TIERS}
    return Replayed(
        num_requests=len(trace),
        num_tokens=tally.num_tokens,
        hit_tokens=hits,
        hit_ratio=sum(hits.values()) / tally.num_tokens if tally.num_tokens else 0.0,
        refusals=dict(tally.refusals),
        reasons=tally.reasons,
        has_refused_for_good=tally.has_refused_for_good,
        latencies={verb: _latency(found) for verb, found in tally.latencies_ms.items()},
        late_ms_max=tally.late_ms_max,
        seconds=seconds,
    )


def keys_of(trace: Trace, request: int, root: bytes) -> bytes:
    """Return packed keys that hit where the trace's keys do; `root` is that of the tenant that asks."""
    ids = trace.keys_of(request).tolist()
    return b"".join(blake3(one.to_bytes(_BYTES_PER_ID, "little"), key=root).digest() for one in ids)


def _ask(worker: Worker, trace: Trace, request: int, tally: _Tally) -> None:
    keys = keys_of(trace, request, worker.keys.root)
    num_tokens = len(trace.keys_of(request)) * trace.tokens_per_key
    if not num_tokens:
        return
    tally.num_tokens += num_tokens
    name = f"replay-{worker.worker_id}-{request}"
    try:
        lease: Lease = _timed(
            tally,
            "reserve",
            lambda: worker.reserve(name, num_tokens=num_tokens, keys=keys, wait_ms=_WAIT_MS),
        )
        for tier in TIERS:
            tally.hits[tier] += getattr(lease, f"{tier}_hit_tokens", 0)
        try:
            _timed(tally, "commit", lambda: lease.commit(num_tokens, keys))
        finally:
            _timed(tally, "release", lease.release)
    except KVLeaseError as error:
        if error.code in ("UNAVAILABLE", "DEADLINE"):
            raise
        tally.refusals[error.code] += 1
        tally.reasons.setdefault(error.code, f"request {request}: {error.message}")
        tally.has_refused_for_good |= not error.retryable


def _timed(tally: _Tally, verb: str, call: Callable[[], R]) -> R:
    began = time.perf_counter()
    answer = call()
    tally.latencies_ms.setdefault(verb, []).append((time.perf_counter() - began) * 1000)
    return answer


def _wait_until(moment: float, tally: _Tally) -> None:
    left = moment - time.perf_counter()
    tally.late_ms_max = max(tally.late_ms_max, -left * 1000)
    while left > 0:
        time.sleep(min(left, _SLEEP_SECONDS_MAX))
        left = moment - time.perf_counter()


def _latency(found_ms: list[float]) -> Latency:
    p50, p99, most = np.percentile(found_ms, (50, 99, 100)).tolist()
    return Latency(p50_ms=p50, p99_ms=p99, max_ms=most)
