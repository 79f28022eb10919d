"""Own how many leases each tenant has, where leases are limited; `LeaseBook` charges and refunds them."""

from collections import Counter
from collections.abc import Iterable


class Charges:
    """The live leases of each tenant that has any."""

    def __init__(self, tenants: Iterable[int]) -> None:
        """Begin with the tenants of the existing leases, one entry a lease."""
        self.counts: Counter[int] = Counter(tenants)

    def __repr__(self) -> str:
        """Show the counts."""
        return f"<Charges {dict(self.counts)}>"

    def charge(self, tenant: int) -> None:
        """Count one more lease of a tenant."""
        self.counts[tenant] += 1

    def refund(self, tenant: int) -> None:
        """Count one lease fewer of a tenant."""
        self.counts[tenant] -= 1
        if not self.counts[tenant]:
            del self.counts[tenant]
