"""Own what becomes of a key that is on its way to the device when another block becomes findable under it.

The other block serves at once. Leases that wait for the key get that block instead, so they do not lose it if the copy
fails, and what the copy brings serves nobody.
"""

import numpy as np
from numpy.typing import NDArray

from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.prefix.looking import coming_for
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import Flight


def overtake(state: CacheState, keys: bytes, blocks: Ids) -> None:
    """Let no call join copies of keys that these blocks have now; leases that wait for them get these blocks instead.

    There are such copies if the keys were committed meanwhile, or if a call was not to join the copy that had been
    started first. If a key was stolen, a lease of another tenant may wait for one of them; it keeps its own blocks,
    which become private.
    """
    tenants = state.device.records.tenant
    coming = state.loading.find(keys)
    while (is_late := coming >= 0).any():
        late, instead = coming[is_late], blocks[is_late]
        copy_ids = np.array(state.loading.copy_ids(late))
        for copy_id in set(copy_ids.tolist()):
            flight, is_its = state.flights[copy_id], copy_ids == copy_id
            flight.keyed[np.isin(flight.targets, late[is_its])] = False
            is_its &= tenants[late] == tenants[instead]
            for lease in waiting_for(state, flight):
                _exchange(state, lease, late[is_its], instead[is_its])
        state.loading.discard(late)
        coming = state.loading.find(keys)


def are_others(state: CacheState, keys: bytes, tenant: int) -> NDArray[np.bool_]:
    """Tell which packed keys are on their way for another tenant, which had them first."""
    others: NDArray[np.bool_] = state.loading.find(keys) >= 0
    others &= coming_for(state, keys, tenant) < 0
    return others


def waiting_for(state: CacheState, flight: Flight) -> list[Lease]:
    """Return the leases that wait for a copy."""
    leases = state.leases.by_id
    if flight.is_joinable or flight.lease_id is None:
        return [lease for lease in leases.values() if flight.copy_id in lease.pending]
    lease = leases.get(flight.lease_id)
    return [lease] if lease is not None and flight.copy_id in lease.pending else []


def _exchange(state: CacheState, lease: Lease, late: Ids, instead: Ids) -> None:
    """Replace blocks that a lease waits for by others; its worker has not been told of the former."""
    is_reload = lease.phase is Phase.RELOADING
    entries = lease.moving_to.copy() if is_reload else state.leases.blocks_of(lease)
    other = dict(zip(late.tolist(), instead.tolist(), strict=True))
    (places,) = np.isin(entries, late).nonzero()
    left = entries[places]
    entries[places] = [other[one] for one in left.tolist()]
    state.device.hold(entries[places])
    if is_reload:
        lease.moving_to = entries
    else:
        state.leases.put(lease.row, entries)
    state.device.let_go(left)
