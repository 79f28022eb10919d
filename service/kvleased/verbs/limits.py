"""Own the limits of tenants that are in force, and their conversion to the limits in blocks that a core works with.

The settings give the first limits, and calls can replace them; `core.tenancy.tenants` tells what they mean.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import Final

from kvlease.errors import BusyError, NeverFitsError
from kvleased.config.tenant_settings import TenantSettings
from kvleased.core.commands import Limit
from kvleased.core.limits import UNLIMITED, TenantLimits
from kvleased.core.shape import CacheShape
from kvleased.core.tenancy.tenants import level_out
from kvleased.counted import counted
from kvleased.credentials.derived import tenant_digest, tenant_key
from kvleased.supervision.keeper import Note
from kvleased.supervision.keeper_link import KeeperLink

REVISION_MAX: Final = 2**53 - 1
"""The last revision that limits can have: JSON carries no larger number exactly."""
_DEFAULTS: Final = TenantSettings()
_PREFIX: Final = "tenant/"
"""The beginning of the names of kept limits."""


class Rules:
    """The limits of all tenants that have their own, each with a revision: 0 if they come from the settings."""

    def __init__(self, configured: Mapping[str, TenantSettings], max_tenants: int) -> None:
        """Begin with the limits from the settings."""
        self.tenants: dict[str, TenantSettings] = dict(configured)
        self._configured = frozenset(configured)
        self._revisions: dict[str, int] = {}
        """The revisions of limits that calls have set, oldest first; up to `max_tenants` are of removed limits."""
        self._max_tenants = max_tenants

    def __repr__(self) -> str:
        """Show life: how many limits there are, and how many were set by a call."""
        return f"<Rules {len(self.tenants)} tenants, {len(self._revisions)} set>"

    def of(self, tenant: str) -> tuple[TenantSettings, int]:
        """Return a tenant's limits and their revision."""
        return self.tenants.get(tenant, TenantSettings()), self._revisions.get(tenant, 0)

    def with_one(self, tenant: str, limits: TenantSettings) -> dict[str, TenantSettings]:
        """Return the limits of all tenants as they would be if one had these; a tenant with the defaults is left out.

        Raises:
            BusyError: there are as many tenants with limits as are allowed.
        """
        if limits == _DEFAULTS:
            return {name: others for name, others in self.tenants.items() if name != tenant}
        if tenant not in self.tenants and len(self.tenants) >= self._max_tenants:
            told = counted(len(self.tenants), "tenant", "has", "have")
            message = (
                f"{told} limits of their own, as many as max_tenants allows; raise max_tenants"
            )
            raise BusyError(
                message, resource="tenants", need=1, available=0, limit=self._max_tenants
            )
        return self.tenants | {tenant: limits}

    def set(self, tenant: str, limits: TenantSettings, revision: int) -> None:
        """Set limits that were checked; with the defaults the tenant has no limits of its own."""
        self._revisions.pop(tenant, None)
        self._revisions[tenant] = revision
        if limits == _DEFAULTS:
            self.tenants.pop(tenant, None)
        else:
            self.tenants[tenant] = limits

    # Restarts

    def keep(self, keeper: KeeperLink, tenant: str) -> None:
        """Have the supervisor keep a tenant's limits for the next life of the control process."""
        limits, revision = self.of(tenant)
        metadata = {"tenant": tenant, "limits": limits.model_dump(), "revision": revision}
        keeper.note(_name_of(tenant), metadata)
        self._forget_removed(keeper)

    def _forget_removed(self, keeper: KeeperLink) -> None:
        """If there are too many revisions of removed limits, drop those that were removed longest ago."""
        known = self._configured.union(self.tenants)
        removed = [name for name in self._revisions if name not in known]
        for name in removed[: -self._max_tenants]:
            del self._revisions[name]
            keeper.drop(_name_of(name))

    def recover(self, notes: Iterable[Note]) -> None:
        """Take over the limits that calls had set in an earlier life."""
        for note in notes:
            if note.name.startswith(_PREFIX):
                found = note.metadata
                self.set(found["tenant"], TenantSettings(**found["limits"]), found["revision"])


def _name_of(tenant: str) -> str:
    return f"{_PREFIX}{tenant.encode().hex()}"


def with_tenants(
    shape: CacheShape,
    tenants: Mapping[str, TenantSettings],
    root_secret: bytes,
    bytes_per_block: int = 1,
) -> CacheShape:
    """Return the shape of a cache with the limits of its tenants, in blocks.

    Raises:
        NeverFitsError: the minima are more than the pool.
    """
    found = limits_of(tenants, root_secret, shape.usable_blocks, bytes_per_block)
    return replace(shape, tenants=found.tenants, tenant_default=found.tenant_default)


def limits_of(
    tenants: Mapping[str, TenantSettings],
    root_secret: bytes,
    usable_blocks: int,
    bytes_per_block: int,
    *,
    cuts: bool = False,
) -> Limit:
    """Return the limits of tenants in blocks, for a cache that can grant `usable_blocks`.

    If the minima are more than the pool, it `cuts` the largest ones, or refuses them.

    Raises:
        NeverFitsError: the minima are more than the pool.
    """
    minima = _minima(tenants, usable_blocks, bytes_per_block, cuts=cuts)
    return Limit(
        tenants={
            digest: _limits(tenants[name], minima[name], usable_blocks, bytes_per_block)
            for digest, name in named(tenants, root_secret).items()
        },
        tenant_default=_limits(TenantSettings(), 0, usable_blocks, bytes_per_block),
    )


def named(tenants: Iterable[str], root_secret: bytes) -> dict[int, str]:
    """Return the names of tenants by their digests in the core."""
    return {tenant_digest(tenant_key(root_secret, name)): name for name in tenants}


def _minima(
    tenants: Mapping[str, TenantSettings], usable_blocks: int, bytes_per_block: int, *, cuts: bool
) -> dict[str, int]:
    """Return the minima in blocks, rounded up as far as their sum does not exceed the pool."""
    shares = {
        name: max(
            _part(usable_blocks, tenant.min_percent), Fraction(tenant.min_bytes, bytes_per_block)
        )
        for name, tenant in sorted(tenants.items())
        if tenant.min_percent or tenant.min_bytes
    }
    minima = dict.fromkeys(tenants, 0) | {name: floor(share) for name, share in shares.items()}
    num_left = usable_blocks - sum(minima.values())
    if num_left < 0 and cuts:
        return _cut(minima, -num_left)
    if num_left < 0:
        need = usable_blocks - num_left
        message = (
            f"the minima of all tenants add up to {counted(need, 'block')}, but the pool can grant only "
            f"{usable_blocks}; lower them, or register a larger pool"
        )
        raise NeverFitsError(
            message,
            resource="tenant_minima",
            need=need,
            available=usable_blocks,
            limit=usable_blocks,
        )
    for name in [name for name, share in shares.items() if ceil(share) > minima[name]][:num_left]:
        minima[name] += 1
    return minima


def _cut(minima: Mapping[str, int], count: int) -> dict[str, int]:
    """Return minima that are `count` blocks lower in all, which the largest of them give."""
    heights = list(minima.values())
    less = level_out(heights, heights, count)
    return {name: minima[name] - less[at] for at, name in enumerate(minima)}


def _limits(
    tenant: TenantSettings, min_blocks: int, usable_blocks: int, bytes_per_block: int
) -> TenantLimits:
    maxima = {"max_percent": _part_floored(usable_blocks, tenant.max_percent)}
    if tenant.max_bytes:
        maxima["max_bytes"] = tenant.max_bytes // bytes_per_block
    max_blocks = min(maxima.values())
    return TenantLimits(
        min_blocks=min(min_blocks, max_blocks),
        max_blocks=max_blocks,
        maxima=tuple(maxima.items()),
        weight=tenant.weight,
        pinned_blocks_max=_part_floored(usable_blocks, tenant.pinned_percent_max),
        leases_max=tenant.leases_max or UNLIMITED.leases_max,
    )


def _part(num_blocks: int, percent: float) -> Fraction:
    """Return a share of blocks exactly: in floating point, 29 % of 100 would not be 29."""
    numerator, denominator = _ratio(percent)
    return Fraction(num_blocks * numerator, denominator)


def _part_floored(num_blocks: int, percent: float) -> int:
    """Return the whole blocks of a share, without a fraction: a change of limits has two for each tenant and cache."""
    numerator, denominator = _ratio(percent)
    return num_blocks * numerator // denominator


@lru_cache(maxsize=1_024)
def _ratio(percent: float) -> tuple[int, int]:
    return (Fraction(str(percent)) / 100).as_integer_ratio()
