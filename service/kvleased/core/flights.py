"""Own the copies in flight: what each copies where, on whose behalf, and the holds that it has on both ends."""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import CopyId, LeaseId
from kvleased.core.effects import Direction
from kvleased.core.pool import Ids


class Purpose(Enum):
    """Why a copy was started, which decides what happens at its end."""

    WRITE_BACK = auto()
    """So that cached blocks can be evicted without loss, because somebody waits for room."""
    DISPLACE = auto()
    """The same, because a caller asked for just these blocks to leave."""
    PREEMPT = auto()
    """To move a lease to the host pool."""
    LOAD = auto()
    """To bring a prefix to the device for a new lease."""
    RESUME = auto()
    """To bring a lease back to the device."""
    PREFETCH = auto()
    """To bring cached blocks to the device for nobody in particular."""
    FORK = auto()
    """To give a second lease bytes of its own."""
    SCRUB = auto()
    """To zero blocks before they change tenants."""


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One batch of copies in flight; it holds its sources and its targets."""

    copy_id: CopyId
    direction: Direction
    purpose: Purpose
    sources: Ids
    """Empty when scrubbing."""
    targets: Ids
    source_generations: NDArray[np.uint64]
    target_generations: NDArray[np.uint64]
    keyed: NDArray[np.bool_]
    """Which targets become READY under their source's key; the others become private to the lease."""
    lease_id: LeaseId | None = None
    ticket: int | None = None
    """The call that waits for this copy rather than for a lease's phase."""
    ticket_deadline: float = 0.0
    num_evicted_before: int = 0
    """Blocks that the waiting call has evicted already."""
    is_lost: bool = False
    """The mover did not answer in time: the copy counts as failed, but may still be writing."""
