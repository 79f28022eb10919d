"""Own how the daemon announces its addresses, or that it has none: in its log, and at a terminal as text for people."""

import errno
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from time import process_time
from typing import Final

import structlog

from kvlease._runtime import PAGE_FILE
from kvleased.config.settings import Settings

_LOG = structlog.get_logger()
_NO_SUCH_ADDRESS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
"""Errors if no interface has an address, or if a link-local one does not say which interface."""


def announce(epoch: int, addresses: Mapping[str, str], seconds: float) -> None:
    """Announce all addresses: as an event of the log, and at a terminal also as text for people."""
    _LOG.info(
        "ready",
        epoch=epoch,
        seconds=round(seconds, 3),
        cpu_seconds=round(process_time(), 3),
        **{name.lower().replace(" ", "_"): address for name, address in addresses.items()},
    )
    if sys.stdout.isatty():
        lines = "".join(f"  {name:<13} {address}\n" for name, address in addresses.items())
        sys.stdout.write(f"kvleased is ready after {seconds:.2f} s (epoch {epoch})\n{lines}")
        sys.stdout.flush()


def tell_of_no_place(error: OSError) -> None:
    """Log which address, port or socket cannot be had, and what to do."""
    advice = "stop what listens there, or choose another --http-port, --grpc-port, --probe-port or --runtime-dir"
    if error.errno in _NO_SUCH_ADDRESS:
        advice = (
            "give --tcp-host or --probe-host an address that this machine has, or 0.0.0.0 or :: for all of them; a "
            "link-local one has its interface behind it, as in fe80::1%eth0"
        )
    _LOG.error(
        "cannot_listen",
        error=error.strerror or str(error),
        address=error.filename or "",
        advice=advice,
    )


def leave_page(directory: Path, addresses: Mapping[str, str]) -> None:
    """Write the page's address to a file beside the sockets, for `kvlease ui`; without a page there is no file."""
    file = directory / PAGE_FILE
    try:
        file.unlink(missing_ok=True)
        if address := addresses.get("REST on TCP", ""):
            file.touch(0o600, exist_ok=False)
            file.write_text(f"{address}\n", encoding="utf-8")
    except OSError as error:
        # Only people who do not know the port need the file: its lack is no reason to end.
        _LOG.warning("page_address_not_left", file=str(file), reason=error.strerror)


def addresses_of(
    settings: Settings, http_port: int, grpc_port: int, probe_port: int
) -> dict[str, str]:
    """Return the address of everything that is served, by name."""
    is_plain, host = settings.tls_cert_file is None, _in_url(settings.tcp_host)
    http = f"{'http' if is_plain else 'https'}://{host}:{http_port}" if http_port else ""
    probes = f"http://{_in_url(settings.probe_host)}:{probe_port}" if probe_port else ""
    addresses = {
        "local socket": f"unix://{settings.local_socket}",
        "REST": f"http+unix://{settings.http_socket}",
        "REST on TCP": http,
        "REST docs": http and f"{http}/docs",
        "page": http and f"{http}/ui",
        "metrics": http and f"{http}/metrics",
        "TCP open at": http and _where_open(settings.tcp_host, http_port),
        "tokens": http and f"{settings.runtime_dir}/*.token",
        "gRPC": f"grpc+unix://{settings.grpc_socket}" if settings.serve_grpc else "",
        "gRPC on TCP": grpc_on_tcp(settings, grpc_port) if grpc_port else "",
        "probes": probes and f"{probes}/readyz",
    }
    return {name: address for name, address in addresses.items() if address}


def grpc_on_tcp(settings: Settings, port: int) -> str:
    """Return the address of gRPC on TCP, with this port."""
    scheme = "grpc" if settings.tls_cert_file is None else "grpcs"
    return f"{scheme}://{_in_url(settings.tcp_host)}:{port}"


def bracketed(host: str) -> str:
    """Return a host as it is written before a port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _in_url(host: str) -> str:
    """Return a host as it stands in a URL to open; for a host that stands for all addresses, that is 127.0.0.1.

    This holds for `::`, too: it includes all addresses of IPv4, and these alone where there is no IPv6.
    """
    return "127.0.0.1" if ip_address(host).is_unspecified else bracketed(host)


def _where_open(host: str, port: int) -> str:
    """Return the host and port if the host stands for all addresses, so that other machines reach it; else ""."""
    return f"{bracketed(host)}:{port}" if ip_address(host).is_unspecified else ""
