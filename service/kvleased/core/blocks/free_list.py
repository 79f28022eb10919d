"""Own which blocks of a pool are free, and in what order they are taken."""

import numpy as np

from kvleased.core.ids import Ids


class FreeList:
    """A stack of free blocks in one array; what was freed last is taken first, and of that the first."""

    def __init__(self, ids: Ids, capacity: int) -> None:
        """Take the blocks that are free, the next to be taken first, and how many there may ever be."""
        self._ids: Ids = np.empty(capacity, np.intp)
        """The blocks are at its end, so that a batch is read and written as it stands in memory."""
        self._capacity = capacity
        self._offered: Ids | None = None
        self.count = 0
        """How many blocks are free."""
        self.set(ids)

    def __repr__(self) -> str:
        """Show how many are free."""
        return f"<FreeList {self.count} of {self._capacity}>"

    @property
    def ids(self) -> Ids:
        """The free blocks, the next to be taken first."""
        return self._ids[self._capacity - self.count :]

    def top(self, count: int) -> Ids:
        """Return the blocks to be taken next, the very next first; changes nothing."""
        begin = self._capacity - self.count
        return self._ids[begin : begin + count]

    def offer(self, ids: Ids) -> Ids:
        """Return these, which are the top in some order, so that taking this very array takes the top."""
        self._offered = ids
        return ids

    def take(self, ids: Ids) -> None:
        """Remove blocks; at once where they are what was offered last."""
        if ids is not self._offered:
            self.set(self.ids[~np.isin(self.ids, ids)])
            return
        self.count -= len(ids)
        self._offered = None

    def add(self, ids: Ids) -> None:
        """Add blocks, the first of them to be taken first."""
        self._offered = None
        end = self._capacity - self.count
        self._ids[end - len(ids) : end] = ids
        self.count += len(ids)

    def set(self, ids: Ids) -> None:
        """Have just these blocks be free, the next to be taken first."""
        self.count, self._offered = len(ids), None
        self._ids[self._capacity - len(ids) :] = ids
