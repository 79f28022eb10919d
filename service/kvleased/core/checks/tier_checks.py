"""Own the invariants of traffic between tiers: copies up and down, calls that ask the remote store, and marks."""

from collections import Counter

import numpy as np

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.blocks.states import State
from kvleased.core.commands import Reserve
from kvleased.core.effects import MOVER_OF, Direction, Tier
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import CHORES, SOURCE_TIERS


def tier_violations(state: CacheState) -> list[str]:
    """Return what does not hold between the tiers."""
    return [*_ways_up(state), *_chores(state), *_asking(state), *_marks(state)]


def _ways_up(state: CacheState) -> list[str]:
    """Blocks on their way to the device under a key are listed as loading, and nothing else is."""
    found, num_coming = [], 0
    for flight in state.flights.values():
        if flight.direction not in SOURCE_TIERS or flight.is_lost:
            continue
        num_coming += int(np.count_nonzero(flight.keyed))
        is_fetch = flight.direction is Direction.FETCH
        if is_fetch and len(flight.remote_keys) != BYTES_PER_KEY * len(flight.targets):
            found.append(f"copy {flight.copy_id} does not name the key of each block")
    if num_coming != len(state.loading):
        found.append("the blocks listed as loading are not those on their way")
    return found


def _chores(state: CacheState) -> list[str]:
    """Each mover has at most one background copy, and that copy reads nothing that may still be written."""
    found = []
    chores = [one for one in state.flights.values() if one.purpose in CHORES]
    by_mover = Counter(MOVER_OF[flight.direction] for flight in chores)
    found += [
        f"mover {one.value} has several chores" for one, count in by_mover.items() if count > 1
    ]
    for flight in chores:
        source_pool, _ = state.ends(flight.direction)
        states = source_pool.records.state[flight.sources]
        # Another copy may have found one of them damaged meanwhile.
        if ((states != State.READY) & (states != State.BAD)).any():
            found.append(f"chore {flight.copy_id} reads blocks that are not ready")
    return found


def _asking(state: CacheState) -> list[str]:
    """Only new requests of attached workers ask the remote store, while it works, and none of them waits elsewhere."""
    found = []
    waiting = {waiter.ticket for waiter in state.waiting}
    for ticket, asking in state.asking.items():
        waiter = asking.waiter
        if ticket != waiter.ticket or ticket in waiting:
            found.append(f"call {ticket} asks and waits under another ticket, too")
        if waiter.worker_id not in state.workers or not isinstance(waiter.command, Reserve):
            found.append(f"call {ticket} asks for nobody")
    if state.asking and (Tier.REMOTE in state.tiers_off or state.is_draining):
        found.append("calls ask that nobody answers")
    return found


def _marks(state: CacheState) -> list[str]:
    """No slot that the remote store has is marked to be copied there."""
    dirt = state.dirt
    if not dirt.shares:
        return []
    is_ready = state.host.records.state == State.READY
    if (is_ready & dirt.share & dirt.remote[1]).any():
        return ["a slot is to be shared that the remote store has"]
    return []
