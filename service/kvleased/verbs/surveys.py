"""Own what metrics are told of each cache: the survey of its core, with names and sizes that the core does not know."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvlease.geometry import floor_div
from kvlease.plan import CachePlan, Waste
from kvleased.access.tenant_names import is_reserved
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import Registry
from kvleased.caches.tallies import Tally
from kvleased.caches.tier_infos import is_up
from kvleased.core.effects import Tier
from kvleased.core.views.survey import Survey
from kvleased.verbs.figures import OTHERS, pools_of, waiting_by_priority

if TYPE_CHECKING:
    from kvleased.traces.ghosts import GhostFigures

TENANTS_MAX: Final = 100
"""Tenants that metrics tell apart: first those that have settings, then attached ones by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The facts in a plan about the blocks of one group, over all ranks."""

    tokens_per_block: int
    bytes_filled: int
    """Bytes of a block that the group's pages take."""
    bytes_padded: int
    """The other bytes of the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """One cache at one instant."""

    cache: str
    survey: Survey
    waiting: Mapping[str, int]
    pools: Mapping[str, Mapping[str, int]]
    """Blocks by tier and state."""
    bytes_per_block: Mapping[str, int]
    """Bytes of a block by tier, over all ranks."""
    tenants: Sequence[str]
    """Names of the tenants that are told apart; the last name stands for all others."""
    digests: Sequence[int]
    """The digests of these tenants, without the last one."""
    are_up: Mapping[str, bool]
    max_leases: int
    is_draining: bool
    """Whether the cache grants nothing new, because it or the whole daemon is drained."""
    groups: Sequence[GroupFacts]
    waste: Sequence[Waste]
    tally: Tally
    ghosts: "Sequence[GhostFigures]" = ()
    num_ghost_keys_dropped: int = 0


def surveys(registry: Registry) -> Iterator[Surveyed]:
    """Yield the survey of one cache after the other, each taken at one instant."""
    for entry in list(registry):
        yield _surveyed(entry, _named(registry))


def _surveyed(entry: CacheEntry, named: Mapping[int, str]) -> Surveyed:
    found, ghosts = entry.core.survey(monotonic()), entry.ghosts
    return Surveyed(
        cache=entry.name,
        survey=found,
        waiting=waiting_by_priority(found.census),
        pools=pools_of(entry, found.census),
        bytes_per_block=_bytes_per_block(entry.plan),
        tenants=(*named.values(), OTHERS),
        digests=tuple(named),
        are_up={tier.tier: is_up(tier) for tier in entry.tiers()},
        max_leases=entry.core.shape.max_leases,
        is_draining=entry.core.is_draining,
        groups=[_group(entry.plan, at) for at in range(len(entry.plan.groups))],
        waste=entry.plan.waste,
        tally=entry.tally,
        ghosts=() if ghosts is None else ghosts.figures(),
        num_ghost_keys_dropped=0 if ghosts is None else ghosts.num_dropped,
    )


def _named(registry: Registry) -> dict[int, str]:
    known = registry.known_tenants
    # A worker of an earlier build may have a tenant name that is reserved by now, and would collide with "(others)".
    names = {
        digest: name for digest, name in registry.tenant_names().items() if not is_reserved(name)
    }
    in_order = sorted(names, key=lambda digest: (digest not in known, names[digest]))
    return {digest: names[digest] for digest in in_order[:TENANTS_MAX]}


def _bytes_per_block(plan: CachePlan) -> dict[str, int]:
    return {
        Tier.DEVICE.value: plan.device_bytes_per_block,
        Tier.HOST.value: plan.bytes_per_slot,
        Tier.DISK.value: plan.bytes_per_slot,
    }


def _group(plan: CachePlan, group: int) -> GroupFacts:
    total = plan.device_bytes_per_block
    pages = sum(
        layer.bytes_per_page for rank in plan.ranks for layer in rank.layers if layer.group == group
    )
    filled = min(pages, total)
    return GroupFacts(
        tokens_per_block=plan.groups[group].tokens_per_block,
        bytes_filled=filled,
        bytes_padded=total - filled,
    )


def unfilled_bytes(group: GroupFacts, num_tokens: int) -> int:
    """Return the bytes of a group's blocks that `num_tokens` unwritten tokens would fill."""
    if not group.tokens_per_block:
        return 0
    return floor_div(num_tokens * group.bytes_filled, group.tokens_per_block)
