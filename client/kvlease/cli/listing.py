"""Own how lists are put together from the daemon's pages; how a list looks is in `tables`."""

from dataclasses import replace
from typing import Any, Final

from kvlease.client import Client, Listed
from kvlease.replies import Inspection

PAGE_ENTRIES: Final = 256
"""Most entries that the daemon gives on one page."""
TENANTS_READ_MAX: Final = 1_024
"""Tenants among which those with the most blocks are looked for, unless more are to be shown."""
_ID_OF: Final[dict[Listed, str]] = {
    "workers": "worker_id",
    "leases": "lease_id",
    "pins": "pin_id",
    "waiting": "call_id",
    "tenants": "tenant_id",
    "magazines": "magazine_id",
}


def first_of(client: Client, cache: str, what: Listed, limit: int) -> Inspection:
    """Return the first `limit` entries of a list as one page; entries may come and go between two of its pages."""
    entries: list[Any] = []
    while True:
        after_id = getattr(entries[-1], _ID_OF[what]) if entries else 0
        wanted = min(PAGE_ENTRIES, limit - len(entries))
        page = client.inspect(cache, what, limit=wanted, after_id=after_id)
        found = getattr(page, what)
        entries += found
        if len(found) < wanted or len(entries) >= limit:
            return Inspection(num_total=page.num_total, **{what: tuple(entries)})


def shown_of(client: Client, cache: str, what: Listed, limit: int) -> Inspection:
    """Return what is shown of a list: its first entries, or the tenants that use the most blocks."""
    if what != "tenants":
        return first_of(client, cache, what, limit)
    page = first_of(client, cache, what, max(limit, TENANTS_READ_MAX))
    by_blocks = sorted(page.tenants, key=lambda one: (-one.used_blocks, one.tenant))
    return replace(page, tenants=tuple(by_blocks[:limit]))
