"""A host pool's files are found by their own cache only; foreign files are never read or deleted."""

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvleased.memory import cpu, host_files
from kvleased.memory.cpu import map_region
from kvleased.memory.host_directory import OtherDirectoryError
from kvleased.memory.host_files import (
    HEAD_BYTES,
    HostFiles,
    HostSizes,
    NoRoomError,
    UnusableError,
    delete_files,
    open_files,
    unclaimed,
)

SIZES = HostSizes(slots_bytes=3 * 4096 + 100, records_bytes=HEAD_BYTES + 1000)
ONE, OTHER = bytes([1]) * 32, bytes([2]) * 32
NAME = (bytes([1]) * 16).hex()


def _open(
    directory: Path,
    identity: bytes = ONE,
    sizes: HostSizes = SIZES,
    started_fd: int | None = None,
) -> bool:
    """Open the files, close them again and tell whether they were found."""
    files = open_files(directory, identity, sizes, started_fd)
    _close(files)
    return files.is_found


def _close(files: HostFiles) -> None:
    os.close(files.slots_fd)
    os.close(files.records_fd)


def test_files_are_found_with_what_they_hold(tmp_path: Path) -> None:
    """The next life finds what one life has written, in whole pages of private files."""
    files = open_files(tmp_path, ONE, SIZES)
    assert not files.is_found
    os.pwrite(files.slots_fd, b"bytes", 4096)
    os.pwrite(files.records_fd, b"columns", HEAD_BYTES)
    _close(files)

    again = open_files(tmp_path, ONE, SIZES)

    assert again.is_found
    assert os.pread(again.slots_fd, 5, 4096) == b"bytes"
    assert os.pread(again.records_fd, 7, HEAD_BYTES) == b"columns"
    for fd, num_bytes in ((again.slots_fd, 4 * 4096), (again.records_fd, 2 * 4096)):
        assert os.fstat(fd).st_size == num_bytes
        assert os.fstat(fd).st_mode & 0o777 == 0o600
    _close(again)


def test_records_have_all_their_pages(tmp_path: Path) -> None:
    """All pages of the records exist: a page missing at a later write would end the process."""
    files = open_files(tmp_path, ONE, SIZES)

    assert os.fstat(files.records_fd).st_blocks * 512 >= SIZES.records_bytes
    _close(files)


def test_pool_that_does_not_fit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """If the file system has too little room, the refusal has both numbers and leaves nothing behind."""
    too_large = HostSizes(slots_bytes=1 << 60, records_bytes=SIZES.records_bytes)

    with pytest.raises(OSError, match=f"they need {(1 << 60) + SIZES.records_bytes} bytes, but it"):
        open_files(tmp_path, ONE, too_large)

    assert not list(tmp_path.iterdir())


def test_foreign_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """If either file is foreign, descriptors that were opened before are closed again."""
    for kind in ("records", "slots"):
        _open(tmp_path)
        os.truncate(tmp_path / f"{NAME}.{kind}", 4096)
        num_fds = len(list(Path("/proc/self/fd").iterdir()))

        assert not _open(tmp_path)

        assert len(list(Path("/proc/self/fd").iterdir())) == num_fds


def _huge_pages() -> Path | None:
    """Return a directory of huge pages of which some are free."""
    free = re.search(r"HugePages_Free: +([0-9]+)", Path("/proc/meminfo").read_text())
    if free is None or int(free[1]) < 4:
        return None
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next(
        (
            Path(where)
            for _, where, kind, *_ in mounts
            if kind == "hugetlbfs" and os.access(where, os.W_OK)
        ),
        None,
    )


@pytest.mark.skipif(_huge_pages() is None, reason="there are no huge pages to be had")
def test_files_of_huge_pages_are_whole_pages() -> None:
    """On huge pages files have whole pages, and are found, mapped and given back like others."""
    directory = Path(tempfile.mkdtemp(dir=_huge_pages()))
    files = open_files(directory, ONE, SIZES)
    try:
        region = map_region(files.slots_fd, SIZES.slots_bytes)
        region[:] = 7
        assert len(region) == SIZES.slots_bytes
        del region
        assert _open(directory)
    finally:
        _close(files)
        delete_files(directory, ONE)
        directory.rmdir()


def test_other_caches_have_other_files(tmp_path: Path) -> None:
    """No cache finds another's files, and each cache's files are deleted alone."""
    assert not _open(tmp_path, ONE)
    assert not _open(tmp_path, OTHER)

    delete_files(tmp_path, ONE)

    assert not _open(tmp_path, ONE)
    assert _open(tmp_path, OTHER)


def _cut(slots: Path, records: Path) -> None:
    assert records.exists()
    os.truncate(slots, 4096)


def _lengthen(slots: Path, records: Path) -> None:
    assert slots.exists()
    os.truncate(records, 1 << 20)


def _flip(slots: Path, records: Path) -> None:
    assert slots.exists()
    content = bytearray(records.read_bytes())
    content[20] ^= 1
    records.write_bytes(content)


def _empty(slots: Path, records: Path) -> None:
    assert slots.exists()
    records.write_bytes(b"")
    records.write_bytes(b"somebody's notes")


def _lose_records(slots: Path, records: Path) -> None:
    assert slots.exists()
    records.unlink()


def _lose_slots(slots: Path, records: Path) -> None:
    assert records.exists()
    slots.unlink()


def _link(slots: Path, records: Path) -> None:
    assert records.exists()
    slots.unlink()
    slots.with_name("elsewhere").write_bytes(bytes(4 * 4096))
    slots.symlink_to("elsewhere")


def _share_another(slots: Path, records: Path) -> None:
    _flip(slots, records)
    records.chmod(0o640)


def _share_unfinished(slots: Path, records: Path) -> None:
    assert slots.exists()
    os.truncate(records, 0)
    records.chmod(0o640)


def _directory(slots: Path, records: Path) -> None:
    assert records.exists()
    slots.unlink()
    slots.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(_cut, id="cut off"),
        pytest.param(_lengthen, id="longer"),
        pytest.param(_flip, id="flipped bit"),
        pytest.param(_empty, id="another file"),
        pytest.param(_lose_records, id="no records"),
        pytest.param(_lose_slots, id="no slots"),
        pytest.param(_link, id="link"),
        pytest.param(_share_another, id="another file that others may read"),
        pytest.param(_share_unfinished, id="unfinished and others may read it"),
        pytest.param(_directory, id="directory"),
    ],
)
def test_what_is_not_ours_is_moved_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path, Path], None]
) -> None:
    """A file that was not written here is neither used nor deleted, and a log line tells where it is."""
    _open(tmp_path)
    spoil(tmp_path / f"{NAME}.slots", tmp_path / f"{NAME}.records")
    before = {entry.lstat().st_ino for entry in tmp_path.iterdir()}

    assert not _open(tmp_path)

    after = {entry.lstat().st_ino for entry in tmp_path.iterdir()}
    assert before <= after
    assert "host_file_moved_aside" in capsys.readouterr().err
    assert _open(tmp_path)


@pytest.mark.parametrize("kind", ["records", "slots"])
def test_files_that_others_may_use_are_refused_and_found_once_they_are_private(
    tmp_path: Path, kind: str
) -> None:
    """Files that are otherwise ours are not moved aside because of their mode: the refusal says what to do."""
    _open(tmp_path)
    path = tmp_path / f"{NAME}.{kind}"
    path.chmod(0o640)
    num_fds = len(list(Path("/proc/self/fd").iterdir()))

    with pytest.raises(UnusableError, match=f"the mode of {path} is 0640.* chmod 0600"):
        _open(tmp_path)

    assert len(list(Path("/proc/self/fd").iterdir())) == num_fds
    path.chmod(0o600)
    assert _open(tmp_path)


def test_files_with_another_name_are_refused_and_found_without_it(tmp_path: Path) -> None:
    """A file with a second name may be written by that name, so it is refused until that name is gone."""
    _open(tmp_path)
    other = tmp_path / "elsewhere"
    other.hardlink_to(tmp_path / f"{NAME}.slots")

    with pytest.raises(
        UnusableError, match=f"{NAME}.slots has another name too \\(a hard link\\); remove"
    ):
        _open(tmp_path)

    other.unlink()
    assert _open(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_files_of_another_user_are_refused_and_found_once_they_are_ours(tmp_path: Path) -> None:
    """Files that were given to another user, as by a restored backup, are refused and keep the cache's blocks."""
    _open(tmp_path)
    os.chown(tmp_path / f"{NAME}.records", 12345, -1)

    with pytest.raises(UnusableError, match="belongs to user 12345, not to user 0"):
        _open(tmp_path)

    os.chown(tmp_path / f"{NAME}.records", 0, -1)
    assert _open(tmp_path)


_OF_NOBODY = """
import os, sys
from pathlib import Path
from kvleased.memory.host_files import HostSizes, UnusableError, open_files

os.setgroups([]), os.setgid(65534), os.setuid(65534)
sizes = HostSizes(slots_bytes=int(sys.argv[2]), records_bytes=int(sys.argv[3]))
try:
    open_files(Path("."), bytes.fromhex(sys.argv[1]), sizes)
except UnusableError as error:
    print(error.strerror)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("owner", "mode", "says"),
    [
        pytest.param(0, 0o600, "belongs to user 0, not to user 65534.* chown 65534, and", id="his"),
        pytest.param(
            0, 0o644, "belongs to user 0, not to user 65534.* chown 65534 and chmod 0600", id="open"
        ),
        pytest.param(65534, 0o400, "mode of .* is 0400, so its owner.* chmod 0600", id="own"),
    ],
)
def test_files_that_may_not_be_opened_are_refused_with_what_mends_it(
    tmp_path: Path, owner: int, mode: int, says: str
) -> None:
    """The kernel's error does not tell the cause, so the refusal goes by the file's owner and mode."""
    _open(tmp_path)
    for path in (tmp_path, *tmp_path.iterdir()):
        os.chown(path, 65534, 65534)
    records = tmp_path / f"{NAME}.records"
    os.chown(records, owner, owner)
    records.chmod(mode)
    numbers = [str(SIZES.slots_bytes), str(SIZES.records_bytes)]

    done = subprocess.run(
        [sys.executable, "-c", _OF_NOBODY, ONE.hex(), *numbers],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert re.search(says, done.stdout)
    assert "register the cache again" in done.stdout
    assert records.exists()


def test_files_that_cannot_be_opened_now_are_refused_and_found_later(tmp_path: Path) -> None:
    """A lack of descriptors refuses the files without moving them, as it does not tell whose they are."""
    _open(tmp_path)
    before = sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free_fd = os.open(tmp_path, os.O_RDONLY)
    os.close(lowest_free_fd)

    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_fd + 1, limits[1]))
    try:
        with pytest.raises(UnusableError, match=f"{NAME}.records cannot be opened.* Too many open"):
            _open(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert sorted(tmp_path.iterdir()) == before
    assert _open(tmp_path)


def test_refusal_for_want_of_room_names_what_was_moved_aside(tmp_path: Path) -> None:
    """Files moved aside are named as the first to delete, since nothing reads or deletes them."""
    for digit in range(5):
        (tmp_path / f"{NAME}.slots.aside-{digit}").write_bytes(bytes(4096 * (digit + 1)))

    with pytest.raises(NoRoomError) as refusal:
        _open(tmp_path, sizes=HostSizes(slots_bytes=1 << 60, records_bytes=SIZES.records_bytes))

    told = str(refusal.value)
    assert (
        f"because nothing reads them any more: {tmp_path / NAME}.slots.aside-4 (20480 bytes), "
        in told
    )
    assert "aside-1 (8192 bytes), and 1 more; make it larger, or host_bytes smaller" in told


def test_unfinished_files_are_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files whose maker was killed have no head yet and hold nothing, so they are made anew."""
    (tmp_path / f"{NAME}.records").touch(mode=0o600)
    assert not _open(tmp_path)
    os.truncate(tmp_path / f"{NAME}.slots", 100)
    os.truncate(tmp_path / f"{NAME}.records", 0)
    os.truncate(tmp_path / f"{NAME}.records", SIZES.records_bytes)

    assert not _open(tmp_path)

    assert _open(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert not capsys.readouterr().err


def test_files_of_nobody_are_counted(tmp_path: Path) -> None:
    """Files that belong to no registered cache are counted, as they take memory."""
    for identity in (ONE, OTHER):
        files = open_files(tmp_path, identity, SIZES)
        os.pwrite(files.slots_fd, bytes(SIZES.slots_bytes), 0)
        _close(files)

    whole = sum(unclaimed(tmp_path, []).values())

    assert whole >= 2 * (SIZES.slots_bytes + SIZES.records_bytes)
    assert sum(unclaimed(tmp_path, [ONE]).values()) == whole // 2
    assert unclaimed(tmp_path, [ONE, OTHER]) == {}


def test_directory_that_is_gone_is_an_error_of_the_system(tmp_path: Path) -> None:
    """If the directory is gone, the caller gets the system's error."""
    with pytest.raises(FileNotFoundError):
        open_files(tmp_path / "gone", ONE, SIZES)


def test_no_other_directory_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """Files are made in the directory of the start alone, or in one made after that was removed."""
    first = tmp_path / "host"
    first.mkdir(mode=0o700)
    started_fd = os.open(first, os.O_RDONLY | os.O_DIRECTORY)
    _open(first, started_fd=started_fd)
    first.rename(first.with_name("elsewhere"))
    first.mkdir(mode=0o700)

    with pytest.raises(OtherDirectoryError, match="put that back, or restart the daemon"):
        _open(first, started_fd=started_fd)
    assert not list(first.iterdir())

    first.rmdir()
    first.with_name("elsewhere").rename(first)
    assert _open(first, started_fd=started_fd)
    shutil.rmtree(first)
    first.mkdir(mode=0o700)
    assert not _open(first, started_fd=started_fd)
    os.close(started_fd)


def test_directory_that_others_may_enter_gets_no_files(tmp_path: Path) -> None:
    """A directory that was opened to others is refused, with what to do, until it is private again."""
    tmp_path.chmod(0o750)

    with pytest.raises(OtherDirectoryError, match=r"its mode is 0750.*chmod 0700"):
        _open(tmp_path)

    tmp_path.chmod(0o700)
    assert not _open(tmp_path)


def test_nothing_is_left_of_files_that_cannot_be_made(tmp_path: Path) -> None:
    """A pool larger than a file can be leaves nothing behind."""
    with pytest.raises(OSError, match=r"large|Invalid"):
        open_files(
            tmp_path, ONE, HostSizes(slots_bytes=(1 << 63) - 4096, records_bytes=HEAD_BYTES + 1)
        )

    assert not list(tmp_path.iterdir())


class FailingOs:
    """Stand in for `os`, with one call that fails, given by its number."""

    def __init__(self, failing_call: int) -> None:
        self._left = failing_call
        self.has_failed = False

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of `os`; `close` never fails, since it releases the descriptor in any case."""
        real = getattr(os, name)
        if name == "close" or not callable(real):
            return real

        def called(*arguments: Any, **words: Any) -> Any:
            self._left -= 1
            if not self._left:
                self.has_failed = True
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments, **words)

        return called


@pytest.mark.parametrize("had_files", [True, False], ids=["found", "made"])
def test_no_failing_call_loses_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_files: bool
) -> None:
    """If any call fails, the next registration finds or makes the files, and no descriptor stays open."""
    num_failed = 0
    for failing_call in range(1, 100):
        directory = tmp_path / str(failing_call)
        directory.mkdir(mode=0o700)
        if had_files:
            files = open_files(directory, ONE, SIZES)
            os.pwrite(files.slots_fd, b"bytes", 4096)
            _close(files)
        fds = len(list(Path("/proc/self/fd").iterdir()))
        failing = FailingOs(failing_call)
        with monkeypatch.context() as patched, suppress(OSError):
            patched.setattr(host_files, "os", failing)
            patched.setattr(cpu, "os", failing)
            _open(directory)

        again = open_files(directory, ONE, SIZES)

        is_made_anew = failing.has_failed and not had_files
        assert again.is_found == (had_files or not is_made_anew)
        assert os.pread(again.slots_fd, 5, 4096) == (b"bytes" if had_files else bytes(5))
        _close(again)
        assert len(list(Path("/proc/self/fd").iterdir())) == fds
        assert len(list(directory.iterdir())) == 2
        num_failed += failing.has_failed
        if not failing.has_failed:
            break

    assert num_failed > 5
