"""Laws of numbers from 0 to 100: a tenant's lower number leaves first, whatever comes, goes and is shared."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import IdReusedError, InvalidError
from kvlease.ids import Epoch, WorkerId
from kvlease.retention import RETAIN_PRIORITY_MAX
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Reserved
from kvleased.core.eviction import POLICIES, LeafFirstLRU
from kvleased.core.eviction.classes import HIGH, LOW, NORMAL, ClassedOrder
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.tenancy.tenants import victims
from tests.unit.service.core.builders import (
    EPOCH,
    STRANGER,
    TENANT,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    answer,
    as_ids,
    commit,
    found,
    keys,
    records,
    release,
    reserve,
    tick,
    wakes,
)
from tests.unit.service.core.rank_builders import LEFT, RIGHT, an_engine

PATHS: Final = (
    (0, 1, 2, 3),
    (0, 1, 2, 4),
    (0, 1, 5),
    (0, 6),
    (7, 8, 9),
    (7, 10, 11),
    (12,),
)
"""Documents with common beginnings, each as the numbers of its blocks."""
NUM_BLOCKS: Final = 13
BEHIND: Final = {
    one: {behind for path in PATHS if one in path for behind in path[path.index(one) + 1 :]}
    for one in range(NUM_BLOCKS)
}
"""The blocks behind each block."""


def leased(
    cache: Cache,
    path: tuple[int, ...],
    number: int | None,
    *,
    now: float = 0.0,
    worker_id: WorkerId = WORKER,
    **numbers: int,
) -> Reserved:
    """Return a lease of a number over a document's blocks, all of them committed."""
    command = replace(
        a_reserve(len(path), f"{now} {path} {number}", keys(*path), worker_id=worker_id),
        retain_priority=number,
        **numbers,
    )
    lease = answer(cache.handle(command, now), Reserved)
    commit(cache, lease.lease_id, keys(*path), worker_id=worker_id, now=now)
    return lease


def used(
    cache: Cache,
    path: tuple[int, ...],
    number: int | None,
    *,
    now: float = 0.0,
    worker_id: WorkerId = WORKER,
    **numbers: int,
) -> None:
    """Use the blocks of a document by a lease of a number, and end the lease."""
    lease = leased(cache, path, number, now=now, worker_id=worker_id, **numbers)
    cache.handle(c.Release(worker_id=worker_id, lease_id=lease.lease_id), now)


def cached_of(cache: Cache, *numbers: int, tenant: int = TENANT) -> list[int]:
    """Return those of the blocks that are on the device."""
    return [number for number in numbers if found(cache, keys(number), tenant) == (1, 0)]


def leaving(cache: Cache, now: float = 0.0) -> list[int]:
    """Evict all cached blocks one by one, and return them in that order."""
    tick(cache, now)
    left = []
    stay = cached_of(cache, *range(NUM_BLOCKS))
    while stay:
        cache.handle(c.Evict(num_blocks=1), now)
        after = cached_of(cache, *stay)
        left += [one for one in stay if one not in after]
        stay = after
    return left


# Which block has which number -----------------------------------------------------------------------------------------


@dataclass
class Kept:
    """The number of a block, as the leases that used it set it."""

    number: int = -1
    retain: float = 0.0
    since: float = 0.0
    num_holders: int = 0

    def at(self, now: float) -> int:
        """Return the number of an idle block at a time."""
        is_over = self.number > NORMAL and self.since + self.retain <= now
        return NORMAL if is_over else self.number

    def take(self, now: float) -> None:
        """Add a lease to the block's holders."""
        if not self.num_holders:
            self.number = self.at(now)
        self.num_holders += 1

    def let_go(self, number: int, retain: float, now: float) -> None:
        """End a lease of the block, which may raise the block's number."""
        self.num_holders -= 1
        if number > NORMAL:
            self.retain = max(retain, self.retain) if self.number > NORMAL else retain
        self.number = max(self.number, number)
        self.since = now


@dataclass
class Model:
    """A cache with room for everything, and a model of its blocks."""

    cache: Cache
    blocks: dict[int, Kept] = field(default_factory=dict)
    leases: list[tuple[Reserved, tuple[int, ...], int, float]] = field(default_factory=list)
    now: float = 0.0

    def begin(self, path: tuple[int, ...], number: int | None, priority: int, seconds: int) -> None:
        """Lease a document."""
        if len(self.leases) == self.cache.shape.max_leases:
            return
        self.now += 1.0
        lease = leased(
            self.cache, path, number, retain_seconds=seconds, priority=priority, now=self.now
        )
        for one in path:
            self.blocks.setdefault(one, Kept()).take(self.now)
        as_number = (LOW, NORMAL, HIGH)[priority] if number is None else number
        self.leases.append((lease, path, as_number, seconds or np.inf))

    def end(self, at: int) -> None:
        """End a lease."""
        if not self.leases:
            return
        lease, path, number, retain = self.leases.pop(at % len(self.leases))
        self.cache.handle(c.Release(worker_id=WORKER, lease_id=lease.lease_id), self.now)
        for one in path:
            self.blocks[one].let_go(number, retain, self.now)

    def check_leaving(self, policy: str) -> None:
        """Evict all blocks, and compare each one that leaves with those that stay."""
        stay = dict(self.blocks)
        for one in leaving(self.cache, self.now):
            leaves = stay.pop(one)
            others = [kept for kept in stay.values() if kept.at(self.now) == leaves.at(self.now)]
            assert leaves.at(self.now) <= min((k.at(self.now) for k in stay.values()), default=HIGH)
            assert not BEHIND[one] & stay.keys(), f"{one} leaves before what hangs on it"
            if policy == "leaf-lru":
                assert leaves.since <= min((kept.since for kept in others), default=np.inf)
        assert not stay


_NUMBERS = st.one_of(st.none(), st.integers(LOW, HIGH), st.sampled_from([0, 49, 50, 51, 60, 100]))
_ACTS = st.one_of(
    st.tuples(
        st.just("begin"),
        st.tuples(st.sampled_from(PATHS), _NUMBERS, st.integers(0, 2), st.integers(0, 12)),
    ),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.integers(1, 8)),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(acts=st.lists(_ACTS, max_size=40), wait=st.integers(0, 12))
def test_lower_number_leaves_first_and_leaves_leave_before_prefixes(
    policy: str, acts: list[tuple[str, object]], wait: int
) -> None:
    """However leases share blocks and end, and whatever times are over, blocks leave as the model says."""
    model = Model(
        a_cache(NUM_BLOCKS, num_slots=0, eviction_policy=policy, max_leases=6, lease_seconds=1e6)
    )
    for name, what in acts:
        if name == "begin":
            assert isinstance(what, tuple)
            model.begin(*what)
        else:
            assert isinstance(what, int)
            if name == "end":
                model.end(what)
            else:
                model.now += what
    while model.leases:
        model.end(0)
    model.now += wait

    assert model.cache.check() == []
    model.check_leaving(policy)


# What a number is -----------------------------------------------------------------------------------------------------


def test_numbers_order_between_the_priorities() -> None:
    """0 is low, 50 normal and 100 high, with the other numbers in between."""
    cache = a_cache(7, num_slots=0)
    for block, number in enumerate((100, 75, 50, 25, 0)):
        used(cache, (block,), number)
    for block, priority in enumerate((2, 0), 5):
        used(cache, (block,), None, priority=priority)

    assert leaving(cache) == [4, 6, 3, 2, 1, 0, 5]


def test_number_comes_in_place_of_the_priority() -> None:
    """If both are given, the number decides how long blocks stay, and the priority only which call is served first."""
    cache = a_cache(2, num_slots=0)
    used(cache, (0,), 10, priority=2)
    used(cache, (1,), 20, priority=0)
    left = leaving(cache)
    full = reserve(cache, 2, "full")
    for name, priority, number in (("late", 0, 100), ("soon", 2, 0)):
        command = a_reserve(1, name, wait_ms=WAIT_MS)
        cache.handle(replace(command, priority=priority, retain_priority=number), 0.0)

    assert left == [0, 1]
    assert [one.position for one in cache.list_waiting(0, 8, now=0.0)] == [1, 0]
    assert len(wakes(release(cache, full.lease_id))) == 2


@pytest.mark.parametrize(("number", "priority"), [(None, 1), (50, 0), (50, 1), (50, 2)])
def test_normal_number_begins_no_classes(number: int | None, priority: int) -> None:
    """If all numbers are normal, no classes are kept."""
    cache = a_cache(2)

    used(cache, (0,), number, priority=priority)

    assert not cache._state.device.has_classes


def test_number_above_50_falls_to_normal_when_its_time_is_over() -> None:
    """After the seconds that were asked for, a block counts as 50, with the time at which it was let go of."""
    cache = a_cache(4, num_slots=0)
    used(cache, (0,), 70, retain_seconds=5, now=1.0)
    used(cache, (1,), 51, now=0.0)
    used(cache, (2,), None, now=0.0)
    used(cache, (3,), None, now=2.0)

    assert leaving(cache, now=6.0) == [2, 0, 3, 1]


def test_number_below_50_stays() -> None:
    """The end of its time does not raise the number of a block below 50."""
    cache = a_cache(2, num_slots=0)
    used(cache, (1,), None)
    used(cache, (0,), 49, retain_seconds=1)

    assert leaving(cache, now=9.0) == [0, 1]


def test_prefix_has_the_highest_number_for_the_longest_time() -> None:
    """Blocks that a short high lease and a long lower one share stay as long as the blocks behind them."""
    cache = a_cache(4, num_slots=0)
    used(cache, (0, 6), 60, retain_seconds=1000)
    used(cache, (0,), 90, retain_seconds=5)
    used(cache, (12,), None)

    assert leaving(cache, now=6.0) == [12, 6, 0]


def test_blocks_of_several_numbers_fall_together_leaf_first() -> None:
    """A chain whose blocks fall to normal at the same time leaves from its end."""
    cache = a_cache(5, num_slots=0)
    longest = leased(cache, (0, 1, 2, 3), 60, retain_seconds=9)
    used(cache, (0, 1, 5), 70, retain_seconds=9)
    used(cache, (0,), 90, retain_seconds=9)
    cache.handle(c.Release(worker_id=WORKER, lease_id=longest.lease_id), 0.0)

    assert leaving(cache, now=9.0) == [3, 2, 5, 1, 0]


def test_restart_does_not_forget_what_was_asked_for() -> None:
    """A request that is repeated after a restart must still ask for the same number."""
    cache = a_cache(4, num_slots=0)
    command = replace(a_reserve(prefix=keys(0)), retain_priority=80)
    lease = answer(cache.handle(command, 0.0), Reserved)
    after = Cache.recovered(
        cache.shape, records(cache), Epoch(EPOCH + 1), {WORKER: TENANT}, now=0.0
    )

    for number in (None, 81):
        with pytest.raises(IdReusedError, match="another retain_priority"):
            after.handle(replace(command, retain_priority=number), 0.0)

    assert answer(after.handle(command, 0.0), Reserved).lease_id == lease.lease_id


# Who may ask for what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 101])
def test_number_out_of_range_is_refused(number: int) -> None:
    """The refusal names the field, the number and the bounds, and changes nothing."""
    cache = a_cache()

    with pytest.raises(InvalidError, match=rf"retain_priority is {number}; .* from 0 to 100") as no:
        leased(cache, (0,), number)

    assert (no.value.resource, no.value.need, no.value.limit) == ("retain_priority", number, 100)
    assert not cache._state.device.has_classes
    assert RETAIN_PRIORITY_MAX == HIGH


def test_request_with_another_number_is_another_request() -> None:
    """A repeated request must ask for the same number; with another one its id counts as reused."""
    cache = a_cache()
    command = replace(a_reserve(), retain_priority=80)
    lease = answer(cache.handle(command, 0.0), Reserved)

    assert answer(cache.handle(command, 0.0), Reserved).lease_id == lease.lease_id
    for number in (None, 50, 81):
        with pytest.raises(IdReusedError, match="another retain_priority"):
            cache.handle(replace(command, retain_priority=number), 0.0)


def test_ranks_of_one_engine_agree_on_the_number() -> None:
    """A rank must ask for the same number, whether it joins a lease or waits beside another rank."""
    cache = an_engine(2)
    full = reserve(cache, 2, "full")
    command = replace(a_reserve(1, worker_id=LEFT, wait_ms=WAIT_MS), retain_priority=80)
    cache.handle(command, 0.0)
    other = replace(command, worker_id=RIGHT, retain_priority=20)

    with pytest.raises(IdReusedError, match=r"is already waiting .* another retain_priority"):
        cache.handle(other, 0.0)
    release(cache, full.lease_id)
    with pytest.raises(IdReusedError, match=r"has a lease .* another retain_priority"):
        cache.handle(other, 0.0)
    joined = answer(cache.handle(replace(other, retain_priority=80), 0.0), Reserved)

    assert joined.joined_id
    assert cache.check() == []


@given(
    own=st.tuples(st.integers(1, 6), st.integers(LOW, HIGH)),
    other=st.tuples(st.integers(1, 6), st.integers(LOW, HIGH)),
    num_blocks=st.integers(1, 12),
)
def test_number_takes_nothing_from_another_tenant(
    own: tuple[int, int], other: tuple[int, int], num_blocks: int
) -> None:
    """Each tenant gives up the same number of blocks, whatever retain priorities they have."""

    def given_by(*, is_numbered: bool) -> dict[int, int]:
        cache = a_cache(12, num_slots=0)
        for worker_id, (count, number), first in ((WORKER, own, 0), (STRANGER, other, 20)):
            path = tuple(range(first, first + count))
            used(cache, path, number if is_numbered else None, worker_id=worker_id)
        leave = victims(cache._state, TENANT, num_blocks, NOWHERE)
        return Counter(records(cache).device.tenant[leave].tolist())

    assert given_by(is_numbered=True) == given_by(is_numbered=False)


# The order ------------------------------------------------------------------------------------------------------------


def test_tenant_with_all_numbers_has_a_part_for_each() -> None:
    """However many blocks come and go, a tenant has at most 101 parts, and an empty part costs no search."""
    numbers = range(LOW, HIGH + 1)
    blocks = np.arange(4 * len(numbers))
    order = ClassedOrder(
        LeafFirstLRU(len(blocks)), np.repeat([0, 1], 2 * len(numbers)).astype(np.int32)
    )
    order.begin_classes()
    for _ in range(3):
        order.discard(blocks)
        order.forget(blocks)
        for number in numbers:
            order.raise_to(blocks[number :: len(numbers)], number, np.inf)
        order.add(blocks)

    assert repr(order) == f"<ClassedOrder {len(blocks)} evictable in {2 * len(numbers)} parts>"
    assert (order.num_of(0), order.num_of(1)) == (2 * len(numbers), 2 * len(numbers))
    in_order = order.coldest_of(1, len(blocks), NOWHERE)
    assert (in_order % len(numbers)).tolist() == [one for one in numbers for _ in range(2)]
    order.evicted(in_order[:-2])
    assert order.coldest_of(1, 9, as_ids([int(in_order[-2])])).tolist() == [int(in_order[-1])]
