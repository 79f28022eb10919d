"""Own what is done about a peer who has closed his sending side: he may wait for his answers, or have left.

Over TCP the two look alike until something is written to him; what an answer says is the app's.
"""

import asyncio
import select
from collections.abc import Collection
from typing import Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_FIRST_LOOK_SECONDS: Final = 0.005
"""Seconds after which it is first looked whether he has left: loopback tells of it in less than one of them."""
_LOOK_SECONDS_MAX: Final = 1.0
"""Seconds between two looks at most; each comes after twice the time of the one before."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What may come before any answer, and means nothing to who waits for one."""


class HalfClosed:
    """A peer who says no more, from then on until all that he asked is answered, or he has left."""

    def __init__(
        self, transport: asyncio.Transport, cycles: Collection[RequestResponseCycle]
    ) -> None:
        """Take his connection, and what he asked over it, in order."""
        self._transport = transport
        self._cycles = cycles
        self._asked: RequestResponseCycle | None = None
        """What he was written to about."""
        self._seconds = _FIRST_LOOK_SECONDS
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look after him later, and then again."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)
        self._seconds = min(2 * self._seconds, _LOOK_SECONDS_MAX)

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """End the connection of who has left, and write to whom nothing was written yet, to learn of it."""
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
            # HTTP/1.0 has no such answers: whoever speaks that is taken to wait until his answer finds nobody.
            if not cycle.response_started and cycle.scope["http_version"] != "1.0":
                self._transport.write(_CONTINUE)
        self.watch()


def next_of(cycles: Collection[RequestResponseCycle]) -> RequestResponseCycle | None:
    """Return which of the requests that came whole is answered next; None where all are."""
    return next((one for one in cycles if not (one.response_complete or one.more_body)), None)


def has_left(transport: asyncio.Transport) -> bool:
    """Tell whether nobody can read any more what is written to a connection, as far as the kernel knows."""
    poll = select.poll()
    # It tells of hang-ups and errors whatever it is asked for.
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))
