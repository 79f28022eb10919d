"""Laws of a connection's outbox: the bytes that its peer does not read are counted, and bounded."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvleased.api.local.outbox import UNSENT_BYTES_MAX, Outbox


class RecordedTransport(asyncio.Transport):
    """A transport whose kernel takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.num_held_bytes = 0
        self.end = ""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Check that every held byte is to be reported."""
        assert (high, low) == (0, None)

    def get_write_buffer_size(self) -> int:
        """Return the number of held bytes."""
        return self.num_held_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hold the bytes."""
        self.writes.append(bytes(data))
        self.num_held_bytes += len(data)

    def close(self) -> None:
        """Close after what is held."""
        self.end = "closed"

    def abort(self) -> None:
        """Close at once."""
        self.end = "aborted"


@pytest.fixture
def full() -> Iterator[tuple[Outbox, RecordedTransport]]:
    """An outbox whose transport holds a frame that the kernel does not take."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    transport = RecordedTransport()
    outbox = Outbox(ours)
    outbox.begin(transport)
    with ours, theirs:
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        outbox.send(b"first")
        outbox.fill()
        yield outbox, transport


def test_unread_frames_are_handed_on_as_one_write(full: tuple[Outbox, RecordedTransport]) -> None:
    """A transport that holds something is given nothing more until it is empty, and then all at once."""
    outbox, transport = full

    for number in range(1000):
        outbox.send(b"%03d" % number)
    assert (transport.writes, outbox.unsent_bytes) == ([b"first"], 3005)
    assert repr(outbox) == "<Outbox 3005 bytes unsent>"
    transport.num_held_bytes = 0
    outbox.drain()

    assert transport.writes == [b"first", b"".join(b"%03d" % number for number in range(1000))]


def test_peer_that_leaves_too_much_unread_is_disconnected(
    full: tuple[Outbox, RecordedTransport],
) -> None:
    """The bytes in the outbox and those that the transport holds are bounded together."""
    outbox, transport = full

    outbox.send(bytes(UNSENT_BYTES_MAX - 5))
    assert transport.end == ""
    outbox.send(b"x")

    assert transport.end == "aborted"


def test_end_comes_behind_what_was_kept(full: tuple[Outbox, RecordedTransport]) -> None:
    """Closing a connection loses no frame that was sent before."""
    outbox, transport = full
    outbox.send(b"last")

    outbox.end()

    assert (transport.writes[-1], transport.end) == (b"last", "closed")


def test_lost_connection_takes_nothing(full: tuple[Outbox, RecordedTransport]) -> None:
    """Frames for a lost connection are dropped."""
    outbox, transport = full
    outbox.send(b"kept")

    outbox.lose()
    outbox.send(b"late")
    outbox.drain()
    outbox.end()

    assert (transport.writes, outbox.unsent_bytes) == ([b"first"], 0)
