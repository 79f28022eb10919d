"""Own how uvicorn speaks HTTP here: who is at the other end, and limits on heads, bodies and patience."""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvlease.errors import TooLargeError
from kvleased.access.roles import Role
from kvleased.access.strangers import Seldom
from kvleased.api.places import Places, no_place_of_member
from kvleased.api.rest.endings import (
    HEAD_BYTES_MAX,
    Lingering,
    gave_way,
    head_too_large,
    no_http,
    no_place,
    told_of,
)
from kvleased.api.rest.half_closed import HalfClosed, has_left, next_of
from kvleased.api.rest.heads import body_bytes, head_bytes, name_host, token_of
from kvleased.api.rest.whole import Whole
from kvleased.api.sockets import address_of, peer_of, role_of
from kvleased.api.tls import role_in
from kvleased.api.turns import Line

_LOGGER: Final = logging.getLogger("kvleased.http")
# What uvicorn warns of, strangers cause: it is told by `strangers`, seldom and with who it was.
_LOGGER.setLevel(logging.ERROR)
_GRACE_SECONDS: Final = 1.0
"""Seconds by which a body may be late, so that whoever waits for it can say so first; and for the rest of a head."""
_FED_BYTES: Final = 256
"""Bytes that the parser is fed at once, but for a body, which it takes whole: heads of some 10 requests at most."""
_PIECES_A_TURN: Final = 16
"""Pieces that the parser is fed before the loop looks at anything else."""
_PASSED_OVER_BYTES_MAX: Final = 1 << 20
"""Bytes of a head that are thrown away, so that who sends it gets to see its refusal."""
_BODY_PASSED_OVER_BYTES_MAX: Final = 32 << 20
"""Bytes of a body that is far above the limit which are thrown away; none of them is kept."""


class GuardedProtocol(HttpToolsProtocol):
    """HTTP with who connected in the scope's extensions, and every refusal a problem document."""

    head_seconds_max = 10.0
    body_seconds_max = 10.0
    idle_seconds_max = 75.0
    checks_host = True
    """Whether only loopback's own names are taken; all of these are set by the server whose own the class is."""
    strangers = Seldom("bad_http")
    """What tells of those who do not speak HTTP."""
    places: Places
    """Where each connection has its own, given back when it is lost."""
    line: Line
    """Where all connections wait for their turn, in which a little of what they sent is looked at."""
    is_known: Callable[[str], bool]
    """Whether a token is anybody's."""
    host = ""
    """Whence it comes, without the port."""
    hang_up: Callable[[], None]
    """What ends a connection that is not made yet."""

    _is_made = False
    _has_given_way = False
    _is_member = False
    """Whether it is no stranger's, whatever it sends: socket or certificate say who it is."""
    _is_of_stranger = False
    """Whether the last request was without a token that is known."""
    _has_no_place = False
    _made_at = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_in_head = False
    _is_in_body = False
    _extensions: dict[str, Any]
    _head_bytes = 0
    _chunk_bytes = 0
    """Bytes that the parser is being fed."""
    _body_bytes_left = 0
    """Bytes of the body that are still to come, where its head said how many it has."""
    _unfed: bytes | memoryview = b""
    """What has not been looked at: it came in another's turn, or behind requests that wait already."""
    _bytes_left = 0
    """Bytes that are still passed over; 0 where the head was not refused."""
    _half_closed: HalfClosed | None = None
    """What there is once the peer has closed his sending side, and is still answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Learn who connected."""
        self.logger = _LOGGER
        super().connection_made(transport)
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._extensions = {"is_lost": False}
        self._is_made, self._made_at = True, self.loop.time()
        if self._has_given_way:
            transport.abort()
            return
        role, is_local = Role.STRANGER, self.server is not None and self.server[1] is None
        self._extensions |= {
            "checks_host": self.checks_host and not is_local,
            "body_seconds_max": self.body_seconds_max,
            "pass_over_body": self.pass_over_body,
        }
        if is_local:
            peer = peer_of(transport.get_extra_info("socket"))
            self._extensions["peercred"] = peer
            role = role_of(peer)
        elif certificate := transport.get_extra_info("peercert"):
            role = role_in(certificate)
        if self.client is not None and not is_local:
            self._extensions["address"] = address_of(*self.client)
        self._extensions["role"] = role
        self._is_member = role is not Role.STRANGER
        if self._is_member and not self.places.let_in(self):
            self._refuse(no_place(self.places.members_max))
        self._arm(self.head_seconds_max)

    def give_way(self) -> None:
        """End at once, with the reason where it can be read without a handshake, and is no answer to anything."""
        self._has_given_way = True
        if not self._is_made:
            self.hang_up()
            return
        if not self._unanswered and self.scheme == "http":
            self.transport.write(gave_way(self.places.strangers_max))
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self.places.leave(self)
        self._extensions["is_lost"] = True
        self._disarm()
        self._give_up()
        self.resume_writing()
        super().connection_lost(exc)
        self._let_go()

    def data_received(self, data: bytes) -> None:
        """Take what came, unless it is passed over, or more is there than is taken up at once."""
        if self._bytes_left:
            self._pass_over(len(data))
        elif self._unfed:
            self._unfed = bytes(self._unfed) + data
            self.flow.pause_reading()
        else:
            self._unfed = data
            if not self.line.take(self._feed_on):
                self.flow.pause_reading()

    def eof_received(self) -> bool:  # type: ignore[override]  # as uvicorn declares it
        """End with who says no more, but not before whatever he asked is answered; TLS ends both ways at once."""
        if self._bytes_left or self.scheme == "https" or has_left(self.transport):
            return False
        if not self._unfed and next_of(self._unanswered) is None:
            self._close_behind()
        elif self._half_closed is None:
            self._half_closed = HalfClosed(self.transport, self._unanswered)
            self._half_closed.watch()
        return True

    def _feed(self, data: bytes | memoryview) -> None:
        """Feed the parser a little at a time, until a request waits behind another; a head may neither grow nor last.

        What one chunk brings are thousands of requests else, each of which costs time before it is begun.
        """
        at = 0
        for _ in range(_PIECES_A_TURN):
            if at >= len(data) or self.pipeline or self.transport.is_closing():
                break
            piece = bytes(data[at : at + max(_FED_BYTES, self._body_bytes_left)])
            at += len(piece)
            if not self._fed(piece):
                self._pass_over(len(data) - at)
                return
            if self._is_in_head:
                self._head_bytes += len(piece)
                if self._head_bytes > HEAD_BYTES_MAX:
                    self._refuse_head()
                    self._pass_over(len(data) - at)
                    return
        if not self.transport.is_closing():
            # Not copied: of a large chunk there would be a copy for each turn.
            self._leave(memoryview(data)[at:])

    def _leave(self, unfed: memoryview) -> None:
        """Keep what is not fed yet for a later turn; where nothing is, expect the rest of what has begun."""
        self._unfed = unfed
        if unfed:
            self.flow.pause_reading()
            if self.pipeline:
                # The end of an answer goes on with it.
                self._disarm()
            else:
                self.line.wait(self._feed_on)
        elif self._half_closed is not None and next_of(self._unanswered) is None:
            self.transport.close()
        elif self._deadline is None and self._is_in_head:
            self._arm(self.head_seconds_max)
        elif self._deadline is None and self._is_in_body:
            # Also where nobody waits for it any more.
            self._arm(self.body_seconds_max + _GRACE_SECONDS)

    def _feed_on(self) -> int:
        """Take up what was left, unless the connection is at its end, or passes over what comes."""
        data, self._unfed = self._unfed, b""
        if not data or self.transport.is_closing():
            return 0
        self.flow.resume_reading()
        if self._bytes_left:
            self._pass_over(len(data))
        else:
            self._feed(data)
        return 1

    def _fed(self, data: bytes) -> bool:
        """Feed the parser; tell whether it met no head that was refused."""
        self._chunk_bytes = len(data)
        super().data_received(data)
        return not self._bytes_left

    def on_response_complete(self) -> None:
        """Go on with the next request, and in another turn with what was left behind it."""
        super().on_response_complete()
        if self._unfed:
            self.flow.pause_reading()
            if not self.pipeline:
                self.line.wait(self._feed_on)
        elif self._half_closed is not None and next_of(self._unanswered) is None:
            self._close_behind()

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """End a head."""
        is_near = self._head_bytes + self._chunk_bytes > HEAD_BYTES_MAX
        # What came with it may be what is above the limit.
        if is_near and head_bytes(self.url, self.headers) > HEAD_BYTES_MAX:
            # The parser ends with it as with what is no HTTP.
            raise TooLargeError(resource="head_bytes", limit=HEAD_BYTES_MAX)
        if not self._is_member:
            self._look_who_asks()
        if not self.url.startswith(b"/"):
            name_host(self.url, self.headers)
        self._is_in_head = False
        self._is_in_body = True
        self._body_bytes_left = body_bytes(self.headers)
        self._disarm()
        super().on_headers_complete()
        if self._is_of_stranger and self.loop.time() > self._made_at + self.idle_seconds_max:
            # Each request would else keep the connection for as long again.
            self.cycle.keep_alive = False
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        if self.cycle is not None:
            self.cycle.transport = cast(asyncio.Transport, Whole(self.transport, self.loop))
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._body_bytes_left = max(0, self._body_bytes_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body."""
        self._is_in_body = False
        self._body_bytes_left = 0
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

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 -- uvicorn's one sentence for all
        """Refuse what is not HTTP, a head that came to its end above the limit, or whom there is no place for."""
        if self._has_no_place:
            self._refuse(no_place(self.places.members_max))
            return
        if self._is_in_head and self._head_bytes + self._chunk_bytes > HEAD_BYTES_MAX:
            self._refuse_head()
            return
        self._tell("it is no HTTP")
        self._refuse(no_http(sys.exception()))

    def pass_over_body(self) -> None:
        """Have the answer that comes next end the connection, but behind the body, which nobody wants to read."""
        if self._is_in_body and self.cycle is not None:
            self.cycle.keep_alive = False
            self.cycle.transport = cast(
                asyncio.Transport, Lingering(self.cycle.transport, self._linger)
            )

    def _unsupported_upgrade_warning(self) -> None:
        self._tell("it asks for an upgrade, which is passed over")

    def _tell(self, reason: str) -> None:
        """Have it told, now and then, that somebody does not speak as he should."""
        port = 0 if self.server is None else self.server[1] or 0
        self.strangers.tell(reason=reason, port=port, **told_of(self._extensions))

    def _look_who_asks(self) -> None:
        """Give the connection the place of whoever sends this head: a member, or one without a token that is known.

        Raises:
            BusyError: it is a member, and there is no place; the parser ends with it as with what is no HTTP.
        """
        token = token_of(self.headers)
        self._is_of_stranger = token is None or not self.is_known(token)
        if self._is_of_stranger:
            self.places.show_out(self)
        elif not self.places.let_in(self):
            self._has_no_place = True
            raise no_place_of_member(self.places.members_max)

    def _close_behind(self) -> None:
        """Close behind what the last answer may still hold of itself; see `Whole`."""
        self.loop.call_soon(self.transport.close)

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()

    def _refuse_head(self) -> None:
        """Refuse a head, and pass over the rest of it."""
        self.transport.write(head_too_large())
        self._give_up()
        self._linger(_PASSED_OVER_BYTES_MAX)

    def _linger(self, bytes_max: int = _BODY_PASSED_OVER_BYTES_MAX) -> None:
        """End what we say, and pass over what still comes: to close what is unread would take the answer along."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._disarm()
        self._arm(_GRACE_SECONDS)
        self._bytes_left = bytes_max
        self.flow.resume_reading()

    def _let_go(self) -> None:
        """Hold nothing that holds this: what the garbage collector has to find holds up all others meanwhile."""
        self._unset_keepalive_if_required()
        if self._half_closed is not None:
            self._half_closed.end()
            self._half_closed = None
        self._unanswered.clear()
        self.pipeline.clear()
        self._unfed = b""
        self.cycle = None  # type: ignore[assignment]  # as uvicorn has it before the first request
        self._extensions["pass_over_body"] = _nothing

    def _give_up(self) -> None:
        """Have it known that nothing more is to be answered."""
        # uvicorn tells the last of several requests, which may not be the one that is being answered.
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def _pass_over(self, num_bytes: int) -> None:
        """Throw away what comes after a head that was refused, but not without end, nor all of it in one turn."""
        self._bytes_left = max(0, self._bytes_left - num_bytes)
        if not self._bytes_left:
            self.transport.close()
        elif not self.transport.is_closing():
            self.flow.pause_reading()
            self.line.wait(self._read_on)

    def _read_on(self) -> int:
        if self.transport.is_closing():
            return 0
        self.flow.resume_reading()
        return 1

    def _arm(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _nothing() -> None:
    """Do what is to be done where a connection has ended."""
