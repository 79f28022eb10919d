"""Own the bytes that a cache's pools take now; how they are written is in `kvlease.units`."""

from kvlease.replies import CacheInfo, CacheStats


def device_bytes(cache: CacheStats, info: CacheInfo) -> int:
    """Return the bytes of the device pool, without those that a resize gave back."""
    return info.plan.device_bytes - _parked(cache, "device") * info.plan.device_bytes_per_block


def host_bytes(cache: CacheStats, info: CacheInfo) -> int:
    """Return the bytes of the host pool, without those that a resize gave back."""
    return info.plan.host_bytes - _parked(cache, "host") * info.plan.bytes_per_slot


def _parked(cache: CacheStats, tier: str) -> int:
    return sum(pool.parked for pool in cache.pools if pool.tier == tier)
