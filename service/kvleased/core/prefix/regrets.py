"""Own the counts of why blocks of prefixes were missed: keys behind the found prefix, looked up after the grant.

A grant puts its missed keys aside, and no call waits for the reasons: the next ticks look the keys up, a bounded number
at a time. Blocks that were evicted and are needed now would have stayed in a larger pool. The blocks counted are those
of the group that keeps everything or, if there is none, of the first group whose blocks are found by key.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.history import DepartureReason, Numbers
from kvleased.core.blocks.marks import key_words
from kvleased.core.lease.missing import Missing
from kvleased.core.state import CacheState

KEYS_AT_ONCE: Final = 2048
"""Keys that one tick looks up."""
REASONS: Final = (*(one.name.lower() for one in DepartureReason), "cached", "unknown")
"""Why blocks were missed: the names of `DepartureReason`; then cached blocks behind a miss, and unknown blocks."""

_CACHED: Final = len(DepartureReason)
_UNKNOWN: Final = len(DepartureReason) + 1


def look_back(state: CacheState) -> None:
    """Look up some of the keys that were put aside, and count them by reason."""
    missing = state.missing.take(KEYS_AT_ONCE)
    if not missing or not state.covering.shared:
        return
    counts = np.bincount(_reasons(state, missing), minlength=len(REASONS))
    for name, count in zip(REASONS, counts.tolist(), strict=True):
        if count:
            state.counters[f"missed_{name}"] += count


def _reasons(state: CacheState, missing: list[Missing]) -> NDArray[np.uint8]:
    """Return for each missed block of some grants the index of its reason in REASONS."""
    covering = state.covering
    group = covering.first_key_of if covering.first_key_of is not None else covering.shared[0]
    parts = [covering.block_keys(group, key_words(one.keys), one.first_key)[1] for one in missing]
    counts = [len(part) for part in parts]
    words = np.ascontiguousarray(np.concatenate(parts))
    digests = np.ascontiguousarray(words[:, 0]).view(np.int64)
    num_left, lease_ids = _of_each(missing, counts)
    numbers = state.history.last_before(digests, num_left)
    reasons = np.full(len(digests), _UNKNOWN, np.uint8)
    has_left = numbers > 0
    reasons[has_left] = state.history.reasons(numbers[has_left])
    entries = state.device.index.find(words.tobytes())
    is_there = entries >= 0
    is_there[is_there] = state.device.since[entries[is_there]] < lease_ids[is_there]
    reasons[is_there] = _CACHED
    return reasons


def _of_each(missing: list[Missing], counts: list[int]) -> tuple[Numbers, Numbers]:
    """Return for each block how many departures there were before its grant, and the id of the granted lease."""
    num_left = np.array([one.num_left for one in missing], np.int64).repeat(counts)
    lease_ids = np.array([one.lease_id for one in missing], np.int64).repeat(counts)
    return num_left, lease_ids
