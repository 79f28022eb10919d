"""Own which slots of the disk store are suspected of being impossible to write; what a pool does is `pool`'s business.

A failed copy to the store does not say at which of its slots it failed. If nothing were done about it, the next copy
would get the same slots again, and one bad sector would turn the store off for ever. So slots that failed are taken
after all others, and the next copies are smaller, until a slot fails alone. That slot is not taken again before another
copy has succeeded. If it then fails alone once more, the disk works and the slot does not, so the slot is retired. If
nothing can be written at all, no copy succeeds, and so no slot is retired.
"""

from typing import Final

from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE

_PARTS: Final = 4
"""The copy after one that failed has at most as many slots as that one, divided by this."""
_KEPT_BACK_MAX: Final = 8
"""The most slots that are kept back, with others evicted in their place; if more fail, the slots are not to blame."""
_MOST: Final = 1 << 20
"""More slots than any copy has."""


class Suspects:
    """The slots of one store that have failed."""

    def __init__(self) -> None:
        """Suspect nothing."""
        self.most = _MOST
        """The most slots that the next copy may have."""
        self._num_good = 0
        self._alone: dict[int, int] = {}
        """Slots that failed alone, and how many copies had succeeded by then."""

    @property
    def num_kept_back(self) -> int:
        """Free slots that must not be taken yet."""
        kept_back = sum(number == self._num_good for number in self._alone.values())
        return kept_back if kept_back <= _KEPT_BACK_MAX else 0

    def wrote(self, slots: Ids) -> None:
        """Note that a copy to these slots succeeded."""
        self.most = min(_MOST, 2 * self.most)
        self._num_good += 1
        for slot in slots.tolist() if self._alone else ():
            self._alone.pop(slot, None)

    def failed(self, slots: Ids) -> Ids:
        """Note that a copy to these slots failed, and return the slots to retire."""
        self.most = max(1, len(slots) // _PARTS)
        if len(slots) > 1:
            return NOWHERE
        slot = int(slots[0])
        before, self._alone[slot] = self._alone.get(slot, self._num_good), self._num_good
        if before == self._num_good:
            return NOWHERE
        del self._alone[slot]
        return slots
