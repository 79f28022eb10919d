"""Laws of extends in a client without a block table: it has the core's own answers, in whatever order they come."""

from collections.abc import Callable
from itertools import permutations

import pytest

from kvlease._calling import verbs
from kvlease.groups import GroupShape
from kvleased.core import commands as c
from kvleased.core.effects import Extended
from kvleased.verbs import replies
from tests.unit.client.mirrored import Client
from tests.unit.service.core.builders import WORKER, answer
from tests.unit.service.core.grouped import (
    FULL,
    GUESSING,
    STATE,
    WIDE,
    WINDOW,
    cache_of,
    commit_tokens,
)
from tests.unit.service.core.rank_builders import LEFT, RIGHT, an_attach

WAYS = {"call": Client.extend, "step": Client.extend_by_step}


# One worker -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heard", [*permutations(range(3))])
@pytest.mark.parametrize("tokens", [(8, 12, 16), (8, 24, 40), (5, 9, 13), (12, 13, 52)])
@pytest.mark.parametrize("groups", [(STATE,), (GUESSING,), (STATE, GUESSING)])
def test_states_stand_where_the_daemon_has_them_in_whatever_order_answers_come(
    groups: tuple[GroupShape, ...], tokens: tuple[int, ...], heard: tuple[int, ...]
) -> None:
    """The answers to extends sent at once may come in any order: every state has its place in the daemon's table."""
    client = Client(cache_of(*groups), WORKER, 4)

    covers = client.extend(*tokens, heard=heard)

    assert (covers, client.tables) == ([True] * 3, client.rows)
    assert client.grant.num_blocks == sum(block != 0 for part in client.rows for block in part)
    assert client.grant.covered_tokens >= max(tokens)


@pytest.mark.parametrize("state", [STATE, GUESSING])
def test_answer_that_comes_after_a_commit_brings_back_no_state(state: GroupShape) -> None:
    """A block that a commit has given back may belong to another lease by the time the answer comes."""
    cache = cache_of(state)
    client = Client(cache, WORKER, 4)
    early = verbs.extend(client.session, client.grant, 8, 0)
    next(early)
    command = c.Extend(worker_id=WORKER, lease_id=client.lease_id, num_tokens=8)
    late = replies.extended(answer(cache.handle(command, 0.0), Extended))
    client.extend(24)
    commit_tokens(cache, client.lease_id, 24)
    client.session.computed(client.grant, 24)

    with pytest.raises(StopIteration):
        early.send(late)

    assert client.tables == client.rows


@pytest.mark.parametrize(("heard", "covers"), [((0, 1), True), ((1, 0), False)])
def test_no_extend_covers_tokens_whose_state_has_no_place_yet(
    heard: tuple[int, int], covers: bool
) -> None:
    """An extend that needs no block, as another extend takes it, covers nothing before that other is answered."""
    client = Client(cache_of(STATE), WORKER, 4)

    said = client.extend(6, 7, heard=heard)

    assert (said, client.grant.is_live) == ([covers] * 2, covers)


@pytest.mark.parametrize("other", [FULL, WINDOW])
def test_lease_is_lost_before_a_block_of_other_groups_is_missed(other: GroupShape) -> None:
    """Where a group that has no empty places lacks a block, the place is not skipped: the lease is not used."""
    client = Client(cache_of(other, STATE), WORKER, 4)

    covers = client.extend(8, 12, heard=(1,))

    assert (covers, client.grant.is_live) == ([False], False)


# Ranks that call apart ------------------------------------------------------------------------------------------------


def ranks(*groups: GroupShape) -> tuple[Client, Client]:
    """Return both ranks of an engine, which share a request's lease."""
    cache = cache_of(*groups, num_ranks=2)
    for worker_id in (LEFT, RIGHT):
        cache.handle(an_attach(worker_id), 0.0)
    left, right = (Client(cache, one, 4, engine="engine") for one in (LEFT, RIGHT))
    assert left.lease_id == right.lease_id
    return left, right


@pytest.mark.parametrize("extend", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "groups", [(STATE,), (GUESSING,), (FULL, STATE), (FULL, GUESSING), (WINDOW, STATE)]
)
def test_rank_behind_has_its_states_where_a_mate_that_jumped_far_has_put_them(
    groups: tuple[GroupShape, ...], extend: Callable[[Client, int], list[bool]]
) -> None:
    """Places come from the table, not from the first block of an answer, so no later extend is in vain."""
    left, right = ranks(*groups)
    assert left.extend(16) == [True]

    for num_tokens in (8, 12, 13, 16, 17):
        assert extend(right, num_tokens) == [True]

        assert right.grant.is_live
        for table, row in zip(right.tables, right.rows, strict=True):
            assert table == row[: len(table)]
    assert right.grant.covered_tokens >= 16


@pytest.mark.parametrize("heard", [(0, 1), (1, 0)])
@pytest.mark.parametrize("state", [STATE, GUESSING])
def test_rank_behind_may_hear_of_a_mates_states_in_any_order(
    state: GroupShape, heard: tuple[int, int]
) -> None:
    """Each answer says where its own blocks stand, so two answers may come in either order."""
    left, right = ranks(state)
    left.extend(16)
    left.extend(36)

    assert right.extend(8, 40, heard=heard) == [True, True]

    assert right.tables == right.rows


@pytest.mark.parametrize("groups", [(GUESSING,), (WIDE, GUESSING)])
def test_rank_behind_covers_only_tokens_that_have_a_block_for_each_of_their_states(
    groups: tuple[GroupShape, ...],
) -> None:
    """A mate has moved blocks for speculative tokens on: then a rank's places reach farther than its blocks."""
    left, right = ranks(*groups)
    for num_tokens in (7, 13, 19, 26):
        left.extend(num_tokens)

    for num_tokens in (7, 10, 17, 21):
        assert right.extend(num_tokens) == [True]

        newest = (right.grant.covered_tokens - 1) // GUESSING.tokens_per_block
        assert sum(block != 0 for block in right.tables[-1][newest:]) > GUESSING.extra_blocks


def test_rank_behind_has_all_states_if_a_mate_jumps_to_the_end_of_the_table() -> None:
    """Where speculative tokens of the mate have no place left, those of a rank behind still have a block for each."""
    left, right = ranks(GUESSING)
    for num_tokens in (40, 60):
        left.extend(num_tokens)

    for num_tokens in (40, 44, 48, 52, 56):
        assert right.extend(num_tokens) == [True]

        newest = (right.grant.covered_tokens - 1) // GUESSING.tokens_per_block
        assert sum(block != 0 for block in right.tables[0][newest:]) > GUESSING.extra_blocks
    assert right.grant.covered_tokens == 56
