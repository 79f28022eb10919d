"""Own the adaptive policy: it learns when blocks come back, and evicts what is least likely to for the room it takes.

A block's segment is how often it was used, up to a limit. For each segment the policy counts after how long its blocks
were used again, those among them that had been evicted meanwhile; ages are told apart by powers of two. From that it
knows what a block of a segment and an age is worth: the most uses to come for the time until then that keeping it for
any further time yields (the index of Gittins). The segment whose coldest block is worth least gives the next victim.

Time is counted in blocks that are let go of, and what was learned fades; no number depends on a pace or a workload.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.ghosts import Ghosts
from kvleased.core.eviction.rule import NEVER, Run, Segments, Stamps, Tails
from kvleased.core.ids import Ids

_NUM_SEGMENTS: Final = 4
"""The last one has what was used four times and more."""
_NUM_AGES: Final = 48
"""Powers of two of an age; a pool that lets go of a million blocks a second reaches the last after years."""
_POOLS_REMEMBERED: Final = 2
_LESSONS_PER_POOL: Final = 2
"""Times that the worth of blocks is reckoned anew while as many blocks as the pool has are let go of."""
_ADDED_BETWEEN_MIN: Final = 64
_FADING: Final = 0.98
"""What of everything that was learned still counts at the next time; half of it after 34."""


class Adaptive:
    """Evict what is least likely to be used again soon, by what was seen."""

    name: Final = "adaptive"
    num_segments: Final = _NUM_SEGMENTS

    def __init__(self, num_blocks: int, keys: NDArray[np.uint64]) -> None:
        """Start with nothing learned, which is least recently used first."""
        self._keys = keys
        self._ghosts = Ghosts(_POOLS_REMEMBERED * num_blocks, _NUM_SEGMENTS)
        self._uses: NDArray[np.float64] = np.zeros((_NUM_SEGMENTS, _NUM_AGES), np.float64)
        """Uses of blocks by the segment and the age that they had."""
        self._rested = [0.0] * _NUM_SEGMENTS
        """Blocks of each segment that began to wait for a use."""
        self._worth = [[0.0] * _NUM_AGES for _ in range(_NUM_SEGMENTS)]
        self._interval = max(_ADDED_BETWEEN_MIN, num_blocks // _LESSONS_PER_POOL)
        self._next_lesson = self._interval

    def __repr__(self) -> str:
        """Show how much has been seen."""
        return f"<Adaptive of {self._uses.sum():.0f} uses>"

    def came(self, blocks: Ids, now: int) -> Segments:
        """Return the segments of newly cached blocks; one that comes back has been used once more."""
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
        """Count blocks that wait for a use, and learn now and then."""
        self._rested[segment] += count
        if now >= self._next_lesson:
            self._next_lesson = now + self._interval
            self._learn()

    def left(self, blocks: Ids, segments: Segments, stamps: Stamps) -> None:
        """Remember what is evicted, and when it was let go of."""
        self._ghosts.add(self._keys[blocks], segments, stamps)

    def choose(self, choices: Sequence[int], tails: Tails) -> Run:
        """Take what is worth least, the coldest of equals, until it is of another age."""
        chosen, least = choices[0], float(NEVER)
        for segment in choices:
            age = min((tails.now - tails.oldest[segment]).bit_length(), _NUM_AGES - 1)
            worth = self._worth[segment][age]
            # Of choices the later one is the colder.
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
        """Reckon what blocks are worth: for each age, the most uses for the time over all ages until which to keep."""
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
