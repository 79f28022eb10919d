"""Own the listener for those who may look but not call: probes and metrics at `probe_host`, and nothing of the API."""

import socket
from typing import Final

import uvicorn
from starlette.applications import Starlette

from kvleased.api.health import Probes
from kvleased.api.rest_protocol import GuardedProtocol
from kvleased.api.sockets import BACKLOG, listen_beyond

CONNECTIONS_MAX: Final = 32
"""Connections at once: a kubelet, and a few that scrape."""
KEEP_ALIVE_SECONDS: Final = 5
"""Seconds that an idle connection is kept."""
STOP_SECONDS: Final = 1
"""Seconds that requests in progress have left when the server stops."""


class ProbeServer:
    """Probes and metrics over TCP, from `start` to `stop`."""

    def __init__(self, probes: Probes) -> None:
        """Remember who answers."""
        self._probes = probes
        self._server: uvicorn.Server | None = None
        self._sockets: list[socket.socket] = []

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._sockets[0].getsockname()[1])

    async def start(self, host: str, port: int) -> None:
        """Begin to listen."""

        class Guarded(GuardedProtocol):
            connections_max = CONNECTIONS_MAX

        self._sockets = [listen_beyond(host, port)]
        app = Starlette()
        app.router.redirect_slashes = False
        self._probes.add_to(app)
        config = uvicorn.Config(
            app,
            http=Guarded,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=self._sockets)
        await server.on_tick(0)
        self._server = server

    async def stop(self) -> None:
        """Stop listening, and let requests in progress finish for a moment."""
        server, self._server = self._server, None
        if server is not None:
            await server.shutdown(sockets=self._sockets)
