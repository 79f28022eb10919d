"""Laws of the ends of waiting: every waiting call is answered, by room, by time or by an end."""

from kvlease.errors import (
    DrainingError,
    PoolFullError,
    UnknownLeaseError,
    UnknownWorkerError,
    WrongStateError,
)
from kvleased.core import commands as c
from kvleased.core.effects import Reserved
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reload,
    a_reserve,
    an_extend,
    evict,
    evicted,
    found,
    ids,
    keys,
    land,
    on_host,
    release,
    reload_keys,
    reserve,
    the_copy,
    tick,
    wait_for,
    wakes,
    woken,
)


def test_wait_ends_at_its_deadline() -> None:
    """A call that waited in vain is refused with the numbers at its deadline."""
    cache = a_cache(4)
    reserve(cache, 3)
    ticket = wait_for(cache, 4, "waits")

    assert wakes(tick(cache, 4.9)) == []
    refusal = woken(tick(cache, 5.0), ticket, PoolFullError)

    assert (refusal.need, refusal.available, refusal.retry_after_ms) == (4, 1, 50)
    assert cache.census().counters["waits_refused"] == 1


def test_waiting_extend_is_refused_with_what_it_lacks() -> None:
    """An extend that waited in vain is refused with the blocks that were missing, not with those that it covers."""
    cache = a_cache(4)
    lease = reserve(cache, 2)
    reserve(cache, 2, "other")
    ticket = cache.handle(an_extend(lease.lease_id, 3, wait_ms=WAIT_MS), 0.0).ticket

    refusal = woken(tick(cache, 5.0), ticket, PoolFullError)

    assert (refusal.need, refusal.available) == (1, 0)


def test_waiting_reload_is_refused_with_what_it_lacks() -> None:
    """The refusal of a reload that waited in vain counts all blocks of its lease as needed."""
    cache = a_cache(4)
    lease = evicted(cache, keys(1, 2, 3))
    reserve(cache, 2, "other")
    ticket = cache.handle(a_reload(lease.lease_id), 0.0).ticket

    refusal = woken(tick(cache, 5.0), ticket, PoolFullError)

    assert (refusal.need, refusal.available) == (3, 2)


def test_cancelled_call_is_not_served() -> None:
    """A call whose caller has gone takes no blocks."""
    cache = a_cache(4)
    lease = reserve(cache, 4)
    ticket = wait_for(cache, 2, "gone")

    cache.handle(c.Cancel(ticket=ticket), 0.0)

    assert wakes(release(cache, lease.lease_id)) == []
    assert cache.census().num_leases == 0


def test_cancel_of_an_answered_call_changes_nothing() -> None:
    """A cancel of a ticket that nobody holds any more is ignored."""
    cache = a_cache(4)
    outcome = cache.handle(c.Evict(keys=keys(1)), 0.0)
    before = cache.census()

    cache.handle(c.Cancel(ticket=12345), 0.0)

    assert outcome.ticket is None
    assert cache.census() == before


def test_calls_about_a_lease_end_with_it() -> None:
    """When a lease ends, its waiting extend learns that."""
    cache = a_cache(4)
    lease = reserve(cache, 2)
    reserve(cache, 2, "other")
    ticket = cache.handle(an_extend(lease.lease_id, 4, wait_ms=WAIT_MS), 0.0).ticket

    woken(release(cache, lease.lease_id), ticket, UnknownLeaseError)

    assert cache.census().num_waiting == 0


def test_calls_of_a_worker_end_with_it() -> None:
    """A worker that has ended gets no lease through its waiting calls."""
    cache = a_cache(4)
    reserve(cache, 4, worker_id=MATE)
    ticket = wait_for(cache, 2, "gone")

    woken(cache.handle(c.WorkerDied(worker_id=WORKER), 0.0), ticket, UnknownWorkerError)

    assert cache.census().num_waiting == 0


def test_extend_of_a_lease_that_leaves_meanwhile_is_refused() -> None:
    """When its lease begins to leave for the host pool, a waiting extend is answered, and does not wait on."""
    cache = a_cache(4)
    lease = reserve(cache, 2)
    reserve(cache, 2, "other")
    ticket = cache.handle(an_extend(lease.lease_id, 4, wait_ms=WAIT_MS), 0.0).ticket

    woken(evict(cache, lease.lease_id), ticket, WrongStateError)


def test_draining_refuses_those_that_wait_for_a_lease() -> None:
    """The drain answers waiting requests, and lets running ones wait on."""
    cache = a_cache(4)
    lease = reserve(cache, 2)
    other = reserve(cache, 2, "other")
    new = wait_for(cache, 1, "new")
    running = cache.handle(an_extend(lease.lease_id, 3, wait_ms=WAIT_MS), 0.0).ticket

    drained = cache.handle(c.Drain(), 0.0)

    woken(drained, new, DrainingError)
    assert wakes(release(cache, other.lease_id)) == [running]


def test_load_that_takes_too_long_is_done_without() -> None:
    """A request whose bytes are late is granted blocks to compute in; later requests find the bytes."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)

    granted = woken(tick(cache, 5.0), outcome.ticket, Reserved)

    assert (granted.host_hit_tokens, granted.device_hit_tokens) == (0, 0)
    assert len(ids(granted.block_ids)) == 2
    assert not set(ids(granted.block_ids)) & set(ids(the_copy(outcome).target_ids))
    land(cache, the_copy(outcome))
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


def test_what_the_device_has_is_kept_of_a_load_that_takes_too_long() -> None:
    """Only the late blocks, and those behind them, are computed again."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    land(cache, the_copy(reload_keys(cache, keys(1))))
    outcome = cache.handle(a_reserve(3, "r", keys(1, 2), wait_ms=WAIT_MS), 0.0)

    granted = woken(tick(cache, 5.0), outcome.ticket, Reserved)

    assert (granted.device_hit_tokens, granted.host_hit_tokens) == (TOKENS_PER_BLOCK, 0)
    assert cache.check() == []


def test_lease_time_counts_from_the_answer() -> None:
    """A lease that waits for its bytes does not expire before its worker knows of it."""
    cache = a_cache()
    on_host(cache, keys(1))
    command = a_reserve(1, "r", keys(1), wait_ms=600_000)
    copy = the_copy(cache.handle(command, 0.0))
    tick(cache, LEASE_SECONDS)

    land(cache, copy, now=LEASE_SECONDS)
    tick(cache, 2 * LEASE_SECONDS - 1)

    assert cache.census().device["quarantined"] == 0
    assert cache.census().num_leases == 1


def test_cancelled_load_ends_its_lease() -> None:
    """A loading lease ends when its caller cancels, for nobody else would learn of it."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)
    assert outcome.ticket is not None

    cache.handle(c.Cancel(ticket=outcome.ticket), 0.0)

    assert cache.census().num_leases == 0
    assert wakes(land(cache, the_copy(outcome))) == []
    assert cache.check() == []
