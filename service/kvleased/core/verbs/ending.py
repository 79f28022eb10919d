"""Own the ends of leases and workers: release, expiry and death, and the function that ends a lease for all of them."""

from typing import Final

import numpy as np

from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    UnknownLeaseError,
    UnknownWorkerError,
    WrongStateError,
)
from kvlease.ids import LeaseId, WorkerId
from kvleased.core.admission.retention import keep_class
from kvleased.core.admission.room import evict_blocks
from kvleased.core.blocks.states import Event, State
from kvleased.core.commands import Attach, Detach, Heartbeat, Release, WorkerDied
from kvleased.core.effects import Beat, Detached, Done, Outcome, Released
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import ENDED, End, Phase
from kvleased.core.lease.ranks import RANKS_MAX, Place
from kvleased.core.magazines import Magazine
from kvleased.core.state import CacheState
from kvleased.core.verbs.parting import part

_ACTIVE: Final = Phase.ACTIVE


def end_lease(
    state: CacheState, lease: Lease, end: End, reason: KVLeaseError | None = None
) -> None:
    """End a lease whose worker no longer writes: it said so, has died, or never knew of the lease.

    The lease is counted by how it ended, unless it was never granted. Blocks that a copy in flight holds stay held
    until that copy ends.
    """
    if lease.phase is not Phase.LOADING:
        state.counters[ENDED[end]] += 1
    forget_lease(state, lease, reason)


def forget_lease(state: CacheState, lease: Lease, reason: KVLeaseError | None = None) -> None:
    """End a lease that no caller was told of yet, or whose end is already counted."""
    entries, phase = state.leases.blocks_of(lease), lease.phase
    if state.device.has_classes:
        keep_class(state, lease, entries)
    state.leases.close(lease)
    if phase is _ACTIVE:
        state.device.let_go(entries)
    else:
        _let_go_of_both(state, lease, entries)
    if lease.ticket is not None or lease.members is not None or state.waiting.by_ticket:
        _answer_waiting(state, lease, reason)


def _let_go_of_both(state: CacheState, lease: Lease, entries: Ids) -> None:
    """Let go of the blocks and slots of a lease that is not simply active."""
    if lease.phase in (Phase.EVICTED, Phase.RELOADING):
        state.host.let_go(entries)
    else:
        state.device.let_go(entries)
    if lease.phase is Phase.RELOADING:
        state.device.let_go(lease.moving_to)
    if lease.phase is Phase.EVICTING:
        state.host.let_go(lease.moving_to)


def _answer_waiting(state: CacheState, lease: Lease, reason: KVLeaseError | None) -> None:
    """Answer every call that waits for a lease which has ended."""
    gone = reason or UnknownLeaseError("the lease ended while the call waited")
    state.wake(lease.ticket, gone)
    lease.ticket = None
    if lease.members is not None:
        for call in lease.members.evicts.values():
            state.wake(call.ticket, gone)
    for waiter in [waiter for waiter in state.waiting if waiter.lease_id == lease.lease_id]:
        state.waiting.leave(waiter.ticket)
        state.wake(waiter.ticket, gone)


def release(state: CacheState, command: Release, now: float) -> Outcome:
    """End a lease because its owner says so; if it has ended already, do nothing and say so.

    If ranks share the lease, it ends when the last of them has released it.
    """
    state.tenant_of(command.worker_id)
    if command.lease_id not in state.leases.by_id:
        state.counters["releases_unknown"] += 1
        return Outcome(reply=Released(released=False))
    lease = state.lease_of(command)
    if lease.members is not None and part(state, lease, command.worker_id, now):
        return Outcome(reply=Released(released=True))
    if lease.phase is _ACTIVE:
        if state.device.has_classes:
            keep_class(state, lease, state.leases.blocks_of(lease))
        state.leases.close(lease)
        state.counters["leases_released"] += 1
        state.unsettled.leaving.append(lease)
        if lease.members is not None or state.waiting.by_ticket:
            _answer_waiting(state, lease, None)
    else:
        end_lease(state, lease, End.RELEASED)
    state.tell("lease_released", lease)
    return Outcome(reply=Released(released=True))


def settle(state: CacheState) -> None:
    """Let go of the blocks of released leases and of finished moves, and carry on the moves that are done in parts.

    Answers need not wait for the letting go, and no caller sees a move that is only partly done.
    """
    while state.unsettled:
        settle_part(state)


def settle_part(state: CacheState) -> None:
    """Do the first part of what is unsettled; if a move held many blocks, let go of some of them."""
    unsettled = state.unsettled
    if unsettled.leaving:
        state.device.let_go(state.leases.blocks_of(unsettled.leaving.pop(0)))
    elif unsettled.left:
        pool, entries, is_leaving = unsettled.left.pop(0)
        num_others = max(0, len(entries) - state.shape.blocks_at_once)
        if num_others:
            # Blocks that are last in token order go first: they are the first to be evicted.
            unsettled.left.insert(0, (pool, entries[:num_others], is_leaving))
        entries = entries[num_others:]
        pool.let_go(entries)
        if is_leaving:
            evict_blocks(state, pool.evictable(entries))
    else:
        unsettled.parts.popleft()()


# Time -------------------------------------------------------------------------------------------------------------


def expire(state: CacheState, lease: Lease) -> None:
    """Quarantine a lease that was not renewed, so that nobody else gets blocks that its worker could still write.

    An evicted lease simply ends, because no worker can write to a slot.
    """
    state.counters["leases_expired"] += 1
    state.tell("lease_expired", lease)
    if lease.phase is Phase.EVICTED:
        end_lease(state, lease, End.EXPIRED)
        return
    _change_private(state, lease, State.RESERVED, Event.EXPIRE)
    state.leases.enter(lease, Phase.QUARANTINED)


def renew(state: CacheState, lease: Lease, now: float) -> None:
    """Note that a lease's owner lives; a quarantined lease is its own again, as nobody else could touch the blocks."""
    lease.deadline = now + state.shape.lease_seconds
    if lease.phase is Phase.QUARANTINED:
        _change_private(state, lease, State.QUARANTINED, Event.REVIVE)
        state.leases.enter(lease, Phase.ACTIVE)


def _change_private(state: CacheState, lease: Lease, before: State, event: Event) -> None:
    blocks = state.leases.blocks_of(lease)
    private = blocks[state.device.records.state[blocks] == before]
    state.device.change(private, event)


# Workers ----------------------------------------------------------------------------------------------------------


def attach(state: CacheState, command: Attach, now: float) -> Outcome:
    """Make a worker known."""
    del now
    if command.tenant_digest == 0:
        msg = "tenant_digest is 0, which is not the digest of a tenant"
        raise InvalidError(msg, resource="tenant_digest")
    magazines = state.magazines
    if command.magazine:
        magazines.check_room(command.magazine)
    if command.engine:
        _sit(state, command)
    if command.magazine:
        magazines.join(command.worker_id, command.magazine, command.tenant_digest)
    state.workers[command.worker_id] = command.tenant_digest
    return Outcome(reply=Done())


def _sit(state: CacheState, command: Attach) -> None:
    """Give a worker its place in its engine; refuse it if another living worker has that place."""
    num_ranks = min(state.shape.num_ranks, RANKS_MAX)
    if not 0 <= command.rank < num_ranks:
        msg = f"rank is {command.rank}; it must be from 0 to {num_ranks - 1} for ranks that call apart"
        raise InvalidError(msg, resource="rank", need=command.rank, limit=num_ranks - 1)
    place = Place(command.engine, command.rank)
    other = state.ranks.worker_at(place)
    if other is not None:
        msg = (
            f"worker {other} is already rank {command.rank} of this engine; end its process or detach it, or attach "
            "under another engine or rank"
        )
        raise WrongStateError(msg, resource="rank", rule="rank_is_there")
    state.ranks.sit(command.worker_id, place)


def end_worker(state: CacheState, command: Detach | WorkerDied, now: float) -> Outcome:
    """End a worker with its waiting calls, leases and magazine; ending it a second time changes nothing."""
    worker_id = command.worker_id
    if state.workers.pop(worker_id, None) is None:
        if isinstance(command, Detach):
            raise UnknownWorkerError
        return Outcome(reply=Detached(num_leases=0))
    for waiter in [waiter for waiter in state.waiting if waiter.worker_id == worker_id]:
        state.waiting.leave(waiter.ticket)
        state.wake(waiter.ticket, UnknownWorkerError("the worker ended while the call waited"))
    for asking in [one for one in state.asking.values() if one.waiter.worker_id == worker_id]:
        del state.asking[asking.waiter.ticket]
        state.wake(
            asking.waiter.ticket, UnknownWorkerError("the worker ended while the call waited")
        )
    end = End.DETACHED if isinstance(command, Detach) else End.DIED
    lease_ids = sorted(state.leases.by_worker.get(worker_id, ()))
    for lease_id in lease_ids:
        lease = state.leases.by_id[lease_id]
        if not part(state, lease, worker_id, now):
            end_lease(state, lease, end)
    state.leases.by_worker.pop(worker_id, None)
    state.ranks.rise(worker_id)
    magazine = state.magazines.part(worker_id)
    if magazine is not None:
        _end_magazine(state, magazine)
    return Outcome(reply=Detached(num_leases=len(lease_ids)))


def _end_magazine(state: CacheState, magazine: Magazine) -> None:
    """Let go of all blocks in a magazine whose last process has ended; private ones are free at once.

    If no process has used the magazine since the control process started anew, its blocks do not stay cached.
    """
    device = state.device
    blocks = state.magazines.close(magazine)
    in_token_order = blocks[device.records.position[blocks].argsort(kind="stable")]
    device.let_go(in_token_order)
    if not magazine.is_vouched:
        evict_blocks(state, device.evictable(in_token_order))


def heartbeat(state: CacheState, command: Heartbeat, now: float) -> Outcome:
    """Renew the leases that a worker still knows, and end those that it has lost.

    The answer has the newest id issued. With it, the worker's next heartbeat can cover leases whose answers never
    reached the worker; the client's `Session` tells why that is safe.
    """
    state.tenant_of(command.worker_id)
    own = state.leases.by_worker.get(command.worker_id, set())
    unknown = [lease_id for lease_id in command.lease_ids if lease_id not in own]
    kept = own.intersection(command.lease_ids)
    for lease_id in kept:
        renew(state, state.leases.by_id[lease_id], now)
    others = (state.leases.by_id[lease_id] for lease_id in own - kept)
    orphans = [
        lease
        for lease in others
        if lease.phase is not Phase.LOADING
        and _known_as(lease, command.worker_id) <= command.newest_lease_id
    ]
    for lease in orphans:
        if not part(state, lease, command.worker_id, now):
            end_lease(state, lease, End.ORPHANED)
        state.counters["leases_orphaned"] += 1
    return Outcome(
        reply=Beat(
            unknown_lease_ids=np.array(unknown, np.int64).tobytes(),
            num_orphans_ended=len(orphans),
            newest_lease_id=LeaseId(state.id_count.newest),
        )
    )


def _known_as(lease: Lease, worker_id: WorkerId) -> LeaseId:
    """Return the id under which a worker was told of a lease."""
    if lease.members is None:
        return lease.lease_id
    return lease.members.present[worker_id].joined_id
