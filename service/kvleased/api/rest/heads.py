"""Own what is read from a head of HTTP before the app sees the request."""

from typing import Final

import httptools

from kvlease.errors import InvalidError

Headers = list[tuple[bytes, bytes]]
"""Names, in lower case, and values."""

_BYTES_BESIDE: Final = 4
"""Bytes of a header line beside name and value: the colon, the space and the end of the line."""


def head_bytes(url: bytes, headers: Headers) -> int:
    """Return the bytes of a complete head, without its method and version."""
    return len(url) + sum(len(name) + len(value) + _BYTES_BESIDE for name, value in headers)


def body_bytes(headers: Headers) -> int:
    """Return the bytes of a body by its Content-Length; 0 if it comes in chunks, or there is none."""
    return int(next((value for name, value in headers if name == b"content-length"), b"") or 0)


def token_of(headers: Headers) -> str | None:
    """Return the bearer token of a head; None if it has none, or several."""
    shown = [value for name, value in headers if name == b"authorization"]
    scheme, _, token = (shown[0] if len(shown) == 1 else b"").partition(b" ")
    return token.decode("latin-1").strip() if scheme.lower() == b"bearer" else None


def check_hosts(headers: Headers, http_version: str) -> None:
    """Refuse a head that does not have the one Host header, maybe an empty one, that RFC 9112 wants of HTTP/1.1.

    Raises:
        InvalidError: it has none, which only HTTP/1.0 may, or several.
    """
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts > 1:
        raise InvalidError(f"it has {num_hosts} Host headers, not one", resource="host")
    if not num_hosts and http_version != "1.0":
        raise InvalidError("it has no Host header", resource="host")


def name_host(url: bytes, headers: Headers) -> None:
    """Replace the Host header by the host in an absolute address, beside which the header does not count."""
    if url.startswith(b"/"):
        return
    named = httptools.parse_url(url)
    host = named.host or b""
    host = b"[%b]" % host if b":" in host else host
    if named.port is not None:
        host += b":%d" % named.port
    headers[:] = [one for one in headers if one[0] != b"host"] + [(b"host", host)]
