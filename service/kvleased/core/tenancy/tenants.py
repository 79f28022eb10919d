"""Own what each tenant may have of the device pool: minimum, maximum and share; whose blocks leave first; and pins.

A tenant uses the blocks that hold its bytes and are not free, whether they are held or not. Three rules:

- maximum: a call that would take its tenant above the maximum gets the rest only by evicting the tenant's own blocks;
- minimum: other tenants cannot evict a tenant's cached blocks up to its minimum. They do not get the blocks that an
  attached tenant still lacks for its minimum, nor may they hold cached blocks that would have to leave for it; but they
  may share blocks that are held already;
- share: blocks are evicted from the tenants whose use is furthest above their share of the pool. Shares go by weight
  among the attached tenants, and the caller's use counts as what it will be.

With no limits and only one tenant, none of this costs anything.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvlease.errors import NeverFitsError, PoolFullError
from kvleased.core.commands import Pin
from kvleased.core.effects import Direction
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.limits import TenantLimits
from kvleased.core.prefix.chains import asking_for
from kvleased.core.prefix.looking import tenants_of
from kvleased.core.state import CacheState
from kvleased.core.tenancy.holdings import holdings
from kvleased.core.tier.flights import Purpose
from kvleased.counted import are, counted

TENANT_BLOCKS: Final = "tenant_blocks"
"""The resource that a tenant's maximum limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFacts:
    """What one tenant has in a cache and what it may have, at one instant."""

    tenant_digest: int
    used_blocks: int
    """Blocks that hold its bytes."""
    held_blocks: int
    """Those of the used blocks that are held, so that they cannot be evicted."""
    pinned_blocks: int
    min_blocks: int
    max_blocks: int
    """At most the blocks of the pool that can be granted."""
    pinned_blocks_max: int
    weight: float
    num_leases: int
    leases_max: int
    """At most the rows of the block table."""


def list_tenants(state: CacheState) -> tuple[TenantFacts, ...]:
    """Describe every tenant that is attached, configured or uses blocks, by digest."""
    usage, pinned = state.device.usage(), pinned_by_tenant(state)
    digests = {*usage, *state.workers.values(), *state.shape.tenants}
    leases = state.leases_by_tenant()
    return tuple(
        _facts(state, one, usage.get(one, (0, 0)), (pinned, leases)) for one in sorted(digests)
    )


def _facts(
    state: CacheState,
    digest: int,
    usage: tuple[int, int],
    has: tuple[dict[int, int], Counter[int]],
) -> TenantFacts:
    pinned, leases = has
    limits, usable = limits_of(state, digest), state.shape.usable_blocks
    return TenantFacts(
        tenant_digest=digest,
        used_blocks=usage[0],
        held_blocks=usage[0] - usage[1],
        pinned_blocks=pinned.get(digest, 0),
        min_blocks=limits.min_blocks,
        max_blocks=min(limits.max_blocks, usable),
        pinned_blocks_max=min(limits.pinned_blocks_max, usable),
        weight=limits.weight,
        num_leases=leases[digest],
        leases_max=min(limits.leases_max, state.shape.max_leases),
    )


def limits_of(state: CacheState, tenant: int) -> TenantLimits:
    """Return the limits of a tenant."""
    return state.shape.tenants.get(tenant, state.shape.tenant_default)


# Maximum and minimum ----------------------------------------------------------------------------------------------


def check_tokens_fit(
    state: CacheState, tenant: int, num_tokens: int, *, num_keys: int = 0, least_tokens: int = 1
) -> None:
    """Refuse a request for more tokens than its tenant can ever have blocks for.

    The refusal proposes fewer tokens, but not fewer than `least_tokens`.
    """
    limit, most = limits_of(state, tenant).max_blocks, state.covering.most
    need = sum(most(num_tokens))
    if need <= limit:
        return
    longest = most_tokens(state, tenant, num_tokens)
    helps = longest >= least_tokens
    changes = (asking_for(longest, num_keys, state.shape.hash_tokens),) if helps else ()
    raise _above_maximum(state, tenant, need, changes)


def most_tokens(state: CacheState, tenant: int, num_tokens: int) -> int:
    """Return how many of `num_tokens` tokens a tenant can ever have blocks for."""
    limit, most = limits_of(state, tenant).max_blocks, state.covering.most
    sizes = range(1, num_tokens + 1)
    return bisect_left(sizes, True, key=lambda tokens: sum(most(tokens)) > limit)


def check_fits(state: CacheState, tenant: int, num_blocks: int) -> None:
    """Refuse a call that takes more blocks than its tenant can ever have."""
    if num_blocks > limits_of(state, tenant).max_blocks:
        raise _above_maximum(state, tenant, num_blocks, ())


def _above_maximum(
    state: CacheState, tenant: int, num_blocks: int, remedies: tuple[str, ...]
) -> NeverFitsError:
    limits = limits_of(state, tenant)
    limit = limits.max_blocks
    too_low = [name for name, most_blocks in limits.maxima if most_blocks < num_blocks]
    msg = (
        f"{are(num_blocks, 'block')} needed, but the tenant can never have more than {limit}; "
        f"ask for fewer tokens, or raise the tenant's {' and '.join(too_low) or 'maximum'}"
    )
    return NeverFitsError(
        msg,
        resource=TENANT_BLOCKS,
        need=num_blocks,
        available=max(0, available_to(state, tenant, NOWHERE)),
        limit=limit,
        remedies=remedies,
    )


class Use(NamedTuple):
    """What tenants use of the device pool at some instant."""

    by_tenant: dict[int, tuple[int, int]]
    """By tenant: the blocks in use, and those of them that can be evicted."""
    num_free: int


def use_of(state: CacheState) -> Use:
    """Return what tenants use now."""
    return Use(state.device.usage(), state.device.num_free)


def available_to(state: CacheState, tenant: int, protected: Ids, use: Use | None = None) -> int:
    """Count the blocks that a tenant's call could get besides its own prefix, within all limits.

    That is now, or when tenants use what `use` says. A number below 0 means that the tenant has more than its maximum,
    or more than the other tenants' minima leave it. Then it cannot even have its prefix, because cached blocks that it
    holds could no longer be evicted for those minima. If the whole prefix is held already, the number is at least 0.
    """
    use = use or use_of(state)
    used, cached = use.by_tenant.get(tenant, (0, 0))
    num_taken = num_idle(state, protected)
    within_maximum = limits_of(state, tenant).max_blocks - used + cached - num_taken
    available = min(_left_by_minima(state, tenant, protected, use), within_maximum)
    return available if _is_any_taken(state, protected) else max(0, available)


def _is_any_taken(state: CacheState, blocks: Ids) -> bool:
    """Tell whether holding these blocks takes any out of the cache: one held by nothing but copies to the host pool."""
    if not len(blocks):
        return False
    holds = state.device.holds[blocks]
    for flight in state.flights.values():
        if flight.direction is Direction.OFFLOAD and flight.purpose is not Purpose.PREEMPT:
            holds = holds - np.isin(blocks, flight.sources)
    return not holds.all()


def _left_by_minima(state: CacheState, tenant: int, protected: Ids, use: Use) -> int:
    """Count the blocks that a tenant could get without its own maximum; below 0, some other's minimum is not left."""
    usage = use.by_tenant
    _, cached = usage.get(tenant, (0, 0))
    within_pool = use.num_free + cached - num_idle(state, protected)
    for other, (in_use, evictable) in usage.items():
        if other != tenant:
            within_pool += max(0, min(evictable, in_use - limits_of(state, other).min_blocks))
    for other in set(state.workers.values()) - {tenant}:
        in_use, _ = usage.get(other, (0, 0))
        within_pool -= max(0, limits_of(state, other).min_blocks - in_use)
    return within_pool


def may_take_free(state: CacheState, tenant: int, count: int) -> bool:
    """Tell whether a tenant may have so many free blocks without giving up any of its own."""
    is_below = not num_above_maximum(state, tenant, count)
    return is_below and count <= available_to(state, tenant, NOWHERE)


def limit_of(state: CacheState, tenant: int, available: int) -> tuple[str, int]:
    """Return the resource because of which a tenant gets only `available` blocks, and how much of it there is."""
    most, usable = limits_of(state, tenant).max_blocks, state.shape.usable_blocks
    used, cached = state.device.usage().get(tenant, (0, 0))
    if most < usable and most - used + cached <= available:
        return TENANT_BLOCKS, most
    return "device_blocks", usable


def of_one_tenant(state: CacheState, below: Ids) -> Ids:
    """Return the slots, numbered as in `looking`, that hold bytes of the tenant of the first slot.

    Their bytes go to blocks that need no scrubbing for that tenant. That matters if a copy fails: the block then keeps
    its old bytes, although it counts as that tenant's.
    """
    tenants = tenants_of(state, below)
    own: Ids = below[tenants == tenants[:1]]
    return own


def is_held_back(state: CacheState, tenant: int, count: int, protected: Ids) -> bool:
    """Tell whether only tenants' limits keep a call from its blocks, so that other calls need not wait behind it."""
    in_all = state.device.num_available - num_idle(state, protected)
    return available_to(state, tenant, protected) < count <= in_all


def num_idle(state: CacheState, blocks: Ids) -> int:
    """Count those of some cached blocks that nobody holds."""
    return int(np.count_nonzero(state.device.holds[blocks] == 0)) if len(blocks) else 0


def num_above_maximum(state: CacheState, tenant: int, count: int) -> int:
    """Count the blocks of its own that a tenant must give up to get `count`; for a count of 0 that is none."""
    if not state.is_limited or not count:
        return 0
    used, _ = state.device.usage().get(tenant, (0, 0))
    return max(0, used + count - limits_of(state, tenant).max_blocks)


# Victims ----------------------------------------------------------------------------------------------------------


def victims(
    state: CacheState, tenant: int | None, count: int, protected: Ids, *, num_own: int = 0
) -> Ids:
    """Return up to `count` blocks to evict for a tenant, at least `num_own` of them its own; change nothing.

    A tenant of None is an operator, who may evict anybody's blocks. The protected blocks are the tenant's own.
    """
    device = state.device
    if device.owners is None:
        return device.victims(count, protected)
    usage, attached = device.usage(), set(state.workers.values())
    total = sum(limits_of(state, one).weight for one in attached)
    heights, caps = [], []
    for one, (used, cached) in usage.items():
        limits = limits_of(state, one)
        share = int(state.shape.usable_blocks * limits.weight / total) if one in attached else 0
        if one == tenant:
            heights.append(used - share + count - num_own)
            caps.append(cached - num_idle(state, protected) - num_own)
        else:
            heights.append(used - share)
            floor = 0 if tenant is None else limits.min_blocks
            caps.append(max(0, min(cached, used - floor)))
    counts = level_out(heights, caps, count - num_own)
    found = [
        device.owners.coldest(one, number + (num_own if one == tenant else 0), protected)
        for one, number in zip(usage, counts, strict=True)
        if number or (num_own and one == tenant)
    ]
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if found else NOWHERE


def level_out(heights: Sequence[int], caps: Sequence[int], count: int) -> list[int]:
    """Return how much of `count` to take from each height: always from the highest, and from none more than its cap."""
    if count >= sum(caps):
        return list(caps)

    def taken(level: int) -> list[int]:
        return [min(cap, max(0, one - level)) for one, cap in zip(heights, caps, strict=True)]

    lowest = min(one - cap for one, cap in zip(heights, caps, strict=True))
    levels = range(lowest, max(heights) + 1)
    # The lowest level at which no more than `count` is taken; the rest comes from heights above the level below it.
    level = levels[bisect_left(levels, True, key=lambda one: sum(taken(one)) <= count)]
    counts, below = taken(level), taken(level - 1)
    missing = count - sum(counts)
    for at in range(len(counts)):
        more = min(missing, below[at] - counts[at])
        counts[at] += more
        missing -= more
    return counts


def own_victims(state: CacheState, tenant: int, count: int) -> Ids:
    """Return up to `count` of a tenant's own blocks that would be evicted first; change nothing."""
    _, cached = state.device.usage().get(tenant, (0, 0))
    num_own = min(count, cached)
    return victims(state, tenant, num_own, NOWHERE, num_own=num_own)


def only_of(state: CacheState, blocks: Ids, tenant: int | None) -> Ids:
    """Return those of the blocks that hold a tenant's bytes; all of them for an operator, whose tenant is None."""
    return blocks if tenant is None else blocks[state.device.records.tenant[blocks] == tenant]


# Pins -------------------------------------------------------------------------------------------------------------


def is_foreign(state: CacheState, blocks: Ids, tenant: int | None) -> bool:
    """Tell whether some of a pin's blocks are another tenant's; False for an operator."""
    return len(only_of(state, blocks, tenant)) < len(blocks)


def pinned_by_tenant(state: CacheState, more: Ids = NOWHERE) -> dict[int, int]:
    """Count the pinned blocks, each once, by the tenant whose bytes they hold; `more` counts as pinned, too."""
    if not state.pins and not len(more):
        return {}
    is_pinned = np.zeros(len(state.device), np.bool_)
    for blocks in (*state.pins.values(), more):
        is_pinned[blocks] = True
    digests, counts = np.unique(state.device.records.tenant[is_pinned], return_counts=True)
    return dict(zip(digests.tolist(), counts.tolist(), strict=True))


def blocks_to_pin(state: CacheState, command: Pin) -> Ids:
    """Return the cached blocks that a Pin names, or refuse it if they are more than may be pinned.

    An operator may pin as many blocks as all tenants together. Pins never take blocks that a tenant's minimum needs.
    """
    tenant = command.tenant_digest
    blocks = only_of(state, state.device.cached(state.covering.every_key(command.keys)), tenant)
    before, after = pinned_by_tenant(state), pinned_by_tenant(state, blocks)
    limit = state.shape.usable_blocks - num_owed(state.shape.tenants, after)
    if tenant is None:
        pinned, need = sum(before.values()), sum(after.values())
        known = {*state.workers.values(), *state.shape.tenants, *state.device.usage()}
        limit = min(limit, sum(limits_of(state, one).pinned_blocks_max for one in known))
    else:
        pinned, need = before.get(tenant, 0), after.get(tenant, 0)
        limit -= sum(after.values()) - need
        limit = min(limit, limits_of(state, tenant).pinned_blocks_max)
    # What is pinned already may be more than a limit that was lowered, or than a pool that was made smaller, allows.
    if need > max(limit, pinned):
        msg = (
            f"{counted(need - pinned, 'more block')} would be pinned, but only {max(0, limit - pinned)} more may be; "
            "unpin some, or raise the tenant's pinned_percent_max"
        )
        raise PoolFullError(
            msg, resource="pinned_blocks", need=need - pinned, available=max(0, limit - pinned),
            limit=limit, retry_after_ms=state.shape.retry_after_ms, rule="pin_budget",
            holdings=holdings(state, state.device, tenant),
        )  # fmt: skip
    if state.is_limited:
        _check_minima(state, blocks, tenant)
    return blocks


def _check_minima(state: CacheState, blocks: Ids, tenant: int | None) -> None:
    """Refuse a pin of cached blocks that are owed to an attached tenant below its minimum.

    An operator's pin may have blocks of several tenants, which count as if they were pinned one tenant after another.
    """
    owners, use, num_before = state.device.records.tenant[blocks], use_of(state), 0
    for owner in np.unique(owners).tolist():
        own = blocks[owners == owner]
        num_cached = num_idle(state, own)
        left = _left_by_minima(state, owner, own, use)
        if num_cached and left < 0:
            need, available = num_idle(state, blocks), num_before + max(0, num_cached + left)
            msg = (
                f"{need} cached blocks would be pinned, but only {available} may be: another tenant is below its "
                "minimum and must be able to get the others; pin fewer, or unpin some"
            )
            raise PoolFullError(
                msg, resource="pinned_blocks", need=need, available=available,
                limit=state.shape.usable_blocks, retry_after_ms=state.shape.retry_after_ms,
                rule="tenant_minimum", holdings=holdings(state, state.device, tenant),
            )  # fmt: skip
        in_use, evictable = use.by_tenant[owner]
        use.by_tenant[owner] = (in_use, evictable - num_cached)
        num_before += num_cached


def num_owed(tenants: Mapping[int, TenantLimits], pinned: Mapping[int, int]) -> int:
    """Count the blocks of all minima that are not already pinned for their tenants."""
    return sum(max(0, limits.min_blocks - pinned.get(one, 0)) for one, limits in tenants.items())
