"""Own which stretches of bytes a batch moves, as addresses at both ends; other modules move them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Addresses = NDArray[np.int64]


class End(NamedTuple):
    """Where one piece of every block, or slot, lies: that of block n is at address + n * stride_bytes."""

    address: int
    stride_bytes: int

    def of(self, ids: Ids) -> Addresses:
        """Return the address of the piece of each id."""
        return self.address + ids.astype(np.int64) * self.stride_bytes


class Way(NamedTuple):
    """One piece of every block, where it is read and where it is written."""

    source: End
    target: End
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of bytes, in parallel arrays; each has a byte or more, and no two of one batch write the same byte."""

    sources: Addresses
    targets: Addresses
    num_bytes: Addresses

    def __len__(self) -> int:
        """Count the stretches."""
        return len(self.targets)

    @property
    def total_bytes(self) -> int:
        """Bytes of all stretches together."""
        return int(self.num_bytes.sum())

    @classmethod
    def of(cls, ways: Sequence[Way], sources: Ids, targets: Ids) -> Self:
        """Return what a copy moves: as few and as long stretches as possible, ascending by where they are written."""
        if not ways or not len(targets):
            return cls(_NONE, _NONE, _NONE)
        spans = cls(
            np.concatenate([way.source.of(sources) for way in ways]),
            np.concatenate([way.target.of(targets) for way in ways]),
            np.repeat(np.array([way.num_bytes for way in ways], np.int64), len(targets)),
        )
        return spans._merged()

    def where(self, which: NDArray[np.bool_]) -> Self:
        """Return the selected stretches."""
        return type(self)(self.sources[which], self.targets[which], self.num_bytes[which])

    def cut(self, origin: int, chunk_bytes: int, *, at_source: bool) -> Self:
        """Return the same bytes, cut so that no source, or else no target, crosses origin + n * chunk_bytes."""
        ends = self.sources if at_source else self.targets
        first = (ends - origin) // chunk_bytes
        last = (ends + self.num_bytes - 1 - origin) // chunk_bytes
        counts = last - first + 1
        if (counts == 1).all():
            return self
        rows = np.repeat(np.arange(len(self)), counts)
        chunks = first[rows] + _ranks(counts)
        starts = np.maximum(ends[rows], origin + chunks * chunk_bytes)
        stops = np.minimum(ends[rows] + self.num_bytes[rows], origin + (chunks + 1) * chunk_bytes)
        skipped = starts - ends[rows]
        return type(self)(
            self.sources[rows] + skipped, self.targets[rows] + skipped, stops - starts
        )

    def _merged(self) -> Self:
        order = np.argsort(self.targets)
        sources, targets, sizes = self.sources[order], self.targets[order], self.num_bytes[order]
        ends_here = np.ones(len(order), bool)
        ends_here[:-1] = (sources[:-1] + sizes[:-1] != sources[1:]) | (
            targets[:-1] + sizes[:-1] != targets[1:]
        )
        lasts = np.flatnonzero(ends_here)
        firsts = np.concatenate([[0], lasts[:-1] + 1])
        return type(self)(
            sources[firsts], targets[firsts], targets[lasts] + sizes[lasts] - targets[firsts]
        )


def _ranks(counts: Addresses) -> Addresses:
    """Return 0, 1, … count - 1 for each count, in a row."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


_NONE: Final = np.zeros(0, np.int64)
