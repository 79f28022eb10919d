"""Laws of blocks for the states of speculative tokens: blocks that growth passes over move on to the new places."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvlease.errors import PoolFullError
from kvlease.groups import most_blocks
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.admission import growing
from kvleased.core.effects import Extended, Reserved, Stepped
from kvleased.core.limits import TenantLimits
from tests.unit.service.core.builders import (
    EPOCH,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    WAIT_MS,
    WORKER,
    answer,
    evict,
    ids,
    land,
    records,
    release,
    reload,
    the_copy,
    woken,
)
from tests.unit.service.core.grouped import (
    GUESSING,
    STATE,
    TABLE,
    WIDE,
    cache_of,
    commit_tokens,
    counts,
    extend_tokens,
    filled,
    kernel_parts,
    map_lease,
    places,
    reserve_tokens,
)
from tests.unit.service.core.rank_builders import LEFT, RIGHT, an_engine, restarted

LONGEST_TOKENS = 4 * (TABLE - GUESSING.extra_blocks)
"""With more tokens than these, a table has too few places left for all speculative states."""


def extend_by_step(cache: Cache, lease_id: LeaseId, num_tokens: int) -> list[int]:
    """Return the blocks that a step adds to a lease."""
    command = c.Step(
        worker_id=WORKER,
        verbs=b"\1",
        lease_ids=lease_id.to_bytes(8, "little"),
        num_tokens=num_tokens.to_bytes(4, "little"),
    )
    reply = answer(cache.handle(command, 0.0), Stepped)
    assert counts(reply.codes) == [0]
    assert sum(counts(reply.num_blocks)) == len(ids(reply.block_ids))
    return ids(reply.block_ids)


def extend_by_call(cache: Cache, lease_id: LeaseId, num_tokens: int) -> list[int]:
    """Return the blocks that an extend adds to a lease."""
    return ids(extend_tokens(cache, lease_id, num_tokens).block_ids)


WAYS = {"call": extend_by_call, "step": extend_by_step}


@pytest.mark.parametrize("extend", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("num_added", range(1, 13))
def test_pool_of_one_request_serves_it_however_it_grows(
    extend: Callable[[Cache, LeaseId, int], list[int]], num_added: int
) -> None:
    """A pool of `most_blocks` serves a request to its end, by however many tokens at a time it grows."""
    cache = cache_of(GUESSING, num_blocks=1 + most_blocks(GUESSING, LONGEST_TOKENS))
    lease = reserve_tokens(cache, 4)

    for num_tokens in [*range(4 + num_added, LONGEST_TOKENS, num_added), LONGEST_TOKENS]:
        extend(cache, lease.lease_id, num_tokens)
        assert cache.check() == []
        commit_tokens(cache, lease.lease_id, num_tokens, b"")

    assert filled(cache, lease.row) == [[13, 14, 15]]


@pytest.mark.parametrize("extend", WAYS.values(), ids=WAYS)
def test_request_goes_on_to_the_last_place_of_its_table(
    extend: Callable[[Cache, LeaseId, int], list[int]],
) -> None:
    """At the end of the table there are fewer places for speculative tokens, and what is covered can be committed."""
    cache = cache_of(GUESSING)
    lease = reserve_tokens(cache, LONGEST_TOKENS)

    for num_tokens in range(LONGEST_TOKENS + 1, 4 * TABLE + 1):
        extend(cache, lease.lease_id, num_tokens)
        commit_tokens(cache, lease.lease_id, num_tokens, b"")
        assert cache.check() == []

    after = Cache.recovered(cache.shape, records(cache), EPOCH, {WORKER: TENANT}, 0.0)
    assert after._state.leases.rows.num_tokens[lease.row] == 4 * TABLE
    assert filled(after, lease.row) == [[15]]


@pytest.mark.parametrize("extend", WAYS.values(), ids=WAYS)
def test_blocks_that_are_passed_over_come_first_at_the_new_places(
    extend: Callable[[Cache, LeaseId, int], list[int]],
) -> None:
    """The caller is told of every new place; the old places are empty, for kernels too."""
    cache = cache_of(WIDE, GUESSING)
    lease = reserve_tokens(cache, 4)
    map_lease(cache, lease.lease_id)
    newest, passed, guess = places(cache, lease.row)[1]

    told = extend(cache, lease.lease_id, 11)

    wide, guessing = places(cache, lease.row)
    assert guessing == [newest, -1, guess, passed, guessing[4]]
    assert told == [wide[1], passed, guessing[4]]
    assert kernel_parts(cache, lease.row) == [wide, [newest, 0, guess, passed, guessing[4]]]
    assert cache.check() == []


def test_all_that_is_passed_over_moves_on() -> None:
    """If the new states lie behind all speculative ones, only one block is fresh."""
    cache = cache_of(GUESSING)
    lease = reserve_tokens(cache, 4)
    before = places(cache, lease.row)[0]

    told = extend_by_call(cache, lease.lease_id, 30)

    assert told[:2] == before[1:]
    assert filled(cache, lease.row) == [[0, 7, 8, 9]]


def test_step_grows_leases_that_pass_over_and_others() -> None:
    """In a step, each lease has its own blocks moved on, with the fresh blocks in between."""
    cache = cache_of(GUESSING, STATE)
    leases = [reserve_tokens(cache, 4, name) for name in ("far", "near", "still", "farther")]
    rows = [places(cache, one.row) for one in leases]
    command = c.Step(
        worker_id=WORKER,
        verbs=b"\1" * 4,
        lease_ids=b"".join(one.lease_id.to_bytes(8, "little") for one in leases),
        num_tokens=b"".join(one.to_bytes(4, "little") for one in (11, 8, 4, 30)),
    )

    reply = answer(cache.handle(command, 0.0), Stepped)

    after = [places(cache, one.row) for one in leases]
    assert counts(reply.num_blocks) == [2, 1, 1, 1, 0, 0, 3, 1]
    assert after[0][0][3] == rows[0][0][1]
    assert after[3][0][7:9] == rows[3][0][1:]
    assert after[2] == rows[2]
    new = [after[0][0][3:], after[0][1][2:], after[1][0][3:], after[1][1][1:]]
    new += [after[3][0][7:], after[3][1][7:]]
    assert ids(reply.block_ids) == [block for part in new for block in part]
    assert cache.check() == []


def test_refused_extend_moves_nothing() -> None:
    """An extend happens whole or not at all; its refusal says how many fresh blocks are missing."""
    cache = cache_of(WIDE, GUESSING, num_blocks=9)
    lease = reserve_tokens(cache, 4)
    reserve_tokens(cache, 4, "other")
    before = places(cache, lease.row)

    with pytest.raises(PoolFullError) as refused:
        extend_tokens(cache, lease.lease_id, 11)

    assert (refused.value.need, refused.value.available) == (2, 0)
    assert places(cache, lease.row) == before
    assert cache.check() == []


def test_extend_that_waited_moves_on_what_it_passes_over() -> None:
    """An extend that waits for blocks moves blocks on just as one that is served at once."""
    cache = cache_of(GUESSING, num_blocks=7)
    lease = reserve_tokens(cache, 4)
    other = reserve_tokens(cache, 4, "other")
    passed = places(cache, lease.row)[0][1]

    waiting = c.Extend(worker_id=WORKER, lease_id=lease.lease_id, num_tokens=11, wait_ms=WAIT_MS)
    ticket = cache.handle(waiting, 0.0).ticket
    outcome = release(cache, other.lease_id)

    assert ids(woken(outcome, ticket, Extended).block_ids)[0] == passed
    assert cache.check() == []


def test_newest_state_is_not_passed_over() -> None:
    """A lease that has not committed its latest tokens keeps both states that may be its newest."""
    cache = cache_of(GUESSING)
    lease = reserve_tokens(cache, 4)
    commit_tokens(cache, lease.lease_id, 4, b"")
    extend_tokens(cache, lease.lease_id, 8)

    extend_tokens(cache, lease.lease_id, 20)

    assert filled(cache, lease.row) == [[0, 1, 4, 5, 6]]


@pytest.mark.parametrize("extend", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("num_tokens", [57, 60, 64])
@pytest.mark.parametrize(("num_reserved", "kept"), [(4, [0]), (40, [9]), (48, [11])])
def test_table_that_ends_has_blocks_for_all_states_at_its_last_places(
    extend: Callable[[Cache, LeaseId, int], list[int]],
    num_reserved: int,
    kept: list[int],
    num_tokens: int,
) -> None:
    """A lease that jumps to where speculative states have no places left has no fewer blocks than before."""
    cache = cache_of(GUESSING, num_blocks=1 + GUESSING.max_blocks)
    lease = reserve_tokens(cache, num_reserved)

    extend(cache, lease.lease_id, num_tokens)

    assert filled(cache, lease.row) == [[*kept, 13, 14, 15]]
    assert cache.check() == []


@pytest.mark.parametrize("num_tokens", [57, 60, 64])
def test_lease_that_begins_at_the_end_of_its_table_outlives_a_restart(num_tokens: int) -> None:
    """A restart believes a row that has a block at each of its last places."""
    cache = cache_of(GUESSING)
    lease = reserve_tokens(cache, num_tokens)

    again = restarted(cache)

    assert filled(again, lease.row) == filled(cache, lease.row) == [[13, 14, 15]]
    assert again.check() == cache.check() == []


def test_table_that_is_too_short_for_all_guesses_is_filled() -> None:
    """If a table has fewer places than there are states at a time, a lease has a block at each of them."""
    cache = cache_of(replace(GUESSING, table_blocks=2, max_blocks=2))

    lease = reserve_tokens(cache, 8)

    assert filled(cache, lease.row) == [[0, 1]]
    assert cache.check() == []


def test_lease_that_has_moved_on_goes_down_and_comes_back() -> None:
    """A lease whose blocks have moved on has them at the same places after an evict and a reload."""
    cache = cache_of(GUESSING)
    lease = reserve_tokens(cache, 4)
    extend_tokens(cache, lease.lease_id, 11)

    land(cache, the_copy(evict(cache, lease.lease_id)))
    land(cache, the_copy(reload(cache, lease.lease_id)))

    assert filled(cache, lease.row) == [[0, 2, 3, 4]]
    assert cache.check() == []


# Restarts -------------------------------------------------------------------------------------------------------------


def test_growth_that_a_crash_cuts_off_is_ended_after_a_restart() -> None:
    """After a restart, a block at two places counts as moved on; the next moves start from where the lease is."""
    cache = cache_of(GUESSING, num_blocks=6)
    lease = reserve_tokens(cache, 4)
    map_lease(cache, lease.lease_id)
    before = places(cache, lease.row)[0]

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "_empty", die)
        with pytest.raises(KeyboardInterrupt):
            extend_tokens(cache, lease.lease_id, 11)
    again = restarted(cache)

    (after,) = places(again, lease.row)
    assert after[:4] == [before[0], -1, before[2], before[1]]
    assert kernel_parts(again, lease.row) == [[max(0, block) for block in after]]
    assert again.check() == []
    extend_tokens(again, lease.lease_id, 17)
    assert filled(again, lease.row) == [[0, 2, 4, 5, 6]]
    assert again.check() == []


# Ranks ----------------------------------------------------------------------------------------------------------------


def told_by(cache: Cache, lease_id: LeaseId, num_tokens: int, worker_id: WorkerId) -> list[int]:
    """Return the blocks that a rank is told of when it extends to more tokens."""
    command = c.Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=num_tokens)
    return ids(answer(cache.handle(command, 0.0), Extended).block_ids)


def test_ranks_are_told_anew_of_what_has_moved_on() -> None:
    """A rank that is behind is told where the first rank's request has moved the blocks, and takes no others."""
    cache = an_engine(1 + most_blocks(GUESSING, 11), groups=(GUESSING,), null_blocks=1)
    for worker_id in (LEFT, RIGHT):
        command = c.Reserve(worker_id=worker_id, request_id="request", keys=b"", num_tokens=4)
        lease = answer(cache.handle(command, 0.0), Reserved)
    passed = places(cache, lease.row)[0][1]

    told = [told_by(cache, lease.lease_id, 11, worker_id) for worker_id in (LEFT, RIGHT)]

    assert told[0] == told[1]
    assert told[0][0] == passed
    assert filled(cache, lease.row) == [[0, 2, 3, 4]]
    assert cache.check() == []


@pytest.mark.parametrize("num_tokens", range(41, 57))
def test_rank_behind_has_all_states_if_a_mate_jumps_to_the_end_of_the_table(
    num_tokens: int,
) -> None:
    """A rank that asks for fewer tokens has places left for all speculative states, and is told of a block for each."""
    cache = an_engine(groups=(GUESSING,), null_blocks=1)
    for worker_id in (LEFT, RIGHT):
        command = c.Reserve(worker_id=worker_id, request_id="request", keys=b"", num_tokens=40)
        lease = answer(cache.handle(command, 0.0), Reserved)
    told_by(cache, lease.lease_id, 60, LEFT)

    told = told_by(cache, lease.lease_id, num_tokens, RIGHT)

    assert told == places(cache, lease.row)[0][13:]
    assert len(told) == 1 + GUESSING.extra_blocks


# Beside others --------------------------------------------------------------------------------------------------------


def test_blocks_that_move_on_count_once_to_their_tenant() -> None:
    """A tenant at its maximum can go on with blocks that its own lease has no more use for."""
    limits = TenantLimits(max_blocks=4)
    cache = cache_of(GUESSING, tenants={OTHER_TENANT: limits})
    command = c.Reserve(worker_id=STRANGER, request_id="request", keys=b"", num_tokens=4)
    lease = answer(cache.handle(command, 0.0), Reserved)

    told = told_by(cache, lease.lease_id, 11, STRANGER)

    assert len(told) == 2
    assert cache.check() == []
