"""Own why a request is too long for a cache, whatever else is in it; when to ask is `granting`'s business."""

from kvlease.errors import NeverFitsError
from kvleased.core.admission.parking import larger
from kvleased.core.lease.leases import Lease
from kvleased.core.prefix.chains import asking_for
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import check_fits, most_tokens
from kvleased.counted import are, counted


def never_fits(
    state: CacheState, num_tokens: int, tenant: int, num_keys: int, least_tokens: int
) -> NeverFitsError:
    """Explain why no lease will ever cover so many tokens, and how many this tenant's can, if that would help."""
    shape, covering = state.shape, state.covering
    longest, limit, most = covering.longest_tokens, shape.usable_blocks, covering.wanted(num_tokens)
    need, asked, at_most = sum(most), "", most_tokens(state, tenant, longest)
    helps = at_most >= least_tokens
    less = f"ask for at most {counted(at_most, 'token')}, or " if helps else ""
    remedies = (asking_for(at_most, num_keys, shape.hash_tokens),) if helps else ()
    if not covering.is_simple:
        worst = most.index(need_most := max(most))
        asked = f", {need_most} of them in group {worst}"
    if need <= limit:
        return NeverFitsError(
            f"{are(num_tokens, 'token')} more than the longest request of {longest} tokens; {less}register the cache "
            "with more longest_request_tokens",
            resource="longest_request_tokens",
            need=num_tokens,
            available=longest,
            limit=longest,
            remedies=remedies,
        )
    more = larger(shape.parked_blocks, need - limit, "register a larger pool")
    planned, registered = covering.planned_tokens, limit + shape.parked_blocks
    if num_tokens > planned and sum(covering.wanted(planned + 1)) <= registered:
        # The pool, as it was registered, has room for more tokens than the longest request has.
        more = "register the cache with more longest_request_tokens"
        more += " and a larger pool" if need > registered else ""
    return NeverFitsError(
        f"{counted(num_tokens, 'token', 'needs', 'need')} {counted(need, 'block')}{asked}, but a lease can never have "
        f"more than {limit}; {less}{more}",
        resource="device_blocks",
        need=need,
        available=state.device.num_available,
        limit=limit,
        remedies=remedies,
    )


def check_comes_back(state: CacheState, lease: Lease) -> None:
    """Refuse the reload of a lease that has more blocks than its tenant, or the pool, can ever have by now."""
    need, limit = state.leases.num_entries(lease), state.shape.usable_blocks
    check_fits(state, lease.tenant, need)
    if need > limit:
        more = larger(state.shape.parked_blocks, need - limit, "register a larger pool")
        raise NeverFitsError(
            f"the lease has {counted(need, 'block')}, but the device pool has {limit}; release the lease, or {more}",
            resource="device_blocks",
            need=need,
            available=state.device.num_available,
            limit=limit,
        )
