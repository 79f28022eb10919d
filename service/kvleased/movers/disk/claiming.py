"""Own how a file is known as ours before it is removed, whatever the shape of its store; `store_place` asks."""

import errno
import os

from kvleased.movers.disk.cells import BYTES_PER_CELL, is_head


def is_ours(name: str, directory_fd: int) -> bool:
    """Tell whether nothing of others is lost if a name is removed from a directory.

    That is so if its file says of itself that it is a store, or if it has no bytes yet, like a store that was only
    begun; it may have them set aside.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory_fd)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        # Blank first: bytes that are only set aside count as data once they have been read.
        return _is_blank(fd) or is_head(os.pread(fd, BYTES_PER_CELL, 0))
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_blank(fd: int) -> bool:
    try:
        os.lseek(fd, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO
    return False
