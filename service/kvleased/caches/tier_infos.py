"""Own what people are told of the lower tiers of caches: whether each works, why not, and what calls do without."""

from typing import TYPE_CHECKING, Final

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.core.effects import Tier
from kvleased.counted import are
from kvleased.movers.protocol import Status

if TYPE_CHECKING:
    from kvleased.caches.entries import CacheEntry
    from kvleased.caches.registry import Registry

READY: Final = "ready"
SCANNING: Final = "scanning"
DEGRADED: Final = "degraded"
"""The tier works, but all of its slots are retired."""
OFF: Final = "off"

_HOST_WORKS: Final = Status(is_on=True)
"""The status of a host pool of which nothing else was heard."""
_DELETED: Final = (
    "its file in host_dir was deleted: it is used on, but does not outlive the container; to have one that does, "
    "delete the cache and register it again"
)
_NEVER_HEARD_OF: Final = Status(is_on=False, reason="its mover is being started")


def tier_info(entry: "CacheEntry", tier: Tier) -> pb.TierInfo:
    """Describe a lower tier that a cache has."""
    info = pb.TierInfo(tier=tier.value, status=READY, num_found=entry.num_found[tier])
    if tier is Tier.HOST:
        info.num_slots = entry.plan.num_slots
        host = entry.stores.get(tier, _HOST_WORKS)
        is_on = entry.is_ready and host.is_on
        reason = host.reason or "its memory is being populated"
    else:
        # The number of slots of a remote store is not known here.
        info.num_slots = entry.plan.num_disk_slots if tier is Tier.DISK else 0
        store = entry.stores.get(tier, _NEVER_HEARD_OF)
        is_on, reason = store.is_on, store.reason
    if not is_on:
        info.status, info.reason = OFF, reason
    elif tier is Tier.DISK and not entry.is_scanned:
        info.status = SCANNING
    elif tier is not Tier.REMOTE and (num_retired := entry.core.num_retired(tier)):
        info.status = DEGRADED
        info.reason = (
            f"{are(num_retired, 'slot')} retired, and no others are in use: their bytes were wrong or could not be "
            "written; find out what is wrong with the memory or the disk, delete the cache and register it again"
        )
    elif tier is Tier.HOST and entry.is_host_deleted:
        info.reason = _DELETED
    return info


def is_up(tier: pb.TierInfo) -> bool:
    """Tell whether blocks can be found in a tier, or copied to it."""
    return tier.status not in {OFF, DEGRADED}


def restrictions(registry: "Registry") -> dict[str, str]:
    """Return the restrictions under which calls are granted, for people: each with the caches or tiers it holds for."""
    worn_out = [
        f"{tier.tier} of {entry.name}"
        for entry in registry
        for tier in entry.tiers()
        if tier.status == DEGRADED
    ]
    return {
        "drained": ", ".join(entry.name for entry in registry if entry.is_draining),
        "all slots retired": ", ".join(worn_out),
        "memory could not be allocated": ", ".join(registry.memory_shortages.names),
    }
