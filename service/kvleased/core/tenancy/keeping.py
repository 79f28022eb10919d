"""Own whether a tenant may have another row of the block table, or another pin, or is to leave it to others.

A tenant that has limits, or others beside it that have, must not be shut out because somebody took all rows with
leases of one token each, or all pins for one key. So some are kept; how many is told in `allowances`:

- rows for those that are attached, where some tenant has limits: what others hold comes back when their leases end;
- pins for those that are attached, and those of the minima for their tenants also without a worker: a pin ends only
  when somebody unpins it.
"""

from collections import Counter

from kvlease.errors import PoolFullError
from kvleased.core.ids import Ids
from kvleased.core.state import CacheState
from kvleased.core.tenancy.holdings import holdings
from kvleased.core.tenancy.tenants import limits_of
from kvleased.counted import there_are


def lacks_row(state: CacheState, tenant: int) -> bool:
    """Tell whether a tenant is to have no other row, though some are free; asked where some tenant has limits."""
    return is_capped(state, tenant) or leaves_row(state, tenant)


def is_capped(state: CacheState, tenant: int) -> bool:
    """Tell whether a tenant has as many leases as it may have."""
    if not state.caps_leases:
        return False
    return state.leases_by_tenant()[tenant] >= limits_of(state, tenant).leases_max


def leaves_row(state: CacheState, tenant: int) -> bool:
    """Tell whether the rows that are free are kept for others than a tenant; asked where some tenant has limits."""
    num_free, allowances = len(state.leases.free_rows), state.row_allowances
    if num_free > allowances.most:
        return False
    attached = set(state.workers.values())
    return num_free <= allowances.owed(state.leases_by_tenant(), attached, attached - {tenant})


def check_pins(state: CacheState, tenant: int | None) -> None:
    """Refuse a pin where there are as many as may be, or the last ones are kept for others; not for an operator."""
    limit = state.shape.max_pins
    num_left, num_kept = limit - len(state.pins), 0
    if tenant is not None:
        attached, allowances = set(state.workers.values()), state.pin_allowances
        others = attached.union(allowances.parts) - {tenant}
        num_kept = allowances.owed(pins_by_tenant(state), attached, others)
    if num_left > num_kept:
        return
    kept = f", and the last {num_left} are kept for other tenants" if num_left > 0 else ""
    raise PoolFullError(
        f"{there_are(len(state.pins), 'pin')} of {limit}{kept}; unpin one first",
        resource="pins",
        need=1,
        available=0,
        limit=limit,
        retry_after_ms=state.shape.retry_after_ms,
        rule="kept_pins" if kept else "pins",
        holdings=holdings(state, state.device, None),
    )


def pins_by_tenant(state: CacheState) -> Counter[int]:
    """Count the pins of each tenant; one of an operator that holds blocks of several is nobody's."""
    found = Counter(only_owner(state, blocks) for blocks in state.pins.values())
    del found[0]
    return found


def only_owner(state: CacheState, blocks: Ids) -> int:
    """Return the digest of the tenant whose blocks a pin holds; 0 where they are of several."""
    owners = state.device.records.tenant[blocks]
    return int(owners[0]) if (owners == owners[0]).all() else 0
