"""Own how uvicorn speaks HTTP here: whose a connection is, and limits on heads, bodies and waiting times."""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvlease.errors import TooLargeError
from kvleased.access.roles import Role
from kvleased.access.strangers import Seldom
from kvleased.api.places import no_place_of_member
from kvleased.api.rest.endings import (
    BODY_PASSED_OVER_BYTES_MAX,
    HEAD_BYTES_MAX,
    PASSED_OVER_BYTES_MAX,
    Lingering,
    gave_way,
    head_too_large,
    no_http,
    no_place,
    told_of,
)
from kvleased.api.rest.half_closed import HalfClosed, has_left, next_of
from kvleased.api.rest.heads import body_bytes, check_hosts, head_bytes, name_host, token_of
from kvleased.api.rest.timed import TimedProtocol
from kvleased.api.rest.whole import Whole
from kvleased.api.sockets import address_of, has_unread, peer_of, role_of
from kvleased.api.turns import Line
from kvleased.credentials.tls import role_in

_LOGGER: Final = logging.getLogger("kvleased.http")
# Strangers cause what uvicorn warns of; `strangers` logs it instead, seldom and with the peer.
_LOGGER.setLevel(logging.ERROR)
_GRACE_SECONDS: Final = 1.0
"""Seconds of grace for a late body, so that its reader can refuse it first; and for passing over what still comes."""
_FED_BYTES: Final = 256
"""Bytes that the parser is fed at once: the heads of at most some 10 requests. A body it takes whole."""
_PIECES_A_TURN: Final = 16
"""Pieces that the parser is fed before the loop looks at anything else."""


class GuardedProtocol(TimedProtocol):
    """HTTP with the peer in the scope's extensions, and with a problem document for every refusal."""

    checks_host = True
    """Whether only loopback's own names are accepted as host. Each server sets all of these in a class of its own."""
    strangers = Seldom("bad_http")
    """Logs peers that do not speak HTTP."""
    line: Line
    """The line in which all connections wait for a turn, in which a little of what they sent is parsed."""
    is_known: Callable[[str], bool]
    """Tells whether a token is known."""
    host = ""
    """The address that the connection comes from, without the port."""
    hang_up: Callable[[], None]
    """Ends a connection that is not made yet."""

    _is_made = _has_given_way = False
    _is_member = False
    """Whether the connection is a member's whatever it sends, because its socket or certificate says whose it is."""
    _is_of_stranger = False
    """Whether the last request had no known token."""
    _has_no_place = False
    _made_at = 0.0
    _is_in_head = _is_in_body = False
    _extensions: dict[str, Any]
    _head_bytes = 0
    _chunk_bytes = 0
    """Bytes that the parser is being fed now."""
    _body_bytes_left = 0
    """Bytes of the body that are still to come, if its head told its length."""
    _unfed: bytes | memoryview = b""
    """Bytes that were not parsed yet: they came outside this connection's turn, or behind requests that wait."""
    _bytes_left = 0
    """Bytes that may still be passed over; 0 if nothing was refused."""
    _last_word = b""
    """A refusal that waits until the requests before it are answered."""
    _half_closed: HalfClosed | None = None
    """Looks after a peer that has closed its sending side and still waits for answers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Find out whose the connection is, and give a member its place."""
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
        if self._is_member and not self.places.let_in_unheard(self):
            self._refuse(no_place(self.places.members_max))
        self._arm(self.head_seconds_max)

    @property
    def has_unread(self) -> bool:
        """Whether bytes have arrived that were not read or parsed yet."""
        sock = self.transport.get_extra_info("socket")
        return bool(self._unfed) or sock is None or has_unread(sock)

    def give_way(self) -> None:
        """End at once; first send the reason, unless TLS is in use or a request waits that it would seem to answer."""
        self._has_given_way = True
        if not self._is_made:
            self.hang_up()
            return
        if not self._unanswered and self.scheme == "http":
            self.transport.write(gave_way(self.places, is_member=self._is_member))
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back, and let go of everything."""
        self.places.leave(self)
        self._extensions["is_lost"] = True
        self._disarm()
        self._give_up()
        self.resume_writing()
        super().connection_lost(exc)
        self._let_go()

    def data_received(self, data: bytes) -> None:
        """Take bytes: pass over them after a refusal, or parse them in this connection's turn."""
        if self._bytes_left or self._last_word:
            self._pass_over(len(data))
        elif self._unfed:
            self._unfed = bytes(self._unfed) + data
            self.flow.pause_reading()
        else:
            self._unfed = data
            if not self.line.take(self._feed_on):
                self.flow.pause_reading()

    def eof_received(self) -> bool:  # type: ignore[override]  # as uvicorn declares it
        """Keep the connection of a peer that sends no more until all its requests are answered; TLS ends at once."""
        if self._bytes_left or self.scheme == "https" or has_left(self.transport):
            return False
        if not self._unfed and next_of(self._unanswered) is None:
            return False
        if self._half_closed is None:
            self._half_closed = HalfClosed(self.transport, self._unanswered)
            self._half_closed.watch()
        return True

    def _feed(self, data: bytes | memoryview) -> None:
        """Feed the parser a little at a time, until a request waits behind another; refuse a head that grows too large.

        Otherwise one chunk could bring thousands of requests, each of which takes time before it is begun.
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
            # A view, not a copy: a large chunk would be copied once for each turn.
            self._leave(memoryview(data)[at:])

    def _leave(self, unfed: memoryview) -> None:
        """Keep the bytes that are not fed yet for a later turn; if there are none, set a deadline for the rest."""
        self._unfed = unfed
        if unfed:
            self.flow.pause_reading()
            if self.pipeline:
                # The end of the answer under way will feed the rest.
                self._disarm()
            else:
                self.line.wait(self._feed_on)
        elif self._half_closed is not None and next_of(self._unanswered) is None:
            self.transport.close()
        elif self._deadline is None and self._is_in_head:
            self._arm(self.head_seconds_max)
        elif self._deadline is None and self._is_in_body:
            # Even if nobody waits for the body any more.
            self._arm(self.body_seconds_max + _GRACE_SECONDS)

    def _feed_on(self) -> int:
        """Feed the bytes that were left, or pass over them; do nothing if the connection is closing."""
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
        """Feed the parser; return false if it met a head that was refused."""
        self._chunk_bytes = len(data)
        super().data_received(data)
        return not (self._bytes_left or self._last_word)

    def on_response_complete(self) -> None:
        """Go on with the next request, and in a later turn with the bytes behind it."""
        super().on_response_complete()
        if self._last_word:
            self._say_last()
        elif self._unfed:
            self.flow.pause_reading()
            if not self.pipeline:
                self.line.wait(self._feed_on)
        elif self._half_closed is not None and next_of(self._unanswered) is None:
            self.transport.close()

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """End a head."""
        is_near = self._head_bytes + self._chunk_bytes > HEAD_BYTES_MAX
        # Count exactly: what is above the limit may be bytes that only came in the same piece.
        if is_near and head_bytes(self.url, self.headers) > HEAD_BYTES_MAX:
            # The parser ends with this error as it does with bytes that are no HTTP.
            raise TooLargeError(resource="head_bytes", limit=HEAD_BYTES_MAX)
        if not self._is_member:
            self._look_who_asks()
        check_hosts(self.headers, self.parser.get_http_version())
        name_host(self.url, self.headers)
        self.places.hear(self)
        self._is_in_head = False
        self._is_in_body = True
        self._body_bytes_left = body_bytes(self.headers)
        self._disarm()
        super().on_headers_complete()
        if self._is_of_stranger and self.loop.time() > self._made_at + self.idle_seconds_max:
            # Otherwise each request would keep the connection for as long again.
            self.cycle.keep_alive = False
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        if self.cycle is not None:
            # The head of an answer without a body would be held after its end.
            if self.scope["method"] != "HEAD":
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

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 -- uvicorn's one sentence for all
        """Refuse what is not HTTP/1.1, a complete head above the limit, or a member for whom there is no place."""
        if self._has_no_place:
            self._refuse(no_place(self.places.members_max))
        elif self._is_in_head and self._head_bytes + self._chunk_bytes > HEAD_BYTES_MAX:
            self._refuse_head()
        else:
            self._tell("it is not HTTP")
            self._refuse(no_http(sys.exception()))

    def pass_over_body(self) -> None:
        """Make the next answer end the connection, but only after the rest of the body was received and thrown away."""
        if self._is_in_body and self.cycle is not None:
            self.cycle.keep_alive = False
            self.cycle.transport = cast(
                asyncio.Transport, Lingering(self.cycle.transport, self._linger)
            )

    def _unsupported_upgrade_warning(self) -> None:
        self._tell("it asks for an upgrade, which is passed over")

    def _tell(self, reason: str) -> None:
        """Log, now and then, that a peer does not speak HTTP as it should."""
        port = 0 if self.server is None else self.server[1] or 0
        self.strangers.tell(reason=reason, port=port, **told_of(self._extensions))

    def _look_who_asks(self) -> None:
        """Give the connection the place of the sender of this head: a member's, or a stranger's without a known token.

        Raises:
            BusyError: there is no member's place; the parser ends with it as it does with bytes that are no HTTP.
        """
        token = token_of(self.headers)
        self._is_of_stranger = token is None or not self.is_known(token)
        if self._is_of_stranger:
            self.places.show_out(self)
        elif not self.places.let_in(self):
            self._has_no_place = True
            raise no_place_of_member(self.places.members_max)

    def _refuse(self, answer: bytes) -> None:
        if next_of(self._unanswered) is not None:
            self._hold(answer)
            return
        # In the middle of an answer to a request whose body is at fault, a refusal would be taken for a part of it.
        if not any(one.response_started and not one.response_complete for one in self._unanswered):
            self.transport.write(answer)
        self.transport.close()

    def _refuse_head(self) -> None:
        """Refuse a head, and pass over the rest of it."""
        self._hold(head_too_large())
        self._say_last()

    def _hold(self, answer: bytes) -> None:
        """Keep a refusal that would be taken for the answer to a request before it; what it refuses is not begun."""
        self._disarm()
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        self._last_word = answer

    def _say_last(self) -> None:
        """Refuse, once all requests before are answered, and pass over the rest."""
        if (
            self._last_word
            and next_of(self._unanswered) is None
            and not self.transport.is_closing()
        ):
            self.transport.write(self._last_word)
            self._last_word = b""
            self._give_up()
            self._linger(PASSED_OVER_BYTES_MAX)

    def _linger(self, bytes_max: int = BODY_PASSED_OVER_BYTES_MAX) -> None:
        """Close our sending side, and pass over what still comes: closing with bytes unread would lose the answer."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._disarm()
        self._arm(_GRACE_SECONDS)
        self._bytes_left = bytes_max
        self.flow.resume_reading()

    def _let_go(self) -> None:
        """Drop all references that form cycles: the garbage collector would hold up all calls to find them."""
        self._unset_keepalive_if_required()
        if self._half_closed is not None:
            self._half_closed.end()
            self._half_closed = None
        self._unanswered.clear()
        self.pipeline.clear()
        self._unfed = b""
        self.cycle = None  # type: ignore[assignment]  # as uvicorn has it before the first request
        self._extensions["pass_over_body"] = lambda: None

    def _give_up(self) -> None:
        """Tell all requests that the connection has ended, so that nothing more is answered."""
        # uvicorn tells only the last of several requests, which need not be the one that is being answered.
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def _pass_over(self, num_bytes: int) -> None:
        """Throw away bytes that come after a refusal, up to a limit, and only some in each turn."""
        if self._last_word:
            self.flow.pause_reading()
            return
        self._bytes_left = max(0, self._bytes_left - num_bytes)
        if not self._bytes_left:
            self.transport.close()
        elif not self.transport.is_closing():
            self.flow.pause_reading()
            self.line.rest(self._read_on)

    def _read_on(self) -> int:
        if self.transport.is_closing():
            return 0
        self.flow.resume_reading()
        return 1
