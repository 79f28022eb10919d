"""Own how many values go to a remote store in one call, so that a packet ends within its time budget."""

from dataclasses import dataclass
from typing import Final

from kvlease.geometry import floor_div
from kvleased.movers.remote.store import CALL_BYTES_MAX

_BYTES_FIRST: Final = 1 << 20
"""Bytes of the first call, before any rate is known."""
_CALLS_A_BUDGET: Final = 8
"""A call should take an eighth of the budget, so that urgent packets can go between two calls."""


@dataclass(slots=True)
class Pace:
    """The rate at which values travelled most recently."""

    seconds_max: float
    """The time budget of a packet."""
    bytes_a_second: float = 0.0
    """0 until a value has travelled."""

    def count(self, value_bytes: int, seconds_left: float, *, is_first: bool) -> int:
        """Return how many values to send or fetch in the next call; 0 if not even one fits into the time left.

        The first call of a packet is always made, so that a store that was slow once does not count as slow for ever.
        """
        if seconds_left <= 0:
            return 0
        wanted = self.bytes_a_second * self.seconds_max / _CALLS_A_BUDGET or _BYTES_FIRST
        count = max(1, floor_div(int(min(wanted, CALL_BYTES_MAX)), value_bytes))
        if is_first or not self.bytes_a_second:
            return count
        # Plan for half of the time left, because nothing travels at the same rate all the time.
        return min(count, floor_div(int(self.bytes_a_second * seconds_left / 2), value_bytes))

    def travelled(self, num_bytes: int, seconds: float) -> None:
        """Note the rate of a call; a call that moved nothing does not count."""
        if num_bytes:
            self.bytes_a_second = num_bytes / max(seconds, 1e-6)
