"""Own which blocks of a pool are free, and in what order they are taken."""

import numpy as np

from kvleased.core.ids import Ids


class FreeList:
    """A stack of free blocks in one array: the batch freed last is taken first, and in it the first block."""

    def __init__(self, ids: Ids, capacity: int) -> None:
        """Start with the free blocks `ids`, the next to be taken first; `capacity` is the most there can ever be."""
        self._ids: Ids = np.empty(capacity, np.intp)
        """The blocks are at its end, so that a batch is read and written in the order in which it lies in memory."""
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
        """Return `ids`, which are the top blocks in some order; taking this very array takes the top at once."""
        self._offered = ids
        return ids

    def take(self, ids: Ids) -> None:
        """Remove blocks; this is quickest if they are the array that was offered last."""
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
        """Make just these blocks free, the next to be taken first."""
        self.count, self._offered = len(ids), None
        self._ids[self._capacity - len(ids) :] = ids
