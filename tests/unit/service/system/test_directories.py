"""A directory has one daemon at a time and is private; secrets are readable by nobody else."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvleased.command_line import run
from kvleased.credentials import secret
from kvleased.system import directories
from kvleased.system.directories import UnusableError, enter, require_memory
from kvleased.system.mounts import mount_of


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A directory that only this user may enter."""
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    return directory


def test_directory_that_must_exist_is_not_made(private: Path) -> None:
    """A directory that must exist, such as a mount, is not made: it would fill what lies below the mount."""
    with pytest.raises(UnusableError, match=r"--disk-dir .* it does not exist"):
        enter("--disk-dir", private / "missing")

    assert not (private / "missing").exists()


def test_directory_behind_a_link_is_refused(private: Path) -> None:
    """A symbolic link is refused: whoever can change the link could make us write elsewhere."""
    (private / "real").mkdir(mode=0o700)
    (private / "link").symlink_to("real")

    with pytest.raises(UnusableError, match="symbolic link"):
        enter("--disk-dir", private / "link")


def test_link_to_nothing_is_called_that(private: Path) -> None:
    """A link whose directory has gone is not called a directory that is missing and would be made."""
    (private / "link").symlink_to("nowhere")

    with pytest.raises(UnusableError, match="symbolic link to nothing; make the directory"):
        enter("--runtime-dir", private / "link", may_make=True)


def test_directory_that_others_may_enter_is_refused(private: Path) -> None:
    """A directory that others may enter is refused, as it holds bytes of requests; its mode is left as it is."""
    private.chmod(0o750)

    with pytest.raises(UnusableError, match=r"0750.*chmod 700"):
        enter("--host-dir", private)

    assert private.stat().st_mode & 0o777 == 0o750


def test_directory_is_one_daemons_until_its_last_process_ends(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory stays locked until the last process that inherited its lock has ended."""
    monkeypatch.setattr(directories, "PATIENCE_SECONDS", 0.05)
    fd = enter("--disk-dir", private)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[fd]
    )
    os.close(fd)

    with pytest.raises(UnusableError, match="another daemon is using"):
        enter("--disk-dir", private)
    child.send_signal(signal.SIGKILL)
    child.wait()

    os.close(enter("--disk-dir", private))
    assert child.stdin is not None
    child.stdin.close()


def test_start_without_the_disk_directory_says_so(
    private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk directory that cannot be used ends the start with a sentence and the status of bad settings."""
    status = run(
        ["serve", "--runtime-dir", str(private / "run"), "--disk-dir", str(private / "no")]
    )

    assert status == os.EX_CONFIG
    assert (
        f"--disk-dir {private / 'no'} cannot be used: it does not exist" in capsys.readouterr().err
    )


def test_host_pools_lie_in_memory_alone(private: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A host pool's directory must be in memory: one on a disk is refused."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - tmpfs " in line and Path(line.split()[4]).is_dir():
            require_memory("--host-dir", Path(line.split()[4]))
    mount = mount_of(private.stat().st_dev)
    if mount is not None and mount.kind == "tmpfs":
        pytest.skip("the tests' directory is in memory")

    status = run(["serve", "--runtime-dir", str(private / "run"), "--host-dir", str(private)])

    assert status == os.EX_CONFIG
    assert "name a directory on tmpfs" in capsys.readouterr().err


def test_secret_is_made_once_for_this_user_alone(private: Path) -> None:
    """A missing secret is made private, whatever the umask; the next start finds the same secret."""
    path = private / "secret"
    before = os.umask(0o277)
    try:
        secret.ensure(path)
    finally:
        os.umask(before)
    made = secret.read(path)

    secret.ensure(path)

    assert secret.read(path) == made
    assert (len(made), path.stat().st_mode & 0o777) == (32, 0o600)
    assert [entry.name for entry in private.iterdir()] == ["secret"]


def _narrow(path: Path) -> None:
    path.write_bytes(bytes(31))
    path.chmod(0o600)


def _readable(path: Path) -> None:
    path.write_bytes(bytes(32))
    path.chmod(0o640)


def _linked(path: Path) -> None:
    path.with_name("other").write_bytes(bytes(32))
    path.symlink_to("other")


def _piped(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _of_somebody_else(path: Path) -> None:
    path.write_bytes(bytes(32))
    path.chmod(0o600)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(_narrow, "31 bytes, not 32", id="short"),
        pytest.param(_readable, "0640", id="readable"),
        pytest.param(_linked, "symbolic link", id="link"),
        pytest.param(_piped, "not a regular file", id="pipe"),
        pytest.param(
            _of_somebody_else,
            "belongs to user 12345",
            id="owner",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away"),
        ),
    ],
)
def test_secret_that_cannot_be_trusted_ends_the_start(
    private: Path, capsys: pytest.CaptureFixture[str], spoil: object, says: str
) -> None:
    """A secret that others may have read, or that is malformed, is refused with what to do and left as it is."""
    path = private / "secret"
    spoil(path)  # type: ignore[operator]  # a function of this module
    before = path.lstat()

    status = run(["serve", "--runtime-dir", str(private / "run"), "--secret-file", str(path)])

    assert status == os.EX_CONFIG
    assert says in capsys.readouterr().err
    assert path.lstat() == before


def test_secret_that_cannot_be_made_ends_the_start(
    private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the secret's file cannot be made, the start names the setting that helps."""
    path = private / "no" / "secret"

    status = run(["serve", "--runtime-dir", str(private / "run"), "--secret-file", str(path)])

    assert status == os.EX_CONFIG
    assert "--secret-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EINVAL, "huge pages cannot be written; name another one with"),
        (errno.ENOSPC, "free some space there, or name another one with"),
    ],
    ids=["huge pages", "full"],
)
def test_secret_that_cannot_be_written_leaves_nothing_behind(
    number: int, says: str, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that takes no bytes is refused with a reason and what to do, and left as it was."""

    def write(fd: int, content: bytes) -> int:
        raise OSError(number, f"{len(content)} bytes not written to {fd}")

    monkeypatch.setattr(os, "write", write)

    with pytest.raises(UnusableError, match=says):
        secret.ensure(private / "secret")

    assert not list(private.iterdir())


def test_secret_in_use_is_written_again_where_it_has_gone(private: Path) -> None:
    """A secret in use is written again if its file has gone, so the next start finds it; an existing one is kept."""
    path = private / "secret"
    secret.ensure(path)
    in_use = secret.read(path)
    path.unlink()

    for _ in range(2):
        secret.restore(path, in_use)

        assert secret.read(path) == in_use
    with pytest.raises(UnusableError, match="a different secret from the one in use"):
        secret.restore(path, bytes(32))
    assert secret.read(path) == in_use


def test_secret_that_cannot_be_written_again_is_told_of(private: Path) -> None:
    """If the directory has gone for good, a reason is logged and not a traceback."""
    with pytest.raises(UnusableError, match="is missing and cannot be created again: No such file"):
        secret.restore(private / "gone" / "secret", bytes(32))
