"""Own the verb inspect: who uses a cache or waits for it, a page at a time.

It changes nothing and names neither keys nor tokens.
"""

from collections.abc import Callable, Mapping
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from kvlease.v1 import kvlease_pb2 as pb
from kvleased import checks
from kvleased.callers import Caller
from kvleased.registry import CacheEntry, Registry, WorkerEntry

if TYPE_CHECKING:
    from kvleased.core.listing import LeaseFacts
    from kvleased.core.tenants import TenantFacts
    from kvleased.core.waiting_list import WaitingFacts

ENTRIES_MAX: Final = 256
"""Entries of one page."""


def inspect(registry: Registry, request: pb.InspectRequest, caller: Caller) -> pb.InspectResponse:
    """List the workers, leases, pins, waiting calls or tenants of a cache, by id; a worker's own tenant is all it sees.

    Raises:
        UnknownCacheError: there is no such cache.
        InvalidError: there is no such list, or the limit is above that of a page.
        UnknownWorkerError: tenants are asked for under a token that is nobody's.
    """
    entry = registry.cache(request.cache)
    what = checks.one_of("what", request.what, (*_LISTINGS, _TENANTS))
    limit = checks.count("limit", request.limit, 0, ENTRIES_MAX) or ENTRIES_MAX
    if what == _TENANTS:
        own = registry.worker(caller.token).tenant_digest if caller.token else None
        return _tenants(registry, entry, own, range(request.after_id, request.after_id + limit))
    return _LISTINGS[what](registry, entry, request.after_id, limit)


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


def _waiting(_: Registry, entry: CacheEntry, after_id: int, limit: int) -> pb.InspectResponse:
    page = entry.core.list_waiting(after_id, limit, monotonic())
    return pb.InspectResponse(
        num_total=entry.core.census().num_waiting, waiting=map(_waiting_call, page)
    )


def _tenants(
    registry: Registry, entry: CacheEntry, own: int | None, places: range
) -> pb.InspectResponse:
    """List the tenants at some places of the list; `own` is the digest of the only one to be seen, None sees all."""
    names = registry.tenant_names()
    seen = [one for one in entry.core.list_tenants() if own in (None, one.tenant_digest)]
    page = [(place + 1, one) for place, one in enumerate(seen) if place in places]
    return pb.InspectResponse(
        num_total=len(seen), tenants=[_tenant(number, one, names) for number, one in page]
    )


_LISTINGS: Final[dict[str, Callable[[Registry, CacheEntry, int, int], pb.InspectResponse]]] = {
    "workers": _workers,
    "leases": _leases,
    "pins": _pins,
    "waiting": _waiting,
}
_TENANTS: Final = "tenants"


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


def _lease(facts: "LeaseFacts") -> pb.LeaseInfo:
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


def _waiting_call(facts: "WaitingFacts") -> pb.WaitingInfo:
    return pb.WaitingInfo(
        call_id=facts.call_id,
        worker_id=facts.worker_id,
        verb=facts.verb,
        position=facts.position,
        priority=checks.PRIORITIES[facts.priority],
        num_blocks=facts.num_blocks,
        available_blocks=facts.available_blocks,
        reason=facts.reason,
        age_ms=_milliseconds(facts.age_seconds),
        left_ms=_milliseconds(facts.left_seconds),
    )


def _tenant(number: int, facts: "TenantFacts", names: Mapping[int, str]) -> pb.TenantInfo:
    return pb.TenantInfo(
        tenant_id=number,
        tenant=names.get(facts.tenant_digest, f"{facts.tenant_digest:016x}"),
        used_blocks=facts.used_blocks,
        held_blocks=facts.held_blocks,
        pinned_blocks=facts.pinned_blocks,
        min_blocks=facts.min_blocks,
        max_blocks=facts.max_blocks,
        pinned_blocks_max=facts.pinned_blocks_max,
        weight=facts.weight,
    )


def _milliseconds(seconds: float) -> int:
    # The clock of the wall may be set back.
    return max(0, int(seconds * 1000))
