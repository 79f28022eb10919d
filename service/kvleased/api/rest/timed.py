"""Own the timers of a connection of HTTP: one for what is still to come, and one for an answer that is not read."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TimedProtocol(HttpToolsProtocol):
    """HTTP over a connection that ends when a peer takes too long."""

    head_seconds_max = 10.0
    body_seconds_max = 10.0
    idle_seconds_max = 75.0

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

    def _arm(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
