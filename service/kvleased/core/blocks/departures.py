"""Own how many blocks left each tier and why, and how long those that were evicted had been there, and had been idle.

A block knows the newest lease of when it became findable, for that costs nothing. The clock of leases, which is read at
every tick, turns it into seconds; so a residence is known to about a tick.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BOUNDS_SECONDS: Final = (1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 43200.0)
"""Upper bounds of the histograms of seconds."""

_BOUNDS: Final = np.array(BOUNDS_SECONDS)
_NUM_TIERS: Final = 3
_REASONS_SHIFT: Final = 4
_NOTES_MAX: Final = 1 << 11

Seconds = NDArray[np.float64]
Ids = NDArray[np.int64]
Codes = NDArray[np.uint8]
"""The number of a tier, shifted, and of a reason."""


class LeaseClock:
    """When leases were the newest, by what was noted now and then."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._ids: list[int] = []
        self._seconds: list[float] = []

    def __repr__(self) -> str:
        """Show how much is noted."""
        return f"<LeaseClock {len(self._ids)} notes>"

    @property
    def is_set(self) -> bool:
        """Whether anything was noted."""
        return bool(self._ids)

    def note(self, lease_id: int, now: float) -> None:
        """Note that a lease is the newest now; where it was before, nothing is new."""
        if self._ids and self._ids[-1] == lease_id:
            self._seconds[-1] = now
            return
        if len(self._ids) >= _NOTES_MAX:
            # What is long ago need not be known to the second.
            del self._ids[1:-1:2], self._seconds[1:-1:2]
        self._ids.append(lease_id)
        self._seconds.append(now)

    def seconds(self, lease_ids: Ids) -> Seconds:
        """Return when each of the leases was the newest, as far as is known; something must be noted."""
        first = self._ids[0]
        noted = np.array(self._ids) - first
        found: Seconds = np.interp(lease_ids - first, noted, self._seconds)
        return found


class Spans:
    """A histogram of seconds for each tier."""

    def __init__(self) -> None:
        """Start empty."""
        self.counts: NDArray[np.int64] = np.zeros((_NUM_TIERS, len(_BOUNDS) + 1), np.int64)
        """Not more than each bound and more than the one before; the last is of what is above all."""
        self.seconds: Seconds = np.zeros(_NUM_TIERS)
        """Their sums."""

    def add(self, tiers: NDArray[np.uint8], seconds: Seconds, times: NDArray[np.int64]) -> None:
        """Count spans of tiers, each so many times."""
        places = tiers * np.intp(self.counts.shape[1]) + _BOUNDS.searchsorted(seconds)
        np.add.at(self.counts.ravel(), places, times)
        self.seconds += np.bincount(tiers, weights=seconds * times, minlength=_NUM_TIERS)


class Departures:
    """What is counted of the blocks that leave."""

    def __init__(self) -> None:
        """Start at zero."""
        self.clock = LeaseClock()
        self.counts: NDArray[np.int64] = np.zeros((_NUM_TIERS, 1 << _REASONS_SHIFT), np.int64)
        """By the numbers of tier and reason."""
        self.residence = Spans()
        """From when a block was findable until it was evicted."""
        self.idle = Spans()
        """From when nobody held it any more until it was evicted."""

    def __repr__(self) -> str:
        """Show how many there were."""
        return f"<Departures {int(self.counts.sum())}>"

    def count(self, codes: Codes, since: Ids, when: Seconds, idle_at: Seconds) -> None:
        """Count blocks that left; `since` and `idle_at` are 0 where an earlier life of the process knew them.

        Blocks of one request leave one behind the other, and all that is known of them is the same: they count as one.
        """
        starts = _starts_of_runs(codes, since, when, idle_at)
        times = np.diff(starts, append=len(codes))
        codes, since, when, idle_at = codes[starts], since[starts], when[starts], idle_at[starts]
        np.add.at(self.counts.ravel(), codes, times)
        tiers, is_evicted = codes >> _REASONS_SHIFT, codes & (1 << _REASONS_SHIFT) - 1 == 0
        is_dated = is_evicted & (since > 0)
        if is_dated.any():
            began = self.clock.seconds(since[is_dated])
            stayed = np.maximum(when[is_dated] - began, 0.0)
            self.residence.add(tiers[is_dated], stayed, times[is_dated])
        was_idle = is_evicted & (idle_at > 0)
        self.idle.add(tiers[was_idle], when[was_idle] - idle_at[was_idle], times[was_idle])


def _starts_of_runs(*columns: NDArray[Any]) -> NDArray[np.intp]:
    """Return where a row of the columns differs from the one before it; the first one does."""
    differs = np.ones(len(columns[0]), np.bool_)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return differs.nonzero()[0]
