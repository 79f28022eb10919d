"""Own what is done about a peer that has closed its sending side: it may wait for its answers, or have left.

Over TCP the two look alike until something is written to the peer.
"""

import asyncio
import select
from collections.abc import Collection
from typing import Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_FIRST_LOOK_SECONDS: Final = 0.005
"""Seconds until the first look whether the peer has left: over loopback the kernel knows it sooner."""
_LOOK_SECONDS_MAX: Final = 1.0
"""Most seconds between two looks; each pause is twice the one before."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim answer: it may come before any answer, and means nothing to a peer that waits for one."""


class HalfClosed:
    """A peer that sends no more, until all of its requests are answered, or it has left."""

    def __init__(
        self, transport: asyncio.Transport, cycles: Collection[RequestResponseCycle]
    ) -> None:
        """Take its connection, and its requests in order."""
        self._transport = transport
        self._cycles = cycles
        self._asked: RequestResponseCycle | None = None
        """The last request for which the interim answer was sent."""
        self._seconds = _FIRST_LOOK_SECONDS
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look later whether the peer has left, and then again and again."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)
        self._seconds = min(2 * self._seconds, _LOOK_SECONDS_MAX)

    def end(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """End the connection if the peer has left; send it the interim answer, once for a request, to find out."""
        if self._transport.is_closing():
            return
        cycle = next_of(self._cycles)
        # A stream has no end to wait for.
        is_stream = cycle is not None and cycle.chunked_encoding
        if is_stream or has_left(self._transport):
            self._transport.abort()
            return
        if cycle is not None and cycle is not self._asked:
            self._asked = cycle
            # HTTP/1.0 has no interim answers: such a peer counts as waiting until its answer finds nobody.
            if not cycle.response_started and cycle.scope["http_version"] != "1.0":
                self._transport.write(_CONTINUE)
        self.watch()


def next_of(cycles: Collection[RequestResponseCycle]) -> RequestResponseCycle | None:
    """Return the complete request that is answered next; None if all are answered."""
    return next((one for one in cycles if not (one.response_complete or one.more_body)), None)


def has_left(transport: asyncio.Transport) -> bool:
    """Tell whether, as far as the kernel knows, nobody can read any more what is written to a connection."""
    poll = select.poll()
    # Hang-ups and errors are always told, whatever events are asked for.
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))
