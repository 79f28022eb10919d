"""Own the local socket: accepting, and the first frame of a connection, with which descriptors may come and go.

Later frames are `connection`'s business. Streams of asyncio hide descriptors, so the first frame is read, and an attach
is answered, on the bare socket.
"""

import array
import asyncio
import os
import socket
from time import perf_counter
from typing import Final

from google.protobuf.message import Message

from kvlease.errors import InvalidError, KVLeaseError, TooLargeError
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.framing import BYTES_OF_LENGTH
from kvleased.access.callers import Caller
from kvleased.access.roles import of_verb
from kvleased.access.strangers import Seldom
from kvleased.api import faults
from kvleased.api.local.connection import (
    LocalConnection,
    error_frame,
    frame_of,
)
from kvleased.api.messages import parse
from kvleased.api.places import no_place_of_member
from kvleased.api.seam import Backend, Limits, Observer
from kvleased.api.sockets import listen_unix, peer_of, remove_unix, role_of
from kvleased.api.turns import Line, Turns
from kvleased.system.descriptors import ADVICE

FDS_MAX: Final = 4
"""Most descriptors that may come with a first frame; only the first, a pidfd, is used."""
_FDS_SPACE_BYTES: Final = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)
RECEIVE_BYTES: Final = 1 << 16
SECONDS_SILENT: Final = 1.0
"""Seconds of silence after which a connection gives way to a new one if there are too many, or no descriptors left.

A client opens another connection when it needs one.
"""
SECONDS_WITHOUT_FDS: Final = 0.1
"""Seconds to pause accepting when this process is out of descriptors."""


class LocalServer:
    """The local socket, from `start` to `stop`."""

    def __init__(self, metrics: Observer) -> None:
        """Take the object that counts calls."""
        self.metrics = metrics
        self.connections: set[LocalConnection | _Opening] = set()
        self._unheard: dict[_Opening, None] = {}
        """The connections that have not sent a complete frame, the oldest first."""
        self._lacking = Seldom("descriptors_lacking")
        self.num_turned_away = 0
        """Connections that found no place, or gave theirs to a new one, so far."""
        self._turned_away = Seldom("connections_turned_away")
        self.turns = Turns()
        self.streams_line = Line()
        self.daemon: Backend
        self.settings: Limits
        self._listener: socket.socket | None = None

    def __repr__(self) -> str:
        """Show life: the connections."""
        return f"<LocalServer {len(self.connections)} connections>"

    async def start(self, daemon: Backend, settings: Limits) -> None:
        """Begin to listen at `kvlease.sock` in the runtime directory."""
        self.daemon, self.settings = daemon, settings
        self._listener = listen_unix(settings.runtime_dir / "kvlease.sock")
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def stop(self) -> None:
        """Stop listening, and close every connection once its output is sent."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        remove_unix(self._listener)
        self._listener.close()
        self._listener = None
        for connection in list(self.connections):
            connection.close()
        # Lets the transports run their last callbacks.
        await asyncio.sleep(0)

    def forget(self, connection: "LocalConnection | _Opening") -> None:
        """Take note that a connection is closed, or has become another kind of one."""
        self.connections.discard(connection)

    def hear(self, opening: "_Opening") -> None:
        """Take note that a connection has sent a complete frame, or never will."""
        self._unheard.pop(opening, None)

    def _accept(self) -> None:
        assert self._listener is not None, "accepting without a listener"
        # One connection a turn: each takes as long as a call of a worker.
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # Out of descriptors: a silent connection gives up its own, as when there are too many connections.
            self._lacking.tell(listener="local", advice=ADVICE)
            self._make_room()
            self._pause()
            return
        sock.setblocking(False)
        if not self._has_room(sock):
            self._turn_away(sock)
        else:
            opening = _Opening(self, sock)
            self.connections.add(opening)
            self._unheard[opening] = None

    def _has_room(self, newcomer: socket.socket) -> bool:
        """Tell whether there is room for one more connection; at the limit, close another one for it."""
        limit = self.settings.max_connections
        if len(self.connections) < limit:
            return True
        peer = peer_of(newcomer)
        self.num_turned_away += 1
        self._turned_away.tell(
            who="member", limit=limit, listener="local", peer_pid=peer.pid, peer_uid=peer.uid
        )
        return self._make_room()

    def _make_room(self) -> bool:
        """Close the oldest connection that has sent no frame yet, or else an idle one that was silent longest.

        A connection without a complete frame is no worker's, however new it is. In a flood of these, the oldest gives
        way to each new one, and one that sends its frame at once is served before its turn to go comes.
        """
        unheard = next((one for one in self._unheard if not one.has_unread), None)
        if unheard is not None:
            unheard.give_way()
            return True
        idle = (one for one in self.connections if one.is_idle)
        longest = min(idle, key=lambda one: one.heard_at, default=None)
        if longest is None or longest.heard_at >= perf_counter() - SECONDS_SILENT:
            return False
        self.connections.discard(longest)
        longest.close()
        return True

    def _pause(self) -> None:
        # Out of descriptors, the listener stays readable, so the loop would spin until one is free.
        assert self._listener is not None, "pausing without a listener"
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(SECONDS_WITHOUT_FDS, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def refusal(self) -> bytes:
        """Return the frame that tells a connection that there is no room for it."""
        error = no_place_of_member(self.settings.max_connections)
        return error_frame(0, self.daemon.epoch, error)

    def _turn_away(self, sock: socket.socket) -> None:
        try:
            sock.send(self.refusal())
        except OSError:
            pass  # it learns the same from the closed connection
        finally:
            sock.close()


class _Opening:
    """A connection until its first frame is answered or handed over."""

    def __init__(self, server: LocalServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._fds: list[int] = []
        self._deadline = self._loop.call_later(server.settings.head_seconds_max, self.close)
        self.is_idle = True
        self.heard_at = perf_counter()
        """Seconds at which it was accepted; `is_idle` and `heard_at` are named as in `LocalConnection`."""
        self._task: asyncio.Task[None] | None = None
        self._loop.add_reader(sock.fileno(), self._readable)

    def close(self) -> None:
        """Close the connection and the received descriptors."""
        if self._sock.fileno() >= 0:
            self._stop_reading()
            self._sock.close()
        self._close_fds()
        self._server.forget(self)

    @property
    def has_unread(self) -> bool:
        """Whether bytes have arrived that were not read yet, which may complete the frame."""
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def give_way(self) -> None:
        """Tell the peer that there is no room any more, and end."""
        self._finish(self._server.refusal())

    def _readable(self) -> None:
        try:
            # Not socket.recv_fds, which ignores its flags: child processes must not inherit received descriptors.
            data, ancillary, flags, _ = self._sock.recvmsg(
                RECEIVE_BYTES, _FDS_SPACE_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        self._fds += _fds_in(ancillary)
        self._received += data
        if not data or flags & socket.MSG_CTRUNC or len(self._fds) > FDS_MAX:
            self.close()
            return
        self._take()

    def _take(self) -> None:
        """Serve the first frame once it is whole."""
        if len(self._received) < BYTES_OF_LENGTH:
            return
        body_bytes = int.from_bytes(self._received[:BYTES_OF_LENGTH], "little")
        limit = self._server.settings.max_message_bytes
        if body_bytes > limit:
            error = TooLargeError.of_message(body_bytes, limit)
            self._finish(error_frame(0, self._server.daemon.epoch, error))
            return
        end = BYTES_OF_LENGTH + body_bytes
        if len(self._received) < end:
            return
        self._stop_reading()
        try:
            call = parse(pb.Call, bytes(self._received[BYTES_OF_LENGTH:end]))
        except InvalidError:
            call = pb.Call()  # the connection answers it, like any later frame
        if call.WhichOneof("request") == "attach":
            del self._received[:end]
            self._attach(call)
        else:
            self._hand_over(b"", "")

    def _attach(self, call: pb.Call) -> None:
        started = self._loop.time()
        peer = peer_of(self._sock)
        caller = Caller(
            transport="local",
            token=call.token,
            epoch=call.epoch,
            idempotency_key=call.idempotency_key,
            cache=call.cache,
            pidfd=self._fds[0] if self._fds else None,
            peer_pid=peer.pid,
            peer_uid=peer.uid,
            role=role_of(peer),
        )
        try:
            caller = self._server.daemon.admit(of_verb("attach"), caller, "attach")
        except KVLeaseError as error:
            self._attached(call, error, started)
            return
        answer = faults.ask(self._server.daemon.call, "attach", call.attach, caller)
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(
                lambda done: self._attached(call, faults.outcome("attach", done), started)
            )
        else:
            self._attached(call, answer, started)

    def _attached(self, call: pb.Call, answer: Message | KVLeaseError, started: float) -> None:
        self._server.metrics.observe(
            "attach", "local", faults.code_of(answer), self._loop.time() - started
        )
        self._close_fds()
        if self._sock.fileno() < 0:
            return
        frame = frame_of(call.call_number, self._server.daemon.epoch, "attach", answer)
        fds: list[int] = []
        token = ""
        if isinstance(answer, pb.AttachResponse):
            fds, token = self._server.daemon.fds(answer.worker_id), answer.token
        try:
            # Nothing was sent before, so there is room at least for the first byte, which carries the descriptors.
            num_sent = socket.send_fds(self._sock, [frame], fds) if fds else 0
        except OSError:
            self.close()
            if token and not call.attach.resume_token:
                self._undo_attach(token)
            return
        self._hand_over(frame[num_sent:], token)

    def _undo_attach(self, token: str) -> None:
        """End a worker whose process did not wait for the answer: it does not know the worker, so it cannot end it."""
        caller = Caller(transport="local", token=token)
        faults.ask(self._server.daemon.call, "detach", pb.DetachRequest(), caller)

    def _hand_over(self, unsent: bytes, token: str) -> None:
        """Let an asyncio protocol go on with the connection, bound to the worker that attached."""
        self._close_fds()  # only an attach has a use for any
        peer = peer_of(self._sock)
        connection = LocalConnection(self._server, self._sock, peer, token)
        self._server.forget(self)
        self._server.connections.add(connection)
        self._task = self._loop.create_task(self._switch(connection, unsent))

    async def _switch(self, connection: LocalConnection, unsent: bytes) -> None:
        transport, _ = await self._loop.connect_accepted_socket(lambda: connection, self._sock)
        if unsent:
            transport.write(unsent)
        if self._received:
            connection.data_received(bytes(self._received))

    def _finish(self, frame: bytes) -> None:
        try:
            self._sock.send(frame)
        except OSError:
            pass  # it learns the same from the closed connection
        finally:
            self.close()

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._deadline.cancel()
        self.is_idle = False
        self._server.hear(self)

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _fds_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a packet, even if some of them did not fit."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
