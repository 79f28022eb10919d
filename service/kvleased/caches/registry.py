"""Own the caches and workers, by each of their names and ids; what happens to their blocks is the core's business."""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvlease.errors import (
    BusyError,
    InvalidError,
    StartingError,
    UnknownCacheError,
    UnknownWorkerError,
)
from kvlease.ids import CACHE_CHARACTERS_MAX, EPOCH_SHIFT, WorkerId
from kvlease.plan import CachePlan
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.tallies import Tally
from kvleased.caches.tier_infos import tier_info
from kvleased.caches.worker_allowances import WorkerAllowances
from kvleased.calls.idempotency import Replies
from kvleased.core.cache import Cache
from kvleased.core.effects import Tier
from kvleased.credentials.derived import engine_digest, magazine_digest, tenant_digest
from kvleased.memory.regions import TABLES, device_kind
from kvleased.memory.shortages import MemoryShortages
from kvleased.movers.gpu.device_link import GpuRegion
from kvleased.movers.protocol import Status

if TYPE_CHECKING:
    from kvleased.traces.ghosts import Ghosts
    from kvleased.traces.recording import Observer

POPULATING: Final = "populating"
READY: Final = "ready"
TENANT_DEFAULT: Final = "default"
_STARTING_RETRY_MS: Final = 200
_NAMES_MAX: Final = 8
"""Names in a message."""
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


class Registry:
    """All caches and workers."""

    def __init__(self, epoch: int, *, max_caches: int, max_workers: int) -> None:
        """Start empty; ids of this life start above those of all earlier ones."""
        self.caches: dict[str, CacheEntry] = {}
        self.by_pool: dict[int, CacheEntry] = {}
        self.by_token: dict[str, WorkerEntry] = {}
        self.by_id: dict[WorkerId, WorkerEntry] = {}
        self.known_tenants: dict[int, str] = {}
        """The names of the default tenant and of those that have settings, by digest."""
        self.allowances = WorkerAllowances({}, max_workers)
        """How many workers there may be, in all and of each tenant."""
        self.revisions: dict[int, int] = {}
        """The revisions of the tenants' limits that calls have set, by tenant digest."""
        self.memory_shortages = MemoryShortages()
        """The caches whose memory could not be had."""
        self.bytes_coming = 0
        """Bytes of the pools of a cache that is being made, so that no other takes their room."""
        self.is_draining = False
        """Whether an operator has drained the daemon with all of its caches."""
        self.is_stopping = False
        """Whether the daemon was told to stop."""
        self.on_drop: list[Callable[[CacheEntry, UnknownCacheError], None]] = []
        """Called with a cache that was just forgotten, to end with that error what goes on in it."""
        self._max_caches = max_caches
        self._next_worker_id = (epoch << EPOCH_SHIFT) + 1
        self._next_pool = 1

    def __repr__(self) -> str:
        """Show life: how many there are."""
        return f"<Registry {len(self.caches)} caches, {len(self.by_id)} workers>"

    def __iter__(self) -> Iterator[CacheEntry]:
        """Iterate over the caches by name."""
        return iter([self.caches[name] for name in sorted(self.caches)])

    @property
    def bytes_in_use(self) -> int:
        """Bytes that the pools of all caches take of the memory that this daemon may use."""
        return self.bytes_coming + sum(entry.bytes_in_use for entry in self)

    @property
    def num_leases(self) -> int:
        """Leases of all caches."""
        return sum(entry.core.census().num_leases for entry in self)

    def cache(self, name: str) -> CacheEntry:
        """Return the cache of a name.

        Raises:
            UnknownCacheError: there is none.
        """
        entry = self.caches.get(name)
        if entry is None:
            if len(name) > CACHE_CHARACTERS_MAX:
                raise UnknownCacheError.of_long_name(name, CACHE_CHARACTERS_MAX)
            why = self.memory_shortages.told(name)
            todo = "register it first" if name else "say which one is meant"
            message = f"there is no cache {name[:63]!r}; {why or todo}"
            raise UnknownCacheError(message, resource="cache")
        return entry

    def worker(self, token: str) -> WorkerEntry:
        """Return the worker of a token.

        Raises:
            UnknownWorkerError: there is none; the token is not repeated.
        """
        worker = self.by_token.get(token)
        if worker is None:
            raise UnknownWorkerError(resource="token")
        worker.is_heard = True
        return worker

    def cache_of(self, caller: Caller) -> CacheEntry:
        """Return the cache that a call is about: the worker's own, else the one that is named, else the only one.

        Raises:
            InvalidError: there are several caches, and the caller names none.
            UnknownCacheError: there is no such cache, or none at all.
        """
        if caller.token:
            return self.worker(caller.token).entry
        if caller.cache:
            return self.cache(caller.cache)
        if len(self.caches) > 1:
            message = f"no cache is named; name one of {', '.join(sorted(self.caches))}"
            raise InvalidError(message, resource="cache")
        if not self.caches:
            message = "there is no cache yet; register one first"
            raise UnknownCacheError(message, resource="cache")
        return next(iter(self.caches.values()))

    def tenant_names(self) -> dict[int, str]:
        """Return the names of the default tenant and of those that have settings or a worker, by digest."""
        attached = {one.tenant_digest: one.tenant for one in self.by_id.values()}
        return self.known_tenants | attached

    def take_pool_number(self) -> int:
        """Return a number for a cache's pools that this life has not given before."""
        self._next_pool += 1
        return self._next_pool - 1

    def require_room_for_cache(self) -> None:
        """Refuse one cache too many."""
        if len(self.caches) >= self._max_caches:
            idle = [name for name, entry in self.caches.items() if not entry.num_workers]
            message = (
                f"there are {len(self.caches)} caches already, as many as max_caches allows; raise it, or delete a "
                f"cache (kvlease delete NAME); without workers now: {', '.join(idle[:_NAMES_MAX]) or 'none'}"
            )
            raise BusyError(message, resource="caches", need=1, available=0, limit=self._max_caches)

    def add_cache(self, entry: CacheEntry) -> None:
        """Make a cache known."""
        assert entry.name not in self.caches, "cache known already"
        self.caches[entry.name] = entry
        self.by_pool[entry.pool] = entry

    def drop_cache(self, entry: CacheEntry) -> None:
        """Forget a cache, and end what goes on in it."""
        del self.caches[entry.name]
        del self.by_pool[entry.pool]
        error = UnknownCacheError(f"cache {entry.name} was deleted", resource="cache")
        for end in self.on_drop:
            end(entry, error)

    def require_another(self, tenant: str, *, is_joiner: bool) -> None:
        """Refuse one worker too many.

        Raises:
            BusyError: there are as many workers as are allowed, or the last places are kept for others.
        """
        workers = self.by_id.values()
        num_joiners = sum(one.is_joiner for one in workers) if is_joiner else None
        self.allowances.require_one(tenant, Counter(one.tenant for one in workers), num_joiners)

    def next_worker_id(self) -> WorkerId:
        """Return an id that no worker ever had."""
        self._next_worker_id += 1
        return WorkerId(self._next_worker_id - 1)

    def add_worker(self, worker: WorkerEntry) -> None:
        """Make a worker known."""
        self.by_id[worker.worker_id] = worker
        self.by_token[worker.token] = worker
        worker.entry.num_workers += 1

    def drop_worker(self, worker: WorkerEntry) -> None:
        """Forget a worker and close its pidfd."""
        del self.by_id[worker.worker_id]
        del self.by_token[worker.token]
        worker.entry.num_workers -= 1
        if worker.pidfd is not None:
            os.close(worker.pidfd)


def new_token() -> str:
    """Return a bearer token: 128 random bits in hex."""
    return secrets.token_hex(16)
