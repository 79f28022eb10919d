"""Own what a service manager is told: that the daemon serves, lives, and ends, by the datagrams of sd_notify(3)."""

import contextlib
import socket
from typing import Final

VARIABLE: Final = "NOTIFY_SOCKET"
"""The environment variable by which a service manager says where it listens."""
READY: Final = b"READY=1"
ALIVE: Final = b"WATCHDOG=1"
STOPPING: Final = b"STOPPING=1"


class Notifier:
    """A service manager's socket, or nothing where nobody listens."""

    def __init__(self, address: str = "") -> None:
        """Take the socket's path; one that begins with @ is in the abstract namespace."""
        self._address = address.replace("@", "\0", 1) if address.startswith("@") else address

    def __repr__(self) -> str:
        """Show whether anybody is told."""
        return f"<Notifier {self._address!r}>"

    def tell(self, what: bytes) -> None:
        """Tell it, without waiting; one that does not listen is nothing that the daemon should end of."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.sendto(what, self._address)
