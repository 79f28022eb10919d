"""Own the streams of REST: server-sent events, with a comment now and then so that a dead peer is noticed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvlease._checks import shown
from kvlease.errors import InvalidError, KVLeaseError
from kvlease.ids import SEQUENCE_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api import faults
from kvleased.api.rest.conversion import to_json
from kvleased.api.rest.endpoints import Answer, Endpoint, refusal, until_gone

COMMENT_SECONDS: Final = 15.0
"""Seconds without an event after which a comment is sent."""
FIRST_LOOK_SECONDS: Final = 0.01
"""Seconds to wait for a refusal, which must be sent instead of the head of the stream."""

_DIGITS_MAX: Final = len(str(SEQUENCE_MAX))
"""Most digits of an event's id."""
STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
"""Headers of a stream; the last has proxies pass each event on at once."""

Streams = set["asyncio.Future[None]"]
"""The futures by which open streams learn that their caller has left; cancelling one ends its stream."""

Next = Message | KVLeaseError | None
"""The next item of a stream: an answer, the reason why there are no more, or None at its end."""


class EventsEndpoint(Endpoint):
    """The route of a stream."""

    async def answer(self, request: Request) -> Response:
        """Begin the stream, or refuse it."""
        try:
            message, caller = await self._read(request)
            if isinstance(message, pb.WatchRequest):
                _resume(message, request)
        except KVLeaseError as error:
            return refusal(error)
        events = faults.stream(self._daemon, self._route.verb, message, caller)
        first = _next(events)
        await asyncio.wait({first}, timeout=FIRST_LOOK_SECONDS)
        if first.done() and isinstance(refused := first.result(), KVLeaseError):
            return refusal(refused)
        return EventStream(request, events, first)


class EventStream(Answer):
    """A response that goes on until the caller leaves or the daemon stops."""

    def __init__(
        self,
        request: Request,
        events: AsyncIterator[Message | KVLeaseError],
        first: "asyncio.Future[Next]",
    ) -> None:
        """Take the request, the answers, and the future of the first one."""
        super().__init__(200, STREAM_HEADERS, b"")
        self._request = request
        self._events = events
        self._upcoming = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send events until the caller leaves or the events end."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        gone = asyncio.ensure_future(until_gone(self._request))
        streams: Streams = self._request.app.state.streams
        streams.add(gone)
        try:
            while (chunk := await self._chunk(gone)) is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            streams.discard(gone)
            gone.cancel()
            self._upcoming.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _chunk(self, gone: "asyncio.Future[None]") -> bytes | None:
        either: set[asyncio.Future[Any]] = {gone, self._upcoming}
        done, _ = await asyncio.wait(
            either, timeout=COMMENT_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if gone in done:
            return None
        if not done:
            return b": still here\n\n"
        event = self._upcoming.result()
        if event is None:
            return None
        self._upcoming = _next(self._events)
        if isinstance(event, KVLeaseError):
            return problem_event(event)
        head = b"event: request\n"
        if isinstance(event, pb.WatchResponse):
            head = b"id: %d\nevent: %b\n" % (event.sequence, event.kind.encode())
        return b"%bdata: %b\n\n" % (head, to_json(event))


def problem_event(error: KVLeaseError) -> bytes:
    """Return the event that tells why a stream ends."""
    return b"event: problem\ndata: %b\n\n" % faults.problem(error)


def _next(events: AsyncIterator[Message | KVLeaseError]) -> "asyncio.Future[Next]":
    return asyncio.ensure_future(anext(events, None))


def _resume(message: pb.WatchRequest, request: Request) -> None:
    """Go on after the event whose id a reconnecting browser sends.

    Raises:
        InvalidError: no event can have this id; all events would be sent again.
    """
    seen = request.headers.get("last-event-id", "")
    if seen and not (seen.isascii() and seen.isdigit()):
        text = f"Last-Event-ID is {shown(seen)}; it must be the id of an event"
        raise InvalidError(text, resource="Last-Event-ID")
    if seen and not message.after_sequence:
        # Python would refuse to read thousands of digits.
        is_long = len(seen) > _DIGITS_MAX
        message.after_sequence = SEQUENCE_MAX if is_long else min(int(seen), SEQUENCE_MAX)
