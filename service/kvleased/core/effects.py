"""Own what comes out of the core: replies to the caller, and effects that the daemon must carry out.

Replies carry the same field names as the responses of `kvlease.v1`, so the adapters convert them by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvlease.errors import KVLeaseError
from kvlease.ids import CopyId, LeaseId, PinId, WorkerId
from kvleased.core.magazine_replies import Exchanged, Inventoried
from kvleased.core.message import message
from kvleased.core.untold import Silence

_NO_WORKER: Final = WorkerId(0)
_NO_LEASE: Final = LeaseId(0)


@message
class Done:
    """Answer the commands whose answers have nothing to say."""


@message
class Detached:
    """Answer Detach and WorkerDied."""

    num_leases: int


@message
class Adopted:
    """Answer Adopt."""

    num_adopted: int
    """Slots whose blocks are findable again."""


@message
class Beat:
    """Answer Heartbeat."""

    unknown_lease_ids: bytes
    num_orphans_ended: int
    newest_lease_id: LeaseId
    """No lease had a larger id at the time of this answer, and every lease that is granted later has one."""


class Tier(Enum):
    """Where blocks can be."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class MissReason(Enum):
    """Why a block of a prefix was not found."""

    NEVER_COMMITTED = "never_committed"
    EVICTED = "evicted"
    CLEARED = "cleared"
    RESIZED = "resized"
    STORE_LOST = "store_lost"
    DROPPED = "dropped"
    CHECKSUM = "checksum"
    TIER_OFF = "tier_off"
    OTHER_TENANT = "other_tenant"
    BEHIND_A_MISS = "behind_a_miss"
    SHORTER_THAN_A_BLOCK = "shorter_than_a_block"


@message
class Missed:
    """A run of blocks of a prefix that were not found, and why; counted in keys of the request's chain."""

    first_block: int
    num_blocks: int
    reason: MissReason
    tier: Tier | None = None
    """The tier that the blocks left last."""
    policy: str = ""
    """The policy that chose them; empty if none did."""
    tenant: int = 0
    """The tenant for whom room was made; 0 if it was made for nobody."""
    first_left_at: float | None = None
    """When the first of them left, in monotonic seconds; None if that is not known."""
    last_left_at: float | None = None
    group: int = 0
    """The group whose blocks were missing."""
    is_below: bool = False
    """Whether a lower tier had them, but the call could not wait for a copy."""
    remote_silence: Silence | None = None
    """Why the remote store, which may have them, told nothing of them; None if it answered, or would not be asked."""
    num_tokens: int = 0
    """How many tokens are missing, if they fill no block."""
    num_remembered: int = 0
    """If nothing is known of the blocks: how many departures are remembered."""
    remembered_since: float | None = None
    """When the oldest of those departures was, in monotonic seconds."""
    num_runs_left_out: int = 0
    """In the last run of an answer: the further runs behind it that are left out."""
    num_blocks_left_out: int = 0


@message
class Explained:
    """Where each token of a lease's prefix came from."""

    lease_id: LeaseId
    num_tokens: int
    """Tokens that the lease was asked to cover."""
    hit_tokens: Mapping[Tier, int]
    misses: tuple[Missed, ...]


@message
class Reserved:
    """Answer Reserve."""

    lease_id: LeaseId
    block_ids: bytes
    device_hit_tokens: int
    host_hit_tokens: int
    disk_hit_tokens: int = 0
    remote_hit_tokens: int = 0
    row: int
    num_blocks: bytes = b""
    """Packed int32: the number of ids of each group; empty if there is one group."""
    covered_tokens: int
    """Tokens that may be computed now."""
    misses: tuple[Missed, ...] = ()
    """Why the rest of the prefix was not found, if that was asked for."""
    joined_id: LeaseId = _NO_LEASE
    """The id under which a rank joined a lease; 0 if that is the lease's own id."""


@message
class Mapped:
    """Answer Map."""

    row: int
    num_kernel_blocks: int
    kernel_blocks: bytes = b""
    """Packed int32: the number of kernel blocks of each group; empty if there is one group."""


@message
class Extended:
    """Answer Extend."""

    block_ids: bytes
    num_blocks: bytes = b""
    """Packed int32: the number of ids of each group; empty if there is one group."""
    covered_tokens: int
    """Tokens that may be computed now."""
    num_places: bytes = b""
    """Packed int32: how many places of each group the caller has been told of; the group's ids end with the last one.

    Empty for a cache with one group that keeps everything.
    """


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
    """Packed int32: the number of ids of each group; empty if there is one group."""


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
    num_disk_blocks: int = 0


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
    errors: tuple[tuple[int, KVLeaseError], ...] = ()
    """Why the first refused operations were refused, each with the index of the operation."""
    num_places: bytes = b""
    """The `num_places` of `Extended` for each operation, 0 for what is no extend or was refused; empty where `Extended`
    has none."""


@message
class Drained:
    """Answer Drain and Undrain."""

    num_leases: int
    num_waiting: int


@message
class Cleared:
    """Answer Clear."""

    num_device: int
    num_host: int
    num_disk: int
    num_held: int
    """Cached blocks of the device pool, and slots of the lower tiers, that stay because somebody holds them."""
    lease_ids: bytes
    """Packed int64: leases that hold some of these."""
    pin_ids: bytes
    """Packed int64: pins that hold some of these."""
    num_copying: int
    """How many of these a copy reads; it may end soon."""
    num_in_magazines: int


@message
class Resized:
    """Answer Resize."""

    num_blocks: int
    """Blocks that can be granted now."""
    num_parked: int
    """Blocks that are out of use."""
    num_evicted: int


Reply = (
    Done | Adopted | Detached | Beat | Reserved | Mapped | Extended | Committed | Forked | Trimmed | Evicted |
    Reloaded | Released | Found | Explained | Pinned | Stepped | Exchanged | Inventoried |
    Drained | Cleared | Resized )  # fmt: skip


class Direction(Enum):
    """Which way a batch of copies goes."""

    OFFLOAD = "device_to_host"
    RELOAD = "host_to_device"
    DUPLICATE = "device_to_device"
    SCRUB = "scrub"
    """Zeros to the device; there is no source."""
    STORE = "host_to_disk"
    LOAD = "disk_to_device"
    SHARE = "host_to_remote"
    """There is no target: the remote store finds a place by the label."""
    FETCH = "remote_to_device"
    """There is no source."""


class Mover(Enum):
    """The processes that carry out copies; each can be killed by itself."""

    MEMORY = "memory"
    DISK = "disk"
    REMOTE = "remote"


MOVER_OF: Final[Mapping[Direction, Mover]] = {
    Direction.OFFLOAD: Mover.MEMORY,
    Direction.RELOAD: Mover.MEMORY,
    Direction.DUPLICATE: Mover.MEMORY,
    Direction.SCRUB: Mover.MEMORY,
    Direction.STORE: Mover.DISK,
    Direction.LOAD: Mover.DISK,
    Direction.SHARE: Mover.REMOTE,
    Direction.FETCH: Mover.REMOTE,
}


@message
class Copy:
    """Have a mover copy `source_ids[i]` to `target_ids[i]`, then send CopyDone, CopyFailed or CopyLost."""

    copy_id: CopyId
    direction: Direction
    source_ids: bytes
    """Packed int32; empty for SCRUB and FETCH."""
    target_ids: bytes
    """Packed int32; empty for SHARE."""
    checksums: bytes
    """Packed uint64 that the source's bytes must have, 0 where unknown; empty where the source is the device."""
    labels: bytes = b""
    """What bytes these are, and whose, `labels.LABEL` each; only for STORE, LOAD, SHARE and FETCH."""


@message
class Probe:
    """Ask the remote store which of some blocks it has, then send Probed."""

    probe_id: int
    labels: bytes
    """`labels.LABEL` each."""


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


Effect = Copy | Probe | Wake | Notice


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one command led to: a reply now, or a ticket under which a later Wake will answer."""

    reply: Reply | None = None
    ticket: int | None = None
    effects: Sequence[Effect] = ()
    """Filled in at the very end, when all of them are known."""
