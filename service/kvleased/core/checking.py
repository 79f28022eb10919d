"""Own the invariants of a cache as code: each function returns what does not hold, in words.

They run after every simulated event and on request in production; `docs/reliability.md` tells which
promise each one keeps. Sets of blocks are compared as one byte per block, which costs a tenth of sorting them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.commands import Reserve
from kvleased.core.effects import Direction
from kvleased.core.flights import Flight
from kvleased.core.ids import Ids
from kvleased.core.leases import NOWHERE, Lease
from kvleased.core.magazine_checks import magazine_violations
from kvleased.core.phases import Phase
from kvleased.core.place_checks import place_violations
from kvleased.core.pool import Pool
from kvleased.core.rank_checks import rank_violations
from kvleased.core.state import CacheState
from kvleased.core.states import State
from kvleased.core.tenants import tenant_violations
from kvleased.core.tier_checks import tier_violations

_STATES: Final = 256
"""Values that a state's byte can have."""


def _among(*states: State) -> NDArray[np.bool_]:
    """Return a table that tells of each state whether it is one of these."""
    table = np.zeros(_STATES, np.bool_)
    table[list(states)] = True
    return table


# Reading a member of an enumeration costs as much as a small array operation.
_FREE: Final = int(State.FREE)
_READY: Final = int(State.READY)
_PARKED: Final = int(State.PARKED)
_ACTIVE: Final = Phase.ACTIVE
_LOADING: Final = Phase.LOADING
_EVICTING: Final = Phase.EVICTING
_RELOADING: Final = Phase.RELOADING
_GOING: Final = {"device": _RELOADING, "host": _EVICTING}
"""The phase of the leases that are on their way to a tier."""
_ON_HOST: Final = (Phase.EVICTED, _RELOADING)
_MOVING: Final = (_LOADING, _EVICTING, _RELOADING)
_NOT_TO_BE_SEEN: Final = (*_ON_HOST, _LOADING)
_NEVER_UNHELD: Final = _among(
    State.RESERVED, State.FILLING, State.QUARANTINED, State.SCRUBBING
)  # fmt: skip
_SHARED: Final = _among(State.READY, State.FILLING)
_MAY_LIST: Final = np.array(
    [
        _among(*State)
        if phase is _LOADING
        else _among(
            State.READY, State.QUARANTINED if phase is Phase.QUARANTINED else State.RESERVED
        )
        for phase in Phase
    ]
)
"""By phase and state: whether a lease in this phase may list a block in this state."""


def _any(chosen: NDArray[np.bool_]) -> bool:
    """Tell whether anything is chosen; bytes are searched in a tenth of the time that an array is."""
    return b"\1" in chosen.tobytes()


@dataclass(frozen=True, slots=True)
class _Tier:
    """One tier, and all that the leases list there: `ids[i]` by the lease `leases[owners[i]]`."""

    name: str
    pool: Pool
    leases: list[Lease]
    owners: Ids
    ids: Ids


def violations(state: CacheState) -> list[str]:
    """Return every invariant that does not hold."""
    leases = list(state.leases.by_id.values())
    listed = [state.leases.blocks_of(lease) for lease in leases]
    tiers = (
        _tier("device", state.device, leases, listed),
        _tier("host", state.host, leases, listed),
        _Tier("disk", state.disk, [], NOWHERE, NOWHERE),
    )
    found = [f"{tier.name}: {text}" for tier in tiers for text in _pool(tier.pool)]
    lost = [text for tier in tiers for text in _strays(tier)]
    if not lost:
        found += [text for tier in tiers for text in (*_holds(state, tier), *_owners(tier))]
        found += magazine_violations(state, tiers[0].ids)
    return [
        *found,
        *lost,
        *_rows(state),
        *place_violations(state),
        *rank_violations(state),
        *_books(state),
        *_flights(state),
        *_loading(state),
        *_waits(state),
        *_bounds(state),
        *tenant_violations(state),
        *tier_violations(state),
    ]


def _tier(name: str, pool: Pool, leases: list[Lease], listed: list[Ids]) -> _Tier:
    on_host = name == "host"
    own = [at for at, lease in enumerate(leases) if (lease.phase in _ON_HOST) is on_host]
    leases, listed = [leases[at] for at in own], [listed[at] for at in own]
    owners = np.arange(len(leases)).repeat([len(one) for one in listed]) if own else NOWHERE
    return _Tier(name, pool, leases, owners, _joined(listed))


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate(parts) if parts else NOWHERE


# Blocks -----------------------------------------------------------------------------------------------------------


def _pool(pool: Pool) -> list[str]:
    """Conservation, free list, index and order against the states."""
    found: list[str] = []
    states, holds = pool.records.state, pool.holds
    null_blocks = len(pool) - pool.num_usable
    is_free, is_ready, is_unheld = states == _FREE, states == _READY, holds == 0
    if _any(states > _PARKED):
        found.append("the states do not add up to the blocks")
    if null_blocks and not (is_free & is_unheld)[:null_blocks].all():
        found.append("a null block is in use")
    if _any(is_free > is_unheld) or _any(holds < 0):
        found.append("a free block is held")
    if _any(_NEVER_UNHELD[states] & is_unheld):
        found.append("a block in use is held by nobody")
    is_parked = states == _PARKED
    if _any(is_parked > is_unheld) or np.count_nonzero(is_parked) != pool.num_parked:
        found.append("the parked blocks are held, or not as many as are counted")
    is_free[:null_blocks] = False
    if not _is_just(pool.free.ids, is_free):
        found.append("the free list is not the set of free blocks")
    order = np.array([*pool.order], np.intp)
    if not _is_just(order, is_ready & is_unheld) or len(pool.order) != len(order):
        found.append("the evictable blocks are not the ready ones that nobody holds")
    return found + _index(pool, is_ready)


def _is_just(ids: Ids, wanted: NDArray[np.bool_]) -> bool:
    """Tell whether ids are just those that are wanted, each once."""
    listed = np.zeros(len(wanted), np.bool_)
    listed[ids] = True
    packed = wanted.tobytes()
    return listed.tobytes() == packed and len(ids) == packed.count(1)


def _index(pool: Pool, is_ready: NDArray[np.bool_]) -> list[str]:
    """The index and the seals against the ready blocks."""
    found: list[str] = []
    indexed = pool.index.blocks()
    if not _is_just(indexed, is_ready) or len(pool.index) != len(indexed):
        found.append("the index does not name just the ready blocks")
    is_elsewhere = pool.index.find(pool.keys_of(indexed)) != indexed
    if _any(is_elsewhere):
        found += [
            f"block {block} is indexed under another key"
            for block in indexed[is_elsewhere].tolist()
        ]
    (ready,) = is_ready.nonzero()
    if len(ready) and _any(~pool.are_sealed(ready)):
        found.append("a ready block's seal does not match")
    return found


# Who holds what ---------------------------------------------------------------------------------------------------


def _strays(tier: _Tier) -> list[str]:
    """Leases that list what is not a block."""
    return [
        f"lease {lease.lease_id} lists a block that there is not"
        for lease in _whose(tier, (tier.ids < 0) | (tier.ids >= len(tier.pool)))
    ]


def _whose(tier: _Tier, chosen: NDArray[np.bool_]) -> list[Lease]:
    """Return the leases that list the chosen entries."""
    if not _any(chosen):
        return []
    return [tier.leases[at] for at in np.unique(tier.owners[chosen]).tolist()]


def _holds(state: CacheState, tier: _Tier) -> list[str]:
    """The counts against the holders' own lists: every hold has a name, and nobody holds twice."""
    is_device = tier.name == "device"
    goes_there = _GOING.get(tier.name)
    held = [tier.ids]
    held += [one.moving_to for one in state.leases.by_id.values() if one.phase is goes_there]
    for flight in state.flights.values():
        source_pool, target_pool = state.ends(flight.direction)
        if source_pool is tier.pool:
            held.append(flight.sources)
        if target_pool is tier.pool:
            held.append(flight.targets)
    if is_device:
        held += state.pins.values()
        book = state.magazines
        held += [book.blocks_of(one) for one in book.by_name.values()]
    counted = np.bincount(_joined(held), minlength=len(tier.pool))
    is_wrong = counted != tier.pool.holds
    if not _any(is_wrong):
        return []
    (wrong,) = is_wrong.nonzero()
    return [f"{tier.name}: holds of blocks {wrong[:8].tolist()} do not match their holders"]


def _owners(tier: _Tier) -> list[str]:
    """Private blocks belong to just one lease, and no lease has another tenant's bytes."""
    if not len(tier.ids):
        return []
    states = tier.pool.records.state[tier.ids]
    phases = np.array([int(lease.phase) for lease in tier.leases])[tier.owners]
    tenants = np.array([lease.tenant for lease in tier.leases], np.uint64)[tier.owners]
    found = [
        f"lease {lease.lease_id} is {lease.phase.name} over blocks in other states"
        for lease in _whose(tier, ~_MAY_LIST[phases, states])
    ]
    found += [
        f"lease {lease.lease_id} has another tenant's block"
        for lease in _whose(tier, tier.pool.records.tenant[tier.ids] != tenants)
    ]
    listed = _twice(tier.owners * len(tier.pool) + tier.ids) // len(tier.pool)
    found += [f"lease {tier.leases[at].lease_id} lists a block twice" for at in listed.tolist()]
    shared = _twice(tier.ids[~_SHARED[states]])
    found += [f"private block {block} is in two leases" for block in shared.tolist()]
    return found


def _twice(numbers: Ids) -> Ids:
    """Return the numbers that are there more than once."""
    numbers.sort()
    again: Ids = numbers[1:][numbers[1:] == numbers[:-1]]
    return again


# Rows and books ---------------------------------------------------------------------------------------------------


def _rows(state: CacheState) -> list[str]:
    """The shared block table against the leases."""
    found = []
    rows, leases = state.records.rows, list(state.leases.by_id.values())
    if set(rows.lease_id.tolist()) - {0} != state.leases.by_id.keys():
        found.append("the rows in use are not the leases")
    used = [lease.row for lease in leases]
    for lease, lease_id, worker_id, phase, is_published in zip(
        leases,
        rows.lease_id[used].tolist(),
        rows.worker_id[used].tolist(),
        rows.phase[used].tolist(),
        state.kernel.published(np.array(used, np.intp)).tolist(),
        strict=True,
    ):
        if lease_id != lease.lease_id or worker_id != lease.worker_id:
            found.append(f"row {lease.row} does not name lease {lease.lease_id}")
        if phase != lease.phase:
            found.append(f"row {lease.row} is in another phase than its lease")
        if is_published and lease.phase in _NOT_TO_BE_SEEN:
            found.append(f"row {lease.row} is published while its lease is {lease.phase.name}")
    active = {
        lease.row: lease.worker_id
        for lease in leases
        if lease.phase is _ACTIVE and lease.members is None
    }
    workers = state.leases.active_worker.tolist()
    if {row: worker_id for row, worker_id in enumerate(workers) if worker_id} != active:
        found.append("the rows that count as active are not those of active leases")
    return found + _free_rows(state, used)


def _free_rows(state: CacheState, used: list[int]) -> list[str]:
    free = state.leases.free_rows
    if sorted(used + free) == list(range(len(state.records.rows.lease_id))):
        return []
    return ["rows in use and free rows do not add up"]


def _books(state: CacheState) -> list[str]:
    """The lists by which leases are found, against the leases."""
    found = []
    leases = state.leases
    if {lease_id for own in leases.by_worker.values() for lease_id in own} != leases.by_id.keys():
        found.append("the leases by worker are not the leases")
    by_request = leases.by_request.values()
    unnamed = leases.by_id.keys() - by_request
    if any(leases.by_id[lease_id].members is None for lease_id in unnamed) or any(
        leases.by_id[lease_id].holder != holder
        for (holder, _), lease_id in leases.by_request.items()
    ):
        found.append("the leases by request are not the leases")
    return found


# Copies and callers -----------------------------------------------------------------------------------------------


def _flights(state: CacheState) -> list[str]:
    """No block is reused while a copy may touch it."""
    found = []
    for flight in state.flights.values():
        source_pool, target_pool = state.ends(flight.direction)
        if (source_pool.records.generation[flight.sources] != flight.source_generations).any():
            found.append(f"a source of copy {flight.copy_id} was reused")
        if (target_pool.records.generation[flight.targets] != flight.target_generations).any():
            found.append(f"a target of copy {flight.copy_id} was reused")
        expected = _state_of_targets(flight)
        if (target_pool.records.state[flight.targets] != expected).any():
            found.append(f"a target of copy {flight.copy_id} is not {expected.name}")
    return found


def _state_of_targets(flight: Flight) -> State:
    if flight.is_lost:
        return State.QUARANTINED
    return State.SCRUBBING if flight.direction is Direction.SCRUB else State.FILLING


def _loading(state: CacheState) -> list[str]:
    """What is listed as loading is in flight, once, and not on the device already."""
    blocks = state.loading.blocks
    found = [
        f"block {block} is listed as loading and is not"
        for block, copy_id in zip(blocks.tolist(), state.loading.copy_ids(blocks), strict=True)
        if copy_id not in state.flights or state.device.records.state[block] != State.FILLING
    ]
    is_there = state.device.index.find(state.device.keys_of(blocks)) >= 0
    found += [
        f"block {block} is loading under a key that is on the device"
        for block in blocks[is_there].tolist()
    ]
    return found


def _waits(state: CacheState) -> list[str]:
    """No lease waits for a copy that is not in flight, none that moves waits for nothing, and no call for nobody."""
    found = []
    for lease in state.leases.by_id.values():
        if bool(lease.pending) != (lease.phase in _MOVING):
            found.append(
                f"lease {lease.lease_id} is {lease.phase.name} with {len(lease.pending)} copies pending"
            )
        if not lease.pending <= state.flights.keys():
            found.append(f"lease {lease.lease_id} waits for a copy that is not in flight")
        if lease.phase is _LOADING and lease.ticket is None:
            found.append(f"lease {lease.lease_id} is LOADING and nobody waits for it")
    found += [
        f"call {waiter.ticket} waits for a lease or a worker that is not there"
        for waiter in state.waiting
        if waiter.worker_id not in state.workers
        or (not isinstance(waiter.command, Reserve) and waiter.lease_id not in state.leases.by_id)
    ]
    return found


def _bounds(state: CacheState) -> list[str]:
    """Limits, and workers that exist."""
    found = []
    shape = state.shape
    if len(state.waiting) + len(state.asking) > shape.max_waiting + shape.max_leases:
        found.append("more calls wait than may")
    if len(state.pins) > shape.max_pins:
        found.append("more pins than may be")
    found += [
        f"lease {lease.lease_id} belongs to a worker that is not there"
        for lease in state.leases.by_id.values()
        if lease.worker_id not in state.workers
    ]
    return found
