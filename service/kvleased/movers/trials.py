"""Own the way in which small blocks are copied and summed on this machine: each is tried, and the quickest is kept."""

from enum import Enum, auto
from functools import lru_cache
from typing import Final

TRIALS: Final = 3
"""Batches with which each way is tried."""
_SIZES_MAX: Final = 8
"""Block sizes whose results are remembered; beyond that, the size unused for longest is tried anew."""


class Way(Enum):
    """How small blocks with adjacent targets are copied and summed."""

    EACH = auto()
    """One block after another."""
    TOGETHER = auto()
    """Several blocks in a call, and summed at their targets."""
    GATHERED = auto()
    """Several blocks in a call to memory that stays in the cache, summed there, and written as one."""


class Trial:
    """Which way to copy and sum small blocks takes the least processor time here, judging by the first batches."""

    def __init__(self) -> None:
        """Start with no results."""
        self._nanoseconds: dict[Way, list[float]] = {way: [] for way in Way}

    @property
    def way(self) -> Way:
        """The way for the next batch: each in its turn at first, and then always the quickest."""
        tried = {way: len(taken) for way, taken in self._nanoseconds.items()}
        next_way = min(tried, key=tried.__getitem__)
        if tried[next_way] < TRIALS:
            return next_way
        return min(self._nanoseconds, key=lambda way: min(self._nanoseconds[way]))

    def took(self, way: Way, nanoseconds_a_block: float) -> None:
        """Note the time of a batch; once all trials are made, no more times count."""
        if len(self._nanoseconds[way]) < TRIALS:
            self._nanoseconds[way].append(nanoseconds_a_block)


@lru_cache(maxsize=_SIZES_MAX)
def trial_of(bytes_per_block: int) -> Trial:
    """Return the results for blocks of one size."""
    del bytes_per_block
    return Trial()
