"""Own which stores that no cache uses give way to a store that needs their bytes; `store_place` says which are used."""

import os
import re
import stat
from collections.abc import Collection, Iterator
from typing import Final

from kvlease.units import show_bytes
from kvleased.movers.disk.claiming import is_ours

UNFINISHED: Final = ".new"
"""What the name of a store ends with as long as not all of it is there."""
_NAME: Final = re.compile(r"[0-9a-f]{32}\.[0-9]{1,2}\.store")


class TooFewBytesError(Exception):
    """The stores in use, and files of others, leave too few bytes below the limit; nothing was removed."""

    def __init__(self, reason: str, *, foreign: str) -> None:
        """Say why, and name a file of others that is in the way, if there is one."""
        super().__init__(reason)
        self.foreign = foreign


def make_room(directory_fd: int, num_bytes: int, bytes_max: int, in_use: Collection[str]) -> None:
    """Make room for so many bytes, below the limit and on the file system, by removing stores that are not in use.

    Those unused for longest go first, and none goes in vain. A file that only has a store's name counts, and stays.

    Raises:
        OSError: the file system does not say how large it is.
        TooFewBytesError: the limit leaves too few bytes, whatever is removed; nothing was.
    """
    stores = dict(_stores(directory_fd))
    unused = sorted(stores.keys() - set(in_use), key=lambda name: stores[name].st_mtime_ns)
    ours = [name for name in unused if is_ours(name, directory_fd)]
    used_bytes = sum(status.st_size for status in stores.values())
    removable_bytes = sum(stores[name].st_size for name in ours)
    above_bytes = used_bytes + num_bytes - bytes_max
    if above_bytes > removable_bytes:
        message = (
            f"the store needs {show_bytes(num_bytes)}, but {show_bytes(used_bytes - removable_bytes)} of the "
            f"{show_bytes(bytes_max)} that disk_bytes_max allows are in use"
        )
        foreign = [name for name in unused if name not in ours]
        raise TooFewBytesError(message, foreign=foreign[-1] if foreign else "")
    lacking_bytes = num_bytes - _free_bytes(directory_fd, num_bytes)
    # If all of them are too few for the file system, they stay, and the file system says what it lacks.
    left_bytes = max(above_bytes, lacking_bytes if lacking_bytes <= removable_bytes else 0)
    for name in ours:
        if left_bytes <= 0:
            return
        remove(name, directory_fd)
        left_bytes -= stores[name].st_size


def remove(name: str, directory_fd: int) -> None:
    """Remove a file from a directory, if it is still there."""
    try:
        os.unlink(name, dir_fd=directory_fd)
    except FileNotFoundError:
        return


def _free_bytes(directory_fd: int, otherwise_bytes: int) -> int:
    """Return the free bytes of the file system; one that has no limit, such as some of memory, does not say them."""
    room = os.fstatvfs(directory_fd)
    return room.f_bavail * room.f_frsize if room.f_blocks else otherwise_bytes


def _stores(directory_fd: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files that are ours by name, kind and owner."""
    for name in os.listdir(directory_fd):
        if _NAME.fullmatch(name.removesuffix(UNFINISHED)):
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                yield name, status
