"""Own the gRPC servers: KVLeaseService, health and reflection, on a Unix socket and on loopback TCP.

This module imports grpc, so it is imported when the server starts, never before. Each listener has a server of its own,
so that strangers on TCP cannot use up what the Unix socket needs.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import quote

import grpc

from kvlease.wire.framing import GRPC_SLACK_BYTES
from kvleased.access.roles import Role
from kvleased.api.grpc.beside import (
    HEALTH,
    REFLECTION,
    REFLECTION_ALPHA,
    Health,
    reflection_handlers,
)
from kvleased.api.grpc.calls import Calls, Context, Handlers, address_of
from kvleased.api.grpc.connections import STRANGERS_MAX, UNSEEN_MAX, Connections
from kvleased.api.grpc.verbs import SERVICE, Verbs
from kvleased.api.places import Places
from kvleased.api.seam import Backend, Limits, Observer
from kvleased.api.sockets import private_directory
from kvleased.credentials.tls import TlsFiles, role_of_name, tls_files

STOP_SECONDS: Final = 1.0
"""Seconds that calls in progress have left when the server stops."""

_KEEPALIVE_MS: Final = 30_000
_MS_PER_SECOND: Final = 1000
_HEAD_BYTES_MAX: Final = 16 << 10
"""Most bytes of the metadata of a call."""


class GrpcServer:
    """gRPC, from `start` to `stop`."""

    def __init__(self, metrics: Observer) -> None:
        """Take the object that counts calls."""
        self._metrics = metrics
        self._servers: list[grpc.aio.Server] = []
        self._followed: list[asyncio.Task[None]] = []
        self._connections: Connections | None = None
        self._renewed: grpc.ServerCertificateConfiguration | None = None
        self.grpc_port = 0
        """The TCP port; 0 if there is none."""

    @property
    def places(self) -> dict[str, Places]:
        """The places by listener: only that of TCP, if there is one."""
        return {} if self._connections is None else {"grpc_tcp": self._connections.places}

    async def start(self, daemon: Backend, settings: Limits) -> None:
        """Begin to listen at `grpc.sock` in the runtime directory and, if the settings ask for it, on TCP."""
        health = Health(daemon, SERVICE.full_name)
        local = _server(daemon, settings, settings.max_connections)
        self._serve(local, Calls(daemon, settings, _this_user), daemon, settings, health)
        path = settings.runtime_dir / "grpc.sock"
        private_directory(path.parent)
        path.unlink(missing_ok=True)
        _bind(local, f"unix:{quote(str(path))}")
        # Until here only the directory's mode has kept others out.
        path.chmod(0o600)
        servers = [local]
        if settings.listen_tcp:
            tcp = _server(daemon, settings, settings.max_connections + STRANGERS_MAX + UNSEEN_MAX)
            host = f"[{settings.tcp_host}]" if ":" in settings.tcp_host else settings.tcp_host
            address = f"{host}:{settings.grpc_port}"
            files = tls_files(settings)
            self.grpc_port = _bind(tcp, address, None if files is None else self._dynamic(files))
            self._connections = Connections(settings.max_connections, self.grpc_port)
            calls = Calls(daemon, settings, _by_name, self._connections)
            self._serve(tcp, calls, daemon, settings, health)
            servers.append(tcp)
        for server in servers:
            await server.start()
        self._servers = servers
        self._followed = [asyncio.create_task(health.follow())]
        if self._connections is not None:
            self._followed.append(asyncio.create_task(self._connections.follow()))

    def renew(self, files: TlsFiles) -> None:
        """Take the certificate that the files have now, for future connections; the files were tried before."""
        self._renewed = _configuration(files)

    def _dynamic(self, files: TlsFiles) -> grpc.ServerCredentials:
        """Return the credentials for TLS: gRPC asks before each handshake whether there is another certificate."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(files),
            self._take_renewed,  # type: ignore[arg-type]  # its stubs forget that None means no change
            files.client_ca_file is not None,
        )

    def _take_renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return another certificate once; called on a thread of gRPC."""
        renewed, self._renewed = self._renewed, None
        return renewed

    async def stop(self) -> None:
        """Stop listening, and let calls in progress finish for a moment."""
        followed, self._followed = self._followed, []
        for task in followed:
            task.cancel()
        await asyncio.gather(*followed, return_exceptions=True)
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(STOP_SECONDS) for server in servers))

    def _serve(
        self,
        server: grpc.aio.Server,
        calls: Calls,
        daemon: Backend,
        settings: Limits,
        health: Health,
    ) -> None:
        """Have a server serve all services; only `calls` limits their calls, because grpc knows no roles."""
        verbs = Verbs(daemon, self._metrics, calls, settings.max_message_bytes)
        services: dict[str, Handlers] = {
            SERVICE.full_name: verbs.handlers(),
            HEALTH: health.handlers(calls),
        }
        names = (*services, REFLECTION, REFLECTION_ALPHA)
        for name in (REFLECTION, REFLECTION_ALPHA):
            services[name] = reflection_handlers(name, calls, names)
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(name, handlers)
                for name, handlers in services.items()
            ]
        )


def _server(daemon: Backend, settings: Limits, connections_max: int) -> grpc.aio.Server:
    """Return a server that serves nothing yet."""
    options = _options(settings, connections_max)
    return grpc.aio.server(options=options, interceptors=_interceptors(daemon))


def _interceptors(daemon: Backend) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Return the interceptor that makes spans, if calls are traced."""
    if daemon.tracing is None:
        return ()
    from kvleased.api.grpc.spans import Spans  # noqa: PLC0415 -- seldom wanted

    return (Spans(daemon.tracing, SERVICE.full_name),)


def _options(settings: Limits, connections_max: int) -> tuple[tuple[str, int], ...]:
    """Return the limits of a connection and a call."""
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes + GRPC_SLACK_BYTES),
        ("grpc.max_metadata_size", _HEAD_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", _HEAD_BYTES_MAX),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_concurrent_streams", settings.max_calls_in_flight),
        ("grpc.max_connection_idle_ms", int(settings.idle_seconds_max * _MS_PER_SECOND)),
        ("grpc.server_handshake_timeout_ms", int(settings.head_seconds_max * _MS_PER_SECOND)),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 3),
        # Otherwise windows grow to hundreds of KiB, all of which is kept for calls whose message was not asked for yet.
        ("grpc.http2.bdp_probe", 0),
    )


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Return a certificate in the form of gRPC; the files were tried when REST began to serve with them."""
    authority = None if files.client_ca_file is None else files.client_ca_file.read_bytes()
    pair = (files.key_file.read_bytes(), files.cert_file.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)


def _bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Listen, and return the port; if that fails, raise OSError as the other servers do."""
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: {error}") from error


def _this_user(_: Context) -> tuple[Role, str]:
    """Return the role of callers over the Unix socket.

    gRPC does not tell who is at the other end, but the modes of the socket and its directory let in only this user and
    root.
    """
    return Role.OPERATOR, ""


def _by_name(context: Context) -> tuple[Role, str]:
    """Return the role that the certificate of a caller over TCP gives, and the caller's address."""
    names = tuple(context.auth_context().get("x509_common_name", ()))
    role = role_of_name(names[0].decode("utf-8", "replace")) if names else Role.STRANGER
    return role, address_of(context)
