"""Own orders that keep blocks in segments, each by last use; a `SegmentPolicy` decides which one gives the next victim.

What a policy remembers of every block is in columns. Several parts, one for each tenant and class, may share the
columns and divide the blocks among them. So the policy learns from all blocks of the pool, and chooses in each part.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.lru import LeafFirstLRU, ring_numbers
from kvleased.core.eviction.segment_policy import NEVER, SegmentPolicy, Segments, Stamps, Tails
from kvleased.core.ids import Ids

_NEW: Final = -1
"""The segment of a block that is not cached, as far as the policy was told."""
_NOWHERE: Final = np.empty(0, np.intp)
_NO_TAIL: Final = (0, 0, NEVER)


class Columns:
    """What a policy remembers of each block, held or not."""

    def __init__(self, num_blocks: int, policy: SegmentPolicy) -> None:
        """Start with no block cached."""
        self.policy = policy
        self.place: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        """By block: its place in the ring of its segment; 0 if it is not evictable, negative if it was set aside."""
        self.segment: Segments = np.full(num_blocks, _NEW, np.int8)
        self.stamp: Stamps = np.zeros(num_blocks, np.int64)
        """By block: when it was last let go of, in a time that counts the blocks let go of."""
        self.now = 1

    def cached(self, blocks: Ids) -> None:
        """Put newly cached blocks into their segments."""
        self.segment[blocks] = self.policy.came(blocks, self.now)

    def know(self, blocks: Ids) -> None:
        """Treat those of the blocks that the policy was not told of as newly cached."""
        segments = self.segment[blocks]
        if segments.min(initial=0) == _NEW:
            self.cached(blocks[segments == _NEW])

    def let_go(self, blocks: Ids) -> None:
        """Note that nobody holds the blocks any more; the first of them counts as let go of first."""
        self.know(blocks)
        self.stamp[blocks] = np.arange(self.now, self.now + len(blocks))
        self.now += len(blocks)

    def used(self, blocks: Ids) -> None:
        """Note that blocks are hit, including blocks that are held already."""
        segments = self.segment[blocks]
        if segments.min(initial=0) == _NEW:
            is_known = segments != _NEW
            blocks, segments = blocks[is_known], segments[is_known]
        is_idle = self.place[blocks] != 0
        packed = is_idle.tobytes()
        if b"\0" not in packed:
            self.segment[blocks] = self.policy.used(blocks, segments, self.stamp[blocks], self.now)
            return
        held = blocks[~is_idle]
        self.segment[held] = self.policy.held(held, segments[~is_idle], self.now)
        if b"\1" in packed:
            idle = blocks[is_idle]
            self.segment[idle] = self.policy.used(
                idle, segments[is_idle], self.stamp[idle], self.now
            )

    def evicted(self, blocks: Ids) -> None:
        """Hand blocks over to the policy's memory of evicted blocks."""
        segments = self.segment[blocks]
        if segments.min(initial=0) == _NEW:
            is_known = segments != _NEW
            blocks, segments = blocks[is_known], segments[is_known]
        self.policy.left(blocks, segments, self.stamp[blocks])
        self.segment[blocks] = _NEW


class Part:
    """The evictable blocks of one tenant and class, or all of them, in a ring for each segment."""

    def __init__(self, columns: Columns, number: int) -> None:
        """Start empty; the rings are numbered from `number` on, as many as there are segments."""
        self._columns = columns
        self.policy = columns.policy
        self._place = columns.place
        self._stamp = columns.stamp
        # One number is read from a view of memory in a third of the time that it takes from an array.
        self._place_of, self._stamp_of = columns.place.data, columns.stamp.data
        numbers = range(number, number + columns.policy.num_segments)
        self.rings = [LeafFirstLRU.part(columns.place, one) for one in numbers]
        self._tails: list[tuple[int, int, int]] = [_NO_TAIL] * len(self.rings)
        """By segment: the coldest block as it was found last, its place and its stamp."""

    def __len__(self) -> int:
        """Count the blocks."""
        return sum(map(len, self.rings))

    @property
    def now(self) -> int:
        """The stamp of the next block that is let go of."""
        return self._columns.now

    def blocks(self) -> Ids:
        """Return the blocks, the first to leave first."""
        return self.coldest(len(self), _NOWHERE)

    def add(self, blocks: Ids) -> None:
        """Add blocks that have been let go of to their segments as the hottest ones, in the given order."""
        for segment, own in self._parted(blocks):
            self.rings[segment].add(own)
            self.policy.rests(segment, len(own), self._columns.now)

    def add_coldest(self, blocks: Ids) -> None:
        """Add blocks at their places by stamp, which are nearly always at the cold end."""
        self._columns.know(blocks)
        for segment, own in self._parted(blocks):
            ring, newest = self.rings[segment], int(self._stamp[own].max())
            colder = _NOWHERE
            if self.oldest(segment) <= newest:
                there = ring.blocks()
                colder = there[: np.searchsorted(self._stamp[there], newest, side="right")]
                ring.discard(colder)
            merged = np.concatenate([own, colder])
            ring.add_coldest(merged[np.argsort(self._stamp[merged], kind="stable")])
            self._tails[segment] = _NO_TAIL

    def put_back(self, blocks: Ids) -> None:
        """Put blocks that were set aside back at their places."""
        for segment, own in self._parted(blocks):
            gone_by = self.rings[segment].restore(own)
            self._tails[segment] = _NO_TAIL
            if len(gone_by):
                self.add_coldest(gone_by)

    def coldest(self, count: int, protected: Ids) -> Ids:
        """Return up to `count` of the blocks that should leave next, none of them protected."""
        if count <= 0:
            return _NOWHERE
        if not len(protected):
            return _Search(self, count).found()
        places = self._place[protected]
        self._place[protected] = 0
        found = _Search(self, count, is_hiding=True).found()
        self._place[protected] = places
        return found

    def oldest(self, segment: int) -> int:
        """Return the stamp of the coldest block of a segment."""
        return self._tail(segment)[2]

    def _tail(self, segment: int) -> tuple[int, int, int]:
        if not len(self.rings[segment]):
            return _NO_TAIL
        tail = self._tails[segment]
        # A block may get the same place again, but never the same stamp.
        if self._place_of[tail[0]] != tail[1] or self._stamp_of[tail[0]] != tail[2]:
            block = int(self.rings[segment].coldest(1, _NOWHERE)[0])
            tail = self._tails[segment] = block, self._place_of[block], self._stamp_of[block]
        return tail

    def run(self, segment: int, count: int, *, is_hiding: bool) -> tuple[Ids, list[int]]:
        """Return up to `count` of the coldest blocks of a segment, and their stamps."""
        ring = self.rings[segment]
        blocks = ring.peek(count) if is_hiding else ring.coldest(count, _NOWHERE)
        return blocks, self._stamp[blocks].tolist()

    def _parted(self, blocks: Ids) -> list[tuple[int, Ids]]:
        """Return the blocks of each segment, in the given order."""
        segments = self._columns.segment[blocks]
        packed = segments.tobytes()
        present = set(packed)
        if len(present) == 1:
            return [(packed[0], blocks)]
        return [(one, blocks[segments == one]) for one in present]


class _Segment(NamedTuple):
    """The coldest blocks of a segment: at least as many as could leave, if it has so many."""

    blocks: Ids
    stamps: list[int]


class _Search:
    """The search for the next victims of a part."""

    def __init__(self, part: Part, count: int, *, is_hiding: bool = False) -> None:
        self._part = part
        self._missing = count
        self._is_hiding = is_hiding
        self._loaded: dict[int, _Segment] = {}
        self._begin = [0] * len(part.rings)
        oldest = [self._first_stamp(segment) for segment in range(len(part.rings))]
        self._oldest, self._counts = oldest, [*map(len, part.rings)]
        self._tails = Tails(oldest, self._counts, part.now)

    def found(self) -> Ids:
        """Return the victims."""
        found: list[Ids] = []
        while self._missing:
            choices = self._choices()
            if not choices:
                break
            found.append(self._take(*self._run(choices)))
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else _NOWHERE

    def _choices(self) -> list[int]:
        """Return the segments that may give a victim: those whose coldest block is colder than all lower segments'."""
        choices, lowest = [], NEVER
        for segment, oldest in enumerate(self._oldest):
            if oldest < lowest:
                choices.append(segment)
                lowest = oldest
        return choices

    def _run(self, choices: list[int]) -> tuple[int, int, int]:
        if len(choices) == 1:
            segment, count, before = choices[0], NEVER, NEVER
        else:
            segment, count, before = self._part.policy.choose(choices, self._tails)
        # As soon as another segment has the colder block, the choices may be others.
        own = self._oldest[segment]
        for oldest in self._oldest:
            if own < oldest < before:
                before = oldest
        return segment, count, before

    def _take(self, segment: int, count: int, before: int) -> Ids:
        blocks, stamps = self._load(segment)
        begin = self._begin[segment]
        end = min(begin + min(count, self._missing), bisect_left(stamps, before, begin))
        assert end > begin, "a policy chose nothing"
        self._begin[segment] = end
        self._oldest[segment] = stamps[end] if end < len(stamps) else NEVER
        self._counts[segment] -= end - begin
        self._missing -= end - begin
        return blocks[begin:end]

    def _first_stamp(self, segment: int) -> int:
        if not len(self._part.rings[segment]):
            return NEVER
        if not self._is_hiding:
            return self._part.oldest(segment)
        stamps = self._load(segment).stamps
        return stamps[0] if stamps else NEVER

    def _load(self, segment: int) -> _Segment:
        """Return one block more than could leave, so that the coldest block that stays is known."""
        if segment not in self._loaded:
            loaded = self._part.run(segment, self._missing + 1, is_hiding=self._is_hiding)
            self._loaded[segment] = _Segment(*loaded)
        return self._loaded[segment]


class SegmentedOrder:
    """Evict in the order of a policy that keeps its blocks in segments."""

    def __init__(self, num_blocks: int, policy: SegmentPolicy) -> None:
        """Start empty; blocks are numbered from 0 to `num_blocks` - 1."""
        self.columns = Columns(num_blocks, policy)
        self._part = Part(self.columns, 0)

    def __len__(self) -> int:
        """Count the evictable blocks."""
        return len(self._part)

    def __contains__(self, block: int) -> bool:
        """Tell whether a block is evictable."""
        return bool(self.columns.place[block] > 0)

    def __iter__(self) -> Iterator[int]:
        """Go through the evictable blocks, the first to leave first."""
        return iter(self._part.blocks().tolist())

    def __repr__(self) -> str:
        """Show how many blocks are evictable, by segment."""
        counts = " + ".join(str(len(ring)) for ring in self._part.rings)
        return f"<{self.columns.policy.name} order of {counts} evictable>"

    def holds(self, blocks: Ids) -> NDArray[np.bool_]:
        """Tell for each block whether it is evictable."""
        is_there: NDArray[np.bool_] = self.columns.place[blocks] > 0
        return is_there

    def cached(self, blocks: Ids) -> None:
        """Note that blocks are newly findable under their keys."""
        self.columns.cached(blocks)

    def add(self, blocks: Ids) -> None:
        """Add absent blocks as the hottest ones of their segments, in the given order."""
        if len(blocks):
            self.columns.let_go(blocks)
            self._part.add(blocks)

    def put_back(self, blocks: Ids) -> None:
        """Put blocks that were set aside back at their places."""
        if len(blocks):
            self._part.put_back(blocks)

    def put_all_back(self) -> Ids:
        """Put all blocks that were set aside back, to set them aside again later; return them."""
        aside = np.flatnonzero(self.columns.place < 0)
        self.put_back(aside)
        return aside

    def discard(self, blocks: Ids) -> None:
        """Take distinct blocks out because they are hit; absent ones count as hit, too."""
        self._drop(blocks, is_hit=True)

    def set_aside(self, blocks: Ids) -> None:
        """Take distinct blocks out to be copied; absent ones are ignored."""
        places = self.columns.place[blocks]
        tell_rings(self._part.rings, places[places > 0])
        self.columns.place[blocks] = -np.abs(places)

    def evicted(self, blocks: Ids) -> None:
        """Take out distinct blocks that leave for good, and remember them."""
        self._drop(blocks, is_hit=False)
        self.columns.evicted(blocks)

    def coldest(self, count: int, protected: Ids) -> Ids:
        """Return up to `count` of the blocks that should leave next, none of them protected."""
        return self._part.coldest(count, protected)

    def _drop(self, blocks: Ids, *, is_hit: bool) -> None:
        places = self.columns.place[blocks]
        if is_hit:
            self.columns.used(blocks)
        tell_rings(self._part.rings, places[places > 0])
        self.columns.place[blocks] = 0


def tell_rings(rings: list[LeafFirstLRU], places: NDArray[np.int64]) -> None:
    """Tell rings that blocks at these places leave them."""
    if not len(places):
        return
    counts = np.bincount(ring_numbers(places))
    for number in counts.nonzero()[0].tolist():
        rings[number].left(int(counts[number]))
