"""Own what one tenant may have of a cache; where the numbers come from is the settings' business."""

from dataclasses import dataclass
from typing import Final

_NO_LIMIT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The limits of one tenant in one cache; the defaults are no limits."""

    min_blocks: int = 0
    """Blocks that the tenant can always come to have, whatever the others do."""
    max_blocks: int = _NO_LIMIT
    """Blocks that the tenant's bytes are in at most, cached ones among them."""
    weight: float = 1.0
    """Its share of the pool is its weight among those of the attached tenants; whoever is above it gives way first."""
    pinned_blocks_max: int = _NO_LIMIT
    leases_max: int = _NO_LIMIT
    """Leases that the tenant has at most at once, in whatever phase."""


UNLIMITED: Final = TenantLimits()
