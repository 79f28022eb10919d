"""Own what a call lacks at one instant, and why; what it is told of that is the business of `refusals`."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvlease.errors import InvalidError
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.flights import Flight, Purpose
from kvleased.core.granting import num_fresh, num_missing
from kvleased.core.ids import Ids
from kvleased.core.keeping import is_capped, leaves_row
from kvleased.core.reasons import Reason
from kvleased.core.room import num_available
from kvleased.core.search import NOTHING, Match, match, sources_of
from kvleased.core.state import CacheState
from kvleased.core.tenants import is_held_back
from kvleased.core.waiting import Waitable, Waiter

_MAKES_ROOM: Final = (
    Purpose.WRITE_BACK,
    Purpose.DISPLACE,
    Purpose.PREEMPT,
    Purpose.SCRUB,
    Purpose.CLEAN,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a call lacks at one instant."""

    need: int
    """Blocks."""
    available: int
    """Blocks that it could have if nobody else came."""
    reason: Reason
    num_ahead: int
    prefix: Match
    """What it could reuse."""


def shortage(state: CacheState, waiter: Waiter, num_ahead: int) -> Shortage:
    """Return what a call lacks that comes after `num_ahead` others."""
    command, prefix = waiter.command, _prefix(state, waiter)
    num_tokens = 0 if isinstance(command, Reload) else command.num_tokens
    need = need_of(state, command, prefix, num_tokens)
    tenant = state.workers[waiter.worker_id]
    available = max(0, num_available(state, tenant, prefix.blocks))
    reason = reason_of(state, tenant, need, prefix.blocks)
    of_leases = lack_of_leases(state, tenant) if isinstance(command, Reserve) else None
    if of_leases is not None:
        reason = of_leases
    elif num_ahead:
        reason = Reason.POSITION
    return Shortage(
        need=need, available=available, reason=reason, num_ahead=num_ahead, prefix=prefix
    )


def lack_of_leases(state: CacheState, tenant: int) -> Reason | None:
    """Return why a tenant can have no other lease, however many blocks there are."""
    if not state.leases.free_rows:
        return Reason.LEASES
    if not state.keeps_rows:
        return None
    if is_capped(state, tenant):
        return Reason.TENANT_LEASES
    return Reason.KEPT_LEASES if leaves_row(state, tenant) else None


def reason_of(state: CacheState, tenant: int, need: int, protected: Ids) -> Reason:
    """Return why a call that is first has not got its blocks."""
    if state.is_limited and is_held_back(state, tenant, need, protected):
        return Reason.LIMITS
    available = max(0, num_available(state, tenant, protected))
    is_coming = need <= available + _num_coming(state)
    return Reason.COPIES if is_coming else Reason.BLOCKS


def _prefix(state: CacheState, waiter: Waiter) -> Match:
    command = waiter.command
    if not isinstance(command, Reserve) or not command.keys:
        return NOTHING
    sources = sources_of(waiter) if command.wait_ms > 0 else None
    try:
        return match(state, command.keys, state.workers[command.worker_id], sources)
    except InvalidError:
        # Found only when its turn comes, and told then.
        return NOTHING


def need_of(state: CacheState, command: Waitable, prefix: Match, num_tokens: int) -> int:
    """Return the fresh blocks that a call needs behind its prefix to cover so many tokens."""
    if isinstance(command, Reserve):
        return num_fresh(state, prefix, num_tokens)[0]
    lease = state.leases.by_id[command.lease_id]  # type: ignore[index]  # a Reload of keys never waits
    if isinstance(command, Extend):
        return max(0, num_missing(state, lease, num_tokens))
    return len(state.leases.blocks_of(lease))


# What comes free ------------------------------------------------------------------------------------------------------


def is_coming(state: CacheState, lack: Shortage) -> bool:
    """Tell whether a call lacks nothing any more when the copies in flight have ended."""
    return lack.need <= lack.available + _num_coming(state)


def _num_coming(state: CacheState) -> int:
    """Count the blocks that come free when copies in flight end."""
    return sum(
        _num_freed(state, flight)
        for flight in state.flights.values()
        if flight.purpose in _MAKES_ROOM and not flight.is_lost
    )


def _num_freed(state: CacheState, flight: Flight) -> int:
    if flight.purpose is Purpose.CLEAN:
        # Most of these are leased still.
        return int(np.count_nonzero(state.device.holds[flight.sources] == 1))
    return flight.num_pairs
