"""Own how a region's pages get into a process's page table before the engine touches them.

The daemon has already made the memory. But every process that maps it takes one fault for each page that it touches,
and a fault takes about as long as copying the page. An engine's own cache has no such faults, because it is zeroed at
the start.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.memory.page_tables import enter_pages

SLICE_BYTES: Final = 4 << 20
"""Bytes of one call, which takes a millisecond or two; meanwhile other threads can map nothing new."""
_BYTES_PER_STAT_BLOCK: Final = 512


def mapped_ahead(region: NDArray[np.uint8], memory: tuple[int, int]) -> Iterator[int]:
    """Enter a region's pages, one slice at each `next`; yield the bytes entered so far.

    Nothing is written, and no page is created. Entering stops where a page is lacking, as in a pool that was made
    smaller, or where the kernel cannot do it (before 5.14); then the rest is mapped as it is touched. `memory` is the
    region's device and inode.
    """
    try:
        descriptor = open_descriptor(memory)
    except OSError:
        return
    for first in range(0, region.nbytes, SLICE_BYTES):
        if os.fstat(descriptor).st_blocks * _BYTES_PER_STAT_BLOCK < region.nbytes:
            return
        piece = region[first : first + SLICE_BYTES]
        if not enter_pages(piece):
            return
        yield first + piece.nbytes


def open_descriptor(memory: tuple[int, int]) -> int:
    """Return the descriptor by which a map keeps its memory open; `memory` is the memory's device and inode.

    Raises:
        OSError: this process has no such descriptor.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            stat = os.fstat(int(entry.name))
            if (stat.st_dev, stat.st_ino) == memory:
                return int(entry.name)
    raise OSError("the memory is not open any more")
