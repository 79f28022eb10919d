"""Own how many of a cache's rows and pins are kept for each tenant; who has how many now is the state's business.

The allowance of a tenant, out of a number of rows, or of pins, is

    the part of them that its minimum is of the pool  +  an equal part, among those attached, of half of all others

and no more than it may have. The parts of the minima are rounded up as long as all of them fit, else down.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Self

from kvleased.core.limits import TenantLimits
from kvleased.core.shape import CacheShape


class Allowances:
    """What is kept of so many rows, or pins, under the limits of a cache."""

    def __init__(
        self, shape: CacheShape, count: int, most_of: Callable[[TenantLimits], int]
    ) -> None:
        """Divide them; `most_of` tells how many a tenant with such limits may have."""
        self._most_of = most_of
        self._tenants, self._default = shape.tenants, shape.tenant_default
        self.parts = _parts(shape, count)
        """Those of the minima, by tenant."""
        self._num_even = (count - sum(self.parts.values())) // 2
        """Those that are kept in equal parts for all who are attached."""
        self.most = sum(self.parts.values()) + self._num_even
        """What is kept for all tenants together, at most."""

    @classmethod
    def of_rows(cls, shape: CacheShape) -> Self:
        """Divide the rows of the block table, of which nobody is kept more than its leases may be."""
        return cls(shape, shape.max_leases, lambda limits: limits.leases_max)

    @classmethod
    def of_pins(cls, shape: CacheShape) -> Self:
        """Divide the pins; several may hold the same blocks, so a budget of blocks bounds none unless it is 0."""
        count = shape.max_pins
        return cls(shape, count, lambda limits: count if limits.pinned_blocks_max else 0)

    def __repr__(self) -> str:
        """Show the parts."""
        return f"<Allowances {self.parts}, {self._num_even} in equal parts>"

    def owed(
        self, has: Mapping[int, int], attached: AbstractSet[int], others: Iterable[int]
    ) -> int:
        """Count what the others still lack of what is kept for them."""
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
