"""Own the making of room: where a call's new blocks come from, and what is written back or evicted for them."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.history import DepartureReason
from kvleased.core.blocks.pool import Pool
from kvleased.core.effects import Tier
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.prefix.looking import by_tier, parted
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import available_to, num_above_maximum, num_idle, victims
from kvleased.core.tier.flights import Purpose


class Kept(NamedTuple):
    """The caller's own prefix, as a `Match` has it: its blocks do not leave to make room."""

    blocks: Ids = NOWHERE
    below: Ids = NOWHERE
    behind: Ids | None = None
    """Stays while anything else can leave or be waited for: without it, the prefix is shorter at the next try."""


_NOTHING: Final = Kept()


def room(
    state: CacheState, count: int, tenant: int, kept: Kept = _NOTHING, *, may_wait: bool
) -> Ids | None:
    """Return `count` free blocks for a tenant, evicting others as needed; or None if there are not enough yet.

    If the caller may wait, cached blocks are written back before they leave, as far as there are slots and the write
    policy wants copies of them; if it may not, they are dropped. Either way, None means that everything that can make
    room has been started. The caller's own prefix stays.
    """
    state.history.tenant = tenant
    found = _room(state, count, tenant, kept, may_wait=may_wait)
    state.history.tenant = 0
    return found


def _room(state: CacheState, count: int, tenant: int, kept: Kept, *, may_wait: bool) -> Ids | None:
    device = state.device
    # Copies to a host pool whose mover hangs may take for ever, also those that are under way.
    may_write_back = may_wait and Tier.HOST not in state.tiers_off
    num_own = num_above_maximum(state, tenant, count)
    found = None if num_own else device.suitable(count, tenant)
    if found is not None:
        return found
    deficit = max(num_own, count - device.num_free)
    if deficit > 0:
        if may_write_back and _are_coming(state, deficit, num_own, tenant):
            return None
        if not _make(state, count, tenant, kept, (deficit, num_own), may_write_back):
            return None
    found = device.suitable(count, tenant)
    if found is None and not _num_coming(state):
        state.fly(Purpose.SCRUB, NOWHERE, device.unsuitable(count, tenant))
        if Tier.HOST in state.tiers_off:
            # The scrub may not end soon either, so other blocks leave instead of those that it would make ready.
            return _room(state, count, tenant, kept, may_wait=may_wait)
    return found


def _make(
    state: CacheState,
    count: int,
    tenant: int,
    kept: Kept,
    counts: tuple[int, int],
    may_write_back: bool,
) -> bool:
    """Make room with the blocks that `_leaving` finds; False if they are too few, or some are written back first.

    The next blocks of the caller's chain leave only if there is nothing else to wait for: not while other blocks that
    the caller gets are being copied or must be scrubbed.
    """
    next_blocks, below = NOWHERE, kept.below
    if kept.behind is not None:
        next_blocks, next_below = by_tier(kept.behind)
        below = np.concatenate([below, next_below])
    leaving = _leaving(state, tenant, counts, kept.blocks, next_blocks)
    if len(leaving) < counts[0]:
        return False
    first, last = _parted_by(next_blocks, leaving)
    if len(first) and not _let_leave(state, first, below, may_write_back):
        return False
    if not len(last) or state.device.suitable(count - len(last), tenant) is None:
        return True
    return _let_leave(state, last, below, may_write_back)


def _parted_by(next_blocks: Ids, leaving: Ids) -> tuple[Ids, Ids]:
    """Return the blocks that leave first, and those of the next blocks that leave after all others."""
    if not len(next_blocks):
        return leaving, NOWHERE
    is_next = np.isin(leaving, next_blocks)
    return leaving[~is_next], leaving[is_next]


def _let_leave(state: CacheState, leaving: Ids, below: Ids, may_write_back: bool) -> bool:
    """Evict blocks; return False if some are written back first."""
    if may_write_back and write_back(state, leaving, below):
        return False
    evict_blocks(state, leaving)
    return True


def _leaving(
    state: CacheState, tenant: int, counts: tuple[int, int], protected: Ids, next_blocks: Ids
) -> Ids:
    """Return blocks that can leave: as many as `counts` says, and of the tenant's own at least as many as it says.

    There are fewer if there are no more. The next blocks of the caller's chain are among them only if there are no
    others.
    """
    deficit, num_own = counts
    if len(next_blocks):
        kept = np.concatenate([protected, next_blocks])
        leaving = victims(state, tenant, deficit, kept, num_own=num_own)
        is_own = state.device.records.tenant[leaving] == tenant
        if len(leaving) >= deficit and np.count_nonzero(is_own) >= num_own:
            return leaving
    return victims(state, tenant, deficit, protected, num_own=num_own)


def num_available(state: CacheState, tenant: int, protected: Ids) -> int:
    """Count the blocks that a call could get if no other call came: free, or evictable and not in its own prefix.

    If tenants have limits, the count may be below 0; see `available_to`.
    """
    if state.is_limited:
        return available_to(state, tenant, protected)
    if not len(protected):
        return state.device.num_available
    return state.device.num_available - num_idle(state, protected)


def num_at_once(state: CacheState, tenant: int, protected: Ids) -> int:
    """Count the blocks that a call could get without waiting for any to be scrubbed for its tenant."""
    device, available = state.device, max(0, num_available(state, tenant, protected))
    if device.is_only_of(tenant):
        return available
    num_unsuitable = len(device.unsuitable(device.num_free, tenant))
    evictable = device.victims(len(device.order), protected)
    if not num_unsuitable and (device.records.tenant[evictable] == tenant).all():
        return available
    return min(available, device.num_free - num_unsuitable)


def write_back(state: CacheState, victims: Ids, below: Ids = NOWHERE) -> bool:
    """Start copying the victims that have no copy below; tell whether there is anything to wait for.

    If there is, all other victims have been evicted: those that have a copy, those that have not been found often
    enough for one, and those for which there is no slot.

    The copies take no host slots among `below`, so that a caller that makes room does not lose its own prefix.
    """
    is_dirty = are_dirty(state, victims) & state.dirt.are_worth_copying(victims)
    own_slots = below[parted(state, below).host]
    slots = host_slots(state, int(np.count_nonzero(is_dirty)), own_slots, at_most=True)
    if slots is None or not len(slots):
        return False
    # Victims that have a copy leave at once: the new copies may push that copy out, and then nothing would ever leave.
    # The coldest of those that get no slot leave at once, too: the next event would find no slot for them either.
    is_dirty[is_dirty.nonzero()[0][: -len(slots)]] = False
    evict_blocks(state, victims[~is_dirty])
    state.fly(Purpose.WRITE_BACK, victims[is_dirty], slots, keyed=slots >= 0)
    return True


def are_dirty(state: CacheState, blocks: Ids) -> NDArray[np.bool_]:
    """Tell for each READY device block whether neither the host pool nor the disk store has it.

    A copy in the remote store does not count, because that store may forget it at any time.
    """
    is_dirty = state.device.is_unknown_to(state.host, blocks)
    if len(state.disk.index) and Tier.DISK not in state.tiers_off:
        is_dirty &= state.device.is_unknown_to(state.disk, blocks)
    return is_dirty


def num_slots_available(state: CacheState, protected: Ids) -> int:
    """Count the slots of the host pool that could be had now, without those of the caller's own blocks."""
    return state.host.num_available - int(np.count_nonzero(state.host.holds[protected] == 0))


def host_slots(
    state: CacheState, count: int, protected: Ids = NOWHERE, *, at_most: bool = False
) -> Ids | None:
    """Return `count` free slots, dropping the coldest ones if needed; None if there are too few.

    With `at_most`, return as many as can be had instead.
    """
    host = state.host
    if at_most:
        count = min(count, num_slots_available(state, protected))
    deficit = count - host.num_free
    if deficit > 0:
        victims = host.victims(deficit, protected)
        if len(victims) < deficit:
            return None
        _evict_slots(state, host, victims, "host_evictions")
    return host.suitable(count)


def disk_slots(state: CacheState, count: int) -> Ids:
    """Return at most `count` free slots of the disk store, dropping the coldest ones if needed."""
    disk = state.disk
    count = min(count, disk.num_available, state.suspects.most)
    deficit = count - max(0, disk.num_free - state.suspects.num_kept_back)
    if deficit > 0:
        victims = disk.victims(deficit, NOWHERE)
        _evict_slots(state, disk, victims, "disk_evictions")
    slots = disk.suitable(count)
    assert slots is not None, "no more than can be had"
    return slots


def _evict_slots(state: CacheState, pool: Pool, victims: Ids, counter: str) -> None:
    state.counters[counter] += len(victims)
    state.counters["blocks_dropped"] += _sink(state, pool, victims)
    pool.evict(victims)


def evict_blocks(
    state: CacheState, blocks: Ids, why: DepartureReason = DepartureReason.DISPLACED
) -> None:
    """Evict device blocks that nobody holds; `why` they leave, unless room is being made for a tenant."""
    if not len(blocks):
        return
    state.counters["evictions"] += len(blocks)
    state.counters["blocks_dropped"] += _sink(state, state.device, blocks)
    # If no tenant is named for whom room is made, the blocks do not leave for lack of room.
    state.device.evict(blocks, DepartureReason.EVICTED if state.history.tenant else why)
    state.tell("blocks_evicted", num_blocks=len(blocks))


def _sink(state: CacheState, pool: Pool, blocks: Ids) -> int:
    """Make the topmost copies below of blocks that leave a pool the hottest there; count the blocks without any copy.

    So a lower tier's order tells when its blocks left the tiers above, the deepest of a chain first, and not when, or
    in how many parts, they were copied down.
    """
    others = [one for one in state.tiers if one is not pool and len(one.index)]
    if not others and not state.dirt.shares:
        return len(blocks)
    is_dropped = np.ones(len(blocks), np.bool_)
    keys = pool.keys_of(blocks)
    for other in others:
        found = other.index.find(keys)
        is_found = found >= 0
        if state.pools.index(other) > state.pools.index(pool):
            other.touch(found[is_found & is_dropped])
        is_dropped &= ~is_found
    if state.dirt.shares:
        is_dropped &= ~state.dirt.remote[state.pools.index(pool)][blocks]
    return int(np.count_nonzero(is_dropped))


def _are_coming(state: CacheState, count: int, num_own: int, tenant: int) -> bool:
    """Tell whether `count` blocks can be had soon, at least `num_own` of them from the tenant's own blocks."""
    if count > _num_coming(state):
        return False
    if not num_own:
        return True
    tenants = [
        state.device.records.tenant[flight.sources]
        for flight in state.flights.values()
        if flight.purpose is Purpose.WRITE_BACK and not flight.is_lost
    ]
    return num_own <= sum(int(np.count_nonzero(one == tenant)) for one in tenants)


def _num_coming(state: CacheState) -> int:
    coming = {Purpose.SCRUB}
    if Tier.HOST not in state.tiers_off:
        coming.add(Purpose.WRITE_BACK)
    return sum(
        len(flight.sources) or len(flight.targets)
        for flight in state.flights.values()
        if flight.purpose in coming and not flight.is_lost
    )
