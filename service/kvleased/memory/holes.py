"""Own giving back the pages under blocks that are out of use, and bringing them back; for CPU memory only.

A page is given back only if all of it lies under such blocks: a page shared with a block in use stays.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.memory.cpu import allocate, mapped_bytes, whole_pages

Pieces = Sequence[tuple[int, int, int]]
"""For each piece of a block: where that of block 0 starts, bytes from block to block, and bytes of the piece."""
Ranges = list[tuple[int, int]]
"""The start and the end of each range of bytes."""

_ROUNDS: Final = 3
"""A mover that readies a region finishes its current chunk, but begins no other once pages are missing."""


def pages_of(blocks: NDArray[np.signedinteger], pieces: Pieces, bytes_per_page: int) -> Ranges:
    """Return the ranges of whole pages that lie only under these blocks, ascending.

    If a block is one piece, the bytes between it and the next block belong to it, too.
    """
    if not len(blocks):
        return []
    wide = blocks.astype(np.int64)
    starts = np.concatenate([offset + wide * stride for offset, stride, _ in pieces])
    lengths = [stride if len(pieces) == 1 else num_bytes for _, stride, num_bytes in pieces]
    ends = starts + np.repeat(lengths, len(wide))
    order = starts.argsort()
    starts, ends = starts[order], ends[order]
    is_first = np.concatenate([[True], starts[1:] > ends[:-1]])
    starts, ends = starts[is_first], ends[np.concatenate([is_first[1:], [True]])]
    starts = -(-starts // bytes_per_page) * bytes_per_page
    ends = ends // bytes_per_page * bytes_per_page
    is_some = ends > starts
    return list(zip(starts[is_some].tolist(), ends[is_some].tolist(), strict=True))


def give_back(fd: int, ranges: Ranges, region_bytes: int) -> None:
    """Give the pages in these ranges of a region back to the system; they read as zeros afterwards.

    Raises:
        OSError: the memory cannot be given back.
    """
    given = list(_within(ranges, region_bytes))
    num_bytes = sum(end - start for start, end in given)
    if not given:
        return
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    with mmap.mmap(fd, mapped_bytes(fd, region_bytes), mmap.MAP_SHARED, protection) as mapping:
        for _ in range(_ROUNDS):
            for start, end in given:
                mapping.madvise(mmap.MADV_REMOVE, start, end - start)
            if missing_bytes(fd, region_bytes) >= num_bytes:
                return


def bring_back(fd: int, ranges: Ranges, region_bytes: int) -> None:
    """Make the pages in these ranges exist again.

    Raises:
        OSError: there is not enough memory.
    """
    for start, end in _within(ranges, region_bytes):
        allocate(fd, start, end - start)


def missing_bytes(fd: int, region_bytes: int) -> int:
    """Return the bytes of a region whose pages do not exist now."""
    return max(0, whole_pages(fd, region_bytes) - os.fstat(fd).st_blocks * 512)


def _within(ranges: Ranges, region_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges up to the end of the region, which may lie within the last block's padding."""
    for start, end in ranges:
        if start < min(end, region_bytes):
            yield start, min(end, region_bytes)
