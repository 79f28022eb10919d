"""Own what this process keeps of the memory that it has freed, so that the next large array does not fault it in anew.

The columns of a request of 8,192 blocks are arrays of 64 KiB. The C library of Linux gives what is free at the end of
its heap back beyond 128 KiB, and takes as little more when it must grow: then each of these arrays costs a page fault
for every 4 KiB, a fifth of what it takes to evict 8,192 blocks.
"""

import ctypes
from typing import Final

KEPT_BYTES: Final = 16 << 20
"""Bytes at the end of the heap that may be free before any is given back."""
TAKEN_BYTES: Final = 4 << 20
"""Bytes that are taken at once when it must grow."""
APART_BYTES: Final = 8 << 20
"""Bytes from which on a piece of memory has a mapping of its own, which is given back when it is freed."""

# The numbers that malloc.h has for them.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> bool:
    """Have the C library keep as much as that; tell whether it can: one other than glibc goes its own way."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = (
        (_M_TRIM_THRESHOLD, KEPT_BYTES),
        (_M_TOP_PAD, TAKEN_BYTES),
        (_M_MMAP_THRESHOLD, APART_BYTES),
    )
    return all(mallopt(which, num_bytes) for which, num_bytes in wanted)
