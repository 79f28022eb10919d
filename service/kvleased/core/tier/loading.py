"""Own the keys on their way to the device, with the block and the copy of each, so that other calls join that copy.

A block on its way already has its key in the records, but the key does not count before the block is READY.
"""

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import CopyId
from kvleased.core.blocks.index import KeyIndex
from kvleased.core.ids import Ids


class Loading:
    """The device blocks that copies in flight fill under a key."""

    def __init__(self, keys: NDArray[np.uint8]) -> None:
        """Start empty over the device's key column; take memory only when the first copy starts."""
        self._keys = keys
        self._index: KeyIndex | None = None
        self._copy_ids: NDArray[np.int64] = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Count the blocks."""
        return 0 if self._index is None else len(self._index)

    def __contains__(self, key: bytes) -> bool:
        """Tell whether a key is on its way."""
        return self._index is not None and self._index.get(key) >= 0

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Loading {len(self)} blocks>"

    @property
    def blocks(self) -> Ids:
        """All blocks that are on their way, in no order."""
        return np.empty(0, np.intp) if self._index is None else self._index.blocks()

    def add(self, blocks: Ids, copy_id: CopyId) -> None:
        """Add blocks that a copy fills; their keys must already be written."""
        if self._index is None:
            self._index = KeyIndex(self._keys)
            self._copy_ids = np.zeros(len(self._keys), np.int64)
        self._copy_ids[blocks] = copy_id
        self._index.add(blocks)

    def discard(self, blocks: Ids) -> None:
        """Forget blocks, all of which are listed."""
        assert self._index is not None, "nothing was ever on its way"
        self._index.discard(blocks)

    def find(self, keys: bytes) -> Ids:
        """Return the block of each packed key, or -1 if the key is not on its way."""
        if self._index is None:
            return np.full(len(keys) // self._keys.shape[1], -1, np.intp)
        return self._index.find(keys)

    def copy_ids(self, blocks: Ids) -> list[CopyId]:
        """Return the copy that fills each of the blocks."""
        copy_ids: list[CopyId] = self._copy_ids[blocks].tolist()
        return copy_ids
