"""Own which blocks of a pool are free, and in what order they are taken."""

import numpy as np

from kvleased.core.ids import Ids


class FreeList:
    """A stack of free blocks in one array; what was freed last is taken first."""

    def __init__(self, ids: Ids, capacity: int) -> None:
        """Take the blocks that are free, the next to be taken last, and how many there may ever be."""
        self._ids: Ids = np.empty(capacity, np.intp)
        self._offered: Ids | None = None
        self.count = 0
        """How many blocks are free."""
        self.set(ids)

    def __repr__(self) -> str:
        """Show how many are free."""
        return f"<FreeList {self.count} of {len(self._ids)}>"

    @property
    def ids(self) -> Ids:
        """The free blocks, the next to be taken last."""
        return self._ids[: self.count]

    def top(self, count: int) -> Ids:
        """Return the blocks to be taken next, the very next last; changes nothing."""
        return self._ids[self.count - count : self.count]

    def offer(self, ids: Ids) -> Ids:
        """Return these, which are the top in some order, so that taking this very array takes the top."""
        self._offered = ids
        return ids

    def take(self, ids: Ids) -> None:
        """Remove blocks; at once where they are what was offered last."""
        if ids is not self._offered:
            kept = self.ids[~np.isin(self.ids, ids)]
            self._ids[: len(kept)] = kept
        self.count -= len(ids)
        self._offered = None

    def add(self, ids: Ids) -> None:
        """Add blocks, the last of them to be taken first."""
        self._offered = None
        self._ids[self.count : self.count + len(ids)] = ids
        self.count += len(ids)

    def set(self, ids: Ids) -> None:
        """Have just these blocks be free, the next to be taken last."""
        self.count, self._offered = len(ids), None
        self._ids[: len(ids)] = ids
