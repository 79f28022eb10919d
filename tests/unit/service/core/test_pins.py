"""Laws of pins: what is pinned stays on the device until it is unpinned."""

import pytest

from kvlease.errors import (
    PoolFullError,
)
from kvlease.ids import PinId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Pinned, Released
from tests.unit.service.core.builders import (
    WAIT_MS,
    a_cache,
    a_full_cache,
    a_reserve,
    answer,
    cached,
    found,
    keys,
    reserve,
)


def pin(cache: Cache, packed: bytes) -> Pinned:
    """Pin cached blocks."""
    return answer(cache.handle(c.Pin(keys=packed), 0.0), Pinned)


def unpin(cache: Cache, pin_id: PinId) -> bool:
    """End a pin."""
    return answer(cache.handle(c.Unpin(pin_id=pin_id), 0.0), Released).released


def test_pinned_blocks_are_not_evicted() -> None:
    """Room is made elsewhere as long as a pin holds a block."""
    cache = a_full_cache(3)
    reply = pin(cache, keys(2, 99, 2))

    reserve(cache, 2)

    assert reply.num_blocks == 1
    assert found(cache, keys(2)) == (1, 0)
    with pytest.raises(PoolFullError):
        reserve(cache, 1, "next")
    assert cache.check() == []


def test_unpinned_blocks_are_evictable_again() -> None:
    """A pin ends once; to end it again is an answered no-op."""
    cache = a_full_cache(3)
    reply = pin(cache, keys(0, 1, 2))

    assert [unpin(cache, reply.pin_id), unpin(cache, reply.pin_id)] == [True, False]

    reserve(cache, 3)
    assert cache.check() == []


def test_block_can_be_pinned_twice() -> None:
    """Each pin holds on its own."""
    cache = a_full_cache(1)
    first = pin(cache, keys(0))
    pin(cache, keys(0))

    unpin(cache, first.pin_id)

    with pytest.raises(PoolFullError):
        reserve(cache, 1)


def test_pin_of_nothing_is_no_pin() -> None:
    """Keys that are not on the device take no place among the pins."""
    cache = a_cache(max_pins=1)

    replies = [pin(cache, keys(1)), pin(cache, keys(2))]

    assert {(reply.pin_id, reply.num_blocks) for reply in replies} == {(0, 0)}
    assert unpin(cache, replies[0].pin_id) is False


def test_pins_are_bounded() -> None:
    """There are no more pins than the limit, and the refusal says so."""
    cache = a_cache(max_pins=1)
    cached(cache, keys(1))
    pin(cache, keys(1))

    with pytest.raises(PoolFullError, match="unpin one first") as refusal:
        pin(cache, keys(1))

    assert (refusal.value.resource, refusal.value.limit) == ("pins", 1)
    assert refusal.value.retry_after_ms == 50


def test_pinned_prefix_is_shared_with_leases() -> None:
    """A pin and a lease may hold the same block; it is evictable only when both are gone."""
    cache = a_full_cache(2)
    reply = pin(cache, keys(0))
    outcome = cache.handle(a_reserve(1, "r", keys(0), wait_ms=WAIT_MS), 0.0)
    unpin(cache, reply.pin_id)

    with pytest.raises(PoolFullError):
        reserve(cache, 2, "next")

    assert outcome.reply is not None
