"""Own the records in which a caller gets the daemon's answers; their fields are those of the protocol's messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import KVLeaseError
from kvlease.options import DEFAULTS, CacheOptions
from kvlease.plan import CachePlan

Priority = Literal["low", "normal", "high"]
"""How soon a request is served, and how long its blocks stay cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierInfo:
    """A lower tier of a cache."""

    tier: str
    """"host", "disk" or "remote"."""
    status: str
    """"ready", "scanning" (it is reading what an earlier life left), "degraded" (it works, but all its slots are
    retired) or "off" (every lookup in it is a miss)."""
    reason: str
    """Why it is off or degraded, or that its file was deleted; empty otherwise."""
    num_slots: int
    """Slots of the tier; 0 if it does not count them."""
    num_found: int
    """Slots that an earlier life left and that were found again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """A registered cache."""

    cache: str
    status: str
    """"populating" or "ready"."""
    bytes_populated: int
    num_workers: int
    plan: CachePlan
    options: CacheOptions = DEFAULTS
    """How the cache is kept, with every default filled in."""
    tiers: tuple[TierInfo, ...] = ()
    """The lower tiers that it has."""
    is_draining: bool = False
    """Whether it grants no new lease, because it or the daemon is being drained."""
    longest_request_tokens: int = 0
    """Tokens of the longest request that fits now: those of the plan, or fewer after a resize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """The blocks of one tier by state; all counts except `ready_held` add up to `num_blocks`."""

    tier: str
    num_blocks: int
    free: int
    reserved: int
    filling: int
    ready: int
    ready_held: int
    """Ready blocks that something holds."""
    quarantined: int
    scrubbing: int
    bad: int
    parked: int = 0
    """Blocks that a resize has taken out of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GhostStats:
    """What another policy or size would have found."""

    name: str
    """The policy and its size, as POLICY@BLOCKS."""
    num_keys: int
    """Keys that were asked for."""
    num_hits: int
    """Keys that it would have found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """One cache at one instant."""

    cache: str
    pools: tuple[PoolStats, ...]
    num_leases: int
    num_waiting: int
    num_workers: int
    counters: Mapping[str, int]
    """Counts since the daemon's start, by name."""
    ghosts: tuple[GhostStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """All caches at one instant."""

    epoch: int
    caches: tuple[CacheStats, ...]
    is_draining: bool = False
    """Whether the daemon as a whole grants nothing new, because it is being drained or is stopping."""
    is_stopping: bool = False
    """Whether the daemon is stopping: it grants nothing new, and ends with its last lease or after drain_seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker of a cache."""

    worker_id: int
    worker_name: str
    tenant: str
    rank: int
    death_proof: str
    """How the daemon will learn of the worker's death: "pidfd", or "none" if it cannot."""
    num_leases: int
    age_ms: int
    """Milliseconds since it attached."""
    process_id: int = 0
    """Its process id in the daemon's PID namespace; 0 if the daemon cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseInfo:
    """One lease of a cache."""

    lease_id: int
    worker_id: int
    request_digest: str
    """The xxh3 of the engine's request id, in hex."""
    phase: str
    num_blocks: int
    """Blocks that it has, or slots while it is in the host pool."""
    num_tokens: int
    age_ms: int | None
    """Milliseconds since it was granted; None if that was in an earlier life of the daemon."""
    left_ms: int
    """Milliseconds until it expires unless it is renewed."""
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinInfo:
    """One pin of a cache."""

    pin_id: int
    num_blocks: int
    tenant: str = ""
    """The tenant whose blocks they are; empty if an operator pinned blocks of several tenants."""
    age_ms: int = 0
    """Milliseconds since it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingInfo:
    """One call that waits for blocks."""

    call_id: int
    """The call's number; it grows with every call."""
    worker_id: int
    verb: str
    """"reserve", "extend" or "reload"."""
    position: int
    """Calls that will be served before it."""
    priority: str
    """"low", "normal" or "high" as of now: the priority of a call rises as it waits."""
    num_blocks: int
    """Blocks that it needs."""
    available_blocks: int
    """Blocks that it could have now if no other call were before it."""
    reason: str
    """Why it waits: "position", "blocks", "copies", "limits", or the rule of a refusal about leases."""
    age_ms: int
    left_ms: int
    """Milliseconds until it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantInfo:
    """What one tenant has of a cache, and what it may have."""

    tenant_id: int
    """Its number in this list."""
    tenant: str
    used_blocks: int
    """Blocks that hold its bytes."""
    held_blocks: int
    """Used blocks that leases, copies or pins hold."""
    pinned_blocks: int
    min_blocks: int
    """Blocks that nobody else can take from it."""
    max_blocks: int
    """The most blocks that it can have."""
    pinned_blocks_max: int
    weight: float
    """Its weight, against the other tenants', when tenants compete for blocks."""
    num_leases: int = 0
    leases_max: int = 0
    """The most leases that it can have at once."""
    revision: int = 0
    """The revision of its limits; 0 if they come from the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MagazineInfo:
    """What one engine holds by block id, outside any lease."""

    magazine_id: int
    """One more than the magazine's place; a later magazine in that place has the same id."""
    magazine_digest: str
    """The digest by which the daemon knows its name."""
    tenant: str
    worker_ids: tuple[int, ...]
    """The processes that share it."""
    private_blocks: int
    """Blocks that it may write."""
    held_blocks: int
    """Findable blocks that it holds; others may hold them, too."""
    num_exchanges: int
    age_ms: int | None
    """Milliseconds since its last exchange; None if it made none in this life of the daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One page of one of a cache's lists, ordered by id; the other lists are empty."""

    num_total: int
    """Entries in the whole list."""
    workers: tuple[WorkerInfo, ...] = ()
    leases: tuple[LeaseInfo, ...] = ()
    pins: tuple[PinInfo, ...] = ()
    waiting: tuple[WaitingInfo, ...] = ()
    tenants: tuple[TenantInfo, ...] = ()
    magazines: tuple[MagazineInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in the daemon."""

    sequence: int
    """The event's number, which grows with every event; a later watch can go on after it."""
    kind: str
    cache: str
    worker_id: int
    lease_id: int
    num_blocks: int
    unix_nanoseconds: int
    snapshot: CacheStats | None = None
    """For a "snapshot": the state of the cache just after the event with this sequence number."""
    tenant: str = ""
    """The tenant whose limits were set or whose blocks were dropped, if that was one tenant."""
    tier: str = ""
    """The pool that was resized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How much of a prefix is cached."""

    num_device_blocks: int = 0
    num_host_blocks: int = 0
    """Further blocks of the prefix that can be reloaded."""
    num_disk_blocks: int = 0
    """Further blocks that can be loaded from the disk store; only a reserve asks the remote store."""
    hit_tokens: int = 0
    """Tokens of the prefix that all groups can serve."""
    refusal: KVLeaseError | None = None
    """With on_doubt="miss", why the lookup failed; then all numbers are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A run of blocks of a request's prefix that were not found, and why."""

    first_block: int
    """Index of the first of these blocks in the request's chain of keys."""
    num_blocks: int
    reason: str
    """"never_committed", "evicted", "cleared", "resized", "store_lost", "dropped", "checksum", "tier_off",
    "other_tenant", "behind_a_miss" or "shorter_than_a_block"."""
    tier: str
    """The tier that they left last; empty if they left none."""
    policy: str
    """The policy that chose them for eviction; empty if none did."""
    tenant: str
    """The tenant for whose request they made room; empty if they made room for none."""
    age_ms: int | None
    """Milliseconds since the last of them left; None if that is not known."""
    why: str
    """One sentence with the numbers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where each token of a lease's prefix came from when it was granted."""

    lease_id: int = 0
    num_tokens: int = 0
    """Tokens that the lease was asked to cover."""
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that were found, by tier."""
    misses: tuple[Miss, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A hold on cached blocks; a pin of no blocks has the id 0 and needs no unpin, which says that there was none."""

    pin_id: int = 0
    num_blocks: int = 0
    refusal: KVLeaseError | None = None
    """With on_doubt="miss", why nothing is held; None if nothing was cached, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit made findable."""

    num_committed: int = 0
    num_duplicates: int = 0
    """Blocks whose key another block already serves; they stay private to the lease."""
    num_given_back: int = 0
    """Blocks that left the lease because no later token needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """What left the device pool."""

    num_evicted: int = 0
    num_offloaded: int = 0
    """Blocks whose bytes were copied to the host pool; some of them may stay on the device for others."""
    refusal: KVLeaseError | None = None
    """With on_doubt="miss", why it was not done; if it was done for a lease, the same as the lease's `refusal`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """What came back to the device pool."""

    num_reloaded: int = 0
    num_tokens: int = 0
    """Tokens from the start of the lease whose bytes are on the device; the rest must be computed again. 0 for keys."""
    refusal: KVLeaseError | None = None
    """With on_doubt="miss", why it was not done; if it was done for a lease, the same as the lease's `refusal`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveSpec:
    """One reserve of a step; the fields are those of `Worker.reserve`."""

    request_id: str
    """The engine's name for the request; if it has a live lease, the answer is that lease."""
    num_tokens: int
    """Tokens for the lease to cover, those of a prefix that is found included."""
    keys: bytes = b""
    """Packed 32-byte keys, one for each `hash_block_tokens` of the plan, from the start of the request on."""
    token_ids: bytes = b""
    """Packed int32 token ids in place of `keys`; the daemon then computes the keys."""
    priority: Priority = "normal"
    """How soon the request is served, and how long its committed blocks stay cached."""
    retain_seconds: int = 0
    """Seconds after their last use for which blocks keep the priority; 0: for as long as they are cached."""
    explain: bool = False
    """Whether the lease tells in `misses` why the rest of the prefix was not found."""
    retain_priority: int | None = None
    """How long the blocks stay, in place of `priority`: from 0 (low) to 50 (normal) to 100 (high)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumns:
    """The answers to the columns of a step: one entry for each operation."""

    codes: NDArray[np.int32]
    """0 if the operation was done, else its error's number (`kvlease.errors.BY_NUMBER`)."""
    num_blocks: NDArray[np.int32]
    """Blocks that each operation added; [operations, groups] if there are several groups."""
    block_ids: NDArray[np.int32]
    """The added blocks, one operation after another."""
    errors: Mapping[int, KVLeaseError] = field(default_factory=dict)
    """Why the first 64 refused operations were refused, by index; later ones have only their number in `codes`."""
