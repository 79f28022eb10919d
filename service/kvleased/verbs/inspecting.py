"""Own the verb inspect: it lists who uses a cache or waits for it, a page at a time.

It changes nothing, and names neither keys nor tokens.
"""

from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvlease.errors import NotYoursError
from kvlease.ids import ID_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry, WorkerEntry
from kvleased.caches.registry import Registry
from kvleased.calls import checks

if TYPE_CHECKING:
    from kvleased.core.tenancy.tenants import TenantFacts
    from kvleased.core.views.listing import LeaseFacts, MagazineFacts, PinFacts
    from kvleased.core.views.waiting_list import WaitingFacts

ENTRIES_MAX: Final = 256
"""Entries of one page."""


def inspect(registry: Registry, request: pb.InspectRequest, caller: Caller) -> pb.InspectResponse:
    """List the workers, leases, pins, waiting calls, tenants or magazines of a cache, by id.

    A worker sees only those of its own tenant, in its own cache.

    Raises:
        UnknownCacheError: there is no such cache.
        NotYoursError: a worker asks about another cache than its own.
        InvalidError: there is no such list, the limit is above that of a page, or `after_id` is negative.
        UnknownWorkerError: nobody has this token.
    """
    asking = registry.worker(caller.token) if caller.token else None
    entry = registry.cache(request.cache)
    if asking is not None and asking.entry is not entry:
        raise NotYoursError(f"cache {entry.name} is not the worker's cache", resource="cache")
    own = None if asking is None else asking.tenant_digest
    what = checks.one_of("what", request.what, (*_LISTINGS, *_OF_TENANTS))
    limit = checks.count("limit", request.limit, 0, ENTRIES_MAX) or ENTRIES_MAX
    checks.count("after_id", request.after_id, 0, ID_MAX)
    if what in _OF_TENANTS:
        places = range(request.after_id, request.after_id + limit)
        return _OF_TENANTS[what](registry, entry, own, places)
    return _LISTINGS[what](registry, entry, _Page(own, request.after_id, limit))


def seen_by(registry: Registry, caller: Caller, name: str) -> str:
    """Return the name of the cache that a caller asks about; for a worker that is its own, named or not.

    Raises:
        NotYoursError: a worker asks about another cache than its own.
    """
    if not caller.token:
        return name
    own = registry.cache_of(caller).name
    if name not in {"", own}:
        raise NotYoursError(f"cache {name[:63]} is not the worker's cache", resource="cache")
    return own


class _Page(NamedTuple):
    """The entries that are asked for."""

    own: int | None
    """The digest of the only tenant whose entries are seen; None sees all."""
    after_id: int
    limit: int


def _workers(registry: Registry, entry: CacheEntry, asked: _Page) -> pb.InspectResponse:
    seen = sorted(
        (one for one in _seen_workers(registry, asked.own) if one.entry is entry),
        key=lambda one: one.worker_id,
    )
    page = [one for one in seen if one.worker_id > asked.after_id][: asked.limit]
    return pb.InspectResponse(num_total=len(seen), workers=map(_worker, page))


def _leases(registry: Registry, entry: CacheEntry, asked: _Page) -> pb.InspectResponse:
    names = registry.tenant_names()
    if asked.own is None:
        found = entry.core.list_leases(asked.after_id, asked.limit, monotonic())
        return pb.InspectResponse(
            num_total=entry.core.census().num_leases, leases=[_lease(one, names) for one in found]
        )
    ids = {one.worker_id for one in _seen_workers(registry, asked.own)}
    every = entry.core.list_leases(0, entry.core.census().num_leases, monotonic())
    seen = [one for one in every if one.worker_id in ids]
    page = [one for one in seen if one.lease_id > asked.after_id][: asked.limit]
    return pb.InspectResponse(num_total=len(seen), leases=[_lease(one, names) for one in page])


def _pins(registry: Registry, entry: CacheEntry, asked: _Page) -> pb.InspectResponse:
    names, now = registry.tenant_names(), monotonic()
    seen = entry.core.list_pins(0, entry.core.census().num_pins, asked.own)
    page = [one for one in seen if one.pin_id > asked.after_id][: asked.limit]
    return pb.InspectResponse(num_total=len(seen), pins=[_pin(one, names, now) for one in page])


def _waiting(registry: Registry, entry: CacheEntry, asked: _Page) -> pb.InspectResponse:
    if asked.own is None:
        found = entry.core.list_waiting(asked.after_id, asked.limit, monotonic())
        return pb.InspectResponse(
            num_total=entry.core.census().num_waiting, waiting=map(_waiting_call, found)
        )
    ids = {one.worker_id for one in _seen_workers(registry, asked.own)}
    every = entry.core.list_waiting(0, entry.core.census().num_waiting, monotonic())
    seen = [one for one in every if one.worker_id in ids]
    page = [one for one in seen if one.call_id > asked.after_id][: asked.limit]
    return pb.InspectResponse(num_total=len(seen), waiting=map(_waiting_call, page))


def _seen_workers(registry: Registry, own: int | None) -> list[WorkerEntry]:
    return [one for one in registry.by_id.values() if own in (None, one.tenant_digest)]


def _tenants(
    registry: Registry, entry: CacheEntry, own: int | None, places: range
) -> pb.InspectResponse:
    """List the tenants at some places; `own` is the digest of the only tenant that is seen, or None to see all."""
    names = registry.tenant_names()
    seen = [one for one in entry.core.list_tenants() if own in (None, one.tenant_digest)]
    page = [(place + 1, one) for place, one in enumerate(seen) if place in places]
    return pb.InspectResponse(
        num_total=len(seen),
        tenants=[_tenant(number, one, names, registry.revisions) for number, one in page],
    )


def _magazines(
    registry: Registry, entry: CacheEntry, own: int | None, places: range
) -> pb.InspectResponse:
    """List magazines; `own` is the digest of the only tenant whose magazines are seen, or None to see all."""
    names = registry.tenant_names()
    found = entry.core.list_magazines(monotonic())
    seen = [one for one in found if own in (None, one.tenant_digest)]
    page = [one for one in seen if one.magazine_id > places.start][: len(places)]
    return pb.InspectResponse(
        num_total=len(seen), magazines=[_magazine(one, names) for one in page]
    )


_LISTINGS: Final[dict[str, Callable[[Registry, CacheEntry, _Page], pb.InspectResponse]]] = {
    "workers": _workers,
    "leases": _leases,
    "pins": _pins,
    "waiting": _waiting,
}
_OF_TENANTS: Final[
    dict[str, Callable[[Registry, CacheEntry, int | None, range], pb.InspectResponse]]
] = {"tenants": _tenants, "magazines": _magazines}
"""Lists whose entries are asked for by their place."""


def _worker(worker: WorkerEntry) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=worker.worker_id,
        worker_name=worker.name,
        tenant=worker.tenant,
        rank=worker.rank,
        death_proof=worker.death_proof,
        num_leases=worker.entry.core.num_leases_of(worker.worker_id),
        age_ms=_milliseconds(monotonic() - worker.attached_at),
        process_id=worker.process_id,
    )


def _lease(facts: "LeaseFacts", names: Mapping[int, str]) -> pb.LeaseInfo:
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
        tenant=tenant_name(names, facts.tenant_digest),
    )


def _pin(facts: "PinFacts", names: Mapping[int, str], now: float) -> pb.PinInfo:
    digest = facts.tenant_digest
    return pb.PinInfo(
        pin_id=facts.pin_id,
        num_blocks=facts.num_blocks,
        tenant=tenant_name(names, digest) if digest else "",
        age_ms=_milliseconds(now - facts.pinned_at),
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


def _tenant(
    number: int, facts: "TenantFacts", names: Mapping[int, str], revisions: Mapping[int, int]
) -> pb.TenantInfo:
    return pb.TenantInfo(
        tenant_id=number,
        tenant=tenant_name(names, facts.tenant_digest),
        used_blocks=facts.used_blocks,
        held_blocks=facts.held_blocks,
        pinned_blocks=facts.pinned_blocks,
        min_blocks=facts.min_blocks,
        max_blocks=facts.max_blocks,
        pinned_blocks_max=facts.pinned_blocks_max,
        weight=facts.weight,
        num_leases=facts.num_leases,
        leases_max=facts.leases_max,
        revision=revisions.get(facts.tenant_digest, 0),
    )


def _magazine(facts: "MagazineFacts", names: Mapping[int, str]) -> pb.MagazineInfo:
    age_seconds = facts.age_seconds
    return pb.MagazineInfo(
        magazine_id=facts.magazine_id,
        magazine_digest=f"{facts.name:016x}",
        tenant=tenant_name(names, facts.tenant_digest),
        worker_ids=np.array(facts.worker_ids, "<i8").tobytes(),
        private_blocks=facts.num_private,
        held_blocks=facts.num_held,
        num_exchanges=facts.sequence,
        age_ms=None if age_seconds is None else _milliseconds(age_seconds),
    )


def tenant_name(names: Mapping[int, str], digest: int) -> str:
    """Return the name of a tenant for lists, or its digest in hex if the name is not known."""
    return names.get(digest, f"{digest:016x}")


def _milliseconds(seconds: float) -> int:
    # The wall clock may be set back.
    return max(0, int(seconds * 1000))
