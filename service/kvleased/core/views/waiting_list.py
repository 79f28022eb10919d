"""Own the list of waiting calls that people read, a page at a time: what each needs, and why it is not served yet."""

from dataclasses import dataclass

from kvlease.ids import WorkerId
from kvleased.core.admission.shortages import shortage
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.state import CacheState
from kvleased.core.waiting import Waiter

_VERBS = {Reserve: "reserve", Extend: "extend", Reload: "reload"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingFacts:
    """One waiting call at one instant; its keys and tokens are not shown."""

    call_id: int
    """The later a call came, the larger its id."""
    worker_id: WorkerId
    verb: str
    """"reserve", "extend" or "reload"."""
    position: int
    """Calls that would be served before it."""
    priority: int
    """The class that it has come to: 0 is low, 1 is normal, 2 is high; calls of running requests have 2."""
    num_blocks: int
    """Blocks that it needs besides those that it would reuse."""
    available_blocks: int
    """Blocks that it could have if no other call came."""
    reason: str
    """Why it is not served: "blocks", "copies", "position", "leases", "limits", "tenant_leases" or "kept_leases"."""
    age_seconds: float
    left_seconds: float
    """Seconds until it is refused; 0 if that is overdue."""


def list_waiting(
    state: CacheState, after_id: int, limit: int, now: float
) -> tuple[WaitingFacts, ...]:
    """Return up to `limit` waiting calls whose ids are above `after_id`, by id."""
    page = sorted(
        (waiter.ticket, position, waiter)
        for position, waiter in enumerate(state.waiting.ordered(now))
        if waiter.ticket > after_id
    )
    return tuple(_facts(state, waiter, position, now) for _, position, waiter in page[:limit])


def _facts(state: CacheState, waiter: Waiter, position: int, now: float) -> WaitingFacts:
    lack = shortage(state, waiter, position)
    return WaitingFacts(
        call_id=waiter.ticket,
        worker_id=waiter.worker_id,
        verb=_VERBS[type(waiter.command)],
        position=position,
        priority=waiter.priority,
        num_blocks=lack.need,
        available_blocks=lack.available,
        reason=lack.reason.value,
        age_seconds=max(0.0, now - waiter.since),
        left_seconds=max(0.0, waiter.deadline - now),
    )
