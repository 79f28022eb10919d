"""Own the search for a prefix: what a call could reuse of what is cached, or on its way to the device."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.ids import BYTES_PER_KEY, CopyId
from kvleased.core.leases import NOWHERE
from kvleased.core.pool import Ids
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
