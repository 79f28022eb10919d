"""Own what comes out of the core: replies to the caller, and effects that the daemon must carry out.

Replies carry the same field names as the responses of `kvlease.v1`, so the adapters convert them by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvlease.errors import KVLeaseError
from kvlease.ids import CopyId, LeaseId, PinId, WorkerId
from kvleased.core.message import message

_NO_WORKER: Final = WorkerId(0)
_NO_LEASE: Final = LeaseId(0)


@message
class Done:
    """The answer of commands that have nothing to say."""


@message
class Detached:
    """Answer Detach and WorkerDied."""

    num_leases: int


@message
class Beat:
    """Answer Heartbeat."""

    unknown_lease_ids: bytes
    num_orphans_ended: int
    newest_lease_id: LeaseId
    """No lease had a larger id when this was said, and every lease that is granted later has one."""


@message
class Reserved:
    """Answer Reserve."""

    lease_id: LeaseId
    block_ids: bytes
    device_hit_tokens: int
    host_hit_tokens: int
    row: int
    num_blocks: bytes = b""
    """Packed int32: ids of each group; empty where there is one group."""
    covered_tokens: int
    """Tokens that may be computed now."""
    joined_id: LeaseId = _NO_LEASE
    """Of a rank that joined a lease: the id under which it did; 0 where that is the lease's own."""


@message
class Mapped:
    """Answer Map."""

    row: int
    num_kernel_blocks: int
    kernel_blocks: bytes = b""
    """Packed int32: those of each group; empty where there is one group."""


@message
class Extended:
    """Answer Extend."""

    block_ids: bytes
    num_blocks: bytes = b""
    """Packed int32: ids of each group; empty where there is one group."""
    covered_tokens: int
    """Tokens that may be computed now."""


@message
class Committed:
    """Answer Commit."""

    num_committed: int
    num_duplicates: int
    num_given_back: int = 0


@message
class Forked:
    """Answer Fork."""

    lease: Reserved
    num_shared: int
    num_copied: int


@message
class Trimmed:
    """Answer Trim."""

    num_given_back: int


@message
class Evicted:
    """Answer Evict."""

    num_evicted: int
    num_offloaded: int


@message
class Reloaded:
    """Answer Reload."""

    block_ids: bytes
    num_reloaded: int
    num_tokens: int
    row: int
    num_blocks: bytes = b""
    """Packed int32: ids of each group; empty where there is one group."""


@message
class Released:
    """Answer Release and Unpin."""

    released: bool


@message
class Found:
    """Answer Lookup."""

    num_device_blocks: int
    num_host_blocks: int
    hit_tokens: int


@message
class Pinned:
    """Answer Pin."""

    pin_id: PinId
    num_blocks: int


@message
class Stepped:
    """Answer Step."""

    codes: bytes
    num_blocks: bytes
    block_ids: bytes
    reserves: tuple[Reserved | KVLeaseError, ...]


Reply = (
    Done | Detached | Beat | Reserved | Mapped | Extended | Committed | Forked | Trimmed | Evicted |
    Reloaded | Released | Found | Pinned | Stepped )  # fmt: skip


class Direction(Enum):
    """Which way a batch of copies goes."""

    OFFLOAD = "device_to_host"
    RELOAD = "host_to_device"
    DUPLICATE = "device_to_device"
    SCRUB = "scrub"
    """Zeros to the device; there is no source."""


@message
class Copy:
    """Have a mover copy `source_ids[i]` to `target_ids[i]`, then send CopyDone, CopyFailed or CopyLost."""

    copy_id: CopyId
    direction: Direction
    source_ids: bytes
    """Packed int32; empty for SCRUB."""
    target_ids: bytes
    """Packed int32."""
    checksums: bytes
    """Packed uint64 that the bytes must have; only for RELOAD, 0 where unknown."""


@message
class Wake:
    """Answer the waiting caller that holds `ticket`."""

    ticket: int
    result: Reply | KVLeaseError


@message
class Notice:
    """Tell watchers what happened; `kind` is one of the kinds of the Watch verb."""

    kind: str
    worker_id: WorkerId = _NO_WORKER
    lease_id: LeaseId = _NO_LEASE
    num_blocks: int = 0


Effect = Copy | Wake | Notice


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one command led to: a reply now, or a ticket under which a later Wake will answer."""

    reply: Reply | None = None
    ticket: int | None = None
    effects: Sequence[Effect] = ()
    """Put in at the very end, when all of them are known."""
