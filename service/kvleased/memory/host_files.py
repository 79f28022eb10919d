"""Own the files of a host pool that outlives the container: two in a directory of memory, found again by their names.

`<identity>.slots` has the bytes; `<identity>.records` has a head, which is written last, and the columns behind it. The
identity is a digest, under the daemon's secret, of everything that decides what a byte means. So a file of another
cache, geometry or secret has another name. A file under the right name that is not ours is moved aside, never used and
never deleted. A file that is ours but cannot be used as it is, or that cannot be looked at, stays where it is and is
refused.
"""

import errno
import os
import stat
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from kvleased.memory import cpu
from kvleased.memory.host_directory import opened
from kvleased.telemetry import logs

HEAD_BYTES: Final = 4096
"""Bytes at the start of the records that tell whose they are; they are there even if the region is not a file."""
_SLOTS: Final = ".slots"
_RECORDS: Final = ".records"
_NAME_BYTES: Final = 16
_HEAD: Final = struct.Struct("<8sQ32sQQ")
_MAGIC: Final = b"KVLHOST1"
_FORMAT: Final = 1
_DIGEST_BYTES: Final = 32
_FILES_NAMED_MAX: Final = 32
"""Files that one line of the log names."""
_ASIDE: Final = ".aside-"
_LEFT: Final = ", and register the cache again: the file has its blocks; or move the file away"
"""What is added to the advice about a file of an earlier life."""
_ASIDE_NAMED_MAX: Final = 4
"""Files moved aside that one refusal names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSizes:
    """The bytes of a host pool's files."""

    slots_bytes: int
    records_bytes: int
    """Including the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFiles:
    """The open files of one host pool."""

    slots_fd: int
    records_fd: int
    is_found: bool
    """Whether the files are of an earlier life, and hold what it left."""


class NoRoomError(OSError):
    """The file system does not have the bytes that the files need."""

    def __init__(self, reason: str, *, need_bytes: int, free_bytes: int) -> None:
        """Give the reason, and both numbers."""
        super().__init__(errno.ENOSPC, reason)
        self.need_bytes, self.free_bytes = need_bytes, free_bytes


class UnusableError(OSError):
    """A file of an earlier life cannot be used as it is; it stays there with its blocks until somebody mends that."""

    def __init__(self, number: int, reason: str) -> None:
        """Say which file it is and what to do."""
        super().__init__(number, reason)


class ForbiddenError(UnusableError):
    """A file of an earlier life may not be used until somebody changes its owner, mode or names."""


class _ForeignError(Exception):
    """A file under the right name is not ours."""


def open_files(
    directory: Path, identity: bytes, sizes: HostSizes, started_fd: int | None = None
) -> HostFiles:
    """Open the files of a host pool, or make them; `started_fd` is the directory that the daemon was started with.

    Raises:
        OtherDirectoryError: the directory is not the one of the daemon's start, or others may use it.
        NoRoomError: the directory has no room for them.
        UnusableError: they exist, but cannot be opened or read; a ForbiddenError if they are not this user's alone.
        OSError: they cannot be made for another reason.
    """
    with opened(directory, started_fd) as dir_fd:
        try:
            found = _find(directory, dir_fd, identity, sizes)
        except _ForeignError as error:
            _move_aside(directory, dir_fd, identity, str(error))
            found = None
        return found or _make(directory, dir_fd, identity, sizes)


def delete_files(directory: Path, identity: bytes) -> None:
    """Delete the files of a host pool."""
    with opened(directory) as dir_fd:
        _unlink(dir_fd, identity)


def unclaimed(directory: Path, identities: Collection[bytes]) -> dict[str, int]:
    """Return the names of other host pools' files in the directory, and the bytes that each takes."""
    claimed = {_name(identity, kind) for identity in identities for kind in (_SLOTS, _RECORDS)}
    found = {}
    with opened(directory) as dir_fd, os.scandir(dir_fd) as entries:
        for entry in entries:
            is_ours = _SLOTS in entry.name or _RECORDS in entry.name
            if is_ours and entry.name not in claimed:
                found[entry.name] = entry.stat(follow_symlinks=False).st_blocks * 512
    return found


def told_aside(directory: Path) -> str:
    """Return which files moved aside take the most, because deleting them makes room; empty if there are none."""
    aside: dict[str, int] = {}
    with suppress(OSError):
        aside = {name: num for name, num in unclaimed(directory, ()).items() if _ASIDE in name}
    if not aside:
        return ""
    most = sorted(aside.items(), key=lambda one: -one[1])[:_ASIDE_NAMED_MAX]
    named = ", ".join(f"{directory / name} ({num_bytes} bytes)" for name, num_bytes in most)
    others = f", and {len(aside) - len(most)} more" if len(aside) > len(most) else ""
    return f"first delete the files that were moved aside, because nothing reads them any more: {named}{others}; "


def tell_unclaimed(directory: Path, identities: Collection[bytes]) -> None:
    """Log which files of other host pools there are; name those that take the most."""
    found = unclaimed(directory, identities)
    if found:
        logs.line(
            "info",
            "host_files_unclaimed",
            directory=str(directory),
            num_files=len(found),
            bytes=sum(found.values()),
            files=dict(sorted(found.items(), key=lambda one: -one[1])[:_FILES_NAMED_MAX]),
            advice="a cache that is registered again exactly as before finds its files again; delete the files of any "
            "other cache or size, because they use memory",
        )


def _name(identity: bytes, kind: str) -> str:
    return identity[:_NAME_BYTES].hex() + kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A plain file under the right name; its content shows whose it is."""

    fd: int
    path: Path
    status: os.stat_result


def _find(directory: Path, dir_fd: int, identity: bytes, sizes: HostSizes) -> HostFiles | None:
    """Return the files of an earlier life; None if there are none, or if they were never finished."""
    with ExitStack() as opened:
        records, slots = (
            _open(dir_fd, directory / _name(identity, kind), opened) for kind in (_RECORDS, _SLOTS)
        )
        if records is None and slots is None:
            return None
        if records is None:
            raise _ForeignError("one of two files is missing")
        with _naming(records.path):
            head = os.pread(records.fd, HEAD_BYTES, 0)
        if not any(head):
            # Its maker was killed before it was finished, so nobody has stored anything in it yet.
            for file in (records, slots):
                _require(
                    file is None or not _fault(file.path, file.status),
                    "it is not a file of this user alone",
                )
            _unlink(dir_fd, identity)
            return None
        if slots is None:
            raise _ForeignError("one of two files is missing")
        _require(head == _head(identity, sizes), "the head of the file is not what was written")
        for file, num_bytes in ((records, sizes.records_bytes), (slots, sizes.slots_bytes)):
            with _naming(file.path):
                wanted = cpu.whole_pages(file.fd, num_bytes)
            found = file.status.st_size
            _require(found == wanted, f"a file has {found} bytes, not {wanted}")
        for file in (records, slots):
            if fault := _fault(file.path, file.status):
                raise ForbiddenError(errno.EPERM, f"{fault}{_LEFT}")
        opened.pop_all()
        return HostFiles(slots_fd=slots.fd, records_fd=records.fd, is_found=True)


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise _ForeignError(otherwise)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Tell system errors with the file's name: that a file cannot be read now does not prove whose it is."""
    try:
        yield
    except UnusableError:
        raise
    except OSError as error:
        reason = (
            f"{path} cannot be opened or read: {error.strerror}; it is left unchanged, with its blocks: correct that, "
            "and register the cache again"
        )
        raise UnusableError(error.errno or errno.EIO, reason) from error


def _open(dir_fd: int, path: Path, opened: ExitStack) -> _File | None:
    """Return the plain file at a path, to be closed with the others; None if there is none."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with _naming(path):
        try:
            status = os.stat(path.name, dir_fd=dir_fd, follow_symlinks=False)
            _require(stat.S_ISREG(status.st_mode), "it is no plain file")
            fd = os.open(path.name, flags, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            fault = _fault(path, status) or _shut(path, status)
            raise ForbiddenError(errno.EACCES, f"{fault}{_LEFT}") from error
        opened.callback(os.close, fd)
        status = os.fstat(fd)
    _require(stat.S_ISREG(status.st_mode) and status.st_nlink > 0, "it is no plain file")
    return _File(fd=fd, path=path, status=status)


def _fault(path: Path, status: os.stat_result) -> str:
    """Return why a file is not this user's alone and what to do about it; empty if it is."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid():
        also = " and chmod 0600" if mode & 0o077 else ""
        return (
            f"{path} belongs to user {status.st_uid}, not to user {os.getuid()}, and only root can change that; if the "
            f"file is yours, chown {os.getuid()}{also}"
        )
    if mode & 0o077:
        return f"the mode of {path} is {mode:04o}, so other users can use it; if it is yours alone, chmod 0600"
    if status.st_nlink > 1:
        return f"{path} has another name too (a hard link); remove that name"
    return ""


def _shut(path: Path, status: os.stat_result) -> str:
    """Return why a file that is this user's alone cannot be opened, and what to do about it."""
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o600 != 0o600:  # noqa: PLR2004 - to read and write
        return (
            f"the mode of {path} is {mode:04o}, so its owner cannot read and write it; chmod 0600"
        )
    return (
        f"{path} cannot be opened although its mode allows it, so another access control of this machine denies it; "
        "let the daemon read and write the file"
    )


def _make(directory: Path, dir_fd: int, identity: bytes, sizes: HostSizes) -> HostFiles:
    _require_room(directory, dir_fd, sizes.slots_bytes + sizes.records_bytes)
    fds: list[int] = []
    try:
        for kind, num_bytes in (
            (_RECORDS, sizes.records_bytes),
            (_SLOTS, sizes.slots_bytes),
        ):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fds.append(os.open(_name(identity, kind), flags, 0o600, dir_fd=dir_fd))
            os.fchmod(fds[-1], 0o600)
            os.ftruncate(fds[-1], cpu.whole_pages(fds[-1], num_bytes))
        records_fd, slots_fd = fds
        # If a page of a mapped file could not be had later, that would end the process.
        for _ in cpu.populate_chunks(records_fd, sizes.records_bytes, sizes.records_bytes):
            pass
        head = cpu.map_region(records_fd, sizes.records_bytes)[:HEAD_BYTES]
        head[:] = bytearray(_head(identity, sizes))
    except OSError:
        _close(fds)
        _unlink(dir_fd, identity)
        raise
    return HostFiles(slots_fd=slots_fd, records_fd=records_fd, is_found=False)


def _require_room(directory: Path, dir_fd: int, num_bytes: int) -> None:
    """Refuse files that do not fit before anything is made; huge pages, and tmpfs without a limit, report no size."""
    room = os.fstatvfs(dir_fd)
    free_bytes = room.f_bavail * room.f_frsize
    if room.f_blocks and num_bytes > free_bytes:
        reason = (
            f"they need {num_bytes} bytes, but it has {free_bytes} free; {told_aside(directory)}make it larger, or "
            "host_bytes smaller"
        )
        raise NoRoomError(reason, need_bytes=num_bytes, free_bytes=free_bytes)


def _head(identity: bytes, sizes: HostSizes) -> bytes:
    packed = _HEAD.pack(_MAGIC, _FORMAT, identity, sizes.slots_bytes, sizes.records_bytes)
    return (packed + blake3(packed).digest(_DIGEST_BYTES)).ljust(HEAD_BYTES, b"\0")


def _move_aside(directory: Path, dir_fd: int, identity: bytes, reason: str) -> None:
    suffix = f"{_ASIDE}{time.time_ns()}"
    for kind in (_RECORDS, _SLOTS):
        name = _name(identity, kind)
        try:
            os.rename(name, name + suffix, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except FileNotFoundError:
            continue
        logs.line(
            "warning",
            "host_file_moved_aside",
            path=str(directory / (name + suffix)),
            reason=reason,
            advice="nothing reads it any more; delete it, because it uses memory",
        )


def _unlink(dir_fd: int, identity: bytes) -> None:
    for kind in (_SLOTS, _RECORDS):
        try:
            os.unlink(_name(identity, kind), dir_fd=dir_fd)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
