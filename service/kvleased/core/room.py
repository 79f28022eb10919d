"""Own the search for a prefix and the making of room: what a call could reuse, and where its new blocks come from."""

from collections.abc import Container
from dataclasses import dataclass

from kvlease.ids import CopyId
from kvleased.core.flights import Purpose
from kvleased.core.pool import Ids, Pool
from kvleased.core.state import CacheState, as_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest prefix that a call can reuse, in token order."""

    entries: list[int]
    """A device block, or the complement (~) of a host slot that must be copied first."""
    joined: set[CopyId]
    """Copies in flight that fill some of the blocks already."""

    @property
    def blocks(self) -> Ids:
        """The device blocks of the prefix."""
        return as_ids([entry for entry in self.entries if entry >= 0])

    @property
    def slots(self) -> Ids:
        """The host slots of the prefix."""
        return as_ids([~entry for entry in self.entries if entry < 0])


def match(state: CacheState, keys: list[bytes], tenant: int | None, *, use_host: bool) -> Match:
    """Return the longest prefix of `keys` that the tenant's blocks serve, or anybody's without a tenant.

    Without `use_host` only bytes that are on the device this instant count.
    """
    device, host = state.device, state.host
    entries: list[int] = []
    joined: set[CopyId] = set()
    for key in keys:
        block = device.index.get(key)
        if block is not None and _is_of(device, block, tenant):
            entries.append(block)
            continue
        if not use_host:
            break
        loading = state.loading.get(key)
        if loading is not None and _is_of(device, loading[0], tenant):
            entries.append(loading[0])
            joined.add(loading[1])
            continue
        slot = host.index.get(key)
        if block is not None or slot is None or not _is_of(host, slot, tenant):
            break
        entries.append(~slot)
    return Match(entries=entries, joined=joined)


def _is_of(pool: Pool, block: int, tenant: int | None) -> bool:
    return tenant is None or pool.records.tenant[block] == tenant


def room(
    state: CacheState, count: int, tenant: int, protected: Container[int], *, may_wait: bool
) -> Ids | None:
    """Return `count` free blocks for a tenant, having evicted what was needed; or None when there are none yet.

    A caller that may wait loses nothing by it: cached blocks are written back before they leave.
    For one that may not, they are dropped. Either way None means that whatever can make room has
    been started.
    """
    device = state.device
    found = device.suitable(count, tenant)
    if found is not None:
        return found
    deficit = count - device.num_free
    if deficit > 0:
        if may_wait and count <= device.num_free + _num_coming(state):
            return None
        victims = device.victims(deficit, protected)
        if len(victims) < deficit or (may_wait and write_back(state, victims)):
            return None
        evict_blocks(state, victims)
    found = device.suitable(count, tenant)
    if found is None and not _num_coming(state):
        state.fly(Purpose.SCRUB, as_ids([]), device.unsuitable(count, tenant))
    return found


def num_available(state: CacheState, protected: Ids) -> int:
    """Count the blocks that a call could get if nobody else came: free, evictable and not part of its own prefix."""
    return state.device.num_available - int((state.device.holds[protected] == 0).sum())


def write_back(state: CacheState, victims: list[int]) -> bool:
    """Start copying the victims that have no copy in the host pool; tell whether there is anything to wait for."""
    dirty = [block for block in victims if state.device.key_of(block) not in state.host.index]
    slots = host_slots(state, len(dirty), at_most=True)
    if slots is None or not len(slots):
        return False
    sources = as_ids(dirty[: len(slots)])
    state.fly(Purpose.WRITE_BACK, sources, slots, keyed=slots >= 0)
    return True


def host_slots(
    state: CacheState, count: int, protected: Container[int] = (), *, at_most: bool = False
) -> Ids | None:
    """Return `count` free slots, having dropped the coldest ones for them, or None; or fewer, with `at_most`."""
    host = state.host
    if at_most:
        count = min(count, host.num_available)
    deficit = count - host.num_free
    if deficit > 0:
        victims = host.victims(deficit, protected)
        if len(victims) < deficit:
            return None
        state.counters["host_evictions"] += len(victims)
        state.counters["blocks_dropped"] += sum(
            host.key_of(slot) not in state.device.index for slot in victims
        )
        host.evict(victims)
    return host.suitable(count)


def evict_blocks(state: CacheState, blocks: list[int]) -> None:
    """Evict device blocks that nobody holds."""
    if not blocks:
        return
    state.counters["evictions"] += len(blocks)
    state.counters["blocks_dropped"] += sum(
        state.device.key_of(block) not in state.host.index for block in blocks
    )
    state.device.evict(blocks)
    state.tell("blocks_evicted", num_blocks=len(blocks))


def _num_coming(state: CacheState) -> int:
    coming = (Purpose.WRITE_BACK, Purpose.SCRUB)
    return sum(
        len(flight.sources) or len(flight.targets)
        for flight in state.flights.values()
        if flight.purpose in coming and not flight.is_lost
    )
