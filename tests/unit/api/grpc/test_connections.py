"""Laws of the connections to gRPC's port: strangers give way to each other, and a member gives way to nobody."""

import asyncio
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease import BusyError
from kvleased.api.grpc.connections import Connections

STRANGERS_MAX = 3
MEMBERS_MAX = 2
SECONDS = 10


class Port:
    """A port whose accepted connections nobody reports, as with grpc."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        self.number = int(self.listener.getsockname()[1])
        self.connections = Connections(MEMBERS_MAX, self.number, STRANGERS_MAX)
        self.lines: list[tuple[socket.socket, socket.socket]] = []

    def connect(self, host: str = "127.0.0.1", own_port: int = 0) -> socket.socket:
        """Connect to the port from a port of one's own; return the client's end."""
        source = (host, own_port) if own_port else None
        client = socket.create_connection((host, self.number), SECONDS, source)
        self.lines.append((client, self.listener.accept()[0]))
        return client

    def end(self, client: socket.socket) -> None:
        """End a connection on both sides, so that its port is free at once."""
        (served,) = [two for one, two in self.lines if one is client]
        # Otherwise a port waits for what may still be on its way.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        served.close()

    def close(self) -> None:
        """Close all ends."""
        for one in (self.listener, *(end for line in self.lines for end in line)):
            one.close()


@pytest.fixture
def port() -> Iterator[Port]:
    """A port with few places."""
    made = Port()
    yield made
    made.close()


@pytest.fixture
def any_port() -> Iterator[Port]:
    """A port for both kinds of addresses."""
    made = Port("::")
    yield made
    made.close()


def unasked_port() -> int:
    """Return a port that the kernel gives only to those who ask for it, so that it stays free."""
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(first) - 1 - random.randrange(8192)  # noqa: S311 - nothing is secret


def address(client: socket.socket) -> str:
    """Return the address of a client's end, in the form that grpc gives for calls."""
    host, number = client.getsockname()[:2]
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def is_open(client: socket.socket) -> bool:
    """Tell whether the other end is still connected."""
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def taken(port: Port) -> tuple[int, int]:
    """Return the number of places that members hold, and that strangers hold."""
    return port.connections.places.num_members, port.connections.places.num_strangers


async def test_strangers_found_first_give_way(port: Port) -> None:
    """Where there are more strangers than places, those that an earlier look found are hung up on."""
    old = [port.connect() for _ in range(STRANGERS_MAX)]
    await port.connections.look()
    new = [port.connect() for _ in range(2)]
    await port.connections.look()

    assert sum(map(is_open, old)) == STRANGERS_MAX - 2
    assert all(map(is_open, new))
    assert taken(port) == (0, STRANGERS_MAX)
    assert port.connections.places.turned_away["stranger"] == 2


async def test_stranger_gives_way_once(port: Port) -> None:
    """A stranger who was hung up on and is not closed yet takes no place again."""
    for _ in range(STRANGERS_MAX + 1):
        port.connect()
    for _ in range(3):
        await port.connections.look()

    assert port.connections.places.turned_away["stranger"] == 1


async def test_member_gives_way_to_nobody(port: Port) -> None:
    """A caller who has shown a token, before or after a look, stays, however many strangers come."""
    before, after = port.connect(), port.connect()
    port.connections.let_in(address(before))
    await port.connections.look()
    port.connections.let_in(address(after))
    for _ in range(3):
        for _ in range(2 * STRANGERS_MAX):
            port.connect()
        await port.connections.look()

    assert is_open(before)
    assert is_open(after)
    assert taken(port) == (2, STRANGERS_MAX)


async def test_place_is_free_when_its_connection_ended(port: Port) -> None:
    """The look after the end of a connection frees its place, be it a member's or a stranger's."""
    member, stranger = port.connect(), port.connect()
    port.connections.let_in(address(member))
    await port.connections.look()
    assert taken(port) == (1, 1)

    port.end(member)
    port.end(stranger)
    await port.connections.look()

    assert taken(port) == (0, 0)


async def test_member_that_ended_before_any_look_is_forgotten(port: Port) -> None:
    """The place that a call took is freed, even if no look ever found its connection."""
    member = port.connect()
    port.connections.let_in(address(member))
    port.end(member)
    await port.connections.look()

    assert taken(port) == (0, 0)


async def test_member_that_calls_during_a_look_is_kept(port: Port) -> None:
    """A connection that came after a look had begun does not count as ended."""
    looking = asyncio.ensure_future(port.connections.look())
    await asyncio.sleep(0)
    assert not looking.done()
    member = port.connect()
    port.connections.let_in(address(member))
    await looking

    assert taken(port) == (1, 0)


async def test_one_member_too_many_is_refused(port: Port) -> None:
    """Members have a limited number of places; one who finds none stays a stranger, and gets one when it is free."""
    members = [port.connect() for _ in range(MEMBERS_MAX)]
    for member in members:
        port.connections.let_in(address(member))
    late = port.connect()
    with pytest.raises(BusyError, match="2 connections are open"):
        port.connections.let_in(address(late))
    await port.connections.look()
    assert taken(port) == (MEMBERS_MAX, 1)
    port.end(members[0])
    await port.connections.look()

    port.connections.let_in(address(late))

    assert taken(port) == (MEMBERS_MAX, 0)


async def test_address_of_a_member_makes_no_member(port: Port) -> None:
    """A caller at the address of a former member is a stranger until it shows a token."""
    number = unasked_port()
    member = port.connect(own_port=number)
    port.connections.let_in(address(member))
    await port.connections.look()
    port.end(member)
    port.connect(own_port=number)
    await port.connections.look()

    assert taken(port) == (0, 1)


async def test_member_may_come_again_from_its_address(port: Port) -> None:
    """A token that was shown since the last look belongs to the connection that is there now."""
    number = unasked_port()
    member = port.connect(own_port=number)
    port.connections.let_in(address(member))
    await port.connections.look()
    port.end(member)
    again = port.connect(own_port=number)
    port.connections.let_in(address(again))
    await port.connections.look()
    await port.connections.look()

    assert taken(port) == (1, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_connection_is_known_by_both_kinds_of_addresses(any_port: Port, host: str) -> None:
    """The peer's address of a call matches the connection that a look found, over IPv4 and IPv6."""
    member, other = any_port.connect(host), any_port.connect(host)
    await any_port.connections.look()
    any_port.connections.let_in(address(member))
    await any_port.connections.look()
    assert taken(any_port) == (1, 1)

    any_port.connections.hang_up({address(member)})

    assert not is_open(member)
    assert is_open(other)


async def test_descriptor_of_another_is_left_alone(port: Port) -> None:
    """Where a connection has ended and its descriptor belongs to another one, that other one is not hung up on."""
    stranger = port.connect()
    await port.connections.look()
    gone = port.lines[0][1]
    mine, others = socket.socketpair()
    os.dup2(mine.fileno(), gone.fileno())

    port.connections.hang_up({address(stranger)})

    assert is_open(others)
    mine.close()
    others.close()


def num_fds() -> int:
    """Return the number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_looks_leave_no_descriptor_open(port: Port) -> None:
    """However often the process looks and hangs up, it has no more descriptors than before."""
    for _ in range(STRANGERS_MAX + 2):
        port.connect()
    before = num_fds()
    for _ in range(3):
        await port.connections.look()

    assert num_fds() == before


async def test_looks_go_on(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks are repeated, even after one was impossible."""
    monkeypatch.setattr("kvleased.api.grpc.connections.SECONDS_APART", 0.0)
    monkeypatch.setattr("kvleased.api.grpc.connections._OWN_FDS", "/nowhere")
    following = asyncio.ensure_future(port.connections.follow())
    await asyncio.sleep(0)
    monkeypatch.undo()
    monkeypatch.setattr("kvleased.api.grpc.connections.SECONDS_APART", 0.0)
    async with asyncio.timeout(SECONDS):
        for _ in range(3):
            clients = [port.connect() for _ in range(2 * STRANGERS_MAX)]
            while all(map(is_open, clients)):  # noqa: ASYNC110 -- it is the other end that is asked
                await asyncio.sleep(0.01)
    following.cancel()

    assert taken(port)[1] == STRANGERS_MAX
