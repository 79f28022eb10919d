"""Own the search for blocks below the device, and the numbers by which the entries of a prefix name them.

An entry is a device block, or the complement (~) of a number. Numbers below the count of host slots are host slots; the
next ones, up to the count of host and disk slots together, are disk slots; any larger one stands for a key that the
remote store has, by its place among the keys looked for.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY, CopyId
from kvleased.core.blocks.pool import Pool
from kvleased.core.effects import Tier
from kvleased.core.ids import ZERO, Ids
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.message import message
from kvleased.core.state import CacheState, chosen_keys, split_keys
from kvleased.core.tier.flights import SOURCE_TIERS


class Parted(NamedTuple):
    """For each of some entries below the device, which tier has it."""

    host: NDArray[np.bool_]
    disk: NDArray[np.bool_]
    remote: NDArray[np.bool_]


@message
class Sources:
    """Where a call may get its prefix from, besides the device."""

    skipped: frozenset[Tier] = frozenset()
    """Tiers from which a copy has just failed."""
    remote_keys: frozenset[bytes] = frozenset()
    """Keys that the remote store said it has."""


EVERYWHERE: Final = Sources()


def look_below(
    state: CacheState,
    keys: bytes,
    looked: tuple[Ids, NDArray[np.bool_]],
    sources: Sources,
    tenant: int | None,
) -> dict[int, CopyId]:
    """Fill in missing entries: blocks that copies in flight fill, and complements of slots; return the copies by block.

    `looked` are the entries found so far, and which of them are missing; both arrays are changed. If a `tenant` is
    given, slots of other tenants, and copies that they have asked for, count for nothing and hide nothing.
    """
    entries, is_missing = looked
    (places,) = is_missing.nonzero()
    wanted = chosen_keys(keys, is_missing)
    below = np.full(len(places), -1, np.intp)
    for first, pool in searched(state, sources):
        slots = _slots_for(pool, wanted, tenant)
        is_new = (below < 0) & (slots >= 0)
        below[is_new] = slots[is_new] + first
    if sources.remote_keys:
        has = [key in sources.remote_keys for key in split_keys(wanted)]
        is_new = (below < 0) & np.array(has, np.bool_)
        below[is_new] = places[is_new] + len(state.host) + len(state.disk)
    entries[places] = ~below
    is_missing[places] = below < 0
    joined: dict[int, CopyId] = {}
    if state.loading:
        blocks = coming_for(state, wanted, tenant)
        (coming,) = (blocks >= 0).nonzero()
        blocks, places = blocks[coming], places[coming]
        copy_ids = state.loading.copy_ids(blocks)
        barred = {one for one in set(copy_ids) if not _may_join(state, one, sources)}
        if barred:
            may_join = np.array([one not in barred for one in copy_ids], np.bool_)
            blocks, places = blocks[may_join], places[may_join]
            copy_ids = state.loading.copy_ids(blocks)
        entries[places], is_missing[places] = blocks, False
        joined = dict(zip(blocks.tolist(), copy_ids, strict=True))
    return joined


def _slots_for(pool: Pool, keys: bytes, tenant: int | None) -> Ids:
    """Return the slot that a pool has under each key, or -1; with a tenant, those of others do not count."""
    slots = pool.index.find(keys)
    if tenant is not None and not pool.is_only_of(tenant):
        slots[pool.records.tenant[slots] != tenant] = -1
    return slots


def coming_for(state: CacheState, keys: bytes, tenant: int | None) -> Ids:
    """Return the block that a copy fills under each key, or -1; with a tenant, those of others do not count."""
    blocks = state.loading.find(keys)
    if tenant is not None and not state.device.is_only_of(tenant):
        blocks[state.device.records.tenant[blocks] != tenant] = -1
    return blocks


def _may_join(state: CacheState, copy_id: CopyId, sources: Sources) -> bool:
    """Tell whether a copy comes from a tier that the call may use and that works; otherwise it may never be done."""
    tier = SOURCE_TIERS[state.flights[copy_id].direction]
    return tier not in sources.skipped and tier not in state.tiers_off


def parted(state: CacheState, below: Ids) -> Parted:
    """Tell which of some complements of entries are host slots, disk slots, or keys that the remote store has."""
    num_slots = len(state.host)
    is_host = below < num_slots
    is_remote = below >= num_slots + len(state.disk)
    return Parted(is_host, ~(is_host | is_remote), is_remote)


def firsts_below(state: CacheState) -> tuple[int, int, int]:
    """Return the first numbers of host slots, of disk slots, and of keys that the remote store has."""
    num_slots = len(state.host)
    return 0, num_slots, num_slots + len(state.disk)


def remote_places(state: CacheState, below: Ids) -> Ids:
    """Return the places, among all keys looked for, of those that are to come from the remote store."""
    places = below - (len(state.host) + len(state.disk))
    return places[places >= 0]


def keys_at(keys: bytes, places: Ids) -> bytes:
    """Return the packed keys at some places."""
    if not len(places):
        return b""
    return np.frombuffer(keys, np.uint8).reshape(-1, BYTES_PER_KEY)[places].tobytes()


def is_any_below(state: CacheState, sources: Sources) -> bool:
    """Tell whether anything is cached below the device, or on its way there."""
    return (
        len(state.host.index) > 0
        or bool(state.loading)
        or len(state.disk.index) > 0
        or bool(sources.remote_keys)
    )


def searched(state: CacheState, sources: Sources) -> list[tuple[int, Pool]]:
    """Return the pools to look in below the device, each with the number of its first slot."""
    found = []
    if Tier.HOST not in sources.skipped and Tier.HOST not in state.tiers_off:
        found.append((0, state.host))
    if Tier.DISK not in sources.skipped and Tier.DISK not in state.tiers_off:
        found.append((len(state.host), state.disk))
    return [(first, pool) for first, pool in found if len(pool.index)]


def by_tier(entries: Ids) -> tuple[Ids, Ids]:
    """Return the blocks among entries, and the complements of the others."""
    is_block = entries >= ZERO
    if b"\0" not in is_block.tobytes():
        return entries, NOWHERE
    return entries[is_block], ~entries[~is_block]


def are_foreign(state: CacheState, entries: Ids, tenant: int) -> NDArray[np.bool_]:
    """Tell which entries that were found for a tenant are blocks of others; what is below the device is its own."""
    is_foreign = entries >= ZERO
    is_foreign[is_foreign] = state.device.records.tenant[entries[is_foreign]] != tenant
    return is_foreign


def tenants_of(state: CacheState, slots: Ids) -> NDArray[np.uint64]:
    """Return the tenant whose bytes each host slot or disk slot holds."""
    is_host = slots < len(state.host)
    tenants = np.empty(len(slots), np.uint64)
    tenants[is_host] = state.host.records.tenant[slots[is_host]]
    tenants[~is_host] = state.disk.records.tenant[slots[~is_host] - len(state.host)]
    return tenants
