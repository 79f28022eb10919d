"""Own whether a tenant may have another row of the block table, or another pin, or must leave it to other tenants.

If some tenant has limits, no tenant must be shut out because another took all rows with leases of one token each, or
all pins for one key. So some rows and pins are kept for tenants; `allowances` tells how many:

- rows are kept for attached tenants, if some tenant has limits: other tenants' rows come back when their leases end;
- pins are kept for attached tenants, and, for their minima, also for tenants without a worker: a pin ends only when
  somebody unpins it.
"""

from collections import Counter

from kvlease.errors import PoolFullError
from kvleased.core.ids import Ids
from kvleased.core.state import CacheState
from kvleased.core.tenancy.holdings import holdings
from kvleased.core.tenancy.tenants import limits_of
from kvleased.counted import there_are


def lacks_row(state: CacheState, tenant: int, *, num_ending: int = 0) -> bool:
    """Tell whether a tenant may have no further row although some are free; asked only if some tenant has limits.

    So many leases of the tenant are taken for ended.
    """
    is_at_most = is_capped(state, tenant, num_ending=num_ending)
    return is_at_most or must_leave_rows(state, tenant, num_ending=num_ending)


def is_capped(state: CacheState, tenant: int, *, num_ending: int = 0) -> bool:
    """Tell whether a tenant has as many leases as it may have."""
    if not state.caps_leases:
        return False
    return state.leases_by_tenant()[tenant] - num_ending >= limits_of(state, tenant).leases_max


def must_leave_rows(state: CacheState, tenant: int, *, num_ending: int = 0) -> bool:
    """Tell whether the free rows are all kept for other tenants; asked only if some tenant has limits."""
    num_free, allowances = len(state.leases.free_rows) + num_ending, state.row_allowances
    if num_free > allowances.most:
        return False
    attached = set(state.workers.values())
    return num_free <= allowances.owed(state.leases_by_tenant(), attached, attached - {tenant})


def check_pins(state: CacheState, tenant: int | None) -> None:
    """Refuse a pin if there are as many as allowed, or if the last ones are kept for tenants other than this one."""
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
        f"{there_are(len(state.pins), 'pin')} of at most {limit}{kept}; unpin one first",
        resource="pins",
        need=1,
        available=0,
        limit=limit,
        retry_after_ms=state.shape.retry_after_ms,
        rule="kept_pins" if kept else "pins",
        holdings=holdings(state, state.device, None),
    )


def pins_by_tenant(state: CacheState) -> Counter[int]:
    """Count the pins of each tenant; an operator's pin that holds blocks of several tenants is nobody's."""
    found = Counter(only_owner(state, blocks) for blocks in state.pins.values())
    del found[0]
    return found


def only_owner(state: CacheState, blocks: Ids) -> int:
    """Return the digest of the tenant whose blocks a pin holds; 0 if they are of several tenants."""
    owners = state.device.records.tenant[blocks]
    return int(owners[0]) if (owners == owners[0]).all() else 0
