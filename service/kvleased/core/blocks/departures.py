"""Own how many blocks left each tier and why, and how long the evicted ones had been there and had been idle.

Each block has the id of the newest lease when it became findable, which costs nothing to note. The clock of leases,
which is set at every tick, turns that id into seconds, so a residence is known to within about a tick.
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
"""The number of a tier, shifted, and that of a reason."""


class LeaseClock:
    """When each lease was the newest, estimated from what was noted now and then."""

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
        """Note that a lease is the newest now; if it was already at the last note, that note gets the new time."""
        if self._ids and self._ids[-1] == lease_id:
            self._seconds[-1] = now
            return
        if len(self._ids) >= _NOTES_MAX:
            # Old times need not be known to the second.
            del self._ids[1:-1:2], self._seconds[1:-1:2]
        self._ids.append(lease_id)
        self._seconds.append(now)

    def seconds(self, lease_ids: Ids) -> Seconds:
        """Return when each of the leases was the newest, as far as that is known; there must be a note."""
        first = self._ids[0]
        noted = np.array(self._ids) - first
        found: Seconds = np.interp(lease_ids - first, noted, self._seconds)
        return found


class Spans:
    """A histogram of seconds for each tier."""

    def __init__(self) -> None:
        """Start empty."""
        self.counts: NDArray[np.int64] = np.zeros((_NUM_TIERS, len(_BOUNDS) + 1), np.int64)
        """By tier and bound: spans up to the bound and above the one before; the last column is above all bounds."""
        self.seconds: Seconds = np.zeros(_NUM_TIERS)
        """By tier: the sum of all spans."""

    def add(self, tiers: NDArray[np.uint8], seconds: Seconds, times: NDArray[np.int64]) -> None:
        """Count each span to its tier, as many times as `times` says."""
        places = tiers * np.intp(self.counts.shape[1]) + _BOUNDS.searchsorted(seconds)
        np.add.at(self.counts.ravel(), places, times)
        self.seconds += np.bincount(tiers, weights=seconds * times, minlength=_NUM_TIERS)


class Departures:
    """Counts of the blocks that left, and how long they had stayed."""

    def __init__(self) -> None:
        """Start at zero."""
        self.clock = LeaseClock()
        self.counts: NDArray[np.int64] = np.zeros((_NUM_TIERS, 1 << _REASONS_SHIFT), np.int64)
        """By the numbers of tier and reason."""
        self.residence = Spans()
        """From when a block became findable until it was evicted."""
        self.idle = Spans()
        """From when a block's last holder let go of it until it was evicted."""

    def __repr__(self) -> str:
        """Show how many there were."""
        return f"<Departures {int(self.counts.sum())}>"

    def count(self, codes: Codes, since: Ids, when: Seconds, idle_at: Seconds) -> None:
        """Count blocks that left; `since` and `idle_at` are 0 if they are of an earlier life of the process.

        Blocks of one request leave one after another, and all that is known of them is the same, so each such run is
        looked up only once.
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
    """Return where a row of the columns differs from the row before it; the first row counts as different."""
    differs = np.ones(len(columns[0]), np.bool_)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return differs.nonzero()[0]
