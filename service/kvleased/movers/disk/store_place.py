"""Own the directory of the disk stores: who may use it, which files are in it, and how many bytes they may take.

No file name comes from a caller: a store's name is the digest of its shape, and a number, because several caches may
have the same shape. A file that is not certainly ours is never changed or removed.
"""

import fcntl
import mmap
import os
import secrets
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvlease.units import BYTES_PER_SECTOR
from kvleased.memory.limits import disk_limit_bytes
from kvleased.movers.disk.allocating import allocate
from kvleased.movers.disk.cells import BYTES_PER_CELL, BYTES_PER_FILE_ID, StoreShape
from kvleased.movers.disk.claiming import is_ours
from kvleased.movers.disk.errors import StoreError, told
from kvleased.movers.disk.giving_way import UNFINISHED, Clearing, TooFewBytesError, remove
from kvleased.movers.disk.store_file import StoreFile, write_whole

STORES_OF_A_SHAPE_MAX: Final = 16
"""Caches of one shape that can have a store each."""

_LOCK: Final = "stores.lock"
_OPEN_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_BYTES_PER_STAT_BLOCK: Final = 512
_CLEARED_BYTES: Final = 1 << 20
"""Bytes that are cleared in one call."""


class StorePlace:
    """A directory of stores that this process alone uses, from the first `open` that succeeds.

    From then on no other directory may take its place, unless the first was removed and cannot come back.
    """

    def __init__(self, path: Path, bytes_max: int, directory_fd: int = -1) -> None:
        """Assign; `bytes_max` is for all stores together, and 0 leaves a fifth of the file system to others.

        `directory_fd` is the directory if another process has entered it before; `leave` closes it.
        """
        self._path = path
        self._bytes_max = bytes_max
        self._directory_fd = directory_fd
        self._lock_fd = -1
        self._names: dict[StoreFile, str] = {}
        self._clearing = Clearing()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="store")

    def open(self, shape: StoreShape) -> StoreFile:
        """Open the store of a shape that no other cache has open; if there is none, make it, with all of its bytes.

        From now on it gives way to no other store, even if it cannot be opened, until its shape is disclaimed.

        Raises:
            StoreError: that is impossible; nothing is left of what was begun.
        """
        name = ""
        self._clearing.claim(shape.digest)
        try:
            self._enter()
            name = self._free_name(shape)
            try:
                fd = os.open(name, _OPEN_FLAGS, dir_fd=self._directory_fd)
            except FileNotFoundError:
                fd, file_id = self._make(name, shape)
            else:
                file_id = self._take(fd, name, shape)
            payload_fd = _past_the_cache(fd, shape)
        except OSError as error:
            raise StoreError(self._complaint(error, name)) from error
        path = self._path / name
        store = StoreFile(shape, path, file_id.hex(), fd, payload_fd, self._helper)
        self._names[store] = name
        store.note_use()
        return store

    def disclaim(self, shape: StoreShape) -> None:
        """Have the closed store of a cache that was deleted give way to others."""
        self._clearing.disclaim(shape.digest)

    def check(self, store: StoreFile) -> None:
        """Check that an open store is still what its path leads to, is whole, private, and begins as it did.

        If its beginning was overwritten or cut off, it is written anew, and the store counts as another file from then
        on. Otherwise the next daemon would not know it, and it would be in that daemon's way.

        Raises:
            StoreError: it is not, so the next daemon would not find what is written to it.
        """
        status, name = store.look(), self._names[store]
        try:
            self._check_directory()
            named = (self._path / name).stat(follow_symlinks=False)
        except OSError as error:
            raise StoreError(self._complaint(error, name)) from error
        if not os.path.samestat(named, status):
            message = (
                f"{self._path / name} is not the same file as before; keep others from replacing it"
            )
            raise StoreError(message)
        _check_private(status, self._path / name)
        is_new = store.renew_head(_new_file_id())
        store.check_bytes(status)
        if is_new:
            message = (
                f"{self._path / name} was overwritten; what is left in it is being searched for"
            )
            raise StoreError(message)

    def keep_below_limit(self) -> None:
        """Remove unused stores until all take no more than the limit, when all caches have had time to open theirs."""
        with suppress(OSError):
            self._clearing.keep_below(self._directory_fd, self._limit_bytes())

    def _complaint(self, error: OSError, name: str) -> str:
        """Return which path the kernel objects to, why, and, if known, what to do about it."""
        said = error.filename if isinstance(error.filename, str) else name
        return f"{self._path / said}: {told(error)}"

    def close(self, store: StoreFile) -> None:
        """Close a store; its file stays for the next cache of that shape."""
        del self._names[store]
        store.note_use()
        store.close()

    def purge(self, store: StoreFile) -> None:
        """Remove an open store's file with all that it holds, and close it; after a crash it is either whole or gone.

        Raises:
            StoreError: the path does not lead to it, or it cannot be removed for certain; it stays open.
        """
        self.check(store)
        name = self._names[store]
        try:
            remove(name, self._directory_fd)
            os.fsync(self._directory_fd)
        except OSError as error:
            raise StoreError(self._complaint(error, name)) from error
        self.close(store)

    def leave(self) -> None:
        """Close everything, so that others may use the directory."""
        for store in list(self._names):
            self.close(store)
        self._forget_directory()
        self._helper.shutdown()

    def _enter(self) -> None:
        """Have the directory open, private and locked: the same one as before, unless that was removed.

        Raises:
            OSError: it cannot be made or opened.
            StoreError: it is not ours alone, or not the same one as before.
        """
        if self._directory_fd >= 0 and os.fstat(self._directory_fd).st_nlink:
            self._check_directory()
            if self._lock_fd < 0:
                self._lock_fd = self._locked(self._directory_fd)
            return
        fd = self._opened()
        try:
            lock_fd = self._locked(fd)
        except (OSError, StoreError):
            os.close(fd)
            raise
        self._forget_directory()
        self._directory_fd, self._lock_fd = fd, lock_fd

    def _opened(self) -> int:
        """Open the directory; make it if none was open before, but never again, as nobody knows what it would lie on.

        Raises:
            OSError: it cannot be made or opened.
            StoreError: it took the place of a directory on another file system.
        """
        if self._directory_fd < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self._path.mkdir(mode=0o700)
        fd = os.open(self._path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if self._directory_fd >= 0 and os.fstat(fd).st_dev != os.fstat(self._directory_fd).st_dev:
            os.close(fd)
            message = (
                f"{self._path} is on a different file system than before; mount the earlier one"
            )
            raise StoreError(message)
        return fd

    def _locked(self, directory_fd: int) -> int:
        """Return the lock on a directory, which must be private.

        Raises:
            OSError: no lock can be made in it.
            StoreError: others may use it, or another process already does.
        """
        _check_private(os.fstat(directory_fd), self._path)
        fd = os.open(_LOCK, _OPEN_FLAGS | os.O_CREAT, 0o600, dir_fd=directory_fd)
        try:
            _check_private(os.fstat(fd), self._path / _LOCK)
            _lock(fd, f"another daemon is using {self._path}; choose another disk_dir")
        except (OSError, StoreError):
            os.close(fd)
            raise
        return fd

    def _check_directory(self) -> None:
        """Check that the path leads to the same directory as before, and that it is for us alone.

        Raises:
            OSError: it leads nowhere.
            StoreError: it leads to another directory, or others may use it.
        """
        directory = self._path.stat(follow_symlinks=False)
        if not os.path.samestat(directory, os.fstat(self._directory_fd)):
            raise StoreError(
                f"{self._path} is not the same directory as before; put the earlier one back"
            )
        _check_private(directory, self._path)

    def _forget_directory(self) -> None:
        for fd in {self._directory_fd, self._lock_fd} - {-1}:
            os.close(fd)
        self._directory_fd = self._lock_fd = -1

    def _free_name(self, shape: StoreShape) -> str:
        for number in range(STORES_OF_A_SHAPE_MAX):
            name = f"{shape.digest}.{number}.store"
            if name not in self._names.values():
                return name
        message = (
            f"{STORES_OF_A_SHAPE_MAX} caches of this shape already have a store, the most allowed"
        )
        raise StoreError(message)

    def _take(self, fd: int, name: str, shape: StoreShape) -> bytes:
        """Take an existing file that is a store of this shape, and make it as long as it was.

        A file of another length counts as another file from then on: what is left in it must be found anew.

        Raises:
            OSError: it cannot be read, or there is no room for its bytes; it is closed.
            StoreError: it is not such a file; it is closed without being touched.
        """
        try:
            path = self._path / name
            _check_private(os.fstat(fd), path)
            _lock(fd, f"another process is using {path}; end that process")
            file_id, status = _checked_store(fd, path, shape)
            if status.st_size != shape.file_bytes:
                file_id = _new_file_id()
                write_whole(fd, [shape.head(file_id)], 0)
                if status.st_size > shape.file_bytes:
                    os.ftruncate(fd, shape.file_bytes)
                _forget_cut_off(fd, shape, status.st_size)
                status = os.fstat(fd)
            if status.st_size < shape.file_bytes or _is_sparse(status):
                self._make_room(shape.file_bytes - status.st_size, name)
                allocate(fd, shape.file_bytes)
        except (OSError, StoreError):
            os.close(fd)
            raise
        return file_id

    def _make(self, name: str, shape: StoreShape) -> tuple[int, bytes]:
        """Make a store that gets its name only once all of it is there.

        Raises:
            OSError: there is no room for its bytes; nothing is left of it.
            StoreError: it would exceed the limit, or a file of others is in the way.
        """
        unfinished, file_id = name + UNFINISHED, _new_file_id()
        if not is_ours(unfinished, self._directory_fd):
            raise StoreError(self._foreign(unfinished))
        remove(unfinished, self._directory_fd)
        self._make_room(shape.file_bytes, name)
        flags = _OPEN_FLAGS | os.O_CREAT | os.O_EXCL
        fd = os.open(unfinished, flags, 0o600, dir_fd=self._directory_fd)
        try:
            _lock(fd, f"another process is using {self._path / unfinished}; end that process")
            # The head goes first, so that what is left of this after a kill says what it is.
            write_whole(fd, [shape.head(file_id)], 0)
            allocate(fd, shape.file_bytes)
            os.fsync(fd)
            directory_fd = self._directory_fd
            os.rename(unfinished, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
            os.fsync(directory_fd)
        except (OSError, StoreError):
            os.close(fd)
            remove(unfinished, self._directory_fd)
            raise
        return fd, file_id

    def _make_room(self, num_bytes: int, name: str) -> None:
        """Make room for so many more bytes of a store.

        Raises:
            OSError: the file system does not say how large it is.
            StoreError: the stores in use, and files of others, leave too few bytes below the limit.
        """
        try:
            self._clearing.make_room(self._directory_fd, name, num_bytes, self._limit_bytes())
        except TooFewBytesError as error:
            foreign = f"; {self._foreign(error.foreign)}" if error.foreign else ""
            raise StoreError(f"{error}{foreign}") from error

    def _limit_bytes(self) -> int:
        """Return the bytes that all stores may take together.

        Raises:
            OSError: the file system does not say how large it is.
        """
        return self._bytes_max or disk_limit_bytes(self._directory_fd)

    def _foreign(self, name: str) -> str:
        return f"{self._path / name} is in the way: it is not a store; move it away"


def _check_private(status: os.stat_result, path: Path) -> None:
    """Refuse a file or directory that others may have a hand in.

    Raises:
        StoreError: it belongs to another user, others may use it, it has a second name, or it is neither a plain file
            nor a directory.
    """
    is_directory = stat.S_ISDIR(status.st_mode)
    if not is_directory and not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is in the way: it is not a regular file; move it away")
    if status.st_uid != os.geteuid():
        message = (
            f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}, and only root can change that; have "
            "it chowned, or choose another disk_dir"
        )
        raise StoreError(message)
    if status.st_mode & 0o077:
        message = (
            f"the mode of {path} is {stat.S_IMODE(status.st_mode):04o}, so other users can use it; if it is yours "
            f"alone, chmod {'0700' if is_directory else '0600'}"
        )
        raise StoreError(message)
    if not is_directory and status.st_nlink > 1:
        raise StoreError(f"{path} has another name too (a hard link); remove that name")


def _new_file_id() -> bytes:
    return secrets.token_bytes(BYTES_PER_FILE_ID)


def _checked_store(fd: int, path: Path, shape: StoreShape) -> tuple[bytes, os.stat_result]:
    """Return the id and the status of a file that is a store of this shape; without an id if its head is cut off.

    Raises:
        StoreError: it is another file.
    """
    status, head = os.fstat(fd), os.pread(fd, BYTES_PER_CELL, 0)
    file_id = shape.file_id_of(head)
    if file_id is None and status.st_size < BYTES_PER_CELL and shape.has_head_with(head):
        file_id = b""
    if file_id is None:
        raise StoreError(f"{path} is in the way: it is not a store of this cache; remove it")
    return file_id, status


def _forget_cut_off(fd: int, shape: StoreShape, num_bytes: int) -> None:
    """Clear the cells that are left of slots whose bytes are not: each of these would be found, and then be retired."""
    first = shape.cell_offset_bytes(shape.num_slots_within(num_bytes))
    end = min(num_bytes, shape.cell_offset_bytes(shape.num_slots))
    for offset in range(first, end, _CLEARED_BYTES):
        write_whole(fd, [bytes(min(_CLEARED_BYTES, end - offset))], offset)


def _lock(fd: int, complaint: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreError(complaint) from None


def _is_sparse(status: os.stat_result) -> bool:
    return status.st_blocks * _BYTES_PER_STAT_BLOCK < status.st_size


def _past_the_cache(fd: int, shape: StoreShape) -> int:
    """Return a second descriptor that reads and writes past the page cache, or the same one if that is impossible."""
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return fd
    try:
        os.preadv(direct, [mmap.mmap(-1, BYTES_PER_SECTOR)], shape.payload_offset_bytes)
    except OSError:
        os.close(direct)
        return fd
    return direct
