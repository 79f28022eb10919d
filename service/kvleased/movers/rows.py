"""Own copies of rows: what a copy is told, and its loops in Python; `cpu` knows what a block is made of.

A checksum is taken of a block's source right after the block was copied. The copy has read the source into the cache,
whereas what a mover writes bypasses the cache (see `processes`).
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlease.geometry import floor_div

CHUNK_BYTES: Final = 1 << 18
"""Bytes of adjacent or large blocks that are copied in one go: they should still be in the cache for their sums."""

Pool = NDArray[np.uint8]
"""[blocks, bytes] or [slots, bytes]: one piece of every block, on the device or on the host."""


class Part(NamedTuple):
    """One piece of all blocks, where it is copied from and where to."""

    source: Pool
    target: Pool
    is_summed: bool = True


class Runs(NamedTuple):
    """Blocks to copy, as runs that are adjacent at both ends."""

    sources: NDArray[np.int32]
    """The first source of each run."""
    targets: NDArray[np.int32]
    counts: NDArray[np.int32]

    @property
    def num_blocks(self) -> int:
        """Blocks in all runs together."""
        return int(self.counts.sum())

    def each(self) -> Iterable[tuple[int, int, int]]:
        """Return the first source, the first target and the number of blocks of each run."""
        return zip(*(column.tolist() for column in self), strict=True)


class Loops(Protocol):
    """The loops over blocks in which a mover spends its time."""

    def copy(self, parts: Sequence[Part], runs: Runs) -> None:
        """Copy the blocks of each run."""

    def copy_and_sum(self, parts: Sequence[Part], runs: Runs) -> NDArray[np.uint64]:
        """Copy the blocks of each run, and return the xxh3 of each block's summed parts, one behind the other."""

    def sum(self, rows: Pool, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the xxh3 of each of these rows, which may lie apart."""


def runs_of(sources: NDArray[np.int32], targets: NDArray[np.int32], bytes_per_block: int) -> Runs:
    """Return the runs of blocks that are adjacent at both ends, of at most `CHUNK_BYTES` or one block each."""
    blocks_max = max(1, floor_div(CHUNK_BYTES, max(1, bytes_per_block)))
    breaks = np.ones(len(targets), bool)
    breaks[1:] = (sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)
    if breaks.all():
        return Runs(sources, targets, np.ones(len(targets), np.int32))
    positions = np.arange(len(targets), dtype=np.int32)
    stretches = np.maximum.accumulate(np.where(breaks, positions, 0))
    firsts = np.flatnonzero((positions - stretches) % blocks_max == 0)
    counts = np.diff(firsts, append=len(targets)).astype(np.int32)
    return Runs(sources[firsts], targets[firsts], counts)


class PythonLoops:
    """Loops over blocks for where none can be compiled."""

    def copy(self, parts: Sequence[Part], runs: Runs) -> None:
        """Copy the blocks of each run."""
        for source_id, target_id, count in runs.each():
            for source, target, _ in parts:
                target[target_id : target_id + count] = source[source_id : source_id + count]

    def copy_and_sum(self, parts: Sequence[Part], runs: Runs) -> NDArray[np.uint64]:
        """Copy the blocks of each run, and return the xxh3 of each block's summed parts."""
        return np.fromiter(
            (
                _copy_and_sum_block(parts, source_id + block, target_id + block)
                for source_id, target_id, count in runs.each()
                for block in range(count)
            ),
            np.uint64,
            runs.num_blocks,
        )

    def sum(self, rows: Pool, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the xxh3 of each of these rows."""
        sums = (xxhash.xxh3_64_intdigest(rows[row].data) for row in ids.tolist())
        return np.fromiter(sums, np.uint64, len(ids))


def checksum(block: memoryview) -> int:
    """Return the xxh3 of a block's bytes, but never 0, which means that no checksum was taken."""
    return xxhash.xxh3_64_intdigest(block) or 1


def checksums(sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the checksums of blocks with these sums: none is 0."""
    return np.where(sums == 0, np.uint64(1), sums)


def _copy_and_sum_block(parts: Sequence[Part], source_id: int, target_id: int) -> int:
    """Copy one block, chunk by chunk, each of which is summed before the next one drives it from the cache."""
    summing = xxhash.xxh3_64()
    for part in parts:
        source, target = part.source[source_id], part.target[target_id]
        for start in range(0, len(source), CHUNK_BYTES):
            chunk = source[start : start + CHUNK_BYTES]
            target[start : start + CHUNK_BYTES] = chunk
            if part.is_summed:
                summing.update(chunk.data)
    return summing.intdigest()
