"""Own the frames of one connection of the local socket after its first: a call takes one write and no task.

A frame is a little-endian uint32 length and one Call or Reply. How a connection begins is `listener`'s business.
"""

import asyncio
import socket
from time import perf_counter
from typing import Final, Protocol, cast

from google.protobuf.message import DecodeError, Message

from kvlease.errors import BusyError, InvalidError, KVLeaseError, TooLargeError
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import error_to_proto
from kvlease.wire.framing import BYTES_OF_LENGTH, LENGTH, reply_frame
from kvleased.access.callers import Caller
from kvleased.access.roles import OF_VERB, OWN, of_verb
from kvleased.api import faults
from kvleased.api.local.outbox import Outbox
from kvleased.api.messages import parse
from kvleased.api.seam import Backend, Limits, Observer
from kvleased.api.sockets import Peer, role_of
from kvleased.api.turns import Line, Turns
from kvleased.counted import are

FRAMES_A_TURN: Final = 16
"""Frames of one read that are served, or frames of a stream that are sent, before the loop looks at anything else."""

_RETRY_AFTER_MS: Final = 10
_STREAMS: Final = frozenset({"watch", "trace"})
"""The verbs that are answered without end."""
_OWN: Final = frozenset(verb for verb, roles in OF_VERB.items() if roles is OWN)
"""The verbs of attached workers, which are called all the time: each verb checks the token itself."""
_UNSENT_STREAM_BYTES_MAX: Final = 1 << 20
"""Bytes of streams that may be unread before the next answer waits."""
_UNSENT_SECONDS: Final = 0.05
"""Seconds between two checks whether those bytes were read."""


class Server(Protocol):
    """The server of a connection."""

    @property
    def daemon(self) -> Backend:
        """Answers the calls."""
        ...

    @property
    def settings(self) -> Limits:
        """The limits."""
        ...

    @property
    def metrics(self) -> Observer:
        """Counts the calls."""
        ...

    @property
    def turns(self) -> Turns:
        """The turns of connections that send many frames at once."""
        ...

    @property
    def streams_line(self) -> Line:
        """The line of streams that have many answers at once."""
        ...

    def forget(self, connection: "LocalConnection") -> None:
        """Take note that a connection is closed."""
        ...


def frame_of(call_number: int, epoch: int, verb: str, answer: Message | KVLeaseError) -> bytes:
    """Return the frame that answers a call."""
    if isinstance(answer, KVLeaseError):
        return error_frame(call_number, epoch, answer)
    return reply_frame(verb, answer.SerializeToString(), call_number, epoch)


def error_frame(call_number: int, epoch: int, error: KVLeaseError) -> bytes:
    """Return the frame that refuses a call; call number 0 refuses the connection."""
    packed = pb.Reply(
        call_number=call_number, epoch=epoch, error=error_to_proto(error)
    ).SerializeToString()
    return len(packed).to_bytes(BYTES_OF_LENGTH, "little") + packed


class LocalConnection(asyncio.Protocol):
    """One connection; it is a worker's if it began with an attach."""

    def __init__(self, server: Server, sock: socket.socket, peer: Peer, token: str) -> None:
        """Bind the connection to the worker with `token`, if that is not empty; the transport owns `sock`."""
        self._server = server
        self._outbox = Outbox(sock)
        self._daemon = server.daemon
        self._observe = server.metrics.observe
        self._pid, self._uid = peer
        self._token = token
        self._role = role_of(peer)
        self._message_bytes_max = server.settings.max_message_bytes
        self._calls_max = server.settings.max_calls_in_flight
        self._frame_seconds_max = server.settings.head_seconds_max
        self._transport: asyncio.Transport | None = None
        self._is_closed = False
        self.heard_at = perf_counter()
        """Seconds on the clock of `perf_counter` at which the last frame came."""
        self._partial = bytearray()
        self._bytes_needed = BYTES_OF_LENGTH
        self._is_in_line = False
        self._deadline: asyncio.TimerHandle | None = None
        self._batch: list[bytes] | None = None
        self._waiting: dict[asyncio.Future[Message], int] = {}
        """The numbers of the calls that wait, by the futures of their answers."""
        self._watches: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show life: the calls that are not answered yet."""
        return f"<LocalConnection {len(self._waiting)} waiting, {len(self._watches)} watching>"

    @property
    def is_idle(self) -> bool:
        """Whether no call or stream of the connection waits for an answer."""
        return not self._waiting and not self._watches

    def close(self) -> None:
        """Close the connection once its output is sent, even if the transport is not made yet."""
        self._is_closed = True
        self._outbox.end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless the connection was closed before."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._outbox.begin(self._transport)
        if self._is_closed:
            self._outbox.end()

    def pause_writing(self) -> None:
        """Keep the output, as the peer does not read."""
        self._outbox.fill()

    def resume_writing(self) -> None:
        """Send the kept output."""
        self._outbox.drain()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's contract
        """Cancel every call that waits; the worker itself lives on."""
        self._transport = None
        self._outbox.lose()
        self._server.forget(self)
        self._disarm()
        for future in list(self._waiting):
            self._daemon.cancel(future)
        self._waiting.clear()
        for watch in self._watches:
            watch.cancel()

    def data_received(self, data: bytes) -> None:
        """Serve frames; if many arrive at once, serve some in each turn, behind the connections in line."""
        if not self._partial and len(data) >= BYTES_OF_LENGTH:
            (body_bytes,) = LENGTH.unpack_from(data)
            if BYTES_OF_LENGTH + body_bytes == len(data) and body_bytes <= self._message_bytes_max:
                # The usual case: one frame and nothing else. The answer is sent before the call is counted.
                if not self._serve(data[BYTES_OF_LENGTH:]):
                    self._outbox.end()
                return
        self._partial += data
        if self._is_in_line or len(self._partial) < self._bytes_needed:
            return
        self._is_in_line = self._server.turns.take(self)
        if self._is_in_line and self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> bool:
        """Serve some of the complete frames, and answer them in one write; tell whether there are more."""
        if self._transport is None:
            return False
        self._batch = []
        makes_sense = self._serve_frames()
        batch, self._batch = self._batch, None
        if batch:
            self._send(b"".join(batch))
        if not makes_sense:
            self._partial.clear()
            self._outbox.end()
            return False
        has_more = self._has_frame()
        self._expect(is_in_frame=bool(self._partial) and not has_more)
        if self._is_in_line and not has_more:
            self._is_in_line = False
            self._transport.resume_reading()
        return has_more

    def _serve_frames(self) -> bool:
        """Serve some of the frames that arrived; return false if the stream makes no sense any more."""
        begin = 0
        for _ in range(FRAMES_A_TURN):
            body = begin + BYTES_OF_LENGTH
            if body > len(self._partial):
                break
            body_bytes = int.from_bytes(self._partial[begin:body], "little")
            if body_bytes > self._message_bytes_max:
                error = TooLargeError.of_message(body_bytes, self._message_bytes_max)
                self._refuse(0, error)
                return False
            if body + body_bytes > len(self._partial):
                break
            if not self._serve(bytes(self._partial[body : body + body_bytes])):
                return False
            begin = body + body_bytes
        del self._partial[:begin]
        return True

    def _has_frame(self) -> bool:
        """Tell whether another frame is complete or too large, and note how many bytes the next frame takes."""
        self._bytes_needed = BYTES_OF_LENGTH
        if len(self._partial) >= BYTES_OF_LENGTH:
            body_bytes = int.from_bytes(self._partial[:BYTES_OF_LENGTH], "little")
            if body_bytes <= self._message_bytes_max:
                self._bytes_needed += body_bytes
        return len(self._partial) >= self._bytes_needed

    def _expect(self, *, is_in_frame: bool) -> None:
        """Set the deadline for the rest of a frame, if one has begun."""
        self._disarm()
        if is_in_frame:
            assert self._transport is not None, "kept after the end"
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._frame_seconds_max, self._transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _serve(self, packed: bytes) -> bool:
        """Answer one call, now or later; return False if the peer cannot be told which call failed."""
        started = self.heard_at = perf_counter()
        try:
            call = parse(pb.Call, packed)
        except InvalidError as error:
            call_number = _call_number(packed)
            self._refuse(call_number, error)
            return call_number != 0
        verb, call_number = call.WhichOneof("request"), call.call_number
        if not (verb or call_number):
            # The frame asks for nothing, and has no number by which to say so.
            self._refuse(0, _misplaced(verb))
            return False
        token, key = call.token or self._token, call.idempotency_key
        caller = Caller("local", token, call.epoch, key, call.cache, None, self._pid, self._uid)
        if self._daemon.tracing is not None:
            caller = caller._replace(traceparent=call.traceparent)
        if verb not in _OWN:
            admitted = self._admitted(verb, call, caller._replace(role=self._role), started)
            if admitted is None:
                return True
            caller = admitted
        assert verb is not None, "what has no verb is not admitted"
        answer = faults.ask(self._daemon.answer, verb, getattr(call, verb), caller)
        if isinstance(answer, KVLeaseError) and verb in _OWN:
            answer = self._unless_stranger(verb, caller, answer)
        if isinstance(answer, asyncio.Future):
            self._wait(call_number, verb, answer, started)
        else:
            self._answer(call_number, verb, answer, started)
        return True

    def _admitted(
        self, verb: str | None, call: pb.Call, caller: Caller, started: float
    ) -> Caller | None:
        """Return the caller of a verb that is not only for workers; None if the call is done or begins a stream."""
        if verb is None and call.cancels:
            self._cancel(call.cancels)
            return None
        if verb is None or verb == "attach":
            self._refuse(call.call_number, _misplaced(verb))
            return None
        try:
            caller = self._daemon.admit(of_verb(verb), caller, verb)
        except KVLeaseError as error:
            self._answer(call.call_number, verb, error, started)
            return None
        if verb in _STREAMS:
            self._watch(verb, call, caller)
            return None
        return caller

    def _unless_stranger(self, verb: str, caller: Caller, refusal: KVLeaseError) -> KVLeaseError:
        """Return the refusal of a worker's own verb, or that of its token, which other transports look at first."""
        try:
            self._daemon.admit(OWN, caller._replace(role=self._role), verb)
        except KVLeaseError as error:
            return faults.without_frames(error)
        return refusal

    def _answer(
        self, call_number: int, verb: str, answer: Message | KVLeaseError, started: float
    ) -> None:
        epoch, code = self._daemon.epoch, "OK"
        if isinstance(answer, KVLeaseError):
            frame, code = error_frame(call_number, epoch, answer), answer.code
        else:
            frame = reply_frame(verb, answer.SerializeToString(), call_number, epoch)
        self._send(frame)
        self._daemon.settle()
        self._observe(verb, "local", code, perf_counter() - started)

    def _wait(
        self, call_number: int, verb: str, future: asyncio.Future[Message], started: float
    ) -> None:
        if not self._has_room():
            self._daemon.cancel(future)
            self._answer(call_number, verb, self._too_many(), started)
            return

        def done(finished: asyncio.Future[Message]) -> None:
            self._waiting.pop(finished, None)
            answer = faults.outcome(verb, finished)
            self._answer(call_number, verb, answer, started)

        self._waiting[future] = call_number
        future.add_done_callback(done)

    def _cancel(self, call_number: int) -> None:
        """Cancel a call that its caller has given up; do nothing if it no longer waits."""
        for future, number in list(self._waiting.items()):
            if number == call_number:
                self._daemon.cancel(future)

    def _watch(self, verb: str, call: pb.Call, caller: Caller) -> None:
        if not self._has_room():
            self._refuse(call.call_number, self._too_many())
            return
        watch = asyncio.get_running_loop().create_task(self._send_stream(verb, call, caller))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _send_stream(self, verb: str, call: pb.Call, caller: Caller) -> None:
        num_sent = 0
        async for answer in faults.stream(self._daemon, verb, getattr(call, verb), caller):
            self._send(frame_of(call.call_number, self._daemon.epoch, verb, answer))
            num_sent += 1
            if num_sent % FRAMES_A_TURN == 0:
                # Past events come without a pause, thousands of them at once.
                await self._server.streams_line.breathe()
            # A slow reader need not be disconnected: it will be told what it has missed.
            while self._outbox.unsent_bytes > _UNSENT_STREAM_BYTES_MAX:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(_UNSENT_SECONDS)

    def _has_room(self) -> bool:
        return len(self._waiting) + len(self._watches) < self._calls_max

    def _too_many(self) -> BusyError:
        message = (
            f"{are(self._calls_max, 'call')} unanswered on this connection, as many as max_calls_in_flight allows; "
            "wait for an answer, or open another connection"
        )
        return BusyError(
            message,
            resource="calls_in_flight",
            need=1,
            available=0,
            limit=self._calls_max,
            retry_after_ms=_RETRY_AFTER_MS,
        )

    def _refuse(self, call_number: int, error: KVLeaseError) -> None:
        self._send(error_frame(call_number, self._daemon.epoch, error))

    def _send(self, frame: bytes) -> None:
        if self._batch is not None:
            self._batch.append(frame)
        else:
            self._outbox.send(frame)


def _call_number(packed: bytes) -> int:
    """Return the number of a call that was not understood; 0 if not even that can be read."""
    try:
        return pb.Call.FromString(packed).call_number
    except DecodeError:
        return 0


def _misplaced(verb: str | None) -> InvalidError:
    if verb is None:
        message = "the call has no request; set one of the fields of Call.request"
        return InvalidError(message, resource="request")
    message = "attach must be the first frame of its connection; open another connection"
    return InvalidError(message, resource="connection")
