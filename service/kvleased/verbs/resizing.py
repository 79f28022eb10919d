"""Own the verb resize: the core parks and unparks blocks, and their memory is given back or brought back here."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import structlog

from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    PoolFullError,
    UnknownCacheError,
    WrongStateError,
)
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.caches import host_watch
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import Registry
from kvleased.calls import checks
from kvleased.config.settings import Settings
from kvleased.core import commands as c
from kvleased.core.effects import Resized, Tier
from kvleased.core.ids import Ids
from kvleased.counted import counted
from kvleased.memory import holes, regions
from kvleased.verbs import replies
from kvleased.verbs.runner import Runner

_TIERS: Final = ("device", "host")
_LOG = structlog.get_logger()

LimitsFor = Callable[[CacheEntry, int], c.Limit]
"""Returns the limits of tenants in a cache that grants this many blocks."""
RequireRoom = Callable[[CacheEntry, int], None]
"""Refuses to bring back this many bytes of a cache if there is no room for them any more."""


class Region(NamedTuple):
    """One region of memory that contains blocks of a pool."""

    fd: int
    num_bytes: int
    pieces: holes.Pieces


class Resizer:
    """Makes pools smaller and larger again, one at a time."""

    def __init__(
        self,
        registry: Registry,
        runner: Runner,
        settings: Settings,
        *,
        limits_for: LimitsFor,
        require_room: RequireRoom,
    ) -> None:
        """Take the objects that it works with."""
        self._registry = registry
        self._runner = runner
        self._settings = settings
        self._limits_for = limits_for
        self._require_room = require_room
        self._resizing = asyncio.Lock()

    async def resize(self, entry: CacheEntry, request: pb.ResizeRequest) -> pb.ResizeResponse:
        """Make a pool grant `num_blocks` of the request, and give back the memory of its other blocks.

        Raises:
            InvalidError: the cache has no such pool.
            NeverFitsError: more blocks are asked for than were registered, or fewer than the minima of tenants.
            PoolFullError: too many blocks are held, or there is no memory for blocks that gave theirs back.
            WrongStateError: the file of the host pool was cut off.
        """
        tier = Tier(checks.one_of("tier", request.tier, _TIERS))
        if tier is Tier.HOST and not entry.has_tier(tier):
            message = f"cache {entry.name} has no host pool"
            raise InvalidError(message, resource="tier")
        if tier is Tier.HOST and host_watch.is_cut_off(entry):
            message = f"the host pool of cache {entry.name} is off: {host_watch.CUT_OFF.reason}"
            raise WrongStateError(message, resource="host", rule="store_off")
        num_blocks = checks.count("num_blocks", request.num_blocks, 0, checks.TOKENS_MAX)
        async with self._resizing:
            return await self._resize(entry, tier, num_blocks)

    async def _resize(self, entry: CacheEntry, tier: Tier, num_blocks: int) -> pb.ResizeResponse:
        # It may have been deleted while an earlier resize was under way.
        self._require_there(entry)
        parked = parked_of(entry, tier)
        count = num_blocks - num_usable(entry, tier)
        num_dropped = 0
        if tier is Tier.DEVICE and count < 0:
            num_dropped = await self._write_back(entry, -count)
        self._require_there(entry)
        try:
            # Bring memory back only if the core has so many parked blocks; otherwise it will refuse anyway.
            if 0 < count <= len(parked):
                await self._bring_back(entry, tier, parked[:count])
                self._require_there(entry)
            # Not before, because tenants may have been given other limits meanwhile.
            limits = self._limits_for(entry, num_blocks) if tier is Tier.DEVICE else None
            command = c.Resize(tier=tier, num_blocks=num_blocks, limits=limits)
            reply = self._runner.apply(entry, command)
        finally:
            # If the core refuses, this also gives back what was just brought back.
            await self._give_back(entry, tier)
        self._require_there(entry)
        assert isinstance(reply, Resized), "resize answers Resized"
        return pb.ResizeResponse(
            num_blocks=reply.num_blocks,
            num_parked=reply.num_parked,
            num_evicted=num_dropped + reply.num_evicted,
            bytes_given_back=sum(_missing(one) for one in regions_of(entry, tier)),
        )

    async def _write_back(self, entry: CacheEntry, count: int) -> int:
        """Copy cached blocks that are about to be dropped to the host pool first, as far as the time allows.

        Returns how many left the device without being copied.
        """
        census = entry.core.census()
        deficit = count - census.device["free"]
        is_worth_it = entry.has_tier(Tier.HOST) and deficit > 0
        if not is_worth_it or deficit > census.device["ready"] - census.device["ready_held"]:
            return 0
        wait_ms = self._settings.copy_wait_ms
        command = c.Evict(num_blocks=deficit, wait_ms=wait_ms, is_for_resize=True)
        # Blocks that could not be copied down are dropped, as they would be without a host pool.
        with contextlib.suppress(KVLeaseError):
            answer = self._runner.run(entry, command, replies.evicted, wait_ms)
            self._runner.settle()
            evicted = await answer if isinstance(answer, asyncio.Future) else answer
            assert isinstance(evicted, pb.EvictResponse), "evict answers so"
            return max(0, evicted.num_evicted - evicted.num_offloaded)
        return 0

    def _require_there(self, entry: CacheEntry) -> None:
        """Refuse to go on with a cache that was deleted meanwhile."""
        if not self._is_there(entry):
            raise UnknownCacheError(f"cache {entry.name} was deleted", resource="cache")

    def _is_there(self, entry: CacheEntry) -> bool:
        return self._registry.by_pool.get(entry.pool) is entry

    # Memory

    async def _bring_back(self, entry: CacheEntry, tier: Tier, blocks: Ids) -> None:
        found = regions_of(entry, tier)
        need = sum(_bytes_under(one, blocks) for one in found)
        self._require_room(entry, need)
        # They count from now on, so that no cache is registered in their room meanwhile.
        entry.bytes_given_back = max(0, entry.bytes_given_back - need)
        try:
            with _outliving(found) as outliving:
                for one in outliving:
                    ranges = holes.pages_of(blocks, one.pieces, _bytes_per_page(one))
                    await _aside(holes.bring_back, one, ranges)
        except OSError as error:
            raise self._no_memory(tier, len(blocks), error) from error

    def _no_memory(self, tier: Tier, num_blocks: int, error: OSError) -> PoolFullError:
        what = "slot" if tier is Tier.HOST else "block"
        place, resource = "the system has no memory", "memory_bytes"
        advice = "free some memory"
        if tier is Tier.HOST and self._settings.host_dir is not None:
            place, resource = f"{self._settings.host_dir} has no room", "host_dir"
            advice = "delete files there that nothing needs, or make it larger"
        lacking = f"{place} for {counted(num_blocks, f'more {what}')}: {error.strerror}"
        message = f"{lacking}; ask for fewer {what}s, or {advice}"
        retry_after_ms = self._settings.retry_after_ms
        return PoolFullError(message, resource=resource, retry_after_ms=retry_after_ms)

    async def _give_back(self, entry: CacheEntry, tier: Tier) -> None:
        """Give back the memory of parked blocks; what the system does not take back is kept."""
        if not self._is_there(entry):
            return
        blocks = parked_of(entry, tier)
        with _outliving(regions_of(entry, tier)) as outliving:
            for one in outliving:
                ranges = holes.pages_of(blocks, one.pieces, _bytes_per_page(one))
                try:
                    await _aside(holes.give_back, one, ranges)
                except OSError as error:
                    _LOG.warning("memory_not_given_back", cache=entry.name, error=str(error))
        if self._is_there(entry):
            entry.bytes_given_back = given_back_bytes(entry)


def num_usable(entry: CacheEntry, tier: Tier) -> int:
    """Return the number of blocks of a tier that are not parked, and so can be granted."""
    most = entry.plan.usable_blocks if tier is Tier.DEVICE else entry.plan.num_slots
    return most - len(parked_of(entry, tier))


def parked_of(entry: CacheEntry, tier: Tier) -> Ids:
    """Return the parked blocks of a tier, ascending."""
    return np.frombuffer(entry.core.parked(tier), np.int32).astype(np.intp)


def given_back_bytes(entry: CacheEntry) -> int:
    """Return the bytes of both pools that were given back because their blocks are parked."""
    tiers = [tier for tier in (Tier.DEVICE, Tier.HOST) if len(parked_of(entry, tier))]
    return sum(_missing(one) for tier in tiers for one in regions_of(entry, tier))


def regions_of(entry: CacheEntry, tier: Tier) -> list[Region]:
    """Return the regions of a tier's blocks whose pages can be given back.

    A cache on a GPU has none: memory on the GPU is one piece, and the GPU would go on to read and write pinned host
    pages even after other pages had taken their place in the region.
    """
    plan = entry.plan
    if entry.gpu_regions:
        return []
    if tier is Tier.HOST:
        slot = (0, plan.bytes_per_slot, plan.bytes_per_slot)
        return [Region(entry.fds[regions.HOST], plan.host_bytes, (slot,))]
    return [
        Region(
            entry.fds[regions.device_kind(rank.rank)],
            rank.device_bytes,
            tuple(
                (one.offset_bytes, one.block_stride_bytes, one.num_bytes) for one in rank.extents
            ),
        )
        for rank in plan.ranks
        if rank.device_bytes
    ]


@contextlib.contextmanager
def _outliving(found: list[Region]) -> Iterator[list[Region]]:
    """Give regions descriptors that nobody else closes: if their cache is deleted, its own may soon be another's."""
    own = [one._replace(fd=os.dup(one.fd)) for one in found]
    try:
        yield own
    finally:
        for one in own:
            os.close(one.fd)


async def _aside(
    work: Callable[[int, holes.Ranges, int], None], region: Region, ranges: holes.Ranges
) -> None:
    """Work on a region in a thread."""
    await asyncio.to_thread(work, region.fd, ranges, region.num_bytes)


def _bytes_under(region: Region, blocks: Ids) -> int:
    """Return the bytes of the whole memory pages under some blocks, at most the bytes that are missing."""
    ranges = holes.pages_of(blocks, region.pieces, _bytes_per_page(region))
    return min(_missing(region), sum(end - start for start, end in ranges))


def _bytes_per_page(region: Region) -> int:
    return os.fstatvfs(region.fd).f_bsize


def _missing(region: Region) -> int:
    return holes.missing_bytes(region.fd, region.num_bytes)
