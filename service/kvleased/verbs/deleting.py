"""Own the verb that ends a cache: what prevents it, whether its disk store is removed too, and what is left."""

import asyncio
from typing import Final

import structlog

from kvlease.errors import CacheInUseError, UnknownCacheError, WrongStateError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import Registry
from kvleased.caches.tiers import Tiers
from kvleased.calls.idempotency import Answer
from kvleased.core.effects import Tier
from kvleased.counted import are
from kvleased.telemetry.events import Events
from kvleased.verbs.making import Maker

_WORKERS_NAMED_MAX: Final = 8
"""Most workers that a refusal names."""
_LOG = structlog.get_logger()


class Deleter:
    """Ends caches, with their disk stores if that is asked for."""

    def __init__(self, registry: Registry, maker: Maker, tiers: Tiers, events: Events) -> None:
        """Take the objects that it works with."""
        self._registry = registry
        self._maker = maker
        self._tiers = tiers
        self._events = events

    def delete_cache(self, request: pb.DeleteCacheRequest, caller: Caller) -> Answer:
        """Delete a cache that no worker is attached to; with `purge`, remove the file of its disk store first.

        Raises:
            UnknownCacheError: there is no cache of that name.
            CacheInUseError: workers are attached to the cache.
            WrongStateError: the disk store is to be purged, but cannot be; nothing has changed.
        """
        entry = self._registry.cache(request.cache)
        self._require_unused(entry)
        if request.purge and entry.has_tier(Tier.DISK):
            return asyncio.ensure_future(self._purge(entry, caller))
        return self._end(entry, caller, keeps_disk=entry.has_tier(Tier.DISK))

    async def _purge(self, entry: CacheEntry, caller: Caller) -> pb.DeleteCacheResponse:
        """Remove the store before the cache, so that a caller that is cut off in between can call again."""
        if reason := await self._tiers.purge(entry):
            message = (
                f"the disk store of cache {entry.name} cannot be purged: {reason}; call again once that is mended or "
                "over, or delete the cache without a purge and remove the store's file while no daemon runs"
            )
            raise WrongStateError(message, resource="disk", rule="store_off")
        if self._registry.by_pool.get(entry.pool) is not entry:
            raise UnknownCacheError(
                f"cache {entry.name} was deleted in the meantime", resource="cache"
            )
        # If a worker has attached meanwhile, the cache stays, and its store begins anew.
        self._require_unused(entry)
        return self._end(entry, caller, keeps_disk=False)

    def _require_unused(self, entry: CacheEntry) -> None:
        if not entry.num_workers:
            return
        named = [one for one in self._registry.by_id.values() if one.entry is entry]
        ids = ", ".join(str(one.worker_id) for one in named[:_WORKERS_NAMED_MAX])
        ids += ", and others" if len(named) > _WORKERS_NAMED_MAX else ""
        message = (
            f"{are(entry.num_workers, 'worker')} attached to cache {entry.name} ({ids}); "
            "end their processes, or detach those whose death cannot be proven"
        )
        raise CacheInUseError(message, resource="workers", need=0, available=entry.num_workers)

    def _end(
        self, entry: CacheEntry, caller: Caller, *, keeps_disk: bool
    ) -> pb.DeleteCacheResponse:
        num_pins = entry.core.census().num_pins
        self._maker.delete(entry)
        self._registry.memory_shortages.end_pauses()
        self._events.append("cache_deleted", entry.name)
        facts = {"pins": num_pins, "keeps_disk": keeps_disk}
        _LOG.info("cache_deleted", cache=entry.name, **facts, **caller.who)
        return pb.DeleteCacheResponse(
            num_pins=num_pins, keeps_disk=keeps_disk, keeps_remote=entry.has_tier(Tier.REMOTE)
        )
