"""Own one listener of HTTP: its connections, their limits, and TLS where it has any; what is served is the app's."""

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from kvleased.api.rest_protocol import GuardedProtocol

ACCEPTS_A_TURN: Final = 4
"""Connections accepted before the loop looks at anything else."""
UNSENT_BYTES_MAX: Final = 1 << 18
"""Bytes that the kernel keeps for a peer that does not read; left to itself it takes 4 MiB, and we write as many."""
SECONDS_WITHOUT_FDS: Final = 0.1
"""Seconds to pause accepting when this process is out of descriptors."""
STOP_SECONDS: Final = 2
"""Seconds that requests in progress have left when the server stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What the connections of one listener may do."""

    connections_max: int
    head_seconds_max: float
    """From a connection's beginning, or a head's first byte, to the head's end; and for a handshake."""
    body_seconds_max: float
    """From the end of a head to the end of the body."""
    idle_seconds_max: float
    """Between two requests; and that an answer may be left unread."""


class HttpServer:
    """A listener, from `start` to `stop`; uvicorn's own would accept without end, and handshakes uncounted."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: HttpLimits,
        *,
        tls: ssl.SSLContext | None = None,
        is_for_any_host: bool = False,
        headers: list[tuple[str, str]] | None = None,
    ) -> None:
        """Take what is served where."""

        class Guarded(GuardedProtocol):
            head_seconds_max = limits.head_seconds_max
            body_seconds_max = limits.body_seconds_max
            idle_seconds_max = limits.idle_seconds_max
            checks_host = not is_for_any_host

        self._protocol = Guarded
        self._listener = listener
        self._limits = limits
        self._too_many = GuardedProtocol.too_many(limits.connections_max)
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        self._config = uvicorn.Config(
            app,
            http=Guarded,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            headers=headers,
            timeout_keep_alive=int(max(1, limits.idle_seconds_max)),
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        self._config.load()
        self._server = uvicorn.Server(self._config)
        self._server.lifespan = self._config.lifespan_class(self._config)
        self._server.servers = []

    def __repr__(self) -> str:
        """Show life: connections."""
        return f"<HttpServer {self.num_connections} of {self._limits.connections_max} connections>"

    @property
    def num_connections(self) -> int:
        """Connections that are open, or in the middle of a handshake."""
        return len(self._opening) + len(self._server.server_state.connections)

    async def start(self) -> None:
        """Begin to accept."""
        # Not serve(): it would take the signals of the process and wake ten times a second.
        await self._server.on_tick(0)
        self._loop = asyncio.get_running_loop()
        self._resume()

    async def stop(self) -> None:
        """Stop accepting, and let requests in progress finish for a moment."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for opening in tuple(self._opening):
            opening.cancel()
        await self._server.shutdown()

    def renew(self, tls: ssl.SSLContext) -> None:
        """Serve TLS with another certificate from the next connection on."""
        self._tls = tls

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # Out of descriptors: the listener stays readable, so the loop would spin until one is free.
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(SECONDS_WITHOUT_FDS, self._resume)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES_MAX)
            if self.num_connections >= self._limits.connections_max:
                self._turn_away(sock)
            else:
                opening = self._loop.create_task(self._open(sock))
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _turn_away(self, sock: socket.socket) -> None:
        """Close a connection above the limit, with the reason where it can be read without a handshake."""
        with sock:
            if self._tls is None:
                try:
                    sock.send(self._too_many)
                except OSError:
                    return  # it learns the same from the closed connection

    async def _open(self, sock: socket.socket) -> None:
        timeout = None if self._tls is None else self._limits.head_seconds_max
        try:
            await self._loop.connect_accepted_socket(
                self._made, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except (OSError, asyncio.CancelledError):
            # No handshake: a stranger, or one that hung up; a scan is no event worth a line.
            sock.close()

    def _made(self) -> GuardedProtocol:
        return self._protocol(
            config=self._config,
            server_state=self._server.server_state,
            app_state={},
            _loop=self._loop,
        )
