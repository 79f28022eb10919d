"""Own the verbs that ask for blocks or move them (reserve, extend, evict, reload), until they are served or wait."""

from dataclasses import replace

from kvlease.errors import IdReusedError, InvalidError, WrongStateError
from kvleased.core.admission.fitting import check_comes_back
from kvleased.core.admission.granting import check_reserve, check_tokens, num_missing, unextended
from kvleased.core.commands import Command, Evict, Extend, Reload, Reserve
from kvleased.core.effects import Outcome
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.prefix.explaining import misses_of
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import check_tokens_fit
from kvleased.core.verbs.asking import ask, supersede_asking
from kvleased.core.verbs.ending import renew
from kvleased.core.verbs.joining import (
    asks_for,
    check_mates,
    find,
    join,
    join_reserved,
    reload_beside,
    tell,
)
from kvleased.core.verbs.moving import (
    evict_cached,
    evict_lease,
    here,
    is_large,
    reload_after_evict,
    supersede_ticket,
)
from kvleased.core.verbs.parting import evict_together, wait_beside
from kvleased.core.verbs.prefetching import reload_cached
from kvleased.core.verbs.seating import seat, seat_apart


def reserve(state: CacheState, command: Reserve, now: float) -> Outcome:
    """Grant blocks for a request; if the request has a lease already, answer with that lease."""
    state.tenant_of(command.worker_id)
    check_reserve(state, command)
    lease = find(state, command)
    if lease is not None:
        return _repeat(state, lease, command, now)
    if state.ranks.places:
        check_mates(state, command)
    outcome = ask(state, command, now) if command.wait_ms and state.dirt.shares else None
    if outcome is None:
        outcome = seat(state, command, command.worker_id, now)
    if state.asking:
        supersede_asking(state, command, outcome.ticket)
    return outcome


def _repeat(state: CacheState, lease: Lease, command: Reserve, now: float) -> Outcome:
    if not asks_for(state, lease, command):
        msg = (
            f"request {command.request_id} already has a lease with other keys, another num_tokens or another "
            "retain_priority; release it, or use another id"
        )
        raise IdReusedError(msg, resource="request_id")
    if lease.phase is not Phase.LOADING:
        reply = join_reserved(state, lease, command.worker_id, now)
        if command.explain:
            reply = replace(reply, misses=misses_of(state, lease))
        return Outcome(reply=reply)
    if not command.wait_ms:
        msg = "the lease is still loading; repeat the call with a wait_ms"
        raise WrongStateError(msg, resource="lease")
    if lease.members is not None:
        join(state, lease, command.worker_id)
        return wait_beside(state, lease, command.worker_id, command.wait_ms, now)
    return supersede_ticket(state, lease, command.wait_ms, now)


def extend(state: CacheState, command: Extend, now: float) -> Outcome:
    """Make a lease cover more tokens."""
    lease = state.lease_of(command)
    renew(state, lease, now)
    check_tokens(state, command.num_tokens, lease.tenant, lease)
    if lease.phase is Phase.ACTIVE and num_missing(state, lease, command.num_tokens) <= 0:
        # A call that needs no block waits for nobody, even if its tenant may have fewer blocks by now.
        reply = unextended(state, lease, command.num_tokens)
        if lease.members is not None:
            reply = tell(state, lease, lease.members, command)
        return Outcome(reply=reply)
    if state.is_limited:
        check_tokens_fit(state, lease.tenant, command.num_tokens)
    return seat(state, command, command.worker_id, now)


def evict(state: CacheState, command: Evict, now: float) -> Outcome:
    """Move a lease's blocks, given keys or the coldest blocks out of the device pool."""
    _check_one_of(lease_id=command.lease_id, keys=command.keys, num_blocks=command.num_blocks)
    if command.lease_id is None:
        return evict_cached(state, command, now)
    lease = state.lease_of(command)
    renew(state, lease, now)
    if lease.members is not None:
        return evict_together(state, lease, lease.members, command, now)
    return evict_lease(state, command, now)


def reload(state: CacheState, command: Reload, now: float) -> Outcome:
    """Bring an evicted lease's blocks, or given keys, back to the device pool."""
    _check_one_of(lease_id=command.lease_id, keys=command.keys)
    if command.lease_id is None:
        return reload_cached(state, command, now)
    lease = state.lease_of(command)
    renew(state, lease, now)
    if lease.members is not None:
        outcome = reload_beside(state, lease, lease.members, command, now)
        if outcome is not None:
            return outcome
    if lease.phase is Phase.RELOADING:
        return supersede_ticket(state, lease, command.wait_ms, now)
    if lease.phase is Phase.EVICTING:
        return reload_after_evict(state, lease, command, now)
    if lease.phase is Phase.ACTIVE:
        return Outcome(reply=here(state, lease))
    check_comes_back(state, lease)
    begin = seat_apart if is_large(state, lease) else seat
    return begin(state, command, command.worker_id or lease.worker_id, now)


def is_put_off(state: CacheState, command: Command) -> bool:
    """Tell whether a command only adds parts behind the unsettled ones, and so need not wait until those are done."""
    has_others = state.unsettled.parts or state.unsettled.leaving
    if has_others or not isinstance(command, Evict | Reload):
        return False
    lease = state.leases.by_id.get(command.lease_id)  # type: ignore[arg-type]  # None is in no book
    return lease is not None and lease.members is None and is_large(state, lease)


def _check_one_of(**choices: object) -> None:
    given = [name for name, value in choices.items() if value]
    if len(given) != 1:
        msg = f"set exactly one of {', '.join(choices)}, not {' and '.join(given) or 'none'}"
        raise InvalidError(msg, resource=given[1] if given else next(iter(choices)))
