"""Own how a snapshot reads on a terminal; where it comes from is the commands' business."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from rich.table import Table

from kvlease.replies import CacheInfo, CacheStats, Event, Stats
from kvlease.units import show_bytes

STATES: Final = ("free", "reserved", "filling", "ready", "quarantined", "scrubbing", "bad")
"""The states of a block, in the order of a block's life."""

_USUAL: Final = frozenset({"free", "reserved", "ready"})
"""The states that are shown even when no block is in them, so that the table fits a terminal."""

_NANOSECONDS: Final = 1e9


def caches(found: Sequence[CacheInfo], stats: Stats) -> Table:
    """Return one row per cache: is it ready, and who uses it."""
    table = _table("Caches", "cache", "status", "workers", "leases", "waiting", "device", "host")
    info = {cache.cache: cache for cache in found}
    for cache in stats.caches:
        plan = info[cache.cache].plan if cache.cache in info else None
        table.add_row(
            cache.cache,
            info[cache.cache].status if cache.cache in info else "gone",
            str(cache.num_workers),
            str(cache.num_leases),
            str(cache.num_waiting),
            show_bytes(plan.device_bytes) if plan else "",
            show_bytes(plan.host_bytes) if plan else "",
        )
    return table


def pools(stats: Stats) -> Table:
    """Return one row per pool: its blocks by state, which add up to all of them; unusual states only if any."""
    found = [pool for cache in stats.caches for pool in cache.pools]
    shown = [
        state for state in STATES if state in _USUAL or any(getattr(pool, state) for pool in found)
    ]
    table = _table("Pools", "cache", "tier", "blocks", *shown, "held")
    for cache in stats.caches:
        for pool in cache.pools:
            states = [str(getattr(pool, state)) for state in shown]
            table.add_row(
                cache.cache, pool.tier, str(pool.num_blocks), *states, str(pool.ready_held)
            )
    return table


def counters(stats: Stats) -> Table:
    """Return one row per cache: what its prefixes were worth, and what was moved."""
    table = _table(
        "Since the start",
        "cache",
        "leases granted",
        "tokens hit on device",
        "reloaded from host",
        "computed",
        "blocks evicted",
        "reloaded",
    )
    for cache in stats.caches:
        if cache.counters:
            table.add_row(cache.cache, *_counted(cache))
    return table


def plans(found: Sequence[CacheInfo]) -> Table:
    """Return one row per cache: the numbers of its plan; bytes per block are those of its first rank."""
    table = _table(
        "Caches",
        "cache",
        "status",
        "layers",
        "tables",
        "ranks",
        "tokens per block",
        "bytes per block",
        "device blocks",
        "host slots",
        "longest request",
        "layout",
    )
    for cache in found:
        plan = cache.plan
        table.add_row(
            cache.cache,
            cache.status,
            str(sum(len(group.layer_names) for group in plan.groups)),
            str(len(plan.groups)),
            str(len(plan.ranks)),
            str(plan.tokens_per_block),
            show_bytes(plan.bytes_per_block),
            f"{plan.usable_blocks:,}",
            f"{plan.num_slots:,}",
            f"{plan.longest_request_tokens:,} tokens",
            f"{plan.layout} {plan.layout_fingerprint[:12]}",
        )
    return table


def event_line(event: Event) -> str:
    """Return an event as one line."""
    at = datetime.fromtimestamp(event.unix_nanoseconds / _NANOSECONDS, UTC)
    words = [f"{at:%H:%M:%S.%f}"[:12], str(event.sequence), event.kind]
    words += [f"cache={event.cache}"] if event.cache else []
    for name in ("worker_id", "lease_id", "num_blocks"):
        if number := getattr(event, name):
            words.append(f"{name}={number}")
    return " ".join(words)


def _counted(cache: CacheStats) -> list[str]:
    count: Mapping[str, int] = cache.counters
    names = (
        "leases_granted",
        "prefix_tokens_device",
        "prefix_tokens_host",
        "prefix_tokens_computed",
        "evictions",
        "reloads",
    )
    return [f"{count.get(name, 0):,}" for name in names]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_text = column in {"cache", "status", "tier", "layout"}
        table.add_column(column, justify="left" if is_text else "right")
    return table
