"""A service manager hears from a real daemon that it serves, that it lives, and that it ends."""

import socket
from pathlib import Path

import pytest

from tests.acceptance.serving import served

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize(
    "silent_seconds_max", [pytest.param("0", marks=pytest.mark.thorough), "30"]
)
def test_service_manager_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_seconds_max: str
) -> None:
    """The daemon tells READY once it serves, then signs of life until its end, also with no limit on silence."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with served(
            tmp_path / "run", "--control-silent-seconds-max", silent_seconds_max
        ) as serving:
            while manager.recv(64) != b"READY=1":
                pass
            assert [manager.recv(64) for _ in range(2)] == [b"WATCHDOG=1"] * 2
            serving.stop()
            words = {manager.recv(64)}
            while b"STOPPING=1" not in words:
                words.add(manager.recv(64))

    assert words <= {b"WATCHDOG=1", b"STOPPING=1"}
