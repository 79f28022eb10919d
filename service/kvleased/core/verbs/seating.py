"""Own when calls are served: each is served at once, waits for its turn, or is refused with numbers."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Final

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.ids import LeaseId, WorkerId
from kvleased.core.admission.fitting import check_comes_back
from kvleased.core.admission.granting import (
    attempt_reserve,
    check_reserve,
    check_tokens,
    num_missing,
)
from kvleased.core.admission.refusals import busy, draining, refusal, superseded
from kvleased.core.admission.shortages import shortage
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.effects import Notice, Outcome, Reply
from kvleased.core.frames import without_frames
from kvleased.core.lease.leases import Lease
from kvleased.core.reasons import OF_TENANT
from kvleased.core.shape import WAIT_MS_MAX
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import check_tokens_fit, is_held_back
from kvleased.core.verbs.ending import settle
from kvleased.core.verbs.joining import (
    attempt_joint_extend,
    attempt_joint_reload,
    attempt_joint_reserve,
    request_of,
)
from kvleased.core.waiting import Waitable, Waiter

_SHARE_OF_PLACES: Final = 2
"""While others are attached, one tenant may have the number of places to wait divided by this."""

_Attempt = Callable[[CacheState, Waiter, float], Reply | Lease | None]

_ATTEMPTS: Final[dict[type[Waitable], _Attempt]] = {
    Reserve: attempt_joint_reserve,
    Extend: attempt_joint_extend,
    Reload: attempt_joint_reload,
}


def seat(state: CacheState, command: Waitable, worker_id: WorkerId, now: float) -> Outcome:
    """Serve a call, or let it wait if it may and there is a place to wait."""
    if command.wait_ms or state.is_draining:
        check_call(state, command)
    if isinstance(command, Reserve) and _is_served_now(state, command):
        reply = attempt_reserve(state, command, now)
        if reply is None:
            raise refusal(state, new_waiter(state, command, worker_id, now), 0)
        assert not isinstance(reply, Lease), "nothing loads for who cannot wait"
        return Outcome(reply=reply)
    return seat_waiter(state, new_waiter(state, command, worker_id, now), now)


def seat_apart(state: CacheState, command: Waitable, worker_id: WorkerId, now: float) -> Outcome:
    """Seat a call as `seat` does, but as an unsettled part of its own; the answer, or a refusal, comes later."""
    check_call(state, command)
    waiter = new_waiter(state, command, worker_id, now)
    state.unsettled.parts.append(partial(_serve_apart, state, waiter, now))
    return Outcome(ticket=waiter.ticket)


def _serve_apart(state: CacheState, waiter: Waiter, now: float) -> None:
    result: Reply | KVLeaseError | None
    try:
        result = seat_waiter(state, waiter, now).reply
    except KVLeaseError as error:
        result = without_frames(error)
    if result is not None:
        state.wake(waiter.ticket, result)


def _is_served_now(state: CacheState, command: Reserve) -> bool:
    """Tell whether a new request is granted or refused at once: it may not wait, no call does, and no ranks call apart.

    Its call then needs no Waiter, which saves an object in the verb that is called most.
    """
    return not (command.wait_ms or state.waiting.by_ticket or state.ranks.places)


def new_waiter(state: CacheState, command: Waitable, worker_id: WorkerId, now: float) -> Waiter:
    """Return a Waiter, which stands for a call until the call is answered."""
    waiter = Waiter(
        ticket=state.next_id(),
        command=command,
        worker_id=worker_id,
        deadline=now + command.wait_ms / 1000,
    )
    if state.ranks.places and isinstance(command, Reserve):
        waiter.request = request_of(state, command)
    return waiter


def seat_waiter(state: CacheState, waiter: Waiter, now: float) -> Outcome:
    """Do what `seat` does for a call that has a Waiter already, and whose turn comes after those that wait."""
    command, num_ahead = waiter.command, 0
    if state.waiting.by_ticket:
        _weigh(state, waiter)
        num_ahead = _num_ahead(state, waiter, now)
    result = None if num_ahead else _ATTEMPTS[type(command)](state, waiter, now)
    if result is None:
        return _wait(state, waiter, num_ahead or _num_ahead_since(state, waiter, now))
    if state.waiting.by_ticket:
        state.waiting.serve(waiter)
        _answer_mates(state, waiter, now)
    if isinstance(result, Lease):
        return Outcome(ticket=waiter.ticket)
    return Outcome(reply=result)


def check_call(state: CacheState, command: Waitable) -> None:
    """Refuse a call with a wrong `wait_ms`, and a Reserve while the cache drains."""
    if not 0 <= command.wait_ms <= WAIT_MS_MAX:
        msg = f"wait_ms is {command.wait_ms}; it must be from 0 to {WAIT_MS_MAX}"
        raise InvalidError(msg, resource="wait_ms", need=command.wait_ms, limit=WAIT_MS_MAX)
    if state.is_draining and isinstance(command, Reserve):
        raise draining(state)


def _weigh(state: CacheState, waiter: Waiter) -> None:
    """Note to which tenant's share a new request counts, and its cost there."""
    command = waiter.command
    if isinstance(command, Reserve):
        waiter.tenant = state.workers[waiter.worker_id]
        waiter.cost = sum(state.covering.most(command.num_tokens)) / state.weight_of(waiter.tenant)


def _wait(state: CacheState, waiter: Waiter, num_ahead: int) -> Outcome:
    """Let a call that cannot be served yet wait, or refuse it."""
    if not waiter.command.wait_ms:
        raise refusal(state, waiter, num_ahead)
    if not supersede_waiting(state, waiter):
        # A call that replaces an earlier call of its request needs no place of its own.
        _check_places(state, waiter, num_ahead)
    _weigh(state, waiter)
    state.waiting.join(waiter)
    state.effects.append(
        Notice(
            kind="call_waiting",
            worker_id=waiter.worker_id,
            lease_id=waiter.lease_id or LeaseId(0),
            num_blocks=shortage(state, waiter, num_ahead).need,
        )
    )
    return Outcome(ticket=waiter.ticket)


def _check_places(state: CacheState, waiter: Waiter, num_ahead: int) -> None:
    """Refuse a call if all places to wait, or all that its tenant may have, are taken."""
    waiting, workers = state.waiting, state.workers
    if state.is_crowded:
        raise busy(state, waiter, num_ahead, len(waiting), waiting.max_waiting)
    tenant = workers[waiter.worker_id]
    if set(workers.values()) == {tenant}:
        return
    limit = max(1, waiting.max_waiting // _SHARE_OF_PLACES)
    num_own = sum(workers[other.worker_id] == tenant for other in state.callers)
    if num_own >= limit:
        raise busy(state, waiter, num_ahead, num_own, limit)


def pump(state: CacheState, now: float) -> None:
    """Serve waiting calls in their order until one cannot be served yet, passing over tenants that are held back."""
    while _serve_once(state, now):
        pass


def _serve_once(state: CacheState, now: float) -> bool:
    """Serve waiting calls once; return true if one that cannot be served yet made blocks free behind others."""
    passed: set[int] = set()
    for waiter in state.waiting.ordered(now):
        if waiter.is_answered:
            continue
        tenant = state.workers[waiter.worker_id]
        if tenant in passed:
            continue
        num_free = state.device.num_free
        try:
            result = _ATTEMPTS[type(waiter.command)](state, waiter, now)
        except KVLeaseError as error:
            state.waiting.leave(waiter.ticket)
            state.wake(waiter.ticket, without_frames(error))
            continue
        if result is None:
            if passed and state.device.num_free > num_free:
                return True
            if not _is_passed(state, waiter):
                return False
            passed.add(tenant)
            continue
        state.waiting.serve(waiter)
        if not isinstance(result, Lease):
            state.wake(waiter.ticket, result)
        _answer_mates(state, waiter, now)
        if state.unsettled.parts:
            # The next call must see which blocks this one has taken.
            settle(state)
    return False


def _answer_mates(state: CacheState, waiter: Waiter, now: float) -> None:
    """Let other ranks' waiting calls for a request that was just served share its lease at once."""
    if waiter.request is None:
        return
    for mate in [one for one in state.waiting if one.request == waiter.request]:
        mate.is_answered = True
        state.waiting.leave(mate.ticket)
        result = attempt_joint_reserve(state, mate, now)
        assert result is not None, "the lease is there"
        if not isinstance(result, Lease):
            state.wake(mate.ticket, result)


def _num_ahead(state: CacheState, waiter: Waiter, now: float) -> int:
    """Count the calls that would be served before this one, without those of other tenants that are held back."""
    num_ahead = state.waiting.num_ahead(waiter, now)
    if not state.keeps_rows:
        return num_ahead
    tenant = state.workers[waiter.worker_id]
    return sum(
        state.workers[other.worker_id] == tenant or not _is_passed(state, other)
        for other in islice(state.waiting.ordered(now), num_ahead)
    )


def _num_ahead_since(state: CacheState, waiter: Waiter, now: float) -> int:
    """Count the calls ahead once more after a failed try, which may have made blocks unavailable to the others.

    Those calls are then no longer held back by limits alone, so this call comes behind them.
    """
    return _num_ahead(state, waiter, now) if state.waiting.by_ticket else 0


def _is_passed(state: CacheState, waiter: Waiter) -> bool:
    """Tell whether a call waits only because of its tenant's limits, so that other tenants' calls may pass it."""
    if not state.keeps_rows:
        return False
    lack = shortage(state, waiter, 0)
    if lack.reason in OF_TENANT:
        return True
    return state.is_limited and is_held_back(
        state, state.workers[waiter.worker_id], lack.need, lack.prefix.blocks
    )


def can_still_fit(state: CacheState, waiter: Waiter) -> bool:
    """Tell whether a call can ever be granted; if not, because of a drain, or of other limits or pools, refuse it."""
    try:
        _check_fits(state, waiter.command)
    except KVLeaseError as error:
        state.wake(waiter.ticket, without_frames(error))
        return False
    return True


def _check_fits(state: CacheState, command: Waitable) -> None:
    """Refuse a call that can never be granted."""
    if isinstance(command, Reserve):
        check_call(state, command)
        check_reserve(state, command)
        return
    # The end of a lease ends its waiting calls, too.
    lease = state.leases.by_id[command.lease_id]  # type: ignore[index]  # a Reload of keys never waits
    if isinstance(command, Reload):
        check_comes_back(state, lease)
        return
    check_tokens(state, command.num_tokens, lease.tenant, lease)
    if state.is_limited and num_missing(state, lease, command.num_tokens) > 0:
        check_tokens_fit(state, lease.tenant, command.num_tokens)


def end_waits(state: CacheState, now: float) -> None:
    """Refuse the waiting calls whose time is up."""
    late = [at for at in enumerate(state.waiting.ordered(now)) if at[1].deadline <= now]
    for num_ahead, waiter in late:
        state.wake(waiter.ticket, refusal(state, waiter, num_ahead, now - waiter.since))
        state.counters["waits_refused"] += 1
    for _, waiter in late:
        state.waiting.leave(waiter.ticket)


def supersede_waiting(state: CacheState, waiter: Waiter) -> bool:
    """Answer an earlier waiting call of the same request, as this one replaces it; tell whether there was one."""
    command = waiter.command
    if not isinstance(command, Reserve):
        return False
    others = [
        other
        for other in state.waiting
        if isinstance(other.command, Reserve)
        and other.command.request_id == command.request_id
        and other.worker_id == waiter.worker_id
    ]
    for other in others:
        state.waiting.leave(other.ticket)
        state.wake(other.ticket, superseded(state, command.wait_ms))
    return bool(others)
