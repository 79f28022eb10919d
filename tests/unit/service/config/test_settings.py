"""Settings come from flags, environment and file, in this order, and are checked."""

import json
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from kvlease.disk_file import file_bytes
from kvleased.command_line import _without_settings, run
from kvleased.config.settings import Settings
from kvleased.config.sources import load, unknown_variables
from kvleased.control.process import read_settings
from kvleased.supervision.processes import movers_of


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
        pytest.param(
            ["--probe-host", "everywhere"], "such as 127.0.0.1 or ::1", id="no address of probes"
        ),
        pytest.param(
            ["--http-port", "70000"],
            "--http-port: it is 70000; write a whole number from 0 to 65,535",
            id="no port",
        ),
        pytest.param(["--drain-seconds", "-1"], "--drain-seconds: it is -1", id="negative"),
        pytest.param(["--lease-seconds", "5"], "twice", id="lease shorter than its heartbeats"),
        pytest.param(["--no-such-flag"], "no-such-flag", id="unknown flag"),
        pytest.param(["--device", "gpu"], "such as cuda:0", id="unknown device"),
        pytest.param(["--device", "cuda"], "such as cuda:0", id="device without its number"),
        pytest.param(
            ["--lease-seconds", "nan"], "it is nan; write a number above 0", id="no number"
        ),
        pytest.param(["--wait-ms-max", "600001"], "from 1 to 600,000", id="longest wait"),
        pytest.param(["--memory-bytes-max", "9" * 30], f"{1 << 60:,}", id="more than any node has"),
        pytest.param(["--memory-bytes-max", "2 gigs"], "for example 8GiB", id="no unit"),
        pytest.param(["--populate-chunk-bytes", "4KiB"], "from 1,048,576 to", id="few bytes"),
        pytest.param(["--runtime-dir", ""], "it is empty", id="no directory"),
        pytest.param(["--runtime-dir", f"/{'d' * 100}"], "114 bytes", id="long socket path"),
        pytest.param(["--config", "/no/such/file"], "no such file", id="no file"),
        pytest.param(["--config", ""], "--config : this is not a file", id="empty name"),
        pytest.param(["--config", "/"], "--config /: this is not a file", id="directory"),
        pytest.param(["--remote-url", "http://:pw@host:1"], "its scheme is http", id="scheme"),
        pytest.param(["--remote-url", "pw@host"], "must start with one of redis", id="no scheme"),
        pytest.param(["--remote-url", "redis://:pw@"], "a host and a port", id="no host"),
        pytest.param(["--remote-url", "redis://:pw@h:99999"], "a host and a port", id="port"),
        pytest.param(
            ["--remote-url", "redis://:pw@h?bd=1"],
            "allowed after the ? of redis://: db",
            id="query",
        ),
        pytest.param(["--remote-url", "redis://:pw@h/one"], "number of a database", id="database"),
        pytest.param(["--remote-url", "unix://:pw@"], "the path of a socket", id="no socket"),
        pytest.param(["--remote-uri", "redis://:pw@host"], "remote-uri", id="misspelt address"),
        pytest.param(["--tick-seconds", "31"], "at most --lease-seconds (30.0)", id="late ticks"),
        pytest.param(["--remote-ms-max", "0"], "--remote-ms-max", id="no time"),
        pytest.param(
            ["--host-dir", "/a/../b", "--disk-dir", "/b"], "the same directory", id="one directory"
        ),
    ],
)
def test_settings_without_sense_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting out of range ends the start with status 2 and a sentence that names it."""
    with pytest.raises(SystemExit) as end:
        load(arguments)

    first, *others = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert says in first
    assert len(others) <= 2
    assert ":pw@" not in first


def test_bytes_may_have_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, environment and file take bytes as `kvlease plan` does, and numbers as before."""
    file = tmp_path / "kvleased.toml"
    file.write_text(
        'disk_bytes_max = "1.5 TiB"\n[tenants.chat]\nmax_bytes = "8GiB"\nmin_bytes = 4_096\n'
    )
    monkeypatch.setenv("KVLEASED_DEVICE_BYTES_DEFAULT", "17_179_869_184")
    monkeypatch.setenv("KVLEASED_MAX_MESSAGE_BYTES", "64KiB")

    settings = load(["--config", str(file), "--memory-bytes-max", "24GiB"])

    assert (settings.memory_bytes_max, settings.disk_bytes_max) == (24 << 30, 3 << 39)
    assert (settings.device_bytes_default, settings.max_message_bytes) == (16 << 30, 64 << 10)
    chat = settings.tenants["chat"]
    assert (chat.min_bytes, chat.max_bytes) == (4096, 8 << 30)


def test_file_with_an_unknown_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt key is an error, not a default."""
    file = tmp_path / "kvleased.toml"
    file.write_text("max_lease = 1\n")

    with pytest.raises(SystemExit):
        load(["--config", str(file)])

    assert (
        "max_lease: there is no such setting; did you mean max_leases?" in capsys.readouterr().err
    )


@pytest.mark.parametrize("variable", ["KVLEASED_CONFIG", "kvleased_config", "Kvleased_Config"])
def test_file_is_named_by_a_variable_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """The variable that names the file is found as those of settings are, in capitals or not."""
    file = tmp_path / "kvleased.toml"
    file.write_text("max_leases = 7\n")
    monkeypatch.setenv(variable, str(file))

    assert load([]).max_leases == 7


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        pytest.param("KVLEASED_HTTP_PROT", "; did you mean KVLEASED_HTTP_PORT?", id="misspelt"),
        pytest.param("kvleased_max_lease", "; did you mean KVLEASED_MAX_LEASES?", id="small"),
        pytest.param("KVLEASED_CONFIGS", "; did you mean KVLEASED_CONFIG?", id="file"),
        pytest.param("KVLEASED_ZZZ", "", id="like none"),
    ],
)
def test_unknown_variable_is_named_with_the_nearest_setting(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    """A variable that looks like a setting but is none is reported with the setting that was perhaps meant."""
    monkeypatch.setenv(variable, "1")

    assert unknown_variables() == {variable: f"there is no such setting{meant}"}


def test_variables_of_settings_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of settings, in upper or lower case, and of the settings file are not reported."""
    for variable in ("KVLEASED_CONFIG", "KVLEASED_HTTP_PORT", "kvleased_max_leases", "KVLEASE_X"):
        monkeypatch.setenv(variable, "1")

    assert not unknown_variables()


def test_start_warns_of_unknown_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start logs one line for each variable that it ignores."""
    monkeypatch.setenv("KVLEASED_HTTP_PROT", "1")
    (tmp_path / "file").touch()

    run(["serve", "--runtime-dir", str(tmp_path / "file")])

    logged = json.loads(capsys.readouterr().err.splitlines()[0])
    assert (logged["level"], logged["variable"]) == ("warning", "KVLEASED_HTTP_PROT")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvleased --version` prints the version that is installed."""
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvleased {version('kvlease')}\n"


def test_command_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command is refused by its name, before the usage."""
    assert run(["serv"]) == 2
    assert capsys.readouterr().err.startswith("kvleased: 'serv' is not a command\nusage: ")


def test_file_that_is_no_toml_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken file ends the start with a sentence, not a traceback."""
    file = tmp_path / "kvleased.toml"
    file.write_bytes(b"http_port = = 1")

    with pytest.raises(SystemExit):
        load(["--config", str(file)])

    assert "not valid TOML" in capsys.readouterr().err


def test_certificate_that_is_not_there_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a file that the remote store's address names is missing, the start is refused before anything is started."""
    url = f"rediss://:pw@h?ssl_ca_certs={tmp_path / 'ca.pem'}"

    status = run(["serve", "--runtime-dir", str(tmp_path / "run"), "--remote-url", url])

    said = capsys.readouterr().err
    assert status == os.EX_CONFIG
    assert "ssl_ca_certs" in said
    assert "No such file" in said
    assert "pw" not in said


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvleased serve --help` lists each setting as a flag."""
    with pytest.raises(SystemExit) as end:
        load(["--help"])

    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(f"--{name.replace('_', '-')}" in shown for name in Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_help_calls_values_what_people_write(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has no types of Python: values are called BYTES, SECONDS, FILE and so on, and examples follow."""
    with pytest.raises(SystemExit):
        load(["--help"])

    shown = capsys.readouterr().out
    values = set(re.findall(r"\[--[a-z0-9-]+ ([^|\]]+)\]", shown))
    assert values == {
        "ADDRESS", "BYTES", "DEVICE", "DIRECTORY", "FILE", "JSON", "MILLISECONDS", "N", "PORT", "SECONDS", "URL",
        "{debug,info,warning,error}",
    }  # fmt: skip
    assert "--memory-bytes-max BYTES" in shown
    assert "\n  kvleased serve --device cuda:0" in shown


def test_help_tells_defaults_as_people_know_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help shows defaults without terms of Python: a directory is shown as its path."""
    monkeypatch.setenv("KVLEASED_RUNTIME_DIR", "/run/there")
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        load(["--help"])

    shown = capsys.readouterr().out
    assert not re.search(r"default factory|default: None|\(default: \)", shown)
    assert "private to this user already. (default: /run/there)" in shown
    assert "Leases of one cache at once. (default: 1024)" in shown
    assert "on loopback TCP. (default: True)" in shown


def test_settings_are_frozen() -> None:
    """Nothing changes a setting once the process has started."""
    settings = Settings()

    with pytest.raises(ValueError, match=re.escape("frozen")):
        settings.http_port = 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://h:1/0",
        "rediss://u:pw@h",
        "unix:///run/redis.sock?db=1",
        "mooncake://10.0.0.1:50051",
    ],
)
def test_addresses_of_remote_stores_are_taken_as_they_are(url: str) -> None:
    """Addresses of all kinds of remote store are accepted, with all options of their clients."""
    assert load(["--remote-url", url]).remote_url == url


def test_password_is_in_no_text_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed settings show no password; child processes get it all the same."""
    monkeypatch.setenv("KVLEASED_REMOTE_URL", "redis://:pw@host")

    settings = load([])

    assert "pw" not in f"{settings!r} {settings}"
    assert json.loads(settings.model_dump_json())["remote_url"] == "redis://:pw@host"


def test_settings_go_on_by_descriptor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings go to child processes by descriptor, and none of them is left in the environment."""
    monkeypatch.setenv("kvleased_remote_url", "redis://:pw@host")

    assert not any("pw@" in value for value in _without_settings().values())
    assert _without_settings()["PATH"] == os.environ["PATH"]


def test_children_read_the_settings_as_they_were_resolved(tmp_path: Path) -> None:
    """Child processes read the resolved settings, paths and tenants included."""
    settings = load(["--disk-dir", str(tmp_path), "--tenants", '{"a": {"weight": 2}}'])
    fd = os.memfd_create("test")
    os.write(fd, settings.model_dump_json().encode())

    assert read_settings(fd) == settings
    os.close(fd)


@pytest.mark.parametrize(
    ("arguments", "roles"),
    [
        pytest.param([], ("mover",), id="memory"),
        pytest.param(["--disk-dir", "/d"], ("mover", "disk-mover"), id="disk"),
        pytest.param(
            ["--disk-dir", "/d", "--remote-url", "redis://h"],
            ("mover", "disk-mover", "remote-mover"),
            id="all",
        ),
    ],
)
def test_movers_are_those_that_the_settings_ask_for(
    arguments: list[str], roles: tuple[str, ...]
) -> None:
    """A mover is started only for a tier that the settings ask for."""
    assert movers_of(json.loads(load(arguments).model_dump_json())) == roles


def test_pools_are_cpu_memory_unless_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool is memory of a GPU only if a setting names the GPU."""
    monkeypatch.delenv("KVLEASED_DEVICE", raising=False)

    assert not load([]).is_on_gpu
    assert load(["--device", "cuda:0"]).is_on_gpu


def test_gpu_is_refused_where_there_is_no_driver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a driver `kvleased serve --device` ends at once and says what to change, before it makes anything."""
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver here")

    status = run(["serve", "--device", "cuda:0", "--runtime-dir", str(tmp_path / "run")])

    assert status == os.EX_CONFIG
    assert "--device cuda:0: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_disk_bytes_without_room_for_a_slot_are_refused() -> None:
    """A limit below the smallest store is refused at the start, with the least that works."""
    least = file_bytes(1, 1)

    with pytest.raises(ValueError, match=f"disk_bytes_max.*at least {least}"):
        Settings(disk_bytes_max=least - 1)

    assert Settings(disk_bytes_max=least).disk_bytes_max == least
