"""Own who is served when: a call is served at once, or waits for its turn, or is refused with numbers."""

from collections.abc import Callable
from itertools import islice
from typing import Final

from kvlease.errors import BusyError, DrainingError, InvalidError, KVLeaseError, PoolFullError
from kvlease.ids import WorkerId
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.effects import Outcome, Reply
from kvleased.core.granting import attempt_extend, attempt_reserve, blocks_for
from kvleased.core.leases import NOWHERE, Lease
from kvleased.core.moving import attempt_reload
from kvleased.core.pool import Ids
from kvleased.core.room import num_available
from kvleased.core.search import match
from kvleased.core.state import CacheState
from kvleased.core.tenants import is_held_back, limit_of
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
    num_ahead = _num_ahead(state, command, worker_id) if len(state.waiting) else 0
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
    """Serve waiting calls in their order until one cannot be served yet, passing over tenants that are held back."""
    passed: set[int] = set()
    for waiter in list(state.waiting):
        tenant = state.workers[waiter.worker_id]
        if tenant in passed:
            continue
        try:
            result = _ATTEMPTS[type(waiter.command)](state, waiter, now)
        except KVLeaseError as error:
            state.waiting.leave(waiter.ticket)
            state.wake(waiter.ticket, error)
            continue
        if result is None:
            if not _is_passed(state, waiter):
                return
            passed.add(tenant)
            continue
        state.waiting.leave(waiter.ticket)
        if not isinstance(result, Lease):
            state.wake(waiter.ticket, result)


def _num_ahead(state: CacheState, command: Waitable, worker_id: WorkerId) -> int:
    """Count the calls that would be served before this one, less those of other tenants that are held back."""
    num_ahead = state.waiting.num_ahead(command)
    if not state.is_limited:
        return num_ahead
    tenant = state.workers[worker_id]
    return sum(
        state.workers[waiter.worker_id] == tenant or not _is_passed(state, waiter)
        for waiter in islice(state.waiting, num_ahead)
    )


def _is_passed(state: CacheState, waiter: Waiter) -> bool:
    """Tell whether a call waits for its tenant's limits alone, so that calls of others need not wait behind it."""
    return state.is_limited and is_held_back(state, *_shortage(state, waiter.command))


def refusal(state: CacheState, command: Waitable, num_ahead: int) -> PoolFullError:
    """Explain why a call was not served."""
    tenant, need, hits = _shortage(state, command)
    available = max(0, num_available(state, tenant, hits))
    resource, limit = limit_of(state, tenant, available)
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
        f"{need} blocks are needed and {available} of {limit} can be had now: {reason}; "
        "try again after retry_after_ms, or allow a longer wait_ms",
        resource=resource,
        need=need,
        available=available,
        limit=limit,
        retry_after_ms=_patience(state, num_ahead),
    )


def _shortage(state: CacheState, command: Waitable) -> tuple[int, int, Ids]:
    """Return the tenant of a call, the blocks that it needs, and the blocks that it has found already."""
    leases = state.leases
    if isinstance(command, Reserve):
        tenant = state.tenant_of(command.worker_id)
        hits = match(state, command.keys, tenant, use_host=False).blocks
        return tenant, blocks_for(state, command.num_tokens) - len(hits), hits
    lease = leases.by_id[command.lease_id]  # type: ignore[index]  # a Reload of keys never waits
    held = int(leases.rows.num_blocks[lease.row])
    if isinstance(command, Extend):
        return lease.tenant, blocks_for(state, command.num_tokens) - held, NOWHERE
    return lease.tenant, held, NOWHERE


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
