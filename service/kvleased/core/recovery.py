"""Own the rebuilding of a cache's state from its records after the control process was killed at any instant.

Recovery believes a lease whose row is whole and whose worker lives; a READY block whose seal matches; a RESERVED block
that is in just one believed row or magazine; and a magazine of which a process lives. Everything else becomes free
under a new generation: the movers of the earlier life are dead, and the workers of rows that are not believed are dead
or never learned of them. Pins are not kept, and neither is whether the stores work: what is in a store counts for
nothing until the store is said to work again.
"""

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import LeaseId, WorkerId
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.blocks.states import State
from kvleased.core.effects import Tier
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.lease.phases import AFTER_RESTART, Phase
from kvleased.core.lease.ranks import Member, Members, Place
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import on_device
from kvleased.core.verbs.trimming import cut

_ON_HOST = (Phase.EVICTED, Phase.RELOADING)


def recover(
    state: CacheState,
    workers: Mapping[WorkerId, int],
    places: Mapping[WorkerId, Place],
    magazines: Mapping[WorkerId, int],
    now: float,
) -> None:
    """Rebuild the state from its records and from the workers that live."""
    state.tiers_off |= {Tier.DISK, Tier.REMOTE}
    state.workers.update(workers)
    for worker_id, place in places.items():
        state.ranks.sit(worker_id, place)
    for pool in state.pools:
        _distrust(pool)
    orphaned = _recover_magazines(state, magazines)
    columns = state.records.rows
    columns.engine[columns.lease_id == 0] = 0
    rows = _believed_rows(state)
    for row in np.flatnonzero(state.records.rows.lease_id).tolist():
        if row in rows:
            _adopt(state, row, now)
        else:
            columns.lease_id[row] = columns.engine[row] = 0
    _show_kernels(state, rows)
    state.leases.free_rows = [
        row for row in reversed(range(len(state.records.rows.lease_id))) if row not in rows
    ]
    _drop_unvouched(state, orphaned)
    for pool in state.pools:
        _free_unheld(pool)
        pool.rebuild()
    state.bound(state.device.num_parked)
    state.dirt.start_over(state.device.records.state, state.host.records.state)
    state.note_before()


def give_back_retired(records: CacheRecords) -> None:
    """Have recovery free what another container retired or parked, because it lies in other memory now."""
    for tier in (records.device, records.host, records.disk):
        tier.state[tier.state >= State.BAD] = State.RESERVED


def _distrust(pool: Pool) -> None:
    """Make RESERVED whatever a crash may have left half-written, so that it is freed unless something holds it."""
    state = pool.records.state
    unsealed = (state == State.READY) & ~sealed(pool)
    state[unsealed | (state > State.PARKED)] = State.RESERVED
    state[state == State.QUARANTINED] = State.RESERVED
    _drop_doubles(pool)


def sealed(pool: Pool) -> NDArray[np.bool_]:
    """Tell for every entry whether its seal matches it."""
    return pool.are_sealed(np.arange(len(pool), dtype=np.intp))


def _drop_doubles(pool: Pool) -> None:
    """Believe only the first entry of each key."""
    ready = np.flatnonzero(pool.records.state == State.READY)
    # Keys are hashes: nearly always their first words show that there are no doubles, in a tenth of the time.
    words = pool.records.key.view(np.uint64)[ready, 0]
    in_order = np.sort(words)
    shared = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(shared):
        return
    ready = ready[np.isin(words, shared)]
    keys = np.ascontiguousarray(pool.records.key[ready]).view("V32").ravel()
    _, first = np.unique(keys, return_index=True)
    doubles = np.ones(len(ready), np.bool_)
    doubles[first] = False
    pool.records.state[ready[doubles]] = State.RESERVED


def _recover_magazines(state: CacheState, magazines: Mapping[WorkerId, int]) -> Ids:
    """Keep the magazines that have a living process, and what they hold; return the blocks that others held."""
    book, device = state.magazines, state.device
    members = {one: (name, state.workers[one]) for one, name in magazines.items()}
    orphaned = book.recover(members)
    held_by = state.records.magazines.held_by
    states, counts = device.records.state, np.bitwise_count(held_by)
    is_sound = (states == State.READY) | ((states == State.RESERVED) & (counts == 1))
    is_sound[: len(device) - device.num_usable] = False
    held_by[~is_sound] = 0
    device.holds += np.bitwise_count(held_by)
    book.count()
    return orphaned


def _drop_unvouched(state: CacheState, blocks: Ids) -> None:
    """Take blocks for lost if their magazine's last process ended while nobody watched, unless others hold them.

    Nobody knows what their engine did to them meanwhile.
    """
    states, holds = state.device.records.state, state.device.holds
    states[blocks[(states[blocks] == State.READY) & (holds[blocks] == 0)]] = State.RESERVED


def _believed_rows(state: CacheState) -> set[int]:
    """Return the rows whose leases go on."""
    rows = state.records.rows
    believed: set[int] = set()
    used: dict[str, NDArray[np.int32]] = {
        "device": state.device.holds.copy(),
        "host": np.zeros(len(state.host), np.int32),
    }
    for row in np.flatnonzero(rows.lease_id).tolist():
        tier, pool = (
            ("host", state.host) if rows.phase[row] in _ON_HOST else ("device", state.device)
        )
        if rows.phase[row] not in AFTER_RESTART or not _workers_of(state, row):
            continue
        _mend(state, row)
        entries = _entries(state, row)
        if not (_is_whole(state, row) and _is_sound(pool, entries, used[tier])):
            continue
        used[tier][entries] += 1
        believed.add(row)
    return believed


def _mend(state: CacheState, row: int) -> None:
    """Repair a row that a crash left half-changed: cut unfinished growth back, and finish the emptying of places."""
    rows, covering = state.records.rows, state.covering
    rows.num_blocks[row] = np.clip(rows.num_blocks[row], 0, covering.widths)
    whole_tokens = covering.whole_tokens(rows.num_blocks[row].tolist())
    rows.num_tokens[row] = max(1, min(int(rows.num_tokens[row]), whole_tokens))
    rows.num_computed[row] = max(0, int(rows.num_computed[row]))
    cut(state.leases, row)


def _is_whole(state: CacheState, row: int) -> bool:
    """Tell whether a row has a block at every place that needs one."""
    leases, num_computed = state.leases, int(state.records.rows.num_computed[row])
    parts = leases.parts_of(row)
    firsts = (
        leases.covering.first_held(group, num_computed, len(part))
        for group, part in enumerate(parts)
    )
    is_whole = all((part[first:] >= 0).all() for part, first in zip(parts, firsts, strict=True))
    return is_whole and any(len(part) for part in parts)


def _entries(state: CacheState, row: int) -> Ids:
    return state.leases.entries_at(row, state.leases.places_of(row))


def _is_sound(pool: Pool, entries: Ids, used: NDArray[np.int32]) -> bool:
    if len(entries) and (entries.min() < 0 or entries.max() >= len(pool)):
        return False
    states = pool.records.state[entries]
    private = entries[states == State.RESERVED]
    return (
        len(np.unique(entries)) == len(entries)
        and bool(np.isin(states, (State.READY, State.RESERVED)).all())
        and not used[private].any()
    )


def _workers_of(state: CacheState, row: int) -> list[WorkerId]:
    """Return the living workers to which a row's lease belongs."""
    rows, ranks = state.records.rows, state.ranks
    engine, mask = int(rows.engine[row]), int(rows.ranks[row])
    if not engine:
        worker_id = WorkerId(int(rows.worker_id[row]))
        return [worker_id] if worker_id in state.workers else []
    there = (ranks.worker_at(Place(engine, at)) for at in range(ranks.num_ranks) if mask >> at & 1)
    return [worker_id for worker_id in there if worker_id is not None]


def _members_of(state: CacheState, row: int, workers: Sequence[WorkerId]) -> Members | None:
    """Return the ranks that share a row's lease; of how far each had come, only what all had computed is remembered."""
    rows = state.records.rows
    members = state.ranks.members_for(workers[0]) if rows.engine[row] else None
    if members is None:
        return None
    num_computed, num_tokens = int(rows.num_computed[row]), int(rows.num_tokens[row])
    ranks_ever = int(rows.ranks_ever[row])
    for rank in range(members.num_ranks):
        if ranks_ever >> rank & 1:
            members.commits[rank] = [num_computed]
    for worker_id in workers[1:]:
        rank = state.ranks.places[worker_id].rank
        members.join(Member(worker_id=worker_id, rank=rank, joined_id=LeaseId(0)))
    lease_id, ends = LeaseId(int(rows.lease_id[row])), rows.num_blocks[row].tolist()
    members.begin(lease_id, ends, num_tokens, int(rows.hit_tokens[row]))
    # A commit may fill all that its lease has room for, whatever number of tokens was asked for.
    members.ahead_tokens = max(num_tokens, state.covering.room_tokens(ends))
    for worker_id in workers:
        members.note(worker_id, num_computed)
    rows.worker_id[row], rows.ranks[row] = workers[0], members.mask
    return members


def _adopt(state: CacheState, row: int, now: float) -> None:
    rows = state.records.rows
    on_host = rows.phase[row] in _ON_HOST
    workers = _workers_of(state, row)
    worker_id, members = workers[0], _members_of(state, row, workers)
    lease = Lease(
        lease_id=LeaseId(int(rows.lease_id[row])),
        worker_id=worker_id,
        tenant=state.workers[worker_id],
        request=None,
        row=row,
        phase=AFTER_RESTART[Phase(rows.phase[row])],
        deadline=now + state.shape.lease_seconds,
        granted_at=-inf,
        # Its prefix is on the device by now, wherever it was found.
        tier_tokens=on_device(int(rows.hit_tokens[row])),
        moving_to=NOWHERE,
        members=members,
    )
    rows.phase[row] = lease.phase
    (state.host if on_host else state.device).holds[_entries(state, row)] += 1
    state.leases.adopt(lease, int(rows.request_digest[row]))
    state.counters["leases_recovered"] += 1


def _show_kernels(state: CacheState, rows: set[int]) -> None:
    """Publish again the rows that were published and whose leases are on the device, and let kernels read no other."""
    all_rows = np.arange(len(state.records.rows.lease_id))
    stays = state.kernel.published(all_rows) & (state.records.rows.phase == Phase.ACTIVE)
    stays &= np.isin(all_rows, list(rows))
    for row in np.flatnonzero(stays).tolist():
        state.kernel.publish(row, state.leases.parts_of(row))
    state.kernel.reset(np.flatnonzero(~stays))


def _free_unheld(pool: Pool) -> None:
    state = pool.records.state
    strays = np.isin(state, (State.RESERVED, State.FILLING, State.SCRUBBING)) & (pool.holds == 0)
    pool.records.generation[strays] += np.uint64(1)
    state[strays] = State.FREE
