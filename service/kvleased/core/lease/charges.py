"""Own how many leases each tenant has, where some may have only so many; charged and refunded by the book."""

from collections import Counter
from collections.abc import Iterable


class Charges:
    """The live leases of each tenant that has any."""

    def __init__(self, tenants: Iterable[int]) -> None:
        """Begin with the tenants of the leases that there are."""
        self.counts: Counter[int] = Counter(tenants)

    def __repr__(self) -> str:
        """Show the counts."""
        return f"<Charges {dict(self.counts)}>"

    def charge(self, tenant: int) -> None:
        """Count one lease more."""
        self.counts[tenant] += 1

    def refund(self, tenant: int) -> None:
        """Count one lease less."""
        self.counts[tenant] -= 1
        if not self.counts[tenant]:
            del self.counts[tenant]
