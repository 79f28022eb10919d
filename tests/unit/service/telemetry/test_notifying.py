"""What a service manager is told, and that its absence harms nothing."""

import secrets
import socket
from pathlib import Path

import pytest

from kvleased.supervision.supervisor import Supervisor
from kvleased.telemetry.notifying import ALIVE, READY, STOPPING, Notifier


@pytest.mark.parametrize("is_abstract", [False, True])
def test_service_manager_hears(tmp_path: Path, *, is_abstract: bool) -> None:
    """Each word is one datagram, also to a socket in the abstract namespace."""
    name = f"kvlease-{secrets.token_hex(8)}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if is_abstract else name)
        notifier = Notifier(f"@{name}" if is_abstract else name)
        for word in (READY, ALIVE, STOPPING):
            notifier.tell(word)

        assert [manager.recv(64) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]


@pytest.mark.parametrize("address", ["", "/nowhere/at/all"])
def test_nobody_need_listen(address: str) -> None:
    """A daemon goes on without a service manager, or after the service manager has gone."""
    Notifier(address).tell(READY)

    assert repr(Notifier(address)) == f"<Notifier {address!r}>"


class Heard(Notifier):
    """A notifier that remembers what it was to tell."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[bytes] = []

    def tell(self, what: bytes) -> None:
        """Remember a word."""
        self.words.append(what)


def test_watchdog_hears_the_control_process_and_no_one_else() -> None:
    """Signs of life of the current control process are passed on; those of one that is being replaced are not."""
    heard = Heard()
    supervisor = Supervisor(-1, 0.0, notifier=heard)

    supervisor._act({"op": "alive"}, [])
    supervisor._act({"op": "ready"}, [])
    supervisor._is_too_silent = True
    supervisor._act({"op": "alive"}, [])

    assert heard.words == [ALIVE, READY]
