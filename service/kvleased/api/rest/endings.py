"""Own the end of a connection of HTTP: the answers that refuse it, and the passing over of what still comes."""

import asyncio
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any, Final

import httptools

from kvlease.errors import InvalidError, KVLeaseError, TooLargeError
from kvleased.api.faults import problem, problem_headers
from kvleased.api.places import Places, no_place_of_member, no_place_of_stranger

HEAD_BYTES_MAX: Final = 64 << 10
"""Most bytes of a request's head."""
PASSED_OVER_BYTES_MAX: Final = 1 << 20
"""Most bytes of a refused head that are thrown away, so that its sender gets to see the refusal."""
BODY_PASSED_OVER_BYTES_MAX: Final = 32 << 20
"""Most bytes of a refused body that are thrown away; none of them is kept."""

_REASONS: Final = {"Pause on PRI/Upgrade": "it begins HTTP/2"}
"""Clearer words for messages of the parser."""


class Lingering:
    """A transport that passes over what still comes when it is told to close."""

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], None]) -> None:
        """Take the transport that it wraps, and the function that is called instead of `close`."""
        self._transport = transport
        self.close = linger

    def __getattr__(self, name: str) -> object:
        """Return everything else from the wrapped transport."""
        return getattr(self._transport, name)


def told_of(extensions: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of a log line about a peer, from the extensions of its connection."""
    if "address" in extensions:
        return {"peer": extensions["address"]}
    if "peercred" in extensions:
        return {"peer_pid": extensions["peercred"].pid, "peer_uid": extensions["peercred"].uid}
    return {}


def refusal(error: KVLeaseError, status: int | None = None) -> bytes:
    """Return the whole answer that refuses a connection, with the error's own status unless one is given."""
    status = status or error.http_status
    body = problem(error, status)
    head = b"".join(b"%b: %b\r\n" % header for header in problem_headers(error, body))
    return b"HTTP/1.1 %d Refused\r\n%bconnection: close\r\n\r\n%b" % (status, head, body)


# These answers are the same each time, so each is made once: a flood is answered with little else.


@cache
def no_place(limit: int) -> bytes:
    """Return the whole answer to a member for whom there is no place."""
    return refusal(no_place_of_member(limit))


def gave_way(places: Places, *, is_member: bool) -> bytes:
    """Return the whole answer to a member or a stranger that gives way to another."""
    return no_place(places.members_max) if is_member else _gave_way(places.strangers_max)


@cache
def _gave_way(limit: int) -> bytes:
    return refusal(no_place_of_stranger(limit))


@cache
def head_too_large() -> bytes:
    """Return the whole answer to a head above the limit."""
    message = f"the request's head has more than {HEAD_BYTES_MAX} bytes; send a shorter path, or fewer headers"
    error = TooLargeError(message, resource="head_bytes", limit=HEAD_BYTES_MAX)
    return refusal(error, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)


def no_http(error: BaseException | None) -> bytes:
    """Return the whole answer to bytes that are no HTTP/1.1, from the error that the parser ended with."""
    if isinstance(error, httptools.HttpParserCallbackError):
        if isinstance(error.__context__, InvalidError):
            return _no_http(error.__context__.message)
        # The callbacks parse nothing but the address.
        return _no_http("its address cannot be parsed")
    # The parser has only a few messages, and none repeats what the peer sent.
    return _no_http(_REASONS.get(str(error), str(error)))


@cache
def _no_http(reason: str) -> bytes:
    message = (
        f"this is not an HTTP/1.1 request ({reason}); send one over another connection: this one is being closed. gRPC "
        "and, where it is set up, TLS have separate listeners"
    )
    return refusal(InvalidError(message, resource="request"), HTTPStatus.BAD_REQUEST)
