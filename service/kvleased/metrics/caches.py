"""Own the metrics of caches: each function adds its samples of one cache."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final

import numpy as np

from kvleased.caches.tallies import WAIT_BOUNDS_SECONDS
from kvleased.core.blocks.departures import BOUNDS_SECONDS, Spans
from kvleased.core.blocks.history import DepartureReason
from kvleased.core.effects import Tier
from kvleased.core.lease.phases import ENDED
from kvleased.core.prefix.regrets import REASONS
from kvleased.core.views.survey import CACHED, HELD
from kvleased.metrics.catalogue import COUNTERS_OF_CORE
from kvleased.metrics.parts import Part
from kvleased.verbs.surveys import Surveyed, unfilled_bytes

STATES: Final = (
    "free",
    "reserved",
    "filling",
    "ready",
    "quarantined",
    "scrubbing",
    "bad",
    "parked",
)
"""The states of blocks; the numbers of blocks in them add up to a pool's blocks."""

PREFIX_OUTCOMES: Final[Mapping[str, str]] = {
    "device_hit": "prefix_tokens_device",
    "host_hit": "prefix_tokens_host",
    "disk_hit": "prefix_tokens_disk",
    "remote_hit": "prefix_tokens_remote",
    "computed": "prefix_tokens_computed",
}
"""Outcomes of prefix reuse, and the counters of the core for them."""

BLOCKS_MOVED: Final[Mapping[str, str]] = {
    "device_to_host": "offloads",
    "host_to_device": "reloads",
    "host_to_disk": "disk_stores",
    "disk_to_device": "disk_loads",
    "host_to_remote": "remote_stores",
    "remote_to_device": "remote_loads",
}
"""Directions of copies, and the core's counters of the blocks that arrived."""

MAGAZINE_OUTCOMES: Final = ("held", "cached", "missed")
STORES: Final = ("disk", "remote")
"""The tiers that may not accept a block."""
_STEP_REFUSED: Final = "step_refused_"
_P95: Final = 0.95


def pools(part: Part, of: Surveyed) -> None:
    """Add blocks and bytes by tier and state."""
    cache = of.cache
    for tier, counts in of.pools.items():
        for state in STATES:
            number = counts.get(state, 0)
            part.add("blocks", number, cache, tier, state)
            part.add("pool_bytes", number * of.bytes_per_block[tier], cache, tier, state)
        part.add("blocks_held", counts.get("ready_held", 0), cache, tier)
    part.add("available_blocks", of.survey.available_blocks, cache)
    part.add("pins", of.survey.census.num_pins, cache)
    for at, (group, filling) in enumerate(zip(of.groups, of.survey.groups, strict=True)):
        unfilled = unfilled_bytes(group, filling.tokens_unfilled)
        part.add("group_blocks", filling.num_blocks, cache, str(at))
        part.add("group_unfilled_bytes", unfilled, cache, str(at))
        part.add("group_padding_bytes", filling.num_blocks * group.bytes_padded, cache, str(at))
    part.begin("plan_waste_bytes")
    for waste in of.waste:
        part.add("plan_waste_bytes", waste.num_bytes, cache, waste.tier, waste.cause)


def tenants(part: Part, of: Surveyed, tier: Tier) -> None:
    """Add the blocks and bytes of a tier by tenant; of all parts this takes longest."""
    spread = of.survey.columns[tier].by_tenant(of.digests)
    num_bytes = of.bytes_per_block[tier.value]
    known = {facts.tenant_digest for facts in of.survey.tenants}
    for name, digest, counts in zip(of.tenants, (*of.digests, None), spread.tolist(), strict=True):
        if digest not in known and not any(counts[CACHED:]):
            # This tenant has nothing to do with this cache.
            continue
        for state, kind in (("cached", CACHED), ("held", HELD)):
            labels = (of.cache, tier.value, name, state)
            part.add("tenant_blocks", counts[kind], *labels)
            part.add("tenant_bytes", counts[kind] * num_bytes, *labels)


def limits(part: Part, of: Surveyed) -> None:
    """Add the limits of tenants, and what they have pinned and leased."""
    part.begin("tenant_leases", "tenant_leases_max")
    names = dict(zip(of.digests, of.tenants, strict=False))
    leases_of_others = pinned_of_others = 0
    for facts in of.survey.tenants:
        name = names.get(facts.tenant_digest)
        if name is None:
            leases_of_others += facts.num_leases
            pinned_of_others += facts.pinned_blocks
        else:
            part.add("tenant_leases", facts.num_leases, of.cache, name)
            part.add("tenant_leases_max", facts.leases_max, of.cache, name)
            part.add("tenant_pinned_blocks", facts.pinned_blocks, of.cache, name)
            part.add("tenant_limit_blocks", facts.min_blocks, of.cache, name, "min")
            part.add("tenant_limit_blocks", facts.max_blocks, of.cache, name, "max")
    others = of.tenants[-1]
    if leases_of_others:
        part.add("tenant_leases", leases_of_others, of.cache, others)
    if pinned_of_others:
        part.add("tenant_pinned_blocks", pinned_of_others, of.cache, others)


def leases(part: Part, of: Surveyed) -> None:
    """Add leases by phase and their ages, workers, waiting calls, copies, and whether tiers work."""
    cache, survey = of.cache, of.survey
    for phase, count in survey.phases.items():
        part.add("leases", count, cache, phase)
    part.add("leases_max", of.max_leases, cache)
    part.add("draining", of.is_draining, cache)
    for statistic, seconds in _ages(survey.lease_seconds).items():
        part.add("lease_age_seconds", seconds, cache, statistic)
    part.add("quarantined_oldest_seconds", survey.quarantined_seconds, cache)
    part.add("workers", survey.census.num_workers, cache)
    for priority, count in of.waiting.items():
        part.add("waiting_requests", count, cache, priority)
    part.add("waiting_oldest_seconds", survey.waiting_seconds, cache)
    part.add("copies_in_flight", survey.census.num_copies, cache)
    part.begin("tier_up")
    for tier, is_up in of.are_up.items():
        part.add("tier_up", is_up, cache, tier)


def _ages(in_order: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> dict[str, float]:
    found = in_order.tolist() or [0.0]
    last = len(found) - 1
    return {
        "median": found[ceil(last / 2)],
        "p95": found[ceil(last * _P95)],
        "oldest": found[last],
    }


def calls(part: Part, of: Surveyed) -> None:
    """Add refusals and waits."""
    part.begin("refusals", "step_refusals", "waits", "wait_seconds")
    for kind, count in of.tally.refusals.items():
        part.add("refusals", count, of.cache, *kind)
    for name, count in of.survey.census.counters.items():
        if name.startswith(_STEP_REFUSED):
            part.add("step_refusals", count, of.cache, name.removeprefix(_STEP_REFUSED))
    for (verb, outcome), count in of.tally.waits.items():
        part.add("waits", count, of.cache, verb, outcome)
    for verb, counts in of.tally.wait_counts.items():
        seconds = of.tally.wait_seconds[verb]
        part.add_histogram("wait_seconds", WAIT_BOUNDS_SECONDS, counts, seconds, of.cache, verb)


def counters(part: Part, of: Surveyed) -> None:
    """Add the counters of the core."""
    cache, found = of.cache, of.survey.census.counters
    for metric, name in COUNTERS_OF_CORE.items():
        part.add(metric, found.get(name, 0), cache)
    for end, name in ENDED.items():
        part.add("leases_ended", found.get(name, 0), cache, end.value)
    for outcome, name in PREFIX_OUTCOMES.items():
        part.add("prefix_tokens", found.get(name, 0), cache, outcome)
    for direction, name in BLOCKS_MOVED.items():
        part.add("blocks_moved", found.get(name, 0), cache, direction)
    for tier in STORES:
        part.add("store_failures", found.get(f"{tier}_store_failures", 0), cache, tier)
    for reason in REASONS:
        part.add("missed_blocks", found.get(f"missed_{reason}", 0), cache, reason)
    part.add("missed_blocks_not_looked_up", of.survey.missed_keys_dropped, cache)


def departures(part: Part, of: Surveyed) -> None:
    """Add the blocks that left each tier, and how long they had been there."""
    found = of.survey.departures
    for number, tier in enumerate(of.pools):
        for reason in DepartureReason:
            count = int(found.counts[number, reason])
            part.add("evictions", count, of.cache, tier, reason.name.lower())
        _spans(part, "block_residence_seconds", found.residence, number, (of.cache, tier))
        _spans(part, "block_idle_seconds", found.idle, number, (of.cache, tier))


def _spans(part: Part, name: str, spans: Spans, tier: int, labels: Sequence[str]) -> None:
    counts, seconds = spans.counts[tier].tolist(), float(spans.seconds[tier])
    part.add_histogram(name, BOUNDS_SECONDS, counts, seconds, *labels)


def beside(part: Part, of: Surveyed) -> None:
    """Add ghosts and magazines."""
    part.begin("ghost_keys", "ghost_hits", "ghost_dropped_keys", "magazine_blocks")
    for ghost in of.ghosts:
        part.add("ghost_keys", ghost.num_keys, of.cache, ghost.name)
        part.add("ghost_hits", ghost.num_hits, of.cache, ghost.name)
    if of.ghosts:
        part.add("ghost_dropped_keys", of.num_ghost_keys_dropped, of.cache)
    census = of.survey.census
    for outcome in MAGAZINE_OUTCOMES:
        number = census.counters.get(f"magazine_keys_{outcome}", 0)
        part.add("magazine_keys", number, of.cache, outcome)
    for place, num_private, num_held in census.magazines:
        part.add("magazine_blocks", num_private, of.cache, str(place), "private")
        part.add("magazine_blocks", num_held, of.cache, str(place), "held")
