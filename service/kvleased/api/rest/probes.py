"""Own the listener at `probe_host`: it serves probes and metrics to everybody, and nothing of the API."""

import socket
from typing import Final

from starlette.applications import Starlette

from kvleased.api.rest.health import Probes
from kvleased.api.rest.http_server import HttpLimits, HttpServer
from kvleased.api.sockets import listen_beyond

LIMITS: Final = HttpLimits(
    connections_max=0,
    head_seconds_max=5.0,
    body_seconds_max=5.0,
    idle_seconds_max=5.0,
    takes_any_host=True,
)
"""All callers are strangers: a kubelet, a few scrapers, and everybody else; the oldest connection gives way."""


class ProbeServer:
    """Probes and metrics over TCP, from `start` to `stop`."""

    def __init__(self, probes: Probes) -> None:
        """Take the probes."""
        self._probes = probes
        self._server: HttpServer | None = None
        self._listener: socket.socket

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._listener.getsockname()[1])

    async def start(self, host: str, port: int) -> None:
        """Begin to listen."""
        app = Starlette()
        app.router.redirect_slashes = False
        self._probes.add_to(app, is_for_all=True)
        self._listener = listen_beyond(host, port)
        self._server = HttpServer(app, self._listener, LIMITS)
        await self._server.start()

    async def stop(self) -> None:
        """Stop listening, and let requests in progress finish for a moment."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
