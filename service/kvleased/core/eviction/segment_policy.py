"""Own the contract of a policy that keeps its blocks in segments; `segments` keeps them, and the policy chooses.

A segment is ordered by last use, the coldest block first. A policy decides in which segment a block is, and which
segment gives the next victim. No block may leave before its children. A parent is let go of after its child, and
whoever uses a block also uses its parents. So it is enough that more uses never lower a block's segment, or never lower
the rank by which the policy chooses. `segments` does the rest: no block leaves while a lower segment has a colder one.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvleased.core.ids import Ids

Segments = NDArray[np.int8]
Stamps = NDArray[np.int64]

NEVER: Final = 1 << 62
"""A stamp after all others; the stamp of a segment that has no block."""


class Tails(NamedTuple):
    """What a policy chooses by, for one part of the order."""

    oldest: Sequence[int]
    """The stamp of the coldest block of each segment."""
    num_blocks: Sequence[int]
    """How many blocks each segment has."""
    now: int
    """The stamp that the next block will get."""


class Run(NamedTuple):
    """Victims that leave one after another from one segment."""

    segment: int
    most: int = NEVER
    """At most so many blocks."""
    before: int = NEVER
    """Only blocks with a lower stamp."""


class SegmentPolicy(Protocol):
    """A policy that keeps its blocks in segments."""

    @property
    def name(self) -> str:
        """The policy's name, as plans write it."""

    @property
    def num_segments(self) -> int:
        """How many segments there are, from 0 on."""

    def came(self, blocks: Ids, now: int) -> Segments:
        """Return the segments of blocks that are newly cached."""

    def used(self, blocks: Ids, segments: Segments, stamps: Stamps, now: int) -> Segments:
        """Return the segments of evictable blocks that are hit; they were let go of at `stamps`."""

    def held(self, blocks: Ids, segments: Segments, now: int) -> Segments:
        """Return the segments of blocks that are hit while they are held already."""

    def rests(self, segment: int, count: int, now: int) -> None:
        """Note that so many blocks of a segment have been let go of."""

    def left(self, blocks: Ids, segments: Segments, stamps: Stamps) -> None:
        """Note that blocks are evicted."""

    def choose(self, choices: Sequence[int], tails: Tails) -> Run:
        """Return which of at least two segments gives the next victims; change nothing."""
