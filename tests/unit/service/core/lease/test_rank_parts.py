"""Laws of the blocks that each rank was told of: they stay until the rank itself gives them up, and no call is lost."""

from dataclasses import replace

from kvlease.errors import UnknownLeaseError, WrongStateError
from kvleased.core.effects import Evicted, Reloaded
from tests.unit.service.core.builders import (
    WAIT_MS,
    a_reserve,
    answer,
    commit,
    evict,
    found,
    ids,
    keys,
    land,
    leases_of,
    on_host,
    records,
    release,
    reload,
    reserve,
    the_copy,
    tick,
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
    restarted,
    trim,
)


def test_what_a_repeated_reserve_tells_of_is_not_trimmed_by_another_rank() -> None:
    """A repeated reserve tells its rank of blocks that another rank added, and from then on the rank counts on them."""
    cache = an_engine()
    lease = both(cache, 1)
    extend(cache, lease.lease_id, 3, RIGHT)

    told = ids(reserve(cache, 1, worker_id=LEFT).block_ids)

    assert len(told) == 3
    assert trim(cache, lease.lease_id, 1, RIGHT) == 0
    assert trim(cache, lease.lease_id, 1, LEFT) == 2
    assert cache.check() == []


def test_what_a_reload_tells_of_is_not_trimmed_by_another_rank() -> None:
    """A reload tells each rank of all blocks, including those that another rank added."""
    cache = an_engine()
    lease = both(cache, 1)
    extend(cache, lease.lease_id, 3, RIGHT)
    evict(cache, lease.lease_id, worker_id=LEFT)
    land(cache, the_copy(evict(cache, lease.lease_id, worker_id=RIGHT)))
    land(cache, the_copy(reload(cache, lease.lease_id, worker_id=LEFT)))

    answer(reload(cache, lease.lease_id, worker_id=RIGHT), Reloaded)

    assert trim(cache, lease.lease_id, 1, RIGHT) == 0
    assert cache.check() == []
    assert trim(cache, lease.lease_id, 1, LEFT) == 2
    assert cache.check() == []


def test_reload_of_a_lease_that_is_here_takes_back_the_wish_to_evict_it() -> None:
    """A rank that reloads the lease may write again, so its own evict is taken back, and the other's waits for it."""
    cache = an_engine()
    lease = both(cache, 1)
    first = evict(cache, lease.lease_id, worker_id=LEFT)

    back = reload(cache, lease.lease_id, worker_id=LEFT)
    second = evict(cache, lease.lease_id, worker_id=RIGHT)

    assert answer(back, Reloaded).num_reloaded == 0
    woken(back, first.ticket, WrongStateError)
    assert second.ticket is not None
    assert second.effects == ()
    assert cache.check() == []


def test_rank_that_joins_a_lease_on_its_way_down_is_told_of_no_blocks() -> None:
    """A rank that joins a lease on its way down is told of no blocks; it reloads the lease once it is down."""
    cache = an_engine()
    lease = both(cache, 1)
    release(cache, lease.lease_id, worker_id=RIGHT)
    down = evict(cache, lease.lease_id, worker_id=LEFT)

    joined = reserve(cache, 1, worker_id=RIGHT)
    landed = land(cache, the_copy(down))

    assert (joined.lease_id, joined.block_ids) == (lease.lease_id, b"")
    woken(landed, down.ticket, Evicted)
    up = reload(cache, lease.lease_id, worker_id=RIGHT)
    woken(land(cache, the_copy(up)), up.ticket, Reloaded)
    assert cache.check() == []


def test_end_of_a_lease_answers_an_evict_that_waits_for_others() -> None:
    """If the last rank releases a lease that it has asked to evict, its evict is answered: no rank can join it now."""
    cache = an_engine()
    lease = reserve(cache, 1, worker_id=LEFT)
    waiting = evict(cache, lease.lease_id, worker_id=LEFT)

    released = release(cache, lease.lease_id, worker_id=LEFT)

    woken(released, waiting.ticket, UnknownLeaseError)
    assert free(cache) == 8


def test_rank_that_comes_back_does_not_write_what_a_crash_left_findable() -> None:
    """After a crash in a commit, findable blocks may have uncounted tokens, so a returning rank gets a new lease."""
    cache = an_engine()
    lease = both(cache, 2)
    for rank in (LEFT, RIGHT):
        commit(cache, lease.lease_id, keys(1), worker_id=rank)
    records(cache).rows.num_computed[:] = 0
    cache = restarted(cache, LEFT)
    cache.handle(an_attach(LEFT), 100.0)

    again = reserve(cache, 2, worker_id=LEFT, now=100.0)

    assert again.lease_id != lease.lease_id
    assert cache.check() == []


def test_what_a_rank_committed_before_a_trim_does_not_count_for_new_blocks() -> None:
    """A rank that has left wrote its part of the trimmed blocks, and nothing in those that took their places."""
    cache = an_engine()
    lease = both(cache, 3)
    commit(cache, lease.lease_id, keys(1, 2, 3), worker_id=LEFT)
    release(cache, lease.lease_id, worker_id=LEFT)
    trim(cache, lease.lease_id, 1, RIGHT)
    extend(cache, lease.lease_id, 3, RIGHT)

    commit(cache, lease.lease_id, keys(1, 2, 3), worker_id=RIGHT)

    assert found(cache, keys(1, 2, 3)) == (1, 0)
    assert cache.check() == []


def test_rank_whose_call_ended_while_the_lease_was_loading_is_yet_to_come() -> None:
    """A rank whose call ended never learned of the lease, so the blocks that it asked for are kept until it comes."""
    cache = an_engine()
    on_host(cache, keys(1, 2))
    command = a_reserve(3, prefix=keys(1, 2), worker_id=LEFT, wait_ms=WAIT_MS)
    copy = the_copy(cache.handle(command, 0.0))
    cache.handle(replace(command, worker_id=RIGHT, wait_ms=2 * WAIT_MS), 0.0)
    tick(cache, 1.5 * WAIT_MS / 1000)
    land(cache, copy)
    (lease_id,) = leases_of(cache, RIGHT)

    assert trim(cache, lease_id, 2, RIGHT) == 0
    joined = reserve(cache, 3, prefix=keys(1, 2), worker_id=LEFT)

    assert (joined.lease_id, len(ids(joined.block_ids))) == (lease_id, 3)
    assert cache.check() == []


def test_end_of_a_newer_lease_of_a_request_leaves_the_older_one_findable() -> None:
    """A rank still finds an older lease by its request's id after a newer one ends, even if one between ended first."""
    cache = an_engine()
    rounds = []
    for number in (1, 2):
        # The rank that has released its lease asks first, and the other one joins the new lease.
        lease = reserve(cache, 1, worker_id=RIGHT)
        reserve(cache, 1, worker_id=LEFT)
        for rank in (LEFT, RIGHT):
            commit(cache, lease.lease_id, keys(number), worker_id=rank)
        release(cache, lease.lease_id, worker_id=RIGHT)
        rounds.append(lease.lease_id)
    newest = reserve(cache, 1, worker_id=RIGHT)
    assert len({newest.lease_id, *rounds}) == len(rounds) + 1

    release(cache, rounds[1], worker_id=LEFT)
    release(cache, newest.lease_id, worker_id=RIGHT)

    assert reserve(cache, 1, worker_id=LEFT).lease_id == rounds[0]
    assert cache.check() == []
