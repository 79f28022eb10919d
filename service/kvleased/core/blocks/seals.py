"""Own the seal of an entry: 64 bits over everything that a restart must believe, which reveal a half-written entry.

A seal reveals damage and unfinished writes, not malice: whoever can write the records can write seals.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.records import TierRecords
from kvleased.core.ids import Ids

_ODD: Final = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
        0x589965CC75374CC3,
    ],
    np.uint64,
)
_ODD_OF_LAYOUT: Final = 0x1D8E4E27C47D124F
_MASK: Final = 2**64 - 1
_SHIFT: Final = np.array(29, np.uint64)
_ONE: Final = np.array(1, np.uint64)
"""These are arrays because shifting and marking columns with them takes two thirds of the time of plain numbers."""
_ENTRIES_AT_ONCE: Final = 1024
"""Entries whose columns stay in the nearest cache while they are mixed."""


class Seals:
    """The seals that the entries of one tier ought to carry."""

    def __init__(self, records: TierRecords, layout_digest: int) -> None:
        """Look at the columns of a tier; `layout_digest` says how its bytes are laid out."""
        words: NDArray[np.uint64] = records.key.view(np.uint64)
        self._columns = (
            *words.T,
            records.generation,
            records.tenant,
            records.checksum,
            records.position,
        )
        self._of_layout = np.array(layout_digest * _ODD_OF_LAYOUT & _MASK, np.uint64)

    def of(self, ids: Ids) -> NDArray[np.uint64]:
        """Return the seals of the entries `ids`, as their columns are now."""
        if len(ids) > _ENTRIES_AT_ONCE:
            starts = range(0, len(ids), _ENTRIES_AT_ONCE)
            parts = (ids[start : start + _ENTRIES_AT_ONCE] for start in starts)
            return np.concatenate([self.of(part) for part in parts])
        mixed = np.empty((len(self._columns), len(ids)), np.uint64)
        for at, column in enumerate(self._columns):
            mixed[at] = column[ids]
        mixed ^= mixed >> _SHIFT
        # One product of a row and the columns gives the sum of the eight products in a third of the time.
        total: NDArray[np.uint64] = _ODD.dot(mixed)
        total += self._of_layout
        # Zero is what an unused entry carries.
        total |= _ONE
        return total
