"""Laws of lists: all entries by id, a page at a time, and nothing of the requests' content."""

from dataclasses import fields
from math import isclose

from kvlease.ids import LeaseId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Pinned
from kvleased.core.lease.digests import request_digest
from kvleased.core.views.listing import LeaseFacts, PinFacts
from tests.unit.service.core.builders import (
    EPOCH,
    LEASE_SECONDS,
    MATE,
    OTHER_TENANT,
    SHAPE,
    STRANGER,
    TENANT,
    WORKER,
    a_cache,
    answer,
    cached,
    evicted,
    keys,
    records,
    reserve,
    tick,
)


def test_lease_is_listed_with_what_it_has() -> None:
    """The list tells a lease's worker, what it covers, how old it is and when it expires."""
    cache = a_cache()
    lease_id = reserve(cache, 2, "mine").lease_id

    (listed,) = cache.list_leases(0, 8, now=10.0)

    assert listed == LeaseFacts(
        lease_id=lease_id,
        worker_id=WORKER,
        tenant_digest=TENANT,
        request_digest=request_digest("mine"),
        phase="active",
        num_blocks=2,
        num_tokens=8,
        age_seconds=10.0,
        seconds_left=LEASE_SECONDS - 10,
    )


def test_list_tells_neither_keys_nor_tokens() -> None:
    """The list tells neither keys nor tokens, which are nobody else's business."""
    names = {field.name for record in (LeaseFacts, PinFacts) for field in fields(record)}

    assert names.isdisjoint({"keys", "key", "token_ids", "request", "request_id"})


def test_pages_are_all_leases_by_id() -> None:
    """Each page begins after the last id of the one before; the last page is not full."""
    cache = a_cache()
    lease_ids = [reserve(cache, 1, str(number)).lease_id for number in range(5)]

    seen: list[LeaseId] = []
    while page := cache.list_leases(seen[-1] if seen else 0, 2, now=0.0):
        seen += [lease.lease_id for lease in page]

    assert seen == sorted(lease_ids)


def test_phase_is_that_of_the_moment() -> None:
    """A lease in the host pool and an expired one have phases of their own; an expired one has no time left."""
    cache = a_cache()
    evicted(cache, keys(0))
    assert [lease.phase for lease in cache.list_leases(0, 8, now=0.0)] == ["evicted"]

    late = reserve(cache, 1, "late").lease_id
    tick(cache, LEASE_SECONDS)

    (listed,) = cache.list_leases(0, 8, now=LEASE_SECONDS + 1)
    assert (listed.lease_id, listed.phase, listed.seconds_left) == (late, "quarantined", 0)


def test_lease_of_an_earlier_life_has_no_age() -> None:
    """After a restart the age of an earlier lease is unknown."""
    cache = a_cache()
    reserve(cache, 1)

    again = Cache.recovered(SHAPE, records(cache), EPOCH, {WORKER: TENANT}, 50.0)

    (listed,) = again.list_leases(0, 8, now=51.0)
    assert listed.age_seconds is None
    assert isclose(listed.seconds_left, LEASE_SECONDS - 1)


def test_pin_is_listed_with_whose_blocks_it_holds_and_since_when() -> None:
    """A worker's pin has its tenant as owner; an operator's, which may hold blocks of several tenants, has none."""
    cache = a_cache(max_pins=3)
    cached(cache, keys(0))
    cached(cache, keys(1), worker_id=STRANGER)
    for packed, at in ((keys(0), 3.0), (keys(1), 4.0), (keys(0, 1), 5.0)):
        cache.handle(c.Pin(keys=packed), at)

    assert [(pin.tenant_digest, pin.pinned_at) for pin in cache.list_pins(0, 8)] == [
        (TENANT, 3.0),
        (OTHER_TENANT, 4.0),
        (0, 5.0),
    ]


def test_pins_are_listed_with_their_blocks() -> None:
    """A pin that has ended is not listed."""
    cache = a_cache()
    cached(cache, keys(0, 1, 2))
    first, second = (
        answer(cache.handle(c.Pin(keys=packed), 0.0), Pinned).pin_id
        for packed in (keys(0, 1), keys(2))
    )

    assert [(pin.pin_id, pin.num_blocks) for pin in cache.list_pins(0, 8)] == [
        (first, 2),
        (second, 1),
    ]
    assert [pin.pin_id for pin in cache.list_pins(first, 8)] == [second]
    cache.handle(c.Unpin(pin_id=first), 0.0)
    assert [pin.pin_id for pin in cache.list_pins(0, 8)] == [second]


def test_leases_are_counted_by_worker() -> None:
    """A worker without leases has none."""
    cache = a_cache()
    reserve(cache, 1)

    assert (cache.num_leases_of(WORKER), cache.num_leases_of(MATE)) == (1, 0)


def test_worker_is_idle_that_has_no_lease_and_waits_for_none() -> None:
    """A worker is idle if it has no lease and waits for none: nothing of it is left when it ends."""
    cache = a_cache()
    idle_at_first = cache.is_idle(WORKER)
    reserve(cache, SHAPE.num_blocks, "all")
    command = c.Reserve(worker_id=MATE, request_id="more", keys=b"", num_tokens=1, wait_ms=9)
    cache.handle(command, 0.0)

    assert (idle_at_first, cache.is_idle(WORKER), cache.is_idle(MATE)) == (True, False, False)
