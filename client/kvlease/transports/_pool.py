"""Own a blocking transport's connections, one for each call under way; the transport owns what travels over them.

A call carries its token, so any connection will do, and a thread that waits in the daemon holds no other thread back.
While a connection is idle, taking one and putting one back need no lock: `list.pop` and `list.append` are atomic.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar
from weakref import ReferenceType, ref

from kvlease.errors import DeadlineError
from kvlease.transports.base import Outgoing

CONNECTIONS_MAX: Final = 32
"""Calls of one transport that can be under way at once; further calls wait for their turn."""
LOOK_AGAIN_SECONDS: Final = 1.0
"""Seconds after which a call that waits for its turn checks whether a connection was lost, as nobody tells it."""


class Connection(Protocol):
    """A connection that opens at its first call, and again at the first call after a `close`."""

    @property
    def is_open(self) -> bool:
        """Whether it is open."""
        ...

    def close(self) -> None:
        """Close it; the next call opens it again."""
        ...


ConnectionT = TypeVar("ConnectionT", bound=Connection)


class ConnectionPool(Generic[ConnectionT]):
    """Connections that are made when needed, and kept for the next call."""

    def __init__(self, make: Callable[[], ConnectionT]) -> None:
        """Begin without a connection."""
        self._make = make
        self._idle: list[ConnectionT] = []
        self._made: list[ReferenceType[ConnectionT]] = []
        """Every connection that was made; the references to those that interrupted calls dropped are dead."""
        self._num_closes = 0
        self._num_queued = 0
        self._put = threading.Condition()

    def __repr__(self) -> str:
        """Show life: whether any connection that no call uses is open."""
        return "connected" if self.is_open else "closed"

    @property
    def is_open(self) -> bool:
        """Whether any connection that no call uses is open."""
        return any(one.is_open for one in self._idle)

    def newest(self) -> ConnectionT | None:
        """Return the connection that would be taken next, only to look at; None if none is idle."""
        try:
            return self._idle[-1]
        except IndexError:
            return None

    def take(self, call: Outgoing) -> tuple[ConnectionT, int]:
        """Return the connection that was used last, for one call, and the number to give to `put_back`.

        Raises:
            DeadlineError: all connections were in use until the call's deadline.
        """
        num_closes = self._num_closes
        try:
            return self._idle.pop(), num_closes
        except IndexError:
            return self._another(call), num_closes

    def put_back(self, connection: ConnectionT, num_closes: int) -> None:
        """Keep a connection for the next call; its user has closed it if its state is in doubt."""
        if num_closes != self._num_closes:
            connection.close()
        self._idle.append(connection)
        if num_closes != self._num_closes and connection.is_open:
            self._close_late(connection)
        # A queuing call counts itself before it looks for an idle connection, so it finds this one or is counted here.
        if self._num_queued:
            with self._put:
                self._put.notify()

    def close(self) -> None:
        """Close all connections, those in use once their calls have ended; later calls open them again."""
        self._num_closes += 1
        closed = []
        while self._idle:
            connection = self._idle.pop()
            connection.close()
            closed.append(connection)
        for connection in closed:
            self.put_back(connection, self._num_closes)

    def _close_late(self, connection: ConnectionT) -> None:
        """Close a connection that was put back while another thread closed all, unless a call has taken it since."""
        with suppress(ValueError):
            self._idle.remove(connection)
            connection.close()
            self._idle.append(connection)

    def _another(self, call: Outgoing) -> ConnectionT:
        """Make a connection, or wait for one if there are as many as may be."""
        with self._put:
            self._num_queued += 1
            try:
                while self._num_there() >= CONNECTIONS_MAX:
                    # Other threads pop without the lock, so only the pop itself tells whether a connection is idle.
                    with suppress(IndexError):
                        return self._idle.pop()
                    if not self._put.wait(min(LOOK_AGAIN_SECONDS, _seconds_left(call))):
                        _seconds_left(call)
            finally:
                self._num_queued -= 1
            connection = self._make()
            self._made.append(ref(connection))
            return connection

    def _num_there(self) -> int:
        self._made = [made for made in self._made if made() is not None]
        return len(self._made)


def _seconds_left(call: Outgoing) -> float:
    """Return the seconds until a call's deadline; raises DeadlineError, which says that the call was not sent."""
    with suppress(DeadlineError):
        return call.seconds_left()
    message = (
        f"{call.verb} was not sent before its deadline: all {CONNECTIONS_MAX} connections of this client were in use; "
        "use another client, or fewer threads"
    )
    raise DeadlineError(message, resource="connections", limit=CONNECTIONS_MAX)
