"""Own the supervisor's count of the seconds without a sign of life of the control process; it does not act on them.

Time is counted in ticks of the supervisor. While the supervisor stands still itself, such as in a suspended machine or
a frozen container, there are no ticks, so that this time does not count.
"""

from math import inf
from typing import Final

BEAT_SECONDS: Final = 1.0
"""Seconds between two signs of life, and between two ticks."""
SECONDS_MIN: Final = 3.0
"""The least silence that may be set as too long: less would be only a late beat or two."""


class Silence:
    """The ticks since the last sign of life; none are counted before the first sign, or if there is no limit."""

    def __init__(self, seconds_max: float) -> None:
        """Take the seconds of silence that are too long; 0 for no limit."""
        self._seconds_max = seconds_max
        self._ticks = 0
        self.due = inf
        """When the next tick is due, in monotonic seconds; infinity while nothing is counted."""

    def __repr__(self) -> str:
        """Show life."""
        return f"<Silence of {self._ticks} ticks>"

    @property
    def seconds(self) -> float:
        """Seconds of silence, as far as they were counted."""
        return self._ticks * BEAT_SECONDS

    def heard(self, now: float) -> None:
        """Take a sign of life: count anew from here on."""
        self._ticks = 0
        if self._seconds_max:
            self.due = now + BEAT_SECONDS

    def end(self) -> None:
        """Stop counting until there is a sign of life again."""
        self._ticks = 0
        self.due = inf

    def tick(self, now: float) -> bool:
        """Count one tick if it is due, however late; return whether it makes the silence too long."""
        if now < self.due:
            return False
        self._ticks += 1
        self.due = now + BEAT_SECONDS
        return self.seconds >= self._seconds_max
