"""Own how a blocking socket waits for a peer: until a deadline, whatever signals come meanwhile.

A read or write that waits by itself begins its timeout anew whenever a signal's handler has run, so a program with a
timer might wait for ever. A poll goes on with the time that is left.
"""

import select
import socket
import struct
import time
from contextlib import suppress
from typing import Final

_MS_PER_SECOND: Final = 1000
_MS_MAX: Final = 2**31 - 1
"""Milliseconds of the longest wait of a poll, 24 days."""
_ITS_END: Final = 0
"""A poll for no event; it reports only the end of a connection."""


def interval(seconds: float) -> bytes:
    """Return a time as the kernel takes a timeout, at least a microsecond, as 0 would be for ever."""
    whole, rest = divmod(max(1, int(seconds * 1_000_000)), 1_000_000)
    return struct.pack("@ll", whole, rest)


def has_peer(sock: socket.socket) -> bool:
    """Tell whether the peer still has the connection open; False, too, if another thread has closed it here."""
    # Peeking raises if there is nothing to read, as is usual, and then takes several times as long as a poll.
    poll = select.poll()
    try:
        poll.register(sock, _ITS_END)
    except ValueError:  # another thread has closed it
        return False
    return not poll.poll(0)


def await_bytes(sock: socket.socket, deadline_at: float) -> None:
    """Wait until anything can be received, if only the connection's end; what is there already may be taken late.

    Raises:
        BlockingIOError: nothing has come by the deadline.
    """
    _await(sock, select.POLLIN, deadline_at)


def send_all(sock: socket.socket, frame: bytes, deadline_at: float) -> None:
    """Send a frame.

    Raises:
        BlockingIOError: the peer has not taken all of it by the deadline.
    """
    num_sent = 0
    while True:
        with suppress(BlockingIOError):
            num_sent += sock.send(frame[num_sent:] if num_sent else frame, socket.MSG_DONTWAIT)
        if num_sent == len(frame):
            return
        _await(sock, select.POLLOUT, deadline_at)


def _await(sock: socket.socket, event: int, deadline_at: float) -> None:
    poll = select.poll()
    poll.register(sock, event)
    left = max(0.0, deadline_at - time.monotonic())
    if not poll.poll(min(left * _MS_PER_SECOND, _MS_MAX)):
        raise BlockingIOError
