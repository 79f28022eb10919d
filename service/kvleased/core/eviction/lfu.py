"""Own LFU with decay: what was used most leaves last, and every use counts half after as much again has been used.

A block's weight is the number of its uses, each of which counts half after a half-life. As all weights shrink alike,
their order changes only with a use; so a block's segment goes by its weight at its last use, and its rank is the time
at which it was let go of plus as many half-lives as its weight is powers of two.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.ghosts import Ghosts
from kvleased.core.eviction.rule import NEVER, Run, Segments, Stamps, Tails
from kvleased.core.ids import Ids

_SEGMENTS_PER_DOUBLING: Final = 2
_NUM_SEGMENTS: Final = 8
"""The last one has what weighs 2 ** 3.5 and more, which is more than ten uses within a half-life."""
_POOLS_PER_HALF_LIFE: Final = 2
_ROUNDING: Final = 1e-9
"""More than sums of the same uses ever differ by, so that a parent is not below its child for that."""


class LFU:
    """Keep what was used most often and not too long ago."""

    name: Final = "lfu"
    num_segments: Final = _NUM_SEGMENTS

    def __init__(self, num_blocks: int, keys: NDArray[np.uint64]) -> None:
        """Start with nothing remembered; a half-life is the use of twice as many blocks as the pool has."""
        self._half_life = max(1, _POOLS_PER_HALF_LIFE * num_blocks)
        self._step = max(1, self._half_life // _SEGMENTS_PER_DOUBLING)
        """How much later a block may have been let go of than one of the next segment, to rank as high."""
        self._keys = keys
        self._weight: NDArray[np.float64] = np.zeros(num_blocks, np.float64)
        self._last: Stamps = np.zeros(num_blocks, np.int64)
        """When a block was used last."""
        self._ghosts = Ghosts(num_blocks, self.num_segments)

    def __repr__(self) -> str:
        """Show the pace of forgetting."""
        return f"<LFU half-life {self._half_life} blocks>"

    def came(self, blocks: Ids, now: int) -> Segments:
        """Weigh newly cached blocks; one that comes back has what is left of its weight, and this use."""
        segments, values = self._ghosts.take(self._keys[blocks])
        self._last[blocks] = now
        if segments.max(initial=-1) < 0:
            self._weight[blocks] = 1.0
            return np.zeros_like(segments)
        before = np.where(segments >= 0, values.view(np.float64), -np.inf)
        self._weight[blocks] = 1.0 + np.exp2(before - now / self._half_life)
        return self._segments(blocks)

    def used(self, blocks: Ids, segments: Segments, stamps: Stamps, now: int) -> Segments:
        """Add a use to what is left of the weights; rounded down, they must not rank lower than before."""
        lowest = segments - (now - stamps) // self._step
        used: Segments = np.maximum(self._used(blocks, now), lowest).astype(np.int8)
        return used

    def held(self, blocks: Ids, segments: Segments, now: int) -> Segments:
        """Add a use to what is left of the weights."""
        return np.maximum(self._used(blocks, now), segments)

    def rests(self, segment: int, count: int, now: int) -> None:
        """Heed nothing."""

    def left(self, blocks: Ids, segments: Segments, stamps: Stamps) -> None:
        """Remember the weights of what is evicted, as the powers of two that they would have been at the beginning."""
        del stamps
        values = np.log2(self._weight[blocks]) + self._last[blocks] / self._half_life
        self._ghosts.add(self._keys[blocks], segments, values.view(np.int64))

    def choose(self, choices: Sequence[int], tails: Tails) -> Run:
        """Take what weighs least by now."""
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
