"""Own what a call lacks at one instant, and why; what the call is told of that is the business of `refusals`."""

from dataclasses import dataclass

import numpy as np

from kvlease.errors import InvalidError
from kvleased.core.admission.coming import num_soon
from kvleased.core.admission.granting import num_fresh, num_missing
from kvleased.core.admission.room import num_available
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.ids import Ids
from kvleased.core.prefix.looking import by_tier
from kvleased.core.prefix.search import NOTHING, Match, match, sources_of
from kvleased.core.reasons import Reason
from kvleased.core.state import CacheState
from kvleased.core.tenancy.keeping import is_capped, must_leave_rows
from kvleased.core.tenancy.tenants import is_held_back
from kvleased.core.waiting import Waitable, Waiter


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a call lacks at one instant."""

    need: int
    """Blocks."""
    available: int
    """Blocks that it could have if no other call came."""
    available_soon: int
    """The same once the copies in flight have ended; below 0 if it cannot even have its prefix."""
    reason: Reason
    num_ahead: int
    prefix: Match
    """What it could reuse."""

    @property
    def is_coming(self) -> bool:
        """Whether it will lack no block once the copies in flight have ended."""
        return self.need <= self.available_soon


def shortage(state: CacheState, waiter: Waiter, num_ahead: int) -> Shortage:
    """Return what a call that comes after `num_ahead` others lacks."""
    command, prefix = waiter.command, _prefix(state, waiter)
    num_tokens = 0 if isinstance(command, Reload) else command.num_tokens
    need = need_of(state, command, prefix, num_tokens)
    tenant = state.workers[waiter.worker_id]
    of_leases = lack_of_leases(state, tenant) if isinstance(command, Reserve) else None
    return lack_of(state, tenant, need, prefix, num_ahead, of_leases)


def lack_of(
    state: CacheState,
    tenant: int,
    need: int,
    prefix: Match,
    num_ahead: int,
    of_leases: Reason | None,
) -> Shortage:
    """Return what a tenant's call that needs `need` blocks lacks; `of_leases` is why it can have no lease, if so."""
    # Below 0 if not even the prefix may be had, so that a call that needs no block is not served either.
    available = num_available(state, tenant, prefix.blocks)
    if prefix.behind is not None:
        soon = _num_soon_beside(state, tenant, need, prefix.blocks, by_tier(prefix.behind)[0])
    else:
        # Once blocks are ready there may be less room than now: leases that come back take theirs first.
        soon = num_soon(state, tenant, prefix.blocks)
    reason = of_leases
    if reason is None:
        is_first = not num_ahead
        most = max(soon, available)
        reason = _reason_of(state, tenant, need, prefix, most) if is_first else Reason.POSITION
    return Shortage(
        need=need,
        available=max(0, available),
        available_soon=soon,
        reason=reason,
        num_ahead=num_ahead,
        prefix=prefix,
    )


def _num_soon_beside(
    state: CacheState, tenant: int, need: int, blocks: Ids, next_blocks: Ids
) -> int:
    """Count the blocks that a call can get soon besides those of its prefix and the next ones, which draft models read.

    A next block leaves when all else is ready; when the call goes on, it is found in the host pool or needed no more.
    If there are several, some would leave before the others. So they must all stay, or the prefix is shorter and the
    call needs more.
    """
    soon = num_soon(state, tenant, np.concatenate([blocks, next_blocks]))
    if need > soon and len(next_blocks) == 1:
        with_next = num_soon(state, tenant, blocks)
        if need <= with_next:
            return with_next
    return soon


def lack_of_leases(state: CacheState, tenant: int) -> Reason | None:
    """Return why a tenant can have no further lease, however many blocks there are; None if it can."""
    if not state.leases.free_rows:
        return Reason.LEASES
    if not state.keeps_rows:
        return None
    if is_capped(state, tenant):
        return Reason.TENANT_LEASES
    return Reason.KEPT_LEASES if must_leave_rows(state, tenant) else None


def _reason_of(state: CacheState, tenant: int, need: int, prefix: Match, most: int) -> Reason:
    """Return why the call at the head has not got its blocks; it could have `most` blocks if they were ready."""
    if state.is_limited and is_held_back(state, tenant, need, prefix.blocks):
        return Reason.LIMITS
    return Reason.COPIES if need <= most else Reason.BLOCKS


def _prefix(state: CacheState, waiter: Waiter) -> Match:
    command = waiter.command
    if not isinstance(command, Reserve) or not command.keys:
        return NOTHING
    sources = sources_of(waiter) if command.wait_ms > 0 else None
    try:
        return match(state, command.keys, state.workers[command.worker_id], sources)
    except InvalidError:
        # The mistake is found, and told to the caller, only when the call's turn comes.
        return NOTHING


def need_of(state: CacheState, command: Waitable, prefix: Match, num_tokens: int) -> int:
    """Return the fresh blocks that a call needs behind its prefix to cover so many tokens."""
    if isinstance(command, Reserve):
        return num_fresh(state, prefix, num_tokens)[0]
    lease = state.leases.by_id[command.lease_id]  # type: ignore[index]  # a Reload of keys never waits
    if isinstance(command, Extend):
        return max(0, num_missing(state, lease, num_tokens))
    return len(state.leases.blocks_of(lease))
