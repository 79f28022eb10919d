"""Laws of turns: when each call is served, that no call starves, and that the queue is bounded."""

from typing import Any

import pytest

from kvlease.errors import (
    BusyError,
    InvalidError,
    PoolFullError,
)
from kvlease.ids import CopyId
from kvleased.core import commands as c
from kvleased.core.effects import Extended, Reserved
from kvleased.core.lease.phases import End
from kvleased.core.state import CacheState
from kvleased.core.verbs import seating
from kvleased.core.verbs.ending import end_lease
from kvleased.core.waiting import Waiter
from tests.unit.service.core.builders import (
    MATE,
    STRANGER,
    WAIT_MS,
    a_cache,
    a_reserve,
    an_extend,
    answer,
    cached,
    extend,
    found,
    ids,
    keys,
    release,
    reserve,
    wait_for,
    wakes,
    woken,
)
from tests.unit.service.core.grouped import FULL, WINDOW, cache_of, crossed

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
    """Later calls wait behind a large request, even if there is room for them now."""
    cache = a_cache(8)
    first, second = reserve(cache, 4, "a"), reserve(cache, 3, "b")
    large, small = wait_for(cache, 5, "large"), wait_for(cache, 1, "small")

    assert wakes(release(cache, second.lease_id)) == []
    served = release(cache, first.lease_id)

    assert wakes(served) == [large, small]


def test_call_gets_what_one_behind_it_made_free() -> None:
    """A call that was passed over is looked at again if a later one makes blocks free that are too few for itself."""
    cache = a_cache(8)
    reserve(cache, 6, "stays")
    leaves = reserve(cache, 2, "leaves")
    first = wait_for(cache, 1, "first")
    second = wait_for(cache, 4, "second", worker_id=STRANGER)
    attempt = seating._ATTEMPTS[c.Reserve]

    def make_free(state: CacheState, waiter: Waiter, now: float) -> Any:
        if waiter.ticket == second and leaves.lease_id in state.leases.by_id:
            end_lease(state, state.leases.by_id[leaves.lease_id], End.RELEASED)
        return attempt(state, waiter, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(seating._ATTEMPTS, c.Reserve, make_free)
        patch.setattr(seating, "_is_passed", lambda *_: True)
        nothing = cache.handle(c.CopyDone(copy_id=CopyId(3)), 0.0)

    assert wakes(nothing) == [first]
    assert cache.check() == []


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
    """An extend is served while new requests wait, for only running requests give blocks back."""
    cache = a_cache(8)
    lease = reserve(cache, 7)
    wait_for(cache, 5, "large")

    assert len(ids(extend(cache, lease.lease_id, 8).block_ids)) == 1


def test_extend_that_needs_nothing_waits_for_nobody() -> None:
    """An extend to a token that the lease covers already waits for nobody."""
    cache = a_cache(4)
    first, second = reserve(cache, 2, "a"), reserve(cache, 2, "b")
    cache.handle(an_extend(first.lease_id, 3, wait_ms=WAIT_MS), 0.0)

    assert extend(cache, second.lease_id, 2).block_ids == b""


def test_extends_of_one_lease_are_served_one_after_another() -> None:
    """A waiting extend is answered without blocks if another one has meanwhile covered its tokens."""
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
    """Room goes to running requests first, even if new ones have waited longer."""
    cache = a_cache(8)
    first, second = reserve(cache, 2, "a"), reserve(cache, 6, "b")
    new = wait_for(cache, 2, "new")
    running = cache.handle(an_extend(first.lease_id, 4, wait_ms=WAIT_MS), 0.0).ticket

    served = release(cache, second.lease_id)

    assert wakes(served) == [running, new]
    assert len(ids(woken(served, running, Extended).block_ids)) == 2


def test_waiting_calls_do_not_evict_what_a_later_one_would_reuse() -> None:
    """A call that cannot be served yet evicts nothing."""
    cache = a_cache(8)
    cached(cache, keys(1, 2))
    reserve(cache, 5)

    wait_for(cache, 4, "large")

    assert found(cache, keys(1, 2)) == (2, 0)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_ms", [-1, 600_001])
def test_wait_is_bounded(wait_ms: int) -> None:
    """A wait of less than no time, or of more than ten minutes, is refused."""
    with pytest.raises(InvalidError, match="wait_ms") as refusal:
        a_cache().handle(a_reserve(wait_ms=wait_ms), 0.0)

    assert (refusal.value.need, refusal.value.limit) == (wait_ms, 600_000)


def test_waiting_calls_are_bounded() -> None:
    """When the queue is full, the next call is refused, and learns when to come back."""
    cache = a_cache(2, max_waiting=2)
    reserve(cache, 2)
    wait_for(cache, 1, "a")
    wait_for(cache, 1, "b", worker_id=STRANGER)

    with pytest.raises(BusyError, match="2 calls wait") as refusal:
        wait_for(cache, 1, "c")

    assert (refusal.value.resource, refusal.value.limit) == ("waiting_calls", 2)
    assert refusal.value.retry_after_ms == 150


def test_repeated_waiting_reserve_takes_the_place_of_the_first() -> None:
    """A request waits once, however often its worker asks; another worker's request of that id is another one."""
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
    """Only a call of the same request takes a waiting request's place."""
    cache = a_cache(2)
    lease = reserve(cache, 1, "r")
    reserve(cache, 1, "s")
    wait_for(cache, 2, "t")

    outcome = cache.handle(an_extend(lease.lease_id, 2, wait_ms=WAIT_MS), 0.0)
    later = cache.handle(a_reserve(1, "u", wait_ms=WAIT_MS), 0.0)

    assert wakes(outcome) == wakes(later) == []
    assert cache.census().num_waiting == 3


def test_call_that_takes_a_large_ones_place_can_be_served_at_once() -> None:
    """A repeat that asks for fewer blocks than the first call can be answered at once."""
    cache = a_cache(4)
    reserve(cache, 2, "held")
    wait_for(cache, 4, "r")

    outcome = cache.handle(a_reserve(2, "r", wait_ms=WAIT_MS), 0.0)

    assert outcome.ticket is None
    assert len(ids(answer(outcome, Reserved).block_ids)) == 2


def test_call_that_takes_a_place_can_be_refused_at_once() -> None:
    """A repeat that is found malformed when its turn comes is refused at once."""
    cache = cache_of(FULL, WINDOW, num_blocks=9)
    cached(cache, keys(1))
    reserve(cache, 2, "held")
    wait_for(cache, 4, "r")

    with pytest.raises(InvalidError, match="twice"):
        cache.handle(a_reserve(2, "r", crossed(1), wait_ms=WAIT_MS), 0.0)

    assert cache.census().num_waiting == 0
