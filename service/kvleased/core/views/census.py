"""Own the census, a snapshot of counts for metrics, statistics and people; all figures are of one instant."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvleased.core.blocks.pool import Pool
from kvleased.core.magazines import contents
from kvleased.core.state import CacheState


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """A snapshot; the states of a tier add up to its blocks, and `ready_held` is a part of `ready`."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int] = field(default_factory=dict)
    """The slots of the disk store."""
    num_leases: int
    num_waiting: int
    num_asking: int = 0
    """Calls that wait to know what the remote store has, before they wait for anything else."""
    waiting_by_priority: Mapping[int, int]
    """Waiting calls by the priority that they have come to."""
    num_workers: int
    num_pins: int
    num_copies: int
    magazines: tuple[tuple[int, int, int], ...] = ()
    """For each magazine: its place, and how many private and how many findable blocks it has."""
    counters: Mapping[str, int]
    """Counts since the start of the daemon, by name."""


def census(state: CacheState) -> Census:
    """Count everything."""
    return Census(
        device=_tier(state.device),
        host=_tier(state.host),
        disk=_tier(state.disk),
        num_leases=len(state.leases),
        num_waiting=len(state.waiting),
        num_asking=len(state.asking),
        waiting_by_priority=Counter(waiter.priority for waiter in state.waiting),
        num_workers=len(state.workers),
        num_pins=len(state.pins),
        num_copies=len(state.flights),
        magazines=contents(state.magazines, state.device.records.state),
        counters=dict(state.counters),
    )


def _tier(pool: Pool) -> dict[str, int]:
    counts = pool.counts()
    return {**counts, "ready_held": counts["ready"] - len(pool.order)}
