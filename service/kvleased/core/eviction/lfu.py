"""Own LFU with decay: the blocks that were used most leave last, and a use counts half after every half-life.

A block's weight is the number of its uses, where each use counts half after a half-life. All weights shrink alike, so
their order changes only with a use. Therefore a block's segment goes by its weight at its last use, and its rank is the
time at which it was let go of plus log2(weight) half-lives.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.ghosts import Ghosts
from kvleased.core.eviction.segment_policy import NEVER, Run, Segments, Stamps, Tails
from kvleased.core.ids import Ids

_SEGMENTS_PER_DOUBLING: Final = 2
_NUM_SEGMENTS: Final = 8
"""The last segment has blocks that weigh 2 ** 3.5 or more, which is more than ten uses within a half-life."""
_POOLS_PER_HALF_LIFE: Final = 2
_ROUNDING: Final = 1e-9
"""More than rounding ever makes sums of the same uses differ, so that a parent does not fall below its child."""


class LFU:
    """Keep the blocks that were used most often and not too long ago."""

    name: Final = "lfu"
    num_segments: Final = _NUM_SEGMENTS

    def __init__(self, num_blocks: int, keys: NDArray[np.uint64]) -> None:
        """Start with nothing remembered; a half-life is the use of twice as many blocks as the pool has."""
        self._half_life = max(1, _POOLS_PER_HALF_LIFE * num_blocks)
        self._step = max(1, self._half_life // _SEGMENTS_PER_DOUBLING)
        """A block ranks as high as one of the next segment if it was let go of this much later."""
        self._keys = keys
        self._weight: NDArray[np.float64] = np.zeros(len(keys), np.float64)
        self._last: Stamps = np.zeros(len(keys), np.int64)
        """By block: when it was used last."""
        self._ghosts = Ghosts(num_blocks, self.num_segments)

    def __repr__(self) -> str:
        """Show the pace of forgetting."""
        return f"<LFU half-life {self._half_life} blocks>"

    def came(self, blocks: Ids, now: int) -> Segments:
        """Weigh newly cached blocks; a block that comes back has the rest of its old weight, and this use."""
        segments, values = self._ghosts.take(self._keys[blocks])
        self._last[blocks] = now
        if segments.max(initial=-1) < 0:
            self._weight[blocks] = 1.0
            return np.zeros_like(segments)
        before = np.where(segments >= 0, values.view(np.float64), -np.inf)
        self._weight[blocks] = 1.0 + np.exp2(before - now / self._half_life)
        return self._segments(blocks)

    def used(self, blocks: Ids, segments: Segments, stamps: Stamps, now: int) -> Segments:
        """Add a use to the decayed weights; although segments are rounded down, no block may rank lower than before."""
        lowest = segments - (now - stamps) // self._step
        used: Segments = np.maximum(self._used(blocks, now), lowest).astype(np.int8)
        return used

    def held(self, blocks: Ids, segments: Segments, now: int) -> Segments:
        """Add a use to the decayed weights."""
        return np.maximum(self._used(blocks, now), segments)

    def rests(self, segment: int, count: int, now: int) -> None:
        """Do nothing."""

    def left(self, blocks: Ids, segments: Segments, stamps: Stamps) -> None:
        """Remember the weights of evicted blocks, as log2 of the weight at time 0 that would have decayed to them."""
        del stamps
        values = np.log2(self._weight[blocks]) + self._last[blocks] / self._half_life
        self._ghosts.add(self._keys[blocks], segments, values.view(np.int64))

    def choose(self, choices: Sequence[int], tails: Tails) -> Run:
        """Choose the segment whose coldest block ranks lowest."""
        lowest, chosen, second = NEVER, -1, NEVER
        for segment in choices:
            rank = tails.oldest[segment] + segment * self._step
            if rank < lowest:
                lowest, chosen, second = rank, segment, lowest
            elif rank < second:
                second = rank
        return Run(chosen, before=max(second - chosen * self._step, tails.oldest[chosen] + 1))

    def _used(self, blocks: Ids, now: int) -> Segments:
        age = now - self._last[blocks]
        self._weight[blocks] = 1.0 + self._weight[blocks] * np.exp2(-age / self._half_life)
        self._last[blocks] = now
        return self._segments(blocks)

    def _segments(self, blocks: Ids) -> Segments:
        powers = np.log2(self._weight[blocks]) * _SEGMENTS_PER_DOUBLING + _ROUNDING
        return np.minimum(powers, _NUM_SEGMENTS - 1).astype(np.int8)
