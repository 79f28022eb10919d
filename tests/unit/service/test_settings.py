"""Settings come from flags, environment and file, in this order, and are checked."""

import re
from pathlib import Path

import pytest

from kvleased.__main__ import EX_CONFIG, run
from kvleased.settings import Settings, load


def test_flags_win_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source overrides the next one, setting by setting."""
    file = tmp_path / "kvleased.toml"
    file.write_text("http_port = 1\ngrpc_port = 1\nmax_leases = 1\n")
    monkeypatch.setenv("KVLEASED_HTTP_PORT", "2")
    monkeypatch.setenv("KVLEASED_GRPC_PORT", "2")

    settings = load(["--config", str(file), "--http-port", "3"])

    assert (settings.http_port, settings.grpc_port, settings.max_leases) == (3, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["--tcp-host", "0.0.0.0"], "loopback", id="public address"),  # noqa: S104
        pytest.param(["--http-port", "70000"], "http_port", id="no port"),
        pytest.param(["--drain-seconds", "-1"], "drain_seconds", id="negative"),
        pytest.param(["--lease-seconds", "5"], "twice", id="lease shorter than its heartbeats"),
        pytest.param(["--no-such-flag"], "no-such-flag", id="unknown flag"),
        pytest.param(["--config", "/no/such/file"], "no such file", id="no file"),
    ],
)
def test_settings_without_sense_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting out of range ends the start with status 2 and a sentence that names it."""
    with pytest.raises(SystemExit) as end:
        load(arguments)

    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_file_with_an_unknown_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt key is an error, not a default."""
    file = tmp_path / "kvleased.toml"
    file.write_text("max_lease = 1\n")

    with pytest.raises(SystemExit):
        load(["--config", str(file)])

    assert "max_lease" in capsys.readouterr().err


def test_file_that_is_no_toml_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken file ends the start with a sentence, not a traceback."""
    file = tmp_path / "kvleased.toml"
    file.write_bytes(b"http_port = = 1")

    with pytest.raises(SystemExit):
        load(["--config", str(file)])

    assert "not TOML" in capsys.readouterr().err


def test_runtime_directory_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file where the directory should be ends the start with a sentence and the status of bad settings."""
    file = tmp_path / "file"
    file.touch()

    status = run(["serve", "--runtime-dir", str(file)])

    assert status == EX_CONFIG
    assert "cannot be used" in capsys.readouterr().err


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvleased serve --help` lists each setting as a flag."""
    with pytest.raises(SystemExit) as end:
        load(["--help"])

    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(f"--{name.replace('_', '-')}" in shown for name in Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_settings_are_frozen() -> None:
    """Nothing changes a setting once the process has started."""
    settings = Settings()

    with pytest.raises(ValueError, match=re.escape("frozen")):
        settings.http_port = 1
