"""Own that a region's pages are in the process's page table before an engine touches them.

The daemon has made the memory, but every process that maps it faults once for every page that it touches, which takes
about as long as copying the page. An engine's own cache has no such faults, because it is zeroed at the start.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

SLICE_BYTES: Final = 4 << 20
"""Bytes of one call, a millisecond or two, in which other threads can map nothing new."""
_MADV_POPULATE_WRITE: Final = 23
_BYTES_PER_STAT_BLOCK: Final = 512
_LIBC: Final = ctypes.CDLL(None)
# Unlike that of the module mmap, this one lets other threads run meanwhile.
_madvise: Final = _LIBC.madvise
_madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


def mapped_ahead(region: NDArray[np.uint8], memory: tuple[int, int]) -> Iterator[int]:
    """Enter a region's pages slice by slice, one at each `next`; yields the bytes that are entered so far.

    Nothing is written, and no page comes into being: where any is lacking, as in a pool that was made smaller, the rest
    is left to whoever touches it, as by a kernel that cannot do it (before 5.14). `memory` is device and inode of it.
    """
    try:
        descriptor = open_descriptor(memory)
    except OSError:
        return
    address = region.ctypes.data
    for first in range(0, region.nbytes, SLICE_BYTES):
        num_bytes = min(SLICE_BYTES, region.nbytes - first)
        if os.fstat(descriptor).st_blocks * _BYTES_PER_STAT_BLOCK < region.nbytes:
            return
        if _madvise(address + first, num_bytes, _MADV_POPULATE_WRITE):
            return
        yield first + num_bytes


def open_descriptor(memory: tuple[int, int]) -> int:
    """Return the descriptor by which a map keeps its memory open, the map's own; `memory` is device and inode.

    Raises:
        OSError: there is none.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            stat = os.fstat(int(entry.name))
            if (stat.st_dev, stat.st_ino) == memory:
                return int(entry.name)
    raise OSError("the memory is not open any more")
