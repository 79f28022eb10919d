"""The addresses of a daemon: an event of the log with addresses that can be opened, and a banner at a terminal."""

import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvleased.api.sockets import listen_beyond
from kvleased.config.settings import Settings
from kvleased.control.announcing import addresses_of, announce, leave_page, tell_of_no_place


def addresses(tmp_path: Path, **changes: Any) -> dict[str, str]:
    """Return the addresses of a daemon that listens for REST at 7070 and for probes, if at all, at 7072."""
    probe_port = 7072 if "probe_host" in changes else 0
    grpc_port = changes.get("grpc_port", 7071)
    return addresses_of(Settings(runtime_dir=tmp_path, **changes), 7070, grpc_port, probe_port)


def test_log_has_no_line_but_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal the addresses are one event, and the log has nothing between its lines."""
    with capture_logs() as lines:
        announce(3, addresses(tmp_path), 0.1)

    assert capsys.readouterr().out == ""
    (line,) = lines
    assert (line["event"], line["epoch"]) == ("ready", 3)
    assert line["rest_on_tcp"] == "http://127.0.0.1:7070"


def test_banner_is_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal the same addresses are shown for people, one a line."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    found = addresses(tmp_path)

    announce(3, found, 0.1)

    told = capsys.readouterr().out
    assert told.count("\n") > len(found)
    assert all(address in told for address in found.values())


def test_all_addresses_are_there(tmp_path: Path) -> None:
    """The addresses of gRPC over TCP and of the probes are told, too, and no address that is not listened at."""
    found = addresses(tmp_path, grpc_port=7071, probe_host="10.0.0.7")

    assert found["gRPC on TCP"] == "grpc://127.0.0.1:7071"
    assert found["probes"] == "http://10.0.0.7:7072/readyz"
    assert "TCP open at" not in found
    nothing = Settings(runtime_dir=tmp_path, listen_tcp=False, serve_grpc=False)
    alone = addresses_of(nothing, 0, 0, 0)
    assert set(alone) == {"local socket", "REST"}


@pytest.mark.parametrize(
    ("host", "opened", "listens"),
    [
        pytest.param("0.0.0.0", "127.0.0.1", "0.0.0.0:7070", id="IPv4"),  # noqa: S104 -- what is tested
        pytest.param("::", "127.0.0.1", "[::]:7070", id="IPv6, or without"),
    ],
)
def test_addresses_can_be_opened(tmp_path: Path, host: str, opened: str, listens: str) -> None:
    """If all addresses are listened on, the log has one that this machine can open and one that others can."""
    found = addresses(tmp_path, tcp_host=host, probe_host=host, insecure_tcp_without_tls=True)

    assert found["REST on TCP"] == f"http://{opened}:7070"
    assert found["page"] == f"http://{opened}:7070/ui"
    assert found["probes"] == f"http://{opened}:7072/readyz"
    assert found["gRPC on TCP"].startswith(f"grpc://{opened}:")
    assert found["TCP open at"] == listens


def test_page_s_address_is_left_beside_the_sockets(tmp_path: Path) -> None:
    """The page's address can be found by the directory alone; no other user may read or change it."""
    leave_page(tmp_path, addresses(tmp_path))
    leave_page(tmp_path, addresses(tmp_path, tcp_host="::1"))

    file = tmp_path / "page.url"
    assert file.read_text() == "http://[::1]:7070\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_page_that_is_no_more_leaves_no_address(tmp_path: Path) -> None:
    """A daemon without TCP removes the address that an earlier one left."""
    leave_page(tmp_path, addresses(tmp_path))

    leave_page(tmp_path, {"local socket": "unix:///run/kvlease.sock"})

    assert not (tmp_path / "page.url").exists()


def test_address_that_cannot_be_left_ends_nothing(tmp_path: Path) -> None:
    """A daemon that cannot write to its directory serves all the same, and says so."""
    (tmp_path / "page.url").mkdir()

    with capture_logs() as lines:
        leave_page(tmp_path, addresses(tmp_path))

    (line,) = lines
    assert (line["event"], line["log_level"]) == ("page_address_not_left", "warning")


@pytest.mark.parametrize(
    ("host", "shown", "advice"),
    [
        pytest.param(
            "192.0.2.1", "192.0.2.1:7072", "an address that this machine has", id="absent"
        ),
        pytest.param(
            "2001:db8::1", "[2001:db8::1]:7072", "an address that this machine has", id="IPv6"
        ),
        pytest.param("127.0.0.1", "127.0.0.1:", "stop what listens there", id="taken"),
    ],
)
def test_advice_is_about_what_is_wrong(host: str, shown: str, advice: str) -> None:
    """Another port is of no use if it is the address that the machine does not have."""
    with listen_beyond("127.0.0.1", 0) as other, capture_logs() as lines:
        port = other.getsockname()[1] if host == "127.0.0.1" else 7072
        with pytest.raises(OSError) as refused:  # noqa: PT011 -- its words are the kernel's
            listen_beyond(host, port)
        tell_of_no_place(refused.value)

    (line,) = lines
    assert line["event"] == "cannot_listen"
    assert line["address"].startswith(shown)
    assert advice in line["advice"]
