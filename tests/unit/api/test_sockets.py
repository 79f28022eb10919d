"""Laws of listening: only this user can connect, and only over loopback."""

import os
from pathlib import Path

import pytest

from kvleased.api.sockets import listen_beyond, listen_unix
from tests.unit.api.scripted import Served


async def test_sockets_belong_to_this_user_alone(served: Served) -> None:
    """No other user can connect to the sockets, or even see them."""
    runtime_dir = served.settings.runtime_dir
    modes = {path.name: path.stat().st_mode & 0o777 for path in runtime_dir.iterdir()}

    assert modes == {"kvlease.sock": 0o600, "http.sock": 0o600, "grpc.sock": 0o600}
    assert runtime_dir.stat().st_mode & 0o777 == 0o700


def test_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    """The socket of a killed daemon does not keep the next daemon from listening."""
    listen_unix(tmp_path / "a.sock").close()

    with listen_unix(tmp_path / "a.sock") as listener:
        assert listener.getsockname() == str(tmp_path / "a.sock")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory somebody else's")
def test_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """The owner of the directory could replace our socket with another."""
    os.chown(tmp_path, 12345, 12345)

    with pytest.raises(PermissionError, match="12345"):
        listen_unix(tmp_path / "a.sock")


def test_address_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    """Of several ports and sockets, the error names the one that failed."""
    with listen_beyond("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use") as taken:
            listen_beyond("127.0.0.1", port)
    (tmp_path / "a.sock").mkdir()
    with pytest.raises(OSError, match="directory") as blocked:
        listen_unix(tmp_path / "a.sock")

    assert taken.value.filename == f"127.0.0.1:{port}"
    assert blocked.value.filename == str(tmp_path / "a.sock")
