"""Own who is served when: a call is served at once, or waits for its turn, or is refused with numbers."""

from collections.abc import Callable
from typing import Final

from kvlease.errors import BusyError, DrainingError, InvalidError, KVLeaseError, PoolFullError
from kvlease.ids import WorkerId
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.effects import Outcome, Reply
from kvleased.core.granting import attempt_extend, attempt_reserve, blocks_for
from kvleased.core.leases import Lease
from kvleased.core.moving import attempt_reload
from kvleased.core.room import num_available
from kvleased.core.search import match
from kvleased.core.state import CacheState
from kvleased.core.waiting import Waitable, Waiter

WAIT_MS_MAX: Final = 600_000
"""Ten minutes: the longest that a call may wait."""

_Attempt = Callable[[CacheState, Waiter, float], Reply | Lease | None]

_ATTEMPTS: Final[dict[type[Waitable], _Attempt]] = {
    Reserve: attempt_reserve,
    Extend: attempt_extend,
    Reload: attempt_reload,
}


def seat(state: CacheState, command: Waitable, worker_id: WorkerId, now: float) -> Outcome:
    """Serve a call, or let it wait if it may and there is a place to wait."""
    if not 0 <= command.wait_ms <= WAIT_MS_MAX:
        msg = f"wait_ms is {command.wait_ms}, it must be from 0 to {WAIT_MS_MAX}"
        raise InvalidError(msg, resource="wait_ms", need=command.wait_ms, limit=WAIT_MS_MAX)
    if state.is_draining and isinstance(command, Reserve):
        raise DrainingError
    waiter = Waiter(
        ticket=state.next_id(),
        command=command,
        worker_id=worker_id,
        deadline=now + command.wait_ms / 1000,
    )
    num_ahead = state.waiting.num_ahead(command) if len(state.waiting) else 0
    result = None if num_ahead else _ATTEMPTS[type(command)](state, waiter, now)
    if isinstance(result, Lease):
        return Outcome(ticket=waiter.ticket)
    if result is not None:
        return Outcome(reply=result)
    if not command.wait_ms:
        raise refusal(state, command, num_ahead)
    if state.waiting.is_full:
        msg = f"{len(state.waiting)} calls wait already, which is the limit"
        raise BusyError(
            msg,
            resource="waiting_calls",
            limit=len(state.waiting),
            retry_after_ms=_patience(state, num_ahead),
        )
    _supersede(state, waiter)
    state.waiting.join(waiter)
    return Outcome(ticket=waiter.ticket)


def pump(state: CacheState, now: float) -> None:
    """Serve waiting calls in their order until one cannot be served yet."""
    while (waiter := state.waiting.first()) is not None:
        try:
            result = _ATTEMPTS[type(waiter.command)](state, waiter, now)
        except KVLeaseError as error:
            state.waiting.leave(waiter.ticket)
            state.wake(waiter.ticket, error)
            continue
        if result is None:
            return
        state.waiting.leave(waiter.ticket)
        if not isinstance(result, Lease):
            state.wake(waiter.ticket, result)


def refusal(state: CacheState, command: Waitable, num_ahead: int) -> PoolFullError:
    """Explain why a call was not served."""
    need, available = _shortage(state, command)
    if isinstance(command, Reserve) and not state.leases.free_rows:
        num_leases = len(state.leases)
        return PoolFullError(
            f"all {num_leases} leases are in use",
            resource="leases",
            need=1,
            available=0,
            limit=num_leases,
            retry_after_ms=_patience(state, num_ahead),
        )
    reason = f"{num_ahead} calls wait before this one" if num_ahead else "the rest is held"
    return PoolFullError(
        f"{need} blocks are needed and {available} of {state.device.num_usable} can be had now: {reason}; "
        "try again after retry_after_ms, or allow a longer wait_ms",
        resource="device_blocks",
        need=need,
        available=available,
        limit=state.device.num_usable,
        retry_after_ms=_patience(state, num_ahead),
    )


def _shortage(state: CacheState, command: Waitable) -> tuple[int, int]:
    device, leases = state.device, state.leases
    if isinstance(command, Reserve):
        tenant = state.tenant_of(command.worker_id)
        hits = match(state, command.keys, tenant, use_host=False).blocks
        return blocks_for(state, command.num_tokens) - len(hits), num_available(state, hits)
    lease = leases.by_id[command.lease_id]  # type: ignore[index]  # a Reload of keys never waits
    held = int(leases.rows.num_blocks[lease.row])
    if isinstance(command, Extend):
        return blocks_for(state, command.num_tokens) - held, device.num_available
    return held, device.num_available


def _patience(state: CacheState, num_ahead: int) -> int:
    return state.shape.retry_after_ms * (1 + num_ahead)


def _supersede(state: CacheState, waiter: Waiter) -> None:
    command = waiter.command
    if not isinstance(command, Reserve):
        return
    for other in list(state.waiting):
        same = isinstance(other.command, Reserve) and other.command.request_id == command.request_id
        if same and other.worker_id == waiter.worker_id:
            state.waiting.leave(other.ticket)
            state.wake(
                other.ticket, BusyError("a later call for the same request took this one's place")
            )
