"""Laws of leases that ranks share: blocks are published once all ranks have written, and free once none may write."""

import numpy as np
import pytest

from kvlease.errors import (
    InvalidError,
    NotYoursError,
    UnknownLeaseError,
    UnknownWorkerError,
)
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import commands as c
from kvleased.core.effects import (
    Beat,
    Extended,
    Mapped,
    Released,
    Reloaded,
    Stepped,
)
from kvleased.core.verbs.stepping import StepVerb
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    a_reserve,
    an_extend,
    answer,
    commit,
    found,
    ids,
    keys,
    land,
    leases_of,
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
    an_attach,
    an_engine,
    both,
    evicted_by_both,
    extend,
    free,
    trim,
)

# Extend ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [LEFT, RIGHT])
def test_each_rank_learns_the_same_blocks(first: WorkerId) -> None:
    """The first rank's extend takes the blocks, and the other rank's is told of the same ones."""
    cache = an_engine()
    lease = both(cache)
    second = RIGHT if first == LEFT else LEFT

    taken = extend(cache, lease.lease_id, 3, first)
    told = [extend(cache, lease.lease_id, end, second) for end in (2, 3, 3)]

    assert told == [taken[:1], taken[1:], []]
    assert free(cache) == 5
    assert cache.check() == []


def test_extends_of_both_ranks_wait_for_the_same_blocks() -> None:
    """When there is room, both ranks' extends are answered with all of the blocks."""
    cache = an_engine(2)
    full = reserve(cache, 1, "full")
    lease = both(cache)
    tickets = [
        cache.handle(an_extend(lease.lease_id, 2, worker_id=one, wait_ms=WAIT_MS), 0.0).ticket
        for one in (LEFT, RIGHT)
    ]

    outcome = release(cache, full.lease_id)

    first, second = (woken(outcome, ticket, Extended) for ticket in tickets)
    assert first == second
    assert cache.check() == []


def test_a_step_tells_each_rank_of_what_it_does_not_know() -> None:
    """The columns of a step mean the same for a shared lease as single calls do."""
    cache = an_engine()
    lease = both(cache)
    taken = extend(cache, lease.lease_id, 2, LEFT)
    command = c.Step(
        worker_id=RIGHT,
        verbs=bytes([StepVerb.EXTEND]),
        lease_ids=np.array([lease.lease_id]).tobytes(),
        num_tokens=np.array([2 * TOKENS_PER_BLOCK], np.int32).tobytes(),
    )

    stepped = answer(cache.handle(command, 0.0), Stepped)

    assert ids(stepped.block_ids) == taken
    assert ids(stepped.num_blocks) == [1]


def test_a_rank_that_parts_has_its_waiting_extend_answered() -> None:
    """A rank's release answers its own waiting extend; the other rank's waits on."""
    cache = an_engine(2)
    full = reserve(cache, 1, "full")
    lease = both(cache)
    left, right = (
        cache.handle(an_extend(lease.lease_id, 2, worker_id=one, wait_ms=WAIT_MS), 0.0).ticket
        for one in (LEFT, RIGHT)
    )

    parted = release(cache, lease.lease_id, worker_id=LEFT)
    outcome = release(cache, full.lease_id)

    woken(parted, left, UnknownLeaseError)
    assert wakes(outcome) == [right]


def test_a_late_rank_of_a_lease_in_the_host_pool_is_told_nothing() -> None:
    """A rank that joins a lease in the host pool is told of no blocks, for only a reload has them."""
    cache = an_engine()
    lease = evicted_by_both(cache)
    release(cache, lease.lease_id, worker_id=RIGHT)

    joined = reserve(cache, 2, worker_id=RIGHT)
    outcome = reload(cache, lease.lease_id, worker_id=RIGHT)
    told = woken(land(cache, the_copy(outcome)), outcome.ticket, Reloaded)

    assert (joined.block_ids, len(ids(told.block_ids))) == (b"", 2)
    assert extend(cache, lease.lease_id, 2, RIGHT) == []
    assert cache.check() == []


# Commit ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(LEFT, RIGHT), (RIGHT, LEFT)])
def test_blocks_are_published_when_the_slowest_rank_has_written(
    order: tuple[WorkerId, WorkerId],
) -> None:
    """A block has a part for each rank, and is published once every rank has written its part."""
    cache = an_engine()
    lease = both(cache, 2)
    first, second = order

    said = commit(cache, lease.lease_id, keys(1, 2), worker_id=first)
    assert (said.num_committed, found(cache, keys(1, 2))) == (0, (0, 0))
    said = commit(cache, lease.lease_id, keys(1), worker_id=second)
    assert (said.num_committed, found(cache, keys(1, 2))) == (1, (1, 0))
    said = commit(cache, lease.lease_id, keys(2), 1, worker_id=second)

    assert (said.num_committed, found(cache, keys(1, 2))) == (1, (2, 0))
    assert cache.check() == []


def test_a_rank_that_has_not_joined_has_written_nothing() -> None:
    """Nothing is published until every rank has joined."""
    cache = an_engine()
    lease = reserve(cache, 1, worker_id=LEFT)

    assert commit(cache, lease.lease_id, keys(1), worker_id=LEFT).num_committed == 0

    reserve(cache, 1, worker_id=RIGHT)
    assert commit(cache, lease.lease_id, keys(1), worker_id=RIGHT).num_committed == 1


def test_three_ranks_must_all_have_written() -> None:
    """Of three ranks, the slowest one decides what is published."""
    cache = an_engine(num_ranks=3)
    lease = both(cache, 2)
    reserve(cache, 2, worker_id=THIRD)

    said = [
        commit(cache, lease.lease_id, keys(1, 2), worker_id=one).num_committed
        for one in (THIRD, LEFT, RIGHT)
    ]

    assert said == [0, 0, 2]
    assert cache.check() == []


def test_a_commit_that_is_refused_does_not_count() -> None:
    """A rank that names other keys for published blocks is refused, and commits nothing."""
    cache = an_engine()
    lease = both(cache, 2)
    for one in (LEFT, RIGHT):
        commit(cache, lease.lease_id, keys(1), worker_id=one)
    commit(cache, lease.lease_id, keys(1, 2), worker_id=LEFT)

    with pytest.raises(InvalidError):
        commit(cache, lease.lease_id, keys(9, 2), worker_id=RIGHT)

    assert found(cache, keys(1, 2)) == (1, 0)
    assert cache.check() == []


def test_a_dead_ranks_commit_counts() -> None:
    """Parts that a dead rank has committed count; those that it has not will never be written."""
    cache = an_engine()
    lease = both(cache, 2)
    commit(cache, lease.lease_id, keys(1), worker_id=LEFT)
    cache.handle(c.WorkerDied(worker_id=LEFT), 0.0)

    commit(cache, lease.lease_id, keys(1, 2), worker_id=RIGHT)

    assert found(cache, keys(1, 2)) == (1, 0)
    assert cache.check() == []


# The end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(LEFT, RIGHT), (RIGHT, LEFT)])
@pytest.mark.parametrize("dies", [False, True])
def test_blocks_are_free_when_no_rank_may_write(
    order: tuple[WorkerId, WorkerId], *, dies: bool
) -> None:
    """When one rank releases or dies, the other keeps the blocks; they are free when it ends, too."""
    cache = an_engine()
    lease = both(cache, 3)
    first, second = order

    if dies:
        cache.handle(c.WorkerDied(worker_id=first), 0.0)
    else:
        answer(release(cache, lease.lease_id, worker_id=first), Released)
    assert (free(cache), leases_of(cache, first)) == (5, [])
    assert cache.check() == []
    release(cache, lease.lease_id, worker_id=second)

    assert free(cache) == 8
    assert cache.check() == []


def test_who_has_parted_has_no_say_any_more() -> None:
    """A rank that has released a lease cannot extend it."""
    cache = an_engine()
    lease = both(cache)
    release(cache, lease.lease_id, worker_id=LEFT)

    with pytest.raises(NotYoursError):
        extend(cache, lease.lease_id, 2, LEFT)


def test_a_rank_may_come_back_while_nothing_was_published() -> None:
    """While nothing is published, a rank may join again, even as another process, as if for the first time."""
    cache = an_engine()
    lease = both(cache, 2)
    commit(cache, lease.lease_id, keys(1, 2), worker_id=LEFT)
    cache.handle(c.WorkerDied(worker_id=LEFT), 0.0)
    cache.handle(an_attach(LEFT), 0.0)

    again = reserve(cache, 2, worker_id=LEFT)

    assert again.lease_id == lease.lease_id
    assert commit(cache, lease.lease_id, keys(1, 2), worker_id=RIGHT).num_committed == 0
    assert commit(cache, lease.lease_id, keys(1, 2), worker_id=LEFT).num_committed == 2
    assert cache.check() == []


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_a_rank_that_comes_back_later_asks_anew(num_blocks: int) -> None:
    """A returning rank gets a new lease, so as not to write published blocks; others join it after their release."""
    cache = an_engine()
    old = both(cache, 2)
    for one in (LEFT, RIGHT):
        commit(cache, old.lease_id, keys(1), worker_id=one)
    release(cache, old.lease_id, worker_id=LEFT)

    new = reserve(cache, num_blocks, worker_id=LEFT)
    assert new.lease_id != old.lease_id
    assert cache.check() == []
    release(cache, old.lease_id, worker_id=RIGHT)

    assert reserve(cache, num_blocks, worker_id=RIGHT).lease_id == new.lease_id
    assert cache.check() == []


def test_an_inventory_keeps_the_parts_that_it_names() -> None:
    """A heartbeat that does not name a lease ends its rank's part, and the other rank keeps its own."""
    cache = an_engine()
    lease = both(cache)
    beats = [
        cache.handle(
            c.Heartbeat(worker_id=one, lease_ids=own, newest_lease_id=LeaseId(lease.joined_id)),
            LEASE_SECONDS - 1,
        )
        for one, own in ((LEFT, (lease.lease_id,)), (RIGHT, ()))
    ]

    assert [answer(beat, Beat).num_orphans_ended for beat in beats] == [0, 1]
    assert (leases_of(cache, LEFT), leases_of(cache, RIGHT)) == ([lease.lease_id], [])
    tick(cache, LEASE_SECONDS + 1)
    assert cache.census().device["quarantined"] == 0


def test_an_inventory_from_before_a_rank_joined_says_nothing() -> None:
    """A heartbeat says nothing about a lease that its rank joined later than the newest lease it knew of."""
    cache = an_engine()
    lease = both(cache)

    beat = cache.handle(
        c.Heartbeat(worker_id=RIGHT, lease_ids=(), newest_lease_id=lease.lease_id),
        LEASE_SECONDS - 1,
    )

    assert answer(beat, Beat).num_orphans_ended == 0


def test_a_lease_is_quarantined_when_no_rank_renews_it() -> None:
    """A shared lease is quarantined when no rank renews it, and free only once all ranks have let go."""
    cache = an_engine()
    lease = both(cache)
    tick(cache, LEASE_SECONDS + 1)
    assert cache.census().device["quarantined"] == 1

    cache.handle(c.WorkerDied(worker_id=LEFT), 0.0)
    assert cache.census().device["quarantined"] == 1
    release(cache, lease.lease_id, worker_id=RIGHT)

    assert free(cache) == 8
    assert cache.check() == []


def test_waiting_calls_of_a_dead_rank_are_answered() -> None:
    """The waiting calls of a dead rank are answered; those of other ranks wait on."""
    cache = an_engine(2)
    full = reserve(cache, 2, "full")
    left, right = (
        cache.handle(a_reserve(2, worker_id=one, wait_ms=WAIT_MS), 0.0).ticket
        for one in (LEFT, RIGHT)
    )

    died = cache.handle(c.WorkerDied(worker_id=LEFT), 0.0)
    outcome = release(cache, full.lease_id)

    woken(died, left, UnknownWorkerError)
    assert wakes(outcome) == [right]


# Trim and map ---------------------------------------------------------------------------------------------------------


def test_blocks_are_taken_back_when_no_rank_wants_them() -> None:
    """Blocks are trimmed once no rank wants them; until then a rank that extends again gets the same ones."""
    cache = an_engine()
    lease = both(cache, 3)
    blocks = ids(lease.block_ids)

    assert trim(cache, lease.lease_id, 1, LEFT) == 0
    assert extend(cache, lease.lease_id, 2, LEFT) == blocks[1:2]
    assert trim(cache, lease.lease_id, 1, RIGHT) == 1
    assert extend(cache, lease.lease_id, 2, RIGHT) == blocks[1:2]

    assert free(cache) == 6
    assert trim(cache, lease.lease_id, 2, RIGHT) == 0
    assert cache.check() == []


def test_nothing_is_taken_back_before_all_have_joined() -> None:
    """Before all ranks have joined, no blocks are trimmed, for a late rank still has to write them."""
    cache = an_engine()
    lease = reserve(cache, 3, worker_id=LEFT)

    assert trim(cache, lease.lease_id, 1, LEFT) == 0
    assert len(ids(reserve(cache, 3, worker_id=RIGHT).block_ids)) == 3


def test_a_rank_that_parted_wants_no_blocks() -> None:
    """The remaining ranks decide about a trim; a rank that comes back afterwards gets a new lease."""
    cache = an_engine()
    lease = both(cache, 3)
    release(cache, lease.lease_id, worker_id=LEFT)

    assert trim(cache, lease.lease_id, 1, RIGHT) == 2
    assert reserve(cache, 3, worker_id=LEFT).lease_id != lease.lease_id
    assert cache.check() == []


def test_each_rank_may_map() -> None:
    """All ranks map the same row."""
    cache = an_engine()
    lease = both(cache, 2)

    mapped = [
        answer(cache.handle(c.Map(worker_id=one, lease_id=lease.lease_id), 0.0), Mapped)
        for one in (LEFT, RIGHT)
    ]

    assert mapped[0] == mapped[1]
    assert cache.check() == []
