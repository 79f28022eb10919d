"""Own the order of blocks of several tenants and classes: lower classes leave first, each in the policy's order.

A class is a number from `LOW` to `HIGH`. The order has a part for each tenant and class that has blocks, made for the
first of them. A policy learns from all parts. A block's class is the highest of the leases that had it since it was
taken into use or found no more, and at least normal if it was cached before any lease had it. A class above normal may
last for a limited time only: the longest that any such lease gave, counted from when the block was let go of. After
that time, the block takes its place among the normal blocks, by when it was let go of.

A chain is let go of as a whole, and whoever has a block also has its parents. So a parent is never of a lower class
than its children, nor above normal for a shorter time, and it still leaves after them.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.lru import LeafFirstLRU
from kvleased.core.eviction.order import EvictionOrder
from kvleased.core.eviction.segments import Columns, Part, SegmentedOrder, tell_rings
from kvleased.core.ids import Ids

LOW: Final = 0
NORMAL: Final = 50
HIGH: Final = 100
_NUM_CLASSES: Final = HIGH + 1
_UNSET: Final = -1
"""The class of a block that no lease has let go of yet."""
_NOWHERE: Final = np.empty(0, np.intp)


class ClassedOrder:
    """Evict blocks of the lowest class first, in the order that a policy says, for one tenant at a time or for all."""

    def __init__(self, whole: EvictionOrder, owner: NDArray[np.int32]) -> None:
        """Take over the blocks and the policy of another order.

        `owner` has the number of each block's tenant; the caller keeps it up to date.
        """
        self.now = 0.0
        """Monotonic seconds; set before blocks are added or looked for."""
        self._owner = owner
        self.columns: Columns | None = None
        if isinstance(whole, SegmentedOrder | ClassedOrder):
            self.columns = whole.columns
        """What the policy remembers of each block; None for the default policy, which remembers nothing."""
        self._place: NDArray[np.int64] = np.zeros(len(owner), np.int64)
        self._rings: list[LeafFirstLRU] = []
        """All rings by number; a part has one ring, or one for each segment of its policy."""
        self._parts: dict[int, LeafFirstLRU | Part] = {}
        """By label: a tenant's number and a class in one number."""
        self._labels_of: dict[int, list[int]] = {}
        """The labels of each tenant's parts, lowest class first."""
        self._classes: _Classes | None = None
        self._num_blocks = 0
        aside = whole.put_all_back()
        blocks = whole.coldest(len(whole), np.empty(0, np.intp))
        if self.columns is not None:
            self._place = self.columns.place
            self._place[blocks] = 0
        self._add_coldest(blocks)
        self.set_aside(aside)

    def __len__(self) -> int:
        """Count the evictable blocks."""
        return self._num_blocks

    def __contains__(self, block: int) -> bool:
        """Tell whether a block is evictable."""
        return bool(self._place[block] > 0)

    def __iter__(self) -> Iterator[int]:
        """Go through the evictable blocks, class by class, the coldest of each tenant first."""
        for label in self._labels():
            yield from self._parts[label].blocks().tolist()

    def __repr__(self) -> str:
        """Show how many blocks are evictable."""
        return f"<ClassedOrder {len(self)} evictable in {len(self._parts)} parts>"

    @property
    def has_classes(self) -> bool:
        """Whether any block is of another class than the normal one."""
        return self._classes is not None

    def holds(self, blocks: Ids) -> NDArray[np.bool_]:
        """Tell for each block whether it is evictable."""
        is_there: NDArray[np.bool_] = self._place[blocks] > 0
        return is_there

    def cached(self, blocks: Ids) -> None:
        """Note that blocks are newly findable under their keys."""
        if self.columns is not None:
            self.columns.cached(blocks)

    def add(self, blocks: Ids) -> None:
        """Add absent blocks as the hottest ones of their tenants and classes, in the given order."""
        if self.columns is not None and len(blocks):
            self.columns.let_go(blocks)
        if self._classes is not None:
            self._classes.since[blocks] = self.now
            self._classes.let_go(blocks)
        for label, own in self._parted(blocks):
            self._part(label).add(own)
        self._num_blocks += len(blocks)

    def _add_coldest(self, blocks: Ids) -> None:
        """Add absent blocks at the cold ends of their parts, the first given one as the coldest."""
        for label, own in self._parted(blocks):
            self._part(label).add_coldest(own)
        self._num_blocks += len(blocks)

    def discard(self, blocks: Ids) -> None:
        """Take distinct blocks out because they are hit; absent ones count as hit, too."""
        if self.columns is not None:
            self.columns.used(blocks)
        self._drop(blocks)

    def set_aside(self, blocks: Ids) -> None:
        """Take distinct blocks out to be copied; absent ones are ignored."""
        self._age()
        places = self._place[blocks]
        self._tell(places[places > 0])
        self._place[blocks] = -np.abs(places)

    def put_back(self, blocks: Ids) -> None:
        """Put blocks that were set aside back at their places."""
        for label, own in self._parted(blocks):
            self._part(label).put_back(own)
        self._num_blocks += len(blocks)

    def put_all_back(self) -> Ids:
        """Put all blocks that were set aside back, to set them aside again later; return them."""
        aside = np.flatnonzero(self._place < 0)
        self.put_back(aside)
        return aside

    def _drop(self, blocks: Ids) -> None:
        places = self._place[blocks]
        is_placed = places != 0
        if self._classes is not None:
            self._classes.take_up(blocks[is_placed], self.now)
        self._tell(places[places > 0])
        self._place[blocks] = 0

    def _tell(self, places: NDArray[np.int64]) -> None:
        """Tell the parts that blocks at these places leave them."""
        tell_rings(self._rings, places)
        self._num_blocks -= len(places)

    def evicted(self, blocks: Ids) -> None:
        """Take out distinct blocks that leave for good, so that their classes no longer count."""
        self._drop(blocks)
        self.forget(blocks)
        if self.columns is not None:
            self.columns.evicted(blocks)

    def coldest(self, count: int, protected: Ids) -> Ids:
        """Return up to `count` blocks of all tenants, the coldest of the lowest classes, none of them protected."""
        self._age()
        return self._coldest(self._labels(), count, protected)

    # Tenants ------------------------------------------------------------------------------------------------------

    def num_of(self, owner: int) -> int:
        """Count the evictable blocks of one tenant."""
        return sum(len(self._parts[one]) for one in self._labels_of.get(owner, ()))

    def coldest_of(self, owner: int, count: int, protected: Ids) -> Ids:
        """Return up to `count` of one tenant's blocks that should leave next, none of them protected."""
        self._age()
        return self._coldest(self._labels_of.get(owner, ()), count, protected)

    # Classes ------------------------------------------------------------------------------------------------------

    def begin_classes(self) -> None:
        """Heed classes from now on; all blocks that are in use begin as normal."""
        if self._classes is None:
            self._classes = _Classes(len(self._place), self.now)

    def forget(self, blocks: Ids) -> None:
        """Note that blocks come into use, so that their earlier classes no longer count."""
        if self._classes is not None:
            self._classes.rank[blocks] = _UNSET

    def raise_to(self, blocks: Ids, rank: int, retain_seconds: float) -> None:
        """Note that a lease of class `rank` lets go of blocks; of several leases, the highest class and time count."""
        assert self._classes is not None, "classes have begun before a lease has one"
        self._classes.raise_to(blocks, rank, retain_seconds)

    def _coldest(self, labels: Sequence[int], count: int, protected: Ids) -> Ids:
        found: list[Ids] = []
        missing = count
        for label in labels:
            part = self._parts[label]
            if not len(part):
                continue
            found.append(part.coldest(missing, protected))
            missing -= len(found[-1])
            if not missing:
                break
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.intp)

    def _age(self) -> None:
        """Move blocks above normal whose time is over to their places among their tenant's normal blocks."""
        classes = self._classes
        if classes is None or self.now < classes.next_end:
            return
        classes.next_end = inf
        aside = self.put_all_back()
        for owner, labels in self._labels_of.items():
            normal = owner * _NUM_CLASSES + NORMAL
            above = labels[bisect_right(labels, normal) :]
            over = [classes.over(self._parts[one].blocks(), self.now) for one in above]
            fallen = np.concatenate([*over, _NOWHERE])
            if len(fallen):
                classes.rank[fallen] = NORMAL
                self._merge(normal, fallen, classes.since)
        self.set_aside(aside)

    def _merge(self, label: int, blocks: Ids, since: NDArray[np.float64]) -> None:
        """Put blocks into a part, in the order of when they were let go of; those of lower classes are given first."""
        part = self._part(label)
        if isinstance(part, Part):
            self._drop(blocks)
            part.add_coldest(blocks)
            self._num_blocks += len(blocks)
            return
        there = part.blocks()
        last = since[blocks].max()
        colder = there[: np.searchsorted(np.maximum.accumulate(since[there]), last, side="right")]
        # A child that was always of a lower class leaves before a parent that was let go of together with it.
        merged = np.concatenate([colder, blocks])
        merged = merged[np.argsort(since[merged], kind="stable")]
        self._drop(merged)
        part.add_coldest(merged)
        self._num_blocks += len(merged)

    def _parted(self, blocks: Ids) -> list[tuple[int, Ids]]:
        """Return the blocks of each label, in the given order."""
        labels = self._owner[blocks] * _NUM_CLASSES
        labels += NORMAL if self._classes is None else self._classes.of(blocks)
        packed = labels.tobytes()
        if packed == packed[: labels.itemsize] * len(labels):
            return [(int(labels[0]), blocks)] if len(labels) else []
        order = labels.argsort(kind="stable")
        in_order = labels[order]
        firsts = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
        return [(int(in_order[0]), blocks[order[: firsts[0]]])] + [
            (int(in_order[first]), blocks[order[first:end]])
            for first, end in zip(firsts, [*firsts[1:], len(blocks)], strict=True)
        ]

    def _part(self, label: int) -> LeafFirstLRU | Part:
        part = self._parts.get(label)
        if part is None:
            number = len(self._rings)
            if self.columns is None:
                part = LeafFirstLRU.part(self._place, number)
                self._rings.append(part)
            else:
                part = Part(self.columns, number)
                self._rings += part.rings
            self._parts[label] = part
            insort(self._labels_of.setdefault(label // _NUM_CLASSES, []), label)
        return part

    def _labels(self) -> list[int]:
        """Return all labels, those of the lowest class first."""
        return sorted(self._parts, key=lambda one: (one % _NUM_CLASSES, one))


class _Classes:
    """The class of every block and how long it lasts; kept only once a class other than normal was used."""

    def __init__(self, num_blocks: int, now: float) -> None:
        self.rank: NDArray[np.int8] = np.full(num_blocks, NORMAL, np.int8)
        self.retain: NDArray[np.float64] = np.full(num_blocks, inf)
        """Seconds for which a block above normal keeps its class after it was let go of; meaningless for others."""
        self.since: NDArray[np.float64] = np.full(num_blocks, now)
        """Monotonic seconds at which a block was let go of, or at which classes began."""
        self.end: NDArray[np.float64] = np.full(num_blocks, inf)
        """Monotonic seconds at which an evictable block above normal becomes normal."""
        self.next_end = inf

    def of(self, blocks: Ids) -> NDArray[np.int8]:
        """Return the classes of blocks."""
        ranks = self.rank[blocks]
        return np.where(ranks == _UNSET, np.int8(NORMAL), ranks)

    def take_up(self, blocks: Ids, now: float) -> None:
        """Note that blocks are no longer evictable; a block whose time above normal is over becomes normal."""
        self.rank[blocks[self.end[blocks] <= now]] = NORMAL
        self.end[blocks] = inf

    def over(self, blocks: Ids, now: float) -> Ids:
        """Return those of some evictable blocks whose time is over, and note when the next one's will be."""
        ends = self.end[blocks]
        is_over = ends <= now
        self.next_end = min(self.next_end, float(ends[~is_over].min(initial=inf)))
        return blocks[is_over]

    def let_go(self, blocks: Ids) -> None:
        """Note that nobody holds the blocks any more; `since` must already be written."""
        ranks = self.rank[blocks]
        # From here on they are found as normal ones, and no low lease that finds some of a chain lowers those alone.
        self.rank[blocks[ranks == _UNSET]] = NORMAL
        high = blocks[ranks > NORMAL]
        if len(high):
            # Whole seconds, so that blocks that become normal do so together.
            ends = np.ceil(self.since[high] + self.retain[high])
            self.end[high] = ends
            self.next_end = min(self.next_end, float(ends.min()))

    def raise_to(self, blocks: Ids, rank: int, retain_seconds: float) -> None:
        """Raise the classes of blocks, and how long they stay above normal."""
        ranks = self.rank[blocks]
        if rank > NORMAL:
            longest = np.maximum(self.retain[blocks], retain_seconds)
            self.retain[blocks] = np.where(ranks > NORMAL, longest, retain_seconds)
        self.rank[blocks] = np.maximum(ranks, np.int8(rank))
