"""Laws of key counts: every findable key is counted, in whichever tier and however it came there."""

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
    """Return the state of an empty cache."""
    return CacheState.fresh(replace(SHAPE, num_slots=4, num_disk_slots=4), EPOCH)


def publish(pool: Pool, ids: list[int], packed: bytes, tenant: int) -> None:
    """Make free blocks of a pool findable."""
    blocks = np.array(ids, np.intp)
    pool.take(blocks, Event.FILL, tenant)
    pool.publish(blocks, packed, Event.FILLED)


def table() -> np.ndarray:
    """Return an empty array of counts."""
    return np.zeros(BUCKETS, np.uint32)


def test_counts_begin_with_what_is_there(state: CacheState) -> None:
    """Keys that are findable in any tier before the count begins are counted."""
    counts, own = KeyCounts(state.pools), table()
    publish(state.host, [0, 1], keys(1, 2), 7)
    publish(state.disk, [0], keys(1), 7)

    counts.begin(7, own)

    assert own.sum() == 3
    assert counts.violations() == []


def test_tenants_are_counted_apart(state: CacheState) -> None:
    """Another tenant's keys do not count, and a tenant whose count was not begun is not counted at all."""
    counts, one, other = KeyCounts(state.pools), table(), table()
    counts.begin(7, one)
    counts.begin(8, other)

    publish(state.host, [0, 1], keys(1, 2), 7)
    publish(state.host, [2], keys(3), 9)

    assert (one.sum(), other.sum()) == (2, 0)
    assert repr(counts) == "<KeyCounts of 2 tenants>"


def test_what_leaves_is_counted_no_more(state: CacheState) -> None:
    """When a key leaves its tier in any way, its bucket counts one less, and other keys of the bucket stay."""
    counts, own = KeyCounts(state.pools), table()
    counts.begin(7, own)
    publish(state.host, [0, 1, 2], keys(1, 2, 9), 7)

    state.host.let_go(np.array([0, 1, 2], np.intp))
    state.host.evict(np.array([0, 2], np.intp))
    state.host.forget_all()

    assert own.sum() == 0
    assert counts.violations() == []


def test_counts_that_ended_are_left_alone(state: CacheState) -> None:
    """After the end of a count, its array is not written to."""
    counts, own = KeyCounts(state.pools), table()
    counts.begin(7, own)

    counts.end(7)
    publish(state.host, [0], keys(1), 7)

    assert own.sum() == 0


def test_forgotten_count_is_found(state: CacheState) -> None:
    """The check finds a findable key that is not counted, for workers would miss it while it is cached."""
    counts, own = KeyCounts(state.pools), table()
    counts.begin(7, own)
    publish(state.host, [0], keys(1), 7)

    own[:] = 0

    assert counts.violations() == [
        "the key counts of tenant 7 are not those of the keys that are findable"
    ]


def test_cache_counts_for_as_long_as_it_is_asked_to() -> None:
    """A cache counts keys from the beginning of a count to its end."""
    cache, own = a_cache(), table()
    cached(cache, keys(1))

    cache.count_keys(TENANT, own)
    cached(cache, keys(2))
    cache.stop_counting(TENANT)
    cached(cache, keys(3))

    assert own.sum() == 2
    assert cache.check() == []
