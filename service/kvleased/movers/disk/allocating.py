"""Own how the bytes of a file are set aside; `store_place` decides how many."""

import ctypes
import errno
import os
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_NO_FALLOCATE: Final = "the file system cannot allocate the bytes of a file in advance"


def allocate(fd: int, num_bytes: int) -> None:
    """Make a file own its first `num_bytes` on the disk; bytes that it lacked before are zero.

    This makes the system call itself: if a file system does not have it, `os.posix_fallocate` writes to every block,
    which takes minutes in which nothing else is done.

    Raises:
        OSError: there is no room for the bytes, or the file system cannot promise them.
    """
    while _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
        number = ctypes.get_errno()
        if number == errno.EOPNOTSUPP:
            raise OSError(number, _NO_FALLOCATE)
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
