"""Own the life of a lease: its phases, and every transition between them, as one table.

The law in prose. A lease begins when its blocks are granted. It is ACTIVE at once, or first LOADING while bytes of its
prefix are copied and its caller waits. An ACTIVE lease may go down to the host pool and come back: EVICTING, EVICTED,
RELOADING. While it moves, both the blocks and the slots are held, and a copy that fails leaves it where it was. If a
lease is not renewed in time, what happens depends on where it is: on the device, where its worker could still write, it
is QUARANTINED; in the host pool, where no worker can write, it ends. In any phase, a lease ends when its owner says so
or is proven dead.
"""

from enum import IntEnum, StrEnum
from typing import Final


class Phase(IntEnum):
    """Where a lease is in its life; stored in its row, so the numbers are part of the format."""

    UNUSED = 0
    """There is no lease."""
    LOADING = 1
    """Granted, but bytes of its prefix are still on their way; its caller waits."""
    ACTIVE = 2
    """On the device, in its worker's hands."""
    EVICTING = 3
    """Its bytes are on their way to the host pool."""
    EVICTED = 4
    """In the host pool."""
    RELOADING = 5
    """On its way back; the blocks are on the device, the row still lists the slots."""
    QUARANTINED = 6
    """Not renewed in time; its blocks are kept from everyone."""


OFF_DEVICE: Final = (Phase.EVICTING, Phase.EVICTED, Phase.RELOADING)
"""Phases in which no caller is told of blocks: the bytes are in the host pool, or on their way there or back."""


class End(StrEnum):
    """How a granted lease ended."""

    RELEASED = "released"
    """By its owner's word."""
    DETACHED = "detached"
    """Its worker was detached."""
    DIED = "died"
    """Its worker's death was proven."""
    EXPIRED = "expired"
    """It was in the host pool and not renewed in time; on the device it would be quarantined and live on."""
    ORPHANED = "orphaned"
    """Its worker had lost it."""
    DAMAGED = "damaged"
    """Its bytes in the host pool were damaged."""


ENDED: Final[dict[End, str]] = {
    end: "leases_released" if end is End.RELEASED else f"leases_ended_{end}" for end in End
}
"""The counters of ends; with the live leases that are not LOADING, they add up to all leases granted and recovered."""

MOVING: Final = 7
"""The phase of a row that is being rewritten; a restart does not believe such a row."""

PHASE_TRANSITIONS: Final[dict[Phase, dict[Phase, str]]] = {
    Phase.UNUSED: {
        Phase.LOADING: "granted, and a part is copied first",
        Phase.ACTIVE: "granted",
    },
    Phase.LOADING: {
        Phase.ACTIVE: "the copies are done",
        Phase.UNUSED: "a copy failed, or the caller has gone",
    },
    Phase.ACTIVE: {
        Phase.EVICTING: "evict",
        Phase.EVICTED: "evict, and all bytes have slots already",
        Phase.QUARANTINED: "not renewed",
        Phase.UNUSED: "released or disowned, or its worker died",
    },
    Phase.EVICTING: {
        Phase.EVICTED: "the copies are done",
        Phase.ACTIVE: "a copy failed",
        Phase.UNUSED: "released or disowned, or its worker died",
    },
    Phase.EVICTED: {
        Phase.RELOADING: "reload, and there is room",
        Phase.UNUSED: "released, disowned or not renewed, its bytes are damaged, or its worker died",
    },
    Phase.RELOADING: {
        Phase.ACTIVE: "the copies are done, or none was needed",
        Phase.EVICTED: "a copy failed",
        Phase.UNUSED: "released or disowned, its bytes are damaged, or its worker died",
    },
    Phase.QUARANTINED: {
        Phase.ACTIVE: "its owner spoke again",
        Phase.UNUSED: "released or disowned, or its worker died",
    },
}
"""The life of a lease: the phases that follow each phase, and what leads there."""

BEGINNINGS: Final = frozenset(PHASE_TRANSITIONS[Phase.UNUSED])
"""The phases in which a lease can begin; after a restart it goes on in `AFTER_RESTART`."""

AFTER_RESTART: Final[dict[Phase, Phase]] = {
    Phase.ACTIVE: Phase.ACTIVE,
    Phase.EVICTING: Phase.ACTIVE,
    Phase.QUARANTINED: Phase.ACTIVE,
    Phase.EVICTED: Phase.EVICTED,
    Phase.RELOADING: Phase.EVICTED,
}
"""The phase of each lease after the control process has restarted; in other phases a lease ends: no caller knows it."""
