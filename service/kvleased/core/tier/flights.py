"""Own the copies in flight: what each copies where, on whose behalf, and the holds that it has on both ends."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import CopyId, LeaseId
from kvleased.core.effects import Direction, Tier
from kvleased.core.ids import Ids


class Purpose(Enum):
    """Why a copy was started, which decides what happens at its end."""

    WRITE_BACK = auto()
    """So that cached blocks can be evicted without loss, because somebody waits for room."""
    DISPLACE = auto()
    """The same, because a caller asked for just these blocks to leave."""
    PREEMPT = auto()
    """To move a lease to the host pool."""
    LOAD = auto()
    """To bring a prefix from the host pool to the device for a new lease."""
    DISK_LOAD = auto()
    """The same from the disk store."""
    REMOTE_LOAD = auto()
    """The same from the remote store."""
    RESUME = auto()
    """To bring a lease back to the device."""
    PREFETCH = auto()
    """To bring cached blocks from the host pool to the device for nobody in particular."""
    DISK_PREFETCH = auto()
    """The same from the disk store."""
    FORK = auto()
    """To give a second lease bytes of its own."""
    SCRUB = auto()
    """To zero blocks before they change tenants."""
    CLEAN = auto()
    """So that the host pool has what the device has, before anybody needs the room."""
    STORE = auto()
    """So that the disk store has what the host pool has."""
    SHARE = auto()
    """So that the remote store has it."""


DIRECTIONS: Final = {
    Purpose.WRITE_BACK: Direction.OFFLOAD,
    Purpose.DISPLACE: Direction.OFFLOAD,
    Purpose.PREEMPT: Direction.OFFLOAD,
    Purpose.LOAD: Direction.RELOAD,
    Purpose.DISK_LOAD: Direction.LOAD,
    Purpose.REMOTE_LOAD: Direction.FETCH,
    Purpose.RESUME: Direction.RELOAD,
    Purpose.PREFETCH: Direction.RELOAD,
    Purpose.DISK_PREFETCH: Direction.LOAD,
    Purpose.FORK: Direction.DUPLICATE,
    Purpose.SCRUB: Direction.SCRUB,
    Purpose.CLEAN: Direction.OFFLOAD,
    Purpose.STORE: Direction.STORE,
    Purpose.SHARE: Direction.SHARE,
}
"""Which way the copies of each purpose go."""

TierTokens = tuple[int, int, int, int]
"""Tokens of a prefix in the tiers down to each: on the device; there or in the host pool; or on disk; or anywhere."""


PREFETCHES: Final = (Purpose.PREFETCH, Purpose.DISK_PREFETCH)
"""Copies of cached blocks that a call asked for by their keys."""

CHORES: Final = (Purpose.CLEAN, Purpose.STORE, Purpose.SHARE)
"""Copies in the background, for which nobody asks."""

HELD_BY_LEASES: Final = frozenset({Purpose.PREEMPT, Purpose.RESUME})
"""Purposes whose targets the lease that moves holds, besides the copy."""

SOURCE_TIERS: Final = {
    Direction.RELOAD: Tier.HOST,
    Direction.LOAD: Tier.DISK,
    Direction.FETCH: Tier.REMOTE,
}
"""Where the bytes come from that go up to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Blocks that the remote store has: what there is in place of sources."""

    keys: bytes
    tenant: int
    positions: Ids


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One batch of copies in flight; it holds its sources and its targets."""

    copy_id: CopyId
    direction: Direction
    purpose: Purpose
    sources: Ids
    """Empty when scrubbing, and where the remote store is the source."""
    targets: Ids
    """Empty where the remote store is the target."""
    source_generations: NDArray[np.uint64]
    target_generations: NDArray[np.uint64]
    keyed: NDArray[np.bool_]
    """Which targets become READY under their source's key; the others become private to the lease."""
    remote_keys: bytes = b""
    """The keys of the targets, where the remote store is the source."""
    lease_id: LeaseId | None = None
    is_joinable: bool = False
    """Whether other leases may wait for it, too: from its start its targets are found by their keys."""
    ticket: int | None = None
    """The call that waits for this copy, and perhaps for others, rather than for a lease's phase."""
    ticket_deadline: float = 0.0
    num_before: int = 0
    """Blocks that have left, or have come, for the waiting call already."""
    is_lost: bool = False
    """The mover did not answer in time: the copy counts as failed, but may still be writing."""

    @property
    def num_pairs(self) -> int:
        """Blocks that are copied or scrubbed."""
        return max(len(self.sources), len(self.targets))


def on_device(num_tokens: int) -> TierTokens:
    """Return so many tokens, all of them on the device."""
    return num_tokens, num_tokens, num_tokens, num_tokens
