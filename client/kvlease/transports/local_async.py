"""Own the local socket's connection for an event loop: many calls at once over it, told apart by their number."""

import asyncio
import socket
from collections.abc import AsyncIterator

from google.protobuf.message import Message

from kvlease.errors import KVLeaseError, UnavailableError
from kvlease.faults import error_from_proto
from kvlease.framing import BYTES_OF_LENGTH
from kvlease.transports._frames import (
    close_all,
    decode,
    encode,
    frame_bytes,
    response_of,
    unreachable,
)
from kvlease.transports.base import Attached, Outgoing, past_deadline
from kvlease.transports.local import LocalTransport
from kvlease.v1 import kvlease_pb2 as pb


class AsyncLocalTransport:
    """Calls over one connection, any number at once."""

    def __init__(self, path: str) -> None:
        """Remember where the socket is."""
        self._path = path
        self._connecting = asyncio.Lock()
        self._stream: _Stream | None = None

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
        """Send an attach over a fresh connection, on which later calls go too."""
        # Descriptors need recvmsg, which no event loop offers; the exchange is one frame each way, so a thread does it.
        blocking = LocalTransport(self._path)
        exchange = asyncio.get_running_loop().run_in_executor(None, blocking.attach, call)
        try:
            attached = await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(lambda done: _discard(done, blocking))
            raise
        async with self._connecting:
            await self.close()
            self._stream = await self._over(blocking.surrender(call))
        return attached

    async def stream(self, call: Outgoing, idle_seconds: float | None) -> AsyncIterator[Message]:
        """Yield the answers to a watch or a trace over a connection of its own until none came for `idle_seconds`."""
        try:
            async with asyncio.timeout(call.seconds_left()):
                reader, writer = await asyncio.open_unix_connection(self._path)
        except TimeoutError as error:
            raise past_deadline(call.verb) from error
        except OSError as error:
            raise unreachable(self._path, error) from error
        try:
            writer.write(encode(call, 1))
            while True:
                async with asyncio.timeout(idle_seconds):
                    head = await reader.readexactly(BYTES_OF_LENGTH)
                body = await reader.readexactly(frame_bytes(head) - BYTES_OF_LENGTH)
                yield response_of(decode(body))
        except TimeoutError:
            return
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
                    lambda: _Stream(self._path), self._path
                )
            else:
                sock.setblocking(False)
                _, stream = await loop.create_unix_connection(
                    lambda: _Stream(self._path), sock=sock
                )
        except OSError as error:
            raise unreachable(self._path, error) from error
        return stream


class _Stream(asyncio.Protocol):
    """One connection and the calls that wait on it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()
        self._call_number = 0
        self._waiting: dict[int, asyncio.Future[pb.Reply]] = {}

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def reply_to(self, call: Outgoing) -> pb.Reply:
        number = self._write(call)
        future: asyncio.Future[pb.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            return await future
        finally:
            # Also when the caller was cancelled or too late: the reply will find nobody.
            self._waiting.pop(number, None)

    def close(self) -> None:
        if self._transport is not None:
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
        future = self._waiting.get(reply.call_number)
        if future is not None and not future.done():
            future.set_result(reply)

    def _end(self, error: KVLeaseError) -> None:
        self.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _discard(done: "asyncio.Future[Attached]", blocking: LocalTransport) -> None:
    """Close what an attach brought whose caller was cancelled."""
    blocking.close()
    if not done.cancelled() and done.exception() is None:
        close_all(done.result().fds)
