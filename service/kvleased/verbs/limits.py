"""Own the way from the tenants of the settings to the limits that a core works with; what they mean is told there."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor

from kvleased.core.limits import TenantLimits
from kvleased.core.shape import CacheShape
from kvleased.registry import tenant_digest, tenant_key
from kvleased.settings import TenantSettings


def with_tenants(
    shape: CacheShape, tenants: Mapping[str, TenantSettings], root_secret: bytes
) -> CacheShape:
    """Return the shape of a cache with the limits of its tenants, in blocks."""
    usable_blocks = shape.usable_blocks
    minima = _minima(tenants, usable_blocks)
    return replace(
        shape,
        tenants={
            digest: _limits(tenants[name], minima[name], usable_blocks)
            for digest, name in named(tenants, root_secret).items()
        },
        tenant_default=_limits(TenantSettings(), 0, usable_blocks),
    )


def named(tenants: Iterable[str], root_secret: bytes) -> dict[int, str]:
    """Return the names of tenants by the digests that the core knows them by."""
    return {tenant_digest(tenant_key(root_secret, name)): name for name in tenants}


def _minima(tenants: Mapping[str, TenantSettings], usable_blocks: int) -> dict[str, int]:
    """Return the minima, rounded up for as long as they are no more than the pool together."""
    shares = {
        name: _part(usable_blocks, tenant.min_percent) for name, tenant in sorted(tenants.items())
    }
    minima = {name: floor(share) for name, share in shares.items()}
    num_left = usable_blocks - sum(minima.values())
    for name in [name for name, share in shares.items() if ceil(share) > minima[name]][:num_left]:
        minima[name] += 1
    return minima


def _limits(tenant: TenantSettings, min_blocks: int, usable_blocks: int) -> TenantLimits:
    max_blocks = floor(_part(usable_blocks, tenant.max_percent))
    return TenantLimits(
        min_blocks=min(min_blocks, max_blocks),
        max_blocks=max_blocks,
        weight=tenant.weight,
        pinned_blocks_max=floor(_part(usable_blocks, tenant.pinned_percent_max)),
    )


def _part(num_blocks: int, percent: float) -> Fraction:
    """Return a share of blocks, free of the error that 29 % of 100 would have otherwise."""
    return Fraction(str(percent)) * num_blocks / 100
