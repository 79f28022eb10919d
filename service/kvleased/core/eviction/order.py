"""Own the contract of an eviction policy; it orders evictable blocks and knows nothing of holds, leases or copies."""

from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvleased.core.ids import Ids

_BLOCK_BITS: Final = np.uint64(32)
_BLOCK_MASK: Final = np.uint64(2**32 - 1)


class EvictionOrder(Protocol):
    """An order over the blocks that may be evicted: those committed and held by nobody. No call names a block twice."""

    def __len__(self) -> int:
        """Count the evictable blocks."""

    def __contains__(self, block: int) -> bool:
        """Tell whether a block is evictable."""

    def __iter__(self) -> Iterator[int]:
        """Go through the evictable blocks, the first to leave first."""

    def holds(self, blocks: Ids) -> NDArray[np.bool_]:
        """Tell for each block whether it is evictable."""

    # What happens to blocks ---------------------------------------------------------------------------------------

    def cached(self, blocks: Ids) -> None:
        """Note that blocks are newly findable under their keys; a block added without this counts as new then."""

    def add(self, blocks: Ids) -> None:
        """Add blocks that nobody holds any more; among equals, the first given one leaves first."""

    def discard(self, blocks: Ids) -> None:
        """Take out blocks that are used again; that is a hit of each block, also of absent ones."""

    def set_aside(self, blocks: Ids) -> None:
        """Take out blocks only to copy them, which is no hit; their places are kept, and absent ones are ignored."""

    def put_back(self, blocks: Ids) -> None:
        """Put blocks that were set aside, and not used since, back at their places."""

    def put_all_back(self) -> Ids:
        """Put all blocks that were set aside back, and return them; the caller soon sets them aside again."""

    def evicted(self, blocks: Ids) -> None:
        """Take out blocks, if they are there, because they leave for good; their keys can be read for the last time."""

    def coldest(self, count: int, protected: Ids) -> Ids:
        """Return up to `count` blocks that should leave next, none of them protected; change nothing."""


def deepest_first(blocks: Ids, positions: NDArray[np.uint32]) -> Ids:
    """Return ascending blocks ordered by falling position; blocks of equal position stay ascending."""
    # Sorting numbers made of both takes a tenth of the time of a stable sort by position.
    both = (~positions).astype(np.uint64) << _BLOCK_BITS
    both |= blocks.astype(np.uint64)
    both.sort()
    both &= _BLOCK_MASK
    return both.astype(np.intp)
