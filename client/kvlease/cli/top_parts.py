"""Own what the parts of `kvlease top` say: pools as squares, timelines as bars, and the rows of its lists."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvlease.cli.printing import counted, printable, show_age
from kvlease.cli.sizes import device_bytes, host_bytes
from kvlease.replies import CacheInfo, CacheStats, Inspection, PoolStats, Stats
from kvlease.units import show_bytes

History = Sequence[tuple[float, Stats]]
"""What was read, and when, in seconds; the newest last."""

LOOKS: Final = (
    ("held", "cached, in use", "█", "#3ad0a4"),
    ("reserved", "being written", "▓", "#4aa8ea"),
    ("filling", "being filled", "░", "#a5dbff"),
    ("idle", "cached, idle", "▒", "#5d9c8b"),
    ("quarantined", "quarantined", "!", "#f5b731"),
    ("scrubbing", "being zeroed", "~", "#dc93c0"),
    ("bad", "retired", "x", "#ff6a3a"),
    ("parked", "out of use", "p", "#5a6472"),
    ("free", "free", "·", "#7d8b99"),
)
"""How blocks look: name, words, the character that means the same as the colour, and the colour."""

SOURCES: Final = ("device", "host", "disk", "remote")
COUNTERS: Final = (
    ("granted", ("leases_granted",)),
    ("evicted", ("evictions",)),
    ("offloaded", ("offloads",)),
    ("stored", ("disk_stores", "remote_stores")),
    ("reloaded", ("reloads", "disk_loads", "remote_loads")),
    ("expired", ("leases_expired",)),
    ("taken", ("blocks_taken",)),
    ("keys held", ("magazine_keys_held",)),
    ("keys missed", ("magazine_keys_missed",)),
    ("failed copies", ("copies_failed", "copies_lost")),
)
"""What is shown per second, and the counters whose sum it is."""

LISTS: Final[dict[str, tuple[str, ...]]] = {
    "leases": ("lease", "phase", "blocks", "tokens", "age", "expires in"),
    "waiting": ("call", "waits for", "priority", "needs", "there are", "since"),
    "tenants": ("tenant", "used", "held", "pinned", "at least", "at most"),
}
"""The lists and their columns."""

ROWS_MAX: Final = 50
"""Most entries that are shown of each list."""
_BARS: Final = " ▁▂▃▄▅▆▇█"
_NAMES_MAX: Final = 8
"""Most caches that one line names."""
_ROWS_OF_SQUARES: Final = 4
_NAME_COLUMNS: Final = 12
_TENANT_COLUMNS_MAX: Final = 24
"""Most columns that a tenant's name takes, so that the numbers beside it fit 80 columns."""


def summary(stats: Stats, caches: Sequence[CacheInfo], cache: str) -> RenderableType:
    """Return one line about the daemon and one about the cache that is shown."""
    names = _named([one.cache for one in caches], cache)
    lines = [Text(f"epoch {stats.epoch}   caches: {names or 'none yet'}")]
    if drained := [one.cache for one in caches if one.is_draining]:
        words = f"drained, grants nothing new until kvlease drain [--cache NAME] --undo: {_named(drained)}"
        lines.append(Text(words, style="bold yellow"))
    found, info = of(stats, cache), next((one for one in caches if one.cache == cache), None)
    if found is not None and info is not None:
        text = (
            f"{counted(found.num_leases, 'lease')} of {counted(found.num_workers, 'worker')}, "
            f"{found.num_waiting:,} waiting; "
            f"{info.options.eviction_policy or 'default policy'}; "
            f"device {show_bytes(device_bytes(found, info))}, host {show_bytes(host_bytes(found, info))}"
        )
        lines.append(Text(text))
        off = [
            f"{tier.tier} is {tier.status}: {tier.reason}"
            for tier in info.tiers
            if tier.status in {"off", "degraded"}
        ]
        lines += [Text(words, style="bold red") for words in off]
    return Group(*lines)


def pools(stats: Stats, cache: str, columns: int) -> RenderableType:
    """Return each pool of a cache as rows of squares in proportion to its blocks, and what the squares mean."""
    found = of(stats, cache)
    if found is None:
        return Text("no cache is registered")
    lines: list[RenderableType] = []
    shown: set[str] = set()
    for pool in found.pools:
        counts = counts_of(pool)
        shown |= {name for name, count in counts.items() if count}
        usable = _usable(pool)
        used = usable - pool.free
        share = used / usable if usable else 0.0
        squares = _squares(counts, pool.num_blocks, columns)
        heads = (pool.tier, f"{share:.0%} used", f"{used:,} of", f"{usable:,}")
        for head, row in zip(heads, squares, strict=True):
            lines.append(Text(f"{head:<{_NAME_COLUMNS}}") + row)
        lines.append(Text(""))
    meanings = [
        Text(f"{character} ", style=colour) + Text(words)
        for name, words, character, colour in LOOKS
        if name in shown
    ]
    # A line breaks between two entries, never between a character and its meaning.
    key = Columns(meanings, padding=(0, 3, 0, 0))
    return Group(*lines, Padding(key, (0, 0, 0, _NAME_COLUMNS)))


def timelines(history: History, cache: str, columns: int) -> RenderableType:
    """Return how full the device pool was and what share of the tokens was found, the newest at the right."""
    uses, hits = [], []
    for (_, before), (_, after) in pairwise(history):
        then, now = of(before, cache), of(after, cache)
        if then is None or now is None:
            continue
        uses.append(_use(now))
        hits.append(_hit_share(then, now))
    return Group(_timeline("in use", uses, columns), _timeline("tokens hit", hits, columns))


def moves(history: History, cache: str) -> RenderableType:
    """Return what happened per second between the last two readings."""
    if len(history) < 2:  # noqa: PLR2004 - a rate is of two looks
        return Text("")
    (then_at, before), (now_at, after) = history[-2:]
    then, now = of(before, cache), of(after, cache)
    if then is None or now is None or now_at <= then_at:
        return Text("")
    parts = []
    for words, names in COUNTERS:
        total = sum(now.counters.get(name, 0) for name in names)
        grown = total - sum(then.counters.get(name, 0) for name in names)
        if total:
            parts.append(f"{words} {max(0, grown) / (now_at - then_at):,.1f}")
    return Text(f"{'per second':<{_NAME_COLUMNS}}{', '.join(parts) or 'nothing yet'}")


def ghosts(stats: Stats, cache: str) -> RenderableType:
    """Return what other policies and sizes would have found."""
    found = of(stats, cache)
    seen = [one for one in found.ghosts if one.num_keys] if found is not None else []
    if not seen:
        return Text("")
    words = ", ".join(f"{one.name} {one.num_hits / one.num_keys:.0%}" for one in seen)
    return Text(f"{'would hit':<{_NAME_COLUMNS}}{words}")


def rows(name: str, page: Inspection | None) -> list[tuple[str, ...]]:
    """Return the rows of a list, and behind them how many more there are; tenants with the most blocks come first."""
    if page is None:
        return []
    entries = list(getattr(page, name))
    if name == "tenants":
        entries.sort(key=lambda one: (-one.used_blocks, one.tenant))
    shown = [_ROWS[name](one) for one in entries[:ROWS_MAX]]
    if (num_more := page.num_total - len(shown)) > 0:
        shown.append((f"… {num_more:,} more", *[""] * (len(LISTS[name]) - 1)))
    return shown


def of(stats: Stats, cache: str) -> CacheStats | None:
    """Return the figures of a cache, if it exists."""
    return next((one for one in stats.caches if one.cache == cache), None)


def counts_of(pool: PoolStats) -> dict[str, int]:
    """Return the blocks of a pool by how they look; they add up to all blocks."""
    return {
        "held": pool.ready_held,
        "reserved": pool.reserved,
        "filling": pool.filling,
        "idle": pool.ready - pool.ready_held,
        "quarantined": pool.quarantined,
        "scrubbing": pool.scrubbing,
        "bad": pool.bad,
        "parked": pool.parked,
        "free": pool.free,
    }


def _named(names: Sequence[str], chosen: str = "") -> str:
    """Return names in one sentence, the chosen one in brackets; of many, those around it, and how many more."""
    at = names.index(chosen) if chosen in names else 0
    first = max(0, min(at - _NAMES_MAX // 2, len(names) - _NAMES_MAX))
    near = names[first : first + _NAMES_MAX]
    said = ", ".join(f"[{one}]" if one == chosen else one for one in near)
    return f"{said} and {len(names) - len(near)} more" if len(near) < len(names) else said


def _squares(counts: dict[str, int], num_blocks: int, columns: int) -> list[Text]:
    """Return rows of squares in proportion to counts; a count above 0 has at least one square."""
    if not num_blocks:
        return [Text() for _ in range(_ROWS_OF_SQUARES)]
    num_squares = _ROWS_OF_SQUARES * columns
    wanted = {
        name: max(1, round(count * num_squares / num_blocks)) if count else 0
        for name, count in counts.items()
    }
    while over := sum(wanted.values()) - num_squares:
        # Rounding left some too few, or the least of all took too many.
        largest = max(wanted, key=lambda name: wanted[name])
        wanted[largest] -= over
    squares = [
        (character, colour) for name, _, character, colour in LOOKS for _ in range(wanted[name])
    ]
    lines = [Text() for _ in range(_ROWS_OF_SQUARES)]
    for at, line in enumerate(lines):
        for character, colour in squares[at * columns : (at + 1) * columns]:
            line.append(character, style=colour)
    return lines


def _use(cache: CacheStats) -> float | None:
    device = next((pool for pool in cache.pools if pool.tier == "device"), None)
    usable = 0 if device is None else _usable(device)
    if device is None or not usable:
        return None
    idle = device.ready - device.ready_held
    return (usable - device.free - idle) / usable


def _usable(pool: PoolStats) -> int:
    """Return the blocks that can be used: neither given back by a resize nor retired."""
    return pool.num_blocks - pool.parked - pool.bad


def _hit_share(then: CacheStats, now: CacheStats) -> float | None:
    def grown(source: str) -> int:
        name = f"prefix_tokens_{source}"
        return max(0, now.counters.get(name, 0) - then.counters.get(name, 0))

    found, computed = sum(map(grown, SOURCES)), grown("computed")
    return found / (found + computed) if found + computed else None


def _timeline(words: str, shares: Sequence[float | None], columns: int) -> Text:
    """Return shares as bars of eight heights, the newest at the right; blank where nothing is known."""
    shown = list(shares)[-columns:]
    bars = "".join(" " if one is None else _bar(one) for one in shown)
    known = [one for one in shown if one is not None]
    newest = f"  {known[-1]:.0%}" if known else "  no leases yet"
    return Text(f"{words:<{_NAME_COLUMNS}}") + Text(f"{bars:>{columns}}", style="#3ad0a4") + newest


def _shortened(name: str) -> str:
    """Return a name as it is printed, with an ellipsis for what is too long."""
    shown = Text(printable(name))
    shown.truncate(_TENANT_COLUMNS_MAX, overflow="ellipsis")
    return shown.plain


def _bar(share: float) -> str:
    return _BARS[max(1, min(8, round(share * 8)))] if share else "▁"


_ROWS: Final[dict[str, Callable[[Any], tuple[str, ...]]]] = {
    "leases": lambda one: (
        str(one.lease_id),
        one.phase,
        f"{one.num_blocks:,}",
        f"{one.num_tokens:,}",
        "earlier life" if one.age_ms is None else show_age(one.age_ms),
        show_age(one.left_ms),
    ),
    "waiting": lambda one: (
        one.verb,
        one.reason,
        one.priority,
        f"{one.num_blocks:,}",
        f"{one.available_blocks:,}",
        show_age(one.age_ms),
    ),
    "tenants": lambda one: (
        _shortened(one.tenant),
        f"{one.used_blocks:,}",
        f"{one.held_blocks:,}",
        f"{one.pinned_blocks:,}",
        f"{one.min_blocks:,}",
        f"{one.max_blocks:,}",
    ),
}
