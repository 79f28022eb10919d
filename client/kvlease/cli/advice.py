"""Own what `kvlease status` says below its tables: what looks like a fault but is intended, and what to do about it."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvlease.cli.printing import printable
from kvlease.replies import CacheInfo, Stats

UNDRAIN: Final = "to grant leases again, use kvlease drain --undo, with --cache NAME if a cache was drained by itself"
"""How to end a drain."""
STOPPING: Final = (
    "the daemon was told to stop: it ends with its leases or after drain_seconds, and drain --undo cannot end that; if "
    "only its control process was told, its supervisor then starts another"
)
"""Why the drain cannot be ended. The control process cannot know who sent it the signal."""


def of(found: Sequence[CacheInfo], stats: Stats) -> Iterator[str]:
    """Yield a sentence for each thing that an operator may want to change."""
    drained = [one.cache for one in found if one.is_draining]
    if stats.is_stopping:
        yield STOPPING
    elif drained:
        yield printable(f"drained: {', '.join(drained)}; {UNDRAIN}")
    elif stats.is_draining:
        yield f"the daemon is drained; {UNDRAIN}"
    counters = {one.cache: one.counters for one in stats.caches}
    evicted = {
        one.cache: told["evictions"]
        for one in found
        if (told := counters.get(one.cache, {})).get("evictions")
        and one.plan.num_slots
        # Blocks that were reloaded lay below already, as after a restart, and leave without a copy.
        and not (told.get("offloads") or told.get("reloads"))
    }
    if evicted:
        counted = ", ".join(f"{name} ({count:,})" for name, count in evicted.items())
        yield printable(
            f"blocks were evicted, but none was copied to the host pool: {counted}. A call makes room by copying only "
            "if it may wait (wait_ms above 0); write_policy write-through copies at once"
        )
