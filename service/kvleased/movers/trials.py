"""Own which way to copy and sum small blocks is taken on this machine: each is tried, and the quickest one stays."""

from enum import Enum, auto
from functools import lru_cache
from typing import Final

TRIALS: Final = 3
"""Batches that each way is tried with."""
_SIZES_MAX: Final = 8
"""Sizes of a block of which it is known; of more the one that was not seen for longest is tried anew."""


class Way(Enum):
    """How small blocks with adjacent targets are copied and summed."""

    EACH = auto()
    """One by one."""
    TOGETHER = auto()
    """Some in a call, and summed at their targets."""
    GATHERED = auto()
    """Some in a call to memory that stays in the cache, summed there, and written as one."""


class Trial:
    """Which way to copy and sum small blocks takes the least of the processor here, by the first batches."""

    def __init__(self) -> None:
        """Know nothing."""
        self._nanoseconds: dict[Way, list[float]] = {way: [] for way in Way}

    @property
    def way(self) -> Way:
        """How the next batch is to be copied: each way in its turn, and in the end the quickest one."""
        tried = {way: len(taken) for way, taken in self._nanoseconds.items()}
        next_way = min(tried, key=tried.__getitem__)
        if tried[next_way] < TRIALS:
            return next_way
        return min(self._nanoseconds, key=lambda way: min(self._nanoseconds[way]))

    def took(self, way: Way, nanoseconds_a_block: float) -> None:
        """Take note of a batch; once all trials are made none counts any more."""
        if len(self._nanoseconds[way]) < TRIALS:
            self._nanoseconds[way].append(nanoseconds_a_block)


@lru_cache(maxsize=_SIZES_MAX)
def trial_of(bytes_per_block: int) -> Trial:
    """Return what is known of blocks of a size."""
    del bytes_per_block
    return Trial()
