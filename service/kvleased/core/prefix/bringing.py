"""Own the copies that bring a prefix to the device, and the count of its tokens by the tier that they came from."""

from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.prefix.looking import parted
from kvleased.core.prefix.search import Match
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import Purpose, Remote, TierTokens


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
    if prefix.remote_keys:
        targets = loaded[is_in.remote]
        remote = Remote(
            keys=prefix.remote_keys, tenant=lease.tenant, positions=prefix.remote_positions
        )
        flight = state.fly(
            Purpose.REMOTE_LOAD, NOWHERE, targets, keyed=targets >= 0, lease=lease, remote=remote
        )
        lease.pending.add(flight.copy_id)


def attributed(now: TierTokens, first: TierTokens) -> TierTokens:
    """Return the tokens found, for each tier in it and those above, if a first try may have brought some of them up.

    Tokens that the first try also found count for the lower of the two tiers; others count for the tier where they are
    now.
    """
    device, host, disk, every = (
        min(one, before) + max(0, one - first[-1]) for one, before in zip(now, first, strict=True)
    )
    return device, host, disk, every
