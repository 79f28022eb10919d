"""Own what becomes of leases and calls that wait for a copy that does not bring what they wait for, or not first.

Damaged slots are retired, so that other tiers may still serve; a tier from which nothing came is not tried again for
the same call. New leases start over with what there is then, or go without the copy when their time is up; an evicted
lease whose own bytes are damaged ends.
"""

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import CopyFailedError, KVLeaseError
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.commands import Fork, Reserve
from kvleased.core.effects import Direction, Reply, Tier
from kvleased.core.frames import without_frames
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import End, Phase
from kvleased.core.prefix.overtaking import waiting_for
from kvleased.core.state import CacheState, split_keys
from kvleased.core.tier.flights import SOURCE_TIERS, Flight
from kvleased.core.verbs.ending import end_lease, forget_lease
from kvleased.core.verbs.joining import attempt_joint_reserve, request_of
from kvleased.core.verbs.moving import here
from kvleased.core.verbs.parting import calls_beside
from kvleased.core.verbs.seating import can_still_fit
from kvleased.core.waiting import Waiter

_STAYS: Final = (
    "bytes that the host pool had of the lease's blocks do not match their checksum; the lease is where it was, and "
    "another evict after retry_after_ms copies all of them"
)
_ENDED: Final = "bytes of the lease do not match their checksum, so it ended; reserve again"


def retire_sources(state: CacheState, flight: Flight, failed: NDArray[np.bool_]) -> None:
    """Take damaged slots out of use, and end the evicted leases whose bytes they had.

    Nothing is retired for the remote store, which may forget anything, nor for a copy down to a store, whose sources
    stay where they are.
    """
    if flight.direction is Direction.FETCH:
        state.counters["remote_misses"] += int(np.count_nonzero(failed))
    elif flight.direction is Direction.LOAD:
        state.counters["disk_failures"] += _retire(state.disk, flight.sources[failed])
    elif flight.direction is Direction.RELOAD:
        damaged = flight.sources[failed]
        state.counters["checksum_failures"] += _retire(state.host, damaged)
        error = CopyFailedError(_ENDED, resource="lease")
        for lease in list(state.leases.by_id.values()):
            is_below = lease.phase in (Phase.EVICTED, Phase.RELOADING)
            if is_below and np.isin(state.leases.blocks_of(lease), damaged).any():
                end_lease(state, lease, End.DAMAGED, error)
    else:
        assert flight.direction in (Direction.STORE, Direction.SHARE), "nothing else is verified"
        tier = Tier.DISK if flight.direction is Direction.STORE else Tier.REMOTE
        state.counters[f"{tier.value}_store_failures"] += int(np.count_nonzero(failed))


def _retire(pool: Pool, damaged: Ids) -> int:
    """Retire the slots that are still in use, and return how many they are."""
    in_use = _in_use(pool, damaged)
    pool.retire(in_use)
    return len(in_use)


def _in_use(pool: Pool, slots: Ids) -> Ids:
    """Return the slots that are still in use: others were retired meanwhile, or forgotten with their store."""
    in_use: Ids = slots[np.isin(pool.records.state[slots], (State.READY, State.RESERVED))]
    return in_use


def disappoint(state: CacheState, flight: Flight, error: KVLeaseError, now: float) -> None:
    """Part all leases and callers from a flight that did not bring what they wait for.

    Leases whose own bytes are damaged have ended by now; the others only waited for the wrong copy.
    """
    state.wake_caller(flight, error)
    source_pool, _ = state.ends(flight.direction)
    is_retired = bool((source_pool.records.state[flight.sources] == State.BAD).any())
    for lease in waiting_for(state, flight):
        lease.pending.clear()
        if isinstance(lease.request, Fork) and lease.phase is Phase.LOADING:
            # Without the bytes, a fork is worth nothing.
            forget_lease(state, lease, error)
        elif lease.phase is Phase.LOADING:
            if not is_retired:
                lease.skipped |= {SOURCE_TIERS[flight.direction]}
                lease.unserved_keys |= frozenset(split_keys(flight.remote_keys))
            _start_over(state, lease)
        elif lease.phase is Phase.EVICTING:
            _call_off(state, lease, Phase.ACTIVE, error, now)
        else:
            _call_off(state, lease, Phase.EVICTED, error, now)


def stays(state: CacheState, lease: Lease, now: float) -> bool:
    """Leave a lease that was about to be evicted on the device if a slot that was to keep its bytes was damaged since.

    Only slots that had the bytes of cached blocks before can be, through another copy that read them. Returns False,
    and does nothing, for other leases.
    """
    if lease.phase is not Phase.EVICTING:
        return False
    if not (state.host.records.state[lease.moving_to] == State.BAD).any():
        return False
    error = CopyFailedError(_STAYS, resource="copies", retry_after_ms=state.shape.retry_after_ms)
    _call_off(state, lease, Phase.ACTIVE, error, now)
    return True


def go_without(state: CacheState, lease: Lease, error: KVLeaseError, now: float) -> bool:
    """Grant the calls for a new lease whose time is up while it loads, with what the device alone has of its prefix.

    If there is no room for that, they are refused with the error. Returns False, and does nothing, for other leases.
    """
    if lease.phase is not Phase.LOADING or not isinstance(lease.request, Reserve):
        return False
    for waiter in _waiters(state, lease):
        assert isinstance(waiter.command, Reserve), "it is the one of the lease"
        at_once = replace(waiter, command=replace(waiter.command, wait_ms=0))
        result: Reply | Lease | KVLeaseError | None
        try:
            result = attempt_joint_reserve(state, at_once, now)
        except KVLeaseError as refusal:
            result = without_frames(refusal)
        assert not isinstance(result, Lease), "nothing loads for who cannot wait"
        state.wake(waiter.ticket, result or error)
    return True


def _start_over(state: CacheState, lease: Lease) -> None:
    """Put the calls for a new lease back at the head of the line, each by itself and in their order.

    Those for more than may be granted by now are refused: they would hold up all others for as long as they may wait.
    """
    for waiter in reversed(_waiters(state, lease)):
        if can_still_fit(state, waiter):
            state.waiting.rejoin(waiter)


def _waiters(state: CacheState, lease: Lease) -> list[Waiter]:
    """End a new lease that nobody knows of, and return a waiter for each call that waits for it, in their order."""
    request, ticket = lease.request, lease.ticket
    assert isinstance(request, Reserve), "nobody loads after a restart"
    assert ticket is not None, "a loading lease ends with its caller"
    calls = calls_beside(state, lease)
    lease.ticket = None
    forget_lease(state, lease)
    waiter = Waiter(
        ticket=ticket,
        command=request,
        worker_id=lease.worker_id,
        deadline=lease.ticket_deadline,
        skipped=lease.skipped,
        unserved_keys=lease.unserved_keys,
        untold=lease.untold,
        brought=lease.brought,
    )
    waiters = []
    for call in calls:
        own = replace(request, worker_id=call.worker_id)
        name = request_of(state, own)
        waiters.append(
            replace(waiter, ticket=call.ticket, command=own, worker_id=call.worker_id,
                    deadline=call.deadline, request=name)
        )  # fmt: skip
    return waiters or [waiter]


def _call_off(
    state: CacheState, lease: Lease, phase: Phase, error: KVLeaseError, now: float
) -> None:
    pool = state.host if phase is Phase.ACTIVE else state.device
    pool.let_go(lease.moving_to)
    lease.deadline = now + state.shape.lease_seconds
    state.leases.enter(lease, phase)
    ticket, lease.ticket = lease.ticket, None
    command, lease.next_reload = lease.next_reload, None
    state.wake(ticket, error if command is None else here(state, lease))
