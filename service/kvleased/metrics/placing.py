"""Own what metrics tell of places: the connections of each listener, the watchers, and their limits."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvleased.api.local.listener import LocalServer
from kvleased.api.places import WHO
from kvleased.api.places import Places as ListenersPlaces
from kvleased.daemon import Daemon
from kvleased.metrics.calls import Places


@runtime_checkable
class Placed(Protocol):
    """A server whose connections have places."""

    @property
    def places(self) -> dict[str, ListenersPlaces]:
        """The places of its connections, by listener."""
        ...


def places_of(daemon: Daemon, local: LocalServer, servers: Sequence[object]) -> Places:
    """Return the places at this instant: of the local socket, the servers that have places, and the watchers."""
    listeners = {
        name: places
        for server in servers
        if isinstance(server, Placed)
        for name, places in server.places.items()
    }
    members = {name: places.num_members for name, places in listeners.items()}
    return Places(
        connections={"local": len(local.connections), **members},
        connections_max=daemon.settings.max_connections,
        watchers=daemon.events.num_watchers,
        watchers_max=daemon.settings.max_watchers,
        key_counts_bytes=daemon.counting.num_bytes,
        key_counts_bytes_max=daemon.settings.key_counts_bytes_max,
        strangers={name: places.num_strangers for name, places in listeners.items()},
        turned_away={
            ("local", "member"): local.num_turned_away,
        }
        | {
            (name, who): places.turned_away[who]
            for name, places in listeners.items()
            for who in WHO
        },
    )
