"""Own how uvicorn speaks HTTP here: who is at the other end, and limits on heads and connections."""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvlease.errors import BusyError, InvalidError, KVLeaseError, TooLargeError
from kvleased.api.faults import problem, problem_headers
from kvleased.api.sockets import peer_of

HEAD_BYTES_MAX: Final = 64 << 10
"""Bytes of a request's head."""
HEAD_SECONDS_MAX: Final = 10.0
"""Seconds from a connection's beginning, or a head's first byte, to the head's end."""


class GuardedProtocol(HttpToolsProtocol):
    """HTTP with peer credentials in the scope's extensions, and every refusal a problem document."""

    connections_max: int = 1024
    """Set by the server that makes the class its own."""

    _deadline: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Learn who connected; turn away what is above the limit."""
        super().connection_made(transport)
        self._extensions: dict[str, Any] = {}
        sock = transport.get_extra_info("socket")
        if self.server is not None and self.server[1] is None:
            self._extensions["peercred"] = peer_of(sock)
        self._arm()
        if len(self.connections) > self.connections_max:
            limit = self.connections_max
            self._refuse(BusyError(resource="connections", need=1, available=0, limit=limit))

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a head may neither grow nor last for ever."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                limit = HEAD_BYTES_MAX
                self._refuse(TooLargeError(resource="head_bytes", limit=limit), 431)
            elif self._deadline is None:
                self._arm()

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """End a head."""
        self._is_in_head = False
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(InvalidError(msg), 400)

    def _refuse(self, error: KVLeaseError, status: int | None = None) -> None:
        status = status or error.http_status
        body = problem(error, status)
        head = b"".join(b"%b: %b\r\n" % header for header in problem_headers(error, body))
        self.transport.write(
            b"HTTP/1.1 %d Refused\r\n%bconnection: close\r\n\r\n%b" % (status, head, body)
        )
        self.transport.close()

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS_MAX, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
