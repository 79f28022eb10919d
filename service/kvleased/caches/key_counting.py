"""Own the regions of key counts and their readers: one for each tenant of a cache, made for its first reader.

A region is handed to workers of its tenant alone, so that no tenant learns about another's keys. It ends with its last
reader, and all regions end with this life of the control process; a worker that attaches again gets a new one.
"""

from dataclasses import dataclass
from typing import Final

import structlog

from kvlease.ids import WorkerId
from kvlease.memory.key_counts import num_buckets_for, region_bytes
from kvlease.memory.mapped import KEY_COUNTS
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.caches.entries import CacheEntry, WorkerEntry
from kvleased.core.effects import Tier
from kvleased.memory.key_counts import CountsRegion

BUCKETS_PER_BLOCK: Final = 16
"""Buckets for each block of the device, host and disk tiers: so many that an absent key seldom has a cached one's."""

_LOG = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class _Shared:
    """The key counts of one tenant, and how many workers read them."""

    entry: CacheEntry
    tenant: int
    region: CountsRegion
    num_readers: int = 0


class KeyCounting:
    """The key counts of all caches and tenants, within a limit of bytes."""

    def __init__(self, epoch: int, bytes_max: int) -> None:
        """Start with none."""
        self._epoch = epoch
        self._bytes_max = bytes_max
        self._shared: dict[tuple[int, int], _Shared] = {}
        self._read_by: dict[WorkerId, _Shared] = {}

    def __repr__(self) -> str:
        """Show life: how many regions there are, and readers."""
        return f"<KeyCounting {len(self._shared)} regions, {len(self._read_by)} readers>"

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(one.region.num_bytes for one in self._shared.values())

    def join(self, worker: WorkerEntry) -> list[pb.Region]:
        """Let a worker read its tenant's counts; return a description of their region, if there is one or can be.

        There is none if a remote store may have keys that nobody here knows of, or if there is no room for the region;
        then the worker asks the daemon instead.
        """
        shared = self._read_by.get(worker.worker_id) or self._of(worker.entry, worker.tenant_digest)
        if shared is None:
            return []
        if worker.worker_id not in self._read_by:
            self._read_by[worker.worker_id] = shared
            shared.num_readers += 1
        return [pb.Region(kind=KEY_COUNTS, region_bytes=shared.region.num_bytes, read_only=True)]

    def fds(self, worker_id: WorkerId) -> list[int]:
        """Return the descriptor of the region that a worker reads, if any; this process still owns it."""
        shared = self._read_by.get(worker_id)
        return [] if shared is None else [shared.region.read_only_fd]

    def leave(self, worker_id: WorkerId) -> None:
        """Note that a worker no longer reads; a region ends with its last reader."""
        shared = self._read_by.pop(worker_id, None)
        if shared is None:
            return
        shared.num_readers -= 1
        if not shared.num_readers:
            del self._shared[shared.entry.pool, shared.tenant]
            shared.entry.core.stop_counting(shared.tenant)
            shared.region.close()

    def close(self) -> None:
        """End all regions; their readers ask the daemon from now on."""
        for worker_id in list(self._read_by):
            self.leave(worker_id)

    def _of(self, entry: CacheEntry, tenant: int) -> _Shared | None:
        """Return a tenant's counts; make them if there are none yet. None if there can be none."""
        place = (entry.pool, tenant)
        if place in self._shared:
            return self._shared[place]
        plan = entry.plan
        num_blocks = plan.num_blocks + plan.num_slots + plan.num_disk_slots
        num_buckets = num_buckets_for(num_blocks, BUCKETS_PER_BLOCK)
        room_bytes = self._bytes_max - self.num_bytes
        if entry.has_tier(Tier.REMOTE) or region_bytes(num_buckets) > room_bytes:
            return None
        try:
            region = CountsRegion.made(num_buckets, self._epoch)
        except OSError as error:
            _LOG.warning("key_counts_not_made", cache=entry.name, error=str(error))
            return None
        entry.core.count_keys(tenant, region.counts)
        self._shared[place] = _Shared(entry=entry, tenant=tenant, region=region)
        return self._shared[place]
