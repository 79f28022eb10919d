"""What the supervisor keeps, and how it hands it over."""

import fcntl
import json
import os
import socket

import pytest

from kvleased import keeper
from kvleased.descriptors import receive_packet
from kvleased.keeper import Store


def _create(store: Store, name: str, num_bytes: int = 4096) -> int:
    message = {
        "op": "create",
        "number": 1,
        "name": name,
        "bytes": num_bytes,
        "metadata": {"of": name},
    }
    ((reply, (fd,)),) = store.act(message, [])
    assert reply == {"op": "created", "number": 1}
    return fd


def test_region_cannot_change_its_length() -> None:
    """Nobody who has a region's descriptor can cut it short or make it longer."""
    store = Store()
    fd = _create(store, "a")

    for num_bytes in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, num_bytes)

    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == keeper.SEALS
    store.close()


def test_handover_splits_by_descriptors_and_bytes() -> None:
    """However much is kept, each message stays within what a packet takes, and nothing is left out."""
    store = Store()
    fd = os.open(os.devnull, os.O_RDONLY)
    for number in range(500):
        text = "x" * (60_000 if number < 10 else 10)
        store.act({"op": "keep", "name": str(number), "metadata": {"text": text}}, [os.dup(fd)])

    messages = list(store.handover())

    assert sum(len(message["entries"]) for message, _ in messages) == 500
    assert all(len(fds) == len(message["entries"]) <= 200 for message, fds in messages)
    assert all(len(keeper.encode(message)) <= keeper.MESSAGE_BYTES_MAX for message, _ in messages)
    store.close()
    os.close(fd)


def test_keeping_under_a_name_replaces_what_was_there() -> None:
    """A name stands for one descriptor; the one before it is closed."""
    store = Store()
    first = _create(store, "a")

    store.act({"op": "keep", "name": "a", "metadata": {}}, [os.open(os.devnull, os.O_RDONLY)])

    assert len(store) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    store.close()


def test_memory_that_cannot_be_had_is_refused() -> None:
    """A region beyond what the kernel gives is refused with its reason, and nothing is kept."""
    store = Store()

    message = {"op": "create", "number": 7, "name": "a" * 250, "bytes": 1, "metadata": {}}
    ((reply, fds),) = store.act(message, [])

    assert (reply["op"], reply["number"], fds, len(store)) == ("refused", 7, [], 0)


def test_descriptors_arrive_closed_on_exec() -> None:
    """A descriptor that is received is not inherited by children, and waiting can be refused."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        with pytest.raises(BlockingIOError):
            receive_packet(other, 100, 1, socket.MSG_DONTWAIT)
        socket.send_fds(one, [json.dumps({}).encode()], [one.fileno()])

        _, (fd,) = receive_packet(other, 100, 1)

        assert not os.get_inheritable(fd)
        os.close(fd)
