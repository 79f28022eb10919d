"""Own the file of the root secret; tenants' keys are derived from it, so that they are the same in every life."""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from kvleased.system.directories import UnusableError

NUM_BYTES: Final = 32
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_ADVICE: Final = "make one with: (umask 077; head -c 32 /dev/urandom > FILE)"


def ensure(path: Path, other: Path | None = None) -> None:
    """See that a file has a secret: check an existing one, else copy the one in the other file, else make one.

    If the other file did not exist, it gets the secret, too; if it has another secret, it stays as it is.

    Raises:
        UnusableError: an existing secret cannot be used, or none can be made.
    """
    _ensure(path, other)
    if other is not None:
        _ensure(other, path)


def _ensure(path: Path, other: Path | None) -> None:
    try:
        read(path)
    except FileNotFoundError:
        try:
            _make(path, _found(other) or secrets.token_bytes(NUM_BYTES))
        except OSError as error:
            space = "free some space there, or " if error.errno in _FULL else ""
            advice = f"{space}name another one with --secret-file"
            message = f"secret file {path} cannot be created: {error.strerror}; {advice}"
            raise UnusableError(message) from error
        read(path)


def _found(path: Path | None) -> bytes:
    """Return the secret in a file; empty if there is no such file."""
    if path is None:
        return b""
    try:
        return read(path)
    except FileNotFoundError:
        return b""


def read(path: Path) -> bytes:
    """Return the secret in a file.

    Raises:
        FileNotFoundError: there is no such file.
        UnusableError: the file is not this user's alone, or is not as long as a secret.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        reason = (
            "it is a symbolic link; name the file that it points to" if is_link else error.strerror
        )
        message = f"secret file {path} cannot be used: {reason}"
        raise UnusableError(message) from error
    try:
        _check(path, os.fstat(fd))
        return os.pread(fd, NUM_BYTES, 0)
    finally:
        os.close(fd)


def _check(path: Path, status: os.stat_result) -> None:
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif status.st_uid != os.getuid():
        reason = f"it belongs to user {status.st_uid}, not to user {os.getuid()}"
    elif status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        reason = f"its mode is {mode:04o}, so other users can read it; make a new secret that nobody has seen, and "
        reason += "chmod 600 it"
    elif status.st_size != NUM_BYTES:
        reason = f"it has {status.st_size} bytes, not {NUM_BYTES}"
    if reason:
        message = f"secret file {path} cannot be used: {reason}; {_ADVICE}"
        raise UnusableError(message)


def restore(path: Path, content: bytes) -> None:
    """Write a secret that is in use to its file again, if the file has gone with its directory.

    Raises:
        UnusableError: the file has another secret by now, or cannot be written.
    """
    try:
        found = read(path)
    except FileNotFoundError:
        try:
            _make(path, content)
        except OSError as error:
            message = f"secret file {path} is missing and cannot be created again: {error.strerror}"
            raise UnusableError(message) from error
        found = read(path)
    if found != content:
        message = (
            f"secret file {path} holds a different secret from the one in use; after the next start, nothing that is "
            "cached now can be found"
        )
        raise UnusableError(message)


def _make(path: Path, content: bytes) -> None:
    """Make a secret file, whole or not at all; if several processes make one at once, one wins."""
    own = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(own, flags, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask has taken away
        _write(fd, content)
        os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
    finally:
        os.close(fd)
        own.unlink()


def _write(fd: int, content: bytes) -> None:
    try:
        os.write(fd, content)
    except OSError as error:
        if error.errno == errno.EINVAL:
            # A file of huge pages can be mapped, but a secret is not worth a huge page.
            raise OSError(errno.EINVAL, "files of huge pages cannot be written") from error
        raise
