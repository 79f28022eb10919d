"""A real daemon behind its real servers, with a token for every role, and helpers that make one call of any kind."""

import asyncio
import http.client as http_client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access import tokens
from kvleased.access.callers import Caller
from kvleased.access.roles import Role
from kvleased.api.grpc.server import GrpcServer
from kvleased.api.local.listener import LocalServer
from kvleased.api.rest.server import RestServer
from kvleased.api.sockets import private_directory
from kvleased.config.settings import Settings
from kvleased.metrics import Metrics
from kvleased.verbs.picturing import Gallery
from kvleased.web import Page
from tests.unit.api.scripted import framed
from tests.unit.service.conftest import Node

REFUSED = ("UNKNOWN_WORKER", "NOT_YOURS")


class Guarded:
    """The servers, and the tokens of their callers."""

    def __init__(self, node: Node) -> None:
        metrics = Metrics()
        gallery = Gallery(node.daemon.registry, epoch=7, codes=lambda: metrics.codes, movers=dict)
        self.node = node
        self.settings = node.settings
        self.local, self.grpc = LocalServer(metrics), GrpcServer(metrics)
        self.rest = RestServer(metrics, Page(gallery))
        self.tokens = {
            role: path.read_text().strip() for role, path in node.settings.token_paths.items()
        }
        self.tokens[Role.STRANGER] = ""

    async def token(self, role: Role) -> str:
        """Return a token of a role; every worker is a new one."""
        if role is not Role.WORKER:
            return self.tokens[role]
        request = pb.AttachRequest(cache="main")
        reply = await self.node.ask("attach", request, Caller(transport="rest"))
        return str(reply.token)

    def state(self) -> list[str]:
        """Describe all that a call could change: caches, workers, leases, pins and blocks."""
        found = [repr(self.node.daemon.registry)]
        for entry in self.node.daemon.registry:
            lists = (
                entry.core.list_leases(0, 99, 0),
                entry.core.list_pins(0, 99),
                entry.core.census(),
            )
            found.append(f"{entry.status} {entry.num_workers} {lists}")
        return found

    async def over_rest(self, method: str, path: str, token: str) -> tuple[int, Any]:
        """Send a request over TCP; return the status, and the problem if there is one."""

        def send() -> tuple[int, Any]:
            connection = http_client.HTTPConnection("127.0.0.1", self.rest.http_port, timeout=20)
            headers = {"Content-Type": "application/json"}
            if token:
                headers["Authorization"] = f"Bearer {token}"
            connection.request(method, path, b"{}" if method in ("POST", "PUT") else None, headers)
            answer = connection.getresponse()
            # A stream has no end.
            problem = json.loads(answer.read()) if answer.status >= 400 else {}
            connection.close()
            return answer.status, problem

        return await asyncio.to_thread(send)

    async def over_grpc(self, method: Any, request: Message, token: str) -> tuple[str, str]:
        """Call a method over TCP; return the code and resource of a refusal by kvlease itself."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc.grpc_port}") as channel:
            path = f"/{method.containing_service.full_name}/{method.name}"
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            try:
                if method.server_streaming:
                    call = channel.unary_stream(path)(
                        request.SerializeToString(), metadata=metadata
                    )
                    await asyncio.wait({asyncio.ensure_future(call.read())}, timeout=0.2)
                    if call.done():
                        await call.read()
                    call.cancel()
                else:
                    await channel.unary_unary(path)(request.SerializeToString(), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return explained(error)
        return "OK", ""

    async def over_local(self, call: pb.Call) -> pb.Reply:
        """Send one call over a connection of its own."""
        reader, writer = await asyncio.open_unix_connection(self.settings.local_socket)
        writer.write(framed(call))
        async with asyncio.timeout(20):
            head = await reader.readexactly(4)
            reply = await reader.readexactly(int.from_bytes(head, "little"))
        writer.close()
        return pb.Reply.FromString(reply)


def explained(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Return the code and the resource of a refusal over gRPC."""
    status, info = rpc_status.from_call(error), ErrorInfo()
    assert status is not None, error
    assert status.details[0].Unpack(info)
    return info.reason, info.metadata["resource"]


def is_refused(code: str, resource: str) -> bool:
    """Tell whether a refusal is about the caller; others are about the call."""
    return code in REFUSED and resource in ("token", "role")


@asynccontextmanager
async def guarded(runtime_dir: Path, **changes: Any) -> AsyncIterator[Guarded]:
    """Serve a cache "main" on all transports."""
    settled: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "memory_bytes_max": 1 << 30}
    settings = Settings(runtime_dir=runtime_dir, **(settled | changes))
    private_directory(runtime_dir)
    node = Node(settings)
    async with node.life():
        node.daemon.guard.keyring = tokens.ensure(settings.token_paths)
        await node.register()
        found = Guarded(node)
        servers: list[Any] = [found.local, found.rest, found.grpc]
        for server in servers:
            await server.start(node.daemon, settings)
        try:
            yield found
        finally:
            for server in servers:
                await server.stop()
    node.store.close()
