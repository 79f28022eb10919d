"""Own how long the control process has shown no sign of life, as the supervisor counts it; who acts on it is another.

Time is counted in ticks of the supervisor's own. While it stood still itself, as a suspended machine or a frozen
container has both stand still, there were none: so that time counts against nobody.
"""

from math import inf
from typing import Final

BEAT_SECONDS: Final = 1.0
"""Seconds between two signs of life, and between two ticks."""
SECONDS_MIN: Final = 3.0
"""The least silence that may be too long: less would be a late beat or two."""


class Silence:
    """The ticks since the last sign of life; none are counted before the first, or where no silence is too long."""

    def __init__(self, seconds_max: float) -> None:
        """Take the seconds of silence that are too long; 0 for none."""
        self._seconds_max = seconds_max
        self._ticks = 0
        self.due = inf
        """When the next tick is due, in monotonic seconds; infinity where nothing is counted."""

    def __repr__(self) -> str:
        """Show life."""
        return f"<Silence of {self._ticks} ticks>"

    @property
    def seconds(self) -> float:
        """Seconds of silence, as far as they were counted."""
        return self._ticks * BEAT_SECONDS

    def heard(self, now: float) -> None:
        """Count from here on: there was a sign of life."""
        self._ticks = 0
        if self._seconds_max:
            self.due = now + BEAT_SECONDS

    def end(self) -> None:
        """Count no more, until there is a sign of life again."""
        self._ticks = 0
        self.due = inf

    def tick(self, now: float) -> bool:
        """Count one tick if it is due, however late; return whether it makes the silence too long."""
        if now < self.due:
            return False
        self._ticks += 1
        self.due = now + BEAT_SECONDS
        return self.seconds >= self._seconds_max
