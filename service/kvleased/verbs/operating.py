"""Own the verbs by which an operator changes a running daemon: drain, clear, resize, and the limits of tenants."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog
from google.protobuf.message import Message

from kvlease.errors import (
    InvalidError,
    StaleRevisionError,
)
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import Registry
from kvleased.calls import checks
from kvleased.calls.draining import draining
from kvleased.calls.idempotency import Answer
from kvleased.config.settings import Settings
from kvleased.config.tenant_settings import TenantSettings, check_minima
from kvleased.core import commands as c
from kvleased.core import effects as e
from kvleased.core.effects import Tier
from kvleased.credentials.derived import tenant_digest, tenant_key
from kvleased.supervision.keeper import Note
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.telemetry.events import Events
from kvleased.verbs.caches import CacheVerbs
from kvleased.verbs.limits import REVISION_MAX
from kvleased.verbs.resizing import Resizer
from kvleased.verbs.runner import Runner, Verb
from kvleased.verbs.tenant_limits import limits_from

_DRAIN: Final = "daemon/drain"
"""The name of the descriptor that is kept while an operator drains the daemon."""
_HOLDERS_NAMED_MAX: Final = 1_024
"""Most leases, and most pins, that an answer names."""
_BYTES_PER_ID: Final = 8
_DEFAULTS: Final = TenantSettings()
_LOG = structlog.get_logger()


class OperatorVerbs:
    """The verbs by which an operator changes a running daemon; workers may call none of them."""

    def __init__(
        self,
        registry: Registry,
        runner: Runner,
        settings: Settings,
        *,
        caches: CacheVerbs,
        keeper: KeeperLink,
        events: Events,
    ) -> None:
        """Take what the verbs work with."""
        self._registry = registry
        self._runner = runner
        self._caches = caches
        self._keeper = keeper
        self._events = events
        self._rules = caches.rules
        self._resizer = Resizer(
            registry,
            runner,
            settings,
            limits_for=lambda entry, blocks: caches.limits_for(entry, caches.rules.tenants, blocks),
            require_room=caches.maker.require_room_to_grow,
        )
        self.root_secret = b""
        """The secret that tenants' digests are derived from; set before the first call."""

    @property
    def table(self) -> Mapping[str, Verb]:
        """The verbs by name."""
        return {
            "drain": self.drain,
            "undrain": self.undrain,
            "clear": self.clear,
            "resize": self.resize,
            "set_tenant": self.set_tenant,
            "get_tenant": self.get_tenant,
        }

    def recover(self, notes: Iterable[Note]) -> None:
        """Go on with a drain of the daemon that an earlier life had begun; call this before caches are brought back."""
        if any(note.name == _DRAIN for note in notes):
            self._registry.is_draining = True

    # Drain

    def drain(self, request: pb.DrainRequest, caller: Caller) -> Answer:
        """Stop new grants in a cache or in the whole daemon; a second call tells how far the drain has come."""
        entries = self._drained(request.cache)
        if request.cache:
            (entry,) = entries
            if not entry.is_draining:
                entry.is_draining = True
                self._caches.note_store(entry)
                self._events.append("cache_drained", entry.name)
                _LOG.info("cache_drained", cache=entry.name, **caller.who)
        elif not self._registry.is_draining:
            self._registry.is_draining = True
            # The mere existence of this note says that the daemon is drained.
            self._keeper.note(_DRAIN, {})
            self._events.append("daemon_drained", "")
            _LOG.info("drain_begun", leases=self._registry.num_leases, **caller.who)
        for entry in entries:
            self._runner.apply(entry, c.Drain(is_daemon=self._registry.is_draining))
        return pb.DrainResponse(
            is_daemon_draining=self._registry.is_draining, caches=map(_progress, entries)
        )

    def undrain(self, request: pb.UndrainRequest, caller: Caller) -> Answer:
        """Grant leases again in a cache or the daemon; a cache drained by itself stays drained until it is named."""
        entries = self._drained(request.cache)
        if request.cache:
            (entry,) = entries
            if entry.is_draining:
                entry.is_draining = False
                self._caches.note_store(entry)
                self._events.append("cache_undrained", entry.name)
                _LOG.info("cache_undrained", cache=entry.name, **caller.who)
        elif self._registry.is_draining:
            self._registry.is_draining = False
            self._keeper.drop(_DRAIN)
            self._events.append("daemon_undrained", "")
            _LOG.info("drain_ended", leases=self._registry.num_leases, **caller.who)
        for entry in entries:
            self._runner.apply(entry, self._of_drains(entry))
        return pb.UndrainResponse(
            is_daemon_draining=self._registry.is_draining, caches=map(_progress, entries)
        )

    def _of_drains(self, entry: CacheEntry) -> c.Drain | c.Undrain:
        """Return the command for a cache whose drains have just ended or changed."""
        if entry.is_draining or self._registry.is_draining:
            return c.Drain(is_daemon=self._registry.is_draining)
        return c.Undrain()

    def _drained(self, cache: str) -> list[CacheEntry]:
        if self._registry.is_stopping:
            message = "the daemon was told to stop and grants nothing until it ends; ask the daemon that replaces it"
            raise draining(message)
        return [self._registry.cache(cache)] if cache else list(self._registry)

    # Clear and resize

    def clear(self, request: pb.ClearRequest, caller: Caller) -> Answer:
        """Drop the cached blocks of one tenant or of all, except those that are held."""
        entry = self._registry.cache(request.cache)
        entry.require_ready()
        checks.tenant(request.tenant)
        tenant = None
        if request.tenant:
            tenant = self._digest_of(entry, request.tenant)
        reply = self._runner.apply(entry, c.Clear(tenant_digest=tenant))
        assert isinstance(reply, e.Cleared), "clear answers Cleared"
        num_dropped = reply.num_device + reply.num_host + reply.num_disk
        self._events.append(
            "cache_cleared", entry.name, num_blocks=num_dropped, tenant=request.tenant
        )
        _LOG.info(
            "cache_cleared",
            cache=entry.name,
            tenant=request.tenant,
            blocks=num_dropped,
            held=reply.num_held,
            **caller.who,
        )
        return pb.ClearResponse(
            num_device=reply.num_device,
            num_host=reply.num_host,
            num_disk=reply.num_disk,
            num_held=reply.num_held,
            lease_ids=reply.lease_ids[: _HOLDERS_NAMED_MAX * _BYTES_PER_ID],
            pin_ids=reply.pin_ids[: _HOLDERS_NAMED_MAX * _BYTES_PER_ID],
            num_copying=reply.num_copying,
            num_in_magazines=reply.num_in_magazines,
            keeps_remote=entry.has_tier(Tier.REMOTE),
        )

    def _digest_of(self, entry: CacheEntry, tenant: str) -> int:
        """Return the digest of a tenant, given by its name, or by its digest as lists write it if they know no name."""
        shown = {
            f"{one.tenant_digest:016x}": one.tenant_digest for one in entry.core.list_tenants()
        }
        return shown.get(tenant) or tenant_digest(tenant_key(self.root_secret, tenant))

    def resize(self, request: pb.ResizeRequest, caller: Caller) -> Answer:
        """Take blocks of a pool out of use and give their memory back, or bring them back into use."""
        entry = self._registry.cache(request.cache)
        entry.require_ready()
        # Shielded: the thread that gives memory back goes on even if the caller leaves, and the lock must stay held
        # so that nobody brings that memory back meanwhile.
        return asyncio.shield(self._resize(entry, request, caller))

    async def _resize(
        self, entry: CacheEntry, request: pb.ResizeRequest, caller: Caller
    ) -> pb.ResizeResponse:
        response = await self._resizer.resize(entry, request)
        num_blocks, tier = response.num_blocks, request.tier
        self._events.append("cache_resized", entry.name, num_blocks=num_blocks, tier=tier)
        _LOG.info("cache_resized", cache=entry.name, tier=tier, num_blocks=num_blocks, **caller.who)
        return response

    # Tenants

    def get_tenant(self, request: pb.GetTenantRequest, _: Caller) -> Answer:
        """Tell the limits of a tenant and their revision."""
        tenant = checks.request_id(checks.tenant(request.tenant), "tenant")
        return self._told(pb.GetTenantResponse, tenant)

    def set_tenant(self, request: pb.SetTenantRequest, caller: Caller) -> Answer:
        """Give a tenant other limits in all caches, or in none; a call with an old revision changes nothing.

        Raises:
            StaleRevisionError: the tenant has limits of this revision, or of a later one.
            KVLeaseError: some cache cannot have these limits.
        """
        tenant = checks.request_id(checks.tenant(request.tenant), "tenant")
        limits = limits_from(request.limits)
        before, revision = self._rules.of(tenant)
        if revision and request.revision == revision and limits == before:
            return self._told(pb.SetTenantResponse, tenant)
        number = _revision_after(tenant, revision, request.revision, limits)
        self._apply_limits(self._rules.with_one(tenant, limits))
        self._rules.set(tenant, limits, number)
        self._rules.keep(self._keeper, tenant)
        self._caches.name_tenants()
        self._events.append("tenant_set", "", tenant=tenant)
        _LOG.info("tenant_set", tenant=tenant, revision=number, **limits.model_dump(), **caller.who)
        return self._told(pb.SetTenantResponse, tenant)

    def _apply_limits(self, tenants: Mapping[str, TenantSettings]) -> None:
        """Apply the limits of tenants to all caches, or to none."""
        try:
            check_minima(tenants)
        except ValueError as error:
            raise InvalidError(str(error), resource="min_percent") from error
        found = [
            (entry, self._caches.limits_for(entry, tenants, entry.core.shape.usable_blocks))
            for entry in self._registry
        ]
        for entry, limits in found:
            entry.core.check_limits(limits)
        for entry, limits in found:
            self._runner.apply(entry, limits)

    def _told(self, response: Callable[..., Message], tenant: str) -> Message:
        limits, revision = self._rules.of(tenant)
        return response(
            tenant=tenant, limits=pb.TenantLimits(**limits.model_dump()), revision=revision
        )


def _revision_after(tenant: str, before: int, wanted: int, limits: TenantSettings) -> int:
    """Return the revision that limits get; after the last one, limits can only be removed, which restarts at 0."""
    checks.count("revision", wanted, 0, REVISION_MAX)
    if wanted == REVISION_MAX and limits == _DEFAULTS:
        return 0
    if wanted > before:
        return wanted
    advice = f"send the limits with revision {before + 1}"
    if before == REVISION_MAX:
        advice = (
            f"remove the limits by sending revision {before} and no limits, after which "
            "revisions start again at 0"
        )
    message = (
        f"the limits of {tenant} have revision {before}, and the call gives {wanted}; read the limits again, and "
        f"{advice}"
    )
    raise StaleRevisionError(
        message, resource="revision", need=min(before + 1, REVISION_MAX), available=wanted
    )


def _progress(entry: CacheEntry) -> pb.DrainedCache:
    census = entry.core.census()
    return pb.DrainedCache(
        cache=entry.name,
        is_draining=entry.core.is_draining,
        num_leases=census.num_leases,
        num_waiting=census.num_waiting,
        num_workers=entry.num_workers,
    )
