"""Own the holds of a tier's blocks: how often each is held, and what becomes of it when its last holder lets go.

Every hold has a holder: a lease, a copy, a pin or a magazine lists the blocks that it holds, and
lets go of each exactly once. `holds` only counts the holders, to tell when the last one lets go;
`Cache.check` compares the counts with the lists.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.free_list import FreeList
from kvleased.core.blocks.history import History
from kvleased.core.blocks.owners import Owners
from kvleased.core.blocks.records import TierRecords
from kvleased.core.blocks.states import CompiledTransitions, Event, State, advance, by_state
from kvleased.core.eviction import EvictionOrder
from kvleased.core.ids import Ids

# Plain numbers, because reading a member of an enumeration costs as much as a small array operation.
_READY: Final = int(State.READY)
# Arrays of no dimensions: setting columns to them, and calculating with them, takes half the time of plain numbers.
_ONE: Final = np.array(1, np.uint64)
HOLDERS: Final = tuple(np.array(count, np.int32) for count in range(3))
"""Counts of holders, as columns of them are set fastest."""
PACKED_HOLDERS: Final = tuple(np.int32(count).tobytes() for count in range(2))
"""Counts of holders, as the bytes of one block's count."""
_WHEN_IDLE: Final = {
    int(State.RESERVED): Event.ABANDON,
    int(State.QUARANTINED): Event.PROVE,
}
"""What happens to a block that is not READY when its last holder lets go of it."""


class HeldBlocks:
    """The blocks of one tier, and how many hold each; `Pool` knows their keys and tenants, too."""

    def __init__(
        self,
        records: TierRecords,
        transitions: CompiledTransitions,
        order: EvictionOrder,
        null_blocks: int,
    ) -> None:
        """Take over columns in which every entry is FREE; the first `null_blocks` are never granted."""
        self.records = records
        self.order = order
        self.holds: NDArray[np.int32] = np.zeros(len(records.state), np.int32)
        self.copies: NDArray[np.int32] = np.zeros(len(records.state), np.int32)
        """How many of the holders are copies that read the block."""
        usable = np.arange(null_blocks, len(records.state), dtype=np.intp)
        self.free = FreeList(usable, len(usable))
        """The blocks that are nobody's."""
        self.owners: Owners | None = None
        """The tenants of the blocks in use; None while nobody needs to know them, as with one tenant at most."""
        self.history: History | None = None
        """What remembers the keys that leave; None if nothing does."""
        self.idle_at: NDArray[np.float64] = np.zeros(len(records.state), np.float64)
        """Monotonic seconds when each READY block's last holder let go; 0 if that was in an earlier life."""
        self._transitions = transitions

    def change(self, ids: Ids, event: Event) -> None:
        """Make one transition of the table for all `ids`."""
        advance(self._transitions, self.records.state, ids, event)

    def hold(self, ids: Ids) -> None:
        """Count one more holder of each block; `ids` has no duplicates."""
        num_idle = len(self.order)
        self.order.discard(ids)
        if num_idle - len(self.order) == len(ids):
            # Nobody held any: writing a number takes a third of the time of counting up.
            self.holds[ids] = HOLDERS[1]
        else:
            self.holds[ids] += 1

    def hold_to_copy(self, ids: Ids) -> None:
        """Count a copy as one more holder of each block, which policies do not take for a use; no duplicates."""
        self.order.set_aside(ids)
        self.holds[ids] += 1
        self.copies[ids] += 1

    def let_go(self, ids: Ids) -> None:
        """Count one holder less of each block, given in token order.

        Blocks that nobody holds any more become evictable (if READY) or free (if not). Those that only copies hold from
        now on get their places among the evictable ones, too, to be put back there.
        """
        left = self.holds[ids]
        # Comparing bytes takes a tenth of the time of searching arrays.
        if left.tobytes() == PACKED_HOLDERS[1] * len(ids):
            self.holds[ids] = HOLDERS[0]
            self._settle(ids)
            return
        left -= 1
        self.holds[ids] = left
        copies = self.copies[ids]
        is_idle = left == 0
        if not copies.any():
            self._settle(ids[is_idle])
            return
        is_copied = (left == copies) & ~is_idle & (self.records.state[ids] == _READY)
        self._settle(ids[is_idle | is_copied])
        self.order.set_aside(ids[is_copied])

    def let_go_of_copied(self, ids: Ids, *, is_use: bool) -> None:
        """Count one copy less that reads the blocks; those that nobody else holds are where they were in the order.

        If the copy was a use of the blocks, it lets go of them as any other holder.
        """
        self.copies[ids] -= 1
        if is_use:
            self.let_go(ids)
            return
        left = self.holds[ids] - 1
        self.holds[ids] = left
        idle = ids[left == 0]
        is_ready = self.records.state[idle] == _READY
        self.order.put_back(idle[is_ready])
        self._settle(idle[~is_ready])

    def _settle(self, idle: Ids) -> None:
        """Make blocks that nobody holds evictable or free."""
        if not len(idle):
            return
        states = self.records.state[idle]
        packed = states.tobytes()
        if packed.count(packed[0]) == len(packed):
            self._settle_alike(idle, packed[0])
            return
        for state, where in by_state(states):
            self._settle_alike(idle[where], state)

    def _settle_alike(self, idle: Ids, state: int) -> None:
        if state == _READY:
            self.order.add(idle[::-1].copy())  # because indexing with a view is slow
            if self.history is not None:
                self.idle_at[idle] = self.history.now
        elif state in _WHEN_IDLE:
            self._free_up(idle, _WHEN_IDLE[state])

    def touch(self, ids: Ids) -> None:
        """Make READY blocks that nobody uses the hottest ones, the deepest of their chains first; it is no hit."""
        copies = self.copies[ids]
        is_idle = self.holds[ids] == copies
        ids, copies = ids[is_idle], copies[is_idle]
        if not len(ids):
            return
        self.order.set_aside(ids)
        self.order.add(ids[(~self.records.position[ids]).argsort(kind="stable")])
        self.order.set_aside(ids[copies > 0])

    def end(self, ids: Ids, event: Event) -> None:
        """End a fill or scrub whose block nobody but the copy held."""
        self.holds[ids] -= 1
        assert not self.holds[ids].any(), "the block is held by more than the copy"
        self._free_up(ids, event)

    def _free_up(self, ids: Ids, event: Event) -> None:
        # The generation is written first, so that an entry that a crash leaves in between fails its seal.
        generations = self.records.generation[ids]
        generations += _ONE
        self.records.generation[ids] = generations
        self._set_free(ids, event)

    def _set_free(self, ids: Ids, event: Event) -> None:
        advance(self._transitions, self.records.state, ids, event)
        if self.owners is not None:
            self.owners.free(ids)
        self.free.add(ids)
