"""Own what goes into the core: one frozen record per command; the replies and effects are in `effects`."""

from collections.abc import Mapping
from typing import Protocol

from kvlease.ids import CopyId, LeaseId, PinId, WorkerId
from kvleased.core.effects import Mover, Tier
from kvleased.core.limits import TenantLimits
from kvleased.core.message import message


@message
class Attach:
    """Make a process known as a worker."""

    worker_id: WorkerId
    tenant_digest: int
    """64 bits that name the tenant; 0 is not a tenant."""
    engine: int = 0
    """64 bits that name the tenant's engine of which the process is a rank; 0 if it calls for all ranks."""
    rank: int = 0
    magazine: int = 0
    """64 bits that name the magazine that the process shares with the other processes of its engine; 0 is none."""


@message
class Detach:
    """End a worker on its own word, which proves that it is quiescent."""

    worker_id: WorkerId


@message
class WorkerDied:
    """End a worker whose process is proven dead."""

    worker_id: WorkerId


@message
class Heartbeat:
    """Renew the leases in a worker's inventory and end those that it has lost."""

    worker_id: WorkerId
    lease_ids: tuple[LeaseId, ...]
    newest_lease_id: LeaseId


@message
class Reserve:
    """Grant blocks for one request, all or nothing."""

    worker_id: WorkerId
    request_id: str
    keys: bytes
    """32-byte keys of the reusable prefix, one for each hash_tokens, from the start."""
    num_tokens: int
    wait_ms: int = 0
    priority: int = 1
    """0 is low, 1 normal, 2 high: how soon it is served, and, without `retain_priority`, how long its blocks stay."""
    retain_seconds: int = 0
    """Seconds after their last use for which committed blocks keep that priority; 0: for as long as they are cached."""
    explain: bool = False
    """Whether to tell why the rest of the prefix was not found."""
    retain_priority: int | None = None
    """0 to 100: how long its blocks stay, in place of the priority; None: as the priority says."""


@message
class Map:
    """Publish a lease's row of the block table."""

    worker_id: WorkerId
    lease_id: LeaseId


@message
class Extend:
    """Make a lease cover `num_tokens` in all."""

    worker_id: WorkerId
    lease_id: LeaseId
    num_tokens: int
    wait_ms: int = 0


@message
class Commit:
    """Make the full blocks among the first `num_tokens` findable, and give back what no later token needs."""

    worker_id: WorkerId
    lease_id: LeaseId
    num_tokens: int
    first_block: int
    """Index of the first key in the request's chain; with one group, that of its block."""
    keys: bytes


@message
class Fork:
    """Lease the blocks of a running request to a second one: READY ones are shared, a partial one copied."""

    worker_id: WorkerId
    lease_id: LeaseId
    request_id: str
    num_tokens: int
    wait_ms: int = 0


@message
class Trim:
    """Take back a lease's blocks behind `num_tokens`."""

    worker_id: WorkerId
    lease_id: LeaseId
    num_tokens: int


@message
class Evict:
    """Move blocks out of the device pool: a lease's, those of keys, or the coldest `num_blocks`."""

    worker_id: WorkerId | None = None
    """None for an operator, who may name no lease but anybody's blocks; a worker may name its own tenant's blocks."""
    lease_id: LeaseId | None = None
    keys: bytes = b""
    num_blocks: int = 0
    wait_ms: int = 0
    is_for_resize: bool = False
    """Whether the blocks leave for a resize, which then is why they are missed."""


@message
class Reload:
    """Bring back the blocks of an evicted lease, or of keys."""

    worker_id: WorkerId | None = None
    lease_id: LeaseId | None = None
    keys: bytes = b""
    wait_ms: int = 0


@message
class Release:
    """End a lease."""

    worker_id: WorkerId
    lease_id: LeaseId


@message
class Lookup:
    """Tell how long a prefix is cached."""

    keys: bytes
    tenant_digest: int | None = None
    """Whose blocks count; None, for an operator, counts everybody's."""


@message
class Explain:
    """Tell why the rest of a lease's prefix was not found."""

    worker_id: WorkerId | None
    """None for an operator, who may ask about any lease."""
    lease_id: LeaseId


@message
class Pin:
    """Hold cached blocks on the device."""

    keys: bytes
    tenant_digest: int | None = None
    """Whose blocks count; None, for an operator, counts everybody's."""


@message
class Unpin:
    """End a pin."""

    pin_id: PinId
    tenant_digest: int | None = None
    """The tenant whose pin it is; None, for an operator, may end anybody's."""


@message
class Step:
    """Carry out the columns of one scheduler step; each operation succeeds or changes nothing."""

    worker_id: WorkerId
    verbs: bytes
    lease_ids: bytes
    num_tokens: bytes
    num_keys: bytes = b""
    first_blocks: bytes = b""
    keys: bytes = b""
    reserves: tuple[Reserve, ...] = ()


@message
class Exchange:
    """Change a magazine, column by column in this order; each entry by itself succeeds or changes nothing."""

    worker_id: WorkerId
    sequence: int
    """One more than that of the magazine's last exchange."""
    publish_blocks: bytes = b""
    """Packed int32, like all blocks here."""
    publish_keys: bytes = b""
    publish_positions: bytes = b""
    """Packed uint32 of the blocks' places in their chains; empty if they are not known."""
    retract_blocks: bytes = b""
    drop_blocks: bytes = b""
    hold_keys: bytes = b""
    stops_at_miss: bool = False
    """Whether to hold nothing behind the first key that is not on the device."""
    brings: bool = False
    """Whether to bring to the device, for a later exchange, what only a lower tier has."""
    holds_all: bool = False
    take_running: int = 0
    take_new: int = 0
    all_or_nothing: bool = False
    missed_keys: bytes = b""
    """Keys that requests sought, but that nobody asked for because they were surely absent: they count as missed."""


@message
class Inventory:
    """Tell what is in a worker's magazine."""

    worker_id: WorkerId


@message
class CopyDone:
    """A mover finished a batch: every target holds its source's bytes, except those at the failed positions."""

    copy_id: CopyId
    checksums: bytes = b""
    """Packed uint64 of what was written, one for each pair; empty if none were asked for."""
    failed: tuple[int, ...] = ()
    """Positions in the batch whose bytes were not there, or were not what their checksum or label says."""


@message
class CopyFailed:
    """A mover gave a batch up, and writes no more of it."""

    copy_id: CopyId


@message
class CopyLost:
    """A mover did not answer in time; it may still be writing."""

    copy_id: CopyId


@message
class MoverDied:
    """A mover's process is proven dead, so none of its copies writes any more."""

    mover: Mover = Mover.MEMORY


@message
class Probed:
    """The remote store has told what it has, or has not answered in time."""

    probe_id: int
    is_present: bytes = b""
    """A byte for each label of the probe, 1 where the store has it; empty if it has not answered."""


@message
class TierChanged:
    """A lower tier does not work, or works again; while it does not, everything in it is a miss.

    That the host pool does not work means that its mover hangs: nothing is brought from there, and nobody waits for
    blocks to be copied there before they leave the device.
    """

    tier: Tier
    is_on: bool
    is_empty: bool = False
    """Whether the disk store is another one, with nothing of what was in it; Adopt tells what it has instead."""
    is_mover_away: bool = False
    """Whether a store does not work because its mover is not there; nothing is known of the store itself."""
    is_read: bool = True
    """Whether all that the disk store has is known; if not, slots that seem free may have what Adopt is yet to tell."""


@message
class Adopt:
    """Take over what an earlier life left in the disk store: free slots become READY under their labels."""

    slot_ids: bytes
    """Packed int32."""
    labels: bytes
    """`labels.LABEL` each."""
    checksums: bytes
    """Packed uint64."""


@message
class Tick:
    """Let time pass: leases expire, waiting ends."""


@message
class Cancel:
    """Forget a waiting call whose caller has gone."""

    ticket: int


@message
class Drain:
    """Grant no new lease from now on."""

    is_daemon: bool = False
    """Whether the whole daemon is drained, not only this cache."""


@message
class Undrain:
    """End a drain: grant new leases again."""


@message
class Clear:
    """Drop the cached blocks that nobody holds, in all tiers that are known here."""

    tenant_digest: int | None = None
    """Whose blocks; None clears everybody's."""


@message
class Limit:
    """Give tenants new limits, in place of all that they had."""

    tenants: Mapping[int, TenantLimits]
    """By digest."""
    tenant_default: TenantLimits


@message
class Resize:
    """Take blocks of a pool out of use, or back into use, so that `num_blocks` can be granted."""

    tier: Tier
    """DEVICE or HOST."""
    num_blocks: int
    limits: Limit | None = None
    """What tenants may have then, if that depends on the device pool."""


Command = (
    Attach | Detach | WorkerDied | Heartbeat | Reserve | Map | Extend | Commit | Fork | Trim | Evict |
    Reload | Release | Lookup | Explain | Pin | Unpin | Step | Exchange | Inventory | CopyDone | CopyFailed |
    CopyLost | MoverDied | Probed | TierChanged | Adopt | Tick | Cancel | Drain |
    Undrain | Clear | Limit | Resize )  # fmt: skip
"""Everything that the core understands."""


class OfLease(Protocol):
    """Any command of a worker about a lease of its own."""

    @property
    def worker_id(self) -> WorkerId | None:
        """The worker that sends the command."""

    @property
    def lease_id(self) -> LeaseId | None:
        """The lease that the command is about."""
