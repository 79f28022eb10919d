"""Own ARC: it balances blocks that were used once against blocks that were used again, by which of them come back.

One segment has the blocks that were used once, the other those that were used again. The first one's share grows when a
block comes back that was evicted from it, and shrinks when one comes back that was evicted from the other; the fewer
blocks of its kind are remembered, the larger the change. In addition to the published rule, a block that was used again
never leaves while a colder one was used only once, so that no block leaves before its children. After N. Megiddo and
D. Modha, FAST 2003.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.ghosts import Ghosts
from kvleased.core.eviction.segment_policy import Run, Segments, Stamps, Tails
from kvleased.core.ids import Ids

_ONCE: Final = 0
_AGAIN: Final = 1


class ARC:
    """Balance blocks that were used once against those that were used again."""

    name: Final = "arc"
    num_segments: Final = 2

    def __init__(self, num_blocks: int, keys: NDArray[np.uint64]) -> None:
        """Start with no room for blocks that were used once."""
        self._num_blocks = num_blocks
        self._keys = keys
        self._ghosts = Ghosts(num_blocks // 2, self.num_segments)
        self.once_target = 0.0
        """How many blocks that were used once a full pool should keep."""

    def __repr__(self) -> str:
        """Show the balance."""
        return f"<ARC {self.once_target:.1f} of {self._num_blocks} for blocks used once>"

    def came(self, blocks: Ids, now: int) -> Segments:
        """Return the segments of newly cached blocks: those that come back have been used again."""
        del now
        once, again = max(1, self._ghosts.count(_ONCE)), max(1, self._ghosts.count(_AGAIN))
        segments, _ = self._ghosts.take(self._keys[blocks])
        back = segments.tobytes()
        num_once, num_again = back.count(_ONCE), back.count(_AGAIN)
        if num_once or num_again:
            target = self.once_target + num_once * max(1.0, again / once)
            target -= num_again * max(1.0, once / again)
            self.once_target = min(max(target, 0.0), float(self._num_blocks))
        came: Segments = (segments >= 0).view(np.int8)
        return came

    def used(self, blocks: Ids, segments: Segments, stamps: Stamps, now: int) -> Segments:
        """Move blocks to the segment of those that were used again."""
        del blocks, stamps, now
        return np.full_like(segments, _AGAIN)

    def held(self, blocks: Ids, segments: Segments, now: int) -> Segments:
        """Move blocks to the segment of those that were used again."""
        del blocks, now
        return np.full_like(segments, _AGAIN)

    def rests(self, segment: int, count: int, now: int) -> None:
        """Do nothing."""

    def left(self, blocks: Ids, segments: Segments, stamps: Stamps) -> None:
        """Remember which blocks are evicted."""
        self._ghosts.add(self._keys[blocks], segments, stamps)

    def choose(self, choices: Sequence[int], tails: Tails) -> Run:
        """Choose the blocks that were used once as long as there are more of them than their share."""
        del choices
        target = self.once_target * sum(tails.num_blocks) / self._num_blocks
        excess = int(np.ceil(tails.num_blocks[_ONCE] - target))
        return Run(_ONCE, excess) if excess > 0 else Run(_AGAIN)
