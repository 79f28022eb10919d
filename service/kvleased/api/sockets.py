"""Own the making of listening sockets: Unix sockets of mode 0600 in a directory of mode 0700, and loopback TCP."""

import errno
import ipaddress
import os
import select
import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

from kvleased.access.roles import Role

BACKLOG: Final = 512
"""Connections that the kernel keeps until they are accepted."""

_ALL_OF_V4: Final = "0.0.0.0"  # noqa: S104 - only where `::` was asked for
_ALL_OF_V6: Final = "::"
_NO_V6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors of a kernel on which IPv6 is disabled."""
_UCRED: Final = struct.Struct("3i")


class Peer(NamedTuple):
    """The process at the other end of a Unix socket."""

    pid: int = 0
    """Its process id; 0 if it is in another PID namespace."""
    uid: int = -1


def listen_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket that only this user can connect to; replace a socket that was left behind."""
    private_directory(path.parent)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The file gets the mode of the unbound socket, so it never has another one.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise named(error, str(path)) from error
    return listener


def remove_unix(listener: socket.socket) -> None:
    """Remove the file of a listening Unix socket, which the caller closes, so that nobody takes it for a daemon."""
    Path(listener.getsockname()).unlink(missing_ok=True)


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket for the API; the settings allow no address beyond loopback without TLS unasked."""
    return listen_beyond(host, port)


def listen_beyond(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket on any address; raises an OSError that names the address.

    `::` includes all addresses of IPv4, whatever the machine's default is, and stands for these alone without IPv6.
    """
    try:
        return _listen(host, port)
    except OSError as error:
        if host == _ALL_OF_V6 and error.errno in _NO_V6:
            return listen_beyond(_ALL_OF_V4, port)
        raise named(error, address_of(host, port)) from error


def _listen(host: str, port: int) -> socket.socket:
    is_v6 = ipaddress.ip_address(host).version == 6  # noqa: PLR2004 - IP's own number
    listener = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == _ALL_OF_V6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def named(error: OSError, address: str) -> OSError:
    """Return the same error of a listener, with the address as its file name."""
    return OSError(error.errno, error.strerror, address)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    return ipaddress.ip_address(host).is_loopback


def names_loopback(host: str) -> bool:
    """Tell whether a Host header means this machine: a web page may have a name lead to loopback, but no address."""
    name = host if host.endswith("]") or ":" not in host else host.rpartition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return is_loopback(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False


def private_directory(path: Path) -> None:
    """Make a directory that only this user can enter, or accept one that belongs to this user or root.

    Raises:
        PermissionError: the directory belongs to another user, who could replace our socket by another one.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = path.stat().st_uid
    if owner not in {0, os.geteuid()}:
        raise PermissionError(
            f"{path} belongs to user {owner}; name a directory that the daemon's user owns"
        )


def address_of(host: str, port: int) -> str:
    """Return a host and a port joined as in URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that connected to a Unix socket; an unknown one for other sockets."""
    if sock.family != socket.AF_UNIX:
        return Peer()
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid=pid, uid=uid)


def role_of(peer: Peer) -> Role:
    """Return the role of a peer without a token: this user and root are operators, as they rule the process anyway."""
    return Role.OPERATOR if peer.uid in {0, os.geteuid()} else Role.STRANGER


def has_unread(sock: socket.socket) -> bool:
    """Tell whether bytes have arrived that were not read yet, or the connection has ended."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))
