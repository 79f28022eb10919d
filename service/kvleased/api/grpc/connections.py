"""Own the connections to gRPC's TCP port: whose they are, and which connections of strangers give way.

grpc accepts connections on threads of its own, and shows nothing of a connection before its first call. So this process
looks at its own descriptors now and then, and shuts surplus connections down, which grpc takes for peers that left.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

from kvleased.api.places import Places, no_place_of_member
from kvleased.api.sockets import address_of

STRANGERS_MAX: Final = 256
"""Connections of strangers to gRPC's TCP port; if a look finds one more, the oldest gives way."""
UNSEEN_MAX: Final = 1024
"""New connections to gRPC's TCP port between two looks; further ones are closed at once."""
SECONDS_APART: Final = 1.0
"""Seconds between two looks."""

_SECONDS_APART_IN_FLOOD: Final = 0.05
"""Seconds to the next look if a connection had to give way, so that UNSEEN_MAX is not reached meanwhile."""
_COST_A_TURN: Final = 8
"""How much a look costs before the loop looks at anything else: 1 for a descriptor."""
_COST_OF_NEW: Final = 4
"""What a socket costs that the look before did not find: whose it is takes six system calls."""
_OWN_FDS: Final = "/proc/self/fd"
_MAPPED: Final = "::ffff:"
"""The beginning of an IPv4 address on a socket that takes both IPv4 and IPv6."""


class Connection:
    """A connection, known from the look that found it, or from its first call with a token if that comes earlier."""

    __slots__ = ("_port", "address", "fd", "has_called", "host", "inode", "is_member", "look")

    def __init__(self, address: str, port: int, look: int) -> None:
        """Take the peer's address and port, the listener's port, and the number of the last look that has begun."""
        self.address = address
        self.host = address.rpartition(":")[0].strip("[]")
        self.is_member = False
        self.has_called = False
        """Whether the connection has shown a token since the last look."""
        self.look = look
        """The number of the last look that found it, or that had begun when it was let in."""
        self.fd, self.inode = -1, 0
        """Its descriptor and inode in this process; unknown until a look finds it."""
        self._port = port

    def __repr__(self) -> str:
        """Show life."""
        return f"<Connection {self.address}, {'a member' if self.is_member else 'a stranger'}'s>"

    @property
    def has_unread(self) -> bool:
        """Nothing that counts: it becomes a member by its first call."""
        return False

    def give_way(self) -> None:
        """End at once: another connection has the place."""
        with suppress(OSError), _held(self.fd) as sock:
            # grpc may have closed it meanwhile, so the descriptor may be another file's.
            if os.fstat(sock.fileno()).st_ino == self.inode:
                sock.shutdown(socket.SHUT_RDWR)


class Connections:
    """The connections of a port: those that have shown a token, and those of strangers."""

    def __init__(self, members_max: int, port: int, strangers_max: int = STRANGERS_MAX) -> None:
        """Take how many connections members may have, the port, and how many strangers may have."""
        self.places = Places(members_max, strangers_max, port)
        self._port = port
        self._num_looks = 0
        self._by_address: dict[str, Connection] = {}
        self._sockets: dict[int, tuple[int, Connection | None]] = {}
        """By descriptor at the last look: the socket's inode, and the connection if it is one to this port."""

    def __repr__(self) -> str:
        """Show life."""
        return f"<Connections {self.places!r}>"

    def let_in(self, address: str) -> None:
        """Take note that a call of a known caller came from an address.

        Raises:
            BusyError: all places of members are taken.
        """
        connection = self._by_address.get(address)
        if connection is None:
            connection = Connection(address, self._port, self._num_looks)
        if not connection.is_member:
            if not self.places.let_in(connection):
                raise no_place_of_member(self.places.members_max)
            connection.is_member = True
            self._by_address[address] = connection
        connection.has_called = True

    def hang_up(self, addresses: Collection[str]) -> set[str]:
        """End the known connections from some addresses; return the addresses of these."""
        found = {one for one in addresses if one in self._by_address}
        for address in found:
            self._by_address[address].give_way()
        return found

    async def follow(self) -> None:
        """Look again and again, without end."""
        while True:
            gave_way = self.places.turned_away["stranger"]
            # Without a descriptor left, a look sees nothing, but nothing is accepted either.
            with suppress(OSError):
                await self.look()
            is_flood = self.places.turned_away["stranger"] > gave_way
            await asyncio.sleep(_SECONDS_APART_IN_FLOOD if is_flood else SECONDS_APART)

    async def look(self) -> None:
        """Find the connections, some in each turn of the loop, and have strangers above the limit give way.

        Raises:
            OSError: this process has no descriptor left for the look.
        """
        self._num_looks += 1
        found: dict[int, tuple[int, Connection | None]] = {}
        cost = 0
        for name in os.listdir(_OWN_FDS):  # noqa: PTH208 -- a number, not a path
            if cost >= _COST_A_TURN:
                cost = 0
                await asyncio.sleep(0)
            cost += 1
            try:
                status = os.fstat(fd := int(name))
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                known = self._sockets.get(fd)
                if known is None or known[0] != status.st_ino:
                    cost += _COST_OF_NEW
                    known = self._socket(fd)
            except OSError:
                continue  # it was closed meanwhile
            found[fd] = known
            if known[1] is not None:
                known[1].look = self._num_looks
        self._sockets = found
        for address, connection in list(self._by_address.items()):
            connection.has_called = False
            if connection.look < self._num_looks:
                self._forget(address, connection)

    def _socket(self, fd: int) -> tuple[int, Connection | None]:
        """Return a new socket's inode, and its connection if it is one to this port; raises OSError if it is closed."""
        with _held(fd) as sock:
            inode = os.fstat(sock.fileno()).st_ino
            address = _address_of(sock, self._port)
        return inode, self._found(address, fd, inode) if address else None

    def _found(self, address: str, fd: int, inode: int) -> Connection:
        """Return the connection from an address that was found at a descriptor; a stranger's if none is known."""
        connection = self._by_address.get(address)
        # If another connection had the address before, a call since the last look may still have come over this one.
        if connection is None or not (connection.inode == 0 or connection.has_called):
            if connection is not None:
                self._forget(address, connection)
            connection = Connection(address, self._port, self._num_looks)
            self._by_address[address] = connection
        connection.fd, connection.inode = fd, inode
        if not connection.is_member:
            self.places.enter(connection)
        return connection

    def _forget(self, address: str, connection: Connection) -> None:
        self.places.leave(connection)
        del self._by_address[address]


def _held(fd: int) -> socket.socket:
    """Return a socket over a duplicate of a descriptor; raises OSError if it is no socket."""
    own = os.dup(fd)
    try:
        # With kind and protocol given, the kernel is asked only for the family: this runs for each new connection.
        return socket.socket(-1, socket.SOCK_STREAM, 0, own)
    except OSError:
        os.close(own)
        raise


def _address_of(sock: socket.socket, port: int) -> str:
    """Return the peer's address and port of a connection to our port, as calls tell it; empty for other sockets."""
    try:
        own = sock.getsockname()
        if not isinstance(own, tuple) or own[1] != port:
            return ""
        return _written(sock.getpeername())
    except OSError:
        # The socket listens, or its peer has gone.
        return ""


def _written(peer: tuple[Any, ...]) -> str:
    """Return an address and a port joined as grpc does: mapped IPv4 as IPv4, and IPv6 with its scope, if any."""
    host, port, *rest = peer
    if host.startswith(_MAPPED) and "." in host:
        host = host.removeprefix(_MAPPED)
    elif rest and rest[1]:
        host = f"{host}%{rest[1]}"
    return address_of(host, port)
