"""Laws of waiting: who is served when, that nobody starves, and that everybody is answered."""

from collections.abc import Callable

import pytest

from kvlease.errors import (
    BusyError,
    DeadlineError,
    DrainingError,
    InvalidError,
    PoolFullError,
    UnknownLeaseError,
    UnknownWorkerError,
    WrongStateError,
)
from kvlease.ids import WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Extended, Outcome, Reserved
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    WAIT_MS,
    WORKER,
    a_cache,
    a_full_cache,
    a_reload,
    a_reserve,
    an_extend,
    answer,
    cached,
    commit,
    copies,
    evict,
    evicted,
    extend,
    fail,
    found,
    ids,
    keys,
    land,
    lose,
    on_host,
    release,
    reserve,
    the_copy,
    tick,
    wakes,
    woken,
)


def wait_for(
    cache: Cache, num_blocks: int, request_id: str, *, worker_id: WorkerId = WORKER
) -> int:
    """Have a reserve wait, and return its ticket."""
    command = a_reserve(num_blocks, request_id, worker_id=worker_id, wait_ms=WAIT_MS)
    ticket = cache.handle(command, 0.0).ticket
    assert ticket is not None
    return ticket


# Turns ----------------------------------------------------------------------------------------------------------------


def test_waiting_call_is_served_when_there_is_room() -> None:
    """A call that waits is answered by the command that makes room."""
    cache = a_cache(4)
    lease = reserve(cache, 4)
    ticket = wait_for(cache, 2, "waits")

    released = release(cache, lease.lease_id)

    assert len(ids(woken(released, ticket, Reserved).block_ids)) == 2
    assert cache.census().num_waiting == 0


def test_large_waiter_is_not_starved_by_later_small_ones() -> None:
    """Whoever comes later waits behind a large request, even if there is room for it now."""
    cache = a_cache(8)
    first, second = reserve(cache, 4, "a"), reserve(cache, 3, "b")
    large, small = wait_for(cache, 5, "large"), wait_for(cache, 1, "small")

    assert wakes(release(cache, second.lease_id)) == []
    served = release(cache, first.lease_id)

    assert wakes(served) == [large, small]


def test_impatient_call_does_not_overtake() -> None:
    """A call that may not wait is refused while others wait, and learns how many do."""
    cache = a_cache(8)
    reserve(cache, 7)
    wait_for(cache, 5, "large")
    wait_for(cache, 5, "another")

    with pytest.raises(PoolFullError, match="2 calls wait before") as refusal:
        reserve(cache, 1, "small")

    assert refusal.value.retry_after_ms == 150


def test_running_request_goes_before_new_ones() -> None:
    """An extend is served while new requests wait: only running requests give blocks back."""
    cache = a_cache(8)
    lease = reserve(cache, 7)
    wait_for(cache, 5, "large")

    assert len(ids(extend(cache, lease.lease_id, 8).block_ids)) == 1


def test_extend_that_needs_nothing_waits_for_nobody() -> None:
    """A request that asks for a token which it covers already goes on, whoever waits for room."""
    cache = a_cache(4)
    first, second = reserve(cache, 2, "a"), reserve(cache, 2, "b")
    cache.handle(an_extend(first.lease_id, 3, wait_ms=WAIT_MS), 0.0)

    assert extend(cache, second.lease_id, 2).block_ids == b""


def test_extends_of_one_lease_are_served_one_after_another() -> None:
    """A waiting extend that another one has covered meanwhile is answered without blocks."""
    cache = a_cache(4)
    lease, other = reserve(cache, 2, "a"), reserve(cache, 2, "b")
    tickets = [
        cache.handle(an_extend(lease.lease_id, count, wait_ms=WAIT_MS), 0.0).ticket
        for count in (4, 3)
    ]

    served = release(cache, other.lease_id)

    added = [woken(served, ticket, Extended).block_ids for ticket in tickets]
    assert [len(ids(packed)) for packed in added] == [2, 0]


def test_waiting_extends_are_served_before_waiting_reserves() -> None:
    """Room goes to running requests first, whoever waited longer."""
    cache = a_cache(8)
    first, second = reserve(cache, 2, "a"), reserve(cache, 6, "b")
    new = wait_for(cache, 2, "new")
    running = cache.handle(an_extend(first.lease_id, 4, wait_ms=WAIT_MS), 0.0).ticket

    served = release(cache, second.lease_id)

    assert wakes(served) == [running, new]
    assert len(ids(woken(served, running, Extended).block_ids)) == 2


def test_waiting_calls_do_not_evict_what_a_later_one_would_reuse() -> None:
    """A call that cannot be served yet takes nothing from anybody."""
    cache = a_cache(8)
    cached(cache, keys(1, 2))
    reserve(cache, 5)

    wait_for(cache, 4, "large")

    assert found(cache, keys(1, 2)) == (2, 0)


# Writing back ---------------------------------------------------------------------------------------------------------


def land_until_woken(cache: Cache, outcome: Outcome, num_copies_max: int) -> tuple[Outcome, int]:
    """Land copy after copy until the call is answered, and tell how many copies that took."""
    ticket, num_copies = outcome.ticket, 0
    while ticket not in wakes(outcome):
        num_copies += 1
        assert num_copies <= num_copies_max
        outcome = land(cache, the_copy(outcome))
    return outcome, num_copies


def test_patient_call_loses_nothing() -> None:
    """Cached blocks are copied to the host pool before they make room for a call that may wait."""
    cache = a_full_cache(4)

    outcome = cache.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0)
    land_until_woken(cache, outcome, 1)

    assert found(cache, keys(0, 1, 2, 3)) == (2, 2)
    assert cache.check() == []


def test_impatient_call_drops_what_it_needs() -> None:
    """A call that may not wait gets its blocks at once; what was cached there is gone."""
    cache = a_full_cache(4)

    reserve(cache, 2)

    assert found(cache, keys(0, 1, 2, 3)) == (2, 0)
    assert cache.census().counters["blocks_dropped"] == 2


@pytest.mark.parametrize("num_slots", [0, 1, 3, 7, 8, 9])
def test_patient_call_is_served_however_small_the_host_pool(num_slots: int) -> None:
    """Blocks leave although the host pool cannot hold them all: each round of copies makes room."""
    cache = a_full_cache(8, num_slots)
    outcome = cache.handle(a_reserve(8, wait_ms=WAIT_MS), 0.0)
    if not num_slots:
        answer(outcome, Reserved)
        return

    served, _ = land_until_woken(cache, outcome, 8)

    assert len(ids(woken(served, outcome.ticket, Reserved).block_ids)) == 8
    assert cache.check() == []


def test_full_host_pool_does_not_keep_anybody_waiting() -> None:
    """When no slot can be had, cached blocks leave without a copy."""
    cache = a_cache(4, num_slots=2)
    evicted(cache, keys(8, 9))
    cached(cache, keys(0, 1, 2, 3))

    lease = answer(cache.handle(a_reserve(3, wait_ms=WAIT_MS), 0.0), Reserved)

    assert len(ids(lease.block_ids)) == 3
    assert cache.check() == []


def test_second_caller_waits_for_the_room_that_is_coming() -> None:
    """A copy that makes room is not started a second time for the next caller."""
    cache = a_full_cache(4)
    first = cache.handle(a_reserve(2, "a", wait_ms=WAIT_MS), 0.0)

    again = cache.handle(c.Cancel(ticket=first.ticket or 0), 0.0)
    second = cache.handle(a_reserve(2, "b", wait_ms=WAIT_MS), 0.0)
    landed = land(cache, the_copy(first))

    assert copies(again) == copies(second) == []
    woken(landed, second.ticket, Reserved)


def test_clean_blocks_leave_without_a_copy() -> None:
    """A block whose bytes are in the host pool already makes room at once."""
    cache = a_cache(2)
    on_host(cache, keys(1, 2))
    land(cache, the_copy(cache.handle(c.Reload(keys=keys(1, 2)), 0.0)))

    outcome = cache.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0)

    assert len(ids(answer(outcome, Reserved).block_ids)) == 2
    assert found(cache, keys(1, 2)) == (0, 2)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_ms", [-1, 600_001])
def test_wait_is_bounded(wait_ms: int) -> None:
    """No call waits for longer than ten minutes, or for less than no time."""
    with pytest.raises(InvalidError, match="wait_ms") as refusal:
        a_cache().handle(a_reserve(wait_ms=wait_ms), 0.0)

    assert (refusal.value.need, refusal.value.limit) == (wait_ms, 600_000)


def test_waiting_calls_are_bounded() -> None:
    """When as many calls wait as may, the next is refused, and learns when to come back."""
    cache = a_cache(2, max_waiting=2)
    reserve(cache, 2)
    wait_for(cache, 1, "a")
    wait_for(cache, 1, "b")

    with pytest.raises(BusyError, match="2 calls wait") as refusal:
        wait_for(cache, 1, "c")

    assert (refusal.value.resource, refusal.value.limit) == ("waiting_calls", 2)
    assert refusal.value.retry_after_ms == 150


def test_repeated_waiting_reserve_takes_the_place_of_the_first() -> None:
    """A request waits once, however often its worker asks; another worker's of the same name is another."""
    cache = a_cache(2)
    lease = reserve(cache, 2)
    first = wait_for(cache, 1, "r")
    other = wait_for(cache, 1, "r", worker_id=MATE)

    again = cache.handle(a_reserve(1, "r", wait_ms=WAIT_MS), 0.0)
    released = release(cache, lease.lease_id)

    woken(again, first, BusyError)
    assert wakes(released) == [other, again.ticket]
    assert cache.census().num_leases == 2


def test_waiting_extend_does_not_displace_a_reserve() -> None:
    """Only the same request takes a waiting request's place."""
    cache = a_cache(2)
    lease = reserve(cache, 1, "r")
    reserve(cache, 1, "s")
    wait_for(cache, 2, "t")

    outcome = cache.handle(an_extend(lease.lease_id, 2, wait_ms=WAIT_MS), 0.0)
    later = cache.handle(a_reserve(1, "u", wait_ms=WAIT_MS), 0.0)

    assert wakes(outcome) == wakes(later) == []
    assert cache.census().num_waiting == 3


def test_call_that_takes_a_large_ones_place_can_be_served_at_once() -> None:
    """A repeat that asks for less than the first call is answered in the same breath."""
    cache = a_cache(4)
    reserve(cache, 2, "held")
    wait_for(cache, 4, "r")

    outcome = cache.handle(a_reserve(2, "r", wait_ms=WAIT_MS), 0.0)

    assert outcome.ticket is None
    assert len(ids(answer(outcome, Reserved).block_ids)) == 2


def test_call_that_takes_a_place_can_be_refused_at_once() -> None:
    """A repeat that turns out to be malformed when its turn comes is refused in the same breath."""
    cache = a_cache(4)
    cached(cache, keys(1))
    reserve(cache, 2, "held")
    wait_for(cache, 4, "r")

    with pytest.raises(InvalidError, match="twice"):
        cache.handle(a_reserve(2, "r", keys(1, 1), wait_ms=WAIT_MS), 0.0)

    assert cache.census().num_waiting == 0


# Ends of waiting ------------------------------------------------------------------------------------------------------


def test_wait_ends_at_its_deadline() -> None:
    """A call that waited in vain is refused with the numbers of that moment."""
    cache = a_cache(4)
    reserve(cache, 3)
    ticket = wait_for(cache, 4, "waits")

    assert wakes(tick(cache, 4.9)) == []
    refusal = woken(tick(cache, 5.0), ticket, PoolFullError)

    assert (refusal.need, refusal.available, refusal.retry_after_ms) == (4, 1, 50)
    assert cache.census().counters["waits_refused"] == 1


def test_waiting_extend_is_refused_with_what_it_lacks() -> None:
    """An extend that waited in vain needs what was missing, not what it covers."""
    cache = a_cache(4)
    lease = reserve(cache, 2)
    reserve(cache, 2, "other")
    ticket = cache.handle(an_extend(lease.lease_id, 3, wait_ms=WAIT_MS), 0.0).ticket

    refusal = woken(tick(cache, 5.0), ticket, PoolFullError)

    assert (refusal.need, refusal.available) == (1, 0)


def test_waiting_reload_is_refused_with_what_it_lacks() -> None:
    """A reload that waited in vain needs all of its blocks."""
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
    """A ticket that nobody holds any more is ignored."""
    cache = a_cache(4)
    outcome = cache.handle(c.Evict(keys=keys(1)), 0.0)
    before = cache.census()

    cache.handle(c.Cancel(ticket=12345), 0.0)

    assert outcome.ticket is None
    assert cache.census() == before


def test_calls_about_a_lease_end_with_it() -> None:
    """Whoever waits to extend a lease learns that it has ended."""
    cache = a_cache(4)
    lease = reserve(cache, 2)
    reserve(cache, 2, "other")
    ticket = cache.handle(an_extend(lease.lease_id, 4, wait_ms=WAIT_MS), 0.0).ticket

    woken(release(cache, lease.lease_id), ticket, UnknownLeaseError)

    assert cache.census().num_waiting == 0


def test_calls_of_a_worker_end_with_it() -> None:
    """A worker that has ended gets no lease any more."""
    cache = a_cache(4)
    reserve(cache, 4, worker_id=MATE)
    ticket = wait_for(cache, 2, "gone")

    woken(cache.handle(c.WorkerDied(worker_id=WORKER), 0.0), ticket, UnknownWorkerError)

    assert cache.census().num_waiting == 0


def test_extend_of_a_lease_that_leaves_meanwhile_is_refused() -> None:
    """A waiting extend whose lease is on its way to the host pool is answered, not kept."""
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


def test_load_that_takes_too_long_ends_its_lease() -> None:
    """A request whose bytes did not come in time is refused, and leaves nothing behind."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)

    woken(tick(cache, 5.0), outcome.ticket, DeadlineError)
    land(cache, the_copy(outcome))

    assert cache.census().num_leases == 0
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


def test_lease_time_counts_from_the_answer() -> None:
    """A lease that had to wait for its bytes does not expire before its worker knows of it."""
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
    """A lease that only the caller who has gone would have learned of is not kept."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)
    assert outcome.ticket is not None

    cache.handle(c.Cancel(ticket=outcome.ticket), 0.0)

    assert cache.census().num_leases == 0
    assert wakes(land(cache, the_copy(outcome))) == []
    assert cache.check() == []


# Single flight --------------------------------------------------------------------------------------------------------


def test_two_reserves_of_one_prefix_share_one_copy() -> None:
    """Bytes that are on their way already are waited for, not copied again."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    first = cache.handle(a_reserve(2, "a", keys(1, 2), wait_ms=WAIT_MS), 0.0)
    second = cache.handle(a_reserve(3, "b", keys(1, 2), worker_id=MATE, wait_ms=WAIT_MS), 0.0)

    landed = land(cache, the_copy(first))

    assert copies(second) == []
    hits = woken(landed, first.ticket, Reserved), woken(landed, second.ticket, Reserved)
    assert ids(hits[0].block_ids) == ids(hits[1].block_ids)[:2]
    assert cache.check() == []


def test_reserve_joins_a_prefetch() -> None:
    """A prefix is served from copies that others have started and from slots, each byte copied once."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    prefetch = cache.handle(c.Reload(keys=keys(1)), 0.0)
    outcome = cache.handle(a_reserve(2, "r", keys(1, 2), wait_ms=WAIT_MS), 0.0)

    land(cache, the_copy(prefetch))
    landed = land(cache, the_copy(outcome))

    lease = woken(landed, outcome.ticket, Reserved)
    assert len(ids(the_copy(outcome).target_ids)) == 1
    assert len(set(ids(lease.block_ids))) == 2


def test_impatient_reserve_does_not_join_a_copy() -> None:
    """A call that may not wait uses only what is on the device this instant."""
    cache = a_cache()
    on_host(cache, keys(1))
    cache.handle(c.Reload(keys=keys(1)), 0.0)

    assert reserve(cache, 1, "r", keys(1)).device_hit_tokens == 0


@pytest.mark.parametrize("end", [fail, lose], ids=["failed", "lost"])
def test_reserves_that_shared_a_failed_copy_start_over(
    end: Callable[[Cache, Copy], Outcome],
) -> None:
    """When a shared copy comes to nothing, all who waited get blocks to compute, each its own."""
    cache = a_cache()
    on_host(cache, keys(1))
    first = cache.handle(a_reserve(1, "a", keys(1), wait_ms=WAIT_MS), 0.0)
    second = cache.handle(a_reserve(1, "b", keys(1), wait_ms=WAIT_MS), 0.0)

    ended = end(cache, the_copy(first))

    leases = [woken(ended, ticket, Reserved) for ticket in (first.ticket, second.ticket)]
    assert [lease.host_hit_tokens for lease in leases] == [0, 0]
    assert leases[0].block_ids != leases[1].block_ids
    assert cache.check() == []


def test_commit_makes_room_for_nobody() -> None:
    """A block that is committed is still held by its lease."""
    cache = a_cache(2)
    lease = reserve(cache, 2)
    wait_for(cache, 1, "waits")

    commit(cache, lease.lease_id, keys(1, 2))

    assert cache.census().num_waiting == 1
