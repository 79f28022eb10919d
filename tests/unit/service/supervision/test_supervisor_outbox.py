"""Laws of the supervisor's outbox: all messages arrive in order with their descriptors, however few it may open."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvleased.supervision.keeper import receive
from kvleased.supervision.supervisor_outbox import SupervisorOutbox
from tests.unit.service.descriptors import descriptors_left

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The supervisor's end of a link, and the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def num_open() -> int:
    """Return how many descriptors this process has."""
    return len([*Path("/proc/self/fd").iterdir()])


def fill(outbox: SupervisorOutbox, link: socket.socket) -> int:
    """Send until there is no room; return the number of messages, including the one that waits."""
    count = 0
    while not outbox:
        outbox.send(link, {"number": count, "filling": "x" * 10_000}, stays=True)
        count += 1
    return count


def arrived(outbox: SupervisorOutbox, ends: Ends, count: int) -> list[int]:
    """Read so many messages and flush the outbox meanwhile; return the descriptors of the last."""
    fds: list[int] = []
    for number in range(count):
        outbox.flush(ends[0])
        received = receive(ends[1])
        assert received is not None
        message, fds = received
        assert message["number"] == number
    return fds


def test_descriptor_that_is_closed_meanwhile_arrives(ends: Ends) -> None:
    """A message that waits has its own copy of its descriptor."""
    outbox = SupervisorOutbox()
    count = fill(outbox, ends[0])
    fd = os.memfd_create("kept")
    inode = os.fstat(fd).st_ino
    outbox.send(ends[0], {"number": count}, [fd], stays=False)
    os.close(fd)

    (received,) = arrived(outbox, ends, count + 1)

    assert os.fstat(received).st_ino == inode
    os.close(received)
    assert repr(outbox) == "<SupervisorOutbox 0 waiting>"


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
def test_what_stays_open_takes_no_other_descriptor(ends: Ends, *, waits: bool) -> None:
    """A descriptor that stays open is sent without a copy, so the process may be at its limit of descriptors."""
    outbox = SupervisorOutbox()
    count = fill(outbox, ends[0]) if waits else 0
    with descriptors_left(0):
        outbox.send(ends[0], {"number": count}, [ends[0].fileno()], stays=True)

    (received,) = arrived(outbox, ends, count + 1)

    assert os.fstat(received).st_ino == os.fstat(ends[0].fileno()).st_ino
    os.close(received)


def test_message_goes_without_its_descriptor_where_there_is_none(ends: Ends) -> None:
    """If no descriptor can be copied, the message goes without it and does not hold up those behind it."""
    outbox = SupervisorOutbox()
    count = fill(outbox, ends[0])
    with descriptors_left(0):
        outbox.send(ends[0], {"number": count}, [ends[0].fileno()], stays=False)

    assert arrived(outbox, ends, count + 1) == []


def test_who_has_gone_is_told_nothing(ends: Ends) -> None:
    """To a reader that has gone nothing is sent, and a discarded message leaves no descriptor open."""
    outbox = SupervisorOutbox()
    count = fill(outbox, ends[0])
    before = num_open()
    outbox.send(ends[0], {"number": count}, [ends[0].fileno()], stays=False)
    outbox.discard()
    assert num_open() == before
    ends[1].close()

    outbox.send(ends[0], {"number": count}, stays=True)

    assert not outbox
