"""Own the marks of blocks and slots that are still to be copied to a lower tier; `cleaning` copies them.

A slot is copied to a store once in its life; otherwise, a store that pushes blocks out for lack of room would get the
same blocks for ever. Which blocks were shared is written in the records, because the store would have to be asked to
find out again. All other marks are in ordinary memory: a restart takes everything for dirty and for found often enough,
and the lower tiers tell what they have already. Blocks that the disk store had pushed out by then are copied there once
more.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.records import CacheRecords
from kvleased.core.blocks.states import State
from kvleased.core.effects import MOVER_OF, Direction, Mover
from kvleased.core.ids import Ids
from kvleased.core.shape import CacheShape, WritePolicy
from kvleased.core.tier.flights import CHORES, SOURCE_TIERS, Flight

_REST_SECONDS: Final = 1.0
"""How long a mover gets no background copies after one has failed."""
_SHARE_TRIES_MAX: Final = 8
"""How often one slot is offered to a remote store that takes other slots but not this one."""
_MOST_HITS: Final = 2**16 - 1

Marks = NDArray[np.bool_]


class Dirt:
    """The marks of one cache; all are empty if nothing is ever copied in the background."""

    def __init__(self, shape: CacheShape, records: CacheRecords) -> None:
        """Begin with all blocks clean."""
        num_blocks, num_slots = shape.num_blocks, shape.num_slots
        self.writes_through = num_slots > 0 and shape.write_policy is WritePolicy.WRITE_THROUGH
        """Whether blocks are copied down as soon as they are committed."""
        self.counts_hits = num_slots > 0 and shape.write_policy is WritePolicy.AFTER_N_HITS
        """Whether blocks are copied down once they have been found a given number of times, and not before."""
        self.stores = num_slots > 0 and shape.num_disk_slots > 0
        self.shares = num_slots > 0 and shape.uses_remote
        self.is_any = self.writes_through or self.counts_hits or self.stores or self.shares
        """Whether this cache ever copies anything in the background."""
        self.is_due = False
        """Whether there may be something to copy now."""
        offloads = self.writes_through or self.counts_hits or self.stores
        self.offload: Marks = np.zeros(num_blocks if offloads else 0, np.bool_)
        """Blocks that are to be copied to the host pool, unless they are there already."""
        self.store: Marks = np.zeros(num_slots if self.stores else 0, np.bool_)
        """Slots that are to be copied to the disk store, unless they are there already."""
        self.share: Marks = np.zeros(num_slots if self.shares else 0, np.bool_)
        """Slots that are to be copied to the remote store."""
        self.share_tried: NDArray[np.uint32] = np.zeros(len(self.share), np.uint32)
        """By slot: the number of the last try in which the remote store did not take it; 0 for none."""
        self._num_share_tries = 0
        self._share_tries: NDArray[np.uint8] = np.zeros(len(self.share), np.uint8)
        self.remote: tuple[Marks, Marks, Marks] = (
            records.device.is_remote,
            records.host.is_remote,
            records.disk.is_remote,
        )
        """Blocks, slots and disk slots whose bytes have come from the remote store, or gone there."""
        self.resting: dict[Mover, float] = {}
        """Movers that have just failed, and the time until which they get no background copies."""
        self._hits: NDArray[np.uint16] = np.zeros(num_blocks if self.counts_hits else 0, np.uint16)
        self._hits_wanted = min(max(1, shape.write_after_hits), _MOST_HITS)
        self._is_earned: Marks = np.zeros(len(self._hits), np.bool_)
        """Blocks that were found often enough, or were below before: these are written back before they leave."""

    # Blocks -----------------------------------------------------------------------------------------------------------

    def committed(self, blocks: Ids) -> None:
        """Note that blocks written by a worker were published."""
        self.is_due = True
        if self.offload.size:
            self.offload[blocks] = self.writes_through
        if self.counts_hits:
            self._hits[blocks], self._is_earned[blocks] = 0, False

    def hit(self, blocks: Ids) -> None:
        """Count that blocks were found."""
        hits = self._hits[blocks]
        hits += hits < _MOST_HITS
        self._hits[blocks] = hits
        often = blocks[hits == self._hits_wanted]
        if len(often):
            self.offload[often] = self._is_earned[often] = True
            self.is_due = True

    def are_worth_copying(self, blocks: Ids) -> Marks:
        """Tell which blocks the write policy copies down before they leave to make room."""
        if self.counts_hits:
            return self._is_earned[blocks]
        return np.ones(len(blocks), np.bool_)

    # Copies -----------------------------------------------------------------------------------------------------------

    def landed(self, flight: Flight, good: Marks, now: float) -> None:
        """Note which pairs of a copy have arrived: those that `good` marks."""
        self.is_due = True
        direction, keyed = flight.direction, good & flight.keyed
        if direction is Direction.SHARE:
            self._shared(flight.sources[good], flight.sources[~good], now)
            return
        targets = flight.targets[keyed]
        if direction is Direction.OFFLOAD and self.stores:
            self.store[targets] = True
        if direction in SOURCE_TIERS and self.offload.size:
            # What the disk store had is copied to the host pool, too, so that it is found there the next time.
            self.offload[targets] = direction is Direction.LOAD
        if direction in SOURCE_TIERS and self.counts_hits:
            self._hits[targets], self._is_earned[targets] = 0, True
        if self.shares:
            self._note_remote(direction, flight.sources[keyed[: len(flight.sources)]], targets)

    def _shared(self, sources: Ids, left: Ids, now: float) -> None:
        """Note which slots the remote store has taken; mark those that it left to be offered again a little later."""
        self.remote[1][sources], self.share[sources] = True, False
        if len(left):
            self._num_share_tries += 1
            self.share_tried[left] = self._num_share_tries
            self._share_tries[left] += 1
            self.share[left[self._share_tries[left] < _SHARE_TRIES_MAX]] = True
            self.resting[Mover.REMOTE] = now + _REST_SECONDS

    def _note_remote(self, direction: Direction, sources: Ids, targets: Ids) -> None:
        """Hand the marks of blocks that the remote store has on from a copy's sources to its targets."""
        blocks, slots, disk_slots = self.remote
        if direction is Direction.OFFLOAD:
            slots[targets] = blocks[sources]
            self.share[targets] = ~slots[targets]
            self._share_tries[targets], self.share_tried[targets] = 0, 0
        elif direction is Direction.RELOAD:
            blocks[targets] = slots[sources]
        elif direction is Direction.STORE:
            disk_slots[targets] = slots[sources]
        elif direction is Direction.LOAD:
            blocks[targets] = disk_slots[sources]
        elif direction is Direction.FETCH:
            blocks[targets] = True

    def failed(self, flight: Flight, now: float) -> None:
        """Note that a copy failed; a background copy is tried again a little later."""
        self.is_due = self.is_any
        if flight.purpose not in CHORES:
            return
        self.resting[MOVER_OF[flight.direction]] = now + _REST_SECONDS
        marks = {
            Direction.OFFLOAD: self.offload,
            Direction.STORE: self.store,
            Direction.SHARE: self.share,
        }[flight.direction]
        marks[flight.sources] = True

    def is_resting(self, mover: Mover, now: float) -> bool:
        """Tell whether a mover failed a moment ago."""
        return now < self.resting.get(mover, now)

    # Restarts and new stores ------------------------------------------------------------------------------------------

    def start_over(self, blocks: NDArray[np.uint8], slots: NDArray[np.uint8]) -> None:
        """Mark everything dirty that is READY in the given columns of states."""
        self.is_due = self.is_any
        if self.writes_through:
            self.offload[:] = blocks == State.READY
        if self.counts_hits:
            self._is_earned[:] = blocks == State.READY
        self.store_again(slots)
        if self.shares:
            self.share[:] = (slots == State.READY) & ~self.remote[1]

    def share_again(self, slots: NDArray[np.uint8]) -> None:
        """Mark all READY slots as not shared: the remote store may have come back without what it had."""
        self.is_due = self.is_any
        if self.shares:
            for marks in self.remote:
                marks[:] = False
            self.share[:] = slots == State.READY
            self._share_tries[:], self.share_tried[:] = 0, 0

    def store_again(self, slots: NDArray[np.uint8]) -> None:
        """Mark all READY slots as not stored."""
        if self.stores:
            self.store[:] = slots == State.READY
