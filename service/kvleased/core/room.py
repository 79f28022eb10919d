"""Own the search for a prefix and the making of room: what a call could reuse, and where its new blocks come from."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.ids import BYTES_PER_KEY, CopyId
from kvleased.core.flights import Purpose
from kvleased.core.leases import NOWHERE
from kvleased.core.pool import Ids, Pool
from kvleased.core.state import CacheState, chosen_keys, split_keys


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


NOTHING: Final = Match(NOWHERE, NOWHERE, NOWHERE, set())


def match(state: CacheState, keys: bytes, tenant: int | None, *, use_host: bool) -> Match:
    """Return the longest prefix of packed `keys` that a tenant's blocks serve, or anybody's without a tenant.

    Without `use_host` only bytes that are on the device this instant count.
    """
    use_host = use_host and (len(state.host.index) > 0 or bool(state.loading))
    if not use_host and state.device.index.get(keys[:BYTES_PER_KEY]) < 0:
        return NOTHING
    num_keys = _num_cached_at_most(state, keys, use_host=use_host)
    if not num_keys:
        return NOTHING
    keys = keys[: num_keys * BYTES_PER_KEY]
    entries = state.device.index.find(keys)
    is_missing = entries < 0
    joined: dict[int, CopyId] = {}
    # Nearly always nothing is; bytes are searched faster than an array.
    if b"\1" in is_missing.tobytes():
        if use_host:
            joined = _look_below(state, keys, entries, is_missing)
        (holes,) = is_missing.nonzero()
        entries = entries[: holes[0]] if len(holes) else entries
    blocks, slots = _by_tier(entries)
    if not (state.device.are_distinct(blocks) and state.host.are_distinct(slots)):
        msg = "keys names a block twice; the keys of a chain differ"
        raise InvalidError(msg)
    if tenant is not None:
        (foreign,) = (_tenants(state, entries, blocks, slots) != tenant).nonzero()
        if len(foreign):
            # Only a stolen key can name another tenant's block.
            entries = entries[: foreign[0]]
            blocks, slots = _by_tier(entries)
    return Match(
        entries=entries,
        blocks=blocks,
        slots=slots,
        joined={joined[entry] for entry in entries.tolist() if entry in joined}
        if joined
        else set(),
    )


def _by_tier(entries: Ids) -> tuple[Ids, Ids]:
    """Return the blocks and the slots among entries."""
    is_block = entries >= 0
    if b"\0" not in is_block.tobytes():
        return entries, NOWHERE
    return entries[is_block], ~entries[~is_block]


def _tenants(state: CacheState, entries: Ids, blocks: Ids, slots: Ids) -> NDArray[np.uint64]:
    """Return whose bytes the entries hold."""
    if not len(slots):
        return state.device.records.tenant[blocks]
    tenants = np.empty(len(entries), np.uint64)
    tenants[entries >= 0] = state.device.records.tenant[blocks]
    tenants[entries < 0] = state.host.records.tenant[slots]
    return tenants


def _num_cached_at_most(state: CacheState, keys: bytes, *, use_host: bool) -> int:
    """Return the number of keys before one that is not cached.

    Leaves leave before what they hang on, so in a chain of cached blocks that is found by halving. Where one was
    evicted by its name, it is too many at times, but never too few.
    """

    def is_missing(at: int) -> bool:
        key = keys[at * BYTES_PER_KEY : (at + 1) * BYTES_PER_KEY]
        if state.device.index.get(key) >= 0:
            return False
        return not use_host or not (key in state.loading or state.host.index.get(key) >= 0)

    last = len(keys) // BYTES_PER_KEY - 1
    if last < 0 or is_missing(0):
        return 0
    if not is_missing(last):
        return last + 1
    return bisect_left(range(last), True, lo=1, key=is_missing)


def _look_below(
    state: CacheState, keys: bytes, entries: Ids, is_missing: NDArray[np.bool_]
) -> dict[int, CopyId]:
    """Fill in the blocks that copies in flight fill, and the complements of slots; returns those copies by block."""
    (places,) = is_missing.nonzero()
    wanted = chosen_keys(keys, is_missing)
    slots = state.host.index.find(wanted)
    entries[places] = ~slots
    is_missing[places] = slots < 0
    joined: dict[int, CopyId] = {}
    if state.loading:
        for at, key in zip(places.tolist(), split_keys(wanted), strict=True):
            if key in state.loading:
                entries[at], joined[state.loading[key][0]] = state.loading[key]
                is_missing[at] = False
    return joined


def room(
    state: CacheState, count: int, tenant: int, protected: Ids, *, may_wait: bool
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
        state.fly(Purpose.SCRUB, NOWHERE, device.unsuitable(count, tenant))
    return found


def num_available(state: CacheState, protected: Ids) -> int:
    """Count the blocks that a call could get if nobody else came: free, evictable and not part of its own prefix."""
    if not len(protected):
        return state.device.num_available
    return state.device.num_available - int(np.count_nonzero(state.device.holds[protected] == 0))


def write_back(state: CacheState, victims: Ids) -> bool:
    """Start copying the victims that have no copy in the host pool; tell whether there is anything to wait for.

    If there is, those that have a copy have been evicted.
    """
    is_dirty = state.device.is_unknown_to(state.host, victims)
    slots = host_slots(state, int(np.count_nonzero(is_dirty)), at_most=True)
    if slots is None or not len(slots):
        return False
    # What has a copy leaves at once: the new copies may push it out again, and then nothing ever would leave.
    evict_blocks(state, victims[~is_dirty])
    sources = victims[is_dirty][: len(slots)]
    state.fly(Purpose.WRITE_BACK, sources, slots, keyed=slots >= 0)
    return True


def host_slots(
    state: CacheState, count: int, protected: Ids = NOWHERE, *, at_most: bool = False
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
        state.counters["blocks_dropped"] += _num_unknown(host, state.device, victims)
        host.evict(victims)
    return host.suitable(count)


def evict_blocks(state: CacheState, blocks: Ids) -> None:
    """Evict device blocks that nobody holds."""
    if not len(blocks):
        return
    state.counters["evictions"] += len(blocks)
    state.counters["blocks_dropped"] += _num_unknown(state.device, state.host, blocks)
    state.device.evict(blocks)
    state.tell("blocks_evicted", num_blocks=len(blocks))


def _num_unknown(pool: Pool, other: Pool, blocks: Ids) -> int:
    return int(np.count_nonzero(pool.is_unknown_to(other, blocks)))


def _num_coming(state: CacheState) -> int:
    coming = (Purpose.WRITE_BACK, Purpose.SCRUB)
    return sum(
        len(flight.sources) or len(flight.targets)
        for flight in state.flights.values()
        if flight.purpose in coming and not flight.is_lost
    )
