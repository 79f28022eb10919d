"""Own the making and the end of a cache's memory: the room for it, its regions and files, and their populating."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

import structlog
from blake3 import blake3

from kvlease import disk_file
from kvlease.errors import NeverFitsError, PoolFullError, WrongStateError
from kvlease.plan import CachePlan
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.caches.entries import READY, CacheEntry
from kvleased.caches.registry import Registry
from kvleased.caches.tiers import Tiers
from kvleased.config.settings import Settings
from kvleased.core.effects import Tier
from kvleased.core.shape import CacheShape
from kvleased.memory import cpu, host_files, regions
from kvleased.memory.host_directory import OtherDirectoryError
from kvleased.memory.limits import disk_limit_bytes, memory_limit_bytes
from kvleased.movers.gpu.device_link import GpuRegion
from kvleased.movers.plans import pool_map
from kvleased.supervision.keeper import Kept
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.system.looking_aside import LookingAside
from kvleased.verbs.options import registration
from kvleased.verbs.populating import Populator

PREFIX: Final = "cache/"
"""The beginning of the names of kept regions."""
HOST_RETRY_MS: Final = 2000
"""Milliseconds after which to register again if the files of a host pool cannot be used as they are."""
DISK_SECONDS_MAX: Final = 2.0
"""Seconds that a registration waits for an answer of the disk stores' file system, which may hang."""
_LOG = structlog.get_logger()

ShapeOf = Callable[[CachePlan, pb.CacheOptions], CacheShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """The regions of a cache that is being registered."""

    fds: dict[str, int]
    gpu_regions: dict[str, GpuRegion]
    has_found_host: bool
    """Whether the host pool is one that an earlier life of the container left."""


class Maker:
    """Makes, populates and gives back the memory of caches."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        *,
        keeper: KeeperLink,
        tiers: Tiers,
        shape_of: ShapeOf,
    ) -> None:
        """Take the objects that it works with."""
        self._registry = registry
        self._settings = settings
        self._keeper = keeper
        self._tiers = tiers
        self._shape_of = shape_of
        self._populator = Populator(
            settings.populate_chunk_bytes,
            registry.memory_shortages,
            begin=self._begin,
            make_ready=self._make_ready,
            give_up=self._give_up,
        )
        self._disk_looking = LookingAside(self._disk_bytes_most, DISK_SECONDS_MAX)
        limit_bytes = memory_limit_bytes()
        self._memory_bytes_max = settings.memory_bytes_max or limit_bytes * 4 // 5
        self.device_bytes_default = settings.device_bytes_default or (
            min(limit_bytes, settings.memory_bytes_max or limit_bytes) // 4
        )
        self.end_workers: Callable[[CacheEntry], None] = lambda _: None
        """Ends the workers of a cache that is given up."""
        self.root_secret = b""
        """Makes the names of files differ from those of other daemons; set before the first call."""

    # Room

    async def require_room(
        self, name: str, planned: CachePlan, options: pb.CacheOptions, pool: str
    ) -> None:
        """Refuse a cache for which there is no memory or no disk; `pool` is the input that gave its pool's size.

        Its room counts as taken from now on, in `bytes_coming`, which is the caller's to end.

        Files that an earlier life left of the same cache do not count: the cache will use them.

        Raises:
            NeverFitsError: there is too little; it says what is needed, what is left, and the limit.
            PoolFullError: the file system of the disk stores does not say how large it is.
        """
        need = planned.host_bytes + (0 if self._settings.is_on_gpu else planned.device_bytes)
        used = self._registry.bytes_in_use
        left_behind = self._unclaimed_bytes(name, planned, options)
        available = self._memory_bytes_max - used - left_behind
        if need > available:
            message = (
                f"the cache needs {need} bytes, and {used} of the {self._memory_bytes_max} that this daemon may use "
                f"are taken; {self._told_files(left_behind)}lower {pool} or host_bytes, delete a cache, or raise "
                "memory_bytes_max"
            )
            raise NeverFitsError(
                message,
                resource="memory_bytes",
                need=need,
                available=max(0, available),
                limit=self._memory_bytes_max,
            )
        self._registry.bytes_coming = need
        if planned.num_disk_slots:
            await self._require_disk(planned)

    def require_room_to_grow(self, entry: CacheEntry, need: int) -> None:
        """Refuse to bring back memory of a cache that another cache has taken meanwhile.

        Raises:
            PoolFullError: there is too little; it says what is needed, what is left, and the limit.
        """
        available = self._memory_bytes_max - self._registry.bytes_in_use
        if need > available:
            message = (
                f"{need} bytes of cache {entry.name} were given back, but only {max(0, available)} of the "
                f"{self._memory_bytes_max} that this daemon may use are left; delete or shrink another cache"
            )
            raise PoolFullError(
                message,
                resource="memory_bytes",
                need=need,
                available=max(0, available),
                limit=self._memory_bytes_max,
            )

    async def _require_disk(self, planned: CachePlan) -> None:
        limit = self._settings.disk_bytes_max or await self._disk_limit()
        need, used = disk_bytes(planned), sum(disk_bytes(entry.plan) for entry in self._registry)
        if need > limit - used:
            message = (
                f"the cache's disk store needs {need} bytes, and {used} of the {limit} that this daemon may use in "
                "disk_dir are taken; lower disk_bytes, delete a cache, or raise disk_bytes_max"
            )
            raise NeverFitsError(
                message,
                resource="disk_bytes",
                need=need,
                available=max(0, limit - used),
                limit=limit,
            )

    async def _disk_limit(self) -> int:
        """Return the bytes that all disk stores may take if no setting says so."""
        try:
            return await self._disk_looking.answer()
        except TimeoutError:
            why = f"it has not answered for {DISK_SECONDS_MAX:g} s"
        except OSError as error:
            why = error.strerror or type(error).__name__
        message = (
            f"the file system of disk_dir, {self._settings.disk_dir}, does not report its size: {why}; repair it, "
            "start the daemon with a disk_bytes_max, or register without disk_bytes"
        )
        raise PoolFullError(
            message,
            resource="disk_dir",
            retry_after_ms=int(DISK_SECONDS_MAX * 1000),
            remedies=("disk_bytes=0",),
        ) from None

    def _disk_bytes_most(self) -> int:
        where = self._keeper.disk_directory_fd or self._settings.disk_dir
        assert where is not None, "checked before"
        return disk_limit_bytes(where)  # the path may lead elsewhere by now

    def _unclaimed_bytes(self, name: str, planned: CachePlan, options: pb.CacheOptions) -> int:
        """Return the bytes of files of unregistered caches in host_dir; 0 if the plan puts no host pool there."""
        directory = self._settings.host_dir
        if directory is None or not planned.host_bytes:
            return 0
        own = self._identity(Tier.HOST, name, planned, options)
        # A directory that cannot be read is refused, with its reason, when the host pool's files are opened.
        with contextlib.suppress(OSError):
            return sum(host_files.unclaimed(directory, [*self._identities(), own]).values())
        return 0

    def tell_unclaimed(self) -> None:
        """Log the files of host pools that belong to no registered cache, perhaps to one that had another size."""
        if self._settings.host_dir is not None:
            with contextlib.suppress(OSError):
                host_files.tell_unclaimed(self._settings.host_dir, self._identities())

    def _identities(self) -> list[bytes]:
        return [self._identity_of(entry, Tier.HOST) for entry in self._registry]

    def _told_files(self, num_bytes: int) -> str:
        if not num_bytes or self._settings.host_dir is None:
            return ""
        return (
            f"files in {self._settings.host_dir} of caches that are not registered use {num_bytes} more: register "
            f"those caches, or delete the files; {host_files.told_aside(self._settings.host_dir)}"
        )

    # Regions

    async def create(self, name: str, planned: CachePlan, options: pb.CacheOptions) -> Regions:
        """Make the regions of a cache, or find those that outlived the container; have the supervisor keep them all.

        Raises:
            PoolFullError: the memory cannot be had.
            WrongStateError: the files of the host pool or their directory are not this user's alone.
        """
        packed, digest = regions.packed_plan(planned)
        fds: dict[str, int] = {}
        gpu_regions: dict[str, GpuRegion] = {}
        sizes = regions.region_sizes(planned, self._shape_of(planned, options))
        has_found_host: bool | None = None  # unknown, so that files which may hold blocks stay
        try:
            if self._settings.host_dir is not None and planned.host_bytes:
                has_found_host = self._open_host(fds, name, planned, options)
            for kind, region_bytes in sizes.items():
                if self._settings.is_on_gpu and regions.is_device(kind) and region_bytes:
                    made = await self._tiers.allocate(region_bytes)
                    fds[kind], gpu_regions[kind] = made.fd, made.region
                    self._keeper.keep(f"{PREFIX}{name}/{kind}", made.fd, asdict(made.region))
                elif kind not in fds:
                    fds[kind] = await self._keeper.create(
                        f"{PREFIX}{name}/{kind}", region_bytes, {}
                    )
            fds[regions.PLAN] = await self._keeper.create(
                f"{PREFIX}{name}/{regions.PLAN}", len(packed), registration(digest, options)
            )
            regions.write_plan(fds[regions.PLAN], packed)
        except BaseException:
            self._keeper.give_back(names_of(name, fds))
            if has_found_host is False:
                self._delete_files(name, self._identity(Tier.HOST, name, planned, options))
            raise
        return Regions(fds=fds, gpu_regions=gpu_regions, has_found_host=bool(has_found_host))

    def _open_host(
        self, fds: dict[str, int], name: str, planned: CachePlan, options: pb.CacheOptions
    ) -> bool:
        """Open the files of a host pool, have the supervisor keep them, and tell whether they existed before."""
        directory, started_fd = self._settings.host_dir, self._keeper.host_directory_fd
        assert directory is not None, "asked before"
        identity = self._identity(Tier.HOST, name, planned, options)
        sizes = regions.host_sizes(planned, self._shape_of(planned, options))
        try:
            files = host_files.open_files(directory, identity, sizes, started_fd)
        except OSError as error:
            is_there = isinstance(error, host_files.UnusableError)
            is_forbidden = isinstance(error, host_files.ForbiddenError | OtherDirectoryError)
            raise (WrongStateError if is_forbidden else PoolFullError)(
                f"the host pool's files cannot be {'used' if is_there else 'made'} in {directory}: {error.strerror}",
                resource="host_dir",
                need=getattr(error, "need_bytes", None),
                available=getattr(error, "free_bytes", None),
                retry_after_ms=HOST_RETRY_MS if is_there and not is_forbidden else None,
            ) from error
        fds[regions.HOST_RECORDS], fds[regions.HOST] = files.records_fd, files.slots_fd
        for kind in (regions.HOST_RECORDS, regions.HOST):
            self._keeper.keep(f"{PREFIX}{name}/{kind}", fds[kind], {})
        return files.is_found

    def note_store(self, entry: CacheEntry) -> None:
        """Have the supervisor keep for the next life how far a cache is: its disk file, scan, drain, and populating."""
        _, digest = regions.packed_plan(entry.plan)
        kept = registration(digest, entry.options) | {
            "is_scanned": entry.is_scanned,
            "disk_file_id": entry.disk_file_id,
            "is_draining": entry.is_draining,
            "num_populatings": entry.num_populatings,
            "was_ready": entry.was_ready,
        }
        self._keeper.keep(f"{PREFIX}{entry.name}/{regions.PLAN}", entry.fds[regions.PLAN], kept)

    def _identity_of(self, entry: CacheEntry, tier: Tier) -> bytes:
        return self._identity(tier, entry.name, entry.plan, entry.options)

    def _identity(
        self, tier: Tier, name: str, planned: CachePlan, options: pb.CacheOptions
    ) -> bytes:
        """Return 32 bytes that name a cache's files in a tier; another meaning of the bytes, or secret, has others."""
        num_slots = planned.num_slots if tier is Tier.HOST else planned.num_disk_slots
        facts = (
            tier.value,
            name,
            planned.layout_fingerprint,
            num_slots,
            planned.bytes_per_slot,
            options.integrity,
        )
        text = "\0".join(map(str, facts)).encode()
        return blake3(b"kvlease store 1\0" + text, key=self.root_secret).digest()

    # Life

    def populate(self, entry: CacheEntry) -> None:
        """Populate the cache's memory, in the background unless it is populated already."""
        sizes = regions.sizes_to_populate(entry.plan, self._shape_of(entry.plan, entry.options))
        # Memory on a GPU exists as soon as it is allocated.
        for kind in entry.gpu_regions:
            entry.bytes_populated += sizes.pop(kind)
        # If a pool was made smaller, the memory that it gave back is not populated again.
        if entry.bytes_given_back or all(
            cpu.is_populated(entry.fds[kind], num_bytes) for kind, num_bytes in sizes.items()
        ):
            self._make_ready(entry)
            return
        if self._populator.gives_up(entry, sizes):
            return
        self._populator.start(entry, sizes)

    def _begin(self, entry: CacheEntry) -> None:
        """Have the supervisor keep that populating has begun, for the next life if this one ends amid it."""
        entry.num_populatings += 1
        self.note_store(entry)

    def _give_up(self, entry: CacheEntry) -> None:
        """Give back the memory of a cache that cannot have all of it."""
        self.end_workers(entry)
        # If no blocks were found in the host pool's files, delete them: they take memory that the next try needs.
        has_blocks = entry.core.census().host["ready"]
        (self.drop if has_blocks else self.delete)(entry)

    def _make_ready(self, entry: CacheEntry) -> None:
        fds = [entry.fds[kind] for kind in regions.pool_kinds(entry.plan)]
        identity = self._identity_of(entry, Tier.DISK)
        message = pool_map(
            entry.pool,
            entry.plan,
            store_id=identity.hex(),
            file_id=entry.disk_file_id if entry.is_scanned else "",
        )
        self._tiers.map(entry, message, fds)
        entry.bytes_populated = entry.pool_bytes
        entry.status = READY
        if entry.num_populatings or not entry.was_ready:
            entry.num_populatings, entry.was_ready = 0, True
            self.note_store(entry)
        self._tiers.introduce(entry)
        self._registry.memory_shortages.forget(entry.name)
        _LOG.info("cache_ready", cache=entry.name, bytes=entry.pool_bytes)

    def delete(self, entry: CacheEntry) -> None:
        """Give back the memory of a cache, and delete its files."""
        self.drop(entry)
        if entry.has_tier(Tier.HOST):
            self._delete_files(entry.name, self._identity_of(entry, Tier.HOST))

    def _delete_files(self, name: str, identity: bytes) -> None:
        if self._settings.host_dir is not None:
            try:
                host_files.delete_files(self._settings.host_dir, identity)
            except OSError as error:
                _LOG.warning("host_files_not_deleted", cache=name, error=str(error))

    def drop(self, entry: CacheEntry) -> None:
        """Give back the memory of a cache; its files stay for another registration."""
        self._populator.cancel(entry)
        self._registry.drop_cache(entry)
        self._tiers.unmap(entry)
        for kind in sorted(entry.fds, key=lambda kind: kind != regions.PLAN):
            self._keeper.drop(f"{PREFIX}{entry.name}/{kind}")
        entry.close()

    async def stop(self) -> None:
        """End what runs in the background."""
        await self._populator.stop()


def names_of(cache: str, fds: Mapping[str, int]) -> dict[str, int]:
    """Return the descriptors of a cache's regions by the names that the supervisor knows them by."""
    return {f"{PREFIX}{cache}/{kind}": fd for kind, fd in fds.items()}


def gpu_regions_of(kept: Mapping[str, Kept]) -> dict[str, GpuRegion]:
    """Return the facts about those regions of a cache that lie on a GPU, by kind."""
    return {
        kind: GpuRegion(**item.metadata)
        for kind, item in kept.items()
        if regions.is_device(kind) and item.metadata
    }


def disk_bytes(plan: CachePlan) -> int:
    """Return the bytes of the file of a cache's disk store; 0 if it has none."""
    if not plan.num_disk_slots:
        return 0
    return disk_file.file_bytes(plan.num_disk_slots, plan.bytes_per_slot)
