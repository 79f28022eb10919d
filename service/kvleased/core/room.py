"""Own the search for a prefix and the making of room: what a call could reuse, and where its new blocks come from."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvlease.errors import InvalidError
from kvlease.ids import BYTES_PER_KEY, CopyId
from kvleased.core.flights import Purpose
from kvleased.core.pool import Ids
from kvleased.core.state import CacheState, as_ids


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix that a call can reuse."""

    entries: Ids
    """In token order: a device block, or the complement (~) of a host slot to be copied first."""
    blocks: Ids
    """The device blocks among the entries."""
    slots: Ids
    """The host slots among the entries."""
    joined: set[CopyId]
    """Copies in flight that fill some of the blocks already."""


NOTHING: Final = Match(as_ids([]), as_ids([]), as_ids([]), set())


def match(state: CacheState, keys: bytes, tenant: int | None, *, use_host: bool) -> Match:
    """Return the longest prefix of packed `keys` that a tenant's blocks serve, or anybody's without a tenant.

    Without `use_host` only bytes that are on the device this instant count.
    """
    found: list[int] = []
    joined: dict[int, CopyId] = {}
    on_device = state.device.index.get
    for at in range(0, len(keys), BYTES_PER_KEY):
        key = keys[at : at + BYTES_PER_KEY]
        entry = on_device(key)
        if entry is None and use_host:
            entry = _below(state, key, joined)
        if entry is None:
            break
        found.append(entry)
    if not found:
        return NOTHING
    if len(set(found)) != len(found):
        msg = "keys names a block twice; the keys of a chain differ"
        raise InvalidError(msg)
    entries = as_ids(found)
    if tenant is not None:
        entries = _visible(state, entries, tenant)
    kept = entries.tolist()
    is_block = entries >= 0
    return Match(
        entries=entries,
        blocks=entries[is_block],
        slots=~entries[~is_block],
        joined={joined[entry] for entry in kept if entry in joined} if joined else set(),
    )


def _below(state: CacheState, key: bytes, joined: dict[int, CopyId]) -> int | None:
    """Return the block that a copy in flight fills for a key, or the complement of its slot."""
    loading = state.loading.get(key)
    if loading is not None:
        joined[loading[0]] = loading[1]
        return loading[0]
    slot = state.host.index.get(key)
    return None if slot is None else ~slot


def _visible(state: CacheState, entries: Ids, tenant: int) -> Ids:
    """Return the entries before the first that is another tenant's, which only a stolen key can name."""
    is_slot = entries < 0
    tenants = state.device.records.tenant[np.where(is_slot, 0, entries)]
    if is_slot.any():
        tenants[is_slot] = state.host.records.tenant[~entries[is_slot]]
    foreign = np.flatnonzero(tenants != tenant)
    return entries[: foreign[0]] if len(foreign) else entries


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
    if not len(protected):
        return state.device.num_available
    return state.device.num_available - int((state.device.holds[protected] == 0).sum())


def write_back(state: CacheState, victims: list[int]) -> bool:
    """Start copying the victims that have no copy in the host pool; tell whether there is anything to wait for.

    If there is, those that have a copy have been evicted.
    """
    dirty = state.device.unknown_to(state.host, victims)
    slots = host_slots(state, len(dirty), at_most=True)
    if slots is None or not len(slots):
        return False
    # What has a copy leaves at once: the new copies may push it out again, and then nothing ever would leave.
    copied = set(victims).difference(dirty)
    evict_blocks(state, [block for block in victims if block in copied])
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
        state.counters["blocks_dropped"] += len(host.unknown_to(state.device, victims))
        host.evict(victims)
    return host.suitable(count)


def evict_blocks(state: CacheState, blocks: list[int]) -> None:
    """Evict device blocks that nobody holds."""
    if not blocks:
        return
    state.counters["evictions"] += len(blocks)
    state.counters["blocks_dropped"] += len(state.device.unknown_to(state.host, blocks))
    state.device.evict(blocks)
    state.tell("blocks_evicted", num_blocks=len(blocks))


def _num_coming(state: CacheState) -> int:
    coming = (Purpose.WRITE_BACK, Purpose.SCRUB)
    return sum(
        len(flight.sources) or len(flight.targets)
        for flight in state.flights.values()
        if flight.purpose in coming and not flight.is_lost
    )
