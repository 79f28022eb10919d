"""Own the services of gRPC beside kvlease's own: the standard health service, and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from kvlease.errors import KVLeaseError
from kvleased.access.roles import OF_SERVICE
from kvleased.api.grpc.calls import Call, Calls, Context, Handlers, abort
from kvleased.api.messages import parse
from kvleased.api.seam import Backend

HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA: Final = "grpc.reflection.v1alpha.ServerReflection"
"""Reflection by its first name, which older tools call; the messages are the same, byte for byte."""
_ALPHA: Final = "v1alpha"
_STABLE: Final = "v1"
HEALTH_SECONDS: Final = 0.5
"""Seconds between two checks whether the daemon is ready."""

Answers: TypeAlias = "Callable[[Call, Context], Awaitable[bytes | None]]"


class Health:
    """The health service: it tells readiness, for the whole server and for kvlease's own service."""

    def __init__(self, daemon: Backend, service: str) -> None:
        """Take the daemon, and the name of kvlease's service."""
        self._daemon = daemon
        self._names = ("", service)
        self._is_ready = False
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handlers(self, calls: Calls) -> Handlers:
        """Return the handlers for the calls of one listener."""
        return {
            "Check": grpc.stream_unary_rpc_method_handler(_entered(HEALTH, calls, self._check)),
            "Watch": grpc.stream_stream_rpc_method_handler(_entered(HEALTH, calls, self._watch)),
        }

    async def follow(self) -> None:
        """Look again and again, without end."""
        while True:
            is_ready, _ = self._daemon.readiness
            if is_ready != self._is_ready:
                self._is_ready = is_ready
                self._change.set_result(None)
                self._change = asyncio.get_running_loop().create_future()
            await asyncio.sleep(HEALTH_SECONDS)

    def _status_of(self, service: str) -> Any:
        if service not in self._names:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._is_ready else HealthCheckResponse.NOT_SERVING

    async def _check(self, call: Call, context: Context) -> bytes:
        status = self._status_of(parse(HealthCheckRequest, await call.read()).service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, call: Call, context: Context) -> None:  # noqa: ARG002 - as _check
        service = parse(HealthCheckRequest, await call.read()).service
        told = None
        while True:
            status, change = self._status_of(service), self._change
            if status != told:
                await call.write(HealthCheckResponse(status=status).SerializeToString())
                told = status
            await call.until(change)


def reflection_handlers(name: str, calls: Calls, services: Collection[str]) -> Handlers:
    """Return the handlers of reflection, under one of its names, for the calls of one listener."""
    _describe_reflection()
    # The type stubs of grpc take an async generator for a coroutine.
    servicer: Any = reflection.aio.ReflectionServicer(services)

    async def tell(call: Call, context: Context) -> None:
        async for answer in servicer.ServerReflectionInfo(_asked(call), context):
            await call.write(answer.SerializeToString())

    return {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(_entered(name, calls, tell))
    }


def _describe_reflection() -> None:
    """Make reflection describe itself by its stable name, too, if grpcio only knows the v1alpha name."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(REFLECTION)
    except KeyError:
        file = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.ClearField("options")
        written = text_format.MessageToString(file)
        for name in (file.package, file.name.rpartition("/")[0]):
            written = written.replace(name, name.replace(_ALPHA, _STABLE))
        pool.AddSerializedFile(
            text_format.Parse(written, FileDescriptorProto()).SerializeToString()
        )


async def _asked(call: Call) -> AsyncIterator[ServerReflectionRequest]:
    while (packed := await call.read_next()) is not None:
        yield parse(ServerReflectionRequest, packed)


def _entered(
    service: str, calls: Calls, answer: Answers
) -> Callable[[object, Context], Awaitable[bytes | None]]:
    """Return a handler that answers callers which may call a service and find a place."""
    roles = OF_SERVICE[service]

    async def handle(_: object, context: Context) -> bytes | None:
        try:
            return await answer(calls.enter(service, roles, context), context)
        except KVLeaseError as error:
            await abort(context, error)

    return handle
