"""Own the invariants of a cache as code: each function returns what does not hold, in words.

They run after every few simulated events, and on request in production; `docs/reliability.md` tells which
promise each one keeps. Sets of blocks are compared as one byte per block, which costs a tenth of sorting them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.checks.magazine_checks import magazine_violations, member_violations
from kvleased.core.checks.place_checks import place_violations
from kvleased.core.checks.pool_checks import is_any, pool_violations
from kvleased.core.checks.rank_checks import rank_violations
from kvleased.core.checks.sound import Sound
from kvleased.core.checks.tenant_checks import tenant_violations
from kvleased.core.checks.tier_checks import tier_violations
from kvleased.core.commands import Reserve
from kvleased.core.effects import Direction
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.lease.phases import ENDED, Phase
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import Flight

_STATES: Final = 256
"""Values that a state's byte can have."""


def _among(*states: State) -> NDArray[np.bool_]:
    """Return a table that tells for each state whether it is one of these."""
    table = np.zeros(_STATES, np.bool_)
    table[list(states)] = True
    return table


# Reading a member of an enumeration costs as much as a small array operation.
_FILLING: Final = State.FILLING
_QUARANTINED: Final = State.QUARANTINED
_SCRUBBING: Final = State.SCRUBBING
_SCRUB: Final = Direction.SCRUB
_ACTIVE: Final = Phase.ACTIVE
_LOADING: Final = Phase.LOADING
_EVICTING: Final = Phase.EVICTING
_RELOADING: Final = Phase.RELOADING
_NAMES: Final = ("device", "host", "disk")
_GOING_TO: Final = (_RELOADING, _EVICTING)
"""The phase of leases on their way to the device, and of those on their way to the host pool."""
_ON_HOST: Final = (Phase.EVICTED, _RELOADING)
_MOVING: Final = (_LOADING, _EVICTING, _RELOADING)
_NOT_TO_BE_SEEN: Final = (*_ON_HOST, _LOADING)
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


@dataclass(frozen=True, slots=True)
class _Tier:
    """One tier, with all that leases list there and all that others hold there."""

    name: str
    pool: Pool
    leases: list[Lease]
    owners: Ids
    """For each of `ids`, the place in `leases` of the lease that lists it."""
    ids: Ids
    """All blocks that the leases list, lease by lease."""
    held: list[Ids]
    """The blocks of each holder; all that leases list counts as one holder."""
    copied: list[Ids]
    """The blocks that each copy in flight reads."""


def violations(state: CacheState, sound: Sound) -> list[str]:
    """Return every invariant that does not hold; laws that held for unchanged data are not checked again."""
    return [
        *(
            f"{name}: {text}"
            for name, pool in zip(_NAMES, state.pools, strict=True)
            for text in pool_violations(name, pool, sound)
        ),
        *sound.unless_known("lists", _looked_at(state), lambda: _lists(state)),
        *member_violations(state),
        *_rows(state),
        *place_violations(state, sound),
        *rank_violations(state),
        *_books(state),
        *_flights(state),
        *_loading(state),
        *_waits(state),
        *_bounds(state),
        *_ends(state),
        *tenant_violations(state),
        *tier_violations(state),
    ]


# Who holds what ---------------------------------------------------------------------------------------------------


def _looked_at(state: CacheState) -> tuple[object, ...]:
    """Return all that the laws of lists look at, except groups' places and copies' pools, which never change."""
    rows, magazines = state.records.rows, state.magazines
    return (
        [
            (one.lease_id, one.row, one.phase, one.tenant, one.moving_to.tobytes())
            for one in state.leases.by_id.values()
        ],
        rows.num_blocks.tobytes(),
        rows.block_ids.tobytes(),
        [
            (one.copy_id, one.direction, one.sources.tobytes(), one.targets.tobytes())
            for one in state.flights.values()
        ],
        [one.tobytes() for one in state.pins.values()],
        [(one.place, one.num_blocks, one.tenant) for one in magazines.by_name.values()],
        magazines.records.held_by.tobytes(),
        *(pool.holds.tobytes() for pool in state.pools),
        *(pool.copies.tobytes() for pool in state.pools),
        *(pool.records.state.tobytes() for pool in state.pools),
        *(pool.records.tenant.tobytes() for pool in state.pools),
    )


def _lists(state: CacheState) -> list[str]:
    """Compare what leases list, what all holders hold, and the states of blocks."""
    tiers = _tiers(state)
    lost = [text for tier in tiers for text in _strays(tier)]
    if lost:
        return lost
    found = [text for tier in tiers for text in (*_holds(tier), *_owners(tier))]
    return found + magazine_violations(state, tiers[0].ids)


def _tiers(state: CacheState) -> list[_Tier]:
    leases: tuple[list[Lease], ...] = [], [], []
    listed: tuple[list[Ids], ...] = [], [], []
    held: tuple[list[Ids], ...] = [], [], []
    copied: tuple[list[Ids], ...] = [], [], []
    for lease in state.leases.by_id.values():
        at = int(lease.phase in _ON_HOST)
        leases[at].append(lease)
        listed[at].append(state.leases.blocks_of(lease))
        if lease.phase in _GOING_TO:
            held[_GOING_TO.index(lease.phase)].append(lease.moving_to)
    for flight in state.flights.values():
        source_pool, target_pool = state.ends(flight.direction)
        copied[state.pools.index(source_pool)].append(flight.sources)
        held[state.pools.index(target_pool)].append(flight.targets)
    book = state.magazines
    held[0].extend(state.pins.values())
    held[0].extend(book.blocks_of(one) for one in book.by_name.values())
    tiers = []
    for name, pool, own, lists, others, read in zip(
        _NAMES, state.pools, leases, listed, held, copied, strict=True
    ):
        owners = np.arange(len(own)).repeat([len(one) for one in lists]) if own else NOWHERE
        ids = _joined(lists)
        tiers.append(_Tier(name, pool, own, owners, ids, [ids, *others, *read], read))
    return tiers


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate(parts) if parts else NOWHERE


def _strays(tier: _Tier) -> list[str]:
    """Return which leases list a block that does not exist."""
    if not len(tier.ids):
        return []
    # Without its sign, a number below zero is larger than any block.
    is_astray = tier.ids.view(np.uintp) >= len(tier.pool)
    return [
        f"lease {lease.lease_id} lists a block that does not exist"
        for lease in _whose(tier, is_astray)
    ]


def _whose(tier: _Tier, chosen: NDArray[np.bool_]) -> list[Lease]:
    """Return the leases that list the chosen entries."""
    if not is_any(chosen):
        return []
    return [tier.leases[at] for at in np.unique(tier.owners[chosen]).tolist()]


def _holds(tier: _Tier) -> list[str]:
    """Compare the counts of holds with the holders' own lists: every hold has a holder, and nobody holds twice."""
    counted = np.bincount(_joined(tier.held), minlength=len(tier.pool))
    copied = np.bincount(_joined(tier.copied), minlength=len(tier.pool))
    is_wrong = (counted != tier.pool.holds) | (copied != tier.pool.copies)
    if not is_any(is_wrong):
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
        f"lease {lease.lease_id} has a block of another tenant"
        for lease in _whose(tier, tier.pool.records.tenant[tier.ids] != tenants)
    ]
    listed = _twice(tier.owners * len(tier.pool) + tier.ids) // len(tier.pool)
    found += [f"lease {tier.leases[at].lease_id} lists a block twice" for at in listed.tolist()]
    shared = _twice(tier.ids[~_SHARED[states]])
    found += [f"private block {block} is in two leases" for block in shared.tolist()]
    return found


def _twice(numbers: Ids) -> Ids:
    """Return the numbers that appear more than once."""
    numbers.sort()
    again: Ids = numbers[1:][numbers[1:] == numbers[:-1]]
    return again


# Rows and books ---------------------------------------------------------------------------------------------------


def _rows(state: CacheState) -> list[str]:
    """Compare the shared block table with the leases."""
    found = []
    rows, leases = state.records.rows, list(state.leases.by_id.values())
    lease_ids, worker_ids = rows.lease_id.tolist(), rows.worker_id.tolist()
    phases = rows.phase.tolist()
    if set(lease_ids) - {0} != state.leases.by_id.keys():
        found.append("the rows in use are not those of the leases")
    used = [lease.row for lease in leases]
    for lease, row in zip(leases, used, strict=True):
        if lease_ids[row] != lease.lease_id or worker_ids[row] != lease.worker_id:
            found.append(f"row {lease.row} does not name lease {lease.lease_id}")
        if phases[row] != lease.phase:
            found.append(f"row {lease.row} is in another phase than its lease")
        if lease.phase in _NOT_TO_BE_SEEN and state.kernel.is_published(row):
            found.append(f"row {lease.row} is published while its lease is {lease.phase.name}")
    active = {
        lease.row: lease.worker_id
        for lease in leases
        if lease.phase is _ACTIVE and lease.members is None
    }
    workers = state.leases.names.worker_of.tolist()
    if {row: worker_id for row, worker_id in enumerate(workers) if worker_id} != active:
        found.append("the rows that count as active are not those of active leases")
    elif not state.leases.names.is_sound:
        found.append("what is remembered of the ids of steps is not what they name")
    return found + _free_rows(state, used)


def _free_rows(state: CacheState, used: list[int]) -> list[str]:
    free = state.leases.free_rows
    if sorted(used + free) == list(range(len(state.records.rows.lease_id))):
        return []
    return ["rows in use and free rows do not add up"]


def _books(state: CacheState) -> list[str]:
    """Compare the lists by which leases are found with the leases."""
    found = []
    leases = state.leases
    if {lease_id for own in leases.by_worker.values() for lease_id in own} != leases.by_id.keys():
        found.append("the leases by worker are not all leases")
    by_request = leases.by_request.values()
    unnamed = leases.by_id.keys() - by_request
    if any(leases.by_id[lease_id].members is None for lease_id in unnamed) or any(
        leases.by_id[lease_id].holder != holder
        for (holder, _), lease_id in leases.by_request.items()
    ):
        found.append("the leases by request are not all leases")
    return found


# Copies and callers -----------------------------------------------------------------------------------------------


def _flights(state: CacheState) -> list[str]:
    """No block is reused while a copy may touch it."""
    found = []
    for flight in state.flights.values():
        source_pool, target_pool = state.ends(flight.direction)
        sources = source_pool.records.generation[flight.sources]
        if sources.tobytes() != flight.source_generations.tobytes():
            found.append(f"a source of copy {flight.copy_id} was reused")
        targets = target_pool.records.generation[flight.targets]
        if targets.tobytes() != flight.target_generations.tobytes():
            found.append(f"a target of copy {flight.copy_id} was reused")
        expected = _state_of_targets(flight)
        states = target_pool.records.state[flight.targets].tobytes()
        if states.count(expected) != len(states):
            found.append(f"a target of copy {flight.copy_id} is not {expected.name}")
    return found


def _state_of_targets(flight: Flight) -> State:
    if flight.is_lost:
        return _QUARANTINED
    return _SCRUBBING if flight.direction is _SCRUB else _FILLING


def _loading(state: CacheState) -> list[str]:
    """Every key that is listed as loading is in flight, once, and not on the device already."""
    blocks = state.loading.blocks
    if not len(blocks):
        return []
    found = [
        f"block {block} is listed as loading, but is not"
        for block, copy_id in zip(blocks.tolist(), state.loading.copy_ids(blocks), strict=True)
        if copy_id not in state.flights or state.device.records.state[block] != _FILLING
    ]
    is_there = state.device.index.find(state.device.keys_of(blocks)) >= 0
    found += [
        f"block {block} is loading under a key that is on the device"
        for block in blocks[is_there].tolist()
    ]
    return found


def _waits(state: CacheState) -> list[str]:
    """Leases wait only for copies in flight, every moving lease waits for one, and calls wait for what exists."""
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
        f"call {waiter.ticket} waits for a lease or a worker that does not exist"
        for waiter in state.waiting
        if waiter.worker_id not in state.workers
        or (not isinstance(waiter.command, Reserve) and waiter.lease_id not in state.leases.by_id)
    ]
    return found


def _bounds(state: CacheState) -> list[str]:
    """No more calls and pins than the limits allow, and every lease belongs to a worker that exists."""
    found = []
    shape = state.shape
    if len(state.waiting) + len(state.asking) > shape.max_waiting + shape.max_leases:
        found.append("more calls are waiting than the limit allows")
    if len(state.pins) > shape.max_pins:
        found.append("there are more pins than the limit allows")
    found += [
        f"lease {lease.lease_id} belongs to a worker that does not exist"
        for lease in state.leases.by_id.values()
        if lease.worker_id not in state.workers
    ]
    return found


def _ends(state: CacheState) -> list[str]:
    """Every lease that was granted, or came from an earlier life, lives or has ended in one of the ways."""
    counters = Counter(state.counters)
    begun = counters["leases_granted"] + counters["leases_recovered"]
    live = sum(lease.phase is not _LOADING for lease in state.leases.by_id.values())
    ended = sum(counters[name] for name in ENDED.values())
    if begun == live + ended:
        return []
    return [f"{begun} leases were granted or recovered, but {live} are live and {ended} have ended"]
