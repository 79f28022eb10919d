"""Own when a remote store is tried and when it is left alone; its user knows what a trial is."""

from dataclasses import dataclass
from typing import Final

FAILURES_MAX: Final = 3
"""Failures in a row that open the breaker."""
OPEN_SECONDS_FIRST: Final = 0.5
OPEN_SECONDS_MAX: Final = 30.0
"""The most seconds that a failing store is left alone before it is tried again."""


@dataclass(slots=True, kw_only=True)
class Breaker:
    """Count failures, and say whether to go on; every method that needs the time is told it.

    While it is closed, it lets every call through. Several failures in a row open it, or one grave failure. While it is
    open, it lets nothing through but one trial when its pause is over. The trial closes it, or makes the next pause
    twice as long. If a call after the trial also succeeds, the pauses start from the shortest again.
    """

    failures_max: int = FAILURES_MAX
    open_seconds_first: float = OPEN_SECONDS_FIRST
    open_seconds_max: float = OPEN_SECONDS_MAX
    num_failures: int = 0
    """Failures in a row while it is closed."""
    _trial_at: float | None = None
    """When the pause ends; None while closed."""
    _num_pauses: int = 0
    """Pauses in a row, without two successes between them."""

    def __repr__(self) -> str:
        """Show whether it is closed."""
        state = f"closed, {self.num_failures} failures" if self.is_closed else "open"
        return f"<Breaker {state}>"

    @property
    def is_closed(self) -> bool:
        """Whether every call is let through."""
        return self._trial_at is None

    def seconds_to_trial(self, now: float) -> float:
        """Return how long it stays open before a trial; 0 if one is due, or if it is closed."""
        return 0.0 if self._trial_at is None else max(0.0, self._trial_at - now)

    def succeed(self) -> None:
        """Note that a call or a trial succeeded."""
        if self._trial_at is None:
            self._num_pauses = 0
        self._trial_at = None
        self.num_failures = 0

    def fail(self, now: float, *, is_grave: bool) -> None:
        """Note that a call or a trial failed; a grave failure opens it at once."""
        self.num_failures += 1
        if self._trial_at is None and not is_grave and self.num_failures < self.failures_max:
            return
        # The exponent is bounded, so that the float does not overflow after years without a store.
        pause = self.open_seconds_first * 2.0 ** min(self._num_pauses, 32)
        self._trial_at = now + min(self.open_seconds_max, pause)
        self._num_pauses += 1
