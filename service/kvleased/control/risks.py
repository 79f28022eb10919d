"""Own the warnings at the start: settings that put something at risk on this machine, or that have no effect."""

import resource
from typing import Final

import structlog

from kvleased.api import places
from kvleased.api.grpc import connections as grpc_connections
from kvleased.config.settings import Settings
from kvleased.memory.limits import memory_limit_bytes
from kvleased.system.descriptors import ADVICE

_FDS_BESIDE: Final = 64
"""Descriptors for all but connections and workers: listeners, pools, movers, the log, files that are read."""
_TCP: Final = ("listen_tcp",)
_NEEDS: Final = {
    "disk_bytes_max": ("disk_dir",),
    "remote_ttl_seconds": ("remote_url",),
    "remote_ms_max": ("remote_url",),
    "probe_port": ("probe_host",),
    "tcp_host": _TCP,
    "http_port": _TCP,
    "grpc_port": ("listen_tcp", "serve_grpc"),
    "tls_cert_file": _TCP,
    "tls_key_file": _TCP,
    "tls_client_ca_file": _TCP,
    "insecure_tcp_without_tls": _TCP,
    "operator_token_file": _TCP,
    "joiner_token_file": _TCP,
    "reader_token_file": _TCP,
}
"""Settings that have no effect without others, and which these are."""
_LOG: Final[structlog.stdlib.BoundLogger] = structlog.get_logger()


def warn(settings: Settings) -> None:
    """Log what the settings put at risk, and which of them have no effect."""
    for name, needed in _NEEDS.items():
        value = getattr(settings, name)
        missing = [one for one in needed if not getattr(settings, one)]
        if missing and value != Settings.model_fields[name].default:
            advice = f"set {' and '.join(missing)} too"
            _LOG.warning("setting_without_effect", setting=name, value=value, advice=advice)
    if settings.insecure_tcp_without_tls and settings.listen_tcp:
        _LOG.warning(
            "tcp_without_tls",
            address=settings.tcp_host,
            advice="anyone who can read the network traffic can read tokens; set tls_cert_file and tls_key_file",
        )
    limit_bytes = memory_limit_bytes()
    if settings.memory_bytes_max > limit_bytes:
        _LOG.warning(
            "memory_bytes_max_above_limit",
            memory_bytes_max=settings.memory_bytes_max,
            limit_bytes=limit_bytes,
            advice="with pools of that size, the daemon would be killed for lack of memory; lower memory_bytes_max so "
            "that about 1 GiB is left for the processes, or raise the limit of the container or unit",
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = descriptors_needed(settings)
    if need > limit:
        _LOG.warning("descriptors_below_need", limit=limit, need=need, advice=ADVICE)


def descriptors_needed(settings: Settings) -> int:
    """Return the descriptors needed for all connections, also of strangers, and all workers that the settings allow."""
    members = strangers = 0
    for is_served, strangers_max in (
        (True, 0),
        (True, places.STRANGERS_MAX),
        (settings.listen_tcp, places.STRANGERS_MAX),
        (settings.serve_grpc, 0),
        (
            settings.serve_grpc and settings.listen_tcp,
            grpc_connections.STRANGERS_MAX + grpc_connections.UNSEEN_MAX,
        ),
    ):
        if is_served:
            members += settings.max_connections
            strangers += strangers_max
    if settings.probe_host:
        strangers += places.STRANGERS_MAX
    return members + strangers + settings.max_workers + _FDS_BESIDE
