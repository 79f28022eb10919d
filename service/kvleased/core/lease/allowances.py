"""Own how many of a cache's rows and pins are kept for each tenant; how many each tenant has now is in the state.

A tenant's allowance, out of `count` rows or pins, is the sum of two parts, but never more than the tenant may have:

    count * (the tenant's minimum / the pool)  +  (half of what the parts of all minima leave) / (attached tenants)

The parts of the minima are rounded up if all of them then fit, and down if not.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Self

from kvleased.core.limits import TenantLimits
from kvleased.core.shape import CacheShape


class Allowances:
    """The rows, or the pins, that are kept for tenants under the limits of a cache."""

    def __init__(
        self, shape: CacheShape, count: int, most_of: Callable[[TenantLimits], int]
    ) -> None:
        """Divide `count` rows or pins; `most_of` tells how many a tenant with given limits may have."""
        self._most_of = most_of
        self._tenants, self._default = shape.tenants, shape.tenant_default
        self.parts = _parts(shape, count)
        """The part that each tenant is owed for its minimum, by tenant."""
        self._num_even = (count - sum(self.parts.values())) // 2
        """How many are kept in equal parts for all attached tenants."""
        self.most = sum(self.parts.values()) + self._num_even
        """How many are kept for all tenants together, at most."""

    @classmethod
    def of_rows(cls, shape: CacheShape) -> Self:
        """Divide the rows of the block table; no tenant is kept more rows than it may have leases."""
        return cls(shape, shape.max_leases, lambda limits: limits.leases_max)

    @classmethod
    def of_pins(cls, shape: CacheShape) -> Self:
        """Divide the pins; several may hold the same blocks, so only a block budget of 0 limits a tenant's pins."""
        count = shape.max_pins
        return cls(shape, count, lambda limits: count if limits.pinned_blocks_max else 0)

    def __repr__(self) -> str:
        """Show the parts."""
        return f"<Allowances {self.parts}, {self._num_even} in equal parts>"

    def owed(
        self, has: Mapping[int, int], attached: AbstractSet[int], others: Iterable[int]
    ) -> int:
        """Count the rows or pins that are kept for `others` and that they do not have yet; `has` is what each has."""
        even = self._num_even // max(1, len(attached))
        return sum(
            max(0, self._kept(one, even if one in attached else 0) - has.get(one, 0))
            for one in others
        )

    def _kept(self, tenant: int, even: int) -> int:
        limits = self._tenants.get(tenant, self._default)
        return min(self._most_of(limits), self.parts.get(tenant, 0) + even)


def _parts(shape: CacheShape, count: int) -> dict[int, int]:
    minima = {
        one: count * limits.min_blocks for one, limits in shape.tenants.items() if limits.min_blocks
    }
    usable = shape.usable_blocks
    rounded_up = {one: -(-part // usable) for one, part in minima.items()}
    if sum(rounded_up.values()) <= count:
        return rounded_up
    return {one: part // usable for one, part in minima.items()}
