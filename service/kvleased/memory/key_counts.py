"""Own the memory of one tenant's key counts: only this process writes it, and workers get a read-only descriptor."""

import fcntl
import mmap
import os
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.memory.key_counts import (
    ASK_ALWAYS_AT,
    BYTES_PER_COUNT,
    HEAD,
    HEAD_BYTES,
    MAGIC,
    VERSION,
    region_bytes,
)
from kvleased.memory import cpu

_SEAL_FUTURE_WRITE: Final = 0x10
"""F_SEAL_FUTURE_WRITE, which Python 3.11 does not name: from now on no new mapping can write, nor any descriptor."""
_SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE


class CountsRegion:
    """The counts of one tenant of one cache, in memory that ends with this life of the daemon and with its readers."""

    def __init__(self, mapping: mmap.mmap, read_only_fd: int) -> None:
        """Take over a mapped region; `made` makes one."""
        self.read_only_fd = read_only_fd
        self.num_bytes = len(mapping)
        self.counts: NDArray[np.uint32] = np.frombuffer(mapping, np.uint32, offset=HEAD_BYTES)
        self._mapping = mapping

    def __repr__(self) -> str:
        """Show how many buckets there are."""
        return f"<CountsRegion {len(self.counts)} buckets>"

    @classmethod
    def made(cls, num_buckets: int, epoch: int) -> Self:
        """Make a region of zeros whose size is fixed and which nobody else can write.

        Raises:
            OSError: there is no memory or descriptor for it, or this kernel cannot keep others from writing.
        """
        num_bytes = region_bytes(num_buckets)
        fd = os.memfd_create("kvlease:key_counts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED)
            mapping.madvise(mmap.MADV_DONTDUMP)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            HEAD.pack_into(mapping, 0, MAGIC, VERSION, 0, num_buckets, epoch)
            return cls(mapping, cpu.reopen_read_only(fd))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Tell readers of the region to believe nothing in it any more, and let go of it."""
        self._mapping[ASK_ALWAYS_AT : ASK_ALWAYS_AT + BYTES_PER_COUNT] = b"\1\0\0\0"
        os.close(self.read_only_fd)
