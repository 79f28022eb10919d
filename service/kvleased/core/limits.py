"""Own what one tenant may have of a cache; where the numbers come from is the settings' business."""

from dataclasses import dataclass, field
from typing import Final

_NO_LIMIT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The limits of one tenant in one cache; the defaults are no limits."""

    min_blocks: int = 0
    """Blocks that the tenant can always get, whatever other tenants do."""
    max_blocks: int = _NO_LIMIT
    """The most blocks that may hold the tenant's bytes, cached ones included."""
    maxima: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """The names of the settings that bound `max_blocks`, each with the most blocks that it allows."""
    weight: float = 1.0
    """Its share of the pool is its weight among those of the attached tenants; one above its share gives way first."""
    pinned_blocks_max: int = _NO_LIMIT
    leases_max: int = _NO_LIMIT
    """The most leases that the tenant may have at once, in any phase."""


UNLIMITED: Final = TenantLimits()
