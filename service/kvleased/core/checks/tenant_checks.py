"""Own the invariants of tenants: the counts for each are right, and none has more than it may have."""

from collections import Counter

from kvleased.core.effects import Direction
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import limits_of, num_owed, pinned_by_tenant


def tenant_violations(state: CacheState) -> list[str]:
    """Return what does not hold for tenants: counts match the columns, maxima are kept, and minima can be had."""
    found = []
    usage = state.device.usage()
    records, usable = state.device.records, state.shape.usable_blocks
    is_used = state.device.in_use
    for flight in state.flights.values():
        if flight.direction is Direction.SCRUB:
            is_used[flight.targets] = False
    (used,) = is_used.nonzero()
    num_used = Counter(records.tenant[used].tolist())
    num_cached = Counter(records.tenant[used[state.device.order.holds(used)]].tolist())
    for digest in {*usage, *num_used}:
        counted = num_used[digest], num_cached[digest]
        if usage.get(digest, (0, 0)) != counted:
            found.append(
                f"tenant {digest} uses {counted} blocks, but {usage.get(digest)} are counted"
            )
        most = max(limits_of(state, digest).max_blocks, state.used_before.get(digest, 0))
        if counted[0] > most:
            found.append(f"tenant {digest} uses {counted[0]} blocks, but may use {most}")
    found += _lease_violations(state)
    pinned = pinned_by_tenant(state)
    if sum(pinned.values()) + num_owed(state.shape.tenants, pinned) > usable:
        found.append("pins and minima add up to more than the pool")
    return found


def _lease_violations(state: CacheState) -> list[str]:
    """Return which counts of leases are wrong, or above the tenant's limit and above what it had when that was set."""
    counted = Counter([lease.tenant for lease in state.leases.by_id.values()])
    found = []
    if counted != state.leases_by_tenant():
        found.append(
            f"tenants have {dict(counted)} leases, but {dict(state.leases_by_tenant())} are counted"
        )
    for digest, count in counted.items():
        most = max(limits_of(state, digest).leases_max, state.leases_before.get(digest, 0))
        if count > most:
            found.append(f"tenant {digest} has {count} leases, but may have {most}")
    return found
