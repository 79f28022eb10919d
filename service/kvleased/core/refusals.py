"""Own what a refused call is told: what it lacks, why, who has it, when to try again, and what would be granted."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvlease.errors import (
    BusyError,
    DeadlineError,
    DrainingError,
    InvalidError,
    NeverFitsError,
    PoolFullError,
)
from kvlease.ids import BYTES_PER_KEY
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.flights import Flight, Purpose
from kvleased.core.granting import num_fresh, num_missing
from kvleased.core.holdings import holdings
from kvleased.core.ids import Ids
from kvleased.core.keeping import is_capped, leaves_row
from kvleased.core.leases import NOWHERE, Lease
from kvleased.core.parking import larger
from kvleased.core.reasons import OF_LEASES, Detail, Reason
from kvleased.core.room import num_available
from kvleased.core.search import NOTHING, Match, match, sources_of
from kvleased.core.state import CacheState
from kvleased.core.tenants import is_held_back, limit_of, limits_of
from kvleased.core.waiting import WAIT_MS_MAX, Waitable, Waiter
from kvleased.counted import are, counted

RETRY_AFTER_MS_MAX: Final = 5_000
"""The longest that a refusal tells a caller to wait, unless the first in an empty queue is told to wait longer."""
_WAIT_MS_LEAST: Final = 2_000
"""The shortest wait that a refusal recommends."""
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
    need = _need(state, command, prefix, num_tokens)
    tenant = state.workers[waiter.worker_id]
    available = max(0, num_available(state, tenant, prefix.blocks))
    reason = _reason(state, tenant, need, prefix.blocks)
    of_leases = _lack_of_leases(state, tenant) if isinstance(command, Reserve) else None
    if of_leases is not None:
        reason = of_leases
    elif num_ahead:
        reason = Reason.POSITION
    return Shortage(
        need=need, available=available, reason=reason, num_ahead=num_ahead, prefix=prefix
    )


def _lack_of_leases(state: CacheState, tenant: int) -> Reason | None:
    """Return why a tenant can have no other lease, however many blocks there are."""
    if not state.leases.free_rows:
        return Reason.LEASES
    if not state.keeps_rows:
        return None
    if is_capped(state, tenant):
        return Reason.TENANT_LEASES
    return Reason.KEPT_LEASES if leaves_row(state, tenant) else None


def _reason(state: CacheState, tenant: int, need: int, protected: Ids) -> Reason:
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


def _need(state: CacheState, command: Waitable, prefix: Match, num_tokens: int) -> int:
    """Return the fresh blocks that a call needs behind its prefix to cover so many tokens."""
    if isinstance(command, Reserve):
        return num_fresh(state, prefix, num_tokens)[0]
    lease = state.leases.by_id[command.lease_id]  # type: ignore[index]  # a Reload of keys never waits
    if isinstance(command, Extend):
        return max(0, num_missing(state, lease, num_tokens))
    return len(state.leases.blocks_of(lease))


# Refusals -------------------------------------------------------------------------------------------------------------


def refusal(
    state: CacheState, waiter: Waiter, num_ahead: int, waited: float = 0.0
) -> PoolFullError:
    """Explain why a call was not served, at once or for all the seconds that it waited."""
    if state.detail is Detail.CODE:
        return PoolFullError(retry_after_ms=state.shape.retry_after_ms)
    lack = shortage(state, waiter, num_ahead)
    after = f"after {waited:.1f} s: " if waited else ""
    then = "try again after retry_after_ms, or allow a longer wait_ms"
    remedies = _remedies(state, waiter, lack) if state.detail is Detail.ALL else ()
    return _full(state, state.workers[waiter.worker_id], lack, (after, then), remedies)


def fork_full(state: CacheState, tenant: int, need: int) -> PoolFullError:
    """Explain why a request cannot be forked now: a fork does not wait for room."""
    num_ahead = len(state.waiting)
    available = max(0, num_available(state, tenant, NOWHERE))
    reason = Reason.POSITION if num_ahead else _reason(state, tenant, need, NOWHERE)
    reason = _lack_of_leases(state, tenant) or reason
    lack = Shortage(
        need=need,
        available=available,
        reason=reason,
        num_ahead=num_ahead,
        prefix=NOTHING,
    )
    return _full(state, tenant, lack, ("", "try again after retry_after_ms"), ())


def _full(
    state: CacheState,
    tenant: int,
    lack: Shortage,
    words: tuple[str, str],
    remedies: tuple[str, ...],
) -> PoolFullError:
    """Return the refusal of a call of a tenant; `words` begin and end its message."""
    after, then = words
    need, available = lack.need, lack.available
    if lack.reason in OF_LEASES:
        resource, most, short = _short_of_leases(state, tenant, lack)
        need, available = 1, 0
    else:
        resource, most = limit_of(state, tenant, available)
        short = f"{are(need, 'block')} needed and {available} of {most} can be had{_when(lack)}"
    return PoolFullError(
        f"{after}{short}: {_because(lack)}; {then}",
        resource=resource,
        need=need,
        available=available,
        limit=most,
        retry_after_ms=patience(state, lack),
        rule=lack.reason.value,
        remedies=remedies,
        holdings=holdings(state, state.device, tenant) if state.detail is Detail.ALL else (),
    )


def _short_of_leases(state: CacheState, tenant: int, lack: Shortage) -> tuple[str, int, str]:
    """Return which resource there is no more of, how much of it there is in all, and that in words."""
    if lack.reason is Reason.LEASES:
        most = len(state.leases)
        return "leases", most, f"all {are(most, 'lease')} in use"
    if lack.reason is Reason.KEPT_LEASES:
        most, num_free = state.shape.max_leases, len(state.leases.free_rows)
        return (
            "leases",
            most,
            f"{num_free} of {are(most, 'lease')} left, which are kept for other tenants",
        )
    most = limits_of(state, tenant).leases_max
    num_own = state.leases_by_tenant()[tenant]
    return "tenant_leases", most, f"the tenant has {counted(num_own, 'lease')} and may have {most}"


def _because(lack: Shortage) -> str:
    if lack.reason is Reason.KEPT_LEASES:
        return "one that its tenant has must end first"
    if lack.reason is Reason.TENANT_LEASES:
        return "one of them must end first"
    if lack.num_ahead:
        wait = "call waits" if lack.num_ahead == 1 else "calls wait"
        return f"{lack.num_ahead} {wait} before this one"
    if lack.reason is Reason.LIMITS:
        return "its tenant's maximum, or what other tenants are guaranteed, keeps it from the rest"
    if lack.reason is Reason.COPIES:
        return "blocks are being copied, or zeroed for another tenant"
    return "the rest is held"


def _when(lack: Shortage) -> str:
    return ", some when they are made ready" if lack.reason is Reason.COPIES else " now"


def busy(
    state: CacheState, waiter: Waiter, num_ahead: int, num_waiting: int, limit: int
) -> BusyError:
    """Explain why a call may not even wait: `num_waiting` calls do, of its tenant unless all places are taken."""
    whose = "" if state.is_crowded else "of this tenant "
    return BusyError(
        f"{counted(num_waiting, 'call', f'{whose}waits', f'{whose}wait')} already, and the limit is {limit}; "
        "try again after retry_after_ms",
        resource="waiting_calls",
        need=1,
        available=0,
        limit=limit,
        retry_after_ms=patience(state, shortage(state, waiter, num_ahead)),
        rule="tenant_places" if whose else "places",
        holdings=holdings(state, state.device, state.workers.get(waiter.worker_id)),
    )


def draining(state: CacheState) -> DrainingError:
    """Explain why a cache that is being drained, by itself or with the daemon, grants no lease."""
    whose, where = ("daemon", " in the cache") if state.drains_daemon else ("cache", "")
    left = f"{are(len(state.leases), 'lease')} left{where}"
    return DrainingError(
        f"the {whose} is being drained and grants nothing new, {left}; ask another daemon",
        resource=whose,
        retry_after_ms=RETRY_AFTER_MS_MAX,
    )


def slots_never_fit(state: CacheState, need: int) -> NeverFitsError | None:
    """Explain why a lease can never be moved to the host pool, if it cannot."""
    host = state.host
    limit = len(host) - host.counts()["bad"] - host.num_parked
    if need <= limit:
        return None
    more = larger(host.num_parked, need - limit, "register the cache with more host_bytes")
    return NeverFitsError(
        f"the lease takes {counted(need, 'slot')} and the host pool has {limit}; release it instead, or {more}",
        resource="host_slots",
        need=need,
        available=host.num_available,
        limit=limit,
    )


def slots_full(state: CacheState, need: int, tenant: int) -> PoolFullError:
    """Explain why a lease cannot be moved to the host pool now."""
    host = state.host
    return PoolFullError(
        f"the lease takes {counted(need, 'slot')} and {host.num_available} can be had now",
        resource="host_slots",
        need=need,
        available=host.num_available,
        limit=len(host),
        retry_after_ms=state.shape.retry_after_ms,
        rule=Reason.BLOCKS.value,
        holdings=holdings(state, host, tenant),
    )


def keys_full(state: CacheState, need: int, available: int, tenant: int | None) -> PoolFullError:
    """Explain why cached blocks cannot be brought to the device now."""
    limit = state.shape.usable_blocks
    reason = Reason.COPIES if need <= available else Reason.BLOCKS
    return PoolFullError(
        f"{are(need, 'block')} needed and {available} of {limit} can be had now; try again after retry_after_ms",
        resource="device_blocks",
        need=need,
        available=available,
        limit=limit,
        retry_after_ms=state.shape.retry_after_ms,
        rule=reason.value,
        remedies=(f"num_keys={available}",) if 0 < available < need else (),
        holdings=holdings(state, state.device, tenant),
    )


def lease_late(state: CacheState, lease: Lease) -> DeadlineError:
    """Explain why a call ends whose lease still waits for copies."""
    flights = [state.flights[copy_id] for copy_id in lease.pending]
    return _late(state, flights, lease.tenant)


def flight_late(state: CacheState, flight: Flight) -> DeadlineError:
    """Explain why a call ends whose own copy still goes on."""
    return _late(state, [flight], None)


def _late(state: CacheState, flights: list[Flight], tenant: int | None) -> DeadlineError:
    num_blocks = sum(len(flight.targets) for flight in flights)
    return DeadlineError(
        f"the copies did not end before the caller's deadline: {are(num_blocks, 'block')} still being copied; "
        "try again with a longer wait_ms",
        resource="copies",
        need=num_blocks,
        available=0,
        limit=sum(len(flight.targets) for flight in state.flights.values()),
        retry_after_ms=state.shape.retry_after_ms,
        rule=Reason.COPIES.value,
        remedies=(f"wait_ms={_WAIT_MS_LEAST}",),
        holdings=holdings(state, state.device, tenant),
    )


# When and what instead ------------------------------------------------------------------------------------------------


def patience(state: CacheState, lack: Shortage) -> int:
    """Return when to try again: after a turn for each call before, or half of one if copies make room."""
    turn = state.shape.retry_after_ms
    if lack.reason in (Reason.BLOCKS, Reason.COPIES) and _is_coming(state, lack):
        return max(1, turn // 2)
    return min(turn * (1 + lack.num_ahead), max(turn, RETRY_AFTER_MS_MAX))


def _is_coming(state: CacheState, lack: Shortage) -> bool:
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


def _remedies(state: CacheState, waiter: Waiter, lack: Shortage) -> tuple[str, ...]:
    found = []
    command = waiter.command
    if lack.reason is Reason.BLOCKS and not isinstance(command, Reload):
        found += _fewer_tokens(state, command, lack)
    if lack.reason not in OF_LEASES and _is_coming(state, lack):
        found.append(f"wait_ms={min(WAIT_MS_MAX, max(_WAIT_MS_LEAST, 2 * command.wait_ms))}")
    return tuple(found)


def _fewer_tokens(state: CacheState, command: Reserve | Extend, lack: Shortage) -> list[str]:
    """Return the largest number of tokens that the call would get at once, with as many of its keys as they cover."""
    tenant = state.workers[command.worker_id]
    at_once = _num_at_once(state, tenant, lack)
    if not at_once:
        return []
    sizes = range(1, command.num_tokens)

    def is_too_much(num_tokens: int) -> bool:
        return _need(state, command, lack.prefix, num_tokens) > at_once

    num_tokens = bisect_left(sizes, True, key=is_too_much)
    if num_tokens <= lack.prefix.hit_tokens:
        return []
    hash_tokens = state.shape.hash_tokens
    num_keys = len(command.keys) // BYTES_PER_KEY if isinstance(command, Reserve) else 0
    if num_keys * hash_tokens < num_tokens + hash_tokens:
        return [f"num_tokens={num_tokens}"]
    if len(lack.prefix.below):
        return []
    return [f"num_tokens={num_tokens} num_keys={num_tokens // hash_tokens}"]


def _num_at_once(state: CacheState, tenant: int, lack: Shortage) -> int:
    """Count the blocks that a call could have without waiting for any to be scrubbed for its tenant."""
    device = state.device
    if device.is_only_of(tenant):
        return lack.available
    num_unsuitable = len(device.unsuitable(device.num_free, tenant))
    evictable = device.victims(len(device.order), lack.prefix.blocks)
    if not num_unsuitable and (device.records.tenant[evictable] == tenant).all():
        return lack.available
    return min(lack.available, device.num_free - num_unsuitable)
