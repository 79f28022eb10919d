"""Own when a remote store is tried and when it is left alone; what a trial is, its user knows."""

from dataclasses import dataclass
from typing import Final

FAILURES_MAX: Final = 3
"""Failures in a row that open the breaker."""
OPEN_SECONDS_FIRST: Final = 0.5
OPEN_SECONDS_MAX: Final = 30.0
"""Seconds that a store which keeps failing is left alone before it is tried again."""


@dataclass(slots=True, kw_only=True)
class Breaker:
    """Count what fails, and say whether to go on; every method is told the time.

    Closed it lets everything through. Some failures in a row open it, or a grave one. Open it lets
    nothing through but one trial, when its pause is over: that closes it, or makes the next pause twice as long. The
    pauses start anew when a call after the trial has succeeded, too.
    """

    failures_max: int = FAILURES_MAX
    open_seconds_first: float = OPEN_SECONDS_FIRST
    open_seconds_max: float = OPEN_SECONDS_MAX
    num_failures: int = 0
    """In a row, while closed."""
    _trial_at: float | None = None
    """When the pause ends; None while closed."""
    _num_pauses: int = 0
    """In a row, without two successes between them."""

    def __repr__(self) -> str:
        """Show life."""
        state = f"closed, {self.num_failures} failures" if self.is_closed else "open"
        return f"<Breaker {state}>"

    @property
    def is_closed(self) -> bool:
        """Whether everything is let through."""
        return self._trial_at is None

    def seconds_to_trial(self, now: float) -> float:
        """Return how long it stays open before a trial; 0 where one is due, or where it is closed."""
        return 0.0 if self._trial_at is None else max(0.0, self._trial_at - now)

    def succeed(self) -> None:
        """Take note of a call, or of a trial, that went well."""
        if self._trial_at is None:
            self._num_pauses = 0
        self._trial_at = None
        self.num_failures = 0

    def fail(self, now: float, *, is_grave: bool) -> None:
        """Take note of a call, or of a trial, that failed; a grave one opens at once."""
        self.num_failures += 1
        if self._trial_at is None and not is_grave and self.num_failures < self.failures_max:
            return
        # The exponent is bounded, so that no float overflows after years without a store.
        pause = self.open_seconds_first * 2.0 ** min(self._num_pauses, 32)
        self._trial_at = now + min(self.open_seconds_max, pause)
        self._num_pauses += 1
