"""A blocking transport's connections: all of them are closed by a close, whatever happens beside it."""

from kvlease.transports._pool import ConnectionPool
from kvlease.transports.base import Outgoing
from kvlease.v1 import kvlease_pb2 as pb


class PlayedConnection:
    """A connection that only knows whether it is open."""

    is_open = True

    def close(self) -> None:
        """Close it."""
        self.is_open = False


class Meanwhile(int):
    """A number of closes; while it is compared, another thread closes the pool."""

    pool: ConnectionPool[PlayedConnection]

    def __ne__(self, other: object) -> bool:
        """Compare, and then have the pool closed."""
        differs = int(self) != other
        if not differs:
            self.pool.close()
        return differs

    __hash__ = int.__hash__


def test_connection_that_is_put_back_beside_a_close_is_closed() -> None:
    """The close has not seen it yet, and who puts it back has not seen the close: it is closed all the same."""
    pool = ConnectionPool(PlayedConnection)
    connection, num_closes = pool.take(Outgoing("stats", pb.StatsRequest(), 0.0))
    before = Meanwhile(num_closes)
    before.pool = pool

    pool.put_back(connection, before)

    assert not connection.is_open
    assert pool.newest() is connection
