"""Own what is known of one cache, and of one worker, beside what their core knows of blocks and leases."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvlease.errors import InvalidError, StartingError
from kvlease.ids import WorkerId
from kvlease.plan import CachePlan
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.caches.tallies import Tally
from kvleased.caches.tier_infos import tier_info
from kvleased.calls.idempotency import Replies
from kvleased.core.cache import Cache
from kvleased.core.effects import Tier
from kvleased.credentials.derived import engine_digest, magazine_digest, tenant_digest
from kvleased.memory.regions import TABLES, device_kind
from kvleased.movers.gpu.device_link import GpuRegion
from kvleased.movers.protocol import Status

if TYPE_CHECKING:
    from kvleased.traces.ghosts import Ghosts
    from kvleased.traces.recording import Observer

POPULATING: Final = "populating"
READY: Final = "ready"
_STARTING_RETRY_MS: Final = 200
_LOWER_TIERS: Final = (Tier.HOST, Tier.DISK, Tier.REMOTE)


@dataclass(slots=True, kw_only=True)
class CacheEntry:
    """One registered cache: its plan, its core and its memory."""

    name: str
    pool: int
    """The number by which the mover knows its pools."""
    plan: CachePlan
    options: pb.CacheOptions
    """The options of the registration, with all defaults filled in."""
    core: Cache
    fds: dict[str, int]
    """Descriptors by kind of region: one device region for each rank, host (if any), records, tables, plan."""
    gpu_regions: Mapping[str, GpuRegion] = field(default_factory=dict)
    """Facts about the regions that lie on a GPU, by kind; empty where device pools are CPU memory."""
    tables_read_only_fd: int
    status: str = POPULATING
    bytes_populated: int = 0
    num_workers: int = 0
    is_draining: bool = False
    """Whether this cache was drained, apart from any drain of the whole daemon."""
    bytes_given_back: int = 0
    """Bytes of both pools whose memory was given back because their blocks are parked."""
    stores: dict[Tier, Status] = field(default_factory=dict)
    """Whether the disk and remote store work, as far as the cache uses them; the host pool only once it has failed."""
    is_host_deleted: bool = False
    """Whether a file of its host pool in `host_dir` was found deleted: then the pool does not outlive the container."""
    num_found: Counter[Tier] = field(default_factory=Counter)
    """Slots that were left by an earlier life of the container and whose blocks were found again, by tier."""
    is_scanned: bool = False
    """Whether the whole disk store was scanned, in this life of the control process or an earlier one."""
    disk_file_id: str = ""
    """The id, given by the disk mover, of the file whose slots the core knows; empty as long as there was none."""
    num_populatings: int = 0
    """Lives of the control process in a row that began to populate its memory and did not finish."""
    was_ready: bool = False
    """Whether all of its memory was populated before, in this life of the control process or an earlier one."""
    recovered_at: float | None = None
    """Monotonic seconds at which this life of the control process took it over; None if registered in this one."""
    observer: "Observer | None" = None
    """Notes the cache's requests, for ghosts and traces; None as long as nobody has asked for either."""
    tally: Tally = field(default_factory=Tally)
    """The counts of its calls."""

    @property
    def with_checksums(self) -> bool:
        """Whether a checksum of each block is taken when it leaves the device."""
        return self.options.integrity == "xxh3"

    def has_tier(self, tier: Tier) -> bool:
        """Tell whether the cache has a lower tier."""
        slots = {
            Tier.HOST: self.plan.num_slots,
            Tier.DISK: self.plan.num_disk_slots,
            Tier.REMOTE: self.plan.num_remote_slots,
        }
        return slots[tier] > 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of both pools, which are populated before the cache is ready."""
        return self.plan.device_bytes + self.plan.host_bytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes that the pools take of the memory that this daemon may use; GPU memory does not count."""
        there = self.plan.host_bytes if self.gpu_regions else self.pool_bytes
        return there - self.bytes_given_back

    @property
    def is_ready(self) -> bool:
        """Whether all of its memory is populated."""
        return self.status == READY

    def require_ready(self) -> None:
        """Refuse a call that needs the cache's memory while it is still being populated."""
        if not self.is_ready:
            message = (
                f"cache {self.name} has {self.bytes_populated} of {self.pool_bytes} bytes populated"
            )
            raise StartingError(
                message,
                resource="populated_bytes",
                need=self.pool_bytes,
                available=self.bytes_populated,
                retry_after_ms=_STARTING_RETRY_MS,
            )

    def require_rank(self, rank: int) -> None:
        """Refuse a rank that the cache does not have.

        Raises:
            InvalidError: that is so; the message names the ranks that it has.
        """
        rank_max = len(self.plan.ranks) - 1
        if rank > rank_max:
            message = f"rank is {rank}, but cache {self.name} has ranks 0 to {rank_max}"
            raise InvalidError(
                message, resource="rank", rule="unknown_rank", need=rank, limit=rank_max
            )

    def info(self) -> pb.CacheInfo:
        """Describe the cache."""
        return pb.CacheInfo(
            cache=self.name,
            status=self.status,
            bytes_populated=self.bytes_populated,
            num_workers=self.num_workers,
            plan=self.plan.to_proto(),
            options=self.options,
            tiers=self.tiers(),
            is_draining=self.core.is_draining,
            longest_request_tokens=self.core.longest_request_tokens,
        )

    def regions_of(self, rank: int) -> list[pb.Region]:
        """Describe the regions that a worker of a rank maps, in the order of the descriptors that it gets."""
        gpu = self.gpu_regions.get(device_kind(rank))
        device = pb.Region(
            kind="device",
            region_bytes=self.plan.ranks[rank].device_bytes,
            read_only=False,
            device_uuid=gpu.device_uuid if gpu else "",
            mapped_bytes=gpu.mapped_bytes if gpu else 0,
        )
        tables_bytes = os.fstat(self.fds[TABLES]).st_size
        return [device, pb.Region(kind="tables", region_bytes=tables_bytes, read_only=True)]

    @property
    def ghosts(self) -> "Ghosts | None":
        """Its ghost caches, if it has any."""
        return None if self.observer is None else self.observer.ghosts

    def observed(self, ghosts: "Ghosts | None" = None) -> "Observer":
        """Return the observer of the cache's requests; make it if there is none yet."""
        if self.observer is None:
            from kvleased.traces.recording import Observer  # noqa: PLC0415 -- few caches are observed

            self.observer = Observer(self.core, self.plan.hash_block_tokens, ghosts)
        return self.observer

    def tiers(self) -> list[pb.TierInfo]:
        """Describe the lower tiers that the cache has."""
        return [tier_info(self, tier) for tier in _LOWER_TIERS if self.has_tier(tier)]

    def close(self) -> None:
        """Close the descriptors; mappings end with the arrays over them."""
        for fd in (*self.fds.values(), self.tables_read_only_fd):
            os.close(fd)


@dataclass(slots=True, kw_only=True)
class WorkerEntry:
    """One worker: one process attached to one cache."""

    worker_id: WorkerId
    token: str = field(repr=False)
    entry: CacheEntry
    tenant: str
    tenant_key: bytes = field(repr=False)
    name: str
    rank: int
    pidfd: int | None
    """Becomes readable when the process has ended; None where its end cannot be proven."""
    replies: Replies
    attached_at: float
    """Monotonic seconds at which the process first attached, in this life of the daemon or an earlier one."""
    engine: str = ""
    """The engine that it is a rank of; empty if it calls for all ranks."""
    magazine: str = ""
    """The magazine that it shares with the other processes of its engine; empty if it has none."""
    is_joiner: bool = False
    """Whether it attached with a joiner's token or certificate."""
    is_heard: bool = True
    """Whether it has called since the last check for silent workers."""
    heard_at: float = 0.0
    """Seconds on the loop's clock of the last check that found that it had called; 0 before the first."""
    has_called: bool = False
    """Whether a check found that it had called since an earlier check."""
    process_id: int = 0
    """Its process id as the kernel told it at the first attach; 0 if unknown or in another PID namespace."""

    @property
    def told(self) -> dict[str, object]:
        """The worker, its cache, tenant and process, as fields of a log line."""
        found = {"worker": self.worker_id, "cache": self.entry.name, "tenant": self.tenant}
        return {**found, "worker_pid": self.process_id}

    @property
    def death_proof(self) -> str:
        """How the daemon will learn of its death."""
        return "none" if self.pidfd is None else "pidfd"

    @property
    def tenant_digest(self) -> int:
        """64 bits that name the tenant in the core, never 0."""
        return tenant_digest(self.tenant_key)

    @property
    def engine_digest(self) -> int:
        """64 bits that name the tenant's engine in the core; 0 if the worker calls for all ranks."""
        return engine_digest(self.tenant_key, self.engine)

    @property
    def magazine_digest(self) -> int:
        """64 bits that name the tenant's magazine in the core; 0 if the worker has none."""
        return magazine_digest(self.tenant_key, self.magazine)
