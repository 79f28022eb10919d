"""Own the verbs on caches: plan, register, get, list, delete, stats; and bringing caches back after a restart."""

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Final

import structlog

from kvlease.errors import CacheInUseError, InvalidError, LayoutMismatchError, NeverFitsError
from kvlease.ids import Epoch, WorkerId
from kvlease.plan import CachePlan
from kvlease.v1 import kvlease_pb2 as pb
from kvleased import checks
from kvleased.callers import Caller
from kvleased.core.cache import Cache
from kvleased.core.ranks import Place
from kvleased.core.shape import CacheShape
from kvleased.events import Events
from kvleased.idempotency import Answer
from kvleased.keeper import Kept
from kvleased.keeper_link import KeeperLink
from kvleased.memory import cpu, regions
from kvleased.memory.limits import memory_limit_bytes
from kvleased.memory.records import lay_records, records_layout, table_layout
from kvleased.movers.link import MoverLink
from kvleased.movers.plans import pool_map
from kvleased.registry import READY, TENANT_DEFAULT, CacheEntry, Registry
from kvleased.settings import Settings
from kvleased.traces.ghosts import Ghost, Ghosts, read_ghosts
from kvleased.verbs import inspecting, plans
from kvleased.verbs.differences import plan_differences
from kvleased.verbs.limits import named, with_tenants
from kvleased.verbs.runner import Verb
from kvleased.verbs.shapes import shape_of

INTEGRITIES: Final = ("xxh3", "none")
_PREFIX: Final = "cache/"
_WORKERS_NAMED_MAX: Final = 8
"""Workers that a refusal names."""
_LOG = structlog.get_logger()


class CacheVerbs:
    """The verbs that an operator, or a worker before it attaches, calls."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        *,
        epoch: Epoch,
        keeper: KeeperLink,
        mover: MoverLink,
        events: Events,
    ) -> None:
        """Take what the verbs work with."""
        self._registry = registry
        self._settings = settings
        self._epoch = epoch
        self._keeper = keeper
        self._mover = mover
        self._events = events
        self._registering = asyncio.Lock()
        self._populating: dict[str, asyncio.Task[None]] = {}
        limit_bytes = memory_limit_bytes()
        self._memory_bytes_max = settings.memory_bytes_max or limit_bytes * 4 // 5
        self.root_secret = b""
        """What tenants' digests are derived from; set before the first call."""
        self._device_bytes_default = settings.device_bytes_default or limit_bytes // 4

    @property
    def table(self) -> Mapping[str, Verb]:
        """The verbs by name."""
        return {
            "plan": self.plan,
            "register_cache": self.register_cache,
            "get_cache": self.get_cache,
            "list_caches": self.list_caches,
            "delete_cache": self.delete_cache,
            "stats": self.stats,
            "inspect": self.inspect,
        }

    def plan(self, request: pb.PlanRequest, _: Caller) -> Answer:
        """Compute a plan."""
        # Explaining a large plan takes longer than the other callers should wait.
        return asyncio.ensure_future(
            asyncio.to_thread(plans.answer, request, self._device_bytes_default)
        )

    def register_cache(self, request: pb.RegisterCacheRequest, _: Caller) -> Answer:
        """Create a cache, or find an equal one."""
        name = checks.cache_name(request.cache)
        integrity = checks.one_of(
            "integrity", request.options.integrity or INTEGRITIES[0], INTEGRITIES
        )
        ghosts = read_ghosts(request.options.ghosts)
        return asyncio.ensure_future(self._register(name, request.inputs, integrity, ghosts))

    def get_cache(self, request: pb.GetCacheRequest, _: Caller) -> Answer:
        """Describe one cache."""
        return pb.GetCacheResponse(info=self._registry.cache(request.cache).info())

    def list_caches(self, _request: pb.ListCachesRequest, _: Caller) -> Answer:
        """Describe all caches."""
        return pb.ListCachesResponse(caches=[entry.info() for entry in self._registry])

    def delete_cache(self, request: pb.DeleteCacheRequest, _: Caller) -> Answer:
        """Free a cache that no worker is attached to."""
        entry = self._registry.cache(request.cache)
        if entry.num_workers:
            named = [one for one in self._registry.by_id.values() if one.entry is entry]
            ids = ", ".join(str(one.worker_id) for one in named[:_WORKERS_NAMED_MAX])
            message = (
                f"{entry.num_workers} workers are attached to cache {entry.name} ({ids}); "
                "end their processes, or detach those whose death cannot be proven"
            )
            raise CacheInUseError(message, resource="workers", need=0, available=entry.num_workers)
        self._drop(entry)
        self._events.append("cache_deleted", entry.name)
        _LOG.info("cache_deleted", cache=entry.name)
        return pb.DeleteCacheResponse()

    def stats(self, request: pb.StatsRequest, caller: Caller) -> Answer:
        """Describe pools, leases and counters."""
        name = request.cache or caller.cache
        if not name and caller.token:
            name = self._registry.cache_of(caller).name
        entries: Iterable[CacheEntry] = [self._registry.cache(name)] if name else self._registry
        return pb.StatsResponse(epoch=self._epoch, caches=[_stats(entry) for entry in entries])

    def inspect(self, request: pb.InspectRequest, caller: Caller) -> Answer:
        """List who uses a cache, or waits for it."""
        return inspecting.inspect(self._registry, request, caller)

    def recover(
        self,
        kept: Iterable[Kept],
        workers: Mapping[str, Mapping[WorkerId, int]],
        places: Mapping[str, Mapping[WorkerId, Place]],
        now: float,
    ) -> None:
        """Bring back every cache whose regions were kept.

        `workers` are the living ones, by cache and tenant digest; `places` what some of them are to their engines.
        """
        names = (TENANT_DEFAULT, *self._settings.tenants)
        self._registry.known_tenants = named(names, self.root_secret)
        found: dict[str, dict[str, Kept]] = {}
        for item in kept:
            if item.name.startswith(_PREFIX):
                _, name, kind = item.name.split("/")
                found.setdefault(name, {})[kind] = item
        for name, items in found.items():
            registration = items.get(regions.PLAN)
            planned = None
            if registration is not None:
                planned = regions.read_plan(registration.fd, registration.metadata["digest"])
            if registration is None or planned is None:
                # Its registration was never answered, or its deletion was under way.
                for item in items.values():
                    self._keeper.drop(item.name)
                    os.close(item.fd)
                continue
            entry = self._make_entry(
                name,
                planned,
                registration.metadata["integrity"],
                {kind: item.fd for kind, item in items.items()},
                recovered=(workers.get(name, {}), now, places.get(name, {})),
            )
            _haunt(entry, _kept_ghosts(registration.metadata.get("ghosts", "")))
            self._populate(entry)

    async def stop(self) -> None:
        """End what runs in the background."""
        for task in self._populating.values():
            task.cancel()
        await asyncio.gather(*self._populating.values(), return_exceptions=True)

    def _shape_of(self, plan: CachePlan) -> CacheShape:
        """Return the numbers that the core of a cache works with, its tenants' limits among them."""
        shape = shape_of(plan, self._settings)
        return with_tenants(shape, self._settings.tenants, self.root_secret)

    async def _register(
        self, name: str, inputs: pb.PlanInputs, integrity: str, ghosts: tuple[Ghost, ...]
    ) -> pb.RegisterCacheResponse:
        _, planned = await asyncio.to_thread(plans.planned, inputs, self._device_bytes_default)
        plans.require_servable(planned)
        async with self._registering:
            entry = self._registry.caches.get(name)
            if entry is not None:
                return _equal_registration(entry, planned, integrity)
            self._registry.require_room_for_cache()
            self._require_memory(planned)
            registration = {"integrity": integrity, "ghosts": _written(ghosts)}
            fds = await self._create_regions(name, planned, registration)
            entry = self._make_entry(name, planned, integrity, fds)
            _haunt(entry, ghosts)
        self._populate(entry)
        self._events.append("cache_registered", name)
        _LOG.info(
            "cache_registered",
            cache=name,
            num_blocks=planned.num_blocks,
            num_slots=planned.num_slots,
            bytes_per_block=planned.bytes_per_block,
        )
        return pb.RegisterCacheResponse(info=entry.info(), created=True)

    def _require_memory(self, planned: CachePlan) -> None:
        need = planned.device_bytes + planned.host_bytes
        used = sum(entry.pool_bytes for entry in self._registry)
        if need > self._memory_bytes_max - used:
            message = (
                f"the cache takes {need} bytes; {used} of the {self._memory_bytes_max} that this daemon may use are "
                "taken; lower device_bytes or host_bytes, delete a cache, or raise memory_bytes_max"
            )
            raise NeverFitsError(
                message,
                resource="memory_bytes",
                need=need,
                available=self._memory_bytes_max - used,
                limit=self._memory_bytes_max,
            )

    async def _create_regions(
        self, name: str, planned: CachePlan, registration: dict[str, str]
    ) -> dict[str, int]:
        packed, digest = regions.packed_plan(planned)
        registration = registration | {"digest": digest}
        fds: dict[str, int] = {}
        try:
            for kind, region_bytes in regions.region_sizes(
                planned, self._shape_of(planned)
            ).items():
                fds[kind] = await self._keeper.create(f"{_PREFIX}{name}/{kind}", region_bytes, {})
            fds[regions.PLAN] = await self._keeper.create(
                f"{_PREFIX}{name}/{regions.PLAN}", len(packed), registration
            )
            regions.write_plan(fds[regions.PLAN], packed)
        except BaseException:
            for kind, fd in fds.items():
                self._keeper.drop(f"{_PREFIX}{name}/{kind}")
                os.close(fd)
            raise
        return fds

    def _make_entry(
        self,
        name: str,
        planned: CachePlan,
        integrity: str,
        fds: dict[str, int],
        *,
        recovered: tuple[Mapping[WorkerId, int], float, Mapping[WorkerId, Place]] | None = None,
    ) -> CacheEntry:
        shape = self._shape_of(planned)
        records = lay_records(
            shape,
            cpu.map_region(fds["records"], records_layout(shape).region_bytes),
            cpu.map_region(fds["tables"], table_layout(shape).region_bytes),
        )
        if recovered is None:
            core = Cache(shape, records, self._epoch)
        else:
            core = Cache.recovered(shape, records, self._epoch, *recovered)
        entry = CacheEntry(
            name=name,
            pool=self._registry.take_pool_number(),
            plan=planned,
            integrity=integrity,
            core=core,
            fds=fds,
            tables_read_only_fd=cpu.reopen_read_only(fds["tables"]),
        )
        self._registry.add_cache(entry)
        return entry

    def _populate(self, entry: CacheEntry) -> None:
        """Make the cache's memory exist, in the background unless it does already."""
        sizes = regions.sizes_to_populate(entry.plan, self._shape_of(entry.plan))
        if all(cpu.is_populated(entry.fds[kind], num_bytes) for kind, num_bytes in sizes.items()):
            self._make_ready(entry)
            return
        task = asyncio.ensure_future(self._populate_slowly(entry, sizes))
        self._populating[entry.name] = task
        task.add_done_callback(lambda _: self._populating.pop(entry.name, None))

    async def _populate_slowly(self, entry: CacheEntry, sizes: Mapping[str, int]) -> None:
        pool_kinds = regions.pool_kinds(entry.plan)
        chunk_bytes = self._settings.populate_chunk_bytes
        pool_bytes, tenth = max(1, entry.pool_bytes), 1
        try:
            for kind, region_bytes in sizes.items():
                chunks = cpu.populate_chunks(entry.fds[kind], region_bytes, chunk_bytes)
                while (done_bytes := await asyncio.to_thread(next, chunks, None)) is not None:
                    entry.bytes_populated += done_bytes if kind in pool_kinds else 0
                    if entry.bytes_populated * 10 >= pool_bytes * tenth:
                        tenth = entry.bytes_populated * 10 // pool_bytes + 1
                        _LOG.info(
                            "populating",
                            cache=entry.name,
                            bytes=entry.bytes_populated,
                            of_bytes=entry.pool_bytes,
                        )
        except OSError as error:
            _LOG.error("populating_failed", cache=entry.name, error=str(error))
            self._drop(entry)
            return
        self._make_ready(entry)

    def _make_ready(self, entry: CacheEntry) -> None:
        fds = [entry.fds[kind] for kind in regions.pool_kinds(entry.plan)]
        self._mover.map(pool_map(entry.pool, entry.plan), fds)
        entry.bytes_populated = entry.pool_bytes
        entry.status = READY
        _LOG.info("cache_ready", cache=entry.name, bytes=entry.pool_bytes)

    def _drop(self, entry: CacheEntry) -> None:
        with contextlib.suppress(KeyError):
            self._populating.pop(entry.name).cancel()
        self._registry.drop_cache(entry)
        self._mover.unmap(entry.pool)
        for kind in sorted(entry.fds, key=lambda kind: kind != regions.PLAN):
            self._keeper.drop(f"{_PREFIX}{entry.name}/{kind}")
        entry.close()


def _equal_registration(
    entry: CacheEntry, planned: CachePlan, integrity: str
) -> pb.RegisterCacheResponse:
    """Describe the cache that exists if the registration is equal.

    Raises:
        LayoutMismatchError: it is not; the message names what differs.
    """
    differing = plan_differences(entry.plan, planned)
    if entry.integrity != integrity:
        differing.append(f"integrity ({entry.integrity}, not {integrity})")
    if differing:
        message = f"cache {entry.name} is registered with another {'; '.join(differing)}"
        raise LayoutMismatchError(message, resource="layout")
    return pb.RegisterCacheResponse(info=entry.info(), created=False)


def _written(ghosts: tuple[Ghost, ...]) -> str:
    return " ".join(ghost.name for ghost in ghosts)


def _kept_ghosts(written: str) -> tuple[Ghost, ...]:
    """Return the ghosts of an earlier life; a version that knew other policies is no reason not to start."""
    try:
        return read_ghosts(written.split())
    except InvalidError as error:
        _LOG.warning("ghosts_forgotten", ghosts=written, error=str(error))
        return ()


def _haunt(entry: CacheEntry, ghosts: tuple[Ghost, ...]) -> None:
    """Give a cache its ghosts."""
    if ghosts:
        shape = entry.core.shape
        blocks_per_key = sum(1 / one.keys_per_block for one in shape.groups if one.keys_per_block)
        entry.observed(Ghosts(ghosts, entry.plan.usable_blocks, blocks_per_key or 1.0))


def _stats(entry: CacheEntry) -> pb.CacheStats:
    census = entry.core.census()
    pools = [("device", entry.plan.usable_blocks, census.device)]
    if entry.plan.num_slots:
        pools.append(("host", entry.plan.num_slots, census.host))
    return pb.CacheStats(
        cache=entry.name,
        pools=[
            pb.PoolStats(tier=tier, num_blocks=num_blocks, **counts)
            for tier, num_blocks, counts in pools
        ],
        num_leases=census.num_leases,
        num_waiting=census.num_waiting,
        num_workers=entry.num_workers,
        counters=census.counters,
        ghosts=[
            pb.GhostStats(name=one.name, num_keys=one.num_keys, num_hits=one.num_hits)
            for one in (entry.ghosts.figures() if entry.ghosts else ())
        ],
    )
