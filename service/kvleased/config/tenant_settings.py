"""Own the limits that one tenant may be given, with their units and defaults, and what they must add up to."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from kvleased.config.setting_kinds import Bytes, Percent
from kvleased.config.strict_numbers import StrictNumbers


class TenantSettings(StrictNumbers):
    """The limits of one tenant in the device pool of each cache; a tenant that is not named has the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_percent: Percent = 0.0
    """Percentage of the pool that the tenant can always get."""
    max_percent: Percent = 100.0
    """Percentage of the pool that the tenant's blocks may take at most, cached ones included."""
    weight: float = Field(default=1.0, gt=0, le=1_000, allow_inf_nan=False)
    """The tenant's share of the pool is its weight among the attached tenants'; above it, a tenant gives way first."""
    pinned_percent_max: Percent = 25.0
    """Percentage of the pool that the tenant's pins may hold at most."""
    min_bytes: Bytes = 0
    """Bytes of the pool that the tenant can always get; the larger of both minima counts."""
    max_bytes: Bytes = 0
    """Bytes of the pool that the tenant's blocks may take at most; the smaller of both maxima counts; 0 is no limit."""
    leases_max: int = Field(default=0, ge=0, le=1 << 20)
    """Most leases of one cache that the tenant has at once; 0 is no limit but the cache's."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_percent > self.max_percent:
            message = f"min_percent ({self.min_percent:g}) must be at most max_percent ({self.max_percent:g})"
            raise ValueError(message)
        if self.max_bytes and self.min_bytes > self.max_bytes:
            message = f"min_bytes ({self.min_bytes}) must be at most max_bytes ({self.max_bytes})"
            raise ValueError(message)
        return self


def check_minima(tenants: Mapping[str, TenantSettings]) -> None:
    """Raise ValueError if the minima of all tenants together are more than 100 %."""
    percent = sum(Fraction(str(tenant.min_percent)) for tenant in tenants.values())
    if percent > 100:  # noqa: PLR2004 - per cent
        message = f"the min_percent of all tenants add up to {float(percent):g}; the sum must be at most 100"
        raise ValueError(message)
