"""Laws of addresses."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from kvlease import AsyncClient, Client, Credentials, InvalidError
from kvlease.transports.base import default_address, parse_address
from kvleased import probing
from kvleased.access.roles import Role
from kvleased.config.sources import load
from tests.unit.api.guarded import guarded


@pytest.mark.parametrize(
    "written",
    [
        "unix:///run/kvlease.sock",
        "http://127.0.0.1:7070",
        "http://[::1]:7070",
        "grpcs://[fd00::7]:7071",
        "http+unix:///run/http.sock",
        "grpc://localhost:7071",
        "grpc+unix:///run/grpc.sock",
        "unix:///run/a?b#c;d%20e f.sock",
    ],
)
def test_address_reads_back_as_written(written: str) -> None:
    """An address that is read is written as it was."""
    assert str(parse_address(written)) == written


@pytest.mark.parametrize(
    "written",
    [
        "",
        "kvlease.sock",
        "unix://relative.sock",
        "http://host",
        "http://host:99999",
        "http://h:1/path",
        "http://h:1?query",
        "http://h:1#fragment",
        "ftp://h:1",
        "unix:///run/kvlease\0.sock",
        "http://[::1",
    ],
)
def test_malformed_address_is_refused(written: str) -> None:
    """Any other address is refused at once, with all forms that an address may have."""
    with pytest.raises(InvalidError) as refused:
        parse_address(written)

    told = refused.value.message.rpartition("one of ")[2].split(", ")
    examples = [one.replace("host:port", "localhost:1") for one in told]
    assert [str(parse_address(one)) for one in examples] == examples
    assert {parse_address(one).scheme for one in examples} == {
        "unix", "http", "https", "http+unix", "grpc", "grpcs", "grpc+unix",
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["http", "grpcs"])
def test_user_in_an_address_is_refused_without_a_word_of_the_password(scheme: str) -> None:
    """A password would be dropped, so an address with one is refused; the refusal does not repeat it."""
    with pytest.raises(InvalidError, match="names no user") as refused:
        parse_address(f"{scheme}://somebody:secret@localhost:7070")

    assert "secret" not in refused.value.message
    assert "KVLEASE_TOKEN_FILE" in refused.value.message


def test_default_address_prefers_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """KVLEASE_ADDRESS counts first; without it the default is the local socket in the runtime directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVLEASE_ADDRESS", raising=False)
    assert default_address() == f"unix://{tmp_path}/kvlease/kvlease.sock"

    monkeypatch.setenv("KVLEASE_ADDRESS", "http://127.0.0.1:1")
    assert default_address() == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        pytest.param(
            {"KVLEASED_RUNTIME_DIR": "/r", "XDG_RUNTIME_DIR": "/x"},
            "/r",
            id="named",
        ),
        pytest.param({"XDG_RUNTIME_DIR": "/x"}, "/x/kvlease", id="of the session"),
        pytest.param({}, f"/tmp/kvlease-{os.getuid()}", id="of the user"),
        pytest.param({"KVLEASED_RUNTIME_DIR": ""}, f"/tmp/kvlease-{os.getuid()}", id="empty"),
    ],
)
def test_daemon_and_those_who_look_for_it_agree(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    environment: dict[str, str],
    wanted: str,
) -> None:
    """In one environment the daemon, its probes and every client find the same directory, wherever TMPDIR is."""
    for name in ("KVLEASED_RUNTIME_DIR", "XDG_RUNTIME_DIR", "KVLEASE_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert default_address() == f"unix://{wanted}/kvlease.sock"
    if environment.get("KVLEASED_RUNTIME_DIR") != "":
        assert str(load([]).runtime_dir) == wanted
    monkeypatch.setattr("socket.socket.connect", refuse)
    assert probing.run([]) == 1
    assert f"{wanted}/http.sock" in capsys.readouterr().err


def refuse(*_: object) -> None:
    """Refuse a connection."""
    raise ConnectionRefusedError


@pytest.mark.parametrize(
    "options", [{"deadline_seconds": 0}, {"deadline_seconds": float("inf")}, {"on_doubt": "guess"}]
)
def test_client_refuses_options_that_no_call_can_honour(options: dict[str, float]) -> None:
    """A deadline must be positive and finite, and a doubt must be a miss or an error."""
    with pytest.raises(InvalidError):
        Client("unix:///nowhere.sock", **options)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_either_client_calls_an_address_of_ipv6(scheme: str) -> None:
    """The address that a daemon on IPv6's loopback announces, brackets and all, is enough for both clients."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run", tcp_host="::1") as found:
            port = found.rest.http_port if scheme == "http" else found.grpc.grpc_port
            shown = Credentials(token=found.tokens[Role.READER])
            address = f"{scheme}://[::1]:{port}"

            def caches() -> int:
                with Client(address, credentials=shown, deadline_seconds=10) as client:
                    return len(client.list_caches())

            assert await asyncio.to_thread(caches) == 1
            async with AsyncClient(address, credentials=shown, deadline_seconds=10) as client:
                assert len(await client.list_caches()) == 1
