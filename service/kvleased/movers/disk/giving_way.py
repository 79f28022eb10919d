"""Own which stores that no cache uses give way to a store that needs their bytes; `store_place` knows what is open."""

import os
import re
import stat
from collections.abc import Iterator, Mapping
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


class Clearing:
    """Remove stores that no cache uses if another store needs their bytes: those unused for longest first."""

    def __init__(self) -> None:
        """Start without any cache."""
        self._looks: dict[str, int] = {}
        """How often room was looked for, by the digest of each shape that a cache uses."""

    def __repr__(self) -> str:
        """Show how many stores may not be removed."""
        return f"<Clearing {len(self._looks)} claimed>"

    def claim(self, digest: str) -> None:
        """Have the stores of this shape give way to no other."""
        self._looks.setdefault(digest, 0)

    def disclaim(self, digest: str) -> None:
        """Have the stores of this shape give way."""
        self._looks.pop(digest, None)

    def make_room(self, directory_fd: int, name: str, num_bytes: int, bytes_max: int) -> None:
        """Make room for so many more bytes of a claimed store: below the limit, and on the file system.

        No store is removed in vain, and at the first look none for the file system's sake: when a process starts, not
        all caches have claimed theirs yet. A file that only has a store's name counts, and stays.

        Raises:
            OSError: the file system does not say how large it is.
            TooFewBytesError: the limit leaves too few bytes, whatever is removed; nothing was.
        """
        digest = _digest(name)
        is_first = not self._looks[digest]
        self._looks[digest] += 1
        stores, unused = self._looked_through(directory_fd)
        ours = [one for one in unused if is_ours(one, directory_fd)]
        removable_bytes = sum(stores[one].st_size for one in ours)
        kept_bytes = sum(status.st_size for status in stores.values()) - removable_bytes
        above_bytes = kept_bytes + removable_bytes + num_bytes - bytes_max
        if above_bytes > removable_bytes:
            foreign = next((one for one in reversed(unused) if one not in ours), "")
            raise TooFewBytesError(_told(num_bytes, kept_bytes, bytes_max), foreign=foreign)
        lacking_bytes = 0 if is_first else num_bytes - _free_bytes(directory_fd, num_bytes)
        if lacking_bytes > removable_bytes:
            # They would go in vain; the file system says what it lacks.
            lacking_bytes = 0
        _remove_oldest(
            directory_fd,
            {one: stores[one].st_size for one in ours},
            max(above_bytes, lacking_bytes),
        )

    def keep_below(self, directory_fd: int, bytes_max: int) -> None:
        """Remove unused stores until all take no more than the limit, which may be lower than when they were made.

        Raises:
            OSError: the directory cannot be read.
        """
        stores, unused = self._looked_through(directory_fd)
        above_bytes = sum(status.st_size for status in stores.values()) - bytes_max
        if above_bytes > 0:
            sizes = {one: stores[one].st_size for one in unused if is_ours(one, directory_fd)}
            _remove_oldest(directory_fd, sizes, above_bytes)

    def _looked_through(self, directory_fd: int) -> tuple[dict[str, os.stat_result], list[str]]:
        """Return the files with names of stores, and which of them no cache uses, those unused for longest first."""
        stores = dict(_stores(directory_fd))
        unused = [one for one in stores if _digest(one) not in self._looks]
        unused.sort(key=lambda one: stores[one].st_mtime_ns)
        return stores, unused


def remove(name: str, directory_fd: int) -> None:
    """Remove a file from a directory, if it is still there."""
    try:
        os.unlink(name, dir_fd=directory_fd)
    except FileNotFoundError:
        return


def _remove_oldest(directory_fd: int, sizes: Mapping[str, int], num_bytes: int) -> None:
    """Remove the first of some files until so many bytes are gone."""
    for name, file_bytes in sizes.items():
        if num_bytes <= 0:
            return
        remove(name, directory_fd)
        num_bytes -= file_bytes


def _told(num_bytes: int, used_bytes: int, bytes_max: int) -> str:
    return (
        f"the store needs {show_bytes(num_bytes)}, but {show_bytes(used_bytes)} of the {show_bytes(bytes_max)} that "
        "disk_bytes_max allows are in use"
    )


def _digest(name: str) -> str:
    return name.partition(".")[0]


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
