"""Invalid settings are named as they were written, all at once, with what to write instead."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from kvleased.config.setting_faults import NO_JSON
from kvleased.config.settings import Settings
from kvleased.config.sources import load
from kvleased.config.tenant_settings import TenantSettings

LIMITS = 'limits such as {"min_percent": 20}'


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the lines that refuse a start with these arguments, without the last line, which all refusals share."""
    with pytest.raises(SystemExit) as end:
        load(arguments)

    *lines, last = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert last == "kvleased serve --help lists every setting."
    return [line.removeprefix("kvleased serve: ") for line in lines]


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        pytest.param(
            "--max-leases",
            "foo",
            "it is foo; write a whole number from 1 to 1,048,576",
            id="no number",
        ),
        pytest.param(
            "--max-leases", "", "it is empty; write a whole number from 1 to 1,048,576", id="empty"
        ),
        pytest.param(
            "--tick-seconds", "0", "it is 0; write a number above 0 and at most 86,400", id="above"
        ),
        pytest.param(
            "--disk-bytes-max",
            "-1",
            f"it is -1; write a number of bytes from 0 to {1 << 60:,}, with or without a unit, as in 8GiB",
            id="bytes",
        ),
        pytest.param(
            "--log-level",
            "loud",
            "it is loud; write one of debug, info, warning, error",
            id="choice",
        ),
        pytest.param(
            "--trace-endpoint",
            "h:1",
            "it is h:1; write an address that starts with http:// or https:// and has no spaces",
            id="address",
        ),
        pytest.param(
            "--tcp-host",
            "localhost",
            "it is 'localhost'; write an IPv4 or IPv6 address such as 127.0.0.1 or ::1",
            id="name of a host",
        ),
        pytest.param(
            "--trace-endpoint",
            "http://collector:99999",
            "it has no host, or a port beyond 1 to 65535; write it like http://127.0.0.1:4318",
            id="port beyond",
        ),
        pytest.param(
            "--trace-endpoint",
            "http://:4318",
            "it has no host, or a port beyond 1 to 65535; write it like http://127.0.0.1:4318",
            id="endpoint without a host",
        ),
        pytest.param(
            "--max-pins",
            "a\nb",
            "it is 'a\\nb'; write a whole number from 1 to 1,048,576",
            id="two lines",
        ),
        pytest.param(
            "--tenants",
            '{"a": {"weight": 0}}',
            "a.weight: it is 0; write a number above 0 and at most 1,000",
            id="tenant",
        ),
        pytest.param(
            "--tenants",
            '{"a": 5}',
            'a: it is 5; write limits such as {"min_percent": 20}',
            id="no limits",
        ),
        pytest.param(
            "--tenants",
            '{"": {}}',
            "'': it is empty; write a name of 1 to 128 characters",
            id="nameless",
        ),
        pytest.param(
            "--tenants",
            '{"a": {"min_percent": 60}, "b": {"min_percent": 41}}',
            "the min_percent of all tenants add up to 101; the sum must be at most 100",
            id="too much",
        ),
    ],
)
def test_wrong_value_is_told_with_what_to_write(
    flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence begins with the flag, has the value, and says which values there are."""
    assert said(capsys, f"{flag}={value}") == [f"{flag}: {says}"]


def test_setting_is_called_as_its_variable_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting from the environment is named by its variable, in the case in which it was given."""
    monkeypatch.setenv("kvleased_max_leases", "foo")
    monkeypatch.setenv("KVLEASED_LISTEN_TCP", "maybe")
    monkeypatch.setenv("KVLEASED_TENANTS", '{"a": {"weight": 0}}')

    lines = said(capsys)

    assert [line.partition(": it is")[0] for line in lines] == [
        "KVLEASED_LISTEN_TCP", "kvleased_max_leases", "KVLEASED_TENANTS: a.weight",
    ]  # fmt: skip
    assert lines[0].endswith("it is maybe; write true or false")


def test_settings_of_a_file_are_told_with_its_path_and_all_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All faults of a file are reported at once, with its path."""
    file = tmp_path / "kvleased.toml"
    file.write_text(
        "max_leases = [1]\nruntime_dir = 5\nmax_lease = 1\n[tenants]\nchat.min_percent = {}\n"
    )

    lines = said(capsys, "--config", str(file))

    assert [line.removeprefix(f"{file}: ") for line in lines] == [
        "runtime_dir: it is 5; write a path",
        "max_leases: it is a list; write a whole number from 1 to 1,048,576",
        "tenants.chat.min_percent: it is a table; write a number from 0 to 100",
        "max_lease: there is no such setting; did you mean max_leases?",
    ]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        pytest.param("[]", f"it is a list; write {LIMITS} for each tenant", id="empty list"),
        pytest.param("[{}]", f"it is a list; write {LIMITS} for each tenant", id="list"),
        pytest.param("null", f"it is null; write {LIMITS} for each tenant", id="null"),
        pytest.param("5", f"it is 5; write {LIMITS} for each tenant", id="number"),
        pytest.param("", NO_JSON, id="empty"),
        pytest.param("{}{}", NO_JSON, id="two objects"),
        pytest.param('{"a": {}, "a": {}}', '"a" is there twice; write it once', id="tenant twice"),
        pytest.param(
            '{"a": {"weight": 1, "weight": 2}}',
            '"weight" is there twice; write it once',
            id="limit twice",
        ),
    ],
)
def test_tenants_in_another_form_are_refused(
    written: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tenants that are no object of JSON, or have a name twice, are refused by the flag and by the variable."""
    by_flag = said(capsys, f"--tenants={written}")
    monkeypatch.setenv("kvleased_tenants", written)
    by_variable = said(capsys)

    assert by_flag == [f"--tenants: {says}"]
    assert by_variable == [f"kvleased_tenants: {says}"]


@pytest.mark.parametrize(
    "written",
    [
        pytest.param("max_leases = 3\nMAX_LEASES = 4\n", id="numbers"),
        pytest.param("max_leases = 3\nMAX_LEASES = 3\n", id="the same number"),
    ],
)
def test_setting_that_a_file_has_in_two_cases_is_refused(
    written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that has one setting twice, in small letters and in capitals, is refused, and both names are told."""
    file = tmp_path / "kvleased.toml"
    file.write_text(written)

    lines = said(capsys, "--config", str(file))

    assert lines == [f"{file}: max_leases and MAX_LEASES are the same setting; write it once"]


@pytest.mark.parametrize("name", ["MAX_LEASES", "CONFIG"])
def test_setting_that_the_environment_has_in_two_cases_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two variables of one setting are refused with both names: which of them counted would be chance."""
    names = f"KVLEASED_{name}", f"kvleased_{name.lower()}"
    monkeypatch.setenv(names[0], "3")
    monkeypatch.setenv(names[1], "4")

    lines = said(capsys)

    assert lines == [f"{names[0]} and {names[1]} are the same setting; write it once"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        pytest.param("false", "false", id="false"),
        pytest.param("0", "0", id="zero"),
        pytest.param("[]", "a list", id="list"),
    ],
)
def test_path_that_is_no_text_is_refused(
    written: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only an empty text stands for a path that is left out; false could be meant as "no", or be a mistake."""
    file = tmp_path / "kvleased.toml"
    file.write_text(f"disk_dir = {written}\n")

    assert said(capsys, "--config", str(file)) == [f"{file}: disk_dir: it is {shown}; write a path"]


def test_file_is_offered_no_setting_that_a_file_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that names another file is told that there is no such setting, and not to write the same again."""
    file = tmp_path / "kvleased.toml"
    file.write_text('config = "x"\n')

    assert said(capsys, "--config", str(file)) == [f"{file}: config: there is no such setting"]


def test_truth_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any number that a file or JSON gives as true or false is refused, and what is true or false may be so."""
    file = tmp_path / "kvleased.toml"
    file.write_text(
        "serve_grpc = false\nhttp_port = true\nmemory_bytes_max = true\npopulate_chunk_bytes = true\n"
        "drain_seconds = true\nremote_ttl_seconds = false\nmax_leases = true\ndevice = true\n"
    )

    lines = said(capsys, "--config", str(file), '--tenants={"a": {"weight": true}}')

    bytes_max, like = f"{1 << 60:,}", "with or without a unit, as in 8GiB"
    assert [line.removeprefix(f"{file}: ") for line in lines] == [
        "http_port: it is true; write a whole number from 0 to 65,535",
        "device: it is true; write a string",
        f"memory_bytes_max: it is true; write a number of bytes from 0 to {bytes_max}, {like}",
        f"populate_chunk_bytes: it is true; write a number of bytes from 1,048,576 to {bytes_max}, {like}",
        "remote_ttl_seconds: it is false; write a whole number from 0 to 31,622,400",
        "drain_seconds: it is true; write a number from 0 to 3,600",
        "max_leases: it is true; write a whole number from 1 to 1,048,576",
        "--tenants: a.weight: it is true; write a number above 0 and at most 1,000",
    ]


@pytest.mark.parametrize("kind", [Settings, TenantSettings])
def test_truth_is_no_number_of_any_setting(kind: type[BaseModel]) -> None:
    """No setting that is a number takes true."""
    numbers = {
        name for name, field in kind.model_fields.items() if field.annotation in {int, float}
    }

    with pytest.raises(ValidationError) as refused:
        kind.model_validate(dict.fromkeys(numbers, True))

    assert {one["loc"][0] for one in refused.value.errors()} == numbers


def test_fault_is_told_of_the_source_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a flag overrides the file, the flag is named."""
    file = tmp_path / "kvleased.toml"
    file.write_text("max_leases = 0\n")
    monkeypatch.setenv("KVLEASED_MAX_LEASES", "0")

    (line,) = said(capsys, "--config", str(file), "--max-leases", "-1")

    assert line.startswith("--max-leases: it is -1;")


@pytest.mark.parametrize(
    ("variable", "arguments", "begins"),
    [
        pytest.param(
            "",
            ["--lease-seconds", "1"],
            "--lease-seconds (1.0) must be at least twice --heartbeat-seconds (5.0)",
            id="flag",
        ),
        pytest.param(
            "",
            ["--http-port", "7071"],
            "--http-port and --grpc-port are both 7071; set a different port for each, or 0 for any",
            id="one port",
        ),
        pytest.param(
            "",
            ["--probe-host", "127.0.0.1", "--probe-port", "7070"],
            "--http-port and --probe-port are both 7070",
            id="port of probes",
        ),
        pytest.param(
            "KVLEASED_LEASE_SECONDS",
            [],
            "KVLEASED_LEASE_SECONDS (1.0) must be at least twice KVLEASED_HEARTBEAT_SECONDS",
            id="variable",
        ),
        pytest.param(
            "KVLEASED_LEASE_SECONDS",
            ["--heartbeat-seconds", "3"],
            "KVLEASED_LEASE_SECONDS (1.0) must be at least twice --heartbeat-seconds (3.0)",
            id="one of each",
        ),
        pytest.param(
            "",
            ["--device-bytes-default", "2GiB", "--memory-bytes-max", "1GiB"],
            "--device-bytes-default (2147483648) must be at most --memory-bytes-max (1073741824)",
            id="a pool by default that never fits",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_called_as_they_were_written(
    variable: str,
    arguments: list[str],
    begins: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Settings are named as they were given, and one that was not given is named like the others."""
    if variable:
        monkeypatch.setenv(variable, "1")

    (line,) = said(capsys, *arguments)

    assert line.startswith(begins)


def test_settings_of_a_file_that_do_not_go_together_are_told_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings of a file are named as in the file, with its path."""
    file = tmp_path / "kvleased.toml"
    file.write_text("lease_seconds = 1\n")

    (line,) = said(capsys, "--config", str(file))

    assert line.startswith(f"{file}: lease_seconds (1.0) must be at least twice heartbeat_seconds")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(
            ["--max-leasez", "3"],
            "--max-leasez 3: there is no such flag; did you mean --max-leases?",
            id="misspelt",
        ),
        pytest.param(
            ["--max_leases=3"],
            "--max_leases=3: there is no such flag; did you mean --max-leases?",
            id="as in a file",
        ),
        pytest.param(
            ["--listen-tcp=false"],
            "--listen-tcp: the flag accepts no value; write --listen-tcp or --no-listen-tcp",
            id="value of a switch",
        ),
        pytest.param(["--http-port"], "--http-port: the value is missing", id="no value"),
        pytest.param(["--zzz"], "--zzz: there is no such flag", id="like none"),
        pytest.param(["now"], "now: only flags are accepted, such as --config FILE", id="no flag"),
        pytest.param(
            ["--remote-urll", "redis://u:p/w@h"],
            "--remote-urll redis://***@h: there is no such flag; did you mean --remote-url?",
            id="password",
        ),
    ],
)
def test_command_line_without_sense_is_told_with_what_to_write(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt flag is reported with the one that was perhaps meant, and a password in it is not repeated."""
    assert said(capsys, *arguments) == [says]


def test_more_tenants_than_may_be_are_told_at_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Too many tenants are refused at the start, not at the first change of a limit."""
    lines = said(capsys, "--max-tenants=1", '--tenants={"a": {"weight": 1}, "b": {"weight": 1}}')

    assert lines == ["--max-tenants (1) must be at least the 2 tenants with limits"]
