"""Laws of credentials: a given one comes first, then the environment's, then one that this user's daemon left."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from kvlease import Client, Credentials, InvalidError
from kvlease.cli.app import app
from kvlease.credentials import Bearer, _is_own, from_environment
from kvlease.transports.base import chosen_address, parse_address
from tests.unit.api.certificates import Authority

GIVEN = Credentials(token="given")


@pytest.fixture
def port() -> Iterator[int]:
    """A port on loopback at which this user listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of a daemon, with its tokens."""
    for name in ("TOKEN", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"KVLEASE_{name}_FILE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = tmp_path / "kvlease"
    made.mkdir()
    for role in ("operator", "reader"):
        (made / f"{role}.token").write_text(f"token-of-{role}\n")
    return made


def bearer(host: str, port: int, directory: Path, credentials: Credentials = Credentials()) -> str:  # noqa: B008 -- frozen
    """Return the token that a client would show."""
    return Bearer(credentials, host, port, directory).token


def test_token_of_ones_own_daemon_is_found_on_loopback(port: int, directory: Path) -> None:
    """The token is shown to this user's listener under every name of loopback, and to nobody elsewhere."""
    for host in ("127.0.0.1", "localhost", "::1"):
        assert bearer(host, port, directory) == "token-of-operator"
    assert bearer("10.0.0.7", port, directory) == ""
    assert (
        bearer("10.0.0.7", port, directory, GIVEN)
        == bearer("::1", port, directory, GIVEN)
        == "given"
    )


def test_who_shows_a_certificate_acts_in_its_role_alone(port: int, directory: Path) -> None:
    """Beside a certificate, as of a reader, no token is looked for: that of the operator would count instead."""
    shown = Credentials(cert_file="reader.pem")

    assert bearer("127.0.0.1", port, directory, shown) == ""
    assert bearer("127.0.0.1", port, directory, replace(shown, token="given")) == "given"


def test_token_is_not_shown_where_nobody_listens(port: int, directory: Path) -> None:
    """A port without a listener gets no token, as anybody might come to listen there later."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        free = gone.getsockname()[1]

    assert bearer("127.0.0.1", free, directory) == ""
    assert bearer("127.0.0.1", port, directory / "none") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_token_is_not_shown_to_another_user(directory: Path) -> None:
    """A listener of another user on the same port is not the daemon."""
    program = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "listener = socket.create_server(('127.0.0.1', 0)); print(listener.getsockname()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert not _is_own(port)
        assert bearer("127.0.0.1", port, directory) == ""
        other.stdin.close()


def test_environment_names_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment gives what the caller does not; a file that does not exist is reported."""
    monkeypatch.setenv("KVLEASE_TOKEN_FILE", str(directory / "reader.token"))
    monkeypatch.setenv("KVLEASE_CA_FILE", "/ca")

    assert from_environment() == Credentials(token="token-of-reader", ca_file="/ca")
    assert chosen_address("https://h:1", None).credentials.token == "token-of-reader"
    assert chosen_address("https://h:1", GIVEN).credentials == GIVEN
    monkeypatch.setenv("KVLEASE_TOKEN_FILE", "/nowhere")
    with pytest.raises(InvalidError, match="/nowhere"):
        Client("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(b"\n", "is empty", id="empty"),
        pytest.param(b"\xff\xfe" * 8, "has something else", id="bytes"),
        pytest.param(b"token: abc\n", "has something else", id="words"),
        pytest.param(b"abc\ndef\n", "has something else", id="lines"),
    ],
)
def test_file_without_a_token_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str
) -> None:
    """What no header could carry, or says nothing, is the mistake of whoever named the file."""
    (directory / "wrong.token").write_bytes(content)
    monkeypatch.setenv("KVLEASE_TOKEN_FILE", str(directory / "wrong.token"))

    with pytest.raises(InvalidError, match=f"wrong.token {told}; a token is one word"):
        Client("http://127.0.0.1:1")


@pytest.mark.parametrize("token", ["a\nb", "a b", "é", "\ud800", b"secret", None])
@pytest.mark.parametrize("written", ["http://h:1", "grpc://h:1", "unix:///s"])
def test_token_that_no_header_carries_is_refused(written: str, token: Any) -> None:
    """What no header could carry is refused before anything is sent, and not repeated."""
    with pytest.raises(InvalidError, match=r"^the token of the credentials .* one word") as refusal:
        Client(written, credentials=Credentials(token=token))

    assert "secret" not in refusal.value.message


@pytest.mark.parametrize(
    ("credentials", "told"),
    [
        ("token", "credentials must be a Credentials, or left out, not 'token'"),
        (Credentials(ca_file=cast("str", 5)), "ca_file of the credentials must be a string, not 5"),
    ],
)
def test_what_are_no_credentials_is_told(credentials: Any, told: str) -> None:
    """Credentials of another type are the caller's mistake."""
    with pytest.raises(InvalidError, match=f"^{told}"):
        Client("http://h:1", credentials=credentials)


def test_authority_that_is_none_is_told(tmp_path: Path) -> None:
    """TLS with a file that is not there, or that has no certificate, is the caller's mistake."""
    (tmp_path / "garbage").write_text("no certificate")
    for name in ("absent", "garbage"):
        shown = Credentials(ca_file=str(tmp_path / name))
        for read in (shown.tls, shown.pem):
            with pytest.raises(InvalidError, match=f"{name} cannot be used.*KVLEASE_CA_FILE"):
                read()


def test_certificate_without_its_key_is_told_by_its_name(tmp_path: Path) -> None:
    """A certificate without its key is named in the error, and not the authority's file, which is fine."""
    authority = Authority(tmp_path)
    certificate = authority.sign("somebody").cert_file
    shown = Credentials(ca_file=str(authority.cert_file), cert_file=str(certificate))
    with pytest.raises(InvalidError, match="KVLEASE_KEY_FILE") as refusal:
        shown.tls()
    assert refusal.value.message.startswith(str(certificate))

    absent = Credentials(cert_file=str(certificate), key_file=str(tmp_path / "absent"))
    with pytest.raises(InvalidError, match="absent cannot be used: No such file"):
        absent.tls()


def test_no_representation_shows_a_token() -> None:
    """The repr of a client has no token, so no log of it has one."""
    address = chosen_address("grpcs://h:1", GIVEN)

    shown = f"{GIVEN!r} {address!r} {address} {address.bearer!r} {Client('http://h:1', credentials=GIVEN)!r}"

    assert "token='given'" not in shown
    assert "Bearer given" not in shown.replace("<Bearer given>", "")


@pytest.mark.parametrize(
    ("written", "protocol", "has_tls"),
    [
        ("https://h:1", "http", True),
        ("grpcs://h:1", "grpc", True),
        ("http://h:1", "http", False),
        ("grpc+unix:///s", "grpc", False),
        ("unix:///s", "unix", False),
    ],
)
def test_scheme_says_whether_tls_is_spoken(written: str, protocol: str, has_tls: bool) -> None:
    """An s behind the protocol's name means TLS."""
    address = parse_address(written)

    assert (str(address), address.protocol, address.has_tls) == (written, protocol, has_tls)


@pytest.mark.parametrize(
    ("arguments", "known", "why"),
    [
        pytest.param(
            ("--address", "unix:///run/x"), "", "a browser cannot open the page", id="socket"
        ),
        pytest.param(("--address", "grpc://h:1"), "", "a browser cannot open the page", id="gRPC"),
        pytest.param(
            (), "grpc://h:1", "a browser cannot open the page", id="gRPC of the environment"
        ),
        pytest.param(("--address", "http://h:1"), "", "no daemon of this user", id="elsewhere"),
        pytest.param((), "", "start it without --no-listen-tcp", id="nobody there"),
        pytest.param(("--token-file", "/no/such"), "", "/no/such cannot be used", id="no token"),
    ],
)
def test_page_of_no_daemon_has_no_token(
    directory: Path,  # noqa: ARG001 -- so that there is a token to print
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    known: str,
    why: str,
) -> None:
    """`kvlease ui` prints no token where there is no page that takes it."""
    monkeypatch.setattr("kvlease.credentials._is_own", lambda _: False)
    monkeypatch.setenv("KVLEASE_ADDRESS", known)

    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ui", *arguments])

    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr
    assert "token-of-reader" not in result.stderr


def test_page_whose_token_is_elsewhere_says_how_to_name_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvlease ui` without the token beside the socket tells how to name the file that the daemon was given."""
    monkeypatch.setattr("kvlease.credentials._is_own", lambda _: True)
    (directory / "reader.token").unlink()

    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ui"])

    assert (result.exit_code, result.stdout) == (2, "")
    assert "reader.token cannot be used" in result.stderr
    assert "--token-file" in result.stderr


def test_page_that_does_not_answer_has_no_token(directory: Path) -> None:
    """A daemon that does not answer is given no token, whatever names it."""
    token = str(directory / "reader.token")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    result = CliRunner().invoke(
        app, ["ui", "--address", f"http://127.0.0.1:{port}", "--token-file", token]
    )

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("UNAVAILABLE: ")
