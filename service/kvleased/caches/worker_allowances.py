"""Own how many workers there may be, and how many places are kept for which tenant; the registry has the workers.

- Half of the places are divided by `min_percent`: a tenant's part of them is kept for it, whoever attaches for it.
- Callers with a joiner's token or certificate, who come over TCP, have at most half of the places together, apart from
  those that are kept for their tenants.
- If tenants have limits, the last eighth is for tenants that have no worker yet, or fewer than are kept for them.
"""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor
from typing import Final

from kvlease.errors import BusyError
from kvleased.config.tenant_settings import TenantSettings
from kvleased.counted import counted, there_are

_JOINERS_ONE_IN: Final = 2
_MINIMA_ONE_IN: Final = 2
_NEWCOMERS_ONE_IN: Final = 8


class WorkerAllowances:
    """The places of workers, under the limits of tenants."""

    def __init__(self, tenants: Mapping[str, TenantSettings], max_workers: int) -> None:
        """Divide the places."""
        self._max_workers = max_workers
        self._max_joiners = max(1, max_workers // _JOINERS_ONE_IN)
        self._kept = _kept(tenants, max_workers // _MINIMA_ONE_IN)
        self._num_new = max_workers // _NEWCOMERS_ONE_IN if tenants else 0

    def __repr__(self) -> str:
        """Show how many places there are, and for whom some are kept."""
        return f"<WorkerAllowances {self._max_workers}, kept {self._kept}>"

    def under(self, tenants: Mapping[str, TenantSettings]) -> "WorkerAllowances":
        """Return the places under other limits."""
        return WorkerAllowances(tenants, self._max_workers)

    def require_one(self, tenant: str, has: Counter[str], num_joiners: int | None) -> None:
        """Refuse a worker of a tenant if there is no place for it; `num_joiners` is None if it is no joiner.

        Raises:
            BusyError: there is no place, or those that are left are kept for others.
        """
        num_left = self._max_workers - has.total()
        if num_left <= 0:
            message = (
                f"{there_are(has.total(), 'worker')}, as many as max_workers allows; detach one"
            )
            raise _busy(message, self._max_workers, "workers")
        is_kept_for = has[tenant] < self._kept.get(tenant, 0)
        if num_joiners is not None and num_joiners >= self._max_joiners and not is_kept_for:
            message = (
                f"{counted(num_joiners, 'worker')} attached with a joiner's token, the most that may of the "
                f"{self._max_workers} workers allowed, and no place is kept for this tenant (min_percent); detach "
                "some, or attach over the Unix socket, where this limit does not apply"
            )
            raise _busy(message, self._max_joiners, "joiners")
        num_kept = sum(
            max(0, count - has[one]) for one, count in self._kept.items() if one != tenant
        )
        if has[tenant] >= max(1, self._kept.get(tenant, 0)):
            num_kept += self._num_new
        if num_left <= num_kept:
            whose = "this tenant's" if has[tenant] else "another tenant's"
            places = "place is" if num_left == 1 else f"{num_left} places are"
            message = (
                f"{there_are(has.total(), 'worker')} of {self._max_workers}, and the last {places} "
                f"kept for other tenants; detach one of {whose}"
            )
            raise _busy(message, self._max_workers, "kept_places")


def _kept(tenants: Mapping[str, TenantSettings], count: int) -> dict[str, int]:
    parts = {
        name: Fraction(str(one.min_percent)) * count / 100
        for name, one in tenants.items()
        if one.min_percent or one.min_bytes
    }
    rounded_up = {name: max(1, ceil(part)) for name, part in parts.items()}
    if sum(rounded_up.values()) <= count:
        return rounded_up
    return {name: floor(part) for name, part in parts.items()}


def _busy(message: str, limit: int, rule: str) -> BusyError:
    return BusyError(message, resource="workers", rule=rule, need=1, available=0, limit=limit)
