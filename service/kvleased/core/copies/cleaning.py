"""Own the background copies that bring blocks down to lower tiers before anybody needs their room.

What is copied:
- to the host pool: under write-through, blocks that were committed; under after-n-hits, blocks that were found often
  enough; otherwise nothing, because blocks are written back when they are about to leave. Under each policy, blocks
  that were loaded from the disk store, into slots that are free or that the disk store has, too;
- to the disk store and the remote store, from the host pool: under write-through, all that came to the host pool;
  otherwise the slots that will leave next, so that a part of the host pool is free or has copies below.

Blocks that a tier has are not copied there again. Nothing is copied to a disk store before all that it has is
known, because slots that seem free may not be. Each mover has one background copy at a time, which holds only a part of
a pool, so that others soon get what they need. While calls wait for room, no background copy to the host pool starts:
blocks that leave for these calls go first.
"""

from typing import Final

import numpy as np

from kvleased.core.admission.room import disk_slots, host_slots
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.effects import MOVER_OF, Mover, Tier
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.state import CacheState
from kvleased.core.tier.dirt import Marks
from kvleased.core.tier.flights import CHORES, Purpose

BLOCKS_MAX: Final = 256
"""The most blocks of one background copy."""
_LOOKED_AT: Final = 4096
"""Marks that are looked at in one go."""
_SHARE_OF_POOL: Final = 8
"""The part of a pool that is kept clean, and that background copies hold at most, is the pool divided by this."""


def clean(state: CacheState, now: float) -> bool:
    """Start the background copies that are due, as far as the movers are free for them.

    Returns whether blocks have left the disk store for others. A waiting call that would have loaded one of them may
    need fewer blocks now: a recurrent state that is found takes a block beside the one to write to.
    """
    dirt = state.dirt
    dirt.is_due = False
    busy = {
        MOVER_OF[flight.direction]
        for flight in state.flights.values()
        if flight.purpose in CHORES
    }  # fmt: skip
    busy |= {mover for mover in Mover if dirt.is_resting(mover, now)}
    is_host_on = Tier.HOST not in state.tiers_off
    if dirt.offload.size and is_host_on and Mover.MEMORY not in busy and not len(state.waiting):
        _offload(state)
    is_disk_on = Tier.DISK not in state.tiers_off and state.is_disk_read
    has_left = dirt.stores and Mover.DISK not in busy and is_disk_on and _store(state)
    if dirt.shares and Mover.REMOTE not in busy and Tier.REMOTE not in state.tiers_off:
        _share(state)
    return has_left


def _offload(state: CacheState) -> None:
    """Copy blocks to the host pool, but leave a part of it available for copies that must be made."""
    host = state.host
    most = min(_most(state.device), host.num_available - _size(host) // _SHARE_OF_POOL)
    if most <= 0:
        return
    blocks = _marked(state, state.dirt.offload, state.device, host)[:most]
    if state.dirt.stores and Tier.DISK not in state.tiers_off:
        blocks = _worth_a_slot(state, blocks)
    slots = host_slots(state, len(blocks), at_most=True)
    assert slots is not None, "no more than can be had"
    _start(state, Purpose.CLEAN, state.dirt.offload, blocks, slots)


def _worth_a_slot(state: CacheState, blocks: Ids) -> Ids:
    """Return the blocks that the disk store lacks; if it has all, as many as get slots for which no block is lost.

    The others of those are unmarked: if they are loaded again, there may be room.
    """
    host, disk, marks = state.host, state.disk, state.dirt.offload
    is_unknown = state.device.is_unknown_to(disk, blocks)
    if is_unknown.any():
        return blocks[is_unknown]
    cold = host.victims(max(0, len(blocks) - host.num_free), NOWHERE)
    is_lost = host.is_unknown_to(disk, cold)
    num_slots = host.num_free + int(np.append(is_lost, True).argmax())
    marks[blocks[num_slots:]] = False
    return blocks[:num_slots]


def _store(state: CacheState) -> bool:
    """Copy slots to the disk store; tell whether others had to leave it for them."""
    marks, host = state.dirt.store, state.host
    sources = _dirty_slots(state, marks, state.disk)[: _most(host)]
    num_known = len(state.disk.index)
    targets = disk_slots(state, len(sources))
    has_left = len(state.disk.index) < num_known
    _start(state, Purpose.STORE, marks, sources[: len(targets)], targets)
    return has_left


def _share(state: CacheState) -> None:
    marks = state.dirt.share
    sources = _dirty_slots(state, marks, None)
    # Slots that the store did not take are offered again after all others, so that they do not hold these up.
    in_order = state.dirt.share_tried[sources].argsort(kind="stable")
    _start(state, Purpose.SHARE, marks, sources[in_order][: _most(state.host)], NOWHERE)


def _start(state: CacheState, purpose: Purpose, marks: Marks, sources: Ids, targets: Ids) -> None:
    """Start one copy, unless there is nothing to copy; its sources count as clean from now on."""
    if not len(sources):
        return
    marks[sources] = False
    state.fly(purpose, sources, targets, keyed=np.ones(len(sources), np.bool_))


def _most(pool: Pool) -> int:
    return min(BLOCKS_MAX, max(1, _size(pool) // _SHARE_OF_POOL))


def _size(pool: Pool) -> int:
    """Return how many blocks a pool has now; parked ones are out of use."""
    return pool.num_usable - pool.num_parked


def _dirty_slots(state: CacheState, marks: Marks, below: Pool | None) -> Ids:
    """Return slots to copy to a store, in the order of their blocks, or in the order in which they would leave."""
    host = state.host
    if state.dirt.writes_through:
        return _marked(state, marks, host, below)
    missing = max(1, _size(host) // _SHARE_OF_POOL) - host.num_free
    if missing <= 0:
        return NOWHERE
    cold = host.victims(missing, NOWHERE)
    return _unknown(state, marks, (host, cold[marks[cold]][:_LOOKED_AT]), below)


def _marked(state: CacheState, marks: Marks, pool: Pool, below: Pool | None) -> Ids:
    """Return READY blocks that are marked and not below, in the order of their places in their chains."""
    (marked,) = marks.nonzero()
    marked = marked[:_LOOKED_AT]
    is_ready = pool.records.state[marked] == State.READY
    marks[marked[~is_ready]] = False
    found = _unknown(state, marks, (pool, marked[is_ready]), below)
    if not len(found) and len(marked):
        state.dirt.is_due = True
    in_order: Ids = found[pool.records.position[found].argsort(kind="stable")]
    return in_order


def _unknown(
    state: CacheState, marks: Marks, looked_at: tuple[Pool, Ids], below: Pool | None
) -> Ids:
    """Return the blocks that the pool below does not have; unmark the others, which are clean."""
    pool, ids = looked_at
    if below is None or not len(ids):
        return ids
    is_unknown = pool.is_unknown_to(below, ids)
    marks[ids[~is_unknown]] = False
    if not is_unknown.any():
        state.dirt.is_due = True
    return ids[is_unknown]
