"""Own the copies that bring a prefix to the device, and the count of its tokens by the tier that they came from."""

from collections.abc import Sequence

import numpy as np

from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.prefix.looking import firsts_below, parted
from kvleased.core.prefix.search import Match, tokens_by_tier
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import SOURCE_TIERS, Flight, Purpose, Remote, TierTokens


def bring(state: CacheState, lease: Lease, prefix: Match, loaded: Ids) -> None:
    """Start the copies that bring the blocks of a prefix from lower tiers to the device."""
    is_in = parted(state, prefix.below)
    for purpose, is_there, first in (
        (Purpose.LOAD, is_in.host, 0),
        (Purpose.DISK_LOAD, is_in.disk, len(state.host)),
    ):
        slots = prefix.below[is_there] - first
        if len(slots):
            flight = state.fly(purpose, slots, loaded[is_there], keyed=slots >= 0, lease=lease)
            lease.pending.add(flight.copy_id)
            lease.brought += (flight,)
    if prefix.remote_keys:
        targets = loaded[is_in.remote]
        remote = Remote(
            keys=prefix.remote_keys, tenant=lease.tenant, positions=prefix.remote_positions
        )
        flight = state.fly(
            Purpose.REMOTE_LOAD, NOWHERE, targets, keyed=targets >= 0, lease=lease, remote=remote
        )
        lease.pending.add(flight.copy_id)
        lease.brought += (flight,)


def attributed(state: CacheState, prefix: Match, brought: Sequence[Flight]) -> TierTokens:
    """Return the tokens of a prefix, for each tier in it and those above, if earlier tries brought some blocks up.

    A block that one of these copies brought counts for the tier that it came from, others for the tier where they are.
    A block that has another generation since is not the copy's any more.
    """
    first_of = dict(zip(SOURCE_TIERS.values(), firsts_below(state), strict=True))
    generations = state.device.records.generation
    came_from: dict[int, int] = {}
    for flight in brought:
        first = first_of[SOURCE_TIERS[flight.direction]]
        is_its = generations[flight.targets] == flight.target_generations
        came_from |= dict.fromkeys(flight.targets[is_its].tolist(), ~first)
    parts = prefix.parts or (prefix.entries,)
    sources = [
        np.array([came_from.get(entry, entry) for entry in part.tolist()], np.intp)
        for part in parts
    ]
    return tokens_by_tier(state, sources, prefix.hit_tokens)
