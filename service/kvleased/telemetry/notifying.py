"""Own the messages to a service manager: that the daemon serves, lives, and stops, as datagrams of sd_notify(3)."""

import contextlib
import socket
from typing import Final

VARIABLE: Final = "NOTIFY_SOCKET"
"""The environment variable that names the service manager's socket."""
READY: Final = b"READY=1"
ALIVE: Final = b"WATCHDOG=1"
STOPPING: Final = b"STOPPING=1"


class Notifier:
    """A link to the service manager, if there is one."""

    def __init__(self, address: str = "") -> None:
        """Take the socket's path, or "" for none; a path that begins with @ is in the abstract namespace."""
        self._address = address.replace("@", "\0", 1) if address.startswith("@") else address

    def __repr__(self) -> str:
        """Show whether anybody is told."""
        return f"<Notifier {self._address!r}>"

    def tell(self, what: bytes) -> None:
        """Send one message, without waiting; errors are ignored, as the daemon must not fail by a manager's absence."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.sendto(what, self._address)
