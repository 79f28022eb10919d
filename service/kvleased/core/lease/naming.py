"""Own which rows of the table lease ids name, and find them for a whole column of ids at once.

A row is found by the lower bits of the id of the lease that took it. If a younger lease has the same lower bits, the
older one is not found here and must be looked up by its whole id.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import LeaseId, WorkerId
from kvleased.core.ids import Ids

_PLACES_PER_ROW: Final = 4


class Named(NamedTuple):
    """What a column of ids names for a worker; valid until any row changes hands, and its arrays are never written."""

    worker_id: WorkerId
    lease_ids: bytes
    num_changes: int
    """How often rows had changed hands when the ids were looked up."""
    rows: Ids
    is_active: NDArray[np.bool_]
    """For each id, whether it was found and names an active lease of the worker."""
    are_active: bool
    """Whether every id does so."""
    are_distinct: bool
    """Whether no row is named twice."""


class RowNames:
    """The rows of active leases, by lease id."""

    def __init__(self, lease_ids: NDArray[np.int64]) -> None:
        """Begin without names; `lease_ids` is the table's column, which only `LeaseBook` writes."""
        self.worker_of: NDArray[np.int64] = np.zeros(len(lease_ids), np.int64)
        """By row: the worker of its lease if that is active and no ranks share it, else 0."""
        self._lease_ids = lease_ids
        self._last_row: NDArray[np.intp] = np.zeros(_places(len(lease_ids)), np.intp)
        """By the lower bits of a lease id: the row of the last lease with these bits."""
        self._low_bits = np.array(len(self._last_row) - 1)
        """The mask of the lower bits as an array: it masks a column in half the time that a plain number takes."""
        self._mask = len(self._last_row) - 1
        self._mark: NDArray[np.intp] = np.zeros(len(lease_ids), np.intp)
        self._num_changes = 0
        self._last = self._look_up(b"", WorkerId(0))

    def __repr__(self) -> str:
        """Show how many rows have a worker."""
        return f"<RowNames {np.count_nonzero(self.worker_of)} of {len(self.worker_of)}>"

    def name(self, lease_id: LeaseId, row: int, worker_id: int) -> None:
        """Let an id name the row that its lease has taken, and give the row to the lease's worker."""
        self._last_row[lease_id & self._mask] = row
        self.give(row, worker_id)

    def give(self, row: int, worker_id: int) -> None:
        """Write which worker a row belongs to now; every change of a name ends here, so no older look-up is reused."""
        self.worker_of[row] = worker_id
        self._num_changes += 1

    def find(self, lease_ids: bytes, worker_id: WorkerId) -> Named:
        """Return what a packed column of ids names for a worker.

        Most steps name the same ids as the step before; then the last look-up is returned again.
        """
        last = self._last
        if (
            last.num_changes != self._num_changes
            or last.worker_id != worker_id
            or last.lease_ids != lease_ids
        ):
            self._last = last = self._look_up(lease_ids, worker_id)
        return last

    def are_distinct(self, rows: Ids) -> bool:
        """Tell whether no row is named twice."""
        order = np.arange(len(rows))
        self._mark[rows] = order
        return self._mark[rows].tobytes() == order.tobytes()

    @property
    def is_sound(self) -> bool:
        """Whether the remembered look-up is what would be found now."""
        last = self._last
        if last.num_changes != self._num_changes:
            return True
        now = self._look_up(last.lease_ids, last.worker_id)
        return (last.rows.tobytes(), last.is_active.tobytes()) == (
            now.rows.tobytes(),
            now.is_active.tobytes(),
        )

    def _look_up(self, packed: bytes, worker_id: WorkerId) -> Named:
        lease_ids = np.frombuffer(packed, np.int64)
        rows = self._last_row[lease_ids & self._low_bits]
        is_active: NDArray[np.bool_] = self._lease_ids[rows] == lease_ids
        is_active &= self.worker_of[rows] == worker_id
        return Named(
            worker_id=worker_id,
            lease_ids=packed,
            num_changes=self._num_changes,
            rows=rows,
            is_active=is_active,
            # Bytes are searched faster than an array.
            are_active=b"\0" not in is_active.tobytes(),
            are_distinct=self.are_distinct(rows),
        )


def _places(num_rows: int) -> int:
    """Return a power of two that is large enough for two leases to seldom have the same lower bits."""
    return 1 << (_PLACES_PER_ROW * num_rows).bit_length()
