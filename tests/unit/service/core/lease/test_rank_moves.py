"""Laws of shared leases that move: all ranks evict and reload a lease together."""

from dataclasses import replace

import pytest

from kvlease.errors import (
    BusyError,
    CopyFailedError,
    IdReusedError,
    KVLeaseError,
    UnknownLeaseError,
    WrongStateError,
)
from kvleased.core import commands as c
from kvleased.core.effects import (
    Committed,
    Evicted,
    Forked,
    Outcome,
    Reloaded,
)
from tests.unit.service.core.builders import (
    WAIT_MS,
    a_reload,
    a_reserve,
    answer,
    commit,
    copies,
    evict,
    fail,
    keys,
    land,
    on_host,
    release,
    reload,
    reserve,
    the_copy,
    tick,
    wakes,
    woken,
)
from tests.unit.service.core.rank_builders import (
    LEFT,
    RIGHT,
    THIRD,
    an_engine,
    both,
    evicted_by_both,
    extend,
)

# Evict and reload -----------------------------------------------------------------------------------------------------


def test_a_lease_leaves_the_device_when_all_ranks_want_it() -> None:
    """The first rank's evict waits, for the other may still write; the end of the copy answers both."""
    cache = an_engine()
    lease = both(cache, 2)

    first = evict(cache, lease.lease_id, worker_id=LEFT)
    assert (copies(first), cache.check()) == ([], [])
    second = evict(cache, lease.lease_id, worker_id=RIGHT)
    outcome = land(cache, the_copy(second))

    assert woken(outcome, first.ticket, Evicted) == woken(outcome, second.ticket, Evicted)
    assert answer(evict(cache, lease.lease_id, worker_id=LEFT), Evicted).num_evicted == 0
    assert cache.check() == []


def test_a_lease_does_not_leave_the_device_before_all_have_joined() -> None:
    """A lease stays on the device until all ranks have joined, for a late one has its part still to write."""
    cache = an_engine()
    lease = reserve(cache, 2, worker_id=LEFT)
    evict(cache, lease.lease_id, worker_id=LEFT)

    reserve(cache, 2, worker_id=RIGHT)

    assert len(copies(evict(cache, lease.lease_id, worker_id=RIGHT))) == 1
    assert cache.check() == []


def test_an_evict_without_copies_answers_all() -> None:
    """If the host pool has all bytes already, the lease leaves at once, and all ranks are answered."""
    cache = an_engine()
    on_host(cache, keys(1))
    lease = both(cache, 1)
    for one in (LEFT, RIGHT):
        commit(cache, lease.lease_id, keys(1), worker_id=one)
    first = evict(cache, lease.lease_id, worker_id=LEFT)

    outcome = evict(cache, lease.lease_id, worker_id=RIGHT)

    assert answer(outcome, Evicted) == woken(outcome, first.ticket, Evicted)


def test_an_evict_without_slots_refuses_all() -> None:
    """If there are no slots, all ranks are refused, and the lease stays where it was."""
    cache = an_engine(num_slots=0)
    lease = both(cache)
    first = evict(cache, lease.lease_id, worker_id=LEFT)

    with pytest.raises(KVLeaseError) as refused:
        evict(cache, lease.lease_id, worker_id=RIGHT)

    effects = cache.take_effects()
    told = woken(Outcome(effects=effects), first.ticket, KVLeaseError)
    assert len(effects) == 1
    assert (told.code, told.message) == (refused.value.code, refused.value.message)
    assert (told.need, told.available) == (refused.value.need, refused.value.available)
    assert cache.check() == []


@pytest.mark.parametrize("num_slots", [0, 8])
def test_a_rank_that_parts_does_not_keep_a_lease_up(num_slots: int) -> None:
    """When all remaining ranks have asked, the lease leaves, or all of them are refused."""
    cache = an_engine(num_slots=num_slots)
    lease = both(cache)
    first = evict(cache, lease.lease_id, worker_id=LEFT)

    parted = release(cache, lease.lease_id, worker_id=RIGHT)

    outcome = land(cache, the_copy(parted)) if num_slots else parted
    woken(outcome, first.ticket, Evicted if num_slots else KVLeaseError)  # type: ignore[arg-type]
    assert cache.check() == []


def test_an_evict_that_others_do_not_ask_for_ends() -> None:
    """A lone evict ends by its deadline, by a later call of its rank, by a cancel, or with its rank."""
    cache = an_engine(num_ranks=3)
    lease = both(cache)
    reserve(cache, worker_id=THIRD)
    first = evict(cache, lease.lease_id, worker_id=LEFT)
    second = evict(cache, lease.lease_id, worker_id=LEFT, now=1.0)
    woken(second, first.ticket, WrongStateError)
    late = tick(cache, 30.5)
    assert late.effects == ()
    error = woken(tick(cache, 31.5), second.ticket, BusyError)
    assert error.message.startswith("2 ranks of the request have not asked to evict the lease")
    assert (error.resource, error.need, error.available, error.limit) == ("ranks", 3, 1, 3)
    assert error.retry_after_ms == cache.shape.retry_after_ms

    third = evict(cache, lease.lease_id, worker_id=LEFT, now=32.0)
    fourth = evict(cache, lease.lease_id, worker_id=RIGHT, now=32.0)
    assert third.ticket is not None
    cache.handle(c.Cancel(ticket=third.ticket), 32.0)
    died = cache.handle(c.WorkerDied(worker_id=RIGHT), 32.0)

    assert wakes(died) == [fourth.ticket]
    assert cache.check() == []


def test_each_rank_may_ask_for_a_lease_to_come_back() -> None:
    """One copy brings the lease back, and each rank is told where its blocks are."""
    cache = an_engine()
    lease = evicted_by_both(cache)

    first = reload(cache, lease.lease_id, worker_id=LEFT)
    second = reload(cache, lease.lease_id, worker_id=RIGHT)
    outcome = land(cache, the_copy(first))

    told = woken(outcome, first.ticket, Reloaded)
    assert woken(outcome, second.ticket, Reloaded) == told
    assert answer(reload(cache, lease.lease_id, worker_id=RIGHT), Reloaded).block_ids == (
        told.block_ids
    )
    assert extend(cache, lease.lease_id, 2, LEFT) == []
    assert cache.check() == []


def test_ranks_wait_for_room_for_a_lease_to_come_back() -> None:
    """When there is room, one copy answers the reloads of both ranks."""
    cache = an_engine(2)
    lease = evicted_by_both(cache)
    full = reserve(cache, 2, "full")
    tickets = [
        cache.handle(a_reload(lease.lease_id, worker_id=one), 0.0).ticket for one in (LEFT, RIGHT)
    ]

    outcome = land(cache, the_copy(release(cache, full.lease_id)))

    assert wakes(outcome) == tickets
    assert cache.check() == []


def test_ranks_that_waited_are_told_when_the_bytes_are_there_already() -> None:
    """A lease that needs no copy comes back at once, for all ranks."""
    cache = an_engine(2)
    lease = both(cache, 1)
    for one in (LEFT, RIGHT):
        commit(cache, lease.lease_id, keys(1), worker_id=one)
    evict(cache, lease.lease_id, worker_id=LEFT)
    land(cache, the_copy(evict(cache, lease.lease_id, worker_id=RIGHT)))
    full = reserve(cache, 2, "full")
    tickets = [
        cache.handle(a_reload(lease.lease_id, worker_id=one), 0.0).ticket for one in (LEFT, RIGHT)
    ]
    outcome = release(cache, full.lease_id)
    for copy in copies(outcome):
        outcome = land(cache, copy)

    assert wakes(outcome) == tickets
    assert cache.check() == []


def test_a_failed_copy_tells_all_ranks() -> None:
    """If a copy fails, the lease is where it was, and all ranks are told."""
    cache = an_engine()
    lease = both(cache, 2)
    down = [evict(cache, lease.lease_id, worker_id=one) for one in (LEFT, RIGHT)]
    failed = fail(cache, the_copy(down[1]))
    for one in down:
        woken(failed, one.ticket, CopyFailedError)

    assert cache.check() == []
    assert extend(cache, lease.lease_id, 3, LEFT) != []


def test_a_lease_on_its_way_down_is_reloaded_later() -> None:
    """A reload of a lease on its way down is refused, and a repeated evict waits beside the other ranks'."""
    cache = an_engine()
    lease = both(cache, 2)
    first = evict(cache, lease.lease_id, worker_id=LEFT)
    second = evict(cache, lease.lease_id, worker_id=RIGHT)

    with pytest.raises(WrongStateError):
        reload(cache, lease.lease_id, worker_id=LEFT)

    again = evict(cache, lease.lease_id, worker_id=RIGHT)
    woken(again, second.ticket, WrongStateError)
    assert wakes(land(cache, the_copy(second))) == [first.ticket, again.ticket]


def test_a_caller_that_hangs_up_leaves_the_copy_to_the_others() -> None:
    """A lease completes its move even if no caller waits for it any more."""
    cache = an_engine()
    lease = evicted_by_both(cache)
    first = reload(cache, lease.lease_id, worker_id=LEFT)
    second = reload(cache, lease.lease_id, worker_id=RIGHT)
    for ticket in (first.ticket, second.ticket):
        assert ticket is not None
        cache.handle(c.Cancel(ticket=ticket), 0.0)
        assert cache.check() == []

    assert wakes(land(cache, the_copy(first))) == []
    assert cache.check() == []


def test_a_dead_rank_leaves_a_lease_on_its_way_to_the_other() -> None:
    """A dead rank's reload is answered, and the copy goes on for the other rank."""
    cache = an_engine()
    lease = evicted_by_both(cache)
    first = reload(cache, lease.lease_id, worker_id=LEFT)

    died = cache.handle(c.WorkerDied(worker_id=LEFT), 0.0)
    land(cache, the_copy(first))

    woken(died, first.ticket, UnknownLeaseError)
    assert answer(reload(cache, lease.lease_id, worker_id=RIGHT), Reloaded).num_reloaded == 0
    assert cache.check() == []


def test_a_caller_that_hangs_up_is_found_among_all() -> None:
    """A cancel finds its own call among those of all leases and ranks."""
    cache = an_engine(num_ranks=3)
    other = both(cache)
    for one in (LEFT, RIGHT, THIRD):
        lease = reserve(cache, 1, "second", worker_id=one)
    waiting = [
        evict(cache, one.lease_id, worker_id=rank).ticket
        for one, rank in ((other, LEFT), (lease, LEFT), (lease, RIGHT))
    ]
    assert waiting[2] is not None
    cache.handle(c.Cancel(ticket=waiting[2]), 0.0)
    moving = evict(cache, lease.lease_id, worker_id=THIRD)
    assert copies(moving) == []
    started_last = evict(cache, lease.lease_id, worker_id=RIGHT)
    assert started_last.ticket is not None
    cache.handle(c.Cancel(ticket=started_last.ticket), 0.0)

    assert wakes(land(cache, the_copy(started_last))) == [waiting[1], moving.ticket]
    assert cache.check() == []


# Fork -----------------------------------------------------------------------------------------------------------------


def test_ranks_fork_a_request_together() -> None:
    """The second rank's fork is answered with the first one's lease, even while the copies are under way."""
    cache = an_engine()
    lease = both(cache, 2)
    for one in (LEFT, RIGHT):
        command = c.Commit(
            worker_id=one, lease_id=lease.lease_id, num_tokens=6, first_block=0, keys=keys(1)
        )
        answer(cache.handle(command, 0.0), Committed)
    forks = [
        c.Fork(worker_id=one, lease_id=lease.lease_id, request_id="child", num_tokens=8)
        for one in (LEFT, RIGHT)
    ]

    first, second = (cache.handle(one, 0.0) for one in forks)
    outcome = land(cache, the_copy(first))

    granted, joined = (woken(outcome, one.ticket, Forked).lease for one in (first, second))
    assert granted.lease_id == joined.lease_id
    assert (granted.joined_id, joined.joined_id > granted.lease_id) == (0, True)
    assert answer(cache.handle(forks[1], 0.0), Forked).lease == joined
    with pytest.raises(IdReusedError):
        cache.handle(replace(forks[1], num_tokens=7), 0.0)
    assert cache.check() == []


def test_a_fork_is_refused_while_a_mate_waits_for_its_request() -> None:
    """A fork to a request that another rank waits for is refused: one request has one lease."""
    cache = an_engine(2)
    lease = both(cache, 2)
    cache.handle(a_reserve(1, "child", worker_id=RIGHT, wait_ms=WAIT_MS), 0.0)

    with pytest.raises(IdReusedError):
        cache.handle(
            c.Fork(worker_id=LEFT, lease_id=lease.lease_id, request_id="child", num_tokens=8), 0.0
        )
