"""Own how a blocking socket waits for a peer: the kernel's timeouts, and looks that do not wait at all."""

import select
import socket
import struct
import time
from typing import Final

from kvlease.transports.base import Outgoing

TICKS_PER_SECOND: Final = 100
"""Kernel timeouts are set in steps of 10 ms, so that calls with the same deadline share one setting."""
_MS_PER_SECOND: Final = 1000
_ITS_END: Final = 0
"""A poll for no event; it reports only the end of a connection."""


def interval(ticks: int) -> bytes:
    """Return a number of ticks as the kernel takes a timeout."""
    whole, rest = divmod(ticks, TICKS_PER_SECOND)
    return struct.pack("@ll", whole, rest * (1_000_000 // TICKS_PER_SECOND))


def has_come(sock: socket.socket) -> bool:
    """Tell whether anything can be received at once, if only the connection's end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def has_peer(sock: socket.socket) -> bool:
    """Tell whether the peer still has the connection open; False, too, if another thread has closed it here."""
    # Peeking raises if there is nothing to read, as is usual, and then takes several times as long as a poll.
    poll = select.poll()
    try:
        poll.register(sock, _ITS_END)
    except ValueError:  # another thread has closed it
        return False
    return not poll.poll(0)


def receive_late(sock: socket.socket, buffer: bytearray | memoryview, call: Outgoing) -> int:
    """Receive bytes that come between the end of the socket's own, coarse timeout and the call's deadline.

    Raises:
        BlockingIOError: nothing comes.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(max(0.0, call.deadline_at - time.monotonic()) * _MS_PER_SECOND):
        raise BlockingIOError
    return sock.recv_into(buffer)
