"""Own one listener of HTTP: its connections, their limits, and its TLS if it has any; the app answers requests."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from kvleased.access.strangers import Seldom
from kvleased.api.places import STRANGERS_MAX, Places
from kvleased.api.rest.protocol import GuardedProtocol
from kvleased.api.turns import Line
from kvleased.system.descriptors import ADVICE

_TO_OPEN: Final = 3
"""Turns that opening a connection takes: to accept it, to make its transport, and to begin to read."""
_LOOKS_A_TURN: Final = 32
"""Most connections that are accepted in one turn until one is open: those that their peers have closed cost little."""
UNSENT_BYTES_MAX: Final = 1 << 18
"""Bytes that the kernel keeps for a peer that does not read; by default it takes, and we would write, 4 MiB."""
SECONDS_WITHOUT_FDS: Final = 0.1
"""Seconds to pause accepting when this process is out of descriptors."""
UNREAD_BYTES_MAX: Final = 1 << 16
"""Bytes from a peer over TCP that the kernel keeps until we read them; as many may be read and copied in one turn."""
STOP_SECONDS: Final = 2
"""Seconds that requests in progress have left when the server stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The limits of the connections of one listener."""

    connections_max: int
    """Most connections of members."""
    head_seconds_max: float
    """Most seconds from a connection's beginning, or a head's first byte, to the head's end; and for a handshake."""
    body_seconds_max: float
    """Most seconds from the end of a head to the end of the body."""
    idle_seconds_max: float
    """Most seconds between two requests, that an answer may be left unread, and that a stranger may go on asking."""
    strangers_max: int = STRANGERS_MAX
    """Most connections of strangers, beside those of members."""
    takes_any_host: bool = False
    """Whether requests may name another host than loopback's own names."""


class HttpServer:
    """A listener, from `start` to `stop`; uvicorn's own has no limit on connections and does not count handshakes."""

    def __init__(  # noqa: PLR0913 -- one parameter a thing that a listener shares with others or has of its own
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: HttpLimits,
        *,
        tls: ssl.SSLContext | None = None,
        headers: list[tuple[str, str]] | None = None,
        knows: Callable[[str], bool] = lambda _: False,
        line: Line | None = None,
    ) -> None:
        """Take the app and its listener; `knows` tells whether a token is known, and listeners may share a `line`."""
        address = listener.getsockname()
        port = 0 if listener.family == socket.AF_UNIX else address[1]
        self.places = Places(limits.connections_max, limits.strangers_max, port)
        self._line = line or Line()
        self._is_in_line = False
        self._lacking = Seldom("descriptors_lacking")
        self._name = f"http:{port}" if port else "http"

        class Guarded(GuardedProtocol):
            head_seconds_max = limits.head_seconds_max
            body_seconds_max = limits.body_seconds_max
            idle_seconds_max = limits.idle_seconds_max
            checks_host = not limits.takes_any_host
            strangers = Seldom("bad_http")
            places = self.places
            line = self._line
            is_known = staticmethod(knows)

        if port:
            # Connections inherit it from their listener.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES_MAX)
        self._protocol = Guarded
        self._listener = listener
        self._limits = limits
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        self._config = _config(app, Guarded, headers, limits.idle_seconds_max)
        self._server = uvicorn.Server(self._config)
        self._server.lifespan = self._config.lifespan_class(self._config)
        self._server.servers = []

    def __repr__(self) -> str:
        """Show life: the connections."""
        return f"<HttpServer {self.places!r}>"

    @property
    def num_connections(self) -> int:
        """Connections that are open, or in the middle of a handshake."""
        return self.places.num_members + self.places.num_strangers

    async def start(self) -> None:
        """Begin to accept."""
        # Not serve(): it would take over the signals of the process, and wake up ten times a second.
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
        """Get in line to open a connection."""
        if not self._is_in_line:
            self._is_in_line = True
            self._line.take(self._accept_one)

    def _accept_one(self) -> int:
        """Open one connection, and leave others to later turns: each takes as long as a call or two of a worker."""
        self._is_in_line = False
        if self._listener.fileno() < 0:
            return 0
        for _ in range(_LOOKS_A_TURN):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return 0
            except OSError:
                self._do_without_descriptors()
                return 1
            sock.setblocking(False)
            if _has_gone(sock):
                # Otherwise a flood of these would fill the kernel's backlog, where others wait to be accepted.
                sock.close()
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES_MAX)
            connection = self._make(sock, address)
            self.places.enter(connection)
            opening = self._loop.create_task(self._open(sock, connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
            return _TO_OPEN
        return 1

    def _do_without_descriptors(self) -> None:
        """Have the oldest stranger give way, and pause: the listener stays readable, so the loop would spin."""
        self._lacking.tell(listener=self._name, advice=ADVICE)
        self.places.make_room()
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(SECONDS_WITHOUT_FDS, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    async def _open(self, sock: socket.socket, connection: GuardedProtocol) -> None:
        timeout = None if self._tls is None else self._limits.head_seconds_max
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except (OSError, asyncio.CancelledError):
            # The handshake failed, or the peer hung up: a port scan is not worth a log line.
            sock.close()
            self.places.leave(connection)

    def _make(self, sock: socket.socket, address: object) -> GuardedProtocol:
        connection = self._protocol(
            config=self._config,
            server_state=self._server.server_state,
            app_state={},
            _loop=self._loop,
        )
        connection.host = str(address[0]) if isinstance(address, tuple) else ""

        def hang_up() -> None:
            # The opening is not cancelled: a transport in the making would then read a closed descriptor.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        connection.hang_up = hang_up
        return connection


def _config(
    app: ASGIApp,
    protocol: type[GuardedProtocol],
    headers: list[tuple[str, str]] | None,
    idle_seconds_max: float,
) -> uvicorn.Config:
    """Return the configuration of uvicorn, which only parses and answers here."""
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        headers=headers,
        timeout_keep_alive=int(max(1, idle_seconds_max)),
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    config.load()
    return config


def _has_gone(sock: socket.socket) -> bool:
    """Tell whether the peer has closed the connection without sending anything."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
