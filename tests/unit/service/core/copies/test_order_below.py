"""Laws of copies and eviction: a copy down changes nothing above, and below, blocks leave in the order as above.

So no block leaves a tier before those behind it in its chain, into however many parts the copies were divided.
"""

import pytest

from kvlease.ids import BYTES_PER_KEY, LeaseId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.pool import Pool
from kvleased.core.effects import Copy
from kvleased.core.shape import WritePolicy
from tests.unit.service.core.builders import (
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    copies,
    fail,
    keys,
    land,
    release,
    reserve,
    tick,
)
from tests.unit.service.core.tier_builders import a_tiered_cache, doc

THROUGH = WritePolicy.WRITE_THROUGH
CHAIN = doc(6)
DEEPEST_FIRST = [5, 4, 3, 2, 1, 0]


def leaving(pool: Pool) -> list[int]:
    """Return the places in their chain of the blocks that can leave, in the order in which they will."""
    return pool.records.position[list(pool.order)].tolist()


def commit_chain(cache: Cache, packed: bytes = CHAIN) -> tuple[LeaseId, list[Copy]]:
    """Commit a chain; return its lease, and the copies that this starts."""
    num_blocks = len(packed) // BYTES_PER_KEY
    lease = reserve(cache, num_blocks, f"request {packed[0]}")
    command = c.Commit(
        worker_id=WORKER,
        lease_id=lease.lease_id,
        num_tokens=num_blocks * TOKENS_PER_BLOCK,
        first_block=0,
        keys=packed,
    )
    return lease.lease_id, copies(cache.handle(command, 0.0))


def land_all(cache: Cache, left: list[Copy]) -> None:
    """Land the copies that were started, and those that this starts, until none is left."""
    while left:
        left += copies(land(cache, left.pop(0)))
    assert cache.check() == []


@pytest.mark.parametrize("num_landed", range(4))
@pytest.mark.parametrize("policy", ["leaf-lru", "arc", "adaptive"])
def test_background_copies_leave_the_order_as_it_is(policy: str, num_landed: int) -> None:
    """A chain that is let go of before, amid or after its three copies leaves from its end."""
    cache = a_cache(16, 16, write_policy=THROUGH, eviction_policy=policy)
    lease_id, left = commit_chain(cache)
    orders = []
    for number in range(4):
        if number == num_landed:
            release(cache, lease_id)
        left = [other for copy in left for other in copies(land(cache, copy))]
        assert cache.check() == []
        orders.append(leaving(cache._state.device))
    tick(cache, 0.0)

    assert all(order == sorted(order, reverse=True) for order in orders)
    assert leaving(cache._state.device) == DEEPEST_FIRST


def test_background_copy_that_fails_leaves_the_order_as_it_is() -> None:
    """A copy that comes to nothing is no use of its blocks either."""
    cache = a_cache(16, 16, write_policy=THROUGH)
    lease_id, (copy,) = commit_chain(cache)
    release(cache, lease_id)

    fail(cache, copy)

    assert leaving(cache._state.device) == DEEPEST_FIRST


def let_leave(cache: Cache, count: int) -> None:
    """Make room for a call by as many blocks as must leave the device."""
    outcome = cache.handle(a_reserve(count, "new", wait_ms=WAIT_MS), 0.0)
    land_all(cache, copies(outcome))
    for lease_id in cache._state.leases.by_id.copy():
        release(cache, lease_id)
    assert cache.check() == []


@pytest.mark.parametrize("policy", [THROUGH, WritePolicy.ON_EVICT])
def test_slots_leave_in_the_order_in_which_their_blocks_left(policy: WritePolicy) -> None:
    """Whenever and in however many parts a chain came to the host pool, its end leaves that pool first."""
    cache = a_cache(16, 16, write_policy=policy)
    lease_id, started = commit_chain(cache)
    land_all(cache, started)
    release(cache, lease_id)

    let_leave(cache, 13)
    partly = leaving(cache._state.host)[-3:]
    let_leave(cache, 16)

    assert partly == [5, 4, 3]
    assert leaving(cache._state.host)[-6:] == DEEPEST_FIRST


def test_blocks_leave_the_disk_in_the_order_in_which_they_left_the_host_pool() -> None:
    """A chain whose copies all three tiers have leaves each of them from its end."""
    cache = a_tiered_cache(16, 8, write_policy=THROUGH)
    lease_id, started = commit_chain(cache)
    land_all(cache, started)
    release(cache, lease_id)
    before = leaving(cache._state.disk)

    let_leave(cache, 16)
    for number in range(8):
        lease_id, started = commit_chain(cache, keys(20 + number))
        land_all(cache, started)
        release(cache, lease_id)

    disk = cache._state.disk
    at = disk.index.find(CHAIN)
    assert cache._state.host.index.find(CHAIN).tolist() == [-1] * 6
    assert (len(before), before == DEEPEST_FIRST) == (6, False)
    assert [block for block in disk.order if block in at] == at[::-1].tolist()


def test_slot_whose_block_is_still_above_leaves_without_a_trace() -> None:
    """What leaves the host pool while the device has it changes nothing in the order of the disk store."""
    cache = a_tiered_cache(16, 8, write_policy=THROUGH)
    _, started = commit_chain(cache)
    land_all(cache, started)
    before = list(cache._state.disk.order)

    for number in range(8):
        lease_id, started = commit_chain(cache, keys(20 + number))
        land_all(cache, started)
        release(cache, lease_id)

    assert cache._state.host.index.find(CHAIN).tolist() == [-1] * 6
    assert list(cache._state.disk.order)[:6] == before
