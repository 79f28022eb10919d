"""Own how much room there will be without anybody's doing: when the copies in flight have ended."""

from collections import Counter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import LeaseId
from kvleased.core.admission.room import num_available, num_slots_available
from kvleased.core.blocks.pool import Pool
from kvleased.core.effects import Direction, Tier
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import Use, available_to
from kvleased.core.tier.flights import Flight, Purpose

_LEASE_AND_COPY: Final = 2
"""Holders of a block that a lease on its way down shares with nobody, and that one copy brings down."""
_LEASE_AND_COPIES: Final = 3
"""Holders of a block that a lease on its way down shares with nobody, and that two copies bring down."""
_BEYOND: Final = np.iinfo(np.intp).max
"""No block has so high a number."""
_NONE: Final = np.zeros(0, np.bool_)


def num_soon(state: CacheState, tenant: int, protected: Ids) -> int:
    """Count the blocks that a call can get once all copies in flight have ended, if no other call comes meanwhile.

    Protected blocks, such as the call's own prefix, do not count, even if they leave the device by then. If some leave
    while the host pool is off, nobody finds them again; then the count is -1, as the prefix will not be what it is.
    """
    if Tier.HOST in state.tiers_off and _are_leaving(state, protected):
        return -1
    blocks, num_taken = _blocks_coming(state, protected), _num_taken_back(state, protected)
    if not state.is_limited:
        return num_available(state, tenant, protected) + len(blocks) - num_taken
    return available_to(state, tenant, protected, _use_without(state, blocks)) - num_taken


def num_slots_soon(state: CacheState, protected: Ids) -> int:
    """Count the host slots that can be had once all copies in flight have ended, without the protected ones."""
    held = [ids for flight in _under_way(state) for ids in _held_in(state.host, state, flight)]
    return num_slots_available(state, protected) + len(_idle_after(state.host, held, protected))


def is_granted_again(state: CacheState, lease: Lease) -> bool:
    """Tell whether tenants' limits let a call get again what its loading lease holds, once that lease is given up."""
    if not state.is_limited:
        return True
    flights = [state.flights[copy_id] for copy_id in lease.pending]
    targets = [one.targets for one in flights if one.lease_id == lease.lease_id]
    own = _idle_after(state.device, [state.leases.blocks_of(lease), *targets], NOWHERE)
    return len(own) <= available_to(state, lease.tenant, NOWHERE, _use_without(state, own))


def _are_leaving(state: CacheState, blocks: Ids) -> bool:
    """Tell whether a copy under way takes some of these cached blocks off the device."""
    leaving = [one.sources for one in _under_way(state) if one.purpose is Purpose.DISPLACE]
    return any(np.isin(blocks, sources).any() for sources in leaving)


def _blocks_coming(state: CacheState, protected: Ids) -> Ids:
    """Return the blocks that nobody holds once the copies have ended: they are free, or cached and evictable."""
    flights = _under_way(state)
    held = [ids for flight in flights for ids in _held_in(state.device, state, flight)]
    return _idle_after(state.device, held + _left_by_leases(state, flights), protected)


def _under_way(state: CacheState) -> list[Flight]:
    """Return the copies that are expected to end."""
    return [one for one in state.flights.values() if not one.is_lost]


def _held_in(pool: Pool, state: CacheState, flight: Flight) -> list[Ids]:
    """Return the blocks of a pool that a copy holds."""
    ends = zip(state.ends(flight.direction), (flight.sources, flight.targets), strict=True)
    return [ids for one, ids in ends if one is pool]


def _idle_after(pool: Pool, held: list[Ids], protected: Ids) -> Ids:
    """Return the blocks that nobody holds once each of `held` lets go of its blocks, without the protected ones."""
    if not held:
        return NOWHERE
    ids, num_ends = np.unique(np.concatenate(held), return_counts=True)
    return np.setdiff1d(ids[pool.holds[ids] == num_ends], protected, assume_unique=True)


def _left_by_leases(state: CacheState, flights: list[Flight]) -> list[Ids]:
    """Return the blocks of each lease that moves down to stay there, also those that need not be copied for it."""
    leases = {
        one.lease_id: state.leases.by_id.get(one.lease_id)
        for one in flights
        if one.purpose is Purpose.PREEMPT and one.lease_id is not None
    }
    return [
        state.leases.blocks_of(one)
        for one in leases.values()
        if one is not None and one.phase is Phase.EVICTING and not _comes_back(one)
    ]


class _Descent(NamedTuple):
    """The blocks that the copies of leases bring down which come back at once; one entry each."""

    blocks: Ids
    has_no_key: NDArray[np.bool_]
    is_elsewhere: NDArray[np.bool_]
    """Whether another slot has the block's key by now."""
    is_doubled: NDArray[np.bool_]
    """Whether another copy brings the block down, too, whose slot may get its key."""


def _num_taken_back(state: CacheState, protected: Ids) -> int:
    """Count the blocks that leases take when they come back, beyond those that they left to a call.

    Blocks that a lease shares with others stay with them. It needs such a block a second time if another copy brings it
    down at the same time: of the two slots one has no key, and may be the lease's.
    """
    back = _coming_back(state)
    if not back:
        return 0
    beside = _Beside(state)
    owners, blocks = _joined([(one.lease_id, state.leases.blocks_of(one)) for one in back])
    doubled = blocks[beside.have(owners, blocks)]
    num_taken = int(np.count_nonzero(state.device.holds[doubled] > _LEASE_AND_COPIES))
    descent = _descent_of(state, {one.lease_id for one in back}, beside)
    return num_taken + _num_kept(state, descent) + _num_lost(state, descent, protected)


def _descent_of(state: CacheState, lease_ids: set[LeaseId], beside: "_Beside") -> _Descent:
    down = [one for one in _under_way(state) if one.lease_id in lease_ids]
    owners, blocks = _joined([(one.lease_id or 0, one.sources) for one in down])
    return _Descent(
        blocks=blocks,
        has_no_key=~np.concatenate([_NONE, *(one.keyed for one in down)]),
        is_elsewhere=state.host.index.find(state.device.keys_of(blocks)) >= 0,
        is_doubled=beside.have(owners, blocks),
    )


def _num_kept(state: CacheState, descent: _Descent) -> int:
    """Count the blocks that leases will not find again, and that do not become free when these leave them.

    Their slots get no keys, and a lost copy or another lease keeps the blocks: the leases need them a second time.
    """
    is_unfindable = descent.has_no_key | descent.is_elsewhere
    return int(
        np.count_nonzero(is_unfindable & (state.device.holds[descent.blocks] > _LEASE_AND_COPY))
    )


def _num_lost(state: CacheState, descent: _Descent, protected: Ids) -> int:
    """Count the protected blocks that leases bring back without their keys, so that the call needs others for them.

    Nobody but the lease holds such a block, and another slot has its key, or may get it.
    """
    holds = state.device.holds[descent.blocks]
    is_lost = descent.is_doubled & (holds <= _LEASE_AND_COPIES)
    is_lost |= descent.is_elsewhere & (holds <= _LEASE_AND_COPY)
    return int(np.count_nonzero(is_lost & np.isin(descent.blocks, protected)))


class _Beside:
    """Which blocks are brought to the host pool by copies other than a lease's own."""

    def __init__(self, state: CacheState) -> None:
        """Look at all copies once."""
        offloads = [one for one in state.flights.values() if one.direction is Direction.OFFLOAD]
        # The last entry is there so that every block has a place.
        end = [(0, np.array([_BEYOND]))]
        owners, blocks = _joined([(one.lease_id or 0, one.sources) for one in offloads] + end)
        order = np.lexsort((owners, blocks))
        self._blocks, firsts, counts = np.unique(
            blocks[order], return_index=True, return_counts=True
        )
        self._first_owners = owners[order][firsts]
        self._last_owners = owners[order][firsts + counts - 1]

    def have(self, owners: Ids, blocks: Ids) -> NDArray[np.bool_]:
        """Tell for each block of a lease whether some other's copy brings it down."""
        places = np.searchsorted(self._blocks, blocks)
        is_others = (self._first_owners[places] != owners) | (self._last_owners[places] != owners)
        are_beside: NDArray[np.bool_] = (self._blocks[places] == blocks) & is_others
        return are_beside


def _joined(parts: list[tuple[int, Ids]]) -> tuple[Ids, Ids]:
    """Return all blocks of several lists, and with each block the number of its list."""
    owners = [np.full(len(blocks), number, np.int64) for number, blocks in parts]
    return np.concatenate([NOWHERE, *owners]), np.concatenate([NOWHERE, *(one for _, one in parts)])


def _coming_back(state: CacheState) -> list[Lease]:
    """Return the leases that move down and come back at once."""
    leases = state.leases.by_id.values()
    return [one for one in leases if one.phase is Phase.EVICTING and _comes_back(one)]


def _comes_back(lease: Lease) -> bool:
    """Tell whether a call waits for a lease to come back as soon as it is down: then it leaves room for nobody."""
    return lease.next_reload is not None


def _use_without(state: CacheState, blocks: Ids) -> Use:
    """Return what tenants use once blocks have become free; those that are being zeroed are nobody's already."""
    use = Use(by_tenant=dict(state.device.usage()), num_free=state.device.num_free + len(blocks))
    zeroed = [one.targets for one in state.flights.values() if one.direction is Direction.SCRUB]
    owned = np.setdiff1d(blocks, np.concatenate([NOWHERE, *zeroed]), assume_unique=True)
    for tenant, count in Counter(state.device.records.tenant[owned].tolist()).items():
        used, cached = use.by_tenant[tenant]
        use.by_tenant[tenant] = (used - count, cached)
    return use
