"""Own the verbs on caches (plan, register, get, list, stats), and the return of caches after a restart."""

import asyncio
from collections.abc import Iterable, Mapping
from time import monotonic

import structlog

from kvlease.errors import InvalidError, LayoutMismatchError, NeverFitsError
from kvlease.ids import Epoch, WorkerId
from kvlease.plan import CachePlan
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import TENANT_DEFAULT, Registry
from kvleased.caches.tiers import Apply, Tiers
from kvleased.calls import checks
from kvleased.calls.draining import draining
from kvleased.calls.idempotency import Answer
from kvleased.config.settings import Settings
from kvleased.config.tenant_settings import TenantSettings
from kvleased.core import commands as c
from kvleased.core.cache import Cache
from kvleased.core.effects import Tier
from kvleased.core.ids import IdCount
from kvleased.core.lease.ranks import Place
from kvleased.core.recovery import give_back_retired
from kvleased.core.shape import CacheShape
from kvleased.memory import cpu, regions
from kvleased.memory.records import (
    host_records_layout,
    lay_records,
    magazines_layout,
    records_layout,
    table_layout,
)
from kvleased.memory.shortages import unmapped
from kvleased.supervision.keeper import Kept
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.telemetry.events import Events
from kvleased.verbs import inspecting, plans
from kvleased.verbs.deleting import Deleter
from kvleased.verbs.differences import plan_differences
from kvleased.verbs.figures import stats_of
from kvleased.verbs.limits import Rules, limits_of, named, with_tenants
from kvleased.verbs.making import PREFIX, Maker, Regions, gpu_regions_of, names_of
from kvleased.verbs.options import from_metadata, option_differences, require_tiers, resolved
from kvleased.verbs.resizing import given_back_bytes
from kvleased.verbs.runner import Verb
from kvleased.verbs.shapes import shape_of

_LOG = structlog.get_logger()

Earlier = tuple[Mapping[WorkerId, int], float, Mapping[WorkerId, Place], Mapping[WorkerId, int]]
"""What a recovered core must know beside its records.

By worker id, the tenant digests of the living workers; the time; the workers' places in their engines; and the digests
of their magazines.
"""


class CacheVerbs:
    """The verbs that an operator, or a worker before it attaches, calls."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        *,
        epoch: Epoch,
        keeper: KeeperLink,
        tiers: Tiers,
        events: Events,
    ) -> None:
        """Take what the verbs work with."""
        self._registry = registry
        self.rules = Rules(settings.tenants, settings.max_tenants)
        """The limits of tenants."""
        self._settings = settings
        self._epoch = epoch
        self._id_count = IdCount(epoch)
        self._keeper = keeper
        self._tiers = tiers
        self._events = events
        self._registering = asyncio.Lock()
        self._maker = Maker(registry, settings, keeper=keeper, tiers=tiers, shape_of=self._shape_of)
        self._deleter = Deleter(registry, self._maker, tiers, events)
        self._root_secret = b""

    def take_secret(self, root_secret: bytes) -> None:
        """Take the secret that tenants' digests are derived from, before the first call."""
        self._root_secret = self._maker.root_secret = root_secret

    def note_store(self, entry: CacheEntry) -> None:
        """Have the supervisor keep which file a cache's disk store is, and whether its slots are known."""
        self._maker.note_store(entry)

    @property
    def table(self) -> Mapping[str, Verb]:
        """The verbs by name."""
        return {
            "plan": self.plan,
            "register_cache": self.register_cache,
            "get_cache": self.get_cache,
            "list_caches": self.list_caches,
            "delete_cache": self._deleter.delete_cache,
            "stats": self.stats,
            "inspect": self.inspect,
        }

    def plan(self, request: pb.PlanRequest, _: Caller) -> Answer:
        """Compute a plan."""
        # It takes a thread, as explaining a large plan takes longer than other callers should wait.
        return asyncio.ensure_future(
            asyncio.to_thread(plans.answer, request, self._maker.device_bytes_default)
        )

    def register_cache(self, request: pb.RegisterCacheRequest, _: Caller) -> Answer:
        """Create a cache, or find an equal one."""
        name = checks.cache_name(request.cache)
        return asyncio.ensure_future(self._register(name, request.inputs, request.options))

    def get_cache(self, request: pb.GetCacheRequest, caller: Caller) -> Answer:
        """Describe one cache; a worker may ask only for its own."""
        inspecting.seen_by(self._registry, caller, request.cache)
        return pb.GetCacheResponse(info=self._registry.cache(request.cache).info())

    def list_caches(self, _: pb.ListCachesRequest, caller: Caller) -> Answer:
        """Describe all caches; a worker is told only of its own."""
        own = inspecting.seen_by(self._registry, caller, "")
        infos = [entry.info() for entry in self._registry if own in {"", entry.name}]
        return pb.ListCachesResponse(caches=infos)

    def stats(self, request: pb.StatsRequest, caller: Caller) -> Answer:
        """Describe pools, leases and counters."""
        name = inspecting.seen_by(self._registry, caller, request.cache or caller.cache)
        if name:
            self._registry.cache(name)
        return pb.StatsResponse(
            epoch=self._epoch,
            caches=self.told(name),
            is_draining=self._registry.is_draining or self._registry.is_stopping,
            is_stopping=self._registry.is_stopping,
        )

    def told(self, name: str) -> list[pb.CacheStats]:
        """Describe the cache of this name, if there is one; all caches if the name is empty."""
        return [stats_of(entry) for entry in self._registry if name in {"", entry.name}]

    def inspect(self, request: pb.InspectRequest, caller: Caller) -> Answer:
        """List who uses a cache or waits for it."""
        return inspecting.inspect(self._registry, request, caller)

    def recover(
        self,
        kept: Iterable[Kept],
        workers: Mapping[str, Mapping[WorkerId, int]],
        places: Mapping[str, Mapping[WorkerId, Place]],
        magazines: Mapping[str, Mapping[WorkerId, int]],
        now: float,
        *,
        apply: Apply,
    ) -> None:
        """Bring back every cache whose regions were kept, and log files that belong to no cache.

        By cache and worker id, `workers` has the tenant digests of the living workers, `places` the engines and ranks
        of those that have an engine, and `magazines` the digests of the magazines that they share; `apply` gives a core
        a command, and carries the effects out.
        """
        self.name_tenants()
        found: dict[str, dict[str, Kept]] = {}
        for item in kept:
            if item.name.startswith(PREFIX):
                _, name, kind = item.name.split("/")
                found.setdefault(name, {})[kind] = item
        for name, items in found.items():
            own = workers.get(name, {}), now, places.get(name, {}), magazines.get(name, {})
            self._recover(name, items, own, apply)
        self._maker.tell_unclaimed()

    def _recover(self, name: str, items: dict[str, Kept], earlier: Earlier, apply: Apply) -> None:
        registration = items.get(regions.PLAN)
        planned = None
        if registration is not None:
            planned = regions.read_plan(registration.fd, registration.metadata["digest"])
        fds = {kind: item.fd for kind, item in items.items()}
        if registration is not None and planned is not None:
            options = from_metadata(registration.metadata["options"])
            gpu_regions = gpu_regions_of(items)
            sizes = regions.region_sizes(planned, self._shape_of(planned, options))
            # A descriptor of GPU memory has no length to check, and nobody can cut that memory off.
            if regions.are_whole(
                fds, {kind: sizes[kind] for kind in sizes if kind not in gpu_regions}
            ):
                made = Regions(fds=fds, gpu_regions=gpu_regions, has_found_host=False)
                entry = self._make_entry(name, planned, options, made, earlier=earlier)
                entry.is_scanned = registration.metadata["is_scanned"]
                entry.disk_file_id = registration.metadata["disk_file_id"]
                # A registration that was kept by an earlier build lacks these fields.
                entry.is_draining = registration.metadata.get("is_draining", False)
                entry.num_populatings = registration.metadata.get("num_populatings", 0)
                entry.was_ready = registration.metadata.get("was_ready", False)
                try:
                    self._go_on(entry, apply)
                    self._maker.populate(entry)
                except NeverFitsError:  # a tenant was given too large a minimum meanwhile
                    self._maker.drop(entry)
                return
            _LOG.error("cache_lost", cache=name, reason="a file of its host pool was truncated")
        # The registration was never answered, the deletion was under way, or a file is not whole.
        self._keeper.give_back({item.name: item.fd for item in items.values()})

    def name_tenants(self) -> None:
        """Give the registry the names of tenants with limits, their places for workers, and their revisions."""
        names = named((TENANT_DEFAULT, *self.rules.tenants), self._root_secret)
        self._registry.known_tenants = names
        registry = self._registry
        registry.allowances = registry.allowances.under(self.rules.tenants)
        self._registry.revisions = {one: self.rules.of(name)[1] for one, name in names.items()}

    def limits_for(
        self, entry: CacheEntry, tenants: Mapping[str, TenantSettings], usable_blocks: int
    ) -> c.Limit:
        """Return the limits of tenants in a cache that grants `usable_blocks`.

        Raises:
            NeverFitsError: the minima are more than the pool.
        """
        bytes_per_block = entry.plan.device_bytes_per_block
        return limits_of(tenants, self._root_secret, usable_blocks, bytes_per_block)

    @property
    def maker(self) -> Maker:
        """The maker of caches' memory."""
        return self._maker

    def _go_on(self, entry: CacheEntry, apply: Apply) -> None:
        """Apply the limits of tenants to what a cache grants by now, and go on with its drain."""
        per_block, size = entry.plan.device_bytes_per_block, entry.core.shape.usable_blocks
        # A kill within a resize may leave a size between two that the minima fit, because they are rounded.
        tenants, secret, cuts = self.rules.tenants, self._root_secret, entry.was_ready
        apply(entry, limits_of(tenants, secret, size, per_block, cuts=cuts))
        entry.bytes_given_back = given_back_bytes(entry)
        if entry.is_draining or self._registry.is_draining:
            apply(entry, c.Drain(is_daemon=self._registry.is_draining))

    async def stop(self) -> None:
        """Stop what runs in the background."""
        await self._maker.stop()

    def _shape_of(self, plan: CachePlan, options: pb.CacheOptions) -> CacheShape:
        """Return the numbers that the core of a cache works with, but for the limits of its tenants."""
        return shape_of(plan, self._settings, options)

    def _limited(self, shape: CacheShape, plan: CachePlan) -> CacheShape:
        """Return these numbers with the limits of tenants; raise NeverFitsError if the minima exceed the pool."""
        bytes_per_block = plan.device_bytes_per_block
        return with_tenants(shape, self.rules.tenants, self._root_secret, bytes_per_block)

    async def _register(
        self, name: str, inputs: pb.PlanInputs, asked: pb.CacheOptions
    ) -> pb.RegisterCacheResponse:
        options = resolved(asked)
        _, planned = await asyncio.to_thread(
            plans.planned, inputs, self._maker.device_bytes_default
        )
        plans.require_servable(planned)
        require_tiers(planned, options, self._settings)
        async with self._registering:
            entry = self._registry.caches.get(name)
            if entry is None and self._registry.is_draining:
                message = "the daemon is being drained and accepts no new caches; register with another daemon"
                raise draining(message)
            if entry is not None:
                return _equal_registration(entry, planned, asked)
            self._registry.require_room_for_cache()
            self._registry.memory_shortages.require_none(name, planned)
            pool = "device_blocks" if inputs.device_blocks else "device_bytes"
            try:
                entry, has_found_host = await self._make(name, planned, options, pool)
            finally:
                self._registry.bytes_coming = 0
        if has_found_host:
            entry.num_found[Tier.HOST] = entry.core.census().host["ready"]
        elif entry.has_tier(Tier.HOST):
            self._maker.tell_unclaimed()
        self._maker.populate(entry)
        self._events.append("cache_registered", name)
        _LOG.info(
            "cache_registered",
            cache=name,
            num_blocks=planned.num_blocks,
            num_slots=planned.num_slots,
            bytes_per_block=planned.device_bytes_per_block,
            num_found=entry.num_found[Tier.HOST],
        )
        return pb.RegisterCacheResponse(info=entry.info(), created=True)

    async def _make(
        self, name: str, planned: CachePlan, options: pb.CacheOptions, pool: str
    ) -> tuple[CacheEntry, bool]:
        """Make a cache; return it, and whether its host pool is one that outlived the container."""
        await self._maker.require_room(name, planned, options, pool)
        # Refused here already, before any memory is made.
        self._limited(self._shape_of(planned, options), planned)
        made = await self._maker.create(name, planned, options)
        # No worker can be attached to a host pool that outlived the container.
        earlier: Earlier | None = ({}, 0.0, {}, {}) if made.has_found_host else None
        try:
            entry = self._make_entry(
                name, planned, options, made, earlier=earlier, is_other_container=True
            )
        except (OSError, MemoryError, NeverFitsError) as error:
            # What is kept would make the next life fail here, too.
            self._keeper.give_back(names_of(name, made.fds))
            if isinstance(error, NeverFitsError):
                raise  # Meanwhile a tenant was given a minimum that is more than the pool.
            raise unmapped(error) from error
        return entry, made.has_found_host

    def _make_entry(
        self,
        name: str,
        planned: CachePlan,
        options: pb.CacheOptions,
        made: Regions,
        *,
        earlier: Earlier | None = None,
        is_other_container: bool = False,
    ) -> CacheEntry:
        shape, fds = self._shape_of(planned, options), made.fds
        if earlier is None or is_other_container:
            # In a recovered cache they may fit only what it grants since it was made smaller.
            shape = self._limited(shape, planned)
        host_records_bytes = host_records_layout(shape).region_bytes
        records = lay_records(
            shape,
            cpu.map_region(fds[regions.RECORDS], records_layout(shape).region_bytes),
            cpu.map_region(fds.get(regions.HOST_RECORDS, -1), host_records_bytes),
            cpu.map_region(fds[regions.TABLES], table_layout(shape).region_bytes),
            cpu.map_region(fds[regions.MAGAZINES], magazines_layout(shape).region_bytes),
        )
        if earlier is None:
            core = Cache(shape, records, self._epoch, self._id_count)
        else:
            if is_other_container:
                give_back_retired(records)
            core = Cache.recovered(shape, records, self._epoch, *earlier, id_count=self._id_count)
        entry = CacheEntry(
            name=name,
            pool=self._registry.take_pool_number(),
            plan=planned,
            options=options,
            core=core,
            fds=fds,
            gpu_regions=made.gpu_regions,
            tables_read_only_fd=cpu.reopen_read_only(fds[regions.TABLES]),
            recovered_at=None if earlier is None else monotonic(),
        )
        _haunt(entry)
        self._registry.add_cache(entry)
        self._tiers.introduce(entry)
        return entry


def _equal_registration(
    entry: CacheEntry, planned: CachePlan, asked: pb.CacheOptions
) -> pb.RegisterCacheResponse:
    """Describe the existing cache, if its registration is equal.

    Raises:
        LayoutMismatchError: the registrations differ; the message names what differs.
    """
    differing = plan_differences(entry.plan, planned) + option_differences(entry.options, asked)
    if differing:
        message = (
            f"cache {entry.name} is registered already, with other settings: {'; '.join(differing)}; delete it "
            f"(kvlease delete --cache {entry.name}), or choose another name"
        )
        raise LayoutMismatchError(message, resource="layout")
    return pb.RegisterCacheResponse(info=entry.info(), created=False)


def _haunt(entry: CacheEntry) -> None:
    """Give a cache its ghosts; start without them if another version wrote them with policies unknown here."""
    if not entry.options.ghosts:
        return
    from kvleased.traces.ghosts import Ghosts, read_ghosts  # noqa: PLC0415 -- few caches have any

    try:
        ghosts = read_ghosts(entry.options.ghosts)
    except InvalidError as error:
        _LOG.warning("ghosts_forgotten", cache=entry.name, error=str(error))
        return
    shape = entry.core.shape
    blocks_per_key = sum(1 / one.keys_per_block for one in shape.groups if one.keys_per_block)
    entry.observed(Ghosts(ghosts, entry.plan.usable_blocks, blocks_per_key or 1.0))
