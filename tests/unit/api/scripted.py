"""A daemon that answers by script, and clients of its servers over real sockets."""

import asyncio
import http.client as http_client
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.protobuf.message import Message

from kvlease.errors import KVLeaseError, NotYoursError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.access.roles import LOOK_AT_ALL, Roles
from kvleased.api.grpc.server import GrpcServer
from kvleased.api.local.listener import LocalServer
from kvleased.api.rest.server import RestServer
from kvleased.config.settings import Settings
from kvleased.metrics import Metrics
from kvleased.spans.tracing import Tracing

RESPONSES = {
    part.name: getattr(pb, part.message_type.name)
    for part in pb.Reply.DESCRIPTOR.oneofs_by_name["response"].fields
}
LAYER = {
    "name": "l",
    "kind": "full_attention",
    "num_kv_heads": 2,
    "head_size": 16,
    "dtype": "float16",
}


INPUTS = {"layers": [LAYER], "tokens_per_block": 16, "device_blocks": 8}
"""The inputs of a plan in the form of REST."""


@dataclass
class ScriptedDaemon:
    """A daemon that answers every verb with an empty response, unless the script says otherwise."""

    epoch: int = 7
    tracing: Tracing | None = None
    readiness: tuple[bool, str] = (True, "ready")
    script: dict[str, Message | KVLeaseError | Exception | asyncio.Future[Message]] = field(
        default_factory=dict
    )
    calls: list[tuple[str, Message, Caller]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    pidfd_inode: int = 0
    cancelled: list[asyncio.Future[Message]] = field(default_factory=list)
    num_settled: int = 0

    def admit(self, allowed: Roles, caller: Caller, asked: str) -> Caller:  # noqa: ARG002 -- the contract
        """Admit every caller to everything, except callers with a token to what shows all tenants."""
        if caller.token and allowed is LOOK_AT_ALL:
            raise NotYoursError
        return caller

    def check_still(self, caller: Caller) -> None:
        """Let every call go on."""

    def knows(self, token: str, /) -> bool:
        """Know every token."""
        return bool(token)

    def call(
        self, verb: str, request: Message, caller: Caller
    ) -> Message | asyncio.Future[Message]:
        """Record the call and answer by the script."""
        self.calls.append((verb, request, caller))
        if caller.pidfd is not None:
            self.pidfd_inode = os.fstat(caller.pidfd).st_ino
        answer = self.script.get(verb)
        if isinstance(answer, Exception):
            raise answer
        return RESPONSES[verb]() if answer is None else answer

    def answer(
        self, verb: str, request: Message, caller: Caller
    ) -> Message | asyncio.Future[Message]:
        """Record the call and answer by the script, too."""
        return self.call(verb, request, caller)

    def settle(self) -> None:
        """Count the settle; there is nothing else to do."""
        self.num_settled += 1

    def cancel(self, future: asyncio.Future[Message]) -> None:
        """Record that a call is forgotten."""
        self.cancelled.append(future)
        future.cancel()

    def fds(self, worker_id: int) -> list[int]:
        """Return the scripted descriptors."""
        assert worker_id
        return self.descriptors

    async def stream(self, verb: str, request: Message, caller: Caller) -> AsyncIterator[Message]:
        """Yield the scripted events, then wait for ever."""
        self.calls.append((verb, request, caller))
        for event in self.events:
            if isinstance(event, KVLeaseError):
                raise event
            if not isinstance(request, pb.WatchRequest) or event.sequence > request.after_sequence:
                yield event
        await asyncio.Event().wait()


@dataclass
class Served:
    """A scripted daemon behind its servers."""

    daemon: ScriptedDaemon
    settings: Settings
    local: LocalServer
    rest: RestServer
    grpc: GrpcServer
    metrics: Metrics
    lines: list["Line"] = field(default_factory=list)

    async def line(self) -> "Line":
        """Open a connection to the local socket."""
        self.lines.append(await Line.to(self))
        return self.lines[-1]


class Line:
    """One connection to the local socket, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep both ends."""
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, served: Served) -> "Line":
        """Connect to the socket."""
        return cls(*await asyncio.open_unix_connection(served.settings.local_socket))

    def send(self, *calls: pb.Call | bytes) -> None:
        """Send calls, or raw bytes, in one write."""
        self.writer.write(
            b"".join(call if isinstance(call, bytes) else framed(call) for call in calls)
        )

    async def receive(self) -> pb.Reply:
        """Receive one reply."""
        head = await self.reader.readexactly(4)
        return pb.Reply.FromString(await self.reader.readexactly(int.from_bytes(head, "little")))

    async def ask(self, call: pb.Call) -> pb.Reply:
        """Send a call and receive its reply."""
        self.send(call)
        return await self.receive()


def framed(call: pb.Call) -> bytes:
    """Return a call's frame."""
    packed = call.SerializeToString()
    return len(packed).to_bytes(4, "little") + packed


class HttpAnswer(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)


async def http(
    served: Served,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
    over_tcp: bool = False,
) -> HttpAnswer:
    """Send one request; a body that is not bytes is sent as JSON."""

    def send() -> HttpAnswer:
        port = served.rest.http_port
        connection = http_client.HTTPConnection("127.0.0.1", port, timeout=10)
        if not over_tcp:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(10)
            connection.sock.connect(str(served.settings.http_socket))
        packed = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, None if body is None else packed, sent)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        result = HttpAnswer(answer.status, found, answer.read())
        connection.close()
        return result

    return await asyncio.to_thread(send)
