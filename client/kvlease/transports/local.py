"""Own the blocking connections over the local socket: one frame out, one frame in, and the descriptors of an attach.

They wait only where a socket is not ready, because Python's timeouts poll before every read and write.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final
from weakref import ReferenceType, ref

from google.protobuf.message import Message

from kvlease.errors import KVLeaseError, UnavailableError
from kvlease.transports._frames import (
    PING_NUMBER,
    close_all,
    decode,
    encode,
    encode_ping,
    frame_bytes,
    late_token,
    receive_attached,
    response_of,
    send_attach,
    unreachable,
)
from kvlease.transports._pool import ConnectionPool
from kvlease.transports._silence import Silence
from kvlease.transports._waits import await_bytes, has_peer, interval, send_all
from kvlease.transports.base import Attached, Outgoing, past_deadline
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.framing import BYTES_OF_LENGTH, LENGTH

_FIRST_BUFFER_BYTES: Final = 2**16
UNDO_SECONDS: Final = 1.0
"""Seconds that undoing an attach may take if its caller has gone."""
_LOOK_SECONDS: Final = 0.0002
"""Seconds for which a thread looks for an answer before it sleeps until the answer comes.

Falling asleep and waking costs a thread as much time as the daemon takes for most calls, and costs the daemon, which
wakes it, half of that again.
"""
_CALLS_WITHOUT_LOOK: Final = 31
"""Calls that sleep at once after a look in vain: if the daemon shares our core, our looking only holds it up."""


class LocalTransport:
    """Calls over connections, each of which carries one at a time; threads do not wait for each other."""

    def __init__(self, path: str) -> None:
        """Remember where the socket is."""
        self._path = path
        self._pool = ConnectionPool(lambda: _Connection(path))
        self._begun: ReferenceType[_Connection] | None = None

    def __repr__(self) -> str:
        """Show life: whether it is connected."""
        return f"<LocalTransport {self._path} {self._pool}>"

    @property
    def is_open(self) -> bool:
        """Whether it holds anything that `close` would give back."""
        return self._pool.is_open

    @property
    def has_peer(self) -> bool:
        """Whether the process that answered last still has its connection open, as the kernel sees it."""
        connection = self._pool.newest()
        if connection is None and self._begun is not None:
            connection = self._begun()
        return connection is not None and connection.has_peer

    def send(self, call: Outgoing) -> Message:
        """Send a call and return its response; raises the daemon's refusal, DeadlineError or UnavailableError."""
        connection, num_closes = self._pool.take(call)
        try:
            reply = connection.exchange(call)
        except OSError as error:
            raise self._failed(error, call) from error
        finally:
            self._pool.put_back(connection, num_closes)
        return response_of(reply)

    def begin(self, call: Outgoing) -> Callable[[], Message]:
        """Send a call, and return the function that waits for its response, which raises what `send` does.

        Until then the call has a connection to itself, which is closed if nobody asks for the response.

        Raises:
            UnavailableError: the call could not be sent.
        """
        connection, num_closes = self._pool.take(call)
        # A connection that is opened only now may be to another process than the one that answered last.
        self._begun = ref(connection) if connection.is_open else None
        try:
            connection.begin(call)
        except BaseException as error:
            self._pool.put_back(connection, num_closes)
            if isinstance(error, OSError):
                raise self._failed(error, call) from error
            raise

        def response() -> Message:
            try:
                reply = connection.finish(call)
            except OSError as error:
                raise self._failed(error, call) from error
            finally:
                self._pool.put_back(connection, num_closes)
            return response_of(reply)

        return response

    def attach(self, call: Outgoing) -> Attached:
        """Send an attach over a fresh connection, which later calls also use; all earlier connections are closed."""
        self._pool.close()
        fds: list[int] = []
        connection, num_closes = self._pool.take(call)
        try:
            reply, fds = connection.attach(call)
            response = response_of(reply)
        except OSError as error:
            raise self._failed(error, call) from error
        except BaseException:
            close_all(fds)
            connection.close()
            raise
        finally:
            self._pool.put_back(connection, num_closes)
        assert isinstance(response, pb.AttachResponse)
        return Attached(response, fds)

    def stream(self, call: Outgoing, idle_seconds: float | None) -> Iterator[Message]:
        """Yield the answers to a watch or a trace, over its own connection, until none comes for `idle_seconds`."""
        connection = _Connection(self._path)
        try:
            yield from connection.answers(call, idle_seconds)
        except OSError as error:
            raise unreachable(self._path, error) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close the connections; a later call would open another."""
        self._pool.close()

    def undo_attach(self, call: Outgoing, attached: Attached) -> None:
        """End the worker of an attach whose caller has gone, and close everything."""
        close_all(attached.fds)
        connection = _Connection(self._path)
        connection.undo_attach(call, attached.response.token)
        connection.close()
        self.close()

    def surrender(self, call: Outgoing) -> socket.socket:
        """Hand over the connection of an attach that was just answered to the caller."""
        connection, num_closes = self._pool.take(call)
        sock = connection.surrender()
        self._pool.put_back(connection, num_closes)
        return sock

    def _failed(self, error: OSError, call: Outgoing) -> KVLeaseError:
        if isinstance(error, BlockingIOError):
            return past_deadline(call.verb)
        # If one broke, the daemon has probably ended: a retry should not try one dead connection after another.
        self._pool.close()
        return unreachable(self._path, error)


class _Connection:
    """One connection and its state between calls; it opens at its first call, and closes at any doubt."""

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_call_number",
        "_num_without_look",
        "_path",
        "_socket",
    )

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._call_number = 0
        self._num_without_look = 0

    def __del__(self) -> None:
        """Close a connection that was dropped amid a call: by an interrupt, or as nobody asked for the answer."""
        self.close()

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def has_peer(self) -> bool:
        sock = self._socket
        return sock is not None and has_peer(sock)

    def exchange(self, call: Outgoing) -> pb.Reply:
        try:
            return self._receive(self._send(call), call)
        except BaseException:
            # Whatever stopped us, even an interrupt: a late reply must not answer the next call.
            self.close()
            raise

    def begin(self, call: Outgoing) -> None:
        """Send a call; nothing else may use the connection until `finish`."""
        try:
            self._send(call)
        except BaseException:
            self.close()
            raise

    def finish(self, call: Outgoing) -> pb.Reply:
        """Receive the reply to the call that `begin` sent, which may have come long ago."""
        try:
            sock = self._socket
            assert sock is not None, "begin leaves the connection open"
            return self._receive(sock, call)
        except BaseException:
            self.close()
            raise

    def attach(self, call: Outgoing) -> tuple[pb.Reply, list[int]]:
        received = bytearray()
        try:
            frame = self._encode(call)
            self.close()
            sock = self._connect(call)
            send_attach(sock, frame)
            await_bytes(sock, call.deadline_at)
            return receive_attached(sock, received)
        except BaseException:
            token = "" if self._socket is None else late_token(self._socket, received)
            self.close()
            self.undo_attach(call, token)
            raise

    def undo_attach(self, call: Outgoing, token: str) -> None:
        """End the worker of an attach whose caller has gone; a worker that was only resumed is left alone."""
        assert isinstance(call.request, pb.AttachRequest)
        if token and not call.request.resume_token:
            until = time.monotonic() + UNDO_SECONDS
            with suppress(OSError, KVLeaseError):
                self.exchange(Outgoing("detach", pb.DetachRequest(), until, token))

    def answers(self, call: Outgoing, idle_seconds: float | None) -> Iterator[Message]:
        pending, ping = bytearray(), encode_ping(PING_NUMBER)
        sock = self._connect(call)
        send_all(sock, self._encode(call) + ping, call.deadline_at)
        silence = Silence(f"unix://{self._path}", idle_seconds, can_ask=True)
        is_heard, until = False, call.deadline_at
        while True:
            while len(pending) >= BYTES_OF_LENGTH and len(pending) >= (end := frame_bytes(pending)):
                reply = decode(pending[BYTES_OF_LENGTH:end])
                del pending[:end]
                is_heard = True
                if reply.call_number != PING_NUMBER:
                    yield response_of(reply)
                    silence.note_event()
            if is_heard:
                until = time.monotonic() + silence.wait_seconds()
            try:
                await_bytes(sock, until)
                chunk = sock.recv(_FIRST_BUFFER_BYTES)
            except BlockingIOError as error:
                if not is_heard:
                    raise past_deadline(call.verb) from error
                if silence.ends_stream:
                    return
                silence.ask()
                send_all(sock, ping, time.monotonic() + silence.wait_seconds())
            else:
                silence.note_sign()
                _more(len(chunk))
                pending += chunk

    def surrender(self) -> socket.socket:
        sock, self._socket = self._socket, None
        assert sock is not None, "surrender without a connection"
        return sock

    def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def _send(self, call: Outgoing) -> socket.socket:
        self._call_number += 1
        frame = encode(call, self._call_number)
        sock = self._socket or self._connect(call)
        call.seconds_left()  # nothing is sent after the deadline
        # A frame above the daemon's limit is refused before it is read; the reason then waits to be received.
        with suppress(BrokenPipeError, ConnectionResetError):
            send_all(sock, frame, call.deadline_at)
        return sock

    def _encode(self, call: Outgoing) -> bytes:
        self._call_number += 1
        return encode(call, self._call_number)

    def _connect(self, call: Outgoing) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = sock
        # For what waits by itself: connecting, and the descriptors of an attach.
        limit = interval(call.seconds_left())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(self._path)
        return sock

    def _receive(self, sock: socket.socket, call: Outgoing) -> pb.Reply:
        buffer = self._buffer
        if not (num_received := self._look(sock)):
            await_bytes(sock, call.deadline_at)
            num_received = sock.recv_into(buffer)
        (body_bytes,) = LENGTH.unpack_from(buffer)
        if num_received != BYTES_OF_LENGTH + body_bytes:
            num_received = self._receive_rest(sock, call, num_received)
        reply = decode(buffer[BYTES_OF_LENGTH:num_received])
        call_number = reply.call_number
        if call_number == self._call_number:
            return reply
        if call_number:
            message = f"call {self._call_number} was answered by a reply to call {call_number}"
            raise UnavailableError(message)
        self.close()  # the daemon refuses the connection, not the call
        return reply

    def _look(self, sock: socket.socket) -> int:
        """Receive some bytes of an answer that comes at once; returns 0 if none comes, or if the connection ended."""
        if self._num_without_look:
            self._num_without_look -= 1
            return 0
        buffer, clock = self._buffer, time.monotonic
        until = clock() + _LOOK_SECONDS
        while clock() < until:
            try:
                return sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        self._num_without_look = _CALLS_WITHOUT_LOOK
        return 0

    def _receive_rest(self, sock: socket.socket, call: Outgoing, num_received: int) -> int:
        """Receive the rest of a frame; returns how many bytes there are in all."""
        buffer = self._buffer
        _more(num_received)
        while num_received < BYTES_OF_LENGTH or num_received < frame_bytes(buffer):
            if num_received == len(buffer):
                buffer.extend(bytes(frame_bytes(buffer) - num_received))
            call.seconds_left()
            await_bytes(sock, call.deadline_at)
            with memoryview(buffer) as whole, whole[num_received:] as rest:
                num_received += _more(sock.recv_into(rest))
        return num_received


def _more(num_bytes: int) -> int:
    if not num_bytes:
        raise ConnectionResetError
    return num_bytes
