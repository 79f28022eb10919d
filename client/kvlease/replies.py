"""Own what the daemon's answers look like to a caller; the fields are those of the protocol's messages."""

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
    """"ready", "scanning" (what an earlier life left is being looked through), "degraded" (it works, but all its slots
    are retired) or "off" (all in it is a miss)."""
    reason: str
    """Why it is off or degraded; empty otherwise."""
    num_slots: int
    """Slots of the tier; 0 where it does not count them."""
    num_found: int
    """Slots that an earlier life left and that are found again."""


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
    """How it is kept, with nothing left to a default."""
    tiers: tuple[TierInfo, ...] = ()
    """Its lower tiers, those that it has."""
    is_draining: bool = False
    """Whether it grants no new lease, because it or the daemon is being drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """The blocks of one tier by state; the states but `ready_held` add up to `num_blocks`."""

    tier: str
    num_blocks: int
    free: int
    reserved: int
    filling: int
    ready: int
    ready_held: int
    """Of the ready ones, those that something holds."""
    quarantined: int
    scrubbing: int
    bad: int
    parked: int = 0
    """Taken out of use by a resize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GhostStats:
    """What another policy or size would have found."""

    name: str
    """The policy and its size, as POLICY@BLOCKS."""
    num_keys: int
    """Keys that were asked for."""
    num_hits: int
    """Those of them that it would have found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """One cache at one instant."""

    cache: str
    pools: tuple[PoolStats, ...]
    num_leases: int
    num_waiting: int
    num_workers: int
    counters: Mapping[str, int]
    """Since the daemon's start, by name."""
    ghosts: tuple[GhostStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """All caches at one instant."""

    epoch: int
    caches: tuple[CacheStats, ...]
    is_draining: bool = False
    """Whether the daemon as a whole grants nothing new: it is drained, or stops."""
    is_stopping: bool = False
    """Whether the daemon was told to stop: it grants nothing new, and ends with its leases, or after drain_seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker of a cache."""

    worker_id: int
    worker_name: str
    tenant: str
    rank: int
    death_proof: str
    """How the daemon will learn of its death: "pidfd", or "none" where it cannot."""
    num_leases: int
    age_ms: int
    """Since it attached."""
    process_id: int = 0
    """Its process, as the daemon's PID namespace numbers it; 0 where the daemon cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseInfo:
    """One lease of a cache."""

    lease_id: int
    worker_id: int
    request_digest: str
    """The xxh3 of the engine's request id, in hex."""
    phase: str
    num_blocks: int
    """Blocks, or slots while it is in the host pool."""
    num_tokens: int
    age_ms: int | None
    """Since it was granted; None where that was in an earlier life of the daemon."""
    left_ms: int
    """Until it expires unless it is renewed."""
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinInfo:
    """One pin of a cache."""

    pin_id: int
    num_blocks: int
    tenant: str = ""
    """Whose blocks they are; empty where an operator pinned those of several."""
    age_ms: int = 0
    """Since it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingInfo:
    """One call that waits for blocks."""

    call_id: int
    """Grows with every call."""
    worker_id: int
    verb: str
    """"reserve", "extend" or "reload"."""
    position: int
    """Calls that will be served before it."""
    priority: str
    """"low", "normal" or "high", as it is by now: who waits long rises."""
    num_blocks: int
    """Blocks that it needs."""
    available_blocks: int
    """Blocks that it could have now if nobody were before it."""
    reason: str
    """Why it waits, by the rule of a refusal: "position", "blocks", "copies", "limits", or one of leases."""
    age_ms: int
    left_ms: int
    """Until it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantInfo:
    """What one tenant has of a cache, and what it may have."""

    tenant_id: int
    """Its number in this list."""
    tenant: str
    used_blocks: int
    """Blocks that hold its bytes."""
    held_blocks: int
    """Of these, blocks that leases, copies or pins hold."""
    pinned_blocks: int
    min_blocks: int
    """Blocks that nobody else can take from it."""
    max_blocks: int
    """Blocks that it can have at most."""
    pinned_blocks_max: int
    weight: float
    """Its share of what is fought over, against the others'."""
    num_leases: int = 0
    leases_max: int = 0
    """Leases that it can have at once."""
    revision: int = 0
    """Of its limits; 0 where they come from the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MagazineInfo:
    """What one engine holds by block id, outside any lease."""

    magazine_id: int
    """Its place and one; the next magazine there has the same."""
    magazine_digest: str
    """What stands for its name in the daemon."""
    tenant: str
    worker_ids: tuple[int, ...]
    """The processes that share it."""
    private_blocks: int
    """Blocks that it may write."""
    held_blocks: int
    """Findable blocks that it holds, perhaps as others do."""
    num_exchanges: int
    age_ms: int | None
    """Since the last of them; None where there was none in this life of the daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One page of one of a cache's lists, by id; the other lists are empty."""

    num_total: int
    """Entries of the whole list."""
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
    """Grows with every event; a watch can go on after it."""
    kind: str
    cache: str
    worker_id: int
    lease_id: int
    num_blocks: int
    unix_nanoseconds: int
    snapshot: CacheStats | None = None
    """Of a "snapshot": what the cache was just after the event of this sequence number."""
    tenant: str = ""
    """Whose limits were set, or whose blocks were dropped, where that was one tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How much of a prefix is cached."""

    num_device_blocks: int = 0
    num_host_blocks: int = 0
    """Further blocks of the prefix that can be reloaded."""
    num_disk_blocks: int = 0
    """Further ones that can be loaded from the disk store; what the remote store has, only a reserve asks it."""
    hit_tokens: int = 0
    """Tokens of the prefix that all groups can serve."""
    refusal: KVLeaseError | None = None
    """Why nobody knows, with on_doubt="miss"; then all numbers are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A run of blocks of a request's prefix that were not found, and why."""

    first_block: int
    """Index of the first of them in the request's chain of keys."""
    num_blocks: int
    reason: str
    """"never_committed", "evicted", "dropped", "checksum", "tier_off", "other_tenant", "behind_a_miss" or
    "shorter_than_a_block"."""
    tier: str
    """The tier that they left last; empty where there is none."""
    policy: str
    """The policy that chose them; empty where none did."""
    tenant: str
    """The tenant whose request made room; empty where none did."""
    age_ms: int | None
    """Since the last of them left; None where that is not known."""
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
    """A hold on cached blocks; a pin of no blocks needs no unpin."""

    pin_id: int = 0
    num_blocks: int = 0
    refusal: KVLeaseError | None = None
    """Why nothing is held, with on_doubt="miss"; None also where nothing was cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit made findable."""

    num_committed: int = 0
    num_duplicates: int = 0
    """Blocks whose key another block already serves; they stay private to the lease."""
    num_given_back: int = 0
    """Blocks that left the lease because no token to come needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """What left the device pool."""

    num_evicted: int = 0
    num_offloaded: int = 0
    """Blocks whose bytes were copied to the host pool; some of them may still be on the device for others."""
    refusal: KVLeaseError | None = None
    """Why it was not done, with on_doubt="miss"; of a lease the same as its own `refusal`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """What came back to the device pool."""

    num_reloaded: int = 0
    num_tokens: int = 0
    """Tokens from the start whose bytes are there; the rest must be computed again."""
    refusal: KVLeaseError | None = None
    """Why it was not done, with on_doubt="miss"; of a lease the same as its own `refusal`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveSpec:
    """One reserve of a step; the fields are those of `Worker.reserve`."""

    request_id: str
    num_tokens: int
    keys: bytes = b""
    token_ids: bytes = b""
    priority: Priority = "normal"
    retain_seconds: int = 0
    explain: bool = False
    retain_priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumns:
    """The answers to the columns of a step, one entry an operation."""

    codes: NDArray[np.int32]
    """Numbers of errors (`kvlease.errors.BY_NUMBER`), 0 where the operation was done."""
    num_blocks: NDArray[np.int32]
    """Blocks that each operation added; [operations, groups] where there are several groups."""
    block_ids: NDArray[np.int32]
    """The added blocks, one operation after the other."""
    errors: Mapping[int, KVLeaseError] = field(default_factory=dict)
    """Why operations were refused, by index: of the first 64 that were; of the others `codes` alone tells."""
