"""Own the copies in flight: what each copies and where to, for which lease or call, and its holds on both ends."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import CopyId, LeaseId
from kvleased.core.blocks.history import DepartureReason
from kvleased.core.effects import Direction, Tier
from kvleased.core.ids import Ids


class Purpose(Enum):
    """Why a copy was started, which decides what happens at its end."""

    WRITE_BACK = auto()
    """To write cached blocks to the host pool, so that they can be evicted without loss for a waiting call."""
    DISPLACE = auto()
    """The same, because a caller asked for these very blocks to leave."""
    PREEMPT = auto()
    """To move a lease to the host pool."""
    LOAD = auto()
    """To bring a prefix from the host pool to the device for a new lease."""
    DISK_LOAD = auto()
    """To bring a prefix from the disk store to the device for a new lease."""
    REMOTE_LOAD = auto()
    """To bring a prefix from the remote store to the device for a new lease."""
    RESUME = auto()
    """To bring a lease back to the device."""
    PREFETCH = auto()
    """To bring cached blocks from the host pool to the device, for no particular lease."""
    DISK_PREFETCH = auto()
    """To bring cached blocks from the disk store to the device, for no particular lease."""
    FORK = auto()
    """To give a forked lease blocks of its own."""
    SCRUB = auto()
    """To zero blocks before they change tenants."""
    CLEAN = auto()
    """To write device blocks to the host pool before the room is needed."""
    STORE = auto()
    """To write slots of the host pool to the disk store."""
    SHARE = auto()
    """To write slots of the host pool to the remote store."""


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
"""The direction of the copies of each purpose."""

TierTokens = tuple[int, int, int, int]
"""Tokens of a prefix, summed from the top: on the device; there or in the host pool; there or on disk; anywhere."""


PREFETCHES: Final = (Purpose.PREFETCH, Purpose.DISK_PREFETCH)
"""Copies that bring cached blocks to the device for a call that named their keys."""

CHORES: Final = (Purpose.CLEAN, Purpose.STORE, Purpose.SHARE)
"""Background copies, which no call asks for."""

DOWNWARD: Final = (Purpose.WRITE_BACK, *CHORES)
"""Copies to lower tiers of blocks that nobody uses for it: these keep their places in the order of eviction."""

HELD_BY_LEASES: Final = frozenset({Purpose.PREEMPT, Purpose.RESUME})
"""Purposes whose targets are held by the lease that moves, besides the copy."""

SOURCE_TIERS: Final = {
    Direction.RELOAD: Tier.HOST,
    Direction.LOAD: Tier.DISK,
    Direction.FETCH: Tier.REMOTE,
}
"""The tier that the bytes come from, for each direction that leads up to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Blocks that the remote store has; they stand in place of a copy's sources."""

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
    """Empty when scrubbing, and if the remote store is the source."""
    targets: Ids
    """Empty if the remote store is the target."""
    source_generations: NDArray[np.uint64]
    target_generations: NDArray[np.uint64]
    keyed: NDArray[np.bool_]
    """Which targets become READY under their source's key; the others become private to the lease."""
    remote_keys: bytes = b""
    """The keys of the targets, if the remote store is the source."""
    lease_id: LeaseId | None = None
    is_joinable: bool = False
    """Whether other leases may wait for the copy, too; its targets are then found by their keys from its start."""
    ticket: int | None = None
    """The call that waits for this copy, and perhaps for others, rather than for a lease's phase."""
    ticket_deadline: float = 0.0
    num_before: int = 0
    """Blocks that have already left, or come, for the waiting call."""
    why: DepartureReason = DepartureReason.DISPLACED
    """Of a displacement: why its blocks leave the device."""
    is_lost: bool = False
    """The mover did not answer in time: the copy counts as failed, but may still be writing."""

    @property
    def num_pairs(self) -> int:
        """Blocks that are copied or scrubbed."""
        return max(len(self.sources), len(self.targets))

    @property
    def is_use(self) -> bool:
        """Whether the copy counts as a use of its sources, after which these are the last to leave."""
        return self.purpose not in DOWNWARD


def on_device(num_tokens: int) -> TierTokens:
    """Return so many tokens, all of them on the device."""
    return num_tokens, num_tokens, num_tokens, num_tokens
