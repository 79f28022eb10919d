"""Laws of regrets: each missed block is looked up once, and its reason is what happened to it before the grant."""

from collections import Counter

import numpy as np
import pytest

from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.history import _STEPS_MAX, DepartureReason, History
from kvleased.core.effects import Tier
from kvleased.core.lease import missing as module
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.missing import MissingKeys
from kvleased.core.prefix.regrets import REASONS
from tests.unit.service.core.builders import (
    TOKENS_PER_BLOCK,
    WAIT_MS,
    a_cache,
    a_reserve,
    cached,
    commit,
    fail,
    keys,
    leaving,
    on_host,
    release,
    reserve,
    the_copy,
    tick,
)
from tests.unit.service.core.grouped import FIXED, WINDOW, cache_of, chain, reserve_tokens


def missed(cache: Cache) -> dict[str, int]:
    """Return the counts of missed blocks after a tick."""
    tick(cache, 1.0)
    counters = Counter(cache.census().counters)
    return {
        reason: counters[f"missed_{reason}"] for reason in REASONS if counters[f"missed_{reason}"]
    }


def full_then_empty(*numbers: int) -> Cache:
    """Return a cache that held these keys alone, and evicted them for a request that has ended."""
    cache = a_cache(4, 0)
    cached(cache, keys(*numbers))
    release(cache, reserve(cache, 4).lease_id)
    return cache


def test_evicted_blocks_that_are_needed_again_are_counted() -> None:
    """A block that was evicted and is looked for again is regretted; one that was never there is not."""
    cache = full_then_empty(1, 2)
    reserve(cache, 3, "again", keys(1, 2, 3))

    assert missed(cache) == {"evicted": 2, "unknown": 1}


def test_what_is_committed_after_the_grant_does_not_count_as_cached() -> None:
    """The worker that missed a block may commit it before the miss is looked up; it does not count as cached then."""
    cache = full_then_empty(1)
    lease = reserve(cache, 1, "again", keys(1))
    commit(cache, lease.lease_id, keys(1))

    assert missed(cache) == {"evicted": 1}


def test_blocks_behind_a_miss_are_told_apart() -> None:
    """A cached block behind a missing one is of no use, but was not evicted too early."""
    cache = full_then_empty(1)
    cached(cache, keys(2))
    reserve(cache, 2, "again", keys(1, 2))

    assert missed(cache) == {"evicted": 1, "cached": 1}


def test_blocks_that_were_asked_to_leave_are_told_apart() -> None:
    """The policy did not choose the blocks that an evict call names."""
    cache = a_cache(4, 0)
    cached(cache, keys(1))
    cache.handle(c.Evict(worker_id=None, keys=keys(1)), 0.0)
    reserve(cache, 1, "again", keys(1))

    assert missed(cache) == {"displaced": 1}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param(c.Clear(), "cleared", id="clear"),
        pytest.param(c.Resize(tier=Tier.DEVICE, num_blocks=1), "resized", id="resize"),
    ],
)
def test_blocks_that_an_operator_took_are_told_apart(command: c.Command, reason: str) -> None:
    """What a clear or a resize took counts under a reason of its own."""
    cache = a_cache(2, 0)
    cached(cache, keys(1, 2))
    cache.handle(command, 0.0)
    reserve(cache, 1, "again", keys(2))

    assert missed(cache) == {reason: 1}


def test_nothing_is_put_aside_where_nothing_can_be_regretted() -> None:
    """Nothing is put aside before a block has left, for a request found whole, or for one without keys."""
    cache = a_cache(4, 0)
    cached(cache, keys(1))
    release(cache, reserve(cache, 2, "first", keys(1, 9)).lease_id)
    release(cache, reserve(cache, 4).lease_id)
    cached(cache, keys(3))
    release(cache, reserve(cache, 1, "whole", keys(3)).lease_id)
    reserve(cache, 1, "bare")

    assert missed(cache) == {}


def test_call_that_starts_over_regrets_a_block_once() -> None:
    """If the copy for a prefix fails, the call misses what it finds in no tier once, when it gets its lease."""
    cache = a_cache(8, 8)
    on_host(cache, keys(1))
    command = a_reserve(3, "again", keys(1, 2, 3), wait_ms=WAIT_MS)
    copy = the_copy(cache.handle(command, 0.0))
    assert missed(cache) == {}

    fail(cache, copy)

    assert missed(cache) == {"displaced": 1, "unknown": 2}


def test_call_that_is_given_up_regrets_nothing() -> None:
    """A call whose caller leaves while its prefix is loaded has missed nothing."""
    cache = a_cache(8, 8)
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(3, "again", keys(1, 2, 3), wait_ms=WAIT_MS), 0.0)
    assert outcome.ticket is not None

    cache.handle(c.Cancel(ticket=outcome.ticket), 0.0)

    assert missed(cache) == {}


def test_caches_that_share_nothing_regret_nothing() -> None:
    """If no block is found by key, none is missed."""
    cache = cache_of(FIXED, num_blocks=9)
    cache._state.history.num_left = 1
    reserve_tokens(cache, 4, prefix=chain(4))

    assert missed(cache) == {}


def test_groups_without_one_that_keeps_everything_count_by_the_first() -> None:
    """A cache of windows alone counts the blocks of its first group."""
    cache = cache_of(WINDOW, num_blocks=9)
    cache._state.history.num_left = 1
    reserve_tokens(cache, 8, prefix=chain(8))

    assert missed(cache) == {"unknown": 2}


# Keys that wait -------------------------------------------------------------------------------------------------------


def leases(cache: Cache, *counts: int) -> list[Lease]:
    """Return live leases that missed the given numbers of keys."""
    for number, count in enumerate(counts):
        reserve(cache, max(1, count), f"{number}", keys(*range(100 * number, 100 * number + count)))
    return list(cache._state.leases.by_id.values())


def test_what_is_put_aside_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys beyond the bound are left out and counted; taking makes room again."""
    monkeypatch.setattr(module, "LEASES_MAX", 2)
    missing = MissingKeys(TOKENS_PER_BLOCK)
    one, two, three = leases(a_cache(8, 0), 1, 2, 3)
    for lease in (one, two, three):
        missing.put(lease)

    assert repr(missing) == "<MissingKeys 2 leases, 3 keys dropped>"
    assert len(missing.take(1)) == 1
    missing.put(three)
    assert len(missing) == 2
    assert missing.num_dropped == 3


def test_taking_stops_when_it_is_enough() -> None:
    """Grants are taken whole and in order, without those that missed nothing, until there are enough keys."""
    missing = MissingKeys(TOKENS_PER_BLOCK)
    for lease in leases(a_cache(8, 0), 3, 0, 2, 1):
        missing.put(lease)

    assert [len(one.keys) // 32 for one in missing.take(4)] == [3, 2]
    assert [len(one.keys) // 32 for one in missing.take(4)] == [1]
    assert missing.take(4) == []


# Departures before a grant --------------------------------------------------------------------------------------------


def leave(history: History, *numbers: int) -> None:
    """Have keys leave the device."""
    history.left(0, leaving(np.array(numbers)), DepartureReason.EVICTED)


def test_last_departure_is_that_before_each_key_s_own_grant() -> None:
    """For a key that left twice, the last departure before its own grant is told."""
    history = History(8)
    for number in (5, 6, 5):
        leave(history, number)

    found = history.last_before(np.array([5, 5, 5, 6, 7]), np.array([0, 1, 3, 3, 3]))

    assert found.tolist() == [0, 1, 3, 2, 0]


@pytest.mark.parametrize("num_twins", [_STEPS_MAX - 1, _STEPS_MAX + 1])
def test_chains_are_followed_so_far(num_twins: int) -> None:
    """The search for keys that were made to collide ends after a bounded number of steps."""
    history = History(8)
    step = len(history._table)
    leave(history, 0)
    leave(history, *(step * twin for twin in range(1, num_twins + 1)))

    (found,) = history.last_before(np.array([0]), np.array([history.num_left])).tolist()

    assert found == (1 if num_twins < _STEPS_MAX else 0)
