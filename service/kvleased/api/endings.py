"""Own how a connection of HTTP ends: what refuses it, and the passing over of what still comes."""

import asyncio
from collections.abc import Callable

from kvlease.errors import KVLeaseError
from kvleased.api.faults import problem, problem_headers


class Lingering:
    """A transport that passes over what still comes where it is to be closed."""

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], None]) -> None:
        """Take what it stands for, and what is done in place of closing that."""
        self._transport = transport
        self.close = linger

    def __getattr__(self, name: str) -> object:
        """Be the other one in everything else."""
        return getattr(self._transport, name)


def refusal(error: KVLeaseError, status: int | None = None) -> bytes:
    """Return the whole answer that refuses a connection, with the error's own status unless another is given."""
    status = status or error.http_status
    body = problem(error, status)
    head = b"".join(b"%b: %b\r\n" % header for header in problem_headers(error, body))
    return b"HTTP/1.1 %d Refused\r\n%bconnection: close\r\n\r\n%b" % (status, head, body)
