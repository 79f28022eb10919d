"""Own what a refused call is told: what it lacks, why, who has it, when to try again, and what would be granted."""

from typing import Final

from kvlease.errors import (
    BusyError,
    DeadlineError,
    DrainingError,
    NeverFitsError,
    PoolFullError,
    WrongStateError,
)
from kvleased.core.admission.coming import is_granted_again, num_slots_soon
from kvleased.core.admission.parking import larger
from kvleased.core.admission.remedies import longer_wait, remedies
from kvleased.core.admission.room import num_slots_available
from kvleased.core.admission.shortages import Shortage, lack_of, lack_of_leases, shortage
from kvleased.core.commands import Extend, Fork, Reload
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.prefix.search import NOTHING
from kvleased.core.reasons import OF_LEASES, Detail, Reason
from kvleased.core.state import CacheState
from kvleased.core.tenancy.holdings import holdings
from kvleased.core.tenancy.keeping import lacks_row
from kvleased.core.tenancy.tenants import TENANT_BLOCKS, limit_of, limits_of
from kvleased.core.tier.flights import Flight
from kvleased.core.waiting import PRIORITY_MAX, WAIT_SECONDS_DEFAULT, Waiter
from kvleased.counted import are, counted

_LONGER: Final = "try again with a longer wait_ms"
RETRY_AFTER_MS_MAX: Final = 5_000
"""The longest that a refusal tells a caller to wait, unless the first in an empty queue is told to wait longer."""


# Refusals -------------------------------------------------------------------------------------------------------------


def refusal(
    state: CacheState, waiter: Waiter, num_ahead: int, waited: float = 0.0
) -> PoolFullError:
    """Explain why a call was not served, either at once or in the seconds that it waited."""
    if state.detail is Detail.CODE:
        return PoolFullError(retry_after_ms=state.shape.retry_after_ms)
    lack = shortage(state, waiter, num_ahead)
    after = f"after {waited:.1f} s: " if waited else ""
    then = _of_own_lease(state, waiter, lack)
    if not then:
        then = f"try again after retry_after_ms, or {_instead(state, waiter, lack)}"
    changes = remedies(state, waiter, lack) if state.detail is Detail.ALL else ()
    return _full(state, state.workers[waiter.worker_id], lack, (after, then), changes)


def fork_full(
    state: CacheState, tenant: int, need: int, num_ahead: int, changes: tuple[str, ...]
) -> PoolFullError:
    """Explain why a request cannot be forked now: a fork does not wait for room."""
    of_leases = lack_of_leases(state, tenant)
    lack = lack_of(state, tenant, need, NOTHING, num_ahead, of_leases)
    then = "try again after retry_after_ms, or reserve with a wait_ms instead, because a fork does not wait for room"
    return _full(state, tenant, lack, ("", then), changes)


def _of_own_lease(state: CacheState, waiter: Waiter, lack: Shortage) -> str:
    """Say what helps a lease that has so much that the rest of the pool is too little for it; "" if waiting may help.

    Only states that are computed and not committed take a lease so far: its requests fit if it commits as it goes.
    """
    if not isinstance(waiter.command, Extend):
        return ""
    lease = state.leases.by_id[waiter.command.lease_id]
    num_own = state.leases.num_entries(lease)
    most = min(state.shape.usable_blocks, limits_of(state, lease.tenant).max_blocks)
    if lease.phase is not Phase.ACTIVE or num_own + lack.need <= most:
        return ""
    return (
        f"the lease has {counted(num_own, 'block')} itself, so no wait helps: commit what it has computed, which gives "
        "blocks back, then try again, or release it"
    )


def _instead(state: CacheState, waiter: Waiter, lack: Shortage) -> str:
    """Say what may help besides another try: a longer wait, or something else if no longer wait is allowed."""
    longest = state.shape.wait_ms_max
    if waiter.command.wait_ms < longest:
        return "allow a longer wait_ms"
    instead = "release a lease"
    if lack.reason is Reason.POSITION and waiter.priority < PRIORITY_MAX:
        instead = "ask with a higher priority"
    elif lack.reason not in OF_LEASES and not isinstance(waiter.command, Reload):
        instead = "ask for fewer tokens"
    return f"{instead}, because no call may wait longer than {longest} ms"


def _full(
    state: CacheState,
    tenant: int,
    lack: Shortage,
    words: tuple[str, str],
    changes: tuple[str, ...],
) -> PoolFullError:
    """Return the refusal of a call of a tenant; `words` begin and end its message."""
    after, then = words
    need, available = lack.need, lack.available
    if lack.reason in OF_LEASES:
        resource, most, short = _short_of_leases(state, tenant, lack)
        need, available = 1, 0
    else:
        resource, most = limit_of(state, tenant, available)
        short = f"{are(need, 'block')} needed and {available} of {most} can be granted{_when(lack)}"
    return PoolFullError(
        f"{after}{short}: {_because(lack, is_capped_itself=resource == TENANT_BLOCKS)}; {then}",
        resource=resource,
        need=need,
        available=available,
        limit=most,
        retry_after_ms=patience(state, lack),
        rule=lack.reason.value,
        remedies=changes,
        holdings=holdings(state, state.device, tenant) if state.detail is Detail.ALL else (),
    )


def _short_of_leases(state: CacheState, tenant: int, lack: Shortage) -> tuple[str, int, str]:
    """Return the resource that a call cannot get more of, the limit of it, and the shortage in words."""
    num_own = state.leases_by_tenant()[tenant]
    num_others = len(state.leases) - num_own
    if lack.reason is Reason.LEASES:
        most = len(state.leases)
        in_use = (
            f"all {are(most, 'lease')} in use, {num_own} by this tenant and {num_others} by others"
        )
        return "leases", most, in_use
    if lack.reason is Reason.KEPT_LEASES:
        most, num_free = state.shape.max_leases, len(state.leases.free_rows)
        who = f"this tenant has {counted(num_own, 'lease')} and others have {num_others}"
        left = f"{num_free} of {are(most, 'lease')} left, and they are kept for other tenants"
        return "leases", most, f"{who}; {left}"
    most = limits_of(state, tenant).leases_max
    return "tenant_leases", most, f"the tenant has {counted(num_own, 'lease')} and may have {most}"


def _because(lack: Shortage, *, is_capped_itself: bool) -> str:
    if lack.reason is Reason.KEPT_LEASES:
        return "a lease must end first, of this tenant if it has one"
    if lack.reason in OF_LEASES:
        return "one of them must end first"
    if lack.num_ahead:
        wait = "call waits" if lack.num_ahead == 1 else "calls wait"
        return f"{lack.num_ahead} {wait} before this one"
    if lack.reason is Reason.LIMITS:
        limit = "the tenant's maximum" if is_capped_itself else "what other tenants are guaranteed"
        return f"{limit} keeps it from using the rest"
    if lack.reason is Reason.COPIES:
        return "blocks are being copied, or zeroed for another tenant"
    return "the rest is held"


def _when(lack: Shortage) -> str:
    return ", some of them only once they are ready" if lack.reason is Reason.COPIES else " now"


def busy(
    state: CacheState, waiter: Waiter, num_ahead: int, num_waiting: int, limit: int
) -> BusyError:
    """Explain why a call may not even wait: `num_waiting` others do, all of its tenant unless the cache is crowded."""
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


def superseded(state: CacheState, wait_ms: int) -> BusyError:
    """Explain why a call lost its place to a later call for the same request, which is answered within `wait_ms`."""
    return BusyError(
        "a later call for the same request took the place of this one, because each request has only one place; use "
        "the answer to the later call, or ask again after retry_after_ms, when it has been answered",
        resource="waiting_calls",
        need=1,
        available=0,
        limit=1,
        retry_after_ms=max(wait_ms, state.shape.retry_after_ms),
        rule="superseded",
    )


def superseded_for_lease() -> WrongStateError:
    """Explain why a call about a lease lost its place to a later one, which gets the answer."""
    return WrongStateError(
        "a later call for the same lease took the place of this one; use the answer to the later call",
        resource="lease",
        rule="superseded",
    )


def draining(state: CacheState) -> DrainingError:
    """Explain why a cache that is being drained, by itself or with the daemon, grants no lease."""
    whose, where = ("daemon", " in the cache") if state.drains_daemon else ("cache", "")
    left = f"{are(len(state.leases), 'lease')} left{where}"
    return DrainingError(
        f"the {whose} is being drained and grants no new leases ({left}); ask another daemon",
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
        f"the lease needs {counted(need, 'slot')}, but the host pool has {limit}; release the lease instead, or {more}",
        resource="host_slots",
        need=need,
        available=host.num_available,
        limit=limit,
    )


def slots_full(
    state: CacheState, need: int, tenant: int, reused: Ids, changes: tuple[str, ...]
) -> PoolFullError:
    """Explain why a lease cannot be moved to the host pool now; it would reuse the slots `reused`."""
    host = state.host
    available, limit = num_slots_available(state, reused), len(host) - host.num_parked
    is_coming = need <= num_slots_soon(state, reused)
    because = "slots are being copied" if is_coming else "the rest is held"
    less = ", trim the lease first" if changes else ""
    return PoolFullError(
        f"the lease needs {counted(need, 'slot')} and {available} of {limit} can be used now: {because}; try again "
        f"after retry_after_ms{less}, or release the lease instead",
        resource="host_slots",
        need=need,
        available=available,
        limit=limit,
        retry_after_ms=state.shape.retry_after_ms,
        rule=(Reason.COPIES if is_coming else Reason.BLOCKS).value,
        remedies=changes,
        holdings=holdings(state, host, tenant),
    )


def keys_full(
    state: CacheState, blocks: tuple[int, int], tenant: int | None, changes: tuple[str, ...]
) -> PoolFullError:
    """Explain why cached blocks cannot be brought to the device now; `blocks` is how many are needed, and available."""
    need, available = blocks
    limit = state.shape.usable_blocks
    reason = Reason.COPIES if need <= available else Reason.BLOCKS
    return PoolFullError(
        f"{are(need, 'block')} needed and {available} of {limit} can be granted now; try again after retry_after_ms",
        resource="device_blocks",
        need=need,
        available=available,
        limit=limit,
        retry_after_ms=state.shape.retry_after_ms,
        rule=reason.value,
        remedies=changes,
        holdings=holdings(state, state.device, tenant),
    )


def lease_late(state: CacheState, lease: Lease) -> DeadlineError:
    """Explain why a call ends although its lease still waits for copies."""
    flights, request = [state.flights[copy_id] for copy_id in lease.pending], lease.request
    if lease.phase is not Phase.LOADING or request is None:
        return _late(state, flights, lease.tenant, _LONGER)
    if state.is_draining:
        whose = "daemon" if state.drains_daemon else "cache"
        return _late(
            state, flights, lease.tenant, f"the {whose} is being drained; ask another daemon"
        )
    if not is_granted_again(state, lease):
        then = "its tenant may no longer have as many blocks; end another lease of the tenant, then try again"
        return _late(state, flights, lease.tenant, then)
    if state.keeps_rows and lacks_row(state, lease.tenant, num_ending=1):
        then = "its tenant may no longer have as many leases; end another lease of the tenant, then try again"
        return _late(state, flights, lease.tenant, then)
    if isinstance(request, Fork):
        parent = state.leases.by_id.get(request.lease_id)
        if parent is None or parent.phase is not Phase.ACTIVE:
            then = "the lease to fork is no longer on the device; reload it, or reserve again"
            return _late(state, flights, lease.tenant, then)
    changes = longer_wait(state, request.wait_ms or int(WAIT_SECONDS_DEFAULT * 1000))
    most = f"try again when they have ended, because no call may wait longer than {state.shape.wait_ms_max} ms"
    return _late(state, flights, lease.tenant, _LONGER if changes else most, changes)


def flight_late(state: CacheState, flight: Flight) -> DeadlineError:
    """Explain why a call ends although its own copy still goes on."""
    return _late(state, [flight], None, _LONGER)


def _late(
    state: CacheState,
    flights: list[Flight],
    tenant: int | None,
    then: str,
    changes: tuple[str, ...] = (),
) -> DeadlineError:
    """Return the refusal of a call that waited for these copies in vain; `then` says what to do next."""
    num_blocks = sum(len(flight.targets) for flight in flights)
    return DeadlineError(
        f"the copies did not end before the caller's deadline: {are(num_blocks, 'block')} still being copied; {then}",
        resource="copies",
        need=num_blocks,
        available=0,
        limit=sum(len(flight.targets) for flight in state.flights.values()),
        retry_after_ms=state.shape.retry_after_ms,
        rule=Reason.COPIES.value,
        remedies=changes,
        holdings=holdings(state, state.device, tenant),
    )


# When -----------------------------------------------------------------------------------------------------------------


def patience(state: CacheState, lack: Shortage) -> int:
    """Return when to try again: after a turn for this call and each one ahead, or half a turn if copies make room."""
    turn = state.shape.retry_after_ms
    if lack.reason in (Reason.BLOCKS, Reason.COPIES) and lack.is_coming:
        return max(1, turn // 2)
    return min(turn * (1 + lack.num_ahead), max(turn, RETRY_AFTER_MS_MAX))
