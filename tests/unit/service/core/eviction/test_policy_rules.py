"""Laws of each policy's own rule: it decides as plain Python lists do, and is good at what it is meant for."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvleased.core.eviction import SegmentedOrder, make_order
from kvleased.core.eviction.adaptive import Adaptive
from kvleased.core.eviction.arc import ARC
from kvleased.core.eviction.ghosts import Ghosts
from kvleased.core.eviction.lfu import LFU
from kvleased.core.eviction.s3fifo import S3FIFO
from kvleased.core.eviction.segment_policy import Tails
from kvleased.core.lease.leases import NOWHERE
from tests.unit.service.core.builders import as_ids

NUM_BLOCKS = 6


class Cache:
    """Keys in blocks, with one request at a time, and evictions one block after another."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        """Start empty."""
        self.keys = np.zeros(num_blocks, np.uint64)
        order = make_order(policy, num_blocks, self.keys)
        assert isinstance(order, SegmentedOrder)
        self.order = order
        self.block_of: dict[int, int] = {}
        self.free = list(range(num_blocks))

    @property
    def policy(self) -> object:
        """Return the policy."""
        return self.order.columns.policy

    def use(self, chain: Sequence[int]) -> list[int]:
        """Use the blocks of a chain of keys, and return the keys that are evicted for it."""
        hits = [self.block_of[key] for key in chain if key in self.block_of]
        missing = [key for key in chain if key not in self.block_of]
        self.order.discard(as_ids(hits))
        victims = [self._evict() for _ in range(len(missing) - len(self.free))]
        blocks = [self.free.pop() for _ in missing]
        self.keys[blocks] = missing
        self.block_of |= dict(zip(missing, blocks, strict=True))
        self.order.cached(as_ids(blocks))
        self.order.add(as_ids([self.block_of[key] for key in reversed(chain)]))
        return victims

    def _evict(self) -> int:
        victim = self.order.coldest(1, NOWHERE)
        self.order.evicted(victim)
        (key,) = (key for key, block in self.block_of.items() if block == victim[0])
        self.free.append(self.block_of.pop(key))
        return key


class Lists:
    """The two lists of ARC and of S3-FIFO in plain Python, with the keys that they remember."""

    def __init__(self, num_blocks: int) -> None:
        """Start empty."""
        self.num_blocks = num_blocks
        self.lists: tuple[list[int], list[int]] = ([], [])
        """The keys of both lists, the coldest first: used once or in the small queue, and the others."""
        self.last: dict[int, int] = {}
        self.young: dict[int, int] = {}
        self.old: dict[int, int] = {}
        self.num_young = 0
        self.clock = 0
        self.target = 0.0

    def use(self, chain: Sequence[int], is_full: Callable[["Lists"], bool]) -> list[int]:
        """Use the blocks of a chain; `is_full` decides whether the first list gives the next victim."""
        hits = [key for key in chain if key in self.lists[0] or key in self.lists[1]]
        missing = [key for key in chain if key not in hits]
        for key in hits:
            self.lists[key in self.lists[1]].remove(key)
        room = self.num_blocks - len(hits) - sum(map(len, self.lists))
        victims = [self._evict(is_full) for _ in range(len(missing) - room)]
        back = self._take(missing)
        for key in reversed(chain):
            self.lists[key in hits or key in back].append(key)
            self.clock += 1
            self.last[key] = self.clock
        return victims

    def _evict(self, is_full: Callable[["Lists"], bool]) -> int:
        first, second = self.lists
        is_colder = not first or (bool(second) and self.last[second[0]] < self.last[first[0]])
        number = int(is_colder and not (first and is_full(self)))
        key = self.lists[number].pop(0)
        if self.num_young == self.num_blocks // 2:
            self.young, self.old, self.num_young = {}, self.young, 0
        self.young[key] = number
        self.num_young += 1
        return key

    def _take(self, missing: list[int]) -> list[int]:
        counts = [[*self.young.values(), *self.old.values()].count(one) for one in (0, 1)]
        once, again = (max(1, count) for count in counts)
        back = [key for key in missing if key in self.young or key in self.old]
        lists = [self.young.pop(key) if key in self.young else self.old.pop(key) for key in back]
        self.target += lists.count(0) * max(1.0, again / once)
        self.target -= lists.count(1) * max(1.0, once / again)
        self.target = min(max(self.target, 0.0), self.num_blocks)
        return back


def is_above_target(lists: Lists) -> bool:
    """Return whether the keys that were used once are above their target, as in ARC."""
    first, second = lists.lists
    return len(first) > lists.target * (len(first) + len(second)) / lists.num_blocks


def is_above_a_tenth(lists: Lists) -> bool:
    """Return whether the small queue has more than a tenth of the keys, as in S3-FIFO."""
    first, second = lists.lists
    return len(first) > 0.1 * (len(first) + len(second))


_CHAINS = st.builds(lambda root, num_keys: [root * 10 + at for at in range(num_keys)],
                    st.integers(1, 5), st.integers(1, 4))  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "is_full"), [("arc", is_above_target), ("s3-fifo", is_above_a_tenth)]
)
@given(chains=st.lists(_CHAINS, max_size=60), num_blocks=st.integers(4, 12))
def test_policy_decides_as_its_lists(
    policy: str, is_full: Callable[[Lists], bool], chains: list[list[int]], num_blocks: int
) -> None:
    """The arrays evict the same keys as the lists, in the same order."""
    cache, lists = Cache(policy, num_blocks), Lists(num_blocks)

    for chain in chains:
        assert cache.use(chain) == lists.use(chain, is_full)


class Uses:
    """The uses of each key in plain Python, for as long as LFU remembers them."""

    def __init__(self, num_blocks: int) -> None:
        """Start with nothing used."""
        self.num_blocks = num_blocks
        self.cached: dict[int, list[int]] = {}
        self.young: dict[int, list[int]] = {}
        self.old: dict[int, list[int]] = {}
        self.num_young = 0
        self.now = 1

    def weight(self, key: int) -> float:
        """Return the present weight of a cached key's uses."""
        ages = self.now - np.array(self.cached[key])
        return float(np.exp2(-ages / (2 * self.num_blocks)).sum())

    def evict(self, key: int) -> None:
        """Remember a key that is evicted."""
        if self.num_young == self.num_blocks:
            self.young, self.old, self.num_young = {}, self.young, 0
        self.young[key] = self.cached.pop(key)
        self.num_young += 1

    def use(self, chain: Sequence[int]) -> None:
        """Note that the keys of a chain are used."""
        for key in chain:
            before = self.cached.get(key) or self.young.pop(key, None) or self.old.pop(key, [])
            self.cached[key] = [*before, self.now]
        self.now += len(chain)


@given(chains=st.lists(_CHAINS, max_size=60), num_blocks=st.integers(4, 12))
@example(
    chains=[[20], [30], [10], [10], [10], [20, 21, 22, 23], [10, 11, 12], [30], [10, 11, 12]],
    num_blocks=4,
)
def test_lfu_evicts_what_weighs_least(chains: list[list[int]], num_blocks: int) -> None:
    """An evicted block weighs less than twice as much as each block that stays: two steps of a half power of two.

    Weights are rounded down to such steps; a used block whose rank would fall by that keeps its rank.
    """
    cache, uses = Cache("lfu", num_blocks), Uses(num_blocks)

    for chain in chains:
        for victim in cache.use(chain):
            stays = [key for key in uses.cached if key not in chain and key != victim]
            least = min(map(uses.weight, stays), default=uses.weight(victim))
            assert uses.weight(victim) < 2 * least + 1e-6
            uses.evict(victim)
        uses.use(chain)


# What they are good at --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["arc", "s3-fifo", "lfu"])
def test_what_is_used_but_once_does_not_push_out_what_is_used_again(policy: str) -> None:
    """A long scan does not push out blocks that were used before, as it would under least recently used."""
    cache = Cache(policy, 40)
    for _ in range(3):
        cache.use(range(10))

    for key in range(100, 140):
        cache.use([key])

    assert set(range(10)) <= set(cache.block_of)


def test_block_that_comes_back_in_another_block_is_recognised() -> None:
    """A key that left a short while ago and comes back counts as used again, whichever block it is in."""
    cache = Cache("arc", 4)
    cache.use([1, 2])
    cache.use([3, 4])
    cache.use([5, 6])
    before = repr(cache.order)

    cache.use([1, 2])

    assert before == "<arc order of 4 + 0 evictable>"
    assert repr(cache.order) == "<arc order of 2 + 2 evictable>"
    assert repr(cache.policy) == "<ARC 2.0 of 4 for blocks used once>"


def test_adaptive_learns_when_blocks_come_back() -> None:
    """If keys used twice always come back and keys used once never do, the former stay, however old they are."""
    cache = Cache("adaptive", 64)
    fresh = iter(range(10_000, 100_000))

    def turn(root: int) -> int:
        for _ in range(6):
            cache.use([next(fresh) for _ in range(10)])
        num_hits = sum(key in cache.block_of for key in range(root, root + 8))
        cache.use(range(root, root + 8))
        return num_hits

    # Each document comes back after 136 other blocks, which is twice what the pool holds.
    first = sum(turn(root) for _ in range(2) for root in (0, 1_000))
    for _ in range(40):
        turn(0)
        turn(1_000)
    last = sum(turn(root) for _ in range(2) for root in (0, 1_000))

    assert first == 0
    assert last == 4 * 8
    assert repr(cache.policy).startswith("<Adaptive of ")


def test_adaptive_knows_nothing_at_first() -> None:
    """Before anything is learned, the blocks used longest ago leave first, however often they were used."""
    cache = Cache("adaptive", 4)
    cache.use([1, 2])
    cache.use([1, 2])
    cache.use([3, 4])

    assert cache.use([5, 6]) == [2, 1]


# Ghosts -----------------------------------------------------------------------------------------------------------


@given(
    batches=st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(0, 60), max_size=40).map(sorted)),
        max_size=30,
    ),
    num_entries=st.integers(0, 40),
)
def test_ghosts_are_forgotten_in_the_order_in_which_they_left(
    batches: list[tuple[bool, list[int]]], num_entries: int
) -> None:
    """A key that left is remembered until as many have left after it, and forgotten once twice as many have."""
    ghosts = Ghosts(num_entries, 3)
    left: list[int] = []
    last: dict[int, int] = {}

    for is_back, keys in batches:
        digests = np.array(keys, np.uint64) * np.uint64(16)
        if is_back:
            segments, values = ghosts.take(digests)
            for key, segment, value in zip(keys, segments.tolist(), values.tolist(), strict=True):
                age = len(left) - last.get(key, -100)
                assert segment == -1 or (segment, value) == (key % 3, last[key])
                assert segment >= 0 or age > max(1, num_entries)
                assert segment == -1 or age <= 2 * max(1, num_entries)
                last.pop(key, None)
        else:
            new = [key for key in keys if key not in last]
            values = np.arange(len(left), len(left) + len(new))
            segments = np.array([key % 3 for key in new], np.int8)
            ghosts.add(np.array(new, np.uint64) * np.uint64(16), segments, values)
            last |= dict(zip(new, values.tolist(), strict=True))
            left += new
    assert len(ghosts) <= 2 * max(1, num_entries)
    assert sum(map(ghosts.count, range(3))) <= len(ghosts)


def test_policies_show_life() -> None:
    """The text of each policy shows what it has learned."""
    keys = np.zeros(10, np.uint64)

    assert repr(ARC(10, keys)) == "<ARC 0.0 of 10 for blocks used once>"
    assert repr(S3FIFO(10, keys)) == "<S3FIFO 0 remembered>"
    assert repr(LFU(10, keys)) == "<LFU half-life 20 blocks>"
    assert repr(Adaptive(10, keys)) == "<Adaptive of 0 uses>"
    assert repr(Ghosts(4, 2)) == "<Ghosts 0 remembered>"


# The order --------------------------------------------------------------------------------------------------------


def an_order(policy: str = "arc", num_blocks: int = 100) -> SegmentedOrder:
    """Return an order over blocks with keys of their own."""
    order = make_order(policy, num_blocks, np.arange(num_blocks, dtype=np.uint64))
    assert isinstance(order, SegmentedOrder)
    return order


def test_blocks_that_are_put_back_leave_when_they_would_have() -> None:
    """A copy does not change a block's place, whatever is put back first."""
    order = an_order()
    order.add(as_ids(range(10)))

    order.set_aside(as_ids([0, 1, 2, 3]))
    order.put_back(as_ids([2, 3]))
    order.put_back(as_ids([0, 1]))

    assert list(order) == [*range(10)]


def test_blocks_whose_places_went_by_are_next() -> None:
    """Blocks that are put back when all colder and some hotter ones have left are the coldest, in their old order."""
    order = an_order()
    order.add(as_ids(range(10)))

    order.set_aside(as_ids([0, 1, 2, 3]))
    order.evicted(order.coldest(2, NOWHERE))
    order.put_back(as_ids([0, 1]))
    order.put_back(as_ids([3, 2]))

    assert list(order) == [0, 1, 2, 3, 6, 7, 8, 9]


def test_copy_is_no_use() -> None:
    """A copy is not a use; a hold is one, even if the block is copied while it is held."""
    order = an_order()
    order.add(as_ids([1, 2]))
    order.set_aside(as_ids([1, 2]))
    order.add(as_ids([1, 2]))
    before = repr(order)

    order.discard(as_ids([1]))
    order.add(as_ids([1]))
    order.set_aside(as_ids([2]))
    order.discard(as_ids([2]))
    order.add(as_ids([2]))

    assert before == "<arc order of 2 + 0 evictable>"
    assert repr(order) == "<arc order of 0 + 2 evictable>"


def test_hold_of_what_is_not_cached_is_no_use() -> None:
    """A hold of a block that is still being filled is not a use."""
    order = an_order()
    order.discard(as_ids([1]))
    order.cached(as_ids([1, 2]))
    order.add(as_ids([2, 1]))

    order.evicted(as_ids([3, 1]))

    assert repr(order) == "<arc order of 1 + 0 evictable>"
    assert order.coldest(0, NOWHERE).tolist() == []


def test_nothing_is_nothing() -> None:
    """Acts on no blocks change nothing."""
    order = an_order()

    for act in (order.add, order.put_back, order.discard, order.set_aside, order.evicted):
        act(NOWHERE)
    order.cached(NOWHERE)

    assert list(order) == []


def test_lfu_takes_from_a_segment_until_the_next_one_ranks_lower() -> None:
    """Whichever of three segments is second, the run ends where that segment's coldest block would leave."""
    rule = LFU(8, np.zeros(8, np.uint64))
    orders = [(1, 20, 40), (1, 40, 20), (40, 1, 20), (40, 20, 1), (20, 40, 1)]

    runs = [
        rule.choose((0, 1, 2), Tails(oldest=oldest, num_blocks=(1, 1, 1), now=60))
        for oldest in orders
    ]

    assert [(run.segment, run.before) for run in runs] == [
        (0, 28), (0, 36), (1, 28), (2, 12), (2, 4)
    ]  # fmt: skip


@given(
    num_uses=st.integers(1, 30),
    others=st.lists(st.integers(0, 60), min_size=1, max_size=3),
)
@example(num_uses=12, others=[40])
def test_lfu_ranks_a_block_no_lower_for_a_use(num_uses: int, others: list[int]) -> None:
    """A parent that is used once more after some time still leaves after its child."""
    order = an_order("lfu")
    for _ in range(num_uses):
        order.discard(as_ids([1, 2]))
        order.add(as_ids([2, 1]))

    for number in others:
        passing = as_ids(range(10, 10 + number))
        order.add(passing)
        order.evicted(passing)
        order.discard(as_ids([1]))
        order.add(as_ids([1]))

    assert list(order) == [2, 1]
