"""Own the life of the control process: take over, serve on every transport, drain, stop; never torch."""

import asyncio
import gc
import importlib
import json
import os
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from time import monotonic, process_time
from typing import TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

import structlog
import uvloop

from kvleased import logs, tokens
from kvleased.daemon import Daemon
from kvleased.keeper_link import KeeperLink
from kvleased.memory.limits import memory_limit_bytes
from kvleased.movers.link import START_SECONDS_MAX
from kvleased.presence import Presence
from kvleased.settings import PATHS, Settings, TenantSettings
from kvleased.verbs.surveys import surveys

if TYPE_CHECKING:
    from kvleased.api.health import Probes
    from kvleased.api.tls import TlsFiles
    from kvleased.metrics import Metrics
    from kvleased.renewing import Renewal
    from kvleased.web import Page

EX_OK: Final = 0
EX_CONFIG: Final = 78
_SWITCH_SECONDS: Final = 0.0005
"""Seconds after which a thread that imports or writes lets the loop go on; Python's own 5 ms would delay every call."""
_LOG = structlog.get_logger()


class Server(Protocol):
    """One transport."""

    async def start(self, daemon: Daemon, settings: Settings) -> None:
        """Begin to listen."""

    async def stop(self) -> None:
        """Stop listening and let go of every connection."""


@runtime_checkable
class Renewable(Protocol):
    """One that serves TLS."""

    def renew(self, files: "TlsFiles") -> None:
        """Take another certificate, or raise UnusableError and keep the old one."""


def main(settings_fd: int, keeper_fd: int, spawned: float) -> int:
    """Run the control process over inherited descriptors; return its exit status."""
    # A terminal sends its signals to all processes; the supervisor turns them into a SIGTERM.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_SECONDS)
    settings = read_settings(settings_fd)
    logs.configure(settings.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings, socket.socket(fileno=keeper_fd), spawned))


def read_settings(settings_fd: int) -> Settings:
    """Return the settings that were resolved and validated when the supervisor started; each life reads them anew."""
    values = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
    tenants = {
        name: TenantSettings.model_construct(**one) for name, one in values["tenants"].items()
    }
    paths = {name: Path(values[name]) for name in PATHS if values[name] is not None}
    return Settings.model_construct(**values | paths | {"tenants": tenants})


async def serve(settings: Settings, keeper_sock: socket.socket, spawned: float) -> int:
    """Serve until SIGTERM, then drain."""
    from kvleased.api.local import LocalServer  # noqa: PLC0415 -- what takes over comes first
    from kvleased.metrics import Metrics  # noqa: PLC0415

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    keeper = KeeperLink(keeper_sock)
    epoch, kept = keeper.take_over()
    metrics = Metrics()
    metrics.epoch = epoch
    daemon = Daemon(settings, keeper, epoch, metrics.copied)
    servers: list[Server] = [LocalServer(metrics)]
    renewal = _renewal(daemon, settings, keeper, servers)
    if not _trace(daemon, settings, epoch):
        return EX_CONFIG
    _watch(daemon, metrics, renewal)
    await daemon.start(kept)
    _tell_of_pins(daemon)
    _warn(settings)
    try:
        await _start(servers, daemon, metrics, stop, spawned)
    except OSError as error:
        _cannot_listen(settings, error)
        return EX_CONFIG
    # Only now: a first start that cannot listen somewhere shall end the supervisor, too.
    keeper.ready()
    gc.collect()
    gc.freeze()
    renewal.start()
    presence = _look_after_sockets(daemon, settings)
    await stop.wait()
    presence.stop()
    renewal.stop()
    await daemon.drain(settings.drain_seconds)
    for server in reversed(servers):
        await server.stop()
    await daemon.stop()
    metrics.pulse.stop()
    return EX_OK


async def _start(
    servers: "list[Server]", daemon: Daemon, metrics: "Metrics", stop: asyncio.Event, spawned: float
) -> None:
    """Start the servers, of which the local one is there; the daemon serves as soon as workers can find it.

    Raises:
        OSError: one of them cannot listen.
    """
    settings = daemon.settings
    # Workers of an earlier life come back over the local socket, while REST is still being imported.
    await servers[0].start(daemon, settings)
    rest = (await asyncio.to_thread(importlib.import_module, "kvleased.api.rest")).RestServer(
        metrics, await asyncio.to_thread(_page, daemon, metrics)
    )
    servers.append(rest)
    await rest.start(daemon, settings)
    if settings.probe_host:
        servers.append(await _start_probes(rest.probes, settings))
    if settings.serve_grpc and settings.listen_tcp and settings.grpc_port:
        _check_free(settings.tcp_host, settings.grpc_port)
    if settings.is_on_gpu:
        await _await_device(daemon, stop)
    daemon.serve()
    _announce(settings, daemon.epoch, rest.http_port, monotonic() - spawned)
    await rest.complete()
    if settings.serve_grpc:
        servers.append(await _start_grpc(daemon, settings, metrics))


def _cannot_listen(settings: Settings, error: OSError) -> None:
    """Say what is to be done where a port or a socket cannot be had."""
    _LOG.error(
        "cannot_listen",
        error=str(error),
        http_port=settings.http_port,
        grpc_port=settings.grpc_port,
        advice="stop what listens there, or choose another --http-port, --grpc-port, --probe-port or --runtime-dir",
    )


def _renewal(
    daemon: Daemon, settings: Settings, keeper: KeeperLink, servers: "list[Server]"
) -> "Renewal":
    """Read the tokens, and have what changes of them and of the certificate taken as soon as it is looked at."""
    from kvleased.api.tls import tls_files  # noqa: PLC0415 -- what takes over comes first
    from kvleased.renewing import Renewal  # noqa: PLC0415

    def take_tokens(keyring: tokens.Keyring) -> None:
        daemon.guard.keyring = keyring

    def take_certificate(files: "TlsFiles") -> None:
        for server in servers:
            if isinstance(server, Renewable):
                server.renew(files)

    tokens.ensure(settings.token_paths)
    renewal = Renewal()
    renewal.watch_tokens(settings.token_paths, take_tokens)
    renewal.watch_certificate(tls_files(settings), take_certificate)
    # Once they are watched: a change that comes meanwhile is seen at the first look.
    take_tokens(tokens.load(settings.token_paths))
    keeper.renew = lambda: renewal.look(is_told=True)
    return renewal


async def _await_device(daemon: Daemon, stop: asyncio.Event) -> None:
    """Wait until the GPU's mover is there, but no longer than one may take, nor when told to stop.

    A registration would have to wait for it, while its caller thinks that the daemon is ready.
    """
    tasks = [asyncio.ensure_future(daemon.tiers.started()), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(tasks, timeout=START_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _look_after_sockets(daemon: Daemon, settings: Settings) -> Presence:
    """Have it told when the sockets are gone from where clients look for them."""
    presence = Presence(daemon.note_unreachable)
    grpc_sockets = (settings.grpc_socket,) if settings.serve_grpc else ()
    presence.start((settings.local_socket, settings.http_socket, *grpc_sockets))
    return presence


def _watch(daemon: Daemon, metrics: "Metrics", renewal: "Renewal") -> None:
    """Have metrics look at what the daemon knows, and feel the loop's pulse."""
    metrics.watch_caches(lambda: surveys(daemon.registry))
    metrics.watch_readiness(lambda: daemon.readiness[0])
    metrics.watch_credentials(lambda: renewal.stale)
    metrics.watch_movers(lambda: daemon.tiers.figures(monotonic()))
    metrics.pulse.start()


def _warn(settings: Settings) -> None:
    """Say what the settings put at risk."""
    if settings.insecure_tcp_without_tls:
        _LOG.warning(
            "tcp_without_tls",
            address=settings.tcp_host,
            advice="whoever can read the network can read tokens; give tls_cert_file and tls_key_file",
        )
    limit_bytes = memory_limit_bytes()
    if settings.memory_bytes_max > limit_bytes:
        _LOG.warning(
            "memory_bytes_max_above_limit",
            memory_bytes_max=settings.memory_bytes_max,
            limit_bytes=limit_bytes,
            advice="pools of that size would be killed for memory; lower memory_bytes_max, so that about 1 GiB is left "
            "for the processes, or raise the limit of the container or unit",
        )


def _trace(daemon: Daemon, settings: Settings, epoch: int) -> bool:
    """Have calls traced where the settings want it; false where that cannot be."""
    if not settings.trace_endpoint and settings.trace_file is None:
        return True
    from kvleased.tracing import MissingOtelError, Tracing  # noqa: PLC0415 -- seldom wanted

    tracing = Tracing(endpoint=settings.trace_endpoint, file=settings.trace_file, epoch=epoch)
    try:
        tracing.start()
    except (MissingOtelError, OSError) as error:
        _LOG.error(
            "cannot_trace",
            error=str(error),
            advice="install kvlease[otel], or name another trace_file",
        )
        return False
    daemon.trace(tracing)
    return True


async def _start_probes(probes: "Probes", settings: Settings) -> Server:
    """Let those beyond loopback look, where the settings say so; whoever reaches the address may."""
    module = await asyncio.to_thread(importlib.import_module, "kvleased.api.probes")
    server = module.ProbeServer(probes)
    await server.start(settings.probe_host, settings.probe_port)
    _LOG.warning(
        "probes_open",
        address=f"{settings.probe_host}:{server.port}",
        advice="anyone who reaches it may read the metrics; let a network policy say who does",
    )
    return cast("Server", server)


async def _start_grpc(daemon: Daemon, settings: Settings, metrics: "Metrics") -> Server:
    """Start gRPC after "ready": it is seldom the first to be called, and costs 0.1 s to import."""
    module = await asyncio.to_thread(importlib.import_module, "kvleased.api.grpc")
    server = module.GrpcServer(metrics)
    await server.start(daemon, settings)
    addresses = {"socket": f"grpc+unix://{settings.grpc_socket}"}
    if server.grpc_port:
        scheme = "grpc" if settings.tls_cert_file is None else "grpcs"
        addresses["tcp"] = f"{scheme}://{_in_url(settings.tcp_host)}:{server.grpc_port}"
    _LOG.info("grpc_ready", **addresses)
    return cast("Server", server)


def _page(daemon: Daemon, metrics: "Metrics") -> "Page":
    """Return the page at /ui, which computes nothing until somebody looks."""
    from kvleased.verbs.picturing import Gallery  # noqa: PLC0415 -- what takes over comes first
    from kvleased.web import Page  # noqa: PLC0415

    gallery = Gallery(
        daemon.registry,
        epoch=daemon.epoch,
        codes=lambda: metrics.codes,
        movers=lambda: {
            name: asdict(figures) for name, figures in daemon.tiers.figures(monotonic()).items()
        },
    )
    return Page(gallery)


def _tell_of_pins(daemon: Daemon) -> None:
    """Say whose pins, if there were any, ended with an earlier life; none is in a record, so nobody can know."""
    if caches := [entry.name for entry in daemon.registry]:
        _LOG.info(
            "pins_not_kept",
            caches=caches,
            advice="pins do not survive a restart; if there were any, pin again what must stay",
        )


def _check_free(host: str, port: int) -> None:
    """Raise OSError where a port is taken, so that it is known before "ready" although gRPC starts after it."""
    with socket.create_server((host, port)):
        pass


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _announce(settings: Settings, epoch: int, http_port: int, seconds: float) -> None:
    """Say where everything is: once for machines, once for people."""
    scheme = "http" if settings.tls_cert_file is None else "https"
    http = f"{scheme}://{_in_url(settings.tcp_host)}:{http_port}" if http_port else ""
    addresses = {
        "local socket": f"unix://{settings.local_socket}",
        "REST": f"http+unix://{settings.http_socket}",
        "REST on TCP": http,
        "REST docs": http and f"{http}/docs",
        "page": http and f"{http}/ui",
        "metrics": http and f"{http}/metrics",
        "tokens": http and f"{settings.runtime_dir}/*.token",
        "gRPC": f"grpc+unix://{settings.grpc_socket}" if settings.serve_grpc else "",
    }
    _LOG.info(
        "ready",
        epoch=epoch,
        seconds=round(seconds, 3),
        cpu_seconds=round(process_time(), 3),
        **{
            name.lower().replace(" ", "_"): address
            for name, address in addresses.items()
            if address
        },
    )
    lines = [f"  {name:<13} {address}\n" for name, address in addresses.items() if address]
    sys.stdout.write(f"kvleased is ready after {seconds:.2f} s (epoch {epoch})\n{''.join(lines)}")
    sys.stdout.flush()
