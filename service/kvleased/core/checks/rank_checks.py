"""Own the invariants of leases that several ranks share: who has a part in each, and how far each has come."""

from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.lease.ranks import Members, Place
from kvleased.core.state import CacheState

_ON_DEVICE = (Phase.ACTIVE, Phase.QUARANTINED)


def rank_violations(state: CacheState) -> list[str]:
    """Return what does not hold for the ranks that call apart, and for the leases that they share."""
    found = []
    if any(
        worker_id not in state.workers or state.ranks.worker_at(place) != worker_id
        for worker_id, place in state.ranks.places.items()
    ):
        found.append("the places in engines are not those of living workers")
    rows = state.records.rows
    for lease in state.leases.by_id.values():
        members, row = lease.members, lease.row
        if members is None:
            if rows.engine[row]:
                found.append(f"row {row} belongs to an engine, but its lease does not")
            continue
        found += _membership(state, lease, members)
        found += _progress(state, lease, members)
    if state.ranks.places:
        found += _lists(state)
    tickets = {lease.ticket for lease in state.leases.by_id.values() if lease.members is not None}
    if not state.beside.keys() <= tickets:
        found.append("calls wait beside a call that does not exist")
    return found


def _membership(state: CacheState, lease: Lease, members: Members) -> list[str]:
    """The members of a lease are attached at their places, and its row says which they are."""
    found = []
    rows, row = state.records.rows, lease.row
    for worker_id, member in members.present.items():
        if state.ranks.places.get(worker_id) != Place(members.engine, member.rank):
            found.append(f"lease {lease.lease_id} has a member that is not of its engine")
    if lease.worker_id not in members.present:
        found.append(f"lease {lease.lease_id} is of a worker that has no part in it")
    noted = (int(rows.engine[row]), int(rows.ranks[row]), int(rows.ranks_ever[row]))
    if noted != (members.engine, members.mask, members.mask_ever):
        found.append(f"row {row} does not name those that share lease {lease.lease_id}")
    asked = members.evicts.keys()
    if asked and (
        lease.phase not in _ON_DEVICE
        or not asked <= members.present.keys()
        or members.all_want_down
    ):
        found.append(f"lease {lease.lease_id} waits for an evict that nobody else has to ask for")
    calls = state.beside.get(lease.ticket or 0, [])
    if any(call.worker_id not in members.present for call in calls) or (
        calls and calls[0].ticket != lease.ticket
    ):
        found.append(f"lease {lease.lease_id} has calls of others than its members")
    return found


def _progress(state: CacheState, lease: Lease, members: Members) -> list[str]:
    """The tokens counted as computed are those that all ranks have committed, and no rank knows of missing places."""
    found = []
    rows, row = state.records.rows, lease.row
    if int(rows.num_computed[row]) != max(members.hit_tokens, members.agreed()):
        found.append(f"lease {lease.lease_id} counts other tokens than all ranks have committed")
    ends = rows.num_blocks[row].tolist()
    found += [
        f"lease {lease.lease_id} has told rank {member.rank} of places that it has not"
        for member in members.present.values()
        if any(told > end for told, end in zip(member.told, ends, strict=True))
    ]
    return found


def _lists(state: CacheState) -> list[str]:
    """The leases listed for each worker are those in which it has a part."""
    parts: dict[int, set[int]] = {}
    for lease in state.leases.by_id.values():
        present = [lease.worker_id] if lease.members is None else [*lease.members.present]
        for worker_id in present:
            parts.setdefault(worker_id, set()).add(lease.lease_id)
    listed = {worker_id: own for worker_id, own in state.leases.by_worker.items() if own}
    return [] if listed == parts else ["the leases by worker are not those that each has a part in"]
