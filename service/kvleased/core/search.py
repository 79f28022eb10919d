"""Own the search for a prefix: what a call could reuse of what is cached, or on its way to the device."""

from bisect import bisect_left
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.groups import first_needed
from kvlease.ids import BYTES_PER_KEY, CopyId
from kvleased.core.covering import Covering
from kvleased.core.leases import NOWHERE
from kvleased.core.marks import key_words
from kvleased.core.message import message
from kvleased.core.pool import Ids
from kvleased.core.state import CacheState, chosen_keys, split_keys

_BYTES_OF_FEW: Final = 128 * BYTES_PER_KEY
"""Keys that are looked for all at once, which takes no longer than to halve them until the first that is missing."""


@message
class Match:
    """The longest prefix that a call can reuse."""

    entries: Ids
    """Group by group in token order: a device block, or the complement (~) of a host slot to be copied first."""
    blocks: Ids
    """The device blocks among the entries."""
    slots: Ids
    """The host slots among the entries."""
    joined: set[CopyId]
    """Copies in flight that fill some of the blocks already."""
    hit_tokens: int
    """Tokens of the prefix."""
    device_tokens: int
    """Those of them whose bytes are on the device, or on their way to it."""
    parts: tuple[Ids, ...] = ()
    """The entries of each group, up to the place where the prefix ends; empty where the cache is simple."""


NOTHING: Final = Match(
    entries=NOWHERE, blocks=NOWHERE, slots=NOWHERE, joined=set(), hit_tokens=0, device_tokens=0
)


def match(state: CacheState, keys: bytes, tenant: int | None, *, use_host: bool) -> Match:
    """Return the longest prefix of packed `keys` that a tenant's blocks serve, or anybody's without a tenant.

    Without `use_host` only bytes that are on the device this instant count.
    """
    if not state.covering.shared:
        return NOTHING
    use_host = use_host and (len(state.host.index) > 0 or bool(state.loading))
    if not state.is_simple:
        return _match_groups(state, keys, tenant, use_host=use_host)
    if not use_host and state.device.index.get(keys[:BYTES_PER_KEY]) < 0:
        return NOTHING
    if len(keys) > _BYTES_OF_FEW:
        keys = keys[: _num_cached_at_most(state, keys, use_host=use_host) * BYTES_PER_KEY]
    entries = state.device.index.find(keys)
    is_missing = entries < 0
    joined: dict[int, CopyId] = {}
    # Nearly always nothing is; bytes are searched faster than an array.
    if b"\1" in is_missing.tobytes():
        if use_host:
            joined = _look_below(state, keys, entries, is_missing)
        (holes,) = is_missing.nonzero()
        entries = entries[: holes[0]] if len(holes) else entries
        if not len(entries):
            return NOTHING
    blocks, slots = _by_tier(entries)
    _check_distinct(state, blocks, slots)
    if tenant is not None and _may_be_foreign(state, tenant, use_host=use_host):
        (foreign,) = (_tenants(state, entries, blocks, slots) != tenant).nonzero()
        if len(foreign):
            # Only a stolen key can name another tenant's block.
            entries = entries[: foreign[0]]
            blocks, slots = _by_tier(entries)
    tokens_per_block = state.covering.tokens_per_block
    return Match(
        entries=entries,
        blocks=blocks,
        slots=slots,
        joined=_joined(joined, entries),
        hit_tokens=len(entries) * tokens_per_block,
        device_tokens=len(blocks) * tokens_per_block,
    )


def _joined(joined: dict[int, CopyId], entries: Ids) -> set[CopyId]:
    return {joined[entry] for entry in entries.tolist() if entry in joined} if joined else set()


def _check_distinct(state: CacheState, blocks: Ids, slots: Ids) -> None:
    if not (state.device.are_distinct(blocks) and state.host.are_distinct(slots)):
        msg = "keys names a block twice; the keys of a chain differ"
        raise InvalidError(msg)


def _by_tier(entries: Ids) -> tuple[Ids, Ids]:
    """Return the blocks and the slots among entries."""
    is_block = entries >= 0
    if b"\0" not in is_block.tobytes():
        return entries, NOWHERE
    return entries[is_block], ~entries[~is_block]


def _may_be_foreign(state: CacheState, tenant: int, *, use_host: bool) -> bool:
    """Tell whether another tenant ever had blocks where a prefix is looked for."""
    return not state.device.is_only_of(tenant) or (use_host and not state.host.is_only_of(tenant))


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
    if is_missing(0):
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


# Several groups ---------------------------------------------------------------------------------------------------


def _match_groups(state: CacheState, keys: bytes, tenant: int | None, *, use_host: bool) -> Match:
    """Return the longest prefix of which every group has all blocks that the tokens behind it need."""
    covering = state.covering
    words = key_words(keys)
    if not use_host and covering.first_key_of is not None:
        first_key = covering.block_keys(covering.first_key_of, words)[1][:1].tobytes()
        if not first_key or state.device.index.get(first_key) < 0:
            return NOTHING
    marked = [covering.block_keys(group, words)[1] for group in covering.shared]
    counts = [len(one) for one in marked]
    packed = np.concatenate(marked).tobytes()
    entries, has, joined = _look_everywhere(state, packed, tenant, use_host=use_host)
    num_tokens = len(words) * covering.hash_tokens
    if covering.is_drafted or b"\0" in has.tobytes():
        hit_tokens = _longest(covering, has, counts, num_tokens)
    else:
        hit_tokens = num_tokens // covering.hit_tokens * covering.hit_tokens
    if not hit_tokens:
        return NOTHING
    parts, device_tokens = _parts_of(covering, entries, counts, hit_tokens)
    entries = np.concatenate(parts)
    blocks, slots = _by_tier(entries)
    _check_distinct(state, blocks, slots)
    return Match(
        entries=entries,
        blocks=blocks,
        slots=slots,
        joined=_joined(joined, entries),
        hit_tokens=hit_tokens,
        device_tokens=device_tokens // covering.hit_tokens * covering.hit_tokens,
        parts=tuple(parts),
    )


def _look_everywhere(
    state: CacheState, packed: bytes, tenant: int | None, *, use_host: bool
) -> tuple[Ids, NDArray[np.bool_], dict[int, CopyId]]:
    """Return where the blocks of packed keys are, which of them serve a tenant, and the copies that fill some."""
    entries = state.device.index.find(packed)
    is_missing = entries < 0
    joined: dict[int, CopyId] = {}
    if use_host and b"\1" in is_missing.tobytes():
        joined = _look_below(state, packed, entries, is_missing)
    has = ~is_missing
    if tenant is not None and _may_be_foreign(state, tenant, use_host=use_host):
        blocks, slots = _by_tier(entries[has])
        has[has] = _tenants(state, entries[has], blocks, slots) == tenant
    return entries, has, joined


def _parts_of(
    covering: Covering, entries: Ids, counts: list[int], hit_tokens: int
) -> tuple[list[Ids], int]:
    """Return the entries that each group has of a prefix, and the tokens before the first of them that is a slot."""
    parts = [NOWHERE] * len(covering.groups)
    start, device_tokens = 0, hit_tokens
    ends = covering.hit_ends(hit_tokens)
    for group, count in zip(covering.shared, counts, strict=True):
        first = covering.first_needed(group, hit_tokens)
        part = parts[group] = entries[start + first : start + ends[group]]
        # Nearly always nothing is below; bytes are searched faster than an array.
        is_below = part < 0
        if b"\1" in is_below.tobytes():
            first_token = (first + int(is_below.argmax())) * covering.groups[group].tokens_per_block
            device_tokens = min(device_tokens, first_token)
        start += count
    return parts, device_tokens


def _longest(covering: Covering, has: NDArray[np.bool_], counts: list[int], num_tokens: int) -> int:
    """Return the tokens of the longest prefix that every group can serve, of `num_tokens` at most.

    `has` tells of each group's blocks, group by group, whether they are there. A group can serve a prefix if as many
    blocks are there as lie between the first one needed behind the prefix and its end.
    """
    ends_of_hits = np.arange(num_tokens // covering.hit_tokens + 1) * covering.hit_tokens
    is_served = np.ones(len(ends_of_hits), np.bool_)
    num_before = np.concatenate([[0], has.cumsum()])
    start = 0
    for at, count in zip(covering.shared, counts, strict=True):
        group = covering.groups[at]
        first = first_needed(group, ends_of_hits)
        end = ends_of_hits // group.tokens_per_block + group.is_drafted
        there = num_before[start + np.minimum(end, count)]
        there -= num_before[start + np.minimum(first, count)]
        is_served &= there == end - first
        start += count
    is_served[0] = True
    return int(ends_of_hits[is_served.nonzero()[0][-1]])
