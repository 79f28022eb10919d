"""Laws of every eviction policy, alone and divided by tenants: which blocks are named, and children before parents."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvleased.core.eviction import POLICIES, ClassedOrder, EvictionOrder, make_order
from kvleased.core.lease.leases import NOWHERE
from tests.unit.service.core.builders import as_ids

NUM_BLOCKS = 12
_ACTS = ("commit", "let go", "use", "set aside", "put back", "evict", "ask")


def an_order(policy: str, num_blocks: int, *, num_tenants: int = 0) -> EvictionOrder:
    """Return an order over blocks with keys of their own, divided among the tenants if there are any."""
    order = make_order(policy, num_blocks, np.arange(num_blocks, dtype=np.uint64) * np.uint64(7))
    if not num_tenants:
        return order
    return ClassedOrder(order, np.arange(num_blocks, dtype=np.int32) % num_tenants)


@dataclass
class Sets:
    """The sets of blocks that the caller of an order knows."""

    order: EvictionOrder
    absent: set[int]
    held: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    aside: set[int] = field(default_factory=set)

    def act(self, name: str, blocks: list[int]) -> None:
        """Do one act to those of the blocks that allow it."""
        if name == "commit":
            chosen = [one for one in blocks if one in self.absent]
            self.order.cached(as_ids(chosen))
            self._move(chosen, self.absent, self.held)
        elif name == "let go":
            chosen = [one for one in blocks if one in self.held]
            self.order.add(as_ids(chosen))
            self._move(chosen, self.held, self.idle)
        elif name == "use":
            self.order.discard(as_ids(blocks))
            for source in (self.idle, self.aside):
                self._move([one for one in blocks if one in source], source, self.held)
        elif name == "set aside":
            self.order.set_aside(as_ids(blocks))
            self._move([one for one in blocks if one in self.idle], self.idle, self.aside)
        elif name == "put back":
            chosen = [one for one in blocks if one in self.aside]
            self.order.put_back(as_ids(chosen))
            self._move(chosen, self.aside, self.idle)
        elif name == "evict":
            chosen = self.order.coldest(len(blocks), NOWHERE).tolist()
            self.order.evicted(as_ids(chosen))
            self._move(chosen, self.idle, self.absent)
        else:
            self._ask(len(blocks), blocks[::2])

    def _ask(self, count: int, protected: list[int]) -> None:
        found = self.order.coldest(count, as_ids(protected)).tolist()
        free = self.idle - set(protected)
        assert len(set(found)) == len(found) == min(count, len(free))
        assert set(found) <= free
        assert found == self.order.coldest(count, as_ids(protected)).tolist()

    def _move(self, blocks: list[int], source: set[int], target: set[int]) -> None:
        source.difference_update(blocks)
        target.update(blocks)

    def check(self) -> None:
        """Compare the order's answers with the acts so far."""
        listed = list(self.order)
        assert sorted(listed) == sorted(self.idle)
        assert len(self.order) == len(self.idle)
        every = range(NUM_BLOCKS)
        assert self.order.holds(as_ids(every)).tolist() == [one in self.idle for one in every]
        assert [one in self.order for one in every] == [one in self.idle for one in every]


def _acts() -> st.SearchStrategy[list[tuple[str, list[int]]]]:
    blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS)
    return st.lists(st.tuples(st.sampled_from(_ACTS), blocks), max_size=40)


@pytest.mark.parametrize("num_tenants", [0, 3], ids=["whole", "parted"])
@pytest.mark.parametrize("policy", POLICIES)
@given(acts=_acts())
def test_order_has_what_nobody_holds(
    policy: str, num_tenants: int, acts: list[tuple[str, list[int]]]
) -> None:
    """However blocks come, go, are used and copied, the idle unprotected ones are named, each once, and no others."""
    order = an_order(policy, NUM_BLOCKS, num_tenants=num_tenants)
    sets = Sets(order, set(range(NUM_BLOCKS)))

    for name, blocks in acts:
        sets.act(name, blocks)
        sets.check()


# Leaves first -----------------------------------------------------------------------------------------------------

_PATHS = tuple(
    tuple(f"{text[: end + 1]}" for end in range(len(text)))
    for text in ("abcd", "abce", "abf", "ag", "hij", "hikl", "m")
)
"""Documents with common beginnings; a block is named by its text and all text before it."""


class Tree:
    """A tiny cache of documents whose leases hold their blocks for a while."""

    def __init__(self, policy: str, num_blocks: int, *, num_tenants: int) -> None:
        """Start with all blocks free."""
        self.keys = np.zeros(num_blocks, np.uint64)
        order = make_order(policy, num_blocks, self.keys)
        if num_tenants:
            order = ClassedOrder(order, np.zeros(num_blocks, np.int32))
        self.order = order
        self.block_of: dict[str, int] = {}
        self.free = list(range(num_blocks))
        self.holds = [0] * num_blocks
        self.leases: list[list[int]] = []

    def begin(self, path: tuple[str, ...], num_at_once: int) -> None:
        """Lease a document, and commit its missing blocks in batches, if there is room."""
        hits = [self.block_of[name] for name in path if name in self.block_of]
        missing = path[len(hits) :]
        if not self._make_room(len(missing), hits):
            return
        if hits:
            self._use(hits)
        for begin in range(0, len(missing), num_at_once):
            names = missing[begin : begin + num_at_once]
            blocks = [self.free.pop() for _ in names]
            self.keys[blocks] = [hash_of(name) for name in names]
            self.block_of |= dict(zip(names, blocks, strict=True))
            self.order.cached(as_ids(blocks))
            for block in blocks:
                self.holds[block] += 1
            hits = hits + blocks
        self.leases.append(hits)

    def end(self, at: int) -> None:
        """End a lease, so that blocks which nobody holds become evictable, tail first."""
        blocks = self.leases.pop(at % len(self.leases))
        for block in blocks:
            self.holds[block] -= 1
        idle = [block for block in blocks if not self.holds[block]]
        self.order.add(as_ids(idle[::-1]))

    def copy(self, count: int) -> None:
        """Take every third block, and the next ones to leave, out for copies, and put them back."""
        order = self.order.coldest(len(self.order), NOWHERE)
        for copied in (order[::3], order[:count]):
            self.order.set_aside(copied)
            half = len(copied) // 2
            self.order.put_back(copied[half:])
            self.order.put_back(copied[:half])
        assert self.order.coldest(len(order), NOWHERE).tolist() == order.tolist()

    def _use(self, blocks: list[int]) -> None:
        self.order.discard(as_ids(blocks))
        for block in blocks:
            self.holds[block] += 1

    def _make_room(self, count: int, hits: list[int]) -> bool:
        deficit = max(0, count - len(self.free))
        victims = self.order.coldest(deficit, as_ids(hits)).tolist()
        name_of = {block: name for name, block in self.block_of.items()}
        for block in victims:
            del self.block_of[name_of[block]]
            orphans = [one for one in self.block_of if one.startswith(name_of[block])]
            assert not orphans, f"{name_of[block]} left before {orphans}"
        self.order.evicted(as_ids(victims))
        self.free += victims
        return len(victims) == deficit


def hash_of(name: str) -> int:
    """Return the digest of a block's key; some digests share their last bits."""
    return int.from_bytes(name.encode(), "little") * 4


@pytest.mark.parametrize("num_tenants", [0, 1], ids=["whole", "parted"])
@pytest.mark.parametrize("policy", POLICIES)
@given(
    num_blocks=st.integers(4, 14),
    acts=st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.sampled_from(_PATHS), st.integers(1, 4)),
            st.tuples(st.just("end"), st.integers(0, 9), st.none()),
            st.tuples(st.just("copy"), st.integers(1, 5), st.none()),
        ),
        max_size=80,
    ),
)
def test_leaves_leave_first(
    policy: str, num_tenants: int, num_blocks: int, acts: list[tuple[str, object, object]]
) -> None:
    """No block leaves before the blocks behind it, whatever was used how often or came back from where."""
    tree = Tree(policy, num_blocks, num_tenants=num_tenants)

    for name, what, more in acts:
        if name == "begin":
            assert isinstance(what, tuple)
            assert isinstance(more, int)
            tree.begin(what, more)
        elif name == "copy":
            assert isinstance(what, int)
            tree.copy(what)
        elif tree.leases:
            assert isinstance(what, int)
            tree.end(what)
