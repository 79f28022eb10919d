"""Laws of shared leases in several groups, after a restart, and in checks."""

from collections.abc import Callable

import pytest

from kvlease.errors import (
    WrongStateError,
)
from kvlease.groups import GroupShape
from kvlease.ids import LeaseId
from kvleased.core import commands as c
from kvleased.core.effects import (
    Extended,
    Reserved,
    Stepped,
)
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.ranks import Call, Members, Place
from kvleased.core.state import CacheState
from tests.unit.service.core.builders import (
    STRANGER,
    TOKENS_PER_BLOCK,
    WORKER,
    an_extend,
    answer,
    commit,
    committed,
    ids,
    keys,
    leases_of,
    release,
    reserve,
)
from tests.unit.service.core.grouped import CHUNK, GUESSING
from tests.unit.service.core.rank_builders import (
    LEFT,
    RIGHT,
    STATES,
    WINDOW,
    an_engine,
    both,
    extend,
    free,
    grouped,
    restarted,
    trim,
)

# Groups ---------------------------------------------------------------------------------------------------------------


def test_windows_move_on_with_the_slowest_rank() -> None:
    """Blocks that a fast rank no longer needs are kept for the slow one, and each goes as far as if it were alone."""
    cache = grouped(WINDOW)
    lease = both(cache, 5)
    fast = commit(cache, lease.lease_id, keys(1, 2, 3, 4), worker_id=LEFT)
    told = extend(cache, lease.lease_id, 7, LEFT)
    assert cache.check() == []

    slow = commit(cache, lease.lease_id, keys(1, 2, 3, 4), worker_id=RIGHT)

    assert (fast.num_given_back, slow.num_given_back) == (0, 2)
    assert extend(cache, lease.lease_id, 7, RIGHT) == told
    assert cache.check() == []


def test_windows_are_trimmed_when_all_ranks_have_come_as_far() -> None:
    """While one rank is ahead, its window's blocks stay."""
    cache = grouped(WINDOW)
    lease = both(cache, 7)
    commit(cache, lease.lease_id, keys(1, 2, 3, 4), worker_id=LEFT)
    assert [trim(cache, lease.lease_id, 5, one) for one in (LEFT, RIGHT)] == [0, 0]

    commit(cache, lease.lease_id, keys(1, 2, 3, 4), worker_id=RIGHT)

    assert trim(cache, lease.lease_id, 5, RIGHT) > 0
    assert cache.check() == []


def test_states_are_published_where_all_ranks_stopped() -> None:
    """A state belongs to one token, so it is published only if all ranks stopped at that token."""
    cache = grouped(STATES)
    lease = both(cache, 4)
    said = [
        commit(cache, lease.lease_id, keys(*range(1, end + 1)), worker_id=one).num_committed
        for one, end in ((LEFT, 2), (LEFT, 4), (RIGHT, 3), (RIGHT, 4))
    ]

    assert said[:3] == [0, 0, 0]
    assert said[3] > 0
    assert cache.check() == []


@pytest.mark.parametrize("verb", [c.Trim, c.Fork])
def test_what_moves_states_is_refused(verb: type[c.Trim]) -> None:
    """A trim or a fork that moves states is refused, for each rank would do it at another token."""
    cache = grouped(STATES)
    lease = both(cache, 2)
    more = {"request_id": "child"} if verb is c.Fork else {}

    with pytest.raises(WrongStateError, match="apart"):
        cache.handle(verb(worker_id=LEFT, lease_id=lease.lease_id, num_tokens=8, **more), 0.0)


def test_a_rank_behind_is_told_where_the_states_are() -> None:
    """Places between two states are told as empty, so that a rank puts both states where they belong."""
    cache = grouped(STATES)
    lease = both(cache, 1)
    for end in (3, 6):
        extend(cache, lease.lease_id, end, LEFT)

    outcome = cache.handle(an_extend(lease.lease_id, 6, worker_id=RIGHT), 0.0)
    told = answer(outcome, Extended)

    assert ids(told.num_blocks) == [5, 4]
    assert [bool(one) for one in ids(told.block_ids)[5:]] == [True, False, False, True]


def test_a_rank_is_told_of_the_state_that_another_has_asked_for_further_on() -> None:
    """If another rank has extended further, both write their states to the next place that has one."""
    cache = grouped(STATES)
    lease = both(cache, 1)
    extend(cache, lease.lease_id, 6, LEFT)

    told = answer(cache.handle(an_extend(lease.lease_id, 4, worker_id=RIGHT), 0.0), Extended)

    assert ids(told.num_blocks) == [3, 1]
    assert told.covered_tokens == 4 * TOKENS_PER_BLOCK
    assert ids(told.num_places) == [4, 6]


def test_a_rank_that_asks_again_is_told_of_more_states_only_for_more_tokens() -> None:
    """How many states a rank needs depends on its tokens: not on how far on it has been told of the last one."""
    cache = grouped(GUESSING)
    lease = both(cache, 1)
    for end in (4, 7):
        extend(cache, lease.lease_id, end, LEFT)

    told = [
        answer(cache.handle(an_extend(lease.lease_id, end, worker_id=RIGHT), 0.0), Extended)
        for end in (2, 2, 1, 5)
    ]

    assert [ids(one.num_places) for one in told] == [[2, 8], [2, 8], [2, 8], [5, 9]]
    assert [ids(one.num_blocks)[1] for one in told] == [5, 0, 0, 1]


def test_a_step_tells_a_rank_at_which_places_states_stand() -> None:
    """A step returns the places of states, which its tokens do not tell; other operations have no places."""
    cache = grouped(STATES)
    lease = both(cache, 1)
    extend(cache, lease.lease_id, 6, LEFT)
    command = c.Step(
        worker_id=RIGHT,
        verbs=b"\2\1",
        lease_ids=lease.lease_id.to_bytes(8, "little") * 2,
        num_tokens=bytes(4) + (4 * TOKENS_PER_BLOCK).to_bytes(4, "little"),
    )

    told = answer(cache.handle(command, 0.0), Stepped)

    assert ids(told.num_blocks) == [0, 0, 3, 1]
    assert ids(told.num_places) == [0, 0, 4, 6]


@pytest.mark.parametrize(("groups", "num_places"), [((), []), ((WINDOW,), [2, 2])])
def test_no_places_are_told_where_all_blocks_are_kept(
    groups: tuple[GroupShape, ...], num_places: list[int]
) -> None:
    """If one group keeps everything, the new blocks follow those that a rank knows, and no places are told."""
    cache = grouped(*groups)
    lease = both(cache, 1)
    extend(cache, lease.lease_id, 3, LEFT)

    told = answer(cache.handle(an_extend(lease.lease_id, 2, worker_id=RIGHT), 0.0), Extended)

    assert (len(ids(told.block_ids)), ids(told.num_places)) == (1 + len(groups), num_places)


# Restart --------------------------------------------------------------------------------------------------------------


def test_shared_leases_go_on_after_a_restart() -> None:
    """Rows say which ranks share them, and every rank counts as having come as far as all ranks had."""
    cache = an_engine()
    lease = both(cache, 3)
    for one in (LEFT, RIGHT):
        commit(cache, lease.lease_id, keys(1), worker_id=one)
    commit(cache, lease.lease_id, keys(1, 2), worker_id=LEFT)

    again = restarted(cache)

    assert again.check() == []
    assert leases_of(again, LEFT) == leases_of(again, RIGHT) == [lease.lease_id]
    assert commit(again, lease.lease_id, keys(2), 1, worker_id=RIGHT).num_committed == 0
    assert commit(again, lease.lease_id, keys(2), 1, worker_id=LEFT).num_committed == 1
    for one in (LEFT, RIGHT):
        release(again, lease.lease_id, worker_id=one)
    assert free(again) == 6
    assert again.check() == []


def test_a_restart_parts_the_dead_from_their_leases() -> None:
    """A rank that died while the daemon was down has left its leases; a lease ends with its last rank."""
    cache = an_engine()
    lease = both(cache, 2)

    again = restarted(cache, LEFT)
    assert (leases_of(again, RIGHT), again.check()) == ([lease.lease_id], [])
    after = restarted(again, LEFT, RIGHT)

    assert (free(after), after.check()) == (8, [])


def test_a_rank_that_comes_back_after_a_restart_asks_anew_as_it_would_before() -> None:
    """After a restart, a returning rank gets a new lease, for it may not know the keys of the published blocks."""
    cache = an_engine()
    lease = both(cache, 2)
    for one in (LEFT, RIGHT):
        commit(cache, lease.lease_id, keys(1), worker_id=one)
    release(cache, lease.lease_id, worker_id=LEFT)
    cache = restarted(cache)

    again = reserve(cache, 2, worker_id=LEFT)

    assert (again.lease_id != lease.lease_id, again.device_hit_tokens) == (True, 0)
    assert cache.check() == []


def test_a_rank_that_comes_first_after_a_restart_is_told_of_the_prefix() -> None:
    """A rank that comes first after a restart is told of the prefix that the first rank found, and of no more."""
    cache = an_engine()
    committed(cache, keys(1))
    lease = reserve(cache, 2, prefix=keys(1), worker_id=LEFT)
    commit(cache, lease.lease_id, keys(1, 2), worker_id=LEFT)

    joined = reserve(restarted(cache), 2, prefix=keys(1), worker_id=RIGHT)

    assert (joined.lease_id, joined.device_hit_tokens) == (lease.lease_id, TOKENS_PER_BLOCK)


def test_a_rank_that_parted_before_a_restart_holds_no_trim_up() -> None:
    """The row records that a rank has been there, so a trim does not wait for it."""
    cache = an_engine()
    lease = both(cache, 3)
    release(cache, lease.lease_id, worker_id=LEFT)
    cache = restarted(cache)
    extend(cache, lease.lease_id, 5, RIGHT)

    assert trim(cache, lease.lease_id, 3, RIGHT) == 2
    assert cache.check() == []


def test_the_newest_lease_of_a_request_is_found_after_a_restart() -> None:
    """Of two leases of one request, the newer one is joined after a restart."""
    cache = an_engine()
    old = both(cache, 2)
    for one in (LEFT, RIGHT):
        commit(cache, old.lease_id, keys(1), worker_id=one)
    release(cache, old.lease_id, worker_id=LEFT)
    new = reserve(cache, 3, worker_id=LEFT)

    again = restarted(cache)

    assert reserve(again, 3, worker_id=RIGHT).lease_id == new.lease_id
    assert again.check() == []


def test_windows_of_a_rank_ahead_survive_a_restart() -> None:
    """Blocks that a rank ahead may be writing survive a restart, whatever all ranks have computed."""
    cache = grouped(WINDOW)
    lease = both(cache, 5)
    commit(cache, lease.lease_id, keys(1, 2, 3, 4), worker_id=LEFT)
    extend(cache, lease.lease_id, 7, LEFT)
    before = free(cache)

    again = restarted(cache)

    assert free(again) == before
    assert again.check() == []


def test_a_rank_that_had_filled_what_there_was_room_for_goes_on_from_there() -> None:
    """A rank may have committed up to the end of its last blocks, beyond what the lease was asked to cover."""
    cache = grouped(CHUNK)
    command = c.Reserve(worker_id=LEFT, request_id="request", keys=b"", num_tokens=5)
    lease = answer(cache.handle(command, 0.0), Reserved)
    commit(cache, lease.lease_id, keys(1, 2), worker_id=LEFT)

    told = extend(restarted(cache), lease.lease_id, 5, LEFT)

    assert len(told) == 3 + 3


def test_a_row_that_was_given_up_is_of_no_engine() -> None:
    """A row that ranks have given up may belong to a process that calls for all ranks next."""
    cache = an_engine()
    lease = both(cache)
    for one in (LEFT, RIGHT):
        release(cache, lease.lease_id, worker_id=one)

    reserve(cache, 1, worker_id=WORKER)

    assert restarted(cache).check() == []
    assert leases_of(restarted(cache), WORKER) != []


# What is checked ------------------------------------------------------------------------------------------------------


def _misplace(state: CacheState, _: Lease, __: Members) -> None:
    state.ranks.places[STRANGER] = Place(3, 0)


def _claim_row(state: CacheState, _: Lease, __: Members) -> None:
    state.records.rows.engine[1] = 5


def _unname(state: CacheState, _: Lease, __: Members) -> None:
    state.records.rows.ranks[0] = 1


def _misrank(_: CacheState, __: Lease, members: Members) -> None:
    members.present[LEFT].rank = 1


def _give_away(_: CacheState, lease: Lease, __: Members) -> None:
    lease.worker_id = WORKER


def _miscount(_: CacheState, __: Lease, members: Members) -> None:
    members.hit_tokens = 1


def _tell_more(_: CacheState, __: Lease, members: Members) -> None:
    members.present[LEFT].told[0] = 7


def _unlist(state: CacheState, _: Lease, __: Members) -> None:
    state.leases.by_worker[LEFT].clear()


def _strand(state: CacheState, _: Lease, __: Members) -> None:
    state.beside[77] = []


def _intrude(state: CacheState, lease: Lease, _: Members) -> None:
    lease.ticket = CALL.ticket
    state.beside[CALL.ticket] = [CALL]


def _hold_up(_: CacheState, __: Lease, members: Members) -> None:
    members.evicts.update({LEFT: CALL, RIGHT: CALL})


CALL = Call(ticket=7, worker_id=STRANGER, deadline=0.0, joined_id=LeaseId(0))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(_misplace, "places in engines", id="places"),
        pytest.param(_claim_row, "belongs to an engine", id="row of none"),
        pytest.param(_unname, "does not name those", id="mask"),
        pytest.param(_misrank, "not of its engine", id="rank"),
        pytest.param(_give_away, "no part in it", id="speaker"),
        pytest.param(_miscount, "counts other tokens", id="progress"),
        pytest.param(_tell_more, "has told rank 0", id="told"),
        pytest.param(_unlist, "each has a part in", id="lists"),
        pytest.param(_strand, "does not exist", id="beside"),
        pytest.param(_intrude, "others than its members", id="calls"),
        pytest.param(_hold_up, "nobody else", id="evicts"),
    ],
)
def test_what_does_not_hold_of_shared_leases_is_told(
    harm: Callable[[CacheState, Lease, Members], None], words: str
) -> None:
    """The check tells of each law of shared leases that does not hold."""
    cache = an_engine()
    both(cache)
    reserve(cache, 1, "single", worker_id=WORKER)
    (lease,) = [one for one in cache._state.leases.by_id.values() if one.members is not None]
    assert lease.members is not None

    harm(cache._state, lease, lease.members)

    assert any(words in text for text in cache.check())


def test_members_show_who_is_there() -> None:
    """The text of members shows which ranks are there."""
    cache = an_engine()
    lease = both(cache)

    members = cache._state.leases.by_id[lease.lease_id].members

    assert repr(members) == "<Members [0, 1] of 2, all at 0 tokens or beyond>"
