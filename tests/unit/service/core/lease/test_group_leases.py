"""Laws of a lease's blocks in several groups: which are granted, how they grow, which it gives back, where they go."""

from dataclasses import replace

import numpy as np
import pytest

from kvlease.errors import NeverFitsError, PoolFullError
from kvlease.groups import GroupShape
from kvlease.ids import LeaseId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Reserved, Stepped
from kvleased.core.verbs.stepping import StepVerb
from tests.unit.service.core.builders import (
    WORKER,
    answer,
    evict,
    ids,
    land,
    release,
    the_copy,
)
from tests.unit.service.core.grouped import (
    CHUNK,
    FIXED,
    FULL,
    GUESSING,
    STATE,
    WIDE,
    WINDOW,
    cache_of,
    chain,
    commit_tokens,
    counts,
    extend_tokens,
    filled,
    map_lease,
    places,
    reserve_tokens,
)


def step(cache: Cache, *extends: tuple[LeaseId, int]) -> Stepped:
    """Extend several leases in one step."""
    command = c.Step(
        worker_id=WORKER,
        verbs=bytes([StepVerb.EXTEND] * len(extends)),
        lease_ids=np.array([lease_id for lease_id, _ in extends], np.int64).tobytes(),
        num_tokens=np.array([num_tokens for _, num_tokens in extends], np.int32).tobytes(),
    )
    return answer(cache.handle(command, 0.0), Stepped)


# Granting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "expected", "covered"),
    [
        pytest.param(FULL, [0, 1, 2, 3, 4, 5, 6], 27, id="full"),
        pytest.param(WIDE, [0, 1, 2, 3], 27, id="wide"),
        pytest.param(WINDOW, [0, 1, 2, 3], 16, id="window"),
        pytest.param(CHUNK, [0, 1, 2], 12, id="chunk"),
        pytest.param(STATE, [6], 27, id="state"),
        pytest.param(GUESSING, [6, 7, 8], 27, id="guessing"),
        pytest.param(FIXED, [0, 1], 27, id="fixed"),
    ],
)
def test_group_is_granted_what_it_keeps(
    group: GroupShape, expected: list[int], covered: int
) -> None:
    """A new request gets the blocks that its first tokens are written to, and no more than it ever holds at once."""
    cache = cache_of(FULL, group)

    lease = reserve_tokens(cache, 27)

    assert filled(cache, lease.row)[1] == expected
    assert lease.covered_tokens == covered
    assert counts(lease.num_blocks) == [7, expected[-1] + 1]
    assert cache.check() == []


def test_reply_lists_places_group_by_group() -> None:
    """A token's place gives its block in each group, or 0 if the group needs none."""
    cache = cache_of(STATE, FULL)

    lease = reserve_tokens(cache, 12)

    parts = places(cache, lease.row)
    assert ids(lease.block_ids) == [0, 0, parts[0][2], *parts[1]]


def test_single_group_sends_no_counts() -> None:
    """With one group, all ids belong to it, and no counts are sent."""
    cache = cache_of(WINDOW)

    lease = reserve_tokens(cache, 27)

    assert lease.num_blocks == b""
    assert extend_tokens(cache, lease.lease_id, 27).num_blocks == b""


def test_repeated_reserve_finds_the_same_lease() -> None:
    """A repeated reserve is answered with the request's lease."""
    cache = cache_of(FULL, STATE)

    first, again = (reserve_tokens(cache, 12, "same") for _ in range(2))

    assert first == again


def test_reserve_of_an_evicted_lease_lists_no_blocks() -> None:
    """A repeated reserve of a lease in the host pool gets the lease, and no block."""
    cache = cache_of(FULL, WINDOW)
    lease = reserve_tokens(cache, 12, "same")
    land(cache, the_copy(evict(cache, lease.lease_id)))

    again = reserve_tokens(cache, 12, "same")

    assert (again.lease_id, again.block_ids, counts(again.num_blocks)) == (
        lease.lease_id,
        b"",
        [0, 0],
    )


def test_groups_are_granted_all_or_nothing() -> None:
    """If one group cannot have its blocks, no group gets any."""
    cache = cache_of(FULL, WIDE, num_blocks=9)
    reserve_tokens(cache, 16, "first")

    with pytest.raises(PoolFullError) as refused:
        reserve_tokens(cache, 12, "second")

    assert (refused.value.need, refused.value.available) == (5, 2)
    assert cache.check() == []


@pytest.mark.parametrize(
    ("group", "num_blocks"),
    [
        pytest.param(WIDE, 4 + 7, id="wide"),
        pytest.param(WINDOW, 4 + 7, id="window"),
        pytest.param(CHUNK, 3 + 7, id="chunk"),
        pytest.param(STATE, 2 + 7, id="state"),
        pytest.param(GUESSING, 4 + 7, id="guessing"),
        pytest.param(FIXED, 2 + 7, id="fixed"),
    ],
)
@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_request_fits_exactly(group: GroupShape, num_blocks: int, spare: int) -> None:
    """A request that takes the whole pool is served; in a pool of one block less it never fits."""
    cache = cache_of(FULL, group, num_blocks=1 + num_blocks + spare)
    command = c.Reserve(worker_id=WORKER, request_id="r", keys=b"", num_tokens=28)

    if spare >= 0:
        assert cache.handle(command, 0.0).reply is not None
        return
    with pytest.raises(NeverFitsError, match=r"7 of them in group 0") as refused:
        cache.handle(command, 0.0)
    assert (refused.value.need, refused.value.limit) == (num_blocks, num_blocks - 1)


@pytest.mark.parametrize(
    "group", [FULL, WIDE, WINDOW, CHUNK, STATE], ids=lambda one: one.keeps.name
)
def test_table_bounds_a_request(group: GroupShape) -> None:
    """A request may be as long as the shortest table, and not a token longer."""
    longest = 5 * group.tokens_per_block
    cache = cache_of(FULL, replace(group, table_blocks=5))

    reserve_tokens(cache, min(longest, 64))
    if longest < 64:
        with pytest.raises(NeverFitsError, match=f"longest request of {longest}"):
            reserve_tokens(cache, longest + 1, "longer")


def test_pool_that_no_request_fits_says_so() -> None:
    """If even one token takes more than the pool, no fewer tokens are named."""
    cache = cache_of(FULL, FIXED, num_blocks=3)

    with pytest.raises(NeverFitsError, match="; register a larger pool"):
        reserve_tokens(cache, 1)


# Growing --------------------------------------------------------------------------------------------------------------


def test_window_moves_on_with_what_is_computed() -> None:
    """A request gives back what lies before its window, and can then cover more tokens."""
    cache = cache_of(FULL, WINDOW)
    lease = reserve_tokens(cache, 40)
    free = cache.census().device["free"]

    reply = commit_tokens(cache, lease.lease_id, 12, b"")
    extended = extend_tokens(cache, lease.lease_id, 40)

    assert reply.num_given_back == 1
    assert filled(cache, lease.row)[1] == [1, 2, 3, 4]
    assert counts(extended.num_blocks) == [0, 1]
    assert extended.covered_tokens == 20
    assert cache.census().device["free"] == free


def test_committed_block_that_is_given_back_stays_findable() -> None:
    """A block that leaves a running request is cached if it was committed, and free otherwise."""
    cache = cache_of(WINDOW)
    lease = reserve_tokens(cache, 16)

    commit_tokens(cache, lease.lease_id, 8)
    reply = commit_tokens(cache, lease.lease_id, 16)

    assert reply.num_given_back == 2
    census = cache.census().device
    assert (census["ready"], census["ready_held"]) == (4, 2)
    assert cache.check() == []


def test_commit_of_fewer_tokens_gives_nothing_back() -> None:
    """A commit of fewer tokens than an earlier one gives nothing back."""
    cache = cache_of(WINDOW)
    lease = reserve_tokens(cache, 16)
    commit_tokens(cache, lease.lease_id, 16)

    assert commit_tokens(cache, lease.lease_id, 8).num_given_back == 0


def test_chunk_is_given_back_at_its_end() -> None:
    """The first token of the next chunk needs no block of the last one."""
    cache = cache_of(CHUNK)
    lease = reserve_tokens(cache, 12)

    assert commit_tokens(cache, lease.lease_id, 7).num_given_back == 0
    assert commit_tokens(cache, lease.lease_id, 8).num_given_back == 2
    assert filled(cache, lease.row) == [[2]]


def test_state_keeps_the_newest_only() -> None:
    """The state before the newest one leaves the request, and others can find it."""
    cache = cache_of(STATE)
    lease = reserve_tokens(cache, 4)
    commit_tokens(cache, lease.lease_id, 4)

    extend_tokens(cache, lease.lease_id, 12)
    assert filled(cache, lease.row) == [[0, 2]]
    reply = commit_tokens(cache, lease.lease_id, 12)

    assert (reply.num_committed, reply.num_given_back) == (1, 1)
    assert filled(cache, lease.row) == [[2]]
    assert cache.check() == []


def test_deepest_blocks_leave_first_over_all_groups() -> None:
    """The blocks of a request are evicted from its end, whatever group they are in."""
    cache = cache_of(FULL, WIDE)
    lease = reserve_tokens(cache, 16)
    commit_tokens(cache, lease.lease_id, 16)
    parts = places(cache, lease.row)

    release(cache, lease.lease_id)
    cache.settle()

    (wide, full) = (parts[1], parts[0])
    order = list(cache._state.device.order)
    assert order == [wide[1], full[3], full[2], wide[0], full[1], full[0]]


def test_extend_within_what_is_covered_takes_nothing() -> None:
    """An extend that needs no block does not wait, and is told how far it may compute."""
    cache = cache_of(FULL, WINDOW)
    lease = reserve_tokens(cache, 9)

    extended = extend_tokens(cache, lease.lease_id, 12)

    assert (extended.block_ids, counts(extended.num_blocks)) == (b"", [0, 0])
    assert extended.covered_tokens == 12


def test_step_extends_every_group_of_every_lease() -> None:
    """A step extends all leases, and lists the new blocks by lease, and in each lease by group."""
    cache = cache_of(FULL, GUESSING, WINDOW)
    first, second = (reserve_tokens(cache, 4, name) for name in ("first", "second"))
    map_lease(cache, first.lease_id)

    reply = step(cache, (first.lease_id, 9), (second.lease_id, 4))

    assert counts(reply.num_blocks) == [2, 2, 2, 0, 0, 0]
    parts = places(cache, first.row)
    assert ids(reply.block_ids) == [*parts[0][1:], *parts[1][3:], *parts[2][1:]]
    assert cache.check() == []


def test_step_that_finds_no_room_does_what_it_can() -> None:
    """If there is not enough room for all extends of a step, they are done one by one."""
    cache = cache_of(FULL, FIXED, num_blocks=10)
    first, second = (reserve_tokens(cache, 4, name) for name in ("first", "second"))

    reply = step(cache, (first.lease_id, 12), (second.lease_id, 12), (first.lease_id, 4))

    assert counts(reply.num_blocks) == [2, 0, 0, 0, 0, 0]
    assert [code != 0 for code in counts(reply.codes)] == [False, True, False]


def test_step_without_room_still_does_what_needs_none() -> None:
    """An extend that needs no block is done even if the pool is empty."""
    cache = cache_of(FULL, FIXED, num_blocks=7)
    first, second = (reserve_tokens(cache, 4, name) for name in ("first", "second"))

    reply = step(cache, (first.lease_id, 8), (second.lease_id, 4))

    assert [code != 0 for code in counts(reply.codes)] == [True, False]


def test_blocks_given_back_have_the_class_of_their_lease() -> None:
    """Blocks that a running request gives back stay cached as long as those that it still has."""
    cache = cache_of(FULL, WINDOW, num_slots=0)
    command = c.Reserve(
        worker_id=WORKER, request_id="low", keys=chain(16), num_tokens=16, priority=0
    )
    older = reserve_tokens(cache, 8, "older")
    commit_tokens(cache, older.lease_id, 8, chain(8, branch=1))
    release(cache, older.lease_id)
    lease = answer(cache.handle(command, 0.0), Reserved)
    behind = places(cache, lease.row)[1][:2]

    commit_tokens(cache, lease.lease_id, 16, chain(16))

    assert list(cache._state.device.order)[:2] == behind[::-1]
    assert cache.check() == []


def test_refusal_names_no_tokens_where_one_more_takes_a_block_of_each_group() -> None:
    """If one block is left, and one more token takes a block of each group, the refusal names no fewer tokens."""
    cache = cache_of(FULL, WINDOW, num_blocks=8, num_slots=0)
    first = reserve_tokens(cache, 8, "first", chain(8))
    commit_tokens(cache, first.lease_id, 8, chain(8))
    reserve_tokens(cache, 4, "second")

    with pytest.raises(PoolFullError) as refusal:
        reserve_tokens(cache, 12, "third", chain(8))

    assert (refusal.value.need, refusal.value.available) == (2, 1)
    assert not any(one.startswith("num_tokens") for one in refusal.value.remedies)


def test_extend_is_not_told_to_ask_for_what_it_has() -> None:
    """If one block is left, and a lease's next token takes a block of each group, the refusal names no fewer tokens."""
    cache = cache_of(FULL, WINDOW, num_blocks=8, num_slots=0)
    lease = reserve_tokens(cache, 8)
    reserve_tokens(cache, 4, "other")

    with pytest.raises(PoolFullError) as refusal:
        extend_tokens(cache, lease.lease_id, 12)

    assert (refusal.value.need, refusal.value.available) == (2, 1)
    assert refusal.value.remedies == ()


def test_blocks_that_are_never_shared_have_no_keys() -> None:
    """If no group is shared, a commit publishes nothing, but records how far the request is computed."""
    cache = cache_of(FIXED)
    lease = reserve_tokens(cache, 8)

    committed = commit_tokens(cache, lease.lease_id, 8)

    assert committed.num_committed == 0
    assert cache._state.records.rows.num_computed[lease.row] == 8
