"""Laws of classes: low leaves before normal before high; a class lasts for as long as its lease asked."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.ids import WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Reserved
from kvleased.core.eviction import LeafFirstLRU, make_order
from kvleased.core.eviction.classes import HIGH, LOW, NORMAL, ClassedOrder
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.magazine_replies import Exchanged
from tests.unit.service.core.builders import (
    EPOCH,
    LEASE_SECONDS,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WORKER,
    a_cache,
    a_reserve,
    answer,
    as_ids,
    commit,
    copies,
    evict,
    found,
    keys,
    land,
    on_host,
    records,
    release,
    reload,
    reload_keys,
    reserve,
    the_copy,
    tick,
)
from tests.unit.service.core.grouped import (
    FULL,
    WINDOW,
    cache_of,
    chain,
    commit_tokens,
    hit_tokens,
    reserve_tokens,
)

PRIORITIES = (LOW, NORMAL, HIGH)
"""The class that each priority stands for."""


def used(
    cache: Cache,
    packed: bytes,
    rank: int,
    *,
    retain_seconds: int = 0,
    now: float = 0.0,
    worker_id: WorkerId = WORKER,
) -> None:
    """Use the blocks of keys by a lease of a class, which then ends; cached ones are hits."""
    lease = leased(cache, packed, rank, retain_seconds=retain_seconds, now=now, worker_id=worker_id)
    cache.handle(c.Release(worker_id=worker_id, lease_id=lease.lease_id), now)


def leased(
    cache: Cache,
    packed: bytes,
    rank: int,
    *,
    retain_seconds: int = 0,
    now: float = 0.0,
    worker_id: WorkerId = WORKER,
) -> Reserved:
    """Return a lease of a class over the committed blocks of keys."""
    command = c.Reserve(
        worker_id=worker_id,
        request_id=f"{rank} {packed.hex()}",
        keys=packed,
        num_tokens=len(packed) // 32 * TOKENS_PER_BLOCK,
        priority=PRIORITIES.index(rank),
        retain_seconds=retain_seconds,
    )
    lease = answer(cache.handle(command, now), Reserved)
    commit(cache, lease.lease_id, packed, worker_id=worker_id, now=now)
    return lease


def cached_of(cache: Cache, *numbers: int) -> list[int]:
    """Return those keys whose blocks are on the device."""
    return [number for number in numbers if found(cache, keys(number)) == (1, 0)]


def test_low_leaves_before_normal_before_high() -> None:
    """Blocks of the lowest class make room first, however recently they were used."""
    cache = a_cache(3, num_slots=0)
    used(cache, keys(2), HIGH)
    used(cache, keys(1), NORMAL)
    used(cache, keys(0), LOW)

    kept = []
    for num_blocks in (1, 2):
        lease = reserve(cache, num_blocks, f"r{num_blocks}")
        kept.append(cached_of(cache, 0, 1, 2))
        release(cache, lease.lease_id)

    assert kept == [[1, 2], [2]]
    assert cache.check() == []


def test_longest_ago_leaves_first_within_a_class() -> None:
    """Within one class, the block let go of longest ago leaves first, and each block leaves before its prefix."""
    cache = a_cache(4, num_slots=0)
    used(cache, keys(0, 1), HIGH)
    used(cache, keys(2, 3), HIGH)

    reserve(cache, 1)

    assert cached_of(cache, 0, 1, 2, 3) == [0, 2, 3]


def test_shared_block_has_the_highest_class_of_its_leases() -> None:
    """A block that leases of several classes used has the highest of them, in whichever order the leases end."""
    cache = a_cache(4, num_slots=0)
    used(cache, keys(0), HIGH)
    used(cache, keys(0), LOW)
    used(cache, keys(1), LOW)
    used(cache, keys(1), HIGH)
    used(cache, keys(2, 3), NORMAL)

    reserve(cache, 2)

    assert cached_of(cache, 0, 1, 2, 3) == [0, 1]


def test_low_lease_does_not_lower_what_it_finds() -> None:
    """Blocks that were cached as normal stay normal when a low lease uses them."""
    cache = a_cache(3, num_slots=0)
    used(cache, keys(0), NORMAL)
    used(cache, keys(0, 1), LOW)
    used(cache, keys(2), NORMAL)

    reserve(cache, 1)

    assert cached_of(cache, 0, 1, 2) == [0, 2]


def test_low_lease_does_not_lower_a_part_of_what_was_brought_back() -> None:
    """Blocks that no lease brought to the device are normal, so that a chain still leaves from its end."""
    cache = a_cache(6)
    used(cache, keys(9), LOW)
    on_host(cache, keys(0, 1, 2, 3))
    land(cache, the_copy(reload_keys(cache, keys(0, 1, 2, 3))))
    used(cache, keys(0, 1), LOW)

    reserve(cache, 4)

    assert cached_of(cache, 0, 1, 2, 3) == [0, 1]


def test_class_ends_with_the_bytes() -> None:
    """A magazine that writes a block anew does not hand the class of the earlier bytes on."""
    cache = a_cache(3, num_slots=0)
    engine = WorkerId(11)
    cache.handle(c.Attach(worker_id=engine, tenant_digest=TENANT, magazine=1), 0.0)
    used(cache, keys(0), HIGH)
    held = exchange(cache, engine, 1, hold_keys=keys(0)).held_blocks
    exchange(cache, engine, 2, retract_blocks=held)
    exchange(cache, engine, 3, publish_blocks=held, publish_keys=keys(1))
    exchange(cache, engine, 4, drop_blocks=held)
    used(cache, keys(2, 3), NORMAL)

    reserve(cache, 1)

    assert cached_of(cache, 1, 2, 3) == [2, 3]


def exchange(cache: Cache, engine: WorkerId, sequence: int, **columns: bytes) -> Exchanged:
    """Return the answer to an exchange of an engine's magazine."""
    command = c.Exchange(worker_id=engine, sequence=sequence, **columns)
    return answer(cache.handle(command, 0.0), Exchanged)


def test_high_class_ends_when_its_time_is_over() -> None:
    """After the seconds that were asked for, a high block counts as normal, with the time at which it was let go of."""
    cache = a_cache(3, num_slots=0)
    used(cache, keys(0), HIGH, retain_seconds=10, now=1.0)
    used(cache, keys(1), NORMAL, now=0.0)
    used(cache, keys(2), NORMAL, now=5.0)

    tick(cache, 11.0)
    lease = reserve(cache, 2, now=11.0)

    assert cached_of(cache, 0, 1, 2) == [2]
    release(cache, lease.lease_id)
    assert cache.check() == []


def test_high_class_lasts_until_its_time_is_over() -> None:
    """Until its time is over a block is high, and another use starts the time again."""
    cache = a_cache(2, num_slots=0)
    used(cache, keys(0), HIGH, retain_seconds=10, now=0.0)
    used(cache, keys(0), NORMAL, now=8.0)
    used(cache, keys(1), NORMAL, now=9.0)

    tick(cache, 17.0)
    reserve(cache, 1, now=17.0)

    assert cached_of(cache, 0, 1) == [0]


def test_longest_time_of_a_class_counts() -> None:
    """Of two high leases, the one that keeps its blocks for longer decides."""
    cache = a_cache(2, num_slots=0)
    used(cache, keys(0), HIGH, retain_seconds=100)
    used(cache, keys(0), HIGH, retain_seconds=1)
    used(cache, keys(1), NORMAL)

    tick(cache, 50.0)
    reserve(cache, 1, now=50.0)

    assert cached_of(cache, 0, 1) == [0]


def test_low_stays_low() -> None:
    """A time does not make a low block normal."""
    cache = a_cache(2, num_slots=0)
    used(cache, keys(1), NORMAL)
    used(cache, keys(0), LOW, retain_seconds=1)

    tick(cache, 5.0)
    reserve(cache, 1, now=5.0)

    assert cached_of(cache, 0, 1) == [1]


def test_class_ends_with_the_block() -> None:
    """A block that is granted again has the class of its new lease."""
    cache = a_cache(2, num_slots=0)
    used(cache, keys(0), HIGH)
    used(cache, keys(1), HIGH)
    release(cache, reserve(cache, 2, "private").lease_id)
    used(cache, keys(2), LOW)
    used(cache, keys(3), NORMAL)

    reserve(cache, 1)

    assert cached_of(cache, 2, 3) == [3]


def test_class_goes_with_a_lease_that_ends_otherwise() -> None:
    """The blocks of a dead worker keep the class of its leases, in whichever phase those are."""
    cache = a_cache(4)
    moved = leased(cache, keys(0), HIGH)
    land(cache, the_copy(evict(cache, moved.lease_id)))
    back = reload(cache, moved.lease_id)
    down = leased(cache, keys(1), HIGH)
    land(cache, the_copy(evict(cache, down.lease_id)))

    cache.handle(c.WorkerDied(worker_id=WORKER), 0.0)
    land(cache, the_copy(back))

    assert cache.check() == []
    ranks = cache._state.device.order._classes.rank  # type: ignore[attr-defined]  # the order of classes
    assert HIGH in ranks[records(cache).device.state != 0]


def test_restart_forgets_classes() -> None:
    """Blocks that were committed before a restart are normal after it, including those of leases that go on."""
    cache = a_cache(4, num_slots=0)
    used(cache, keys(0), LOW)
    kept = leased(cache, keys(1), LOW)
    after = Cache.recovered(cache.shape, records(cache), EPOCH, {WORKER: TENANT}, 0.0)
    used(after, keys(2), LOW)
    release(after, kept.lease_id)

    reserve(after, 2)

    assert cached_of(after, 0, 1, 2) == [0, 1]


def test_classes_of_several_tenants_do_not_mix() -> None:
    """A tenant above its share gives way even with high blocks."""
    cache = a_cache(4, num_slots=0)
    used(cache, keys(7), LOW, worker_id=STRANGER)
    used(cache, keys(0, 1, 2), HIGH)

    reserve(cache, 1)

    assert found(cache, keys(7), None) == (1, 0)
    assert cached_of(cache, 0, 1, 2) == [0, 1]


@pytest.mark.parametrize(
    ("priority", "retain_seconds", "resource"),
    [(-1, 0, "priority"), (3, 0, "priority"), (1, -1, "retain_seconds")],
)
def test_class_without_sense_is_refused(priority: int, retain_seconds: int, resource: str) -> None:
    """The refusal of an unknown class or an impossible time names its number."""
    cache = a_cache()

    command = replace(a_reserve(), priority=priority, retain_seconds=retain_seconds)

    with pytest.raises(InvalidError) as refusal:
        cache.handle(command, 0.0)

    assert refusal.value.resource == resource


def test_expired_lease_keeps_its_blocks_class() -> None:
    """If a lease expires and its worker then ends, its blocks have the lease's class."""
    cache = a_cache(2, num_slots=0)
    used(cache, keys(1), NORMAL)
    leased(cache, keys(0), LOW)
    tick(cache, LEASE_SECONDS + 1)

    cache.handle(c.Detach(worker_id=WORKER), LEASE_SECONDS + 2)
    cache.handle(c.Attach(worker_id=WORKER, tenant_digest=TENANT), LEASE_SECONDS + 2)
    reserve(cache, 1, now=LEASE_SECONDS + 2)

    assert cached_of(cache, 0, 1) == [1]


def test_patient_call_heeds_classes() -> None:
    """Blocks that were copied down to make room, but then not needed, are still the next to leave."""
    cache = a_cache(2)
    used(cache, keys(0), HIGH)
    used(cache, keys(1), LOW)
    command = c.Reserve(
        worker_id=WORKER, request_id="r", keys=b"", num_tokens=TOKENS_PER_BLOCK, wait_ms=1
    )
    outcome = cache.handle(command, 0.0)
    cache.handle(c.Cancel(ticket=outcome.ticket or 0), 0.0)

    land(cache, the_copy(outcome))

    assert copies(cache.handle(command, 0.0)) == []
    assert cached_of(cache, 0, 1) == [0]


# The order ------------------------------------------------------------------------------------------------------------


def an_order(num_blocks: int = 100) -> tuple[ClassedOrder, NDArray[np.int32]]:
    """Return an order, and the column with the tenants of its blocks."""
    owner = np.zeros(num_blocks, np.int32)
    return ClassedOrder(LeafFirstLRU(num_blocks), owner), owner


def test_order_is_parted_by_tenants() -> None:
    """The blocks of each tenant leave in their own order."""
    order, owner = an_order()
    owner[[3, 4]] = 1
    order.add(as_ids([5, 1, 3, 2, 4]))

    assert order.coldest_of(1, 9, NOWHERE).tolist() == [3, 4]
    assert order.coldest_of(0, 2, as_ids([5])).tolist() == [1, 2]
    assert order.coldest_of(7, 2, NOWHERE).tolist() == []
    assert order.coldest(4, NOWHERE).tolist() == [5, 1, 2, 3]
    assert list(order) == [5, 1, 2, 3, 4]
    assert (order.num_of(0), order.num_of(1), order.num_of(7)) == (3, 2, 0)
    assert repr(order) == "<ClassedOrder 5 evictable in 2 parts>"


def test_block_that_is_put_back_is_high_as_long_as_before() -> None:
    """A copy of a block does not prolong its class."""
    order, _ = an_order()
    order.begin_classes()
    order.raise_to(as_ids([1]), HIGH, 5.0)
    order.add(as_ids([1, 2]))
    order.set_aside(as_ids([1]))
    order.put_back(as_ids([1]))

    before, order.now = order.coldest(1, NOWHERE).tolist(), 5.0

    assert (before, order.coldest(2, NOWHERE).tolist()) == ([2], [2, 1])


def test_class_of_a_block_that_is_being_copied_ends_in_time() -> None:
    """Blocks whose class ends while some of them are copied leave in the order in which they were let go of."""
    order, _ = an_order()
    order.begin_classes()
    order.raise_to(as_ids([1, 2, 3]), HIGH, 5.0)
    order.add(as_ids([1, 2, 3]))
    order.now = 1.0
    order.add(as_ids([4]))
    order.set_aside(as_ids([2]))

    order.now = 9.0
    meanwhile = order.coldest(9, NOWHERE).tolist()
    order.put_back(as_ids([2]))

    assert meanwhile == [1, 3, 4]
    assert order.coldest(9, NOWHERE).tolist() == list(order) == [1, 2, 3, 4]


def test_high_blocks_join_the_normal_ones_of_their_segment() -> None:
    """When the time of a class is over, its blocks leave by the policy as if they had always been normal."""
    keys = np.arange(10, dtype=np.uint64)
    order = ClassedOrder(make_order("s3-fifo", 10, keys), np.zeros(10, np.int32))
    order.begin_classes()
    for block in (1, 2, 3):
        order.raise_to(as_ids([block]), HIGH if block == 2 else NORMAL, 5.0)
        order.add(as_ids([block]))
    order.discard(as_ids([3]))
    order.add(as_ids([3]))

    before, order.now = order.coldest(3, NOWHERE).tolist(), 5.0

    assert before == [1, 3, 2]
    assert order.coldest(3, NOWHERE).tolist() == [1, 2, 3]
    assert len(order) == 3
    order.evicted(as_ids([1, 2]))
    assert list(order) == [3]


def test_order_knows_what_it_has() -> None:
    """Blocks that were taken out are no longer in the order; a removal of absent ones is ignored."""
    order, owner = an_order()
    owner[[3, 4]] = 1
    order.add(as_ids([1, 3, 2, 4]))

    order.discard(as_ids([3, 1, 99]))
    order.discard(as_ids([99]))
    order.add(NOWHERE)

    assert [block in order for block in (1, 2, 3, 4)] == [False, True, False, True]
    assert order.holds(as_ids([1, 2])).tolist() == [False, True]
    assert (len(order), order.num_of(1)) == (2, 1)


def test_ring_grows_with_its_blocks() -> None:
    """A tenant's part of the order starts small, and grows until it has room for all blocks."""
    order, owner = an_order(1_000)
    owner[500:] = 1

    for at in range(0, 1_000, 50):
        order.add(as_ids(range(at, at + 50)))
    for _ in range(40):
        order.discard(as_ids(range(400)))
        order.add(as_ids(range(400)))

    assert list(order) == [*range(400, 500), *range(400), *range(500, 1_000)]


def test_asking_and_classes_begin_once() -> None:
    """A second start of classes changes nothing, and neither does a question."""
    order, _ = an_order()
    order.begin_classes()
    order.raise_to(as_ids([1]), HIGH, 5.0)
    order.begin_classes()
    order.add(as_ids([1, 2]))

    assert order.has_classes
    assert order.coldest(1, NOWHERE).tolist() == order.coldest(1, NOWHERE).tolist() == [2]


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(LOW, HIGH), st.integers(1, 20), st.integers(1, 9)),
        max_size=30,
    ),
    st.integers(0, 30),
)
def test_blocks_leave_by_class_and_then_by_time(
    uses: list[tuple[int, int, int, int]], wait: int
) -> None:
    """Whenever blocks were used, they leave by their present class, and within a class by their last use."""
    order, _ = an_order(8)
    order.begin_classes()
    order.forget(as_ids(range(8)))
    model: dict[int, tuple[int, float, int]] = {}
    now = 0.0
    for block, rank, seconds, later in uses:
        now += later
        order.now = now
        before, kept = _class_at(model, block, now)
        order.discard(as_ids([block]))
        order.raise_to(as_ids([block]), rank, float(seconds))
        if rank > NORMAL:
            kept = max(seconds, kept) if before > NORMAL else seconds
        order.add(as_ids([block]))
        model[block] = (max(before, rank), now, int(kept))
    order.now = now + wait

    left = order.coldest(8, NOWHERE).tolist()

    def key(block: int) -> tuple[int, float]:
        return _class_at(model, block, order.now)[0], model[block][1]

    assert left == sorted(model, key=key)


def _class_at(model: dict[int, tuple[int, float, int]], block: int, now: float) -> tuple[int, int]:
    if block not in model:
        return -1, 0
    rank, since, kept = model[block]
    is_over = rank > NORMAL and since + kept <= now
    return (NORMAL if is_over else rank), kept


def test_blocks_that_a_window_has_left_stay_as_long_as_their_lease_says() -> None:
    """Blocks that a running request of a high class gives back stay cached while normal blocks leave."""
    cache = cache_of(FULL, WINDOW, num_slots=0)
    command = c.Reserve(worker_id=WORKER, request_id="r", keys=b"", num_tokens=16, priority=2)
    high = answer(cache.handle(command, 0.0), Reserved)
    commit_tokens(cache, high.lease_id, 16)
    normal = reserve_tokens(cache, 4, "normal")
    commit_tokens(cache, normal.lease_id, 4, chain(4, branch=1))
    release(cache, normal.lease_id)

    cache.handle(c.Evict(num_blocks=2), 0.0)

    assert hit_tokens(cache, 4) == 4
    assert cache.check() == []
