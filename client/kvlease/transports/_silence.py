"""Own how long a stream may be silent: without events as long as its caller likes, without signs of life for less."""

import time
from typing import Final

from kvlease.errors import UnavailableError

PING_SECONDS: Final = 15.0
"""Seconds without a sign of life after which a stream asks for one; over REST the daemon sends signs unasked."""
SILENT_SECONDS_MAX: Final = 40.0
"""Seconds without a sign of life after which the daemon at the other end of a stream counts as hanging."""


class Silence:
    """The limits of a stream's waits, one at a time."""

    def __init__(self, address: object, idle_seconds: float | None, *, can_ask: bool) -> None:
        """Take the seconds that may pass without an event (None: for ever), and whether a stream can ask for a sign."""
        self._address = address
        self._idle_seconds = idle_seconds
        self._idle_at = 0.0
        self._can_ask = can_ask
        self._is_asked = False
        self.ends_stream = False
        """Whether the limit of the present wait is that of events, so that it ends the stream, not that of signs."""
        self.note_event()

    def note_event(self) -> None:
        """Start the events' limit anew: an event came, and the caller wants the next."""
        if self._idle_seconds is not None:
            self._idle_at = time.monotonic() + self._idle_seconds

    def note_sign(self) -> None:
        """Note a sign of life."""
        self._is_asked = False

    def wait_seconds(self) -> float:
        """Begin a wait for an event or a sign of life; return how many seconds it may take, more than 0."""
        seconds = SILENT_SECONDS_MAX
        if self._can_ask:
            seconds = SILENT_SECONDS_MAX - PING_SECONDS if self._is_asked else PING_SECONDS
        self.ends_stream = False
        if self._idle_seconds is None:
            return seconds
        left = self._idle_at - time.monotonic()
        self.ends_stream = left <= seconds
        return max(min(left, seconds), 0.001)

    def ask(self) -> None:
        """Note that a wait is over and that the stream now asks for a sign of life.

        Raises:
            UnavailableError: a sign of life was due, but none came.
        """
        if not self._can_ask or self._is_asked:
            raise hung(self._address)
        self._is_asked = True


def hung(address: object) -> UnavailableError:
    """Return the error of a stream that has had no sign of life for too long."""
    return UnavailableError(
        f"the daemon at {address} did not respond for {SILENT_SECONDS_MAX:g} seconds: it hangs, or can no longer be "
        "reached; check that it is running, and start again"
    )
