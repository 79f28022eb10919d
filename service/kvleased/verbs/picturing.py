"""Own what the page is told: pictures of pools, and a sheet of all figures; how they are sent is not known here.

Nothing is computed unless a viewer asks, and at most once a moment, however many viewers ask.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Final, NamedTuple

from kvlease.plan import CachePlan
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import Registry
from kvleased.calls import checks
from kvleased.core.effects import Tier
from kvleased.core.magazines import id_of
from kvleased.core.views.listing import LeaseFacts
from kvleased.core.views.picture import TENANTS_MAX, Picture
from kvleased.core.views.waiting_list import WaitingFacts
from kvleased.verbs.figures import Figures, figures
from kvleased.verbs.inspecting import tenant_name
from kvleased.verbs.refused import Codes, refusals

POOLS_MAX: Final = 16
"""Most pools of which one viewer sees pictures."""
LEASES_SHOWN_MAX: Final = 50
"""Most leases that the page lists."""
WAITING_SHOWN_MAX: Final = 20
"""Most waiting calls that the page lists."""
FRESH_SECONDS: Final = 0.4
"""Seconds for which a picture or sheet made for one viewer is shown to others, too."""

Sheet = dict[str, object]
"""A part of what the page is told, ready to be written as JSON."""


class PoolName(NamedTuple):
    """The pool that a picture shows."""

    cache: str
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A picture and the names of the tenants in it, by number from 1."""

    picture: Picture
    tenants: tuple[str, ...]


class Gallery:
    """The pictures and figures of all caches."""

    def __init__(
        self,
        registry: Registry,
        *,
        epoch: int,
        codes: Callable[[], Codes],
        movers: Callable[[], Mapping[str, Sheet]],
    ) -> None:
        """Take the caches, and the functions that return the counts of answered calls and the figures of movers."""
        self._registry = registry
        self._epoch = epoch
        self._codes = codes
        self._movers = movers
        self._shown: dict[PoolName, tuple[float, Shown]] = {}
        self._sheet: tuple[float, Sheet] = (-FRESH_SECONDS, {})

    def __repr__(self) -> str:
        """Show life: the number of pictures that are kept."""
        return f"<Gallery {len(self._shown)} pictures>"

    def pools(self, cache: str = "") -> list[PoolName]:
        """Return the pools of a cache, or of all caches, that have pictures; at most POOLS_MAX.

        Raises:
            UnknownCacheError: there is no such cache.
        """
        entries = [self._registry.cache(cache)] if cache else list(self._registry)
        found = [PoolName(one.name, tier.value) for one in entries for tier in _tiers(one)]
        self._shown = {name: self._shown[name] for name in self._shown if name in found or cache}
        return found[:POOLS_MAX]

    def shown(self, name: PoolName) -> Shown:
        """Return the picture of a pool; it may be a moment old.

        Raises:
            UnknownCacheError: there is no such cache.
            InvalidError: the cache has no such tier.
        """
        taken_at, shown = self._shown.get(name, (0.0, None))
        if shown is None or monotonic() - taken_at > FRESH_SECONDS:
            shown = self._take(name)
            self._shown[name] = monotonic(), shown
        return shown

    def block(self, name: PoolName, block_id: int) -> Sheet:
        """Describe one block.

        Raises:
            UnknownCacheError: there is no such cache.
            InvalidError: the cache has no such tier, or the tier no such block.
        """
        entry = self._registry.cache(name.cache)
        facts = entry.core.block_facts(_tier(entry, name.tier), block_id, monotonic())
        sheet: Sheet = asdict(facts)
        digest = facts.tenant_digest
        del sheet["tenant_digest"]
        names = self._registry.tenant_names()
        sheet["tenant"] = tenant_name(names, digest) if digest else ""
        sheet["leases"] = [asdict(one) | {"lease_id": str(one.lease_id)} for one in facts.leases]
        return sheet

    def sheet(self) -> Sheet:
        """Return all figures; they may be a moment old."""
        taken_at, sheet = self._sheet
        if monotonic() - taken_at > FRESH_SECONDS:
            sheet = self._make_sheet()
            self._sheet = monotonic(), sheet
        return sheet

    def _take(self, name: PoolName) -> Shown:
        entry = self._registry.cache(name.cache)
        tier = _tier(entry, name.tier)
        named = sorted(self._registry.tenant_names().items(), key=lambda one: one[1])
        named = named[:TENANTS_MAX]
        picture = entry.core.picture(tier, [digest for digest, _ in named])
        return Shown(picture=picture, tenants=tuple(tenant for _, tenant in named))

    def _make_sheet(self) -> Sheet:
        now = monotonic()
        found, names = figures(self._registry), self._registry.tenant_names()
        return {
            "epoch": str(self._epoch),
            "seconds": now,
            "is_stopping": self._registry.is_stopping,
            "is_draining": self._registry.is_draining,
            "pools_max": POOLS_MAX,
            "caches": [_cache(entry, found[entry.name], names, now) for entry in self._registry],
            "movers": self._movers(),
            "refusals": refusals(
                self._codes(), {entry.name: entry.tally for entry in self._registry}
            ),
        }


def _tiers(entry: CacheEntry) -> Iterable[Tier]:
    """Return the tiers of a cache whose blocks are counted."""
    return (
        tier
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
        if tier is Tier.DEVICE or entry.has_tier(tier)
    )


def _tier(entry: CacheEntry, written: str) -> Tier:
    names = [tier.value for tier in _tiers(entry)]
    return Tier(checks.one_of("tier", written, names))


def _cache(entry: CacheEntry, found: Figures, names: Mapping[int, str], now: float) -> Sheet:
    plan, options, tenants = entry.plan, entry.options, _with_blocks(found)
    return {
        "cache": entry.name,
        "status": entry.status,
        "is_draining": entry.core.is_draining,
        "policy": options.eviction_policy,
        "write_policy": options.write_policy,
        "usable_blocks": plan.usable_blocks,
        "bytes_per_block": plan.device_bytes_per_block,
        "bytes_per_copy": _bytes_per_copy(plan),
        "num_leases": found.census.num_leases,
        "num_waiting": found.census.num_waiting,
        "num_workers": found.census.num_workers,
        "num_pins": found.census.num_pins,
        "num_copies": found.census.num_copies,
        "pools": {tier: dict(counts) for tier, counts in found.pools.items()},
        "tiers": [
            {"tier": one.tier, "status": one.status, "reason": one.reason} for one in entry.tiers()
        ],
        "counters": dict(found.census.counters),
        "tenants": _tenants(found, tenants[: TENANTS_MAX + 1]),
        "num_tenants": len(tenants),
        "magazines": [
            {"magazine_id": id_of(place), "private": private, "findable": findable}
            for place, private, findable in found.census.magazines
        ],
        "ghosts": [
            {"name": one.name, "keys": one.num_keys, "hits": one.num_hits} for one in found.ghosts
        ],
        "ghost_keys_dropped": found.num_ghost_keys_dropped,
        "leases": [_lease(one, names) for one in entry.core.list_leases(0, LEASES_SHOWN_MAX, now)],
        "waiting": [_waiting(one) for one in entry.core.list_waiting(0, WAITING_SHOWN_MAX, now)],
    }


def _bytes_per_copy(plan: CachePlan) -> int:
    """Return the bytes of a block that are copied between tiers: ranks that keep equal bytes share a cell of a slot."""
    ranks = [rank for rank in plan.ranks if rank.bytes_per_block]
    return sum({rank.slot_cell_offset_bytes: rank.bytes_per_block for rank in ranks}.values())


def _with_blocks(found: Figures) -> list[str]:
    """Return the names of the tenants that use device blocks, those with the most first."""
    names = {
        tenant for (tenant, state), count in found.tenants.items() if state == "used" and count
    }
    return sorted(names, key=lambda name: (-found.tenants[name, "used"], name))


def _tenants(found: Figures, names: Sequence[str]) -> list[Sheet]:
    return [
        {
            "tenant": name,
            **{state: found.tenants[name, state] for state in ("used", "held", "pinned")},
        }
        for name in names
    ]


def _lease(facts: LeaseFacts, names: Mapping[int, str]) -> Sheet:
    return {
        "lease_id": str(facts.lease_id),
        "worker_id": str(facts.worker_id),
        "tenant": tenant_name(names, facts.tenant_digest),
        "phase": facts.phase,
        "num_blocks": facts.num_blocks,
        "num_tokens": facts.num_tokens,
        "age_seconds": facts.age_seconds,
        "seconds_left": facts.seconds_left,
    }


def _waiting(facts: WaitingFacts) -> Sheet:
    return {
        "call_id": str(facts.call_id),
        "verb": facts.verb,
        "priority": checks.PRIORITIES[facts.priority],
        "num_blocks": facts.num_blocks,
        "available_blocks": facts.available_blocks,
        "reason": facts.reason,
        "age_seconds": facts.age_seconds,
    }
