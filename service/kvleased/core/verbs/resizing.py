"""Own what an operator changes of a running cache: the limits of tenants, and how many blocks can be granted.

Each change is made whole, or refused with numbers and then nothing has changed. New limits take no blocks away: a
tenant above its limits gets no more blocks until it is below.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from kvlease.errors import NeverFitsError, PoolFullError
from kvleased.core.admission.parking import park, unpark
from kvleased.core.blocks.history import DepartureReason
from kvleased.core.blocks.pool import Pool
from kvleased.core.commands import Limit, Resize
from kvleased.core.effects import Done, Outcome, Resized, Tier
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.shape import CacheShape
from kvleased.core.state import CacheState
from kvleased.core.tenancy.holdings import holdings
from kvleased.core.tenancy.tenants import num_owed, pinned_by_tenant, victims
from kvleased.core.verbs.seating import can_still_fit
from kvleased.counted import are, counted

_LATER: Final = "try again when leases have ended, or drain the cache"
_SOON: Final = "try again in a moment"
_ADVICE: Final = {
    "leased": _LATER,
    "in_magazine": "end the engines that have magazines (kvlease magazines)",
    "pinned": "end pins with kvlease unpin (kvlease pins lists them)",
    "copying": _SOON,
    "scrubbing": _SOON,
    "quarantined": "end the workers whose leases have expired (kvlease leases)",
    "bad": "retired blocks never leave the pool",
}
"""What an operator can do about blocks that cannot leave a pool, by what they are held for."""
_NAMES = {Tier.DEVICE: "device_blocks", Tier.HOST: "host_slots"}


# Limits -----------------------------------------------------------------------------------------------------------


def limit(state: CacheState, command: Limit, now: float) -> Outcome:
    """Apply new limits of tenants from now on; refuse waiting calls for more than their tenant may ever have."""
    del now
    shape = limited(state.shape, command)
    check_owed(state, shape)
    state.reshape(shape)
    _refuse_what_never_fits(state)
    return Outcome(reply=Done())


def limited(shape: CacheShape, command: Limit) -> CacheShape:
    """Return a cache's shape with new limits of tenants."""
    return replace(shape, tenants=command.tenants, tenant_default=command.tenant_default)


def check_owed(state: CacheState, shape: CacheShape) -> None:
    """Refuse a shape in which the pinned blocks leave no room for the tenants' minima."""
    pinned = pinned_by_tenant(state)
    need = sum(pinned.values()) + num_owed(shape.tenants, pinned)
    if need > shape.usable_blocks:
        msg = (
            f"{are(sum(pinned.values()), 'block')} pinned and "
            f"{are(need - sum(pinned.values()), 'more block')} guaranteed to tenants, but only "
            f"{shape.usable_blocks} can be granted; unpin some, or lower the minima"
        )
        raise PoolFullError(
            msg, resource="tenant_minima", need=need, available=shape.usable_blocks,
            limit=state.shape.usable_blocks, retry_after_ms=state.shape.retry_after_ms,
        )  # fmt: skip


def _refuse_what_never_fits(state: CacheState) -> None:
    """Refuse waiting calls that can never be granted any more, also those that wait for a store's answer."""
    for waiter in list(state.callers):
        if not can_still_fit(state, waiter):
            state.waiting.leave(waiter.ticket)
            state.asking.pop(waiter.ticket, None)


# Blocks -----------------------------------------------------------------------------------------------------------


def resize(state: CacheState, command: Resize, now: float) -> Outcome:
    """Make a pool grant so many blocks and park the others; cached blocks among these are dropped from this tier."""
    del now
    pool = state.device if command.tier is Tier.DEVICE else state.host
    before, most = pool.num_usable - pool.num_parked, pool.num_usable
    _check_capacity(command, most)
    count = before - command.num_blocks
    if count > pool.num_available:
        raise _in_use(state, command, pool, count)
    shape = state.shape
    if command.tier is Tier.DEVICE:
        shape = replace(shape, parked_blocks=most - command.num_blocks)
        shape = shape if command.limits is None else limited(shape, command.limits)
        check_owed(state, shape)
    num_evicted = _park(state, pool, count) if count > 0 else 0
    if count < 0:
        unpark(pool, pool.parked_ids[:-count])
    if command.tier is Tier.DEVICE:
        state.reshape(shape)
        _refuse_what_never_fits(state)
    return Outcome(
        reply=Resized(
            num_blocks=command.num_blocks, num_parked=pool.num_parked, num_evicted=num_evicted
        )
    )


def _check_capacity(command: Resize, most: int) -> None:
    """Refuse more blocks than memory was registered for, and for the device pool also 0 blocks."""
    least = 1 if command.tier is Tier.DEVICE else 0
    if least <= command.num_blocks <= most:
        return
    name = _NAMES[command.tier]
    is_more = command.num_blocks > most
    advice = (
        "to get more blocks, register another cache"
        if is_more
        else "to grant no blocks, drain the cache"
    )
    msg = (
        f"the {command.tier.value} pool was registered with {most} blocks and can grant from {least} to {most}, not "
        f"{command.num_blocks}; {advice}"
    )
    raise NeverFitsError(
        msg, resource=name, need=command.num_blocks, available=most, limit=most,
        remedies=(f"num_blocks={most if is_more else least}",),
    )  # fmt: skip


def _in_use(state: CacheState, command: Resize, pool: Pool, count: int) -> PoolFullError:
    found = holdings(state, pool, None)
    held = {one.state: one.num_blocks for one in found if one.state in _ADVICE}
    told = ", ".join(f"{num_blocks} {name.replace('_', ' ')}" for name, num_blocks in held.items())
    advice = "; ".join(dict.fromkeys(_ADVICE[name] for name in held))
    msg = (
        f"{counted(count, 'block')} would have to leave the {command.tier.value} pool, but only {pool.num_available} "
        f"can: among the others are {told}; {advice}"
    )
    return PoolFullError(
        msg, resource=_NAMES[command.tier], need=count, available=pool.num_available,
        limit=pool.num_usable - pool.num_parked, retry_after_ms=state.shape.retry_after_ms,
        holdings=found,
    )  # fmt: skip


def _park(state: CacheState, pool: Pool, count: int) -> int:
    """Park blocks, those at the end of the memory first; return how many cached ones were dropped."""
    deficit = max(0, count - pool.num_free)
    if deficit:
        leaving = (
            victims(state, None, deficit, NOWHERE)
            if pool is state.device
            else pool.victims(deficit, NOWHERE)
        )
        assert len(leaving) == deficit, "as many as can be had"
        pool.evict(leaving, DepartureReason.RESIZED)
        state.counters["blocks_cleared"] += deficit
        state.tell("blocks_evicted", num_blocks=deficit)
    park(pool, np.sort(pool.free.ids)[-count:])
    return deficit
