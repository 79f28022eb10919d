"""Laws of prefixes in several groups: every group must have the blocks that the tokens behind the prefix need."""

import numpy as np
import pytest

from kvlease.errors import InvalidError
from kvlease.groups import GroupShape
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.marks import WORDS_PER_KEY, key_words, marks
from kvleased.core.effects import Evicted, Pinned, Reserved
from tests.unit.service.core.builders import (
    OTHER_TENANT,
    STRANGER,
    WAIT_MS,
    WORKER,
    answer,
    copies,
    ids,
    land,
    the_copy,
    woken,
)
from tests.unit.service.core.grouped import (
    CHUNK,
    DRAFTED,
    FIXED,
    FULL,
    GUESSING,
    STATE,
    WIDE,
    WINDOW,
    cache_of,
    cached_tokens,
    chain,
    commit_tokens,
    counts,
    filled,
    hit_tokens,
    looked_up,
    places,
    reserve_tokens,
)


def drop(cache: Cache, packed: bytes, group: int) -> None:
    """Evict the blocks of keys from one group."""
    cache.settle()
    marked = (key_words(packed) ^ marks(group + 1)[group]).tobytes()
    cache._state.device.evict(cache._state.device.cached(marked))


def test_first_group_keeps_keys_as_they_are() -> None:
    """The mark of group 0 is 0, and no two groups have the same."""
    found = marks(64)

    assert not found[0].any()
    assert len(np.unique(found, axis=0)) == 64
    assert found.shape == (64, WORDS_PER_KEY)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param((FULL, WINDOW), 24, id="full and window"),
        pytest.param((WINDOW,), 24, id="window"),
        pytest.param((CHUNK,), 24, id="chunk"),
        pytest.param((STATE,), 24, id="state"),
        pytest.param((FULL, STATE), 24, id="full and state"),
        pytest.param((FULL, GUESSING), 24, id="full and guessing"),
        pytest.param((WIDE, FULL), 24, id="wide and full"),
        pytest.param((DRAFTED,), 20, id="drafted"),
        pytest.param((FULL, FIXED), 24, id="full and fixed"),
        pytest.param((FIXED,), 0, id="fixed"),
    ],
)
def test_prefix_is_found_by_all_groups(groups: tuple[GroupShape, ...], expected: int) -> None:
    """Blocks of all groups that one request has committed are found by the next request."""
    cache = cache_of(*groups)
    cached_tokens(cache, 24)

    lease = reserve_tokens(cache, 27, "next", chain(24))

    assert hit_tokens(cache, 24) == expected
    assert (lease.device_hit_tokens, lease.host_hit_tokens) == (expected, 0)
    assert cache.check() == []


def test_prefix_ends_where_blocks_of_all_groups_end() -> None:
    """A prefix cannot end inside one group's block."""
    cache = cache_of(FULL, WIDE)

    cached_tokens(cache, 12)

    assert hit_tokens(cache, 12) == 8


def test_window_needs_only_the_tail_of_a_prefix() -> None:
    """Blocks before the window may be gone from the cache, and their places are empty."""
    cache = cache_of(FULL, WINDOW)
    cached_tokens(cache, 24)

    drop(cache, chain(16), 1)
    lease = reserve_tokens(cache, 25, "next", chain(24))

    assert lease.device_hit_tokens == 24
    assert filled(cache, lease.row) == [[0, 1, 2, 3, 4, 5, 6], [4, 5, 6]]
    assert ids(lease.block_ids)[7:11] == [0, 0, 0, 0]
    assert counts(lease.num_blocks) == [7, 7]


def test_window_without_its_tail_shortens_a_prefix() -> None:
    """If the window lacks a block, the found prefix is a shorter one that does not need it."""
    cache = cache_of(FULL, WINDOW)
    cached_tokens(cache, 24)

    drop(cache, chain(24)[20 * 8 :], 1)

    assert hit_tokens(cache, 24) == 20


def test_chunk_needs_nothing_at_its_end() -> None:
    """Behind a whole chunk, the next token needs no block of it."""
    cache = cache_of(CHUNK)

    assert hit_tokens(cache, 8) == 8
    assert hit_tokens(cache, 12) == 8


def test_state_is_found_only_where_it_was_committed() -> None:
    """A state belongs to one token, so a prefix can end only where a request has committed one."""
    cache = cache_of(FULL, STATE)
    lease_id = reserve_tokens(cache, 24, "first").lease_id

    commit_tokens(cache, lease_id, 10)
    commit_tokens(cache, lease_id, 24)

    assert [hit_tokens(cache, end) for end in (8, 20, 24)] == [0, 0, 24]


def test_drafted_group_has_one_block_more() -> None:
    """A draft model reads one block behind the prefix, so the last cached block is not part of it."""
    cache = cache_of(FULL, DRAFTED)
    cached_tokens(cache, 16)

    assert [hit_tokens(cache, end) for end in (4, 8, 16)] == [0, 4, 12]


def test_fixed_blocks_are_never_shared() -> None:
    """Each request has fixed blocks of its own, even if all other blocks are shared."""
    cache = cache_of(FULL, FIXED)
    first = reserve_tokens(cache, 8, "first")
    commit_tokens(cache, first.lease_id, 8)

    second = reserve_tokens(cache, 9, "second", chain(8))

    shared, own = (
        set(a) & set(b)
        for a, b in zip(places(cache, first.row), places(cache, second.row), strict=True)
    )
    assert (len(shared), len(own)) == (2, 0)


def test_no_prefix_is_found_where_none_are_shared() -> None:
    """A cache that shares no prefixes publishes nothing."""
    cache = cache_of(FULL, shares_prefixes=False)
    lease = reserve_tokens(cache, 8)

    reply = commit_tokens(cache, lease.lease_id, 8)

    assert (reply.num_committed, reply.num_duplicates) == (0, 0)
    assert hit_tokens(cache, 8) == 0
    assert cache.check() == []


def test_blocks_in_the_host_pool_count_for_callers_that_wait() -> None:
    """Blocks in the host pool alone are brought up; the tokens before them count for the device."""
    cache = cache_of(FULL, WINDOW)
    cached_tokens(cache, 24)
    land(cache, the_copy(cache.handle(c.Evict(keys=chain(24)[16 * 8 :]), 0.0)))
    command = c.Reserve(
        worker_id=WORKER, request_id="r", keys=chain(24), num_tokens=25, wait_ms=WAIT_MS
    )

    outcome = cache.handle(command, 0.0)
    lease = woken(land(cache, the_copy(outcome)), outcome.ticket, Reserved)

    assert looked_up(cache, chain(24)).hit_tokens == 24
    assert (lease.device_hit_tokens, lease.host_hit_tokens) == (16, 8)
    assert cache.check() == []


def test_host_pool_is_no_use_to_callers_that_do_not_wait() -> None:
    """For a call that does not wait, only blocks that are on the device now are hits."""
    cache = cache_of(FULL, WINDOW)
    cached_tokens(cache, 24)
    land(cache, the_copy(cache.handle(c.Evict(keys=chain(24)[20 * 8 :]), 0.0)))

    assert reserve_tokens(cache, 25, "next", chain(24)).device_hit_tokens == 20


def test_second_caller_joins_blocks_in_flight() -> None:
    """Blocks of several groups that are on their way to the device are not copied twice."""
    cache = cache_of(FULL, WINDOW)
    cached_tokens(cache, 16)
    land(cache, the_copy(cache.handle(c.Evict(keys=chain(16)), 0.0)))
    first, second = (
        cache.handle(
            c.Reserve(
                worker_id=WORKER, request_id=name, keys=chain(16), num_tokens=17, wait_ms=WAIT_MS
            ),
            0.0,
        )
        for name in ("first", "second")
    )

    assert copies(second) == []
    outcome = land(cache, the_copy(first))

    leases = [woken(outcome, one.ticket, Reserved) for one in (first, second)]
    rows = [places(cache, one.row) for one in leases]
    assert [part[:4] for part in rows[0]] == [part[:4] for part in rows[1]]
    assert [one.device_hit_tokens for one in leases] == [0, 16]


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (STATE,), (CHUNK, FULL)])
def test_tenant_finds_its_own_blocks_only(groups: tuple[GroupShape, ...]) -> None:
    """A stolen key finds nothing, whatever group its block is in."""
    cache = cache_of(*groups)
    cached_tokens(cache, 12)

    found = looked_up(cache, chain(12), OTHER_TENANT)

    assert (found.num_device_blocks, found.num_host_blocks, found.hit_tokens) == (0, 0, 0)
    assert reserve_tokens(cache, 13, "other", chain(12), worker_id=STRANGER).device_hit_tokens == 0


def test_operator_finds_the_blocks_of_all_tenants() -> None:
    """An operator, who asks for no tenant, finds everybody's blocks."""
    cache = cache_of(FULL, WINDOW)
    cached_tokens(cache, 12)

    assert hit_tokens(cache, 12, None) == 12


def test_key_that_names_a_block_twice_is_refused() -> None:
    """Keys that name a block twice are refused, in several groups as in one."""
    cache = cache_of(FULL, WINDOW)
    cached_tokens(cache, 4)

    with pytest.raises(InvalidError, match="twice"):
        reserve_tokens(cache, 9, "next", chain(4) * 2)


def test_nobody_finds_what_no_group_has() -> None:
    """If nothing is cached for the keys, all tokens are to be computed."""
    cache = cache_of(FULL, WINDOW)

    assert hit_tokens(cache, 24) == 0


@pytest.mark.parametrize("num_groups", [1, 2])
def test_pin_holds_the_blocks_of_all_groups(num_groups: int) -> None:
    """A pin, an evict and a reload of a chain concern every group."""
    cache = cache_of(*(FULL, WIDE)[:num_groups])
    cached_tokens(cache, 8)

    pinned = answer(cache.handle(c.Pin(keys=chain(8)), 0.0), Pinned)

    assert pinned.num_blocks == {1: 2, 2: 3}[num_groups]
    assert answer(cache.handle(c.Evict(keys=chain(8)), 0.0), Evicted).num_evicted == 0


def test_chain_is_reloaded_in_all_groups() -> None:
    """Keys bring back the blocks of every group."""
    cache = cache_of(WIDE, STATE)
    cached_tokens(cache, 8)
    land(cache, the_copy(cache.handle(c.Evict(keys=chain(8)), 0.0)))

    land(cache, the_copy(cache.handle(c.Reload(keys=chain(8)), 0.0)))

    assert looked_up(cache, chain(8)).num_device_blocks == 2
    assert cache.check() == []
