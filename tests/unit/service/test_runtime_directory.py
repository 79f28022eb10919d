"""Laws of the directories that settings name: who may enter them, and where the secret lies."""

import os
from pathlib import Path

import pytest

from kvleased.command_line import run
from kvleased.config.sources import load
from kvleased.credentials import secret
from kvleased.system.directories import UnusableError, enter


def test_relative_runtime_directory_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative directory is made absolute: addresses are printed for readers in other directories."""
    monkeypatch.chdir(tmp_path)

    assert load(["--runtime-dir", "run"]).local_socket == tmp_path / "run" / "kvlease.sock"


def test_default_runtime_directory_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A default directory whose path is too long ends the start with a sentence and not a traceback."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/{'d' * 100}")

    with pytest.raises(SystemExit):
        load([])

    assert "107" in capsys.readouterr().err


def test_runtime_directory_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the directory's place ends the start with a sentence and the status of bad settings."""
    file = tmp_path / "file"
    file.touch()

    status = run(["serve", "--runtime-dir", str(file)])

    assert status == os.EX_CONFIG
    assert "cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mode", [0o1777, 0o755, 0o710], ids=["sticky", "readable", "entered by a group"]
)
def test_runtime_directory_that_others_may_enter_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    """A directory that others may enter is refused, and its mode and contents are left as they are."""
    tmp_path.chmod(mode)

    status = run(["serve", "--runtime-dir", str(tmp_path)])

    assert status == os.EX_CONFIG
    assert f"{mode:04o}" in capsys.readouterr().err
    assert tmp_path.stat().st_mode & 0o7777 == mode
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory somebody else's")
def test_runtime_directory_of_somebody_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory of another user is refused: its owner could replace our sockets."""
    os.chown(tmp_path, 12345, 12345)

    assert run(["serve", "--runtime-dir", str(tmp_path)]) == os.EX_CONFIG
    assert "belongs to user 12345" in capsys.readouterr().err


def test_runtime_directory_is_made_private_or_taken_as_it_is(tmp_path: Path) -> None:
    """A missing directory is made private, whatever the umask; a private one is taken as it is."""
    directory = tmp_path / "above" / "run"
    before = os.umask(0o277)
    try:
        os.close(enter("--runtime-dir", directory, may_make=True))
    except UnusableError:
        pytest.fail("the umask decided")
    finally:
        os.umask(before)

    os.close(enter("--runtime-dir", directory, may_make=True))
    assert directory.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        pytest.param([], None, id="nothing outlives the container"),
        pytest.param(["--host-dir", "/h"], "/h/secret", id="host"),
        pytest.param(["--host-dir", "/h", "--disk-dir", "/d"], "/d/secret", id="disk lasts longer"),
        pytest.param(["--disk-dir", "/d", "--secret-file", "/s"], "/s", id="named"),
    ],
)
def test_secret_lies_where_it_lasts_longest(arguments: list[str], path: str | None) -> None:
    """A named secret file goes before one in a directory, and the disk's directory before the one in memory."""
    assert load(arguments).secret_path == (None if path is None else Path(path))


def test_secret_stays_when_a_directory_is_added_or_left_out(tmp_path: Path) -> None:
    """The secret is copied to the other directory, so blocks are found again whichever one a daemon is given."""
    for name in ("host", "disk"):
        (tmp_path / name).mkdir(mode=0o700)
    host, disk = ["--host-dir", str(tmp_path / "host")], ["--disk-dir", str(tmp_path / "disk")]

    secrets = set()
    for arguments in (host, [*host, *disk], disk, host, [*host, *disk]):
        settings = load(arguments)
        assert settings.secret_path is not None
        secret.ensure(settings.secret_path, settings.other_secret_path)
        secrets.add(secret.read(settings.secret_path))

    assert len(secrets) == 1


def test_secret_of_the_other_directory_is_left_as_it_is(tmp_path: Path) -> None:
    """Two directories that have secrets of their own keep them, and the disk's secret counts."""
    disk, host = tmp_path / "disk", tmp_path / "host"
    for path in (disk, host):
        secret.ensure(path)
    before = secret.read(disk), secret.read(host)

    secret.ensure(disk, host)

    assert (secret.read(disk), secret.read(host)) == before
    assert (
        load(["--disk-dir", "/d", "--host-dir", "/h", "--secret-file", "/s"]).other_secret_path
        is None
    )
