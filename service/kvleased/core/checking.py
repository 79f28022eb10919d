"""Own the invariants of a cache as code: each function returns what does not hold, in words.

They run after every simulated event and on request in production; `docs/reliability.md` tells which
promise each one keeps.
"""

from collections import Counter

import numpy as np

from kvlease.groups import Keeps
from kvleased.core.effects import Direction
from kvleased.core.leases import Phase
from kvleased.core.pool import Pool
from kvleased.core.records import NULL
from kvleased.core.state import CacheState
from kvleased.core.states import State
from kvleased.core.tenants import tenant_violations

_ON_HOST = (Phase.EVICTED, Phase.RELOADING)


def violations(state: CacheState) -> list[str]:
    """Return every invariant that does not hold."""
    return [
        *(f"device: {text}" for text in _pool(state.device)),
        *(f"host: {text}" for text in _pool(state.host)),
        *_holds(state),
        *_owners(state),
        *_rows(state),
        *_places(state),
        *_kernels(state),
        *_flights(state),
        *_waits(state),
        *_bounds(state),
        *tenant_violations(state),
    ]


def _pool(pool: Pool) -> list[str]:
    """Conservation, free list, index and order against the states."""
    found: list[str] = []
    states = pool.records.state
    free = pool.free_ids
    null_blocks = len(pool) - pool.num_usable
    if sum(pool.counts().values()) != pool.num_usable:
        found.append("the states do not add up to the blocks")
    if sorted(free.tolist()) != np.flatnonzero(states == State.FREE)[null_blocks:].tolist():
        found.append("the free list is not the set of free blocks")
    if (states[:null_blocks] != State.FREE).any() or pool.holds[:null_blocks].any():
        found.append("a null block is in use")
    ready = np.flatnonzero(states == State.READY)
    indexed = pool.index.blocks()
    if sorted(indexed.tolist()) != ready.tolist() or len(pool.index) != len(ready):
        found.append("the index does not name just the ready blocks")
    elsewhere = indexed[pool.index.find(pool.keys_of(indexed)) != indexed]
    found += [f"block {block} is indexed under another key" for block in elsewhere.tolist()]
    if not pool.sealed()[ready].all():
        found.append("a ready block's seal does not match")
    evictable = ready[pool.holds[ready] == 0]
    if sorted(pool.order) != evictable.tolist() or len(pool.order) != len(evictable):
        found.append("the evictable blocks are not the ready ones that nobody holds")
    held = np.flatnonzero(pool.holds)
    if np.isin(states[held], (State.FREE,)).any() or (pool.holds < 0).any():
        found.append("a free block is held")
    unheld = np.isin(states, (State.RESERVED, State.FILLING, State.QUARANTINED, State.SCRUBBING))
    if (pool.holds[unheld] == 0).any():
        found.append("a block in use is held by nobody")
    return found


def _holds(state: CacheState) -> list[str]:
    """The counts against the holders' own lists: every hold has a name, and nobody holds twice."""
    device, host = np.zeros_like(state.device.holds), np.zeros_like(state.host.holds)
    for lease in state.leases.by_id.values():
        entries = state.leases.blocks_of(lease)
        (host if lease.phase in _ON_HOST else device)[entries] += 1
        if lease.phase is Phase.EVICTING:
            host[lease.moving_to] += 1
        if lease.phase is Phase.RELOADING:
            device[lease.moving_to] += 1
    for flight in state.flights.values():
        (host if flight.direction is Direction.RELOAD else device)[flight.sources] += 1
        (host if flight.direction is Direction.OFFLOAD else device)[flight.targets] += 1
    for blocks in state.pins.values():
        device[blocks] += 1
    found = []
    for name, counted, pool in (("device", device, state.device), ("host", host, state.host)):
        wrong = np.flatnonzero(counted != pool.holds)
        if len(wrong):
            found.append(f"{name}: holds of blocks {wrong[:8].tolist()} do not match their holders")
    return found


def _owners(state: CacheState) -> list[str]:
    """Private blocks belong to just one lease, and no lease has another tenant's bytes."""
    found = []
    owners: Counter[tuple[str, int]] = Counter()
    for lease in state.leases.by_id.values():
        on_host = lease.phase in _ON_HOST
        name, pool = ("host", state.host) if on_host else ("device", state.device)
        entries = state.leases.blocks_of(lease)
        states = pool.records.state[entries]
        owners.update((name, block) for block in entries[states != State.READY].tolist())
        if len(set(entries.tolist())) != len(entries):
            found.append(f"lease {lease.lease_id} lists a block twice")
        allowed = (
            State.READY,
            State.QUARANTINED if lease.phase is Phase.QUARANTINED else State.RESERVED,
        )
        if lease.phase is not Phase.LOADING and not np.isin(states, allowed).all():
            found.append(
                f"lease {lease.lease_id} is {lease.phase.name} over blocks in other states"
            )
        if (pool.records.tenant[entries] != lease.tenant).any():
            found.append(f"lease {lease.lease_id} has another tenant's block")
    if state.device.records.state.size:
        shared = [
            block
            for (name, block), count in owners.items()
            if count > 1 and name == "device" and state.device.records.state[block] != State.FILLING
        ]
        found += [f"private block {block} is in two leases" for block in shared]
    return found


def _rows(state: CacheState) -> list[str]:
    """The shared block table against the leases."""
    found = []
    rows = state.records.rows
    in_use = {int(lease_id) for lease_id in rows.lease_id if lease_id}
    if in_use != set(state.leases.by_id):
        found.append("the rows in use are not the leases")
    for lease in state.leases.by_id.values():
        row = lease.row
        if rows.lease_id[row] != lease.lease_id or rows.worker_id[row] != lease.worker_id:
            found.append(f"row {row} does not name lease {lease.lease_id}")
        if rows.phase[row] != lease.phase:
            found.append(f"row {row} is in another phase than its lease")
        if state.kernel.is_published(row) and lease.phase in (*_ON_HOST, Phase.LOADING):
            found.append(f"row {row} is published while its lease is {lease.phase.name}")
    active = {
        lease.row: lease.worker_id
        for lease in state.leases.by_id.values()
        if lease.phase is Phase.ACTIVE
    }
    workers = state.leases.active_worker
    if {int(row): int(workers[row]) for row in workers.nonzero()[0]} != active:
        found.append("the rows that count as active are not those of active leases")
    used = {lease.row for lease in state.leases.by_id.values()}
    if len(used) + len(state.leases.free_rows) != len(rows.lease_id) or used & set(
        state.leases.free_rows
    ):
        found.append("rows in use and free rows do not add up")
    if {lease_id for own in state.leases.by_worker.values() for lease_id in own} != set(
        state.leases.by_id
    ):
        found.append("the leases by worker are not the leases")
    return found


def _places(state: CacheState) -> list[str]:
    """Each group of a lease has just the places that its counts of tokens need, and a block at each of them."""
    found = []
    covering, rows = state.covering, state.records.rows
    for lease in state.leases.by_id.values():
        computed, tokens = int(rows.num_computed[lease.row]), int(rows.num_tokens[lease.row])
        parts = state.leases.parts_of(lease.row)
        if computed > covering.room_tokens([len(part) for part in parts]):
            found.append(f"lease {lease.lease_id} has computed more tokens than it has room for")
        for group, part in enumerate(parts):
            keeps = covering.groups[group].keeps
            least = most = covering.last_covered(group, computed, tokens)
            if keeps in (Keeps.WINDOW, Keeps.CHUNK):
                # It moves on with what is computed only when the lease is extended.
                least = 0
            if not least <= len(part) <= most:
                found.append(f"lease {lease.lease_id} has {len(part)} places in group {group}")
            if (part[covering.first_held(group, computed, len(part)) :] == NULL).any():
                found.append(f"lease {lease.lease_id} lacks a block in group {group}")
            if (part[: covering.first_needed(group, computed)] != NULL).any():
                found.append(f"lease {lease.lease_id} has not given back in group {group}")
    return found


def _kernels(state: CacheState) -> list[str]:
    """What kernels read of mapped leases is what the leases have, and no row is being written."""
    found = []
    kernel = state.kernel.rows
    if (kernel.sequence % 2).any():
        found.append("a kernel row is being written")
    for lease in state.leases.by_id.values():
        if not state.kernel.is_published(lease.row):
            continue
        start = 0
        for at, part in enumerate(state.leases.parts_of(lease.row)):
            group, num_read = state.covering.groups[at], int(kernel.num_published[lease.row, at])
            firsts = np.maximum(part, 0)[:, None] * group.kernel_block_stride
            expected = (firsts + np.arange(group.kernel_blocks_per_block)).ravel()
            read = kernel.kernel_ids[lease.row, start : start + num_read]
            if read.tolist() != expected.tolist():
                found.append(f"kernels read other blocks than lease {lease.lease_id} has")
            start += group.table_blocks * group.kernel_blocks_per_block
    return found


def _flights(state: CacheState) -> list[str]:
    """No block is reused while a copy may touch it, and no lease waits for a copy that is not there."""
    found = []
    for flight in state.flights.values():
        source_pool, target_pool = state.ends(flight.direction)
        if (source_pool.records.generation[flight.sources] != flight.source_generations).any():
            found.append(f"a source of copy {flight.copy_id} was reused")
        if (target_pool.records.generation[flight.targets] != flight.target_generations).any():
            found.append(f"a target of copy {flight.copy_id} was reused")
        expected = State.SCRUBBING if flight.direction is Direction.SCRUB else State.FILLING
        if flight.is_lost:
            expected = State.QUARANTINED
        if (target_pool.records.state[flight.targets] != expected).any():
            found.append(f"a target of copy {flight.copy_id} is not {expected.name}")
    found += [
        f"block {block} is listed as loading and is not"
        for block, copy_id in state.loading.values()
        if copy_id not in state.flights or state.device.records.state[block] != State.FILLING
    ]
    return found


def _waits(state: CacheState) -> list[str]:
    """No lease waits for a copy that is not in flight, and none that moves waits for nothing."""
    found = []
    for lease in state.leases.by_id.values():
        moving = lease.phase in (Phase.LOADING, Phase.EVICTING, Phase.RELOADING)
        if bool(lease.pending) != moving:
            found.append(
                f"lease {lease.lease_id} is {lease.phase.name} with {len(lease.pending)} copies pending"
            )
        if not lease.pending <= state.flights.keys():
            found.append(f"lease {lease.lease_id} waits for a copy that is not in flight")
    return found


def _bounds(state: CacheState) -> list[str]:
    """Limits, and workers that exist."""
    found = []
    shape = state.shape
    if len(state.waiting) > shape.max_waiting + shape.max_leases:
        found.append("more calls wait than may")
    if len(state.pins) > shape.max_pins:
        found.append("more pins than may be")
    found += [
        f"lease {lease.lease_id} belongs to a worker that is not there"
        for lease in state.leases.by_id.values()
        if lease.worker_id not in state.workers
    ]
    return found
