"""Own how a snapshot reads on a terminal; the commands fetch it."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvlease.cli.printing import PlainTable, printable, show_age
from kvlease.cli.sizes import device_bytes, host_bytes
from kvlease.options import CacheOptions
from kvlease.replies import CacheInfo, CacheStats, Event, Inspection, PoolStats, Stats
from kvlease.units import show_bytes

UNUSUAL_STATES: Final = ("filling", "quarantined", "scrubbing", "bad", "parked")
"""The states that few blocks are in for long, in the order of a block's life. They share one column."""

_TEXTS: Final = frozenset(
    {
        "cache",
        "death",
        "layout",
        "name",
        "other states",
        "phase",
        "policy",
        "priority",
        "reason",
        "status",
        "tenant",
        "tier",
        "verb",
        "waits\nfor",
        "written",
    }
)
"""The columns that are not numbers."""

_FOLDED: Final = frozenset({"cache", "other states", "name", "reason", "status", "tenant"})
"""The columns whose texts may be long."""
_NAME_CHARACTERS_MIN: Final = 6
"""The least columns of the terminal for a long text, however wide the numbers beside it are."""

_STORES: Final = {"disk_stores": "stored\non disk", "remote_stores": "shared"}
"""The counters of blocks that went to a store, and their names in the table."""
_RELOADS: Final = ("reloads", "disk_loads", "remote_loads")
"""The counters of blocks that came to the device from the tiers below it."""
_NANOSECONDS: Final = 1e9
_FINGERPRINT_CHARACTERS: Final = 12


def caches(found: Sequence[CacheInfo], stats: Stats) -> Table:
    """Return one row per cache: whether it is ready, and who uses it."""
    table = _table("Caches", "cache", "status", "workers", "leases", "waiting", "device", "host")
    infos = {cache.cache: cache for cache in found}
    for cache in stats.caches:
        info = infos.get(cache.cache)
        table.add_row(
            cache.cache,
            _status(info) if info else "gone",
            f"{cache.num_workers:,}",
            f"{cache.num_leases:,}",
            f"{cache.num_waiting:,}",
            show_bytes(device_bytes(cache, info)) if info else "",
            show_bytes(host_bytes(cache, info)) if info else "",
        )
    return table


def pools(stats: Stats) -> Table:
    """Return one row per pool: its blocks by state, which add up to all; unusual states only if there are any."""
    found = [(cache.cache, pool) for cache in stats.caches for pool in cache.pools]
    others = [_others(pool) for _, pool in found]
    columns = ("cache", "tier", "blocks", "free", "reserved", "ready", "held")
    table = _table("Pools", *columns, *(["other states"] if any(others) else []))
    for (cache, pool), other in zip(found, others, strict=True):
        numbers = (pool.num_blocks, pool.free, pool.reserved, pool.ready, pool.ready_held)
        table.add_row(cache, pool.tier, *(f"{number:,}" for number in numbers), other)
    return table


def hits(stats: Stats) -> Table:
    """Return one row per cache: its prefix hits; stores only if they were hit."""
    tiers = ["device", "host", *_counted_any(stats, ("disk", "remote"), "prefix_tokens_")]
    names = [f"prefix_tokens_{tier}" for tier in (*tiers, "computed")]
    found = (f"tokens hit\non {tier}" for tier in tiers)
    table = _table(
        "Prefixes since the start", "cache", "leases\ngranted", *found, "tokens\ncomputed"
    )
    for cache in stats.caches:
        # An engine with a magazine takes its blocks without leases.
        has_leases = cache.counters.get("leases_granted") or not cache.counters.get("exchanges")
        if cache.counters and has_leases:
            table.add_row(cache.cache, *_counts(cache, "leases_granted", *names))
    return table


def exchanges(stats: Stats) -> Table:
    """Return one row per cache with magazines: what became of the keys that these asked for."""
    keys = (f"keys\n{word}" for word in ("held", "cached", "missed"))
    table = _table("Magazines since the start", "cache", "exchanges", *keys, "blocks\ntaken")
    names = ("exchanges", *(f"magazine_keys_{word}" for word in ("held", "cached", "missed")))
    for cache in stats.caches:
        if cache.counters.get("exchanges"):
            table.add_row(cache.cache, *_counts(cache, *names, "blocks_taken"))
    return table


def moves(stats: Stats) -> Table:
    """Return one row per cache: which blocks went down, and which came back up from any tier."""
    stores = _counted_any(stats, _STORES)
    table = _table(
        "Blocks since the start",
        "cache",
        "evicted",
        "offloaded",
        *(_STORES[name] for name in stores),
        "reloaded",
    )
    for cache in stats.caches:
        if cache.counters:
            num_reloaded = sum(cache.counters.get(name, 0) for name in _RELOADS)
            counts = _counts(cache, "evictions", "offloads", *stores)
            table.add_row(cache.cache, *counts, f"{num_reloaded:,}")
    return table


def ghosts(stats: Stats) -> Table:
    """Return one row per ghost cache: what share of the keys it would have found."""
    table = _table("Ghost caches", "cache", "policy", "keys", "hits", "hit\nratio")
    for cache in stats.caches:
        for ghost in cache.ghosts:
            ratio = f"{ghost.num_hits / ghost.num_keys:.1%}" if ghost.num_keys else ""
            table.add_row(
                cache.cache, ghost.name, f"{ghost.num_keys:,}", f"{ghost.num_hits:,}", ratio
            )
    return table


def plans(found: Sequence[CacheInfo]) -> Table:
    """Return one row per cache: how large its plan is."""
    table = _table("Caches", "cache", "status", "layers", "tables", "ranks", "longest request")
    for cache in found:
        plan = cache.plan
        table.add_row(
            cache.cache,
            _life(cache),
            f"{sum(len(group.layer_names) for group in plan.groups):,}",
            f"{len(plan.groups):,}",
            f"{len(plan.ranks):,}",
            f"{cache.longest_request_tokens:,} tokens",
        )
    return table


def blocks(found: Sequence[CacheInfo]) -> Table:
    """Return one row per cache: what its blocks are; bytes per block are those of all ranks together."""
    table = _table(
        "Blocks",
        "cache",
        "tokens\nper block",
        "bytes\nper block",
        "device\nblocks",
        "host\nslots",
        "layout",
    )
    for cache in found:
        plan = cache.plan
        table.add_row(
            cache.cache,
            f"{plan.tokens_per_block:,}",
            show_bytes(plan.device_bytes_per_block),
            f"{plan.usable_blocks:,}",
            f"{plan.num_slots:,}",
            f"{plan.layout} {plan.layout_fingerprint[:_FINGERPRINT_CHARACTERS]}",
        )
    return table


def tiers(found: Sequence[CacheInfo]) -> Table:
    """Return one row per lower tier: whether it works or why not, and how the cache writes to it."""
    columns = ("cache", "tier", "status", "slots", "found\nagain", "written", "reason")
    table = _table("Lower tiers", *columns)
    for cache in found:
        for tier in cache.tiers:
            table.add_row(
                cache.cache,
                tier.tier,
                tier.status,
                f"{tier.num_slots:,}" if tier.num_slots else "",
                f"{tier.num_found:,}",
                _written(cache.options),
                tier.reason,
            )
    return table


def workers(cache: str, page: Inspection) -> Table:
    """Return one row per worker of a cache."""
    columns = ("worker", "name", "tenant", "process", "rank", "leases", "death", "age")
    table = _table(f"Workers of {cache}", *columns)
    for one in page.workers:
        table.add_row(
            str(one.worker_id),
            one.worker_name,
            one.tenant,
            str(one.process_id or ""),
            str(one.rank),
            f"{one.num_leases:,}",
            one.death_proof,
            show_age(one.age_ms),
        )
    return table


def leases(cache: str, page: Inspection) -> Table:
    """Return one row per lease of a cache; `left` is the time until the lease expires unless it is renewed."""
    columns = ("lease", "worker", "tenant", "phase", "blocks", "tokens", "age", "left")
    table = _table(f"Leases of {cache}", *columns, gap=0)
    for one in page.leases:
        table.add_row(
            str(one.lease_id),
            str(one.worker_id),
            one.tenant,
            one.phase,
            f"{one.num_blocks:,}",
            f"{one.num_tokens:,}",
            "" if one.age_ms is None else show_age(one.age_ms),
            show_age(one.left_ms),
        )
    return table


def pins(cache: str, page: Inspection) -> Table:
    """Return one row per pin of a cache."""
    table = _table(f"Pins of {cache}", "pin", "tenant", "blocks", "age")
    for one in page.pins:
        table.add_row(
            str(one.pin_id), one.tenant or "several", f"{one.num_blocks:,}", show_age(one.age_ms)
        )
    return table


def waiting(cache: str, page: Inspection) -> Table:
    """Return one row per call that waits for blocks; `left` is the time until it is refused.

    The call's own id names nothing that an operator could do, and would leave no room for the others.
    """
    columns = ("worker", "verb", "priority", "calls\nbefore", "blocks\nneeded", "blocks\nthere")
    table = _table(f"Waiting for {cache}", *columns, "waits\nfor", "age", "left", gap=0)
    for one in page.waiting:
        table.add_row(
            str(one.worker_id),
            one.verb,
            one.priority,
            f"{one.position:,}",
            f"{one.num_blocks:,}",
            f"{one.available_blocks:,}",
            one.reason,
            show_age(one.age_ms),
            show_age(one.left_ms),
        )
    return table


def tenants(cache: str, page: Inspection) -> Table:
    """Return one row per tenant of a cache: what it has."""
    columns = ("tenant", "blocks\nused", "blocks\nheld", "blocks\npinned", "leases")
    table = _table(f"Tenants of {cache}", *columns)
    for one in page.tenants:
        counts = (one.used_blocks, one.held_blocks, one.pinned_blocks, one.num_leases)
        table.add_row(one.tenant, *(f"{count:,}" for count in counts))
    return table


def tenants_limits(cache: str, page: Inspection) -> Table:
    """Return one row per tenant of a cache: what it may have."""
    table = _table(
        f"Limits of tenants of {cache}",
        "tenant",
        "blocks\nat least",
        "blocks\nat most",
        "pinned\nat most",
        "leases\nat most",
        "weight",
        "revision",
    )
    for one in page.tenants:
        counts = (one.min_blocks, one.max_blocks, one.pinned_blocks_max, one.leases_max)
        table.add_row(
            one.tenant, *(f"{count:,}" for count in counts), f"{one.weight:g}", f"{one.revision:,}"
        )
    return table


def magazines(cache: str, page: Inspection) -> Table:
    """Return one row per magazine of a cache: how many processes share it, and its blocks."""
    table = _table(
        f"Magazines of {cache}",
        "magazine",
        "digest",
        "tenant",
        "processes",
        "blocks\nprivate",
        "blocks\nheld",
        "exchanges",
        "last",
        gap=0,
    )
    for one in page.magazines:
        counts = (len(one.worker_ids), one.private_blocks, one.held_blocks, one.num_exchanges)
        table.add_row(
            str(one.magazine_id),
            one.magazine_digest,
            one.tenant,
            *(f"{count:,}" for count in counts),
            "" if one.age_ms is None else show_age(one.age_ms),
        )
    return table


def event_line(event: Event) -> str:
    """Return an event as one line."""
    at = datetime.fromtimestamp(event.unix_nanoseconds / _NANOSECONDS, UTC)
    words = [f"{at:%H:%M:%S.%f}"[:12], str(event.sequence), event.kind]
    words += [f"cache={event.cache}"] if event.cache else []
    words += [f"tenant={event.tenant}"] if event.tenant else []
    words += [f"tier={event.tier}"] if event.tier else []
    for name in ("worker_id", "lease_id", "num_blocks"):
        if number := getattr(event, name):
            words.append(f"{name}={number}")
    if (found := event.snapshot) is not None:
        words.append(f"workers={found.num_workers} leases={found.num_leases}")
        sizes = ((one, one.num_blocks - one.parked - one.bad) for one in found.pools)
        words += [f"{one.tier}_free={one.free}/{size}" for one, size in sizes]
    return " ".join(words)


def _counted_any(stats: Stats, names: Iterable[str], prefix: str = "") -> list[str]:
    """Return the names under which some cache has counted something."""
    return [name for name in names if any(one.counters.get(prefix + name) for one in stats.caches)]


def _counts(cache: CacheStats, *names: str) -> list[str]:
    return [f"{cache.counters.get(name, 0):,}" for name in names]


def _status(cache: CacheInfo) -> str:
    """Return a cache's status: whether it is drained, and which of its stores do not work or have no slot left."""
    off = [
        tier.tier
        for tier in cache.tiers
        if tier.status in {"off", "degraded"} and cache.status != "populating"
    ]
    return f"{_life(cache)}, no {' and '.join(off)}" if off else _life(cache)


def _life(cache: CacheInfo) -> str:
    """Return whether a cache is ready yet, and whether it grants leases."""
    return f"{cache.status}, draining" if cache.is_draining else cache.status


def _written(options: CacheOptions) -> str:
    """Return when blocks are copied to lower tiers, in the words of the options."""
    if options.write_after_hits is None:
        return options.write_policy
    return options.write_policy.replace("-n-", f"-{options.write_after_hits}-")


def _others(pool: PoolStats) -> str:
    counts = ((state, getattr(pool, state)) for state in UNUSUAL_STATES)
    return ", ".join(f"{count:,} {state}" for state, count in counts if count)


def _table(title: str, *columns: str, gap: int = 1) -> Table:
    """Return a table that fits 80 columns: a long name is folded, and a number is always whole.

    Columns stand `gap` spaces apart, and one more.
    """
    table = PlainTable(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap, 0, 0),
    )
    table.heading = Text(f"\n{printable(title)}", style="table.title")
    for column in columns:
        table.add_column(
            column,
            justify="left" if column in _TEXTS else "right",
            vertical="top",
            overflow="fold",
            no_wrap=column not in _FOLDED,
            min_width=_NAME_CHARACTERS_MIN if column in _FOLDED else None,
        )
    return table
