"""Own which slots of the disk store may be such that nothing can be written to them; what a pool does is `pool`'s.

A copy to the store that came to nothing does not say at which of its slots. Without more ado the next one would get the
same slots again, and one bad sector would turn the store off for ever. So slots that failed are taken after all others,
and the next copies are smaller, until one fails alone. Such a slot is not taken before another copy went well; if it
then fails alone once more, the disk works and the slot does not, and it is retired. Where nothing can be written, no
copy goes well, and so nothing is retired.
"""

from typing import Final

from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE

_PARTS: Final = 4
"""A copy that failed is followed by one of this part of it."""
_KEPT_BACK_MAX: Final = 8
"""Slots that others are evicted for; where more fail, it is not the slots."""
_MOST: Final = 1 << 20
"""More slots than any copy has."""


class Suspects:
    """The slots of one store that have failed."""

    def __init__(self) -> None:
        """Suspect nothing."""
        self.most = _MOST
        """Slots that the next copy may have."""
        self._num_good = 0
        self._alone: dict[int, int] = {}
        """Slots that failed with no other beside them, and how many copies had gone well by then."""

    @property
    def num_kept_back(self) -> int:
        """Free slots that are not to be taken yet."""
        kept_back = sum(number == self._num_good for number in self._alone.values())
        return kept_back if kept_back <= _KEPT_BACK_MAX else 0

    def wrote(self, slots: Ids) -> None:
        """Note that a copy to these slots went well."""
        self.most = min(_MOST, 2 * self.most)
        self._num_good += 1
        for slot in slots.tolist() if self._alone else ():
            self._alone.pop(slot, None)

    def failed(self, slots: Ids) -> Ids:
        """Note that a copy to these slots came to nothing, and return those that are to be retired."""
        self.most = max(1, len(slots) // _PARTS)
        if len(slots) > 1:
            return NOWHERE
        slot = int(slots[0])
        before, self._alone[slot] = self._alone.get(slot, self._num_good), self._num_good
        if before == self._num_good:
            return NOWHERE
        del self._alone[slot]
        return slots
