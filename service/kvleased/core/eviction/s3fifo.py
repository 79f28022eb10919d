"""Own S3-FIFO: a small queue that most blocks pass through quickly, and a main queue for blocks that proved useful.

A tenth of the blocks are in the small queue. A block that is used while it is there, or that comes back soon after it
left, goes to the main queue. Unlike in the published rule, a block that is used leaves its queue, because whoever
uses it holds it. So both queues are ordered by last use, and one use is enough to be promoted. Moreover, no block of
the main queue leaves while the small queue has a colder one, so that no block leaves before its children. After J. Yang
et al., SOSP 2023.
"""

from collections.abc import Sequence
from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.ghosts import Ghosts
from kvleased.core.eviction.segment_policy import Run, Segments, Stamps, Tails
from kvleased.core.ids import Ids

_SMALL: Final = 0
_MAIN: Final = 1
_SMALL_SHARE: Final = 0.1


class S3FIFO:
    """Let blocks that are used only once pass through quickly."""

    name: Final = "s3-fifo"
    num_segments: Final = 2

    def __init__(self, num_blocks: int, keys: NDArray[np.uint64]) -> None:
        """Start with nothing remembered."""
        self._keys = keys
        self._ghosts = Ghosts(num_blocks // 2, self.num_segments)

    def __repr__(self) -> str:
        """Show how much is remembered."""
        return f"<S3FIFO {len(self._ghosts)} remembered>"

    def came(self, blocks: Ids, now: int) -> Segments:
        """Return the queues of newly cached blocks: those that come back go to the main queue."""
        del now
        segments, _ = self._ghosts.take(self._keys[blocks])
        came: Segments = (segments >= 0).view(np.int8)
        return came

    def used(self, blocks: Ids, segments: Segments, stamps: Stamps, now: int) -> Segments:
        """Move blocks to the main queue."""
        del blocks, stamps, now
        return np.full_like(segments, _MAIN)

    def held(self, blocks: Ids, segments: Segments, now: int) -> Segments:
        """Move blocks to the main queue."""
        del blocks, now
        return np.full_like(segments, _MAIN)

    def rests(self, segment: int, count: int, now: int) -> None:
        """Do nothing."""

    def left(self, blocks: Ids, segments: Segments, stamps: Stamps) -> None:
        """Remember which blocks are evicted."""
        self._ghosts.add(self._keys[blocks], segments, stamps)

    def choose(self, choices: Sequence[int], tails: Tails) -> Run:
        """Choose the small queue as long as it has more than its share."""
        del choices
        excess = ceil(tails.num_blocks[_SMALL] - _SMALL_SHARE * sum(tails.num_blocks))
        return Run(_SMALL, excess) if excess > 0 else Run(_MAIN)
