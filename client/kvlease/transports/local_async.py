"""Own the local socket's connection for an event loop: it carries many calls at once, told apart by their numbers."""

import asyncio
import select
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

from google.protobuf.message import Message

from kvlease.errors import KVLeaseError, UnavailableError
from kvlease.transports._frames import (
    PING_NUMBER,
    decode,
    encode,
    encode_cancel,
    encode_ping,
    frame_bytes,
    response_of,
    unreachable,
)
from kvlease.transports._silence import Silence
from kvlease.transports.base import Attached, Outgoing, Undo, past_deadline
from kvlease.transports.local import LocalTransport
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import error_from_proto
from kvlease.wire.framing import BYTES_OF_LENGTH


class AsyncLocalTransport:
    """Calls over one connection, any number at once."""

    undoes = True

    def __init__(self, path: str, undo: Undo | None = None) -> None:
        """Remember where the socket is, and how to undo answers whose callers have gone."""
        self._path = path
        self._undo = undo
        self._connecting = asyncio.Lock()
        self._stream: _Stream | None = None

    @property
    def is_open(self) -> bool:
        """Whether it holds anything that `close` would give back."""
        return self._stream is not None and not self._stream.is_closed

    @property
    def has_peer(self) -> bool:
        """Whether the process that answered last still has its end of the connection open, as the kernel sees it."""
        return self._stream is not None and self._stream.has_peer

    async def send(self, call: Outgoing) -> Message:
        """Send a call and return its response; raises the daemon's refusal, DeadlineError or UnavailableError."""
        try:
            async with asyncio.timeout(call.seconds_left()):
                stream = self._stream
                if stream is None or stream.is_closed:
                    stream = await self._connected()
                return response_of(await stream.reply_to(call))
        except TimeoutError as error:
            raise past_deadline(call.verb) from error

    async def attach(self, call: Outgoing) -> Attached:
        """Send an attach over a fresh connection, which later calls also use."""
        # Receiving descriptors needs recvmsg, which no event loop offers. As the exchange is one frame each way, a
        # thread does it.
        loop, attaching = asyncio.get_running_loop(), _Attaching(self._path, call)
        try:
            attached = await loop.run_in_executor(None, attaching.run)
            async with self._connecting:
                await self.close()
                self._stream = await self._over(attaching.surrender())
                self._stream.is_answered = True
        except BaseException:
            if attaching.give_up():
                loop.run_in_executor(None, attaching.undo)
            raise
        return attached

    async def stream(self, call: Outgoing, idle_seconds: float | None) -> AsyncIterator[Message]:
        """Yield the answers to a watch or a trace, over its own connection, until none comes for `idle_seconds`."""
        try:
            async with asyncio.timeout(call.seconds_left()):
                reader, writer = await asyncio.open_unix_connection(self._path)
        except TimeoutError as error:
            raise past_deadline(call.verb) from error
        except OSError as error:
            raise unreachable(self._path, error) from error
        try:
            writer.write(encode(call, 1) + encode_ping(PING_NUMBER))
            silence, is_heard = Silence(f"unix://{self._path}", idle_seconds, can_ask=True), False
            while True:
                limit = silence.wait_seconds()
                try:
                    async with asyncio.timeout(limit if is_heard else call.seconds_left()):
                        head = await reader.readexactly(BYTES_OF_LENGTH)
                except TimeoutError as error:
                    if not is_heard:
                        raise past_deadline(call.verb) from error
                    if silence.ends_stream:
                        return
                    silence.ask()
                    writer.write(encode_ping(PING_NUMBER))
                    continue
                reply = decode(await reader.readexactly(frame_bytes(head) - BYTES_OF_LENGTH))
                is_heard = True
                silence.note_sign()
                if reply.call_number != PING_NUMBER:
                    yield response_of(reply)
                    silence.note_event()
        except (OSError, EOFError) as error:
            raise unreachable(self._path, error) from error
        finally:
            writer.close()

    async def close(self) -> None:
        """Close the connection; a later call would open another."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    async def _connected(self) -> "_Stream":
        async with self._connecting:
            if self._stream is None or self._stream.is_closed:
                self._stream = await self._over(None)
            return self._stream

    async def _over(self, sock: socket.socket | None) -> "_Stream":
        loop = asyncio.get_running_loop()
        try:
            if sock is None:
                _, stream = await loop.create_unix_connection(
                    lambda: _Stream(self._path, self._undo), self._path
                )
            else:
                sock.setblocking(False)
                _, stream = await loop.create_unix_connection(
                    lambda: _Stream(self._path, self._undo), sock=sock
                )
        except OSError as error:
            raise unreachable(self._path, error) from error
        return stream


class _Stream(asyncio.Protocol):
    """One connection and the calls that wait on it."""

    def __init__(self, path: str, undo: Undo | None) -> None:
        self._path = path
        self._undo = undo
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()
        self._call_number = 0
        self._waiting: dict[int, asyncio.Future[pb.Reply]] = {}
        self.is_answered = False
        """Whether the process at the other end has carried out a call; a daemon of another life would refuse it."""

    @property
    def has_peer(self) -> bool:
        if self.is_closed or not self.is_answered:
            return False
        assert self._transport is not None, "it is not closed"
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return not poll.poll(0)

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def reply_to(self, call: Outgoing) -> pb.Reply:
        number = self._write(call)
        future: asyncio.Future[pb.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            return await future
        except asyncio.CancelledError:  # by the caller, or by the call's deadline
            self._give_up(number, future)
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        if self._transport is None:
            return
        if self._loop.is_closed():
            # A closed loop can do nothing more with its transports; they close their descriptors when collected.
            transport, self._transport = self._transport, None
            with suppress(OSError):  # the daemon had closed it
                transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        else:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pending += data
        try:
            while len(self._pending) >= BYTES_OF_LENGTH and len(self._pending) >= (
                end := frame_bytes(self._pending)
            ):
                reply = decode(memoryview(self._pending)[BYTES_OF_LENGTH:end])
                del self._pending[:end]
                self._hand_over(reply)
        except UnavailableError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(unreachable(self._path, exc))

    def _write(self, call: Outgoing) -> int:
        if self._transport is None or self.is_closed:
            raise unreachable(self._path, None)
        self._call_number += 1
        self._transport.write(encode(call, self._call_number))
        return self._call_number

    def _hand_over(self, reply: pb.Reply) -> None:
        if reply.call_number == 0 and reply.HasField(
            "error"
        ):  # the daemon refuses the connection, not a call
            self._end(error_from_proto(reply.error))
        self.is_answered |= not reply.HasField("error")
        future = self._waiting.get(reply.call_number)
        # A future cancelled in this very turn of the loop is still listed, as its caller has not run yet.
        if future is None or future.cancelled():
            self._take_back(reply)
        elif not future.done():
            future.set_result(reply)

    def _give_up(self, call_number: int, future: "asyncio.Future[pb.Reply]") -> None:
        """Cancel a call in the daemon, so that it grants nothing that nobody takes; it may have answered already."""
        if future.cancelled():
            if self._transport is not None and not self.is_closed:
                self._call_number += 1
                self._transport.write(encode_cancel(self._call_number, call_number))
        elif future.exception() is None:
            self._take_back(future.result())

    def _take_back(self, reply: pb.Reply) -> None:
        """Undo what a reply grants whose caller has gone."""
        if self._undo is None or self.is_closed:
            return
        for call in self._undo(reply):
            self._write(call)

    def _end(self, error: KVLeaseError) -> None:
        self.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


class _Attaching:
    """An attach in a thread; whichever of the thread and the caller ends first, the other learns of it."""

    def __init__(self, path: str, call: Outgoing) -> None:
        self._transport = LocalTransport(path)
        self._call = call
        self._lock = threading.Lock()
        self._attached: Attached | None = None
        self._is_given_up = False

    def run(self) -> Attached:
        attached = self._transport.attach(self._call)
        with self._lock:
            self._attached = attached
            is_given_up = self._is_given_up
        if is_given_up:
            self.undo()
        return attached

    def surrender(self) -> socket.socket:
        return self._transport.surrender(self._call)

    def give_up(self) -> bool:
        """Have the thread undo its attach; True if the attach has already ended, so that the caller must undo it."""
        with self._lock:
            self._is_given_up = True
            return self._attached is not None

    def undo(self) -> None:
        assert self._attached is not None, "nothing to undo"
        self._transport.undo_attach(self._call, self._attached)
