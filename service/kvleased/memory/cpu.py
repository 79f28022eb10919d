"""Own the populating and mapping of CPU memory behind a descriptor; other modules keep the descriptor."""

import errno
import mmap
import os
import weakref
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvlease.geometry import round_up
from kvlease.memory.page_tables import enter_pages
from kvleased.memory import huge_pages


def is_populated(fd: int, region_bytes: int) -> bool:
    """Tell whether every page of a region already exists, without touching any."""
    return populated_bytes(fd) >= region_bytes


def populated_bytes(fd: int) -> int:
    """Return the bytes of a region whose pages already exist."""
    return os.fstat(fd).st_blocks * 512


def populate_chunks(fd: int, region_bytes: int, chunk_bytes: int) -> Iterator[int]:
    """Make the pages of a region exist, one chunk at each step; yield the bytes of each chunk that is done.

    Each step waits for the kernel outside the interpreter's lock, so a thread may run it beside an event loop. The
    descriptor may be closed meanwhile.

    Raises:
        OSError: there is not enough memory.
    """
    own_fd = os.dup(fd)
    chunks = _populate(own_fd, region_bytes, chunk_bytes)
    # Not at the generator's end, because one that never began has no end.
    weakref.finalize(chunks, os.close, own_fd)
    return chunks


def map_region(fd: int, region_bytes: int, *, writable: bool = True) -> NDArray[np.uint8]:
    """Map a region as an array of bytes that keeps the mapping alive; its pages stay out of core dumps."""
    if region_bytes == 0:
        return np.zeros(0, np.uint8)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, mapped_bytes(fd, region_bytes), mmap.MAP_SHARED, protection)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return np.frombuffer(mapping, np.uint8, count=region_bytes)


def mapped_bytes(fd: int, region_bytes: int) -> int:
    """Return the bytes to map of a file for a region of it.

    Huge pages are mapped and unmapped only as a whole. A file on them is long enough; other files may end anywhere.
    """
    has_huge_pages = os.fstatvfs(fd).f_bsize > mmap.PAGESIZE
    return whole_pages(fd, region_bytes) if has_huge_pages else region_bytes


def whole_pages(fd: int, num_bytes: int) -> int:
    """Return the bytes that a file of `num_bytes` takes in whole pages of its file system, which may be huge pages."""
    return round_up(num_bytes, os.fstatvfs(fd).f_bsize)


def reopen_read_only(fd: int) -> int:
    """Return another descriptor of the same region that allows no writing."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def _populate(own_fd: int, region_bytes: int, chunk_bytes: int) -> Iterator[int]:
    mapping = huge_pages.mapping_for(own_fd, region_bytes)
    for start in range(0, region_bytes, chunk_bytes):
        step_bytes = min(chunk_bytes, region_bytes - start)
        if mapping is not None:
            enter_pages(mapping[start : start + step_bytes])
        allocate(own_fd, start, step_bytes)
        yield step_bytes


def allocate(fd: int, start: int, num_bytes: int) -> None:
    """Make some pages of a region exist.

    Raises:
        OSError: there is not enough memory.
    """
    while True:
        try:
            os.posix_fallocate(fd, start, num_bytes)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno == errno.EINTR:
                continue
            raise
        return
