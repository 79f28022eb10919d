"""Own the adaptive policy: it learns when blocks are used again, and evicts those least worth the room that they take.

A block's segment is how often it was used, up to a limit. For each segment, the policy counts after how long its blocks
were used again, including blocks that had been evicted meanwhile; ages are grouped by powers of two. From these counts
it knows what a block of a given segment and age is worth: the highest rate of uses over time that keeping it for any
further time would yield (the Gittins index). The segment whose coldest block is worth least gives the next victim.

Time is counted in blocks that are let go of, and what was learned fades; no number depends on a pace or a workload.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.ghosts import Ghosts
from kvleased.core.eviction.segment_policy import NEVER, Run, Segments, Stamps, Tails
from kvleased.core.ids import Ids

_NUM_SEGMENTS: Final = 4
"""The last segment has blocks that were used four times or more."""
_NUM_AGES: Final = 48
"""Powers of two of an age; a pool that lets go of a million blocks a second reaches the last after years."""
_POOLS_REMEMBERED: Final = 2
_LESSONS_PER_POOL: Final = 2
"""How often blocks are valued anew while as many blocks are let go of as the pool has."""
_ADDED_BETWEEN_MIN: Final = 64
_FADING: Final = 0.98
"""The part of everything learned that still counts at the next lesson; half of it counts after 34 lessons."""


class Adaptive:
    """Evict the blocks that are least likely to be used again soon, from what was seen so far."""

    name: Final = "adaptive"
    num_segments: Final = _NUM_SEGMENTS

    def __init__(self, num_blocks: int, keys: NDArray[np.uint64]) -> None:
        """Start with nothing learned; the least recently used block then leaves first."""
        self._keys = keys
        self._ghosts = Ghosts(_POOLS_REMEMBERED * num_blocks, _NUM_SEGMENTS)
        self._uses: NDArray[np.float64] = np.zeros((_NUM_SEGMENTS, _NUM_AGES), np.float64)
        """Uses of blocks, by the segment and the age that the block had."""
        self._rested = [0.0] * _NUM_SEGMENTS
        """Blocks of each segment that began to wait for a use."""
        self._worth = [[0.0] * _NUM_AGES for _ in range(_NUM_SEGMENTS)]
        self._interval = max(_ADDED_BETWEEN_MIN, num_blocks // _LESSONS_PER_POOL)
        self._next_lesson = self._interval

    def __repr__(self) -> str:
        """Show how much has been seen."""
        return f"<Adaptive of {self._uses.sum():.0f} uses>"

    def came(self, blocks: Ids, now: int) -> Segments:
        """Return the segments of newly cached blocks; a block that comes back has been used once more."""
        segments, stamps = self._ghosts.take(self._keys[blocks])
        if segments.max(initial=-1) >= 0:
            is_back = segments >= 0
            self._count(segments[is_back], now - stamps[is_back])
        return _above(segments)

    def used(self, blocks: Ids, segments: Segments, stamps: Stamps, now: int) -> Segments:
        """Count after how long blocks are used again, and move them up."""
        self._count(segments, now - stamps)
        return self.held(blocks, segments, now)

    def held(self, blocks: Ids, segments: Segments, now: int) -> Segments:
        """Move blocks up."""
        del blocks, now
        return _above(segments)

    def rests(self, segment: int, count: int, now: int) -> None:
        """Count blocks that now wait for a use, and learn from time to time."""
        self._rested[segment] += count
        if now >= self._next_lesson:
            self._next_lesson = now + self._interval
            self._learn()

    def left(self, blocks: Ids, segments: Segments, stamps: Stamps) -> None:
        """Remember which blocks are evicted, and when they were let go of."""
        self._ghosts.add(self._keys[blocks], segments, stamps)

    def choose(self, choices: Sequence[int], tails: Tails) -> Run:
        """Choose the segment whose coldest block is worth least, the coldest of equals, for victims of that age."""
        chosen, least = choices[0], float(NEVER)
        for segment in choices:
            age = min((tails.now - tails.oldest[segment]).bit_length(), _NUM_AGES - 1)
            worth = self._worth[segment][age]
            # A later choice has the colder block.
            if worth <= least:
                chosen, least = segment, worth
        age = (tails.now - tails.oldest[chosen]).bit_length()
        return Run(chosen, before=tails.now - (1 << (age - 1)) + 1)

    def _count(self, segments: Segments, ages: Stamps) -> None:
        _, powers = np.frexp(ages)
        at = segments * np.int64(_NUM_AGES) + np.minimum(powers, _NUM_AGES - 1)
        counts = np.bincount(at, minlength=self._uses.size)
        self._uses += counts.reshape(self._uses.shape)

    def _learn(self) -> None:
        """Value blocks: for each age, the highest rate of uses that keeping a block until any later age would yield."""
        widths = np.exp2(np.arange(_NUM_AGES) - 1.0)
        for segment, uses in enumerate(self._uses):
            behind = np.cumsum(uses)
            left = np.maximum(self._rested[segment] - behind + uses / 2, 0.0)
            uses_until = np.concatenate([[0.0], behind])
            time_until = np.concatenate([[0.0], np.cumsum(left * widths)])
            uses_for = uses_until[None, 1:] - uses_until[:-1, None]
            time_for = time_until[None, 1:] - time_until[:-1, None]
            rates = np.divide(uses_for, time_for, out=np.zeros_like(uses_for), where=time_for > 0)
            self._worth[segment] = np.triu(rates).max(axis=1).tolist()
        self._uses *= _FADING
        self._rested = [one * _FADING for one in self._rested]


def _above(segments: Segments) -> Segments:
    above: Segments = np.minimum(segments + np.int8(1), np.int8(_NUM_SEGMENTS - 1))
    return above
