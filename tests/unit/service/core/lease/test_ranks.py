"""Laws of requests whose ranks call separately: which worker has a rank's place, and how ranks share one lease."""

from dataclasses import replace

import pytest

from kvlease.errors import (
    DeadlineError,
    IdReusedError,
    InvalidError,
    KVLeaseError,
    NotYoursError,
    PoolFullError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import (
    Released,
    Reserved,
)
from tests.unit.service.core.builders import (
    STRANGER,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_reserve,
    answer,
    fail,
    ids,
    keys,
    land,
    leases_of,
    on_host,
    release,
    reserve,
    the_copy,
    tick,
    wakes,
    woken,
)
from tests.unit.service.core.rank_builders import (
    LEFT,
    RIGHT,
    an_attach,
    an_engine,
    both,
    extend,
    free,
)

# Places ---------------------------------------------------------------------------------------------------------------


def test_a_second_live_worker_of_a_rank_is_refused() -> None:
    """A rank has one worker; a second one is refused, and the refusal names the first."""
    cache = an_engine()

    with pytest.raises(WrongStateError, match="worker 11"):
        cache.handle(replace(an_attach(LEFT), worker_id=WorkerId(99)), 0.0)

    assert cache.check() == []


@pytest.mark.parametrize("end", [c.WorkerDied, c.Detach])
def test_a_rank_may_attach_again_after_its_worker_ended(end: type[c.Detach]) -> None:
    """A rank's place is free as soon as its worker has ended."""
    cache = an_engine()
    cache.handle(end(worker_id=LEFT), 0.0)

    cache.handle(replace(an_attach(LEFT), worker_id=WorkerId(99)), 0.0)

    assert reserve(cache, worker_id=WorkerId(99)).lease_id in leases_of(cache, WorkerId(99))
    assert cache.check() == []


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_cache_has_not_is_refused(rank: int) -> None:
    """A rank that is not in the plan is refused."""
    cache = an_engine()

    with pytest.raises(InvalidError, match="0 to 1"):
        cache.handle(replace(an_attach(LEFT), worker_id=WorkerId(99), rank=rank), 0.0)


def test_the_only_rank_of_an_engine_has_leases_of_its_own() -> None:
    """The only rank of an engine shares nothing."""
    cache = an_engine(num_ranks=1)

    lease = reserve(cache, worker_id=LEFT)
    answer(release(cache, lease.lease_id, worker_id=LEFT), Released)

    assert free(cache) == 8
    assert cache.check() == []


# Reserve --------------------------------------------------------------------------------------------------------------


def test_ranks_of_an_engine_share_the_lease_of_a_request() -> None:
    """The second rank gets the same lease, blocks, row and hits, under an id of its own."""
    cache = an_engine()
    first = reserve(cache, 2, worker_id=LEFT)

    second = reserve(cache, 2, worker_id=RIGHT)

    assert second.joined_id > first.lease_id
    assert (first.joined_id, replace(second, joined_id=LeaseId(0))) == (0, first)
    assert free(cache) == 6
    assert leases_of(cache, LEFT) == leases_of(cache, RIGHT) == [first.lease_id]
    assert cache.check() == []


def test_workers_without_an_engine_share_nothing() -> None:
    """A process that calls for all ranks shares its requests with no other, whatever their ids."""
    cache = an_engine()

    one, other = reserve(cache, worker_id=WORKER), both(cache)

    assert one.lease_id != other.lease_id
    with pytest.raises(NotYoursError):
        release(cache, other.lease_id, worker_id=WORKER)
    assert cache.check() == []


def test_another_rank_must_ask_for_the_same() -> None:
    """Another rank must ask for the same number of tokens and the same prefix."""
    cache = an_engine()
    reserve(cache, 2, worker_id=LEFT)

    with pytest.raises(IdReusedError):
        reserve(cache, 3, worker_id=RIGHT)

    assert leases_of(cache, RIGHT) == []
    assert cache.check() == []


def test_a_late_rank_is_told_of_all_blocks() -> None:
    """A rank that joins after an extend gets the added blocks, too."""
    cache = an_engine()
    lease = reserve(cache, 1, worker_id=LEFT)
    added = extend(cache, lease.lease_id, 2, LEFT)

    joined = reserve(cache, 1, worker_id=RIGHT)

    assert ids(joined.block_ids) == ids(lease.block_ids) + added
    assert extend(cache, lease.lease_id, 2, RIGHT) == []


def test_ranks_wait_for_one_lease_together() -> None:
    """When the first rank is served, so is the other, before any call that came between them."""
    cache = an_engine(2)
    full = reserve(cache, 2, "full")
    first = cache.handle(a_reserve(2, worker_id=LEFT, wait_ms=WAIT_MS), 0.0).ticket
    between = cache.handle(a_reserve(2, "between", worker_id=STRANGER, wait_ms=WAIT_MS), 0.0)
    second = cache.handle(a_reserve(2, worker_id=RIGHT, wait_ms=WAIT_MS), 0.0).ticket

    outcome = release(cache, full.lease_id)

    granted, joined = woken(outcome, first, Reserved), woken(outcome, second, Reserved)
    assert granted.lease_id == joined.lease_id
    assert between.ticket not in wakes(outcome)
    assert cache.check() == []


def test_ranks_of_several_classes_are_served_together() -> None:
    """A rank that asks with a higher priority has the other ranks served with it."""
    cache = an_engine(2)
    full = reserve(cache, 2, "full")
    low = replace(a_reserve(2, worker_id=LEFT, wait_ms=WAIT_MS), priority=0)
    cache.handle(a_reserve(1, "between", worker_id=STRANGER, wait_ms=WAIT_MS), 0.0)
    first = cache.handle(low, 0.0).ticket
    second = cache.handle(replace(low, worker_id=RIGHT, priority=2), 0.0).ticket

    outcome = release(cache, full.lease_id)

    assert {first, second} <= {*wakes(outcome)}
    assert cache.check() == []


def test_a_call_that_is_served_at_once_takes_waiting_ranks_with_it() -> None:
    """A rank of a higher priority that is served at once has the waiting ranks of its request served with it."""
    cache = an_engine(3)
    reserve(cache, 1, "full")
    low = replace(a_reserve(2, worker_id=LEFT, wait_ms=WAIT_MS), priority=0)
    big = replace(a_reserve(3, "big", worker_id=STRANGER, wait_ms=WAIT_MS), priority=1)
    cache.handle(big, 0.0)
    waiting = cache.handle(low, 0.0).ticket

    outcome = cache.handle(replace(low, worker_id=RIGHT, priority=2), 0.0)

    granted = answer(outcome, Reserved)
    assert woken(outcome, waiting, Reserved).lease_id == granted.lease_id
    assert cache.check() == []


def test_the_end_of_one_ranks_wait_is_not_the_others() -> None:
    """When one rank cancels, or its time is up, the other keeps its place."""
    cache = an_engine(2)
    full = reserve(cache, 2, "full")
    first = cache.handle(a_reserve(2, worker_id=LEFT, wait_ms=WAIT_MS), 0.0).ticket
    second = cache.handle(a_reserve(2, worker_id=RIGHT, wait_ms=9 * WAIT_MS), 0.0).ticket

    late = tick(cache, 2 * WAIT_MS / 1000)
    outcome = release(cache, full.lease_id)

    woken(late, first, KVLeaseError)
    assert wakes(outcome) == [second]
    assert leases_of(cache, LEFT) == []
    assert cache.check() == []


def test_a_waiting_rank_and_another_must_ask_for_the_same() -> None:
    """Ranks must ask for the same even while there is no lease yet."""
    cache = an_engine(2)
    reserve(cache, 2, "full")
    cache.handle(a_reserve(2, worker_id=LEFT, wait_ms=WAIT_MS), 0.0)

    with pytest.raises(IdReusedError):
        cache.handle(a_reserve(1, worker_id=RIGHT, wait_ms=WAIT_MS), 0.0)

    with pytest.raises(PoolFullError):
        reserve(cache, 1, "another", worker_id=RIGHT)


def test_ranks_that_waited_for_room_wait_for_bytes_together() -> None:
    """Ranks share the lease that the first one is granted from its beginning."""
    cache = an_engine()
    on_host(cache, keys(1, 2))
    full = reserve(cache, 8, "full")
    command = a_reserve(3, prefix=keys(1, 2), worker_id=LEFT, wait_ms=WAIT_MS)
    tickets = [cache.handle(replace(command, worker_id=one), 0.0).ticket for one in (LEFT, RIGHT)]

    served = release(cache, full.lease_id)
    assert (wakes(served), cache.check()) == ([], [])
    outcome = land(cache, the_copy(served))

    assert wakes(outcome) == tickets
    assert cache.check() == []


# Loading --------------------------------------------------------------------------------------------------------------


def loading(cache: Cache) -> tuple[object, int | None, int | None]:
    """Have both ranks wait for the bytes of a prefix, and return the copy and their tickets."""
    on_host(cache, keys(1, 2))
    command = a_reserve(3, prefix=keys(1, 2), worker_id=LEFT, wait_ms=WAIT_MS)
    first = cache.handle(command, 0.0)
    second = cache.handle(replace(command, worker_id=RIGHT, wait_ms=2 * WAIT_MS), 0.0)
    return the_copy(first), first.ticket, second.ticket


@pytest.mark.parametrize(
    ("asks", "remedies"),
    [
        pytest.param(LEFT, (), id="same engine"),
        pytest.param(STRANGER, ("num_tokens=4 num_keys=1",), id="another"),
    ],
)
def test_rank_is_told_of_no_less_than_another_asks_for(
    asks: WorkerId, remedies: tuple[str, ...]
) -> None:
    """While another rank's call waits to know the prefix, a refusal names no fewer tokens than that call asks for."""
    cache = an_engine(4, uses_remote=True)
    command = a_reserve(3, "r", keys(1, 2), worker_id=asks, wait_ms=WAIT_MS)
    reserve(cache, 3, "other", worker_id=STRANGER)
    cache.handle(command, 0.0)

    with pytest.raises(PoolFullError) as caught:
        cache.handle(replace(command, worker_id=RIGHT, wait_ms=0), 0.0)

    assert caught.value.remedies == remedies


def test_ranks_wait_for_the_bytes_of_a_prefix_together() -> None:
    """One copy answers both ranks, with the same hits."""
    cache = an_engine()
    copy, first, second = loading(cache)
    assert cache.check() == []

    outcome = land(cache, copy)  # type: ignore[arg-type]

    granted, joined = woken(outcome, first, Reserved), woken(outcome, second, Reserved)
    assert granted.host_hit_tokens == joined.host_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert (granted.joined_id, joined.joined_id > granted.lease_id) == (0, True)
    assert cache.check() == []


def test_a_loading_lease_goes_on_with_who_still_waits() -> None:
    """A rank whose call is late leaves the loading lease, and the other rank gets it."""
    cache = an_engine()
    copy, first, second = loading(cache)

    late = tick(cache, 1.5 * WAIT_MS / 1000)
    woken(late, first, DeadlineError)
    assert leases_of(cache, LEFT) == []
    outcome = land(cache, copy)  # type: ignore[arg-type]

    assert wakes(outcome) == [second]
    assert cache.check() == []


def test_a_caller_that_hangs_up_leaves_a_loading_lease_to_the_other() -> None:
    """A rank's cancel ends its part of a loading lease, and the last rank's ends the lease."""
    cache = an_engine()
    _, first, second = loading(cache)
    assert first is not None
    assert second is not None

    cache.handle(c.Cancel(ticket=second), 0.0)
    assert (leases_of(cache, LEFT) != [], leases_of(cache, RIGHT)) == (True, [])
    cache.handle(c.Cancel(ticket=first), 0.0)

    assert leases_of(cache, LEFT) == []
    assert cache.check() == []


def test_all_calls_of_a_loading_lease_may_be_late() -> None:
    """If the calls of all ranks are late, they share a lease without the late blocks."""
    cache = an_engine()
    _, first, second = loading(cache)

    outcome = tick(cache, 9 * WAIT_MS / 1000)

    granted, joined = woken(outcome, first, Reserved), woken(outcome, second, Reserved)
    assert granted.block_ids == joined.block_ids
    assert granted.host_hit_tokens == joined.host_hit_tokens == 0
    assert joined.joined_id > granted.lease_id
    assert cache.check() == []


def test_all_calls_of_a_loading_lease_are_refused_where_there_is_no_room_without_it() -> None:
    """If all calls are late and there is no room without the loading blocks, all are refused, and the lease ends."""
    cache = an_engine()
    _, first, second = loading(cache)
    reserve(cache, cache.census().device["free"], "others", worker_id=LEFT)

    outcome = tick(cache, 9 * WAIT_MS / 1000)

    woken(outcome, first, DeadlineError)
    woken(outcome, second, DeadlineError)
    assert leases_of(cache, RIGHT) == []
    assert cache.check() == []


def test_a_dead_rank_leaves_a_loading_lease_to_the_other() -> None:
    """A dead rank's call is answered, and the other rank gets the loading lease."""
    cache = an_engine()
    copy, first, second = loading(cache)

    died = cache.handle(c.WorkerDied(worker_id=LEFT), 0.0)
    outcome = land(cache, copy)  # type: ignore[arg-type]

    woken(died, first, UnknownLeaseError)
    assert woken(outcome, second, Reserved).joined_id > 0
    assert cache.check() == []


def test_ranks_start_over_together() -> None:
    """After a failed copy both ranks get the same new lease, each by its own ticket."""
    cache = an_engine()
    copy, first, second = loading(cache)

    outcome = fail(cache, copy)  # type: ignore[arg-type]

    granted, joined = woken(outcome, first, Reserved), woken(outcome, second, Reserved)
    assert granted.lease_id == joined.lease_id
    assert granted.host_hit_tokens == 0
    assert cache.check() == []


def test_ranks_that_start_over_may_load_again() -> None:
    """Undamaged bytes are copied again, and both ranks wait for them."""
    cache = an_engine()
    copy, first, second = loading(cache)

    again = land(cache, copy, failed=(1,))  # type: ignore[arg-type]
    outcome = again if first in wakes(again) else land(cache, the_copy(again))

    assert {*wakes(outcome)} == {first, second}
    assert cache.check() == []


def test_a_repeated_call_takes_its_own_place_only() -> None:
    """A repeated call replaces its own rank's call; the other rank's waits on."""
    cache = an_engine()
    copy, first, second = loading(cache)
    command = a_reserve(3, prefix=keys(1, 2), worker_id=RIGHT, wait_ms=WAIT_MS)

    repeated = cache.handle(command, 0.0)
    woken(repeated, second, WrongStateError)
    outcome = land(cache, copy)  # type: ignore[arg-type]

    assert wakes(outcome) == [first, repeated.ticket]


def test_a_rank_that_cannot_wait_does_not_join_a_loading_lease() -> None:
    """A rank that may not wait is refused while the lease is loading, and told to come back with a wait."""
    cache = an_engine()
    loading(cache)
    command = a_reserve(3, prefix=keys(1, 2), worker_id=RIGHT)

    with pytest.raises(WrongStateError):
        cache.handle(command, 0.0)
