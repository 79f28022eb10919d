"""Own the directory of host pools' files: it is for us alone, and no other one takes its place.

Files that were made elsewhere, as below a mount that went, would not be in memory, and the next life would not find
them.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class OtherDirectoryError(OSError):
    """The path does not lead to the directory that the daemon was started with, or others may use that."""


@contextmanager
def opened(directory: Path, started_fd: int | None = None) -> Iterator[int]:
    """Open the directory for as long as the context lasts.

    `started_fd` is the directory that the daemon was started with; a descriptor stays right wherever the path leads.

    Raises:
        OtherDirectoryError: it is another one, or others may use it.
        OSError: it cannot be opened.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(directory, os.fstat(fd), started_fd)
        yield fd
    finally:
        os.close(fd)


def _check(directory: Path, status: os.stat_result, started_fd: int | None) -> None:
    if started_fd is not None and not _may_be(status, os.fstat(started_fd)):
        reason = "it is not the directory that the daemon was started with; put that back, or restart the daemon"
        raise OtherDirectoryError(errno.ESTALE, reason, str(directory))
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        reason = (
            f"it belongs to user {status.st_uid} and its mode is {mode}, so other users can use it; if it is yours "
            "alone, chown it to this user and chmod 0700"
        )
        raise OtherDirectoryError(errno.EPERM, reason, str(directory))


def _may_be(status: os.stat_result, before: os.stat_result) -> bool:
    """Tell whether a directory is the one from before, or was made in its place on the same file system."""
    is_removed = not before.st_nlink
    return os.path.samestat(status, before) or (is_removed and status.st_dev == before.st_dev)
