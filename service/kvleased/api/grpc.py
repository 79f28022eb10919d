"""Own the gRPC server: KVLeaseService, health and reflection, on a Unix socket and on loopback TCP.

grpc is imported when the server starts, never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from kvlease.errors import InvalidError, KVLeaseError, TooLargeError, UnknownWorkerError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api import faults
from kvleased.api.messages import M, parse
from kvleased.api.sockets import private_directory
from kvleased.api.tls import role_of_name, tls_files
from kvleased.callers import Caller
from kvleased.roles import Role, of_verb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc
    from google.protobuf.message import Message

    from kvleased.api.seam import Backend, Limits, Observer
    from kvleased.api.tls import TlsFiles

SERVICE: Final = pb.DESCRIPTOR.services_by_name["KVLeaseService"]
STOP_SECONDS: Final = 1.0
"""Seconds that calls in progress have left when the server stops."""
HEALTH_SECONDS: Final = 0.5
"""Seconds between two looks at whether the daemon is ready."""

_SLACK_BYTES: Final = 1 << 20
"""Bytes above the limit up to which a message is read, so that its refusal can say what the limit is."""
_KEEPALIVE_MS: Final = 30_000
_MS_PER_SECOND: Final = 1000
_HEAD_BYTES_MAX: Final = 16 << 10
"""Bytes of the metadata of a call."""


class GrpcServer:
    """gRPC, from `start` to `stop`."""

    def __init__(self, metrics: Observer) -> None:
        """Remember who counts."""
        self._metrics = metrics
        self._server: grpc.aio.Server | None = None
        self._health: asyncio.Task[None] | None = None
        self._renewed: grpc.ServerCertificateConfiguration | None = None
        self.grpc_port = 0
        """The TCP port; 0 where there is none."""

    async def start(self, daemon: Backend, settings: Limits) -> None:
        """Begin to listen at `grpc.sock` in the runtime directory and, where wanted, on TCP."""
        import grpc  # noqa: PLC0415 - costs 0.1 s that the other transports need not wait for
        from grpc_health.v1 import health, health_pb2_grpc  # noqa: PLC0415
        from grpc_reflection.v1alpha import reflection  # noqa: PLC0415

        server = grpc.aio.server(
            options=_options(settings), maximum_concurrent_rpcs=settings.max_connections
        )
        verbs = Verbs(daemon, self._metrics, settings.max_message_bytes)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE.full_name, verbs.handlers()),)
        )
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        reflection.enable_server_reflection(
            (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        path = settings.runtime_dir / "grpc.sock"
        private_directory(path.parent)
        path.unlink(missing_ok=True)
        _bind(server, f"unix:{path}")
        # Until here the directory's mode alone kept others out.
        path.chmod(0o600)
        if settings.listen_tcp:
            host = f"[{settings.tcp_host}]" if ":" in settings.tcp_host else settings.tcp_host
            address = f"{host}:{settings.grpc_port}"
            files = tls_files(settings)
            self.grpc_port = _bind(server, address, None if files is None else self._dynamic(files))
        await server.start()
        self._server = server
        self._health = asyncio.create_task(_tell_health(servicer, daemon))

    def renew(self, files: TlsFiles) -> None:
        """Take the certificate that the files have now, for connections to come; they were tried before."""
        self._renewed = _configuration(files)

    def _dynamic(self, files: TlsFiles) -> grpc.ServerCredentials:
        """Return what gRPC needs for TLS: it asks before each handshake whether there is another certificate."""
        import grpc  # noqa: PLC0415 - see start

        return grpc.dynamic_ssl_server_credentials(
            _configuration(files),
            self._take_renewed,  # type: ignore[arg-type]  # its stubs forget that None means no change
            files.client_ca_file is not None,
        )

    def _take_renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return another certificate once; on a thread of gRPC's own."""
        renewed, self._renewed = self._renewed, None
        return renewed

    async def stop(self) -> None:
        """Stop listening, and let calls in progress finish for a moment."""
        if self._health is not None:
            self._health.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_SECONDS)


def _options(settings: Limits) -> tuple[tuple[str, int], ...]:
    """Return what a connection and a call may cost."""
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes + _SLACK_BYTES),
        ("grpc.max_metadata_size", _HEAD_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", _HEAD_BYTES_MAX),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_concurrent_streams", settings.max_calls_in_flight),
        ("grpc.max_connection_idle_ms", int(settings.idle_seconds_max * _MS_PER_SECOND)),
        ("grpc.server_handshake_timeout_ms", int(settings.head_seconds_max * _MS_PER_SECOND)),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 3),
    )


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Return a certificate as gRPC wants it; the files were tried when REST began to serve with them."""
    import grpc  # noqa: PLC0415 - see start

    authority = None if files.client_ca_file is None else files.client_ca_file.read_bytes()
    pair = (files.key_file.read_bytes(), files.cert_file.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)


def _bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Listen; where that cannot be, say so as the other servers do."""
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: {error}") from error


class Verbs:
    """The handlers of all methods, each built from its name."""

    def __init__(self, daemon: Backend, metrics: Observer, message_bytes_max: int) -> None:
        """Remember whom to call and how large a message may be."""
        self._daemon = daemon
        self._observe = metrics.observe
        self._message_bytes_max = message_bytes_max

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        """Return the handler of every method, by its name; messages stay bytes, so that refusals are ours."""
        import grpc  # noqa: PLC0415 - see start

        found: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
        for method in SERVICE.methods:
            if method.server_streaming:
                kind = getattr(pb, method.input_type.name)
                answers = self._stream(verb_of(method.name), kind)
                found[method.name] = grpc.unary_stream_rpc_method_handler(answers)
            else:
                kind = getattr(pb, method.input_type.name)
                answer = self._unary(verb_of(method.name), kind)
                found[method.name] = grpc.unary_unary_rpc_method_handler(answer)
        return found

    def _unary(self, verb: str, kind: type[Message]) -> Callable[[bytes, Any], Awaitable[bytes]]:
        roles = of_verb(verb)

        async def answer(packed: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            started = perf_counter()
            try:
                caller = self._daemon.admit(roles, _caller(context))
                request = self._parse(kind, packed)
            except KVLeaseError as error:
                result: Message | KVLeaseError = error
            else:
                asked = faults.ask(self._daemon.call, verb, request, caller)
                result = (
                    await self._wait(verb, asked) if isinstance(asked, asyncio.Future) else asked
                )
            self._observe(verb, "grpc", faults.code_of(result), perf_counter() - started)
            if isinstance(result, KVLeaseError):
                await _abort(context, result)
                return b""  # never reached: an abort raises
            return result.SerializeToString()

        return answer

    def _stream(
        self, verb: str, kind: type[Message]
    ) -> Callable[[bytes, Any], AsyncIterator[bytes]]:
        roles = of_verb(verb)

        async def answers(
            packed: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            try:
                caller = self._daemon.admit(roles, _caller(context))
                request = self._parse(kind, packed)
            except KVLeaseError as error:
                await _abort(context, error)
                return
            async for answer in faults.stream(self._daemon, verb, request, caller):
                if isinstance(answer, KVLeaseError):
                    await _abort(context, answer)
                    return
                yield answer.SerializeToString()

        return answers

    def _parse(self, kind: type[M], packed: bytes) -> M:
        limit = self._message_bytes_max
        if len(packed) > limit:
            raise TooLargeError(resource="message_bytes", need=len(packed), limit=limit)
        return parse(kind, packed)

    async def _wait(self, verb: str, future: asyncio.Future[Message]) -> Message | KVLeaseError:
        """Wait for the daemon; when the caller goes away meanwhile, have it forget the call."""
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            self._daemon.cancel(future)
            raise
        return faults.outcome(verb, future)


def verb_of(method_name: str) -> str:
    """Return the verb of a method: its name in snake case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method_name).lower()


def _caller(context: grpc.aio.ServicerContext[bytes, bytes]) -> Caller:
    fields: dict[str, Any] = {"transport": "grpc", "role": _role(context)}
    for name, value in context.invocation_metadata() or ():
        text = value if isinstance(value, str) else value.decode("latin-1")
        if name == "authorization":
            fields["token"] = _token(text)
        elif name == "idempotency-key":
            fields["idempotency_key"] = text
        elif name == "kvlease-cache":
            fields["cache"] = text
        elif name == "traceparent":
            fields["traceparent"] = text
        elif name == "kvlease-epoch":
            fields["epoch"] = _epoch(text)
    return Caller(**fields)


def _role(context: grpc.aio.ServicerContext[bytes, bytes]) -> Role:
    """Return what a caller is without a token.

    gRPC does not tell who is at the other end of a Unix socket; the modes of the socket and its directory have let in
    nobody but this user and root.
    """
    if context.peer().startswith("unix:"):
        return Role.OPERATOR
    names = tuple(context.auth_context().get("x509_common_name", ()))
    return role_of_name(names[0].decode("utf-8", "replace")) if names else Role.STRANGER


def _token(header: str) -> str:
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnknownWorkerError("the metadata authorization must read: Bearer, a space, the token")
    return token.strip()


def _epoch(written: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,16}", written):
        raise InvalidError(
            f"kvlease-epoch must be an integer, not {written[:40]!r}", resource="kvlease-epoch"
        )
    return int(written)


async def _abort(context: grpc.aio.ServicerContext[bytes, bytes], error: KVLeaseError) -> None:
    from grpc_status import rpc_status  # noqa: PLC0415 - see start

    await context.abort_with_status(rpc_status.to_status(faults.grpc_status(error)))


async def _tell_health(servicer: Any, daemon: Backend) -> None:
    from grpc_health.v1 import health_pb2  # noqa: PLC0415 - see start

    kinds = health_pb2.HealthCheckResponse
    told: bool | None = None
    while True:
        is_ready, _ = daemon.readiness
        if is_ready != told:
            told = is_ready
            status = kinds.SERVING if is_ready else kinds.NOT_SERVING
            for service in ("", SERVICE.full_name):
                await servicer.set(service, status)
        await asyncio.sleep(HEALTH_SECONDS)
