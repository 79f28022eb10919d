"""Laws of epoch numbers: they grow, whatever the clock says and however they are remembered."""

import os
import time
from pathlib import Path

import pytest

from kvleased.supervision.epochs import FILE, Epochs

CLOCK = 1_800_000_000


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that is set by hand."""
    found = [CLOCK]
    monkeypatch.setattr(time, "time", lambda: float(found[0]))
    return found


def test_life_is_numbered_by_the_clock(tmp_path: Path) -> None:
    """An epoch's number is the wall clock in seconds, or one more than the last in the same second."""
    epochs = Epochs([(tmp_path, None)])

    assert [epochs.begin(), epochs.begin()] == [CLOCK, CLOCK + 1]
    assert repr(epochs) == f"<Epochs last {CLOCK + 1}>"


def test_clock_that_is_set_back_takes_no_number_back(tmp_path: Path, clock: list[int]) -> None:
    """A later daemon over the same directory counts on from the last epoch, and by the clock once that is ahead."""
    Epochs([(tmp_path, None)]).begin()
    clock[0] -= 3600
    assert Epochs([(tmp_path, None)]).begin() == CLOCK + 1

    clock[0] = CLOCK + 60
    assert Epochs([(tmp_path, None)]).begin() == CLOCK + 60


def test_number_is_remembered_in_each_directory(tmp_path: Path, clock: list[int]) -> None:
    """The number is kept in each directory: the sockets' one may go with the service, and the disk store's stays."""
    runtime_dir, disk_dir = tmp_path / "run", tmp_path / "disk"
    for directory in (runtime_dir, disk_dir):
        directory.mkdir()
    Epochs([(runtime_dir, None), (disk_dir, None)]).begin()
    clock[0] -= 3600
    (runtime_dir / FILE).unlink()

    assert Epochs([(runtime_dir, None), (disk_dir, None)]).begin() == CLOCK + 1
    assert (runtime_dir / FILE).read_text() == f"{CLOCK + 1}\n"
    assert (runtime_dir / FILE).stat().st_mode & 0o777 == 0o600
    assert [one.name for one in runtime_dir.iterdir()] == [FILE]


def test_another_directory_at_the_path_is_left_alone(tmp_path: Path, clock: list[int]) -> None:
    """The number goes into the directory of the start, by its descriptor, and not into what lies at its path later."""
    disk_dir = tmp_path / "disk"
    disk_dir.mkdir()
    directory_fd = os.open(disk_dir, os.O_RDONLY | os.O_DIRECTORY)
    epochs = Epochs([(disk_dir, directory_fd)])
    epochs.begin()
    disk_dir.rename(tmp_path / "away")
    disk_dir.mkdir()
    clock[0] -= 3600

    epochs.begin()

    assert list(disk_dir.iterdir()) == []
    assert [one.name for one in (tmp_path / "away").iterdir()] == [FILE]
    assert Epochs([(tmp_path / "away", None)]).begin() == CLOCK + 2
    os.close(directory_fd)


@pytest.mark.parametrize("content", [b"", b"soon\n", b"9" * 40, b"-1\n", b"\xff\xfe\n"])
def test_file_that_is_no_number_is_passed_over(tmp_path: Path, content: bytes) -> None:
    """A file without a number, written by somebody else, does not stop a daemon from starting."""
    (tmp_path / FILE).write_bytes(content)

    assert Epochs([(tmp_path, None)]).begin() == CLOCK


def test_number_that_cannot_be_kept_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the number cannot be kept, the daemon starts all the same and logs it."""
    assert Epochs([(tmp_path / "gone", None)]).begin() == CLOCK
    assert "epoch_not_kept" in capfd.readouterr().err + capfd.readouterr().out
