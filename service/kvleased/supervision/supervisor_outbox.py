"""Own the supervisor's messages to the control process for which the socket has no room yet."""

import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from kvleased.supervision import keeper
from kvleased.supervision.keeper import Message
from kvleased.system.descriptors import ADVICE
from kvleased.telemetry import logs


class SupervisorOutbox:
    """The messages that wait, each with descriptors that stay open until the message is sent."""

    def __init__(self) -> None:
        """Start with none."""
        self._waiting: deque[tuple[bytes, Sequence[int], bool]] = deque()

    def __repr__(self) -> str:
        """Show life."""
        return f"<SupervisorOutbox {len(self._waiting)} waiting>"

    def __len__(self) -> int:
        """Count the messages that wait."""
        return len(self._waiting)

    def send(
        self, link: socket.socket | None, message: Message, fds: Sequence[int] = (), *, stays: bool
    ) -> None:
        """Send a message as soon as there is room; `stays` says that its descriptors stay open without duplicates."""
        payload = keeper.encode(message)
        if link is not None and not self._waiting and _try_to_send(link, payload, fds):
            return
        # Duplicate only descriptors that may be closed meanwhile: the kept ones may already be nearly all it may have.
        self._waiting.append((payload, fds if stays else _duplicates(fds), not stays))

    def flush(self, link: socket.socket | None) -> None:
        """Send the messages for which there is room; a message that nobody reads any more counts as sent."""
        while link is not None and self._waiting:
            payload, fds, is_ours = self._waiting[0]
            if not _try_to_send(link, payload, fds):
                return
            self._waiting.popleft()
            if is_ours:
                _close_all(fds)

    def discard(self) -> None:
        """Drop all messages."""
        for _, fds, is_ours in self._waiting:
            if is_ours:
                _close_all(fds)
        self._waiting.clear()


def _try_to_send(link: socket.socket, payload: bytes, fds: Sequence[int]) -> bool:
    """Send a message; return false if there is no room yet for it, or for more descriptors in flight."""
    try:
        socket.send_fds(link, [payload], fds)
    except OSError as error:
        # Any other error means that the receiver has gone, and needs no message.
        return error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS)
    return True


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Return duplicates, or none if this process may have no more: the receiver knows what missing ones mean."""
    found: list[int] = []
    try:
        found.extend(os.dup(fd) for fd in fds)
    except OSError as error:
        _close_all(found)
        logs.line("error", "descriptors_not_sent", error=error.strerror, advice=ADVICE)
        return []
    return found


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
