"""Own the order of blocks of several tenants and classes: low before normal before high, in each the coldest first.

There is one `LeafFirstLRU` for each tenant and class that has blocks, made when the first comes. A block's class is
the highest of the leases that had it since it was taken into use; where none had it, it is normal. A high class may be
kept for a time only, from the moment at which the block was let go of; then the block takes its place among the normal
ones, by that moment.

A chain is let go of as a whole, and whoever has a block has what it hangs on, so a parent is never of a lower class
than its children, nor in it for a shorter time. So leaves still leave first.
"""

from collections.abc import Iterator
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.lru import LeafFirstLRU, ring_numbers

Ids = NDArray[np.intp]

LOW: Final = 0
NORMAL: Final = 1
HIGH: Final = 2
_NUM_CLASSES: Final = 3
_UNSET: Final = -1
"""The class of a block that no lease has let go of yet."""


class ClassedLRU:
    """Evict what is of the lowest class, and of that what was let go of longest ago; of one tenant at a time."""

    def __init__(self, num_blocks: int, owner: NDArray[np.int32]) -> None:
        """Start empty; `owner` has the number of each block's tenant, and is kept up to date by others."""
        self.now = 0.0
        """Monotonic seconds; set before blocks are added or looked for."""
        self._owner = owner
        self._place: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._rings: list[LeafFirstLRU] = []
        self._ring_of: dict[int, int] = {}
        """The number of the ring of a tenant's number and a class, together as one label."""
        self._classes: _Classes | None = None
        self._num_blocks = 0

    def __len__(self) -> int:
        """Count the evictable blocks."""
        return self._num_blocks

    def __contains__(self, block: int) -> bool:
        """Tell whether a block is evictable."""
        return bool(self._place[block])

    def __iter__(self) -> Iterator[int]:
        """Go through the evictable blocks, class by class, the coldest of each tenant first."""
        for label in self._labels():
            yield from self._rings[self._ring_of[label]]

    def __repr__(self) -> str:
        """Show how many blocks are evictable."""
        return f"<ClassedLRU {len(self)} evictable in {len(self._rings)} rings>"

    @property
    def has_classes(self) -> bool:
        """Whether any block is of another class than the normal one."""
        return self._classes is not None

    def holds(self, blocks: Ids) -> NDArray[np.bool_]:
        """Tell of each block whether it is evictable."""
        is_there: NDArray[np.bool_] = self._place[blocks] != 0
        return is_there

    def add(self, blocks: Ids) -> None:
        """Add absent blocks as the hottest ones of their tenants and classes, in the given order."""
        if self._classes is not None:
            self._classes.since[blocks] = self.now
            self._classes.let_go(blocks)
        for label, own in self._parted(blocks):
            self._ring(label).add(own)
        self._num_blocks += len(blocks)

    def add_coldest(self, blocks: Ids) -> None:
        """Put absent blocks back at the cold ends, the first given one the coldest."""
        if self._classes is not None:
            self._classes.let_go(blocks)
        for label, own in self._parted(blocks):
            self._ring(label).add_coldest(own)
        self._num_blocks += len(blocks)

    def discard(self, blocks: Ids) -> None:
        """Take distinct blocks out; absent ones are ignored."""
        places = self._place[blocks]
        is_there = places != 0
        places = places[is_there]
        if not len(places):
            return
        if self._classes is not None:
            self._classes.take_up(blocks[is_there], self.now)
        counts = np.bincount(ring_numbers(places))
        for number in counts.nonzero()[0].tolist():
            self._rings[number].left(int(counts[number]))
        self._place[blocks] = 0
        self._num_blocks -= len(places)

    def coldest(self, count: int, protected: Ids) -> Ids:
        """Return up to `count` of the coldest blocks of the lowest classes that are not protected, of all tenants."""
        self._age()
        return self._coldest(self._labels(), count, protected)

    # Tenants ------------------------------------------------------------------------------------------------------

    def num_of(self, owner: int) -> int:
        """Count the evictable blocks of one tenant."""
        return sum(len(self._rings[self._ring_of[one]]) for one in self._labels_of(owner))

    def coldest_of(self, owner: int, count: int, protected: Ids) -> Ids:
        """Return up to `count` of one tenant's blocks that should leave next, none of them protected."""
        self._age()
        return self._coldest(self._labels_of(owner), count, protected)

    # Classes ------------------------------------------------------------------------------------------------------

    def begin_classes(self) -> None:
        """Go by classes from now on; all blocks that are in use are normal."""
        if self._classes is None:
            self._classes = _Classes(len(self._place), self.now)

    def forget(self, blocks: Ids) -> None:
        """Note that blocks come into use, so that what they were before counts no more."""
        if self._classes is not None:
            self._classes.rank[blocks] = _UNSET

    def raise_to(self, blocks: Ids, rank: int, retain_seconds: float) -> None:
        """Note that a lease of a class lets go of blocks; of several, the highest class and its longest time count."""
        assert self._classes is not None, "classes have begun before a lease has one"
        self._classes.raise_to(blocks, rank, retain_seconds)

    def _coldest(self, labels: list[int], count: int, protected: Ids) -> Ids:
        found: list[Ids] = []
        missing = count
        for label in labels:
            found.append(self._rings[self._ring_of[label]].coldest(missing, protected))
            missing -= len(found[-1])
            if not missing:
                break
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.intp)

    def _age(self) -> None:
        """Move high blocks whose time is over to where they belong among the normal ones of their tenant."""
        classes = self._classes
        if classes is None or self.now < classes.next_end:
            return
        classes.next_end = inf
        for label in [one for one in self._ring_of if one % _NUM_CLASSES == HIGH]:
            high = self._rings[self._ring_of[label]].blocks()
            is_over = classes.end[high] <= self.now
            next_end = float(classes.end[high[~is_over]].min(initial=inf))
            classes.next_end = min(classes.next_end, next_end)
            if is_over.any():
                over = high[is_over]
                classes.rank[over] = NORMAL
                self._merge(label - HIGH + NORMAL, over, classes.since)

    def _merge(self, label: int, blocks: Ids, since: NDArray[np.float64]) -> None:
        """Put blocks into a ring where they belong by the moment at which they were let go of."""
        ring = self._ring(label)
        there = ring.blocks()
        last = since[blocks].max()
        colder = there[: np.searchsorted(np.maximum.accumulate(since[there]), last, side="right")]
        # A child that was normal all along leaves before a parent that was let go of with it.
        merged = np.concatenate([colder, blocks])
        merged = merged[np.argsort(since[merged], kind="stable")]
        self.discard(merged)
        ring.add_coldest(merged)
        self._num_blocks += len(merged)

    def _parted(self, blocks: Ids) -> list[tuple[int, Ids]]:
        """Return the blocks by label, in the given order."""
        labels = self._owner[blocks] * _NUM_CLASSES
        labels += NORMAL if self._classes is None else self._classes.of(blocks)
        packed = labels.tobytes()
        if packed == packed[: labels.itemsize] * len(labels):
            return [(int(labels[0]), blocks)] if len(labels) else []
        return [(one, blocks[labels == one]) for one in sorted(set(labels.tolist()))]

    def _ring(self, label: int) -> LeafFirstLRU:
        number = self._ring_of.get(label)
        if number is None:
            number = self._ring_of[label] = len(self._rings)
            self._rings.append(LeafFirstLRU.part(self._place, number))
        return self._rings[number]

    def _labels(self) -> list[int]:
        """Return all labels, those of the lowest class first."""
        return sorted(self._ring_of, key=lambda one: (one % _NUM_CLASSES, one))

    def _labels_of(self, owner: int) -> list[int]:
        """Return the labels of one tenant that have a ring, the lowest class first."""
        first = owner * _NUM_CLASSES
        return [one for one in range(first, first + _NUM_CLASSES) if one in self._ring_of]


class _Classes:
    """The class of every block and how long it lasts; kept only where there is more than the normal one."""

    def __init__(self, num_blocks: int, now: float) -> None:
        self.rank: NDArray[np.int8] = np.full(num_blocks, NORMAL, np.int8)
        self.retain: NDArray[np.float64] = np.full(num_blocks, inf)
        """Seconds for which a high block stays one after it was let go of."""
        self.since: NDArray[np.float64] = np.full(num_blocks, now)
        """Monotonic seconds at which a block was let go of, or at which classes began."""
        self.end: NDArray[np.float64] = np.full(num_blocks, inf)
        """Monotonic seconds at which an evictable block that is high becomes normal."""
        self.next_end = inf

    def of(self, blocks: Ids) -> NDArray[np.int8]:
        """Return the classes of blocks."""
        ranks = self.rank[blocks]
        return np.where(ranks == _UNSET, np.int8(NORMAL), ranks)

    def take_up(self, blocks: Ids, now: float) -> None:
        """Note that evictable blocks are so no more; a class whose time is over does not come back."""
        self.rank[blocks[self.end[blocks] <= now]] = NORMAL
        self.end[blocks] = inf

    def let_go(self, blocks: Ids) -> None:
        """Note that nobody holds the blocks any more, since when has been written before."""
        high = blocks[self.rank[blocks] == HIGH]
        if len(high):
            # Whole seconds, so that blocks that become normal do so together.
            ends = np.ceil(self.since[high] + self.retain[high])
            self.end[high] = ends
            self.next_end = min(self.next_end, float(ends.min()))

    def raise_to(self, blocks: Ids, rank: int, retain_seconds: float) -> None:
        """Raise the classes of blocks, and how long they last."""
        ranks, before = self.rank[blocks], self.retain[blocks]
        longest = np.where(ranks == rank, np.maximum(before, retain_seconds), before)
        self.retain[blocks] = np.where(ranks < rank, retain_seconds, longest)
        self.rank[blocks] = np.maximum(ranks, np.int8(rank))
