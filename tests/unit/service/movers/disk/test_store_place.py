"""A directory of stores is private and within its limit, and nothing foreign in it is touched."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvlease.units import show_bytes
from kvleased.movers.disk.allocating import allocate
from kvleased.movers.disk.cells import StoreShape
from kvleased.movers.disk.errors import StoreError
from kvleased.movers.disk.store_place import STORES_OF_A_SHAPE_MAX, StorePlace
from tests.laws.disks import Driver, Pools, labels_of, payload_of

SHAPE = Pools().shape
FILE_ID = bytes(range(16))
HEAD = SHAPE.head(FILE_ID)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory that does not exist yet."""
    return tmp_path / "above" / "disk"


@pytest.fixture
def place(directory: Path) -> Iterator[StorePlace]:
    """The store place of that directory, without a limit."""
    place = StorePlace(directory, 0)
    yield place
    place.leave()


def _refusal(place: StorePlace, shape: StoreShape = SHAPE) -> str:
    with pytest.raises(StoreError) as caught:
        place.open(shape)
    return str(caught.value)


def _name(directory: Path, shape: StoreShape = SHAPE, number: int = 0) -> Path:
    return directory / f"{shape.digest}.{number}.store"


def _private(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)


def _files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.glob("*.store*")}


def test_stores_of_two_owners_are_two_files(place: StorePlace, directory: Path) -> None:
    """Each of two owners finds its own store, whichever is opened first, even if their shapes are equal."""
    shapes = [replace(SHAPE, store_id=owner) for owner in ("aa", "bb")]
    first = [place.open(shape) for shape in shapes]
    for store in first:
        place.close(store)

    again = [place.open(shape) for shape in shapes[::-1]]

    assert [store.file_id for store in again] == [store.file_id for store in first[::-1]]
    assert len(_files(directory)) == 2


def test_store_takes_all_of_its_bytes_and_is_private(place: StorePlace, directory: Path) -> None:
    """Directory and file are private, and all of the file's bytes are allocated."""
    place.open(SHAPE)

    status = _name(directory).stat()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == SHAPE.file_bytes <= status.st_blocks * 512


@pytest.mark.parametrize("num_slots", [1, 2, 31, 32, 33, 1000])
@pytest.mark.parametrize("bytes_per_slot", [1, 4095, 4096, 65_536])
def test_store_takes_no_more_than_a_plan_counts(num_slots: int, bytes_per_slot: int) -> None:
    """A store is no larger than plans count: for each slot, a sector and the sectors of its bytes."""
    shape = replace(SHAPE, num_slots=num_slots, bytes_per_slot=bytes_per_slot)

    assert shape.file_bytes <= num_slots * (4096 + -(-bytes_per_slot // 4096) * 4096)


def test_caches_of_one_shape_have_a_store_each(place: StorePlace, directory: Path) -> None:
    """A second cache of the same shape gets another file, a closed file serves again, and their number is limited."""
    first = place.open(SHAPE)
    others = [place.open(SHAPE) for _ in range(STORES_OF_A_SHAPE_MAX - 1)]
    assert str(STORES_OF_A_SHAPE_MAX) in _refusal(place)

    place.close(first)
    place.open(SHAPE)

    assert len(others) + 1 == len(_files(directory))


def test_other_shape_is_another_file(place: StorePlace, directory: Path) -> None:
    """Layout, number of slots and bytes of a slot each change the file's name."""
    for shape in (
        SHAPE,
        replace(SHAPE, layout=bytes(32)),
        replace(SHAPE, num_slots=17),
        replace(SHAPE, bytes_per_slot=4096),
    ):
        place.open(shape)

    assert len(_files(directory)) == 4


def _loose(directory: Path) -> None:
    _private(directory)
    directory.chmod(0o750)


def _linked(directory: Path) -> None:
    _private(directory.with_name("elsewhere"))
    directory.symlink_to(directory.with_name("elsewhere"))


def _file_instead(directory: Path) -> None:
    _private(directory.parent)
    directory.write_bytes(b"mine")


def _foreign(directory: Path) -> None:
    _private(directory)
    os.chown(directory, 12_345, -1)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (_loose, "0750"),
        (_linked, "Not a directory"),
        (_file_instead, "Not a directory"),
        pytest.param(
            _foreign,
            "12345",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_directory_of_others_is_refused(
    place: StorePlace, directory: Path, make: Callable[[Path], None], complaint: str
) -> None:
    """A directory that others may enter, or that is no plain directory, is refused with the reason."""
    make(directory)

    reason = _refusal(place)
    assert complaint in reason
    assert str(directory) in reason


def _readable(path: Path) -> None:
    path.write_bytes(HEAD)
    path.chmod(0o644)


def _symlink(path: Path) -> None:
    path.with_name("mine").write_bytes(b"mine")
    path.symlink_to(path.with_name("mine"))


def _hard_link(path: Path) -> None:
    path.with_name("mine").write_bytes(b"mine")
    path.with_name("mine").chmod(0o600)
    os.link(path.with_name("mine"), path)


def _other_content(path: Path) -> None:
    path.write_bytes(b"mine" * 100_000)
    path.chmod(0o600)


def _other_head(path: Path) -> None:
    path.write_bytes(replace(SHAPE, num_slots=17).head(FILE_ID))
    path.chmod(0o600)


def _short(path: Path) -> None:
    path.write_bytes(HEAD[:50] + b"mine")
    path.chmod(0o600)


def _empty_and_readable(path: Path) -> None:
    path.touch(0o644)


def _pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (_readable, "0644"),
        (_symlink, "symbolic link"),
        (_hard_link, "another name"),
        (_other_content, "not a store of this cache"),
        (_other_head, "not a store of this cache"),
        (_short, "not a store of this cache"),
        (_empty_and_readable, "0644"),
        (_pipe, "not a regular file"),
        (_socket, "a socket"),
        (Path.mkdir, "directory"),
    ],
)
def test_file_of_others_is_refused_and_not_touched(
    place: StorePlace, directory: Path, make: Callable[[Path], None], complaint: str
) -> None:
    """A foreign file with a store's name stays as it is, and the reason says what it is."""
    _private(directory)
    make(_name(directory))
    kept = {path.name: path.lstat() for path in directory.iterdir()}

    reason = _refusal(place)

    assert complaint in reason
    assert str(_name(directory)) in reason
    assert any(advice in reason for advice in ("remove ", "move it away", "chmod 0600"))
    for name, status in kept.items():
        now = (directory / name).lstat()
        assert (now.st_size, now.st_mtime_ns, now.st_mode) == (
            status.st_size,
            status.st_mtime_ns,
            status.st_mode,
        )


@pytest.mark.parametrize("offset", range(0, 128, 5))
def test_changed_head_is_a_store_of_others(directory: Path, offset: int) -> None:
    """A store with any changed byte in its head is refused as foreign."""
    place = StorePlace(directory, 0)
    place.open(SHAPE)
    place.leave()
    with _name(directory).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))

    with _entered(directory) as following:
        assert "not a store of this cache" in _refusal(following)


def test_file_is_another_one_only_where_bytes_were_lost(directory: Path) -> None:
    """A store keeps its file id while all of it is there; a new one, or one that was cut off, has another id."""
    found = []
    for change in (
        lambda: None,
        lambda: os.truncate(_name(directory), SHAPE.file_bytes - 1),
        lambda: None,
        _name(directory).unlink,
    ):
        with _entered(directory) as place:
            found.append(place.open(SHAPE).file_id)
        change()
    with _entered(directory) as place:
        found.append(place.open(SHAPE).file_id)

    kept, again, cut_off, once_more, new = found
    assert kept == again
    assert cut_off == once_more
    assert len({kept, cut_off, new}) == 3


@contextmanager
def _entered(directory: Path, bytes_max: int = 0) -> Iterator[StorePlace]:
    place = StorePlace(directory, bytes_max)
    yield place
    place.leave()


def test_second_process_is_kept_out(place: StorePlace, directory: Path) -> None:
    """Two movers never share a directory; the second one gets it once the first has ended."""
    place.open(SHAPE)
    code = f"""
import sys; from pathlib import Path
from kvleased.movers.disk.store_place import StorePlace; from kvleased.movers.disk.cells import StoreShape
place = StorePlace(Path({str(directory)!r}), 0)
try: place.open({SHAPE!r}); print("had")
except Exception as error: print(error)
place.leave()
"""

    def other() -> str:
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout

    refused = other()
    place.leave()

    assert "another daemon is using" in refused
    assert other() == "had\n"


def test_limit_counts_all_stores(directory: Path) -> None:
    """A store that would exceed the limit is refused with the numbers, and leaves nothing behind."""
    with _entered(directory, 2 * SHAPE.file_bytes) as ours:
        ours.open(SHAPE)
        ours.open(SHAPE)

        reason = _refusal(ours)

        assert "disk_bytes_max" in reason
        assert len(_files(directory)) == 2


def test_unused_store_gives_way_to_one_in_use(directory: Path) -> None:
    """If the limit needs it, stores of earlier lives are removed, the longest unused first."""
    shapes = [replace(SHAPE, layout=bytes([number] * 32)) for number in range(4)]
    with _entered(directory) as earlier:
        for shape in shapes[:3]:
            earlier.open(shape)
    for number, shape in enumerate(shapes[:3]):
        os.utime(_name(directory, shape), (100 - number, 100 - number))
    unfinished = _name(directory, shapes[0]).with_suffix(".store.new")
    unfinished.touch(0o600)
    (directory / "notes").write_text("mine")

    with _entered(directory, 3 * SHAPE.file_bytes) as ours:
        ours.open(shapes[2])
        assert len(_files(directory)) == 4
        ours.open(shapes[3])

    kept = {_name(directory, shape).name for shape in (shapes[0], shapes[2], shapes[3])}
    assert set(_files(directory)) - {unfinished.name} == kept
    assert (directory / "notes").exists()


def test_no_store_gives_way_in_vain(directory: Path) -> None:
    """A store for which there would be no room even without the unused ones is refused, and these stay."""
    other = replace(SHAPE, layout=bytes([1] * 32))
    with _entered(directory) as earlier:
        earlier.open(other)
        earlier.open(SHAPE)

    with _entered(directory, 2 * SHAPE.file_bytes) as ours:
        ours.open(SHAPE)
        larger = replace(SHAPE, num_slots=2 * SHAPE.num_slots)
        reason = _refusal(ours, larger)

    assert f"but {show_bytes(SHAPE.file_bytes)} of the" in reason
    assert _name(directory, other).exists()


def test_unused_stores_give_way_to_a_lower_limit(directory: Path) -> None:
    """After a restart with a lower limit, unused stores go until the rest fits; those in use and others' files stay."""
    shapes = [replace(SHAPE, layout=bytes([number] * 32)) for number in range(4)]
    with _entered(directory) as earlier:
        for shape in shapes:
            earlier.open(shape)
    for number, shape in enumerate(shapes):
        os.utime(_name(directory, shape), (100 + number, 100 + number))
    (directory / "notes").write_text("mine")

    with _entered(directory, 2 * SHAPE.file_bytes) as ours:
        ours.open(shapes[0])
        assert len(_files(directory)) == 4
        ours.keep_below_limit()

    kept = {_name(directory, shape).name for shape in (shapes[0], shapes[3])}
    assert set(_files(directory)) == kept
    assert (directory / "notes").exists()


def test_store_that_was_only_read_counts_as_used(directory: Path) -> None:
    """A store is in use from its opening to its closing, also if nothing is written to it between the two."""
    with _entered(directory) as earlier:
        earlier.open(SHAPE)
    os.utime(_name(directory), (1, 1))

    with _entered(directory) as ours:
        ours.open(SHAPE)
        opened_at = _name(directory).stat().st_mtime
        os.utime(_name(directory), (1, 1))
    closed_at = _name(directory).stat().st_mtime

    assert min(opened_at, closed_at) > 1


@pytest.mark.parametrize(
    "num_bytes",
    [0, 1, 60, 75, 127, 128, SHAPE.file_bytes - 5000, SHAPE.file_bytes + 1, 2 * SHAPE.file_bytes],
)
def test_file_of_another_length_is_made_whole(directory: Path, num_bytes: int) -> None:
    """A store that was cut off gets its bytes back as zeros, one that is too long is cut: it counts as another file."""
    with _entered(directory) as earlier:
        before = earlier.open(SHAPE).file_id
    os.truncate(_name(directory), num_bytes)

    with _entered(directory, SHAPE.file_bytes) as ours:
        store = ours.open(SHAPE)
        ours.check(store)

    assert store.file_id != before
    status = _name(directory).stat()
    assert status.st_size == SHAPE.file_bytes <= status.st_blocks * 512


def _foreign_files(directory: Path) -> list[Path]:
    """Put files of others where stores may lie: one that is no store, and others whose heads are not quite heads."""
    contents = (b"mine" * 1000, HEAD[:-1] + b"\0" + bytes(4000), HEAD[:100], b"m")
    paths = [directory / f"{number:032x}.0.store" for number in range(len(contents))]
    paths.append(paths[0].with_suffix(".store.new"))
    for path, content in zip(paths, (*contents, contents[0]), strict=True):
        path.write_bytes(content)
        path.chmod(0o600)
        os.utime(path, (1, 1))
    return paths


def test_file_of_others_gives_way_to_no_store(directory: Path) -> None:
    """A file that only has a store's name counts against the limit and is never removed; if need be, it is named."""
    shapes = [replace(SHAPE, layout=bytes([number] * 32)) for number in range(2)]
    with _entered(directory) as earlier:
        earlier.open(shapes[0])
    paths = _foreign_files(directory)
    contents = [path.read_bytes() for path in paths]
    num_bytes = sum(map(len, contents))

    with _entered(directory, SHAPE.file_bytes + num_bytes - 1) as ours:
        reason = _refusal(ours, shapes[1])
    with _entered(directory, SHAPE.file_bytes + num_bytes) as ours:
        ours.open(shapes[1])

    assert "disk_bytes_max" in reason
    assert any(f"{path} is in the way" in reason for path in paths)
    assert [path.read_bytes() for path in paths] == contents
    assert _name(directory, shapes[1]).exists()


def _begun(_: Path) -> None:
    return


def _set_aside(path: Path) -> None:
    with path.open("r+b") as file:
        allocate(file.fileno(), SHAPE.file_bytes)


def _given_its_head(path: Path) -> None:
    _set_aside(path)
    with path.open("r+b") as file:
        file.write(HEAD)


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("go_on", [_begun, _set_aside, _given_its_head])
def test_left_over_of_a_creation_is_replaced(
    directory: Path, go_on: Callable[[Path], None], *, is_same: bool
) -> None:
    """A store whose creation was not finished is created anew, and gives way to another store."""
    _private(directory)
    left_over = _name(directory, SHAPE).with_suffix(".store.new")
    left_over.touch(0o600)
    go_on(left_over)
    shape = SHAPE if is_same else replace(SHAPE, layout=bytes(32))

    with _entered(directory, SHAPE.file_bytes) as place:
        place.open(shape)

    kept = {name: num_bytes for name, num_bytes in _files(directory).items() if num_bytes}
    assert kept == {_name(directory, shape).name: SHAPE.file_bytes}


def test_left_over_that_is_no_store_is_not_replaced(place: StorePlace, directory: Path) -> None:
    """A foreign file under the name of a store's creation stays, and the reason names it."""
    _private(directory)
    path = _name(directory).with_suffix(".store.new")
    path.write_bytes(b"mine")

    assert f"{path} is in the way" in _refusal(place)
    assert _files(directory) == {path.name: 4}


_IN_ITS_OWN_MOUNTS = """
import os, socket, subprocess, sys
from pathlib import Path
from kvleased.movers.disk.cells import StoreShape
from kvleased.movers.disk.errors import StoreError
from kvleased.movers.disk.store_place import StorePlace
mount = Path(sys.argv[1])
def run(*words): subprocess.run(words, check=True)
def attempt(num_slots, bytes_max=1 << 30):
    place = StorePlace(mount / "disk", bytes_max)
    try:
        place.open(StoreShape(layout=bytes(32), bytes_per_slot=65536, num_slots=num_slots))
        print("on")
    except StoreError as error:
        print("off:", error)
    place.leave()
    print(sorted(path.name[-4:] for path in (mount / "disk").iterdir()))
run("mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(mount))
attempt(1000)
attempt(10)
attempt(54, 0)
attempt(45, 0)
run("mount", "-o", "remount,ro", str(mount))
attempt(10)
attempt(11)
"""


def _ran_in_own_mounts(script: str, folder: Path) -> list[str]:
    """Run a script that may mount file systems in a folder, and return the lines that it prints."""
    can = subprocess.run(["unshare", "-rmn", "true"], capture_output=True, check=False)
    if can.returncode:
        pytest.skip(f"unshare is not permitted: {can.stderr.decode().strip()}")
    run = subprocess.run(
        ["unshare", "-rmn", sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr == ""
    return run.stdout.splitlines()


def test_full_and_read_only_file_systems_turn_the_store_off(tmp_path: Path) -> None:
    """A full or read-only file system turns the store off with that reason, and leaves nothing behind."""
    lines = _ran_in_own_mounts(_IN_ITS_OWN_MOUNTS, tmp_path)

    assert "No space left" in lines[0]
    assert lines[1:4] == ["['lock']", "on", "['lock', 'tore']"]
    assert "disk_bytes_max" in lines[4]
    assert lines[6:8] == ["on", "['lock', 'tore']"]
    assert "Read-only file system" in lines[8]
    assert "Read-only file system" in lines[10]


_NEARLY_FULL = """
import os, subprocess, sys
from pathlib import Path
from kvleased.movers.disk.cells import StoreShape
from kvleased.movers.disk.errors import StoreError
from kvleased.movers.disk.store_place import StorePlace
mount = Path(sys.argv[1])
def attempt(place, num_slots):
    store, reason = None, "on"
    try:
        store = place.open(StoreShape(layout=bytes(32), bytes_per_slot=65536, num_slots=num_slots))
    except StoreError as error:
        reason = str(error)
    found = [path.stat().st_size // 65536 for path in (mount / "disk").glob("*.store")]
    print(sorted(found), reason)
    return store
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(mount)], check=True)
for life in ((10, 20), (40, 40, 60, 60)):
    place = StorePlace(mount / "disk", 1 << 30)
    for num_slots in life:
        attempt(place, num_slots)
    place.leave()
    # The clock of files stands still for milliseconds, within which both stores may have been used.
    for at, path in enumerate(sorted((mount / "disk").glob("*.store"), key=lambda one: one.stat().st_size)):
        os.utime(path, (at, at))
place = StorePlace(mount / "disk", 1 << 30)
attempt(place, 60)
large = attempt(place, 60)
place.close(large)
attempt(place, 20)
attempt(place, 20)
place.disclaim(large.shape)
attempt(place, 20)
"""


def test_unused_store_gives_way_on_a_full_file_system(tmp_path: Path) -> None:
    """At the second try the longest unused goes if the file system needs its bytes: no claimed one, none in vain."""
    lines = _ran_in_own_mounts(_NEARLY_FULL, tmp_path)

    assert [line for line in lines if "No space left" not in line] == [
        "[10] on",
        "[10, 20] on",
        "[20, 40] on",
        "[60] on",
        "[20] on",
    ]
    refused = [line.partition("]")[0] for line in lines if "No space left" in line]
    assert refused == ["[10, 20", "[20, 40", "[20, 40", "[20, 40", "[60", "[60"]


_WITHOUT_FALLOCATE = """
import subprocess, sys
from pathlib import Path
from kvleased.movers.disk.cells import StoreShape
from kvleased.movers.disk.errors import StoreError
from kvleased.movers.disk.store_place import StorePlace
mount = Path(sys.argv[1])
subprocess.run(["mount", "-t", "ramfs", "ramfs", str(mount)], check=True)
place = StorePlace(mount / "disk", 1 << 30)
try:
    place.open(StoreShape(layout=bytes(32), bytes_per_slot=65536, num_slots=10))
except StoreError as error:
    print(error)
print(sorted(path.name for path in (mount / "disk").iterdir()))
"""


def test_file_system_that_sets_no_bytes_aside_turns_the_store_off(tmp_path: Path) -> None:
    """A file system that cannot allocate bytes without writing them turns the store off, and leaves nothing behind."""
    can = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "ramfs", "ramfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if can.returncode:
        pytest.skip(f"ramfs cannot be mounted: {can.stderr.decode().strip()}")

    run = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", _WITHOUT_FALLOCATE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )

    reason, left = run.stdout.splitlines()
    assert "cannot allocate the bytes of a file in advance" in reason
    assert left == "['stores.lock']"


def test_process_serves_and_outlives_a_kill(directory: Path) -> None:
    """After SIGKILL, the next mover process finds and serves what the first has stored."""
    settings_fd = os.memfd_create("settings")
    os.write(
        settings_fd, json.dumps({"disk_dir": str(directory), "disk_bytes_max": 1 << 20}).encode()
    )
    with _process(settings_fd) as driver:
        sums = [driver.fill(host, host) for host in range(4)]
        assert driver.store([1, 3, 5, 7], labels_of([0, 1, 2, 3]), [0, 1, 2, 3], sums).is_done

    with _process(settings_fd) as driver:
        assert sorted(driver.look()) == [1, 3, 5, 7]
        assert driver.load([7], labels_of([3]), [0]).failed == ()
        assert driver.block(0) == payload_of(3, driver.pools.bytes_per_block)
    os.close(settings_fd)


@contextmanager
def _process(settings_fd: int) -> Iterator[Driver]:
    """Run a mover as the daemon starts it, and kill it at the end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-m", "kvleased", "disk-mover", "--parent", str(os.getpid())]
    words += ["--settings-fd", str(settings_fd), "--link-fd", str(theirs.fileno())]
    process = subprocess.Popen(
        words, pass_fds=(settings_fd, theirs.fileno()), stderr=subprocess.DEVNULL
    )
    theirs.close()
    with Driver(ours, Pools()) as driver:
        driver.map()
        yield driver
        process.kill()
        process.wait()


def _renamed(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def _replaced(directory: Path) -> None:
    _renamed(directory)
    directory.mkdir(0o700)


def _moved_behind_a_link(directory: Path) -> None:
    _renamed(directory)
    directory.symlink_to(directory.with_name("elsewhere"))


def _file_replaced(directory: Path) -> None:
    path = _name(directory)
    path.rename(path.with_name("kept"))
    path.write_bytes(b"other")


def _overwrite(directory: Path, offset: int) -> None:
    """Change a byte of a store: the first 128 are its head, and the first slot's cell follows."""
    with _name(directory).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_overwritten_store_is_found_again_as_another(place: StorePlace, directory: Path) -> None:
    """A store whose head was damaged while it was open does not stay in the way; it is looked through anew."""
    store = place.open(SHAPE)
    before = store.file_id
    _overwrite(directory, 5)

    with pytest.raises(StoreError, match="overwritten"):
        place.check(store)
    place.close(store)
    again = place.open(SHAPE)

    assert again.file_id != before
    place.check(again)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda _: None, ""),
        (_renamed, "No such file"),
        (_replaced, "not the same directory as before"),
        (_moved_behind_a_link, "not the same directory as before"),
        (lambda directory: directory.chmod(0o755), "0755.*chmod 0700"),
        (lambda directory: _name(directory).chmod(0o644), "0644.*chmod 0600"),
        (
            lambda directory: (directory / "copy").hardlink_to(_name(directory)),
            r"another name too \(a hard link\); remove that name",
        ),
        (lambda directory: _name(directory).unlink(), "removed"),
        (_file_replaced, "not the same file as before"),
        (lambda directory: _overwrite(directory, 0), "overwritten"),
        (lambda directory: _overwrite(directory, 127), "overwritten"),
        (lambda directory: _overwrite(directory, 128), ""),
    ],
)
def test_open_store_is_seen_after(
    place: StorePlace, directory: Path, change: Callable[[Path], object], complaint: str
) -> None:
    """If a store's path leads elsewhere or is open to others, the error names the path that is wrong."""
    store = place.open(SHAPE)
    change(directory)

    if not complaint:
        place.check(store)
        return
    with pytest.raises(StoreError, match=complaint) as caught:
        place.check(store)
    assert str(directory) in str(caught.value) or "removed" in str(caught.value)


def _in_its_place(path: Path) -> None:
    path.mkdir(0o700)


def _nothing(_: Path) -> None:
    return


@pytest.mark.parametrize("is_next_process", [False, True])
@pytest.mark.parametrize(
    ("put", "complaint"),
    [(_nothing, "put it back"), (_in_its_place, "put the earlier one back")],
)
def test_directory_that_went_is_waited_for(
    directory: Path, put: Callable[[Path], None], complaint: str, *, is_next_process: bool
) -> None:
    """If a file system is unmounted or a directory renamed, no store is made; once it is back it is found again."""
    with ExitStack() as stack:
        place = stack.enter_context(_entered(directory))
        store = place.open(SHAPE)
        place.close(store)
        if is_next_process:
            directory_fd = os.open(directory, os.O_DIRECTORY)
            place.leave()
            place = StorePlace(directory, 0, directory_fd)
            stack.callback(place.leave)
        directory.rename(directory.with_name("elsewhere"))
        put(directory)
        made = list(directory.parent.rglob("*"))

        for _ in range(2):
            assert complaint in _refusal(place)
        assert list(directory.parent.rglob("*")) == made

        if directory.exists():
            directory.rmdir()
        directory.with_name("elsewhere").rename(directory)
        assert place.open(SHAPE).file_id == store.file_id


@pytest.mark.parametrize("is_next_process", [False, True])
def test_directory_that_others_may_enter_stays_off(
    directory: Path, *, is_next_process: bool
) -> None:
    """A store stays off until its directory is private again, however often it is tried."""
    with ExitStack() as stack:
        place = stack.enter_context(_entered(directory))
        place.close(place.open(SHAPE))
        if is_next_process:
            directory_fd = os.open(directory, os.O_DIRECTORY)
            place.leave()
            place = StorePlace(directory, 0, directory_fd)
            stack.callback(place.leave)
        directory.chmod(0o755)

        for _ in range(2):
            assert "chmod 0700" in _refusal(place)

        directory.chmod(0o700)
        place.open(SHAPE)


def test_directory_that_was_removed_is_not_made_again(place: StorePlace, directory: Path) -> None:
    """A directory that was removed is not made again, but used once somebody makes a new one."""
    before = place.open(SHAPE)
    place.close(before)
    shutil.rmtree(directory)

    for _ in range(2):
        assert "No such file or directory" in _refusal(place)
    assert not directory.exists()

    directory.mkdir(0o700)
    assert place.open(SHAPE).file_id != before.file_id


_UNMOUNTED = """
import os, subprocess, sys
from pathlib import Path
from kvleased.movers.disk.cells import StoreShape
from kvleased.movers.disk.errors import StoreError
from kvleased.movers.disk.store_place import StorePlace
mount = Path(sys.argv[1])
shape = StoreShape(layout=bytes(32), bytes_per_slot=65536, num_slots=10)
subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", mount], check=True)
place = StorePlace(mount, 0)
place.close(place.open(shape))
if sys.argv[2] == "removed":
    mount = mount / "disk"
    place = StorePlace(mount, 0)
    place.close(place.open(shape))
    for path in mount.iterdir():
        path.unlink()
    mount.rmdir()
subprocess.run(["umount", "-l", sys.argv[1]], check=True)
mount.mkdir(0o700, exist_ok=True)
for _ in range(2):
    try:
        print("had", place.open(shape))
    except StoreError as error:
        print(error)
print(sorted(path.name for path in mount.iterdir()))
"""


@pytest.mark.parametrize(
    ("before", "complaint"),
    [("there", "put the earlier one back"), ("removed", "on a different file system than before")],
)
def test_nothing_is_stored_below_a_mount_that_went(
    tmp_path: Path, before: str, complaint: str
) -> None:
    """If the file system is unmounted, nothing is stored in the directory below the mount."""
    can = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if can.returncode:
        pytest.skip(f"tmpfs cannot be mounted: {can.stderr.decode().strip()}")

    run = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", _UNMOUNTED, str(tmp_path), before],
        capture_output=True,
        text=True,
        check=True,
    )

    *reasons, left = run.stdout.splitlines()
    assert len(reasons) == 2
    assert all(complaint in reason for reason in reasons)
    assert left == "[]"
