"""Own copies of rows, which are blocks of one piece each; `cpu` knows what a block is made of.

A checksum is taken of a block's source right after the block was copied. The copy has read the source into the cache,
whereas what a mover writes bypasses the cache (see `processes`). Blocks too small to bypass it that go to adjacent
targets are treated together: some at a time are copied and summed at their targets, or gathered in the cache, summed,
and written as one. The quickest way on this machine is used.
"""

import mmap
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain, repeat
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlease.geometry import floor_div
from kvleased.movers.trials import Way, trial_of
from kvleased.supervision.processes import WRITE_PAST_CACHES_BYTES

RUN_BYTES_MAX: Final = 1 << 18
"""Bytes of adjacent or large blocks that are copied in one go: they should still be in the cache for their sums."""

SMALL_BYTES: Final = 1 << 16
"""Bytes of a block up to which a Python loop takes noticeable time beside its copies."""

SMALLEST_BYTES_MAX: Final = WRITE_PAST_CACHES_BYTES - 1
"""Bytes of the largest block that a mover does not write past the caches when it writes the block alone."""
STRETCH_MIN: Final = 16
"""Adjacent targets from which on their blocks are copied together; with fewer, the calls cost what this saves."""
ROWS_MAX: Final = 64
"""The most blocks that are copied or gathered at once, however small they are."""
_LISTED_AT_ONCE: Final = 512
"""Blocks whose beginnings and ends are listed at once."""
TRIED_MIN: Final = 256
"""Blocks in long stretches that a batch must have for its time to count in the trial of the quickest way."""

Pool = NDArray[np.uint8]
"""[blocks, bytes] or [slots, bytes]: one piece of every block, on the device or on the host."""
Run = tuple[int, int, int]
"""First source, first target, and number of blocks."""


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


def copy_each(
    source: Pool, target: Pool, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> None:
    """Copy blocks of which few are adjacent to the previous one at both ends."""
    # The same as copy_runs, with nothing to decide at each block.
    read, written = _bytes_of(source), _bytes_of(target)
    for start, end, to, to_end in _each(sources, targets, target.shape[1]):
        written[to:to_end] = read[start:end]


def copied_at_once(
    source: Pool, target: Pool, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> bool:
    """Copy in one call, and tell whether that was possible, which is so if the blocks are one stretch at one end.

    The targets are sorted. A Python loop costs a sixth of the time of copying a block of 16 KiB.
    """
    num_copies, first = len(targets), int(sources.min())
    if (np.diff(targets) == 1).all():
        stretch = target[targets[0] : targets[0] + num_copies]
        # Only in this mode are the rows written to their place without another copy; no id is out of bounds.
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


def copy_and_sum_small(
    source: Pool, target: Pool, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> list[int]:
    """Copy small blocks, few of which are adjacent at both ends, and return the xxh3 of each.

    The targets are sorted. Which way is the quickest differs between processors, by up to a third.
    """
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(targets) != 1) + 1])
    counts = np.diff(firsts, append=len(targets))
    is_long = counts >= STRETCH_MIN
    if not is_long.any():
        return copy_and_sum_each(source, target, sources, targets)
    trial, began = trial_of(target.shape[1]), time.thread_time_ns()
    way = trial.way
    if way is Way.EACH:
        sums = copy_and_sum_each(source, target, sources, targets)
    else:
        together = (
            _gathering(target.shape[1]).copy_and_sum
            if way is Way.GATHERED
            else _copy_and_sum_stretch
        )
        stretches = (firsts[is_long], counts[is_long])
        sums = _copy_and_sum_stretches(source, target, sources, targets, stretches, together)
    if int(counts[is_long].sum()) >= TRIED_MIN:
        trial.took(way, (time.thread_time_ns() - began) / len(targets))
    return sums


CopyStretch = Callable[[Pool, Pool, NDArray[np.int32]], list[int]]
"""Copy from the given rows of a source to a stretch of a target, and return the xxh3 of each row."""


def _copy_and_sum_stretches(
    source: Pool,
    target: Pool,
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    stretches: tuple[NDArray[np.intp], NDArray[np.intp]],
    copy_stretch: CopyStretch,
) -> list[int]:
    """Copy the blocks of stretches, given by position and length, together, and the blocks between them one by one."""
    sums: list[int] = []
    done = 0
    for first, count in zip(*(column.tolist() for column in stretches), strict=True):
        sums += copy_and_sum_each(source, target, sources[done:first], targets[done:first])
        done, to = first + count, int(targets[first])
        sums += copy_stretch(source, target[to : to + count], sources[first:done])
    return sums + copy_and_sum_each(source, target, sources[done:], targets[done:])


def _copy_and_sum_stretch(source: Pool, stretch: Pool, sources: NDArray[np.int32]) -> list[int]:
    """Copy to adjacent blocks, in each call as many as stay in the cache, and return the xxh3 of each."""
    written, bytes_per_block = _bytes_of(stretch), stretch.shape[1]
    rows, most = sources.astype(np.intp), _rows_at_once(bytes_per_block)
    starts = range(0, len(written), bytes_per_block)
    sums: list[int] = []
    for first in range(0, len(rows), most):
        some = slice(first, first + most)
        # Only in this mode are the rows written to their place without another copy; no id is out of bounds.
        source.take(rows[some], axis=0, out=stretch[some], mode="clip")
        sums += [
            xxhash.xxh3_64_intdigest(written[start : start + bytes_per_block])
            for start in starts[some]
        ]
    return sums


def _rows_at_once(bytes_per_block: int) -> int:
    return min(ROWS_MAX, floor_div(RUN_BYTES_MAX, bytes_per_block))


class _Gathering:
    """Memory that stays in the cache, in which blocks are gathered before they are written to adjacent ones."""

    def __init__(self, bytes_per_block: int) -> None:
        """Make the memory, and a view of each row: making a view costs as much as summing a small block."""
        most = _rows_at_once(bytes_per_block)
        # Start at a page, as pools do. Some processors copy at a sixth of their speed to an address that lies, within
        # its page, a few bytes behind its source; large arrays of numpy start 16 bytes behind a page.
        memory = mmap.mmap(-1, most * bytes_per_block)
        self._rows = np.frombuffer(memory, np.uint8).reshape(most, bytes_per_block)
        self._bytes = _bytes_of(self._rows)
        self._views = [
            self._bytes[at : at + bytes_per_block]
            for at in range(0, len(self._bytes), bytes_per_block)
        ]

    def copy_and_sum(self, source: Pool, stretch: Pool, sources: NDArray[np.int32]) -> list[int]:
        """Copy to adjacent blocks, and return the xxh3 of each."""
        written, bytes_per_block = _bytes_of(stretch), stretch.shape[1]
        rows, most = sources.astype(np.intp), len(self._rows)
        sums: list[int] = []
        for first in range(0, len(rows), most):
            some = rows[first : first + most]
            # Only in this mode are the rows written to their place without another copy; no id is out of bounds.
            source.take(some, axis=0, out=self._rows[: len(some)], mode="clip")
            sums += map(xxhash.xxh3_64_intdigest, self._views[: len(some)])
            start, num_bytes = first * bytes_per_block, len(some) * bytes_per_block
            written[start : start + num_bytes] = self._bytes[:num_bytes]
        return sums


@lru_cache(maxsize=1)
def _gathering(bytes_per_block: int) -> _Gathering:
    """Return the same memory each time: new memory is in no cache."""
    return _Gathering(bytes_per_block)


def copy_and_sum_each(
    source: Pool, target: Pool, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> list[int]:
    """Copy blocks of which few are adjacent to the previous one at both ends, and return the xxh3 of each."""
    # The same as copy_and_sum, with nothing to decide at each block.
    read, written, summed = _bytes_of(source), _bytes_of(target), xxhash.xxh3_64_intdigest
    sums: list[int] = []
    add = sums.append
    for start, end, to, to_end in _each(sources, targets, target.shape[1]):
        run = read[start:end]
        written[to:to_end] = run
        add(summed(run))
    return sums


def _each(
    sources: NDArray[np.int32], targets: NDArray[np.int32], bytes_per_block: int
) -> Iterable[tuple[int, int, int, int]]:
    """Return where each block begins and ends, at its source and at its target.

    A copy displaces the interpreter from the caches. So a loop that calculates nothing between copies saves a twentieth
    of the time, and if what was calculated before is small enough to stay in the caches, another hundredth.
    """
    return chain.from_iterable(
        _edges(
            sources[first : first + _LISTED_AT_ONCE],
            targets[first : first + _LISTED_AT_ONCE],
            bytes_per_block,
        )
        for first in range(0, len(targets), _LISTED_AT_ONCE)
    )


def _edges(
    sources: NDArray[np.int32], targets: NDArray[np.int32], bytes_per_block: int
) -> Iterable[tuple[int, int, int, int]]:
    starts = [ids.astype(np.int64) * bytes_per_block for ids in (sources, targets)]
    columns = (edge for each in starts for edge in (each, each + bytes_per_block))
    return zip(*(column.tolist() for column in columns), strict=True)


def copy_and_sum(source: Pool, target: Pool, runs: Iterable[Run]) -> list[int]:
    """Copy run by run, and return the xxh3 of each block."""
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
            sums.append(xxhash.xxh3_64_intdigest(run))
            continue
        sums += [
            xxhash.xxh3_64_intdigest(run[block : block + bytes_per_block])
            for block in range(0, num_bytes, bytes_per_block)
        ]
    return sums


def _copy_and_sum_large(source: memoryview, target: memoryview) -> int:
    """Copy one block that is too large to stay in the cache as a whole, and return its xxh3."""
    summing = xxhash.xxh3_64()
    for start in range(0, len(source), RUN_BYTES_MAX):
        part = source[start : start + RUN_BYTES_MAX]
        target[start : start + RUN_BYTES_MAX] = part
        summing.update(part)
    return summing.intdigest()


def checksum(block: memoryview) -> int:
    """Return the xxh3 of a block's bytes, but never 0, which means that no checksum was taken."""
    return xxhash.xxh3_64_intdigest(block) or 1


def _bytes_of(pool: Pool) -> memoryview:
    return pool.reshape(-1).data
