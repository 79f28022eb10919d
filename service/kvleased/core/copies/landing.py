"""Own the ends of copies: what becomes of the targets, of the leases that wait for them, and of the callers.

Cases at the end of a flight:
- done: keyed targets are published, private ones go to their lease, or to nobody if the lease has ended meanwhile;
- done, but some bytes were not there or did not match their checksum or label: those sources are retired; new leases
  that wait for the flight start over, without the retired bytes; an evicted lease that needed them ends, and
  its worker recomputes;
- failed, as the mover says: the targets are free again; an evicted lease is still in the host pool,
  a lease on its way there is still on the device, and new leases start over without the tier from
  which the bytes were to come;
- lost, because the mover says nothing: the same for the leases, but both ends stay held until it speaks or is dead.
"""

from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import CopyFailedError, KVLeaseError
from kvleased.core.admission.granting import count_grant, reserved
from kvleased.core.admission.refusals import flight_late, lease_late
from kvleased.core.admission.room import evict_blocks
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import Event
from kvleased.core.commands import (
    Cancel,
    CopyDone,
    CopyFailed,
    CopyLost,
    Fork,
    MoverDied,
    Reload,
    Reserve,
    Tick,
)
from kvleased.core.copies.mishaps import disappoint, go_without, retire_sources, stays
from kvleased.core.effects import MOVER_OF, Direction, Done, Evicted, Outcome, Reloaded
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.prefix.overtaking import overtake, waiting_for
from kvleased.core.prefix.regrets import look_back
from kvleased.core.state import CacheState, chosen_keys
from kvleased.core.tier.flights import HELD_BY_LEASES, PREFETCHES, SOURCE_TIERS, Flight, Purpose
from kvleased.core.verbs.asking import end_asking
from kvleased.core.verbs.ending import expire, forget_lease
from kvleased.core.verbs.forking import finish_fork
from kvleased.core.verbs.moving import finish_evict, finish_reload
from kvleased.core.verbs.parting import end_late_evicts, hang_up, shed_late
from kvleased.core.verbs.seating import can_still_fit, end_waits
from kvleased.core.waiting import Waiter

Marks = NDArray[np.bool_]
"""One for each pair of a copy."""

_COUNTED: Final = {
    Purpose.WRITE_BACK: "offloads",
    Purpose.DISPLACE: "offloads",
    Purpose.CLEAN: "offloads",
    Purpose.LOAD: "reloads",
    Purpose.PREFETCH: "reloads",
    Purpose.DISK_PREFETCH: "disk_loads",
    Purpose.DISK_LOAD: "disk_loads",
    Purpose.REMOTE_LOAD: "remote_loads",
    Purpose.STORE: "disk_stores",
    Purpose.SHARE: "remote_stores",
}
"""The counters of blocks that arrived; blocks that leases take along are counted when the leases arrive."""


def copy_done(state: CacheState, command: CopyDone, now: float) -> Outcome:
    """Take over what a finished copy brought."""
    flight = state.flights.pop(command.copy_id, None)
    if flight is None:
        state.counters["copies_unknown"] += 1
        return Outcome(reply=Done())
    if flight.is_lost:
        _let_go_of_lost(state, flight)
        return Outcome(reply=Done())
    _check_generations(state, flight)
    if flight.direction is Direction.SCRUB:
        state.device.records.tenant[flight.targets] = 0
        state.device.end(flight.targets, Event.SCRUBBED)
        return Outcome(reply=Done())
    land = partial(_land, state, flight, command, now)
    state.unsettled.do(land, apart=_is_apart(state, flight, command))
    return Outcome(reply=Done())


def _is_apart(state: CacheState, flight: Flight, command: CopyDone) -> bool:
    """Tell whether a copy is so large that it ends in parts; not if calls wait anew, for nothing would serve them."""
    if flight.num_pairs <= state.shape.blocks_at_once:
        return False
    # A new lease may also have joined the copy of a lease that comes back.
    waiting = waiting_for(state, flight)
    starts_over = command.failed and any(lease.phase is Phase.LOADING for lease in waiting)
    return not starts_over and not any(lease.next_reload for lease in waiting)


def _land(state: CacheState, flight: Flight, command: CopyDone, now: float) -> None:
    """Take over what came, and report what did not; those who wait are told last, for a large copy in another part."""
    _unlist_loading(state, flight)
    failed = None
    if command.failed:
        failed = np.zeros(flight.num_pairs, np.bool_)
        failed[list(command.failed)] = True
        error = CopyFailedError("some bytes did not match their checksum; recompute them")
        retire_sources(state, flight, failed)
        disappoint(state, flight, error, now)
    if len(flight.targets):
        _take_over(state, flight, failed, command.checksums)
    if flight.direction is Direction.STORE:
        state.suspects.wrote(flight.targets)
    if state.dirt.is_any:
        good = np.ones(flight.num_pairs, np.bool_) if failed is None else ~failed
        state.dirt.landed(flight, good, now)
        if flight.direction is Direction.SHARE:
            _note_shared(state, flight, good)
    settle = partial(_settle, state, flight, failed, now)
    state.unsettled.do(settle, apart=_is_apart(state, flight, command))


def copy_failed(state: CacheState, command: CopyFailed, now: float) -> Outcome:
    """Undo a copy after its mover has said that it writes no more of it."""
    flight = state.flights.pop(command.copy_id, None)
    if flight is None:
        state.counters["copies_unknown"] += 1
    else:
        _come_to_nothing(state, flight, now)
    return Outcome(reply=Done())


def copy_lost(state: CacheState, command: CopyLost, now: float) -> Outcome:
    """Give up waiting for a copy that may still be writing; both its ends stay held."""
    flight = state.flights.get(command.copy_id)
    if flight is not None and not flight.is_lost:
        state.counters["copies_lost"] += 1
        late = CopyFailedError("the copy did not end in time", resource="copies")
        doubt(state, flight, late, now)
    return Outcome(reply=Done())


def doubt(state: CacheState, flight: Flight, error: KVLeaseError, now: float) -> None:
    """Expect nothing more of a copy that may still be writing: whatever its mover says later, it counts as failed."""
    _unlist_loading(state, flight)
    flight.is_lost = True
    state.dirt.failed(flight, now)
    disappoint(state, flight, error, now)
    _, target_pool = state.ends(flight.direction)
    target_pool.change(flight.targets, Event.DOUBT)


def mover_died(state: CacheState, command: MoverDied, now: float) -> Outcome:
    """End all copies in flight of a dead mover, which no longer writes their targets."""
    for copy_id, flight in list(state.flights.items()):
        if MOVER_OF[flight.direction] is not command.mover:
            continue
        del state.flights[copy_id]
        _come_to_nothing(state, flight, now)
    return Outcome(reply=Done())


# Targets ----------------------------------------------------------------------------------------------------------


def _take_over(state: CacheState, flight: Flight, failed: Marks | None, checksums: bytes) -> None:
    """Make the targets what they were copied for, except those that failed."""
    source_pool, target_pool = state.ends(flight.direction)
    if checksums:
        values = np.frombuffer(checksums, np.uint64)
        target_pool.records.checksum[flight.targets] = values
    elif flight.direction in (Direction.OFFLOAD, Direction.FETCH):
        target_pool.records.checksum[flight.targets] = 0
    else:
        target_pool.records.checksum[flight.targets] = source_pool.records.checksum[flight.sources]
    keyed, private = flight.keyed, flight.targets
    if failed is not None:
        keyed = keyed & ~failed
    if failed is not None or keyed.any():
        private = private[~(keyed if failed is None else keyed | failed)]
    if keyed.any():
        keys, targets = state.keys_of(flight, keyed), flight.targets[keyed]
        is_new = target_pool.index.find(keys) < 0
        if is_new.any():
            if state.dirt.shares:
                target_pool.records.is_remote[targets[is_new]] = False
            new_keys, new = chosen_keys(keys, is_new), targets[is_new]
            target_pool.publish(new, new_keys, Event.FILLED)
            if state.loading and target_pool is state.device:
                overtake(state, new_keys, new)
        private = np.concatenate([private, targets[~is_new]])
    if len(private):
        target_pool.change(private, Event.RESTORED)


def _settle(state: CacheState, flight: Flight, failed: Marks | None, now: float) -> None:
    _let_go(state, flight, failed)
    num_good = flight.num_pairs - (0 if failed is None else int(np.count_nonzero(failed)))
    if flight.purpose in _COUNTED:
        state.counters[_COUNTED[flight.purpose]] += num_good
    if flight.purpose is Purpose.DISPLACE:
        leaving = state.device.evictable(flight.sources)
        evict_blocks(state, leaving, flight.why)
        num_evicted = flight.num_before + len(leaving)
        state.wake(flight.ticket, Evicted(num_evicted=num_evicted, num_offloaded=num_good))
    if flight.purpose in PREFETCHES:
        _count_prefetched(state, flight, num_good)
    for lease in waiting_for(state, flight):
        lease.pending.discard(flight.copy_id)
        if not lease.pending and not stays(state, lease, now):
            _advance_lease(state, lease, flight, now)


def _let_go(state: CacheState, flight: Flight, failed: Marks | None) -> None:
    """Let go of both ends of a finished copy; if it moved a lease, only after the answer."""
    source_pool, target_pool = state.ends(flight.direction)
    good = flight.targets
    if failed is not None and len(good):
        target_pool.end(good[failed], Event.FAIL)
        good = good[~failed]
    if flight.purpose in HELD_BY_LEASES:
        source_pool.copies[flight.sources] -= 1
        state.unsettled.left += [(source_pool, flight.sources, False), (target_pool, good, False)]
    else:
        source_pool.let_go_of_copied(flight.sources, is_use=flight.is_use)
        target_pool.let_go(good)


def _count_prefetched(state: CacheState, flight: Flight, num_copied: int) -> None:
    """Answer the call that waits for cached blocks, unless others of them are still coming from another tier."""
    num_reloaded = flight.num_before + num_copied
    for other in state.flights.values():
        if other.ticket == flight.ticket and other.purpose in PREFETCHES:
            other.num_before = num_reloaded
            return
    reply = Reloaded(block_ids=b"", num_reloaded=num_reloaded, num_tokens=0, row=0)
    state.wake(flight.ticket, reply)


def _advance_lease(state: CacheState, lease: Lease, flight: Flight, now: float) -> None:
    ticket, lease.ticket = lease.ticket, None
    if isinstance(lease.request, Fork) and lease.phase is Phase.LOADING:
        state.wake(ticket, finish_fork(state, lease, now))
    elif lease.phase is Phase.LOADING:
        assert isinstance(lease.request, Reserve), "nobody loads after a restart"
        count_grant(state, lease, lease.request)
        lease.brought, lease.granted_at, lease.deadline = (), now, now + state.shape.lease_seconds
        state.leases.enter(lease, Phase.ACTIVE)
        state.wake(ticket, reserved(state, lease))
    elif lease.phase is Phase.EVICTING:
        evicted = finish_evict(state, lease, flight.sources, now)
        command, lease.next_reload = lease.next_reload, None
        if command is None:
            state.wake(ticket, evicted)
        else:
            assert ticket is not None, "a reload that nobody waits for any more is forgotten"
            _turn_back(state, lease, command, ticket)
    else:
        assert lease.phase is Phase.RELOADING
        state.wake(ticket, finish_reload(state, lease, now))


def _turn_back(state: CacheState, lease: Lease, command: Reload, ticket: int) -> None:
    """Let the call that asked to reload a lease on its way down wait for room, as if it came only now."""
    waiter = Waiter(
        ticket=ticket, command=command, worker_id=lease.worker_id, deadline=lease.ticket_deadline
    )
    if can_still_fit(state, waiter):
        state.waiting.join(waiter)


def _come_to_nothing(state: CacheState, flight: Flight, now: float) -> None:
    if flight.is_lost:
        _let_go_of_lost(state, flight)
    else:
        _fail(state, flight, now)
    _suspect(state, flight)


def _fail(state: CacheState, flight: Flight, now: float) -> None:
    state.counters["copies_failed"] += 1
    state.tell("copy_failed", num_blocks=flight.num_pairs)
    _unlist_loading(state, flight)
    state.dirt.failed(flight, now)
    text = "the copy failed, and the blocks that it was to move are where they were; try again after retry_after_ms"
    error = CopyFailedError(text, resource="copies", retry_after_ms=state.shape.retry_after_ms)
    disappoint(state, flight, error, now)
    source_pool, target_pool = state.ends(flight.direction)
    source_pool.let_go_of_copied(flight.sources, is_use=flight.is_use)
    target_pool.end(flight.targets, Event.FAIL)


def _let_go_of_lost(state: CacheState, flight: Flight) -> None:
    source_pool, target_pool = state.ends(flight.direction)
    source_pool.let_go_of_copied(flight.sources, is_use=flight.is_use)
    target_pool.let_go(flight.targets)
    state.dirt.is_due = state.dirt.is_any


def _suspect(state: CacheState, flight: Flight) -> None:
    """Take disk slots to which a copy failed after all others from now on; retire those that are bad."""
    if flight.direction is Direction.STORE:
        bad = state.suspects.failed(flight.targets)
        state.counters["disk_failures"] += len(bad)
        state.disk.retire(bad)
        state.disk.put_last(flight.targets)


def _note_shared(state: CacheState, flight: Flight, good: NDArray[np.bool_]) -> None:
    """Note for all blocks with the copied keys, in every pool, that the remote store has their bytes."""
    keys = state.keys_of(flight, good)
    for pool, remote in zip(state.pools, state.dirt.remote, strict=True):
        remote[pool.cached(keys)] = True
    # A copied slot may have been found damaged meanwhile, and another one have its key.
    state.dirt.share[state.host.cached(keys)] = False


def _check_generations(state: CacheState, flight: Flight) -> None:
    for pool, ids, generations in _recorded(state, flight):
        # Comparing bytes takes a fraction of the time of comparing elements.
        assert pool.records.generation[ids].tobytes() == generations.tobytes(), (
            "reused while a copy was in flight"
        )


def _recorded(state: CacheState, flight: Flight) -> list[tuple[Pool, Ids, NDArray[np.uint64]]]:
    source_pool, target_pool = state.ends(flight.direction)
    return [
        (source_pool, flight.sources, flight.source_generations),
        (target_pool, flight.targets, flight.target_generations),
    ]


def _unlist_loading(state: CacheState, flight: Flight) -> None:
    if flight.direction in SOURCE_TIERS and not flight.is_lost and flight.keyed.any():
        state.loading.discard(flight.targets[flight.keyed])


# Time -------------------------------------------------------------------------------------------------------------


def tick(state: CacheState, command: Tick, now: float) -> Outcome:
    """Expire leases that were not renewed, and answer callers whose time is up."""
    del command
    state.dirt.is_due = state.dirt.is_any
    state.history.tick()
    look_back(state)
    end_asking(state, now)
    end_waits(state, now)
    for lease in list(state.leases.by_id.values()):
        if lease.members is not None:
            end_late_evicts(state, lease.members, now)
        if lease.ticket is not None and lease.ticket_deadline <= now:
            error = lease_late(state, lease)
            is_answered = any(do(state, lease, error, now) for do in (shed_late, go_without))
            if not is_answered:
                _give_up(state, lease, error)
        elif lease.deadline <= now and lease.phase in (Phase.ACTIVE, Phase.EVICTED):
            expire(state, lease)
    for flight in state.flights.values():
        if flight.ticket is not None and flight.ticket_deadline <= now:
            state.wake_caller(flight, flight_late(state, flight))
    return Outcome(reply=Done())


def _give_up(state: CacheState, lease: Lease, error: KVLeaseError | None) -> None:
    ticket, lease.ticket = lease.ticket, None
    lease.next_reload = None
    if error is not None:
        state.wake(ticket, error)
    else:
        state.beside.pop(ticket or 0, None)
    if lease.phase is Phase.LOADING:
        forget_lease(state, lease)


def cancel(state: CacheState, command: Cancel, now: float) -> Outcome:
    """Forget a waiting caller, and end the lease, if any, that only this caller would have learned of."""
    del now
    if (
        state.waiting.leave(command.ticket) is not None
        or state.asking.pop(command.ticket, None) is not None
        or hang_up(state, command.ticket)
    ):
        return Outcome(reply=Done())
    for lease in list(state.leases.by_id.values()):
        if lease.ticket == command.ticket:
            _give_up(state, lease, None)
    for flight in state.flights.values():
        if flight.ticket == command.ticket:
            flight.ticket = None
    return Outcome(reply=Done())
