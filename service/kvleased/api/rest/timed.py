"""Own the timers of a connection of HTTP: one for what is still to come, and one for an answer that is not read.

Also tell the places when the connection is idle, which is while uvicorn's own timer of idle connections runs.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvleased.api.places import Guest, Places


class TimedProtocol(HttpToolsProtocol):
    """HTTP over a connection that ends when a peer takes too long."""

    head_seconds_max = 10.0
    body_seconds_max = 10.0
    idle_seconds_max = 75.0
    places: Places
    """The places of all connections; a connection gives its place back when it is lost."""

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Have `pause_writing` called for every byte that the peer does not take; TLS itself ends what is not read."""
        super().connection_made(transport)
        if self.scheme == "http":
            # Otherwise a peer could leave less unread than a full buffer has, and a closing connection would never end.
            transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """Give a peer that does not read some time to do so."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.idle_seconds_max, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on writing."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
            super().resume_writing()
            self._note_rest()

    def on_response_complete(self) -> None:
        """Begin to be idle, unless another request waits."""
        super().on_response_complete()
        self._note_rest()

    def _unset_keepalive_if_required(self) -> None:
        """Be idle no more: something has come, or the connection ends."""
        super()._unset_keepalive_if_required()
        self.places.rouse(cast(Guest, self))  # as GuardedProtocol is

    def _note_rest(self) -> None:
        """Tell the places if nothing is left to answer, and nothing of an answer is left to send."""
        if self.timeout_keep_alive_task is not None and self._unread is None:
            self.places.rest(cast(Guest, self))

    def _arm(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
