"""Own the clearing of a cache: drop the cached blocks of one tenant or of all from all known tiers, unless held.

The remote store keeps what it has. Blocks that a copy is bringing to a tier are cached there when it is done.
"""

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.history import DepartureReason
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.commands import Clear
from kvleased.core.effects import Cleared, Outcome
from kvleased.core.ids import Ids
from kvleased.core.state import CacheState


def clear(state: CacheState, command: Clear, now: float) -> Outcome:
    """Drop cached blocks that nobody holds, and report what holds the others."""
    del now
    cached = [_cached(pool, command.tenant_digest) for pool in state.pools]
    dropped = [
        _drop(pool, blocks[pool.holds[blocks] == 0])
        for pool, blocks in zip(state.pools, cached, strict=True)
    ]
    num_dropped = sum(dropped)
    state.counters["blocks_cleared"] += num_dropped
    if num_dropped:
        state.tell("blocks_evicted", num_blocks=num_dropped)
    return Outcome(reply=_cleared(state, cached, dropped))


def _cached(pool: Pool, tenant: int | None) -> Ids:
    """Return the findable blocks of a pool: one tenant's, or all if `tenant` is None."""
    is_chosen = pool.records.state == State.READY
    if tenant is not None:
        is_chosen &= pool.records.tenant == tenant
    return np.flatnonzero(is_chosen)


def _drop(pool: Pool, blocks: Ids) -> int:
    """Make cached blocks that nobody holds free; return how many there are."""
    pool.evict(blocks, DepartureReason.CLEARED)
    return len(blocks)


def _cleared(state: CacheState, cached: list[Ids], dropped: list[int]) -> Cleared:
    """Return the answer, which says what holds the blocks that stay."""
    is_held = [np.zeros(len(pool), np.bool_) for pool in state.pools]
    for pool, blocks, held in zip(state.pools, cached, is_held, strict=True):
        held[blocks] = pool.holds[blocks] > 0
    on_device, on_host, _ = is_held
    pins = [pin_id for pin_id, blocks in state.pins.items() if on_device[blocks].any()]
    num_device, num_host, num_disk = dropped
    return Cleared(
        num_device=num_device,
        num_host=num_host,
        num_disk=num_disk,
        num_held=sum(int(np.count_nonzero(one)) for one in is_held),
        lease_ids=np.array(sorted(_leases(state, on_device, on_host)), np.int64).tobytes(),
        pin_ids=np.array(sorted(pins), np.int64).tobytes(),
        num_copying=_num_copying(state, is_held),
        num_in_magazines=int(np.count_nonzero(on_device & (state.records.magazines.held_by > 0))),
    )


def _leases(
    state: CacheState, on_device: NDArray[np.bool_], on_host: NDArray[np.bool_]
) -> list[int]:
    """Return the leases that list one of the marked blocks or slots."""
    found = []
    for lease in state.leases.by_id.values():
        marked = on_host if lease.is_on_host else on_device
        if marked[state.leases.blocks_of(lease)].any():
            found.append(int(lease.lease_id))
    return found


def _num_copying(state: CacheState, is_held: list[NDArray[np.bool_]]) -> int:
    """Count the marked blocks that a copy reads."""
    is_read = [np.zeros(len(pool), np.bool_) for pool in state.pools]
    for flight in state.flights.values():
        source_pool, _ = state.ends(flight.direction)
        is_read[state.pools.index(source_pool)][flight.sources] = True
    return sum(
        int(np.count_nonzero(held & read)) for held, read in zip(is_held, is_read, strict=True)
    )
