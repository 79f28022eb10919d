"""`kvleased probe` asks a daemon's Unix socket and exits with a status that tells the answer."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvleased import probing


@contextlib.contextmanager
def _answering(directory: Path, answer: bytes) -> Iterator[list[bytes]]:
    """Answer one request at the REST socket."""
    asked: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            asked.append(connection.recv(4096))
            connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "http.sock"))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield asked
        thread.join()


@pytest.mark.parametrize(("status", "wanted"), [(200, 0), (503, 1)])
def test_status_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, wanted: int
) -> None:
    """A good answer is 0, any other 1."""
    monkeypatch.setenv("KVLEASED_RUNTIME_DIR", str(tmp_path))
    with _answering(tmp_path, b"HTTP/1.1 %d X\r\n\r\nready\n" % status) as asked:
        assert probing.run(["readyz"]) == wanted

    assert asked[0].startswith(b"GET /readyz HTTP/1.1\r\n")


def test_address_of_a_client_is_asked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address in a client's environment is asked first, so a daemon is found as `kvlease` finds it."""
    monkeypatch.setenv("KVLEASED_RUNTIME_DIR", "/nowhere")
    monkeypatch.setenv("KVLEASE_ADDRESS", f"unix://{tmp_path}/kvlease.sock")
    with _answering(tmp_path, b"HTTP/1.1 200 X\r\n\r\nready\n"):
        assert probing.run(["readyz"]) == 0


def test_no_daemon_is_not_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If nobody listens, the refusal names the socket."""
    monkeypatch.delenv("KVLEASED_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    assert probing.run([]) == 1
    assert str(tmp_path / "kvlease" / "http.sock") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["v1/stats"], "'v1/stats' is not a probe"),
        (["livez", "readyz"], "only one probe can be asked at a time"),
    ],
)
def test_other_paths_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    """Only the three probes can be asked; another path is refused, and the fault is named before the usage."""
    assert probing.run(argv) == 2
    assert capsys.readouterr().err.startswith(f"kvleased probe: {said}\nusage: ")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_no_fault(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """Whoever asks for help is told the usage, with status 0, as by every other command."""
    assert probing.run([flag]) == 0

    said = capsys.readouterr()
    assert said.out.startswith("usage: kvleased probe [livez|readyz|startupz]")
    assert said.err == ""
