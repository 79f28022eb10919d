"""Laws of key counts: whatever is findable is counted, in whichever tier and by whichever way it came there."""

from dataclasses import replace

import numpy as np
import pytest

from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import Event
from kvleased.core.prefix.key_counts import KeyCounts
from kvleased.core.state import CacheState
from tests.unit.service.core.builders import EPOCH, SHAPE, TENANT, a_cache, cached, keys

BUCKETS = 8


@pytest.fixture
def state() -> CacheState:
    """Give a cache of which nothing is used."""
    return CacheState.fresh(replace(SHAPE, num_slots=4, num_disk_slots=4), EPOCH)


def publish(pool: Pool, ids: list[int], packed: bytes, tenant: int) -> None:
    """Make free blocks of a pool findable."""
    blocks = np.array(ids, np.intp)
    pool.take(blocks, Event.FILL, tenant)
    pool.publish(blocks, packed, Event.FILLED)


def table() -> np.ndarray:
    """Return an array that counts nothing."""
    return np.zeros(BUCKETS, np.uint32)


def test_counts_begin_with_what_is_there(state: CacheState) -> None:
    """What was findable in any tier before anybody wanted to know is counted."""
    counts, own = KeyCounts(state.pools), table()
    publish(state.host, [0, 1], keys(1, 2), 7)
    publish(state.disk, [0], keys(1), 7)

    counts.begin(7, own)

    assert own.sum() == 3
    assert counts.violations() == []


def test_tenants_are_counted_apart(state: CacheState) -> None:
    """A tenant's counts know of no other's keys, and one that nobody asked about is not counted at all."""
    counts, one, other = KeyCounts(state.pools), table(), table()
    counts.begin(7, one)
    counts.begin(8, other)

    publish(state.host, [0, 1], keys(1, 2), 7)
    publish(state.host, [2], keys(3), 9)

    assert (one.sum(), other.sum()) == (2, 0)
    assert repr(counts) == "<KeyCounts of 2 tenants>"


def test_what_leaves_is_counted_no_more(state: CacheState) -> None:
    """However a key leaves its tier, its bucket counts one less, and keys that share a bucket stay."""
    counts, own = KeyCounts(state.pools), table()
    counts.begin(7, own)
    publish(state.host, [0, 1, 2], keys(1, 2, 9), 7)

    state.host.let_go(np.array([0, 1, 2], np.intp))
    state.host.evict(np.array([0, 2], np.intp))
    state.host.forget_all()

    assert own.sum() == 0
    assert counts.violations() == []


def test_counts_that_ended_are_left_alone(state: CacheState) -> None:
    """Nobody writes an array any more that its owner took back."""
    counts, own = KeyCounts(state.pools), table()
    counts.begin(7, own)

    counts.end(7)
    publish(state.host, [0], keys(1), 7)

    assert own.sum() == 0


def test_forgotten_count_is_found(state: CacheState) -> None:
    """A key that is findable and not counted would be missed for as long as it is cached."""
    counts, own = KeyCounts(state.pools), table()
    counts.begin(7, own)
    publish(state.host, [0], keys(1), 7)

    own[:] = 0

    assert counts.violations() == [
        "the key counts of tenant 7 are not those of the keys that are findable"
    ]


def test_cache_counts_for_as_long_as_it_is_asked_to() -> None:
    """From the instant at which somebody wants to know until nobody does."""
    cache, own = a_cache(), table()
    cached(cache, keys(1))

    cache.count_keys(TENANT, own)
    cached(cache, keys(2))
    cache.stop_counting(TENANT)
    cached(cache, keys(3))

    assert own.sum() == 2
    assert cache.check() == []
