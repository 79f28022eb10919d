"""Own the bringing of cached blocks to the device for later calls, by a reload of keys or an exchange."""

from bisect import bisect_left

from kvlease.errors import NeverFitsError
from kvlease.ids import BYTES_PER_KEY, WorkerId
from kvleased.core.admission.parking import larger
from kvleased.core.admission.refusals import keys_full
from kvleased.core.admission.room import num_at_once, num_available, room
from kvleased.core.commands import Reload
from kvleased.core.effects import Outcome, Reloaded
from kvleased.core.ids import Ids, first_of_each
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.prefix.chains import check_keys
from kvleased.core.prefix.looking import EVERYWHERE, coming_for, look_below, parted, tenants_of
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import check_fits, of_one_tenant
from kvleased.core.tier.flights import Flight, Purpose
from kvleased.core.verbs.moving import deadline
from kvleased.counted import are


def reload_cached(state: CacheState, command: Reload, now: float) -> Outcome:
    """Bring cached blocks of given keys back to the device, all of one tenant: that of the first block.

    A worker brings back only its own tenant's blocks.
    """
    check_keys(command.keys)
    slots = _slots(state, command, command.keys)
    count = len(slots)
    if not count:
        return Outcome(reply=Reloaded(block_ids=b"", num_reloaded=0, num_tokens=0, row=0))
    usable = state.shape.usable_blocks
    if count > usable:
        raise _never_fits(state, command, count)
    tenant, fresh = _tenant_of(state, slots), None
    check_fits(state, tenant, count)
    available = max(0, num_available(state, tenant, NOWHERE))
    if count <= available:
        fresh = room(state, count, tenant, may_wait=False)
    if fresh is None:
        caller = state.workers.get(command.worker_id or WorkerId(0))
        raise keys_full(state, (count, available), caller, _fewer_keys_at_once(state, command))
    ticket = state.next_id()
    for flight in prefetch(state, slots, fresh):
        flight.ticket, flight.ticket_deadline = ticket, deadline(command.wait_ms, now)
    return Outcome(ticket=ticket)


def prefetch(state: CacheState, slots: Ids, fresh: Ids) -> list[Flight]:
    """Start the copies that bring cached bytes from slots, numbered as in `looking`, to free blocks."""
    is_in = parted(state, slots)
    flights = []
    for purpose, is_there, first in (
        (Purpose.PREFETCH, is_in.host, 0),
        (Purpose.DISK_PREFETCH, is_in.disk, len(state.host)),
    ):
        if is_there.any():
            sources = slots[is_there] - first
            flights.append(state.fly(purpose, sources, fresh[is_there], keyed=sources >= 0))
    return flights


def _tenant_of(state: CacheState, slots: Ids) -> int:
    """Return the tenant for which slots, numbered as in `looking`, are brought back: that of the first block."""
    return int(tenants_of(state, slots[:1])[0])


def _slots(state: CacheState, command: Reload, keys: bytes) -> Ids:
    """Return the slots, numbered as in `looking`, that a call with these keys brings back."""
    tenant = None if command.worker_id is None else state.tenant_of(command.worker_id)
    below = _cached_below(state, state.covering.every_key(keys), tenant)
    return of_one_tenant(state, below)


def _cached_below(state: CacheState, keys: bytes, tenant: int | None) -> Ids:
    """Return the slots, numbered as in `looking`, of those keys that are neither on the device nor on their way."""
    entries = state.device.index.find(keys)
    is_missing = (entries < 0) & (coming_for(state, keys, tenant) < 0)
    look_below(state, keys, (entries, is_missing.copy()), EVERYWHERE, tenant)
    below = ~entries[is_missing]
    return first_of_each(below[below >= 0])


# Refusals ---------------------------------------------------------------------------------------------------------


def _never_fits(state: CacheState, command: Reload, count: int) -> NeverFitsError:
    usable = state.shape.usable_blocks
    more = larger(state.shape.parked_blocks, count - usable, "ask for fewer keys")
    return NeverFitsError(
        f"{are(count, 'block')} asked for, but the device pool has {usable}; {more}",
        resource="device_blocks",
        need=count,
        available=state.device.num_available,
        limit=usable,
        remedies=_fewer_keys(state, command, usable),
    )


def _fewer_keys_at_once(state: CacheState, command: Reload) -> tuple[str, ...]:
    """Return how many keys of a refused call there is room for now.

    A block that has just left for the call may be the first to be brought back, and be another tenant's.
    """
    tenant = _tenant_of(state, _slots(state, command, command.keys))
    return _fewer_keys(state, command, num_at_once(state, tenant, NOWHERE))


def _fewer_keys(state: CacheState, command: Reload, num_blocks: int) -> tuple[str, ...]:
    """Return how many keys of a call, from the first one on, there is room for, if that brings any block."""

    def num_wanted(num_keys: int) -> int:
        return len(_slots(state, command, command.keys[: num_keys * BYTES_PER_KEY]))

    sizes = range(1, len(command.keys) // BYTES_PER_KEY)
    num_keys = bisect_left(sizes, True, key=lambda size: num_wanted(size) > num_blocks)
    return (f"num_keys={num_keys}",) if num_keys and num_wanted(num_keys) else ()
