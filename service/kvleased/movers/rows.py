"""Own copies of rows, which are blocks that are one piece each; what a block is made of is `cpu`'s business.

A checksum is taken of a block's source right after the block was copied: reading it has left it in the cache, whereas
what a mover writes passes the cache by (see `processes`).
"""

from collections.abc import Iterable
from itertools import repeat
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

RUN_BYTES_MAX: Final = 1 << 18
"""Bytes that are copied in one go, of adjacent blocks or of a large one: they should still be in the cache for their
checksums."""

SMALL_BYTES: Final = 1 << 16
"""Bytes of a block up to which a loop in Python shows beside its copies."""

Pool = NDArray[np.uint8]
"""[blocks, bytes] or [slots, bytes]: a piece of every block, wherever it lies."""
Run = tuple[int, int, int]
"""First source, first target, blocks."""


def runs_from(
    firsts: NDArray[np.intp], sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> list[Run]:
    """Return the runs that start at these positions of a batch."""
    if len(firsts) == len(targets):
        return list(zip(sources.tolist(), targets.tolist(), repeat(1), strict=False))
    counts = np.diff(firsts, append=len(targets))
    columns = (sources[firsts], targets[firsts], counts)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def copy_runs(source: Pool, target: Pool, runs: Iterable[Run]) -> None:
    """Copy run by run."""
    # Slices of a memoryview cost half of what those of an array do.
    read, written = _bytes_of(source), _bytes_of(target)
    bytes_per_block = target.shape[1]
    for source_id, target_id, count in runs:
        start, to = source_id * bytes_per_block, target_id * bytes_per_block
        num_bytes = count * bytes_per_block
        written[to : to + num_bytes] = read[start : start + num_bytes]


def copied_at_once(
    source: Pool, target: Pool, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> bool:
    """Copy in one call, and tell whether that was possible: whether the blocks are one stretch at one end.

    The targets are sorted. A loop in Python costs a sixth of the copy of a block of 16 KiB.
    """
    num_copies, first = len(targets), int(sources.min())
    if (np.diff(targets) == 1).all():
        stretch = target[targets[0] : targets[0] + num_copies]
        # Only in this mode are the rows written where they belong without a copy; no id is out of bounds.
        source.take(sources.astype(np.intp), axis=0, out=stretch, mode="clip")
        return True
    target_of = np.full(num_copies, -1, np.intp)
    positions = sources - first
    if positions.max() >= num_copies:
        return False
    target_of[positions] = targets
    if (target_of < 0).any():
        return False
    row = np.dtype((np.void, target.shape[1]))
    rows, read = target.reshape(-1).view(row), source[first : first + num_copies]
    rows.put(target_of, read.reshape(-1).view(row), mode="clip")
    return True


def copy_and_sum_each(
    source: Pool, target: Pool, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> list[int]:
    """Copy blocks of which none is adjacent to the one before, and return the checksum of each."""
    # The same as below with nothing to decide at each block.
    read, written = _bytes_of(source), _bytes_of(target)
    bytes_per_block = target.shape[1]
    starts = (sources.astype(np.int64) * bytes_per_block).tolist()
    sums: list[int] = []
    for start, to in zip(
        starts, (targets.astype(np.int64) * bytes_per_block).tolist(), strict=True
    ):
        run = read[start : start + bytes_per_block]
        written[to : to + bytes_per_block] = run
        sums.append(xxhash.xxh3_64_intdigest(run) or 1)
    return sums


def copy_and_sum(source: Pool, target: Pool, runs: Iterable[Run]) -> list[int]:
    """Copy, and return the checksum of each block."""
    read, written = _bytes_of(source), _bytes_of(target)
    bytes_per_block = target.shape[1]
    sums: list[int] = []
    for source_id, target_id, count in runs:
        start, to = source_id * bytes_per_block, target_id * bytes_per_block
        num_bytes = count * bytes_per_block
        if num_bytes > RUN_BYTES_MAX:
            sums.append(_copy_and_sum_large(read[start:][:num_bytes], written[to:][:num_bytes]))
            continue
        run = read[start : start + num_bytes]
        written[to : to + num_bytes] = run
        if count == 1:
            sums.append(xxhash.xxh3_64_intdigest(run) or 1)
            continue
        sums += [
            checksum(run[block : block + bytes_per_block])
            for block in range(0, num_bytes, bytes_per_block)
        ]
    return sums


def _copy_and_sum_large(source: memoryview, target: memoryview) -> int:
    """Copy one block that would not stay in the cache as a whole, and return its checksum."""
    summing = xxhash.xxh3_64()
    for start in range(0, len(source), RUN_BYTES_MAX):
        part = source[start : start + RUN_BYTES_MAX]
        target[start : start + RUN_BYTES_MAX] = part
        summing.update(part)
    return summing.intdigest() or 1


def checksum(block: memoryview) -> int:
    """Return the xxh3 of a block's bytes, never 0, which stands for "none was taken"."""
    return xxhash.xxh3_64_intdigest(block) or 1


def _bytes_of(pool: Pool) -> memoryview:
    return pool.reshape(-1).data
