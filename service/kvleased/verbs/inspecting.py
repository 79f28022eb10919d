"""Own the verb inspect: who uses a cache, a page at a time; it changes nothing and names neither keys nor tokens."""

from collections.abc import Callable
from time import monotonic, time
from typing import Final

from kvlease.v1 import kvlease_pb2 as pb
from kvleased import checks
from kvleased.core.listing import LeaseFacts
from kvleased.registry import CacheEntry, Registry, WorkerEntry

ENTRIES_MAX: Final = 256
"""Entries of one page."""


def inspect(registry: Registry, request: pb.InspectRequest) -> pb.InspectResponse:
    """List the workers, leases or pins of a cache, by id.

    Raises:
        UnknownCacheError: there is no such cache.
        InvalidError: there is no such list, or the limit is above that of a page.
    """
    entry = registry.cache(request.cache)
    listing = _LISTINGS[checks.one_of("what", request.what, _LISTINGS)]
    limit = checks.count("limit", request.limit, 0, ENTRIES_MAX) or ENTRIES_MAX
    return listing(registry, entry, request.after_id, limit)


def _workers(
    registry: Registry, entry: CacheEntry, after_id: int, limit: int
) -> pb.InspectResponse:
    own = sorted(
        (one for one in registry.by_id.values() if one.entry is entry),
        key=lambda one: one.worker_id,
    )
    page = [one for one in own if one.worker_id > after_id][:limit]
    return pb.InspectResponse(num_total=len(own), workers=map(_worker, page))


def _leases(_: Registry, entry: CacheEntry, after_id: int, limit: int) -> pb.InspectResponse:
    page = entry.core.list_leases(after_id, limit, monotonic())
    return pb.InspectResponse(num_total=entry.core.census().num_leases, leases=map(_lease, page))


def _pins(_: Registry, entry: CacheEntry, after_id: int, limit: int) -> pb.InspectResponse:
    page = entry.core.list_pins(after_id, limit)
    pins = [pb.PinInfo(pin_id=one.pin_id, num_blocks=one.num_blocks) for one in page]
    return pb.InspectResponse(num_total=entry.core.census().num_pins, pins=pins)


_LISTINGS: Final[dict[str, Callable[[Registry, CacheEntry, int, int], pb.InspectResponse]]] = {
    "workers": _workers,
    "leases": _leases,
    "pins": _pins,
}


def _worker(worker: WorkerEntry) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=worker.worker_id,
        worker_name=worker.name,
        tenant=worker.tenant,
        rank=worker.rank,
        death_proof=worker.death_proof,
        num_leases=worker.entry.core.num_leases_of(worker.worker_id),
        age_ms=_milliseconds(time() - worker.attached_unix_seconds),
    )


def _lease(facts: LeaseFacts) -> pb.LeaseInfo:
    age_seconds = facts.age_seconds
    return pb.LeaseInfo(
        lease_id=facts.lease_id,
        worker_id=facts.worker_id,
        request_digest=f"{facts.request_digest:016x}",
        phase=facts.phase,
        num_blocks=facts.num_blocks,
        num_tokens=facts.num_tokens,
        age_ms=None if age_seconds is None else _milliseconds(age_seconds),
        left_ms=_milliseconds(facts.seconds_left),
    )


def _milliseconds(seconds: float) -> int:
    # The clock of the wall may be set back.
    return max(0, int(seconds * 1000))
