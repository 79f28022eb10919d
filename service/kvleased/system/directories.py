"""Own the privacy of the daemon's directories and the locks on them; what lies in them is others' business."""

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Final

from kvlease._runtime import LOCK_FILE
from kvleased.system.mounts import mount_of

PATIENCE_SECONDS: Final = 2.0
"""Seconds to wait for a lock: processes of a daemon that was killed are about to end."""
_LOOK_SECONDS: Final = 0.02
_IN_MEMORY: Final = ("tmpfs", "hugetlbfs", "ramfs")


class UnusableError(Exception):
    """A directory or a file of the configuration cannot be used; the message says which, why, and what to do."""


def enter(option: str, directory: Path, *, may_make: bool = False) -> int:
    """Return a lock on a directory that only this user may enter; make the directory if it is missing and may be made.

    The mode of an existing directory is never changed: others may have files in it.

    Raises:
        UnusableError: the directory is missing, others may enter it, or another daemon is in it.
    """
    try:
        _require_private(directory, may_make=may_make)
        return _lock(option, directory, may_make=may_make)
    except OSError as error:
        message = f"{option} {directory} cannot be used: {error.strerror}"
        raise UnusableError(message) from error


def hold(option: str, directory: Path) -> int:
    """Return a lock on an entered directory itself: the lock on the file in it is lost if the file is removed.

    Raises:
        UnusableError: another daemon is in the directory.
    """
    try:
        return _lock(option, directory.resolve(), may_make=False)
    except OSError as error:
        message = f"{option} {directory} cannot be used: {error.strerror}"
        raise UnusableError(message) from error


def require_memory(option: str, directory: Path) -> None:
    """Refuse a directory that is not in memory, where a pool would be as slow as a disk.

    Raises:
        UnusableError: the directory is on a file system of another kind.
    """
    mount = mount_of(directory.stat().st_dev)
    if mount is not None and mount.kind not in _IN_MEMORY:
        message = (
            f"{option} {directory} cannot be used: it is on {mount.kind}; name a directory on tmpfs or hugetlbfs, such "
            "as a directory below /dev/shm"
        )
        raise UnusableError(message)


def _require_private(directory: Path, *, may_make: bool) -> None:
    if may_make:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700)
            directory.chmod(0o700)  # whatever the umask has taken away
        except FileExistsError:
            advice = "name a directory that does not exist yet, and it will be created"
        else:
            return
    else:
        advice = "name a private directory (chmod 700) that belongs to this user"
    try:
        status = directory.stat() if may_make else directory.lstat()
    except FileNotFoundError:
        reason = f"it does not exist; {advice}"
        if directory.is_symlink():
            reason = "it is a symbolic link to nothing; make the directory that it points to"
        raise FileNotFoundError(errno.ENOENT, reason) from None
    _check_status(directory, status, advice, may_make=may_make)


def _check_status(directory: Path, status: os.stat_result, advice: str, *, may_make: bool) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link; name the directory that it points to")
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"it is not a directory; {advice}")
    if status.st_uid != os.getuid():
        reason = f"it belongs to user {status.st_uid}, not to user {os.getuid()}; {advice}"
        raise PermissionError(errno.EPERM, reason)
    if status.st_mode & 0o077:
        other = (
            f"name a directory that does not exist yet, such as {directory / 'kvlease'}, and it will be created, or "
            if may_make
            else ""
        )
        reason = (
            f"its mode is {stat.S_IMODE(status.st_mode):04o}, so other users can enter it; {other}make this one "
            "private (chmod 700) if nothing else uses it"
        )
        raise PermissionError(errno.EPERM, reason)


def _lock(option: str, directory: Path, *, may_make: bool) -> int:
    """Return a descriptor that keeps every other daemon out of the directory for as long as it is open."""
    if may_make:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        # All versions lock this file; directories that the daemon may not make are locked themselves.
        fd = os.open(directory / LOCK_FILE, flags, 0o600)
    else:
        # This works where the file system is full or read-only, too.
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                continue
            os.close(fd)
            message = (
                f"another daemon is using {directory}; stop that daemon or choose another {option}"
            )
            raise UnusableError(message) from None
        return fd
