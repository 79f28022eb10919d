"""A tiny server of the local socket's frames over real sockets, with answers that a test writes."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from google.protobuf.message import Message

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.memory.mapped import table_parts
from kvlease.plan import CachePlan, PlanInputs
from kvlease.spec import FullAttention
from kvlease.tables import TableLayout
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import error_to_proto
from kvleased.planning import plan


class Hang(Exception):  # noqa: N818 - an act, not an error
    """Leave a call without an answer."""


class Drop(Exception):  # noqa: N818 - the same
    """Close the connection instead of answering."""


Answer = Callable[[pb.Call], Message]


@dataclass(kw_only=True)
class FrameServer:
    """A server that answers every call by `answer`, which returns a response or raises a KVLeaseError, Hang or Drop."""

    path: Path
    answer: Answer
    epoch: int = 1
    fds: Sequence[int] = ()
    """Descriptors that are sent beside the answer to an attach."""
    hang_after: int | None = None
    """The calls, those without a request included, after which nothing is answered any more; None for never."""
    calls: list[pb.Call] = field(default_factory=list)
    received_fds: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for fd in self.received_fds:
            os.close(fd)

    def stop(self) -> None:
        """Close the socket and every connection, as happens when a daemon is killed."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_connections()
        for thread in list(self._threads):
            thread.join(5)
        self.path.unlink(missing_ok=True)

    def break_connections(self) -> None:
        """Close every connection but go on accepting."""
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def _hangs(self) -> bool:
        return self.hang_after is not None and len(self.calls) > self.hang_after

    def verbs(self) -> list[str]:
        """Return the verbs of all calls so far except heartbeats."""
        verbs = [call.WhichOneof("request") or "" for call in self.calls]
        return [verb for verb in verbs if verb != "heartbeat"]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, Drop):
            received = bytearray()
            while True:
                chunk, fds, _, _ = socket.recv_fds(connection, 2**16, 4, socket.MSG_CMSG_CLOEXEC)
                self.received_fds += fds
                if not chunk:
                    return
                received += chunk
                while len(received) >= 4:
                    end = 4 + int.from_bytes(received[:4], "little")
                    if len(received) < end:
                        break
                    call = pb.Call.FromString(bytes(received[4:end]))
                    del received[:end]
                    self.calls.append(call)
                    if call.cancels or self._hangs:
                        continue
                    with suppress(Hang):
                        self._reply(connection, call)

    def _reply(self, connection: socket.socket, call: pb.Call) -> None:
        verb = call.WhichOneof("request") or ""
        reply = pb.Reply(call_number=call.call_number, epoch=self.epoch)
        try:
            if not verb:
                raise InvalidError
            getattr(reply, verb).CopyFrom(self.answer(call))
        except KVLeaseError as error:
            reply.error.CopyFrom(error_to_proto(error))
        body = reply.SerializeToString()
        frame = len(body).to_bytes(4, "little") + body
        if verb == "attach" and self.fds and not reply.HasField("error"):
            sent = socket.send_fds(connection, [frame], list(self.fds))
            connection.sendall(frame[sent:])
        else:
            connection.sendall(frame)


def small_plan() -> CachePlan:
    """Return the plan of a cache with eight blocks and eight slots."""
    layer = FullAttention(name="layer", num_kv_heads=1, head_size=4, dtype="float32")
    inputs = PlanInputs(
        layers=(layer,),
        tokens_per_block=16,
        device_blocks=8,
        host_bytes=8 * 512,
        longest_request_tokens=64,
    )
    return plan(inputs)


class Regions:
    """The memory of a small cache, as a daemon hands it over."""

    def __init__(self, *, num_rows: int = 16) -> None:
        self.plan = small_plan()
        self.layout = TableLayout(num_rows, table_parts(self.plan.groups))
        self.fds = [_memfd(self.plan.device_bytes), _memfd(self.layout.region_bytes)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.fds:
            os.close(fd)

    def attached(self, *, epoch: int = 1, lease_ids: bytes = b"") -> pb.AttachResponse:
        """Return the answer to an attach."""
        return pb.AttachResponse(
            worker_id=7,
            token="token",
            epoch=epoch,
            tenant_key=bytes(32),
            info=pb.CacheInfo(cache="demo", status="ready", plan=self.plan.to_proto()),
            regions=[
                pb.Region(kind="device", region_bytes=self.plan.device_bytes),
                pb.Region(kind="tables", region_bytes=self.layout.region_bytes, read_only=True),
            ],
            heartbeat_seconds=3600,
            lease_seconds=30,
            lease_ids=lease_ids,
            death_proof="pidfd",
        )

    def write_row(
        self, row: int, lease_id: int, block_ids: Sequence[int], *, phase: int = 2
    ) -> None:
        """Write a row of the block table, as the daemon does."""
        table = bytearray(os.pread(self.fds[1], self.layout.region_bytes, 0))
        columns = self.layout.columns(table)
        columns["lease_id"][row], columns["phase"][row] = lease_id, phase
        columns["num_blocks"][row] = columns["num_published"][row] = len(block_ids)
        columns["block_ids"][row, : len(block_ids)] = block_ids
        columns["kernel_ids"][row, : len(block_ids)] = block_ids
        os.pwrite(self.fds[1], table, 0)


def _memfd(num_bytes: int) -> int:
    fd = os.memfd_create("kvlease-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd
