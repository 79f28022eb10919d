"""Own how uvicorn speaks HTTP here: who is at the other end, and limits on heads, bodies and patience."""

import asyncio
from collections import deque
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvlease.errors import BusyError, InvalidError, KVLeaseError, TooLargeError
from kvleased.api.faults import problem, problem_headers
from kvleased.api.sockets import peer_of, role_of
from kvleased.api.tls import role_in
from kvleased.roles import Role

HEAD_BYTES_MAX: Final = 64 << 10
"""Bytes of a request's head."""
_GRACE_SECONDS: Final = 1.0
"""Seconds by which a body may be late, so that whoever waits for it can say so first."""


class GuardedProtocol(HttpToolsProtocol):
    """HTTP with who connected in the scope's extensions, and every refusal a problem document."""

    head_seconds_max = 10.0
    body_seconds_max = 10.0
    idle_seconds_max = 75.0
    checks_host = True
    """Whether only loopback's own names are taken; all four are set by the server that makes the class its own."""

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_in_head = False
    _is_in_body = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Learn who connected."""
        super().connection_made(transport)
        self._unanswered: deque[RequestResponseCycle] = deque()
        role, is_local = Role.STRANGER, self.server is not None and self.server[1] is None
        self._extensions: dict[str, Any] = {
            "checks_host": self.checks_host and not is_local,
            "body_seconds_max": self.body_seconds_max,
        }
        if is_local:
            peer = peer_of(transport.get_extra_info("socket"))
            self._extensions["peercred"] = peer
            role = role_of(peer)
        elif certificate := transport.get_extra_info("peercert"):
            role = role_in(certificate)
        self._extensions["role"] = role
        self._arm(self.head_seconds_max)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._disarm()
        # uvicorn tells the last of several requests, which may not be the one that is being answered.
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self.resume_writing()
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
                self._arm(self.head_seconds_max)
        elif self._is_in_body and self._deadline is None:
            # Also where nobody waits for it any more.
            self._arm(self.body_seconds_max + _GRACE_SECONDS)

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """End a head."""
        self._is_in_head = False
        self._is_in_body = True
        self._disarm()
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        if self.cycle is not None:
            self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        """End a body."""
        self._is_in_body = False
        self._disarm()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Give a peer that does not read some time to."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.idle_seconds_max, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on writing."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
            super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(InvalidError(msg), 400)

    @staticmethod
    def too_many(connections_max: int) -> bytes:
        """Return what a connection above the limit is told."""
        limit = connections_max
        return _answer(BusyError(resource="connections", need=1, available=0, limit=limit))

    def _refuse(self, error: KVLeaseError, status: int | None = None) -> None:
        self.transport.write(_answer(error, status))
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _answer(error: KVLeaseError, status: int | None = None) -> bytes:
    status = status or error.http_status
    body = problem(error, status)
    head = b"".join(b"%b: %b\r\n" % header for header in problem_headers(error, body))
    return b"HTTP/1.1 %d Refused\r\n%bconnection: close\r\n\r\n%b" % (status, head, body)
