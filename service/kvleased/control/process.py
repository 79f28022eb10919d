"""Own the life of the control process: take over, serve on every transport, drain, stop; torch is never imported."""

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
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

import structlog
import uvloop

from kvleased.access import tokens
from kvleased.config.settings import PATHS, Settings
from kvleased.config.tenant_settings import TenantSettings
from kvleased.control import risks
from kvleased.control.announcing import (
    addresses_of,
    announce,
    bracketed,
    grpc_on_tcp,
    leave_page,
    tell_of_no_place,
)
from kvleased.control.presence import Presence
from kvleased.daemon import Daemon
from kvleased.movers.batches import Moved
from kvleased.movers.link import START_SECONDS_MAX
from kvleased.supervision.keeper_link import HandoverError, KeeperLink
from kvleased.system.descriptors import ADVICE
from kvleased.system.directories import UnusableError
from kvleased.system.heap import keep_freed_memory
from kvleased.telemetry import logs
from kvleased.verbs.surveys import surveys

if TYPE_CHECKING:
    from kvleased.api.local.listener import LocalServer
    from kvleased.api.rest.health import Probes
    from kvleased.api.rest.server import RestServer
    from kvleased.credentials.renewing import Renewal
    from kvleased.credentials.tls import TlsFiles
    from kvleased.metrics import Metrics
    from kvleased.supervision.keeper import Kept
    from kvleased.web import Page

_SWITCH_SECONDS: Final = 0.0005
"""Seconds for which another thread may keep the event loop waiting; Python's default of 5 ms would delay every call."""
_GC_THRESHOLDS: Final = (2_000, 0, 48)
"""Thresholds of the garbage collector: it looks at 2,000 new objects, for 1 ms, and after 2,000 more at both lots.

It finds nothing, because no call and no connection leaves a cycle behind. But a connection is some thirty objects:
where strangers come and go, a threshold of 400 objects makes it run 40 times a second, and this one 6 times.
"""
_LOG = structlog.get_logger()


class Server(Protocol):
    """One transport."""

    async def start(self, daemon: Daemon, settings: Settings) -> None:
        """Begin to listen."""

    async def stop(self) -> None:
        """Stop listening and let go of every connection."""


@runtime_checkable
class Renewable(Protocol):
    """A transport that serves TLS."""

    def renew(self, files: "TlsFiles") -> None:
        """Take another certificate; raise UnusableError and keep the old one if it cannot be used."""


def main(
    settings_fd: int, keeper_fd: int, spawned: float, host_fd: int | None, disk_fd: int | None
) -> int:
    """Run the control process over inherited descriptors; return its exit status."""
    # A terminal sends its signals to all processes; the supervisor turns them into a SIGTERM.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_SECONDS)
    keep_freed_memory()
    settings = read_settings(settings_fd)
    logs.configure(settings.log_level)
    keeper = KeeperLink(socket.socket(fileno=keeper_fd), host_fd, disk_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(serve(settings, keeper, spawned))
        except HandoverError as error:
            return _cannot_take_over(error)


def read_settings(settings_fd: int) -> Settings:
    """Return the settings, which were resolved and validated before the supervisor began; each life reads them anew."""
    values = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
    tenants = {
        name: TenantSettings.model_construct(**one) for name, one in values["tenants"].items()
    }
    paths = {name: Path(values[name]) for name in PATHS if values[name] is not None}
    return Settings.model_construct(**values | paths | {"tenants": tenants})


async def serve(settings: Settings, keeper: KeeperLink, spawned: float) -> int:
    """Serve until SIGTERM, then drain; raises HandoverError if what the supervisor kept does not arrive whole."""
    from kvleased.api.local.listener import LocalServer  # noqa: PLC0415 -- what takes over comes first
    from kvleased.metrics import Metrics  # noqa: PLC0415

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    epoch, kept, notes = keeper.take_over()
    metrics = Metrics()
    metrics.epoch, metrics.control_restarts = epoch, keeper.restarts
    daemon = Daemon(settings, keeper, epoch, lambda batch: _note_moved(batch, daemon, metrics))
    local = LocalServer(metrics)
    servers: list[Server] = [local]
    try:
        _check_free(settings)
    except OSError as error:
        tell_of_no_place(error)
        return os.EX_CONFIG
    try:
        renewal, served = _renewal(daemon, metrics, keeper, servers, kept)
    except UnusableError as error:
        return _cannot_start(error)
    # If tracing cannot start, only a first control process ends; one that replaces another goes on without traces.
    if not _trace(daemon, settings, epoch) and not any(keeper.restarts.values()):
        return os.EX_CONFIG
    _watch(daemon, metrics, renewal)
    await daemon.start(kept, notes)
    # Only from here on: what was kept is read in one go, without beats. The service manager is told of beats, too.
    keeper.show_life()
    _tell_of_pins(daemon)
    risks.warn(settings)
    try:
        rest, addresses = await _start(servers, daemon, metrics, stop, served)
    except OSError as error:
        tell_of_no_place(error)
        return os.EX_CONFIG
    except UnusableError as error:
        return _cannot_start(error)
    _watch_places(daemon, metrics, local, servers)
    # Only now: if a first start cannot listen somewhere, the supervisor is to end, too.
    keeper.ready()
    # All addresses work from here on, so the daemon may be called ready before they are announced.
    daemon.serve()
    leave_page(settings.runtime_dir, addresses)
    announce(daemon.epoch, addresses, monotonic() - spawned)
    rest.note_start()
    _collect_little_at_once()
    await _attend(daemon, renewal, stop)
    await _wind_up(servers, daemon, metrics)
    return os.EX_OK


def _collect_little_at_once() -> None:
    """Have the garbage collector leave out all objects that exist now, and look at few new ones at a time."""
    gc.collect()
    gc.freeze()
    # Once more, over nothing: else the next full one waits for a quarter as many new objects, and then takes 10 ms.
    gc.collect()
    gc.set_threshold(*_GC_THRESHOLDS)


async def _attend(daemon: Daemon, renewal: "Renewal", stop: asyncio.Event) -> None:
    """Look after credentials and sockets until it is time to stop."""
    renewal.start()
    presence = _look_after_sockets(daemon, daemon.settings)
    await stop.wait()
    presence.stop()
    renewal.stop()


async def _wind_up(servers: "list[Server]", daemon: Daemon, metrics: "Metrics") -> None:
    """Drain for at most `drain_seconds`, then stop everything; servers stop in the reverse order of their start."""
    await daemon.drain(daemon.settings.drain_seconds)
    for server in reversed(servers):
        await server.stop()
    await daemon.stop()
    metrics.pulse.stop()


def _note_moved(batch: Moved, daemon: Daemon, metrics: "Metrics") -> None:
    """Count a mover's batch, and make a span of it if tracing is on."""
    seconds = batch.nanoseconds / 1e9
    metrics.copied(batch.direction, batch.num_bytes, seconds, ok=batch.is_done)
    if daemon.tracing is not None:
        daemon.tracing.moved(batch)


async def _start(
    servers: "list[Server]",
    daemon: Daemon,
    metrics: "Metrics",
    stop: asyncio.Event,
    settings: Settings,
) -> "tuple[RestServer, dict[str, str]]":
    """Start the servers, beginning with the local one, which `servers` has; return the REST server and all addresses.

    Raises:
        OSError: a server cannot listen.
    """
    # Workers of an earlier life come back over the local socket, while REST is still being imported.
    await servers[0].start(daemon, settings)
    rest: RestServer = (
        await asyncio.to_thread(importlib.import_module, "kvleased.api.rest.server")
    ).RestServer(metrics, await asyncio.to_thread(_page, daemon, metrics))
    servers.append(rest)
    await rest.start(daemon, settings)
    probe_port = 0
    if settings.probe_host:
        probes, probe_port = await _start_probes(rest.probes, settings)
        servers.append(probes)
    grpc_port = 0
    if settings.serve_grpc:
        server, grpc_port = await _start_grpc(daemon, settings, metrics)
        servers.append(server)
    if settings.is_on_gpu:
        await _await_device(daemon, stop)
    return rest, addresses_of(settings, rest.http_port, grpc_port, probe_port)


def _cannot_start(error: UnusableError) -> int:
    """Log which file is not as it must be; return the exit status."""
    _LOG.error(
        "cannot_start",
        error=str(error),
        advice="correct the file; a daemon that has already served tries again by itself",
    )
    return os.EX_CONFIG


def _cannot_take_over(error: HandoverError) -> int:
    """Log that what the supervisor keeps did not arrive; return the exit status, after which another process tries."""
    _LOG.error("cannot_take_over", error=str(error), advice=ADVICE)
    return os.EX_CONFIG


def _renewal(
    daemon: Daemon,
    metrics: "Metrics",
    keeper: KeeperLink,
    servers: "list[Server]",
    kept: "list[Kept]",
) -> "tuple[Renewal, Settings]":
    """Take the tokens and the certificate, now and whenever they change; return the renewal and the settings to use."""
    from kvleased.credentials import outliving  # noqa: PLC0415 -- what takes over comes first
    from kvleased.credentials.renewing import Renewal  # noqa: PLC0415
    from kvleased.credentials.tls import tls_files  # noqa: PLC0415

    def take_tokens(keyring: tokens.Keyring) -> None:
        daemon.guard.keyring = keyring

    def take_certificate(files: "TlsFiles") -> None:
        for server in servers:
            if isinstance(server, Renewable):
                server.renew(files)
        metrics.certificate_expires_at = files.expires_at()

    renewal = Renewal()
    copies = outliving.Copies(keeper, kept)
    served = outliving.begin(daemon.settings, copies, renewal, take_tokens, take_certificate)
    if (files_now := tls_files(served)) is not None:
        metrics.certificate_expires_at = files_now.expires_at()
    keeper.renew = lambda: renewal.look(is_told=True)
    return renewal, served


async def _await_device(daemon: Daemon, stop: asyncio.Event) -> None:
    """Wait until the GPU's mover has started, until its time to start is over, or until told to stop.

    Otherwise a registration would have to wait for the mover, although the daemon says that it is ready.
    """
    tasks = [asyncio.ensure_future(daemon.tiers.started()), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(tasks, timeout=START_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _look_after_sockets(daemon: Daemon, settings: Settings) -> Presence:
    """Have the daemon told when the sockets are gone from where clients look for them."""
    presence = Presence(daemon.note_unreachable)
    grpc_sockets = (settings.grpc_socket,) if settings.serve_grpc else ()
    presence.start((settings.local_socket, settings.http_socket, *grpc_sockets))
    return presence


def _watch(daemon: Daemon, metrics: "Metrics", renewal: "Renewal") -> None:
    """Have the metrics read what the daemon knows, and measure the delays of the event loop."""
    metrics.watch_caches(lambda: surveys(daemon.registry))
    metrics.watch_readiness(lambda: daemon.readiness[0])
    metrics.watch_credentials(lambda: renewal.stale)
    metrics.watch_memory(lambda: daemon.registry.bytes_in_use)
    metrics.watch_movers(lambda: daemon.tiers.figures(monotonic()))
    metrics.watch_mover_ends(lambda: daemon.tiers.mover_ends)
    metrics.pulse.start()


def _watch_places(
    daemon: Daemon, metrics: "Metrics", local: "LocalServer", servers: "list[Server]"
) -> None:
    """Have the metrics read the connections of each listener, and the watchers."""
    from kvleased.metrics.placing import places_of  # noqa: PLC0415 -- what takes over comes first

    metrics.watch_places(lambda: places_of(daemon, local, servers))


def _trace(daemon: Daemon, settings: Settings, epoch: int) -> bool:
    """Start tracing if the settings ask for it; return false if it cannot be started."""
    if not settings.trace_endpoint and settings.trace_file is None:
        return True
    from kvleased.spans.tracing import MissingOtelError, Tracing  # noqa: PLC0415 -- seldom wanted

    tracing = Tracing(endpoint=settings.trace_endpoint, file=settings.trace_file, epoch=epoch)
    try:
        tracing.start()
    except (MissingOtelError, OSError) as error:
        _LOG.error(
            "cannot_trace",
            error=str(error),
            advice="install kvlease[otel], or name another trace_file; a daemon that served before goes on untraced",
        )
        return False
    daemon.trace(tracing)
    daemon.registry.on_drop.append(lambda entry, _: tracing.cache_ended(entry.pool))
    return True


async def _start_probes(probes: "Probes", settings: Settings) -> tuple[Server, int]:
    """Serve probes and metrics to everybody who reaches the probe address; return the server and its port."""
    module = await asyncio.to_thread(importlib.import_module, "kvleased.api.rest.probes")
    server = module.ProbeServer(probes)
    await server.start(settings.probe_host, settings.probe_port)
    _LOG.warning(
        "probes_open",
        address=f"{bracketed(settings.probe_host)}:{server.port}",
        advice="anyone who can reach it can read the metrics; restrict access with a network policy",
    )
    return cast("Server", server), int(server.port)


async def _start_grpc(daemon: Daemon, settings: Settings, metrics: "Metrics") -> tuple[Server, int]:
    """Start gRPC, last because its import takes 0.1 s; return the server, and its TCP port or 0."""
    from kvleased.api.grpc import environment as grpc_environment  # noqa: PLC0415 -- may not be served at all

    grpc_environment.prepare()
    module = await asyncio.to_thread(importlib.import_module, "kvleased.api.grpc.server")
    server = module.GrpcServer(metrics)
    await server.start(daemon, settings)
    addresses = {"socket": f"grpc+unix://{settings.grpc_socket}"}
    if server.grpc_port:
        addresses["tcp"] = grpc_on_tcp(settings, server.grpc_port)
    _LOG.info("grpc_ready", **addresses)
    return cast("Server", server), int(server.grpc_port)


def _page(daemon: Daemon, metrics: "Metrics") -> "Page":
    """Return the page at /ui, which computes nothing until somebody opens it."""
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
    """Log in which caches pins may have ended with an earlier life; pins are not recorded, so nobody knows for sure."""
    if caches := [entry.name for entry in daemon.registry]:
        _LOG.info(
            "pins_not_kept",
            caches=caches,
            advice="pins do not survive a restart; if there were any, pin again the blocks that must stay",
        )


def _check_free(settings: Settings) -> None:
    """Raise OSError if a port is taken, before anything is brought back that would have to end again."""
    from kvleased.api.sockets import listen_beyond  # noqa: PLC0415 -- what takes over comes first

    ports = [(settings.probe_host, settings.probe_port)] if settings.probe_host else []
    if settings.listen_tcp:
        ports.append((settings.tcp_host, settings.http_port))
        if settings.serve_grpc:
            ports.append((settings.tcp_host, settings.grpc_port))
    for host, port in ports:
        if port:  # 0 stands for any free port
            listen_beyond(host, port).close()
