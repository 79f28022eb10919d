"""Own the figures of each cache at one instant, with tenants by name; how metrics name them is not known here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import Registry
from kvleased.caches.tier_infos import is_up
from kvleased.calls import checks
from kvleased.core.cache import Cache
from kvleased.core.effects import Tier
from kvleased.core.views.census import Census

if TYPE_CHECKING:
    from kvleased.traces.ghosts import GhostFigures

OTHERS: Final = "(others)"
"""The name that stands for all tenants that are neither configured nor attached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one cache at one instant."""

    census: Census
    waiting: Mapping[str, int]
    """Waiting calls by the priority that they have reached; their sum is the census's number."""
    tenants: Mapping[tuple[str, str], int]
    """Device blocks by tenant and state: "used", and of these "held" and "pinned"."""
    pools: Mapping[str, Mapping[str, int]]
    """Blocks by tier and state, of the tiers that the cache has."""
    are_up: Mapping[str, bool]
    """Whether each of its lower tiers works."""
    ghosts: "Sequence[GhostFigures]" = ()
    num_ghost_keys_dropped: int = 0


def figures(registry: Registry) -> dict[str, Figures]:
    """Return the figures of every cache by its name."""
    names = registry.tenant_names()
    return {
        entry.name: Figures(
            census=(census := entry.core.census()),
            waiting=waiting_by_priority(census),
            tenants=_tenants(entry.core, names),
            pools=pools_of(entry, census),
            are_up={tier.tier: is_up(tier) for tier in entry.tiers()},
            ghosts=() if (ghosts := entry.ghosts) is None else ghosts.figures(),
            num_ghost_keys_dropped=0 if ghosts is None else ghosts.num_dropped,
        )
        for entry in registry
    }


def pools_of(entry: CacheEntry, census: Census) -> dict[str, Mapping[str, int]]:
    """Return the blocks by state, for every tier of a cache whose blocks are counted."""
    pools = {Tier.DEVICE: census.device, Tier.HOST: census.host, Tier.DISK: census.disk}
    return {
        tier.value: counts
        for tier, counts in pools.items()
        if tier is Tier.DEVICE or entry.has_tier(tier)
    }


def stats_of(entry: CacheEntry) -> pb.CacheStats:
    """Describe the pools, leases and counters of a cache, as its stats are answered."""
    census = entry.core.census()
    return pb.CacheStats(
        cache=entry.name,
        pools=[
            pb.PoolStats(tier=tier, num_blocks=_num_blocks(entry, tier), **counts)
            for tier, counts in pools_of(entry, census).items()
        ],
        num_leases=census.num_leases,
        num_waiting=census.num_waiting,
        num_workers=entry.num_workers,
        counters=census.counters,
        ghosts=[
            pb.GhostStats(name=one.name, num_keys=one.num_keys, num_hits=one.num_hits)
            for one in (entry.ghosts.figures() if entry.ghosts else ())
        ],
    )


def waiting_by_priority(census: Census) -> dict[str, int]:
    """Return the number of waiting calls by the name of the priority that they have reached."""
    counts = census.waiting_by_priority
    return {name: counts.get(priority, 0) for priority, name in enumerate(checks.PRIORITIES)}


def _tenants(core: Cache, names: Mapping[int, str]) -> Counter[tuple[str, str]]:
    # Tenants that left long ago may still have blocks, and there may be as many such tenants as blocks.
    blocks: Counter[tuple[str, str]] = Counter()
    for one in core.list_tenants():
        name = names.get(one.tenant_digest, OTHERS)
        blocks[name, "used"] += one.used_blocks
        blocks[name, "held"] += one.held_blocks
        blocks[name, "pinned"] += one.pinned_blocks
    return blocks


def _num_blocks(entry: CacheEntry, tier: str) -> int:
    plan = entry.plan
    numbers = {"device": plan.usable_blocks, "host": plan.num_slots, "disk": plan.num_disk_slots}
    return numbers[tier]
