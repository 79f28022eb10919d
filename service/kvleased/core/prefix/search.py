"""Own the search for a prefix: the blocks that are cached, or on their way to the device, and that a call could reuse.

Each block is taken from the highest tier that has it: the device, a copy on its way there, the host pool, the disk
store, and last the remote store, of which only its answer to this call is known.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.groups import first_needed
from kvlease.ids import BYTES_PER_KEY, CopyId
from kvleased.core.blocks.marks import Words, key_words
from kvleased.core.ids import ZERO, Ids, are_distinct
from kvleased.core.lease.covering import Covering
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.message import message
from kvleased.core.prefix.looking import (
    Sources,
    are_foreign,
    by_tier,
    firsts_below,
    is_any_below,
    keys_at,
    look_below,
    remote_places,
    searched,
)
from kvleased.core.state import CacheState, split_keys
from kvleased.core.tier.flights import TierTokens, on_device
from kvleased.core.waiting import Waiter

_BYTES_OF_FEW: Final = 128 * BYTES_PER_KEY
"""Up to so many keys are looked for all at once, which takes no longer than halving them to find the first miss."""


@message
class Match:
    """The longest prefix that a call can reuse."""

    entries: Ids
    """Group by group in token order: a device block, or the complement (~) of the number of a source to copy from."""
    blocks: Ids
    """The device blocks among the entries."""
    below: Ids
    """The complements of the other entries."""
    joined: set[CopyId]
    """Copies in flight that fill some of the blocks already."""
    hit_tokens: int
    """Tokens of the prefix."""
    tier_tokens: TierTokens
    """For each tier, the tokens in it and those above; blocks on their way to the device count as there.

    In a simple cache, the tokens are counted block by block. With several groups, they are the tokens before the first
    one for which some group has a block in a lower tier.
    """
    parts: tuple[Ids, ...] = ()
    """The entries of each group, up to the place where the prefix ends; empty in a simple cache."""
    behind: Ids | None = None
    """The entries just behind the prefix that draft models also read; without them the prefix would be shorter."""
    remote_keys: bytes = b""
    """The packed keys that are to come from the remote store, in the order of the entries."""
    remote_positions: Ids
    """The index of each of these keys in the request's chain."""


NOTHING: Final = Match(
    entries=NOWHERE,
    blocks=NOWHERE,
    below=NOWHERE,
    joined=set(),
    hit_tokens=0,
    tier_tokens=(0, 0, 0, 0),
    remote_positions=NOWHERE,
)


def match(state: CacheState, keys: bytes, tenant: int | None, sources: Sources | None) -> Match:
    """Return the longest prefix of packed `keys` that a tenant's blocks serve.

    Without a tenant, anybody's blocks count. Without `sources`, only blocks that are on the device at this instant do.
    """
    if not state.covering.shared:
        return NOTHING
    if sources is not None and not is_any_below(state, sources):
        sources = None
    if not state.is_simple:
        return _match_groups(state, keys, tenant, sources)
    if sources is None and state.device.index.get(keys[:BYTES_PER_KEY]) < 0:
        return NOTHING
    if len(keys) > _BYTES_OF_FEW:
        keys = keys[: _num_cached_at_most(state, keys, sources) * BYTES_PER_KEY]
    entries = state.device.index.find(keys)
    is_missing = entries < ZERO
    joined: dict[int, CopyId] = {}
    # Nearly always nothing is missing; bytes are searched faster than an array.
    has_missing = b"\1" in is_missing.tobytes()
    if has_missing:
        entries, joined = _before_hole(state, keys, (entries, is_missing), sources, tenant)
        if not len(entries):
            return NOTHING
    if tenant is not None and not state.device.is_only_of(tenant):
        entries = _own(state, entries, tenant)
    blocks, below = by_tier(entries) if has_missing else (entries, NOWHERE)
    _check_distinct(state, keys, blocks, below)
    if len(below):
        return _with_below(state, keys, (entries, blocks, below), _joined(joined, entries))
    hit_tokens = len(entries) * state.covering.tokens_per_block
    return Match(
        entries=entries,
        blocks=blocks,
        below=below,
        joined=_joined(joined, entries),
        hit_tokens=hit_tokens,
        tier_tokens=on_device(hit_tokens),
        remote_positions=NOWHERE,
    )


def sources_of(waiter: Waiter) -> Sources:
    """Return where a call that may wait can get its prefix from."""
    return Sources(skipped=waiter.skipped, remote_keys=waiter.remote_keys)


def _before_hole(
    state: CacheState,
    keys: bytes,
    looked: tuple[Ids, NDArray[np.bool_]],
    sources: Sources | None,
    tenant: int | None,
) -> tuple[Ids, dict[int, CopyId]]:
    """Return the entries before the first missing one, and the copies in flight that fill some of them, by block."""
    joined = {} if sources is None else look_below(state, keys, looked, sources, tenant)
    entries, is_missing = looked
    (holes,) = is_missing.nonzero()
    return (entries[: holes[0]] if len(holes) else entries), joined


def _own(state: CacheState, entries: Ids, tenant: int) -> Ids:
    """Return the entries before the first one that is another tenant's; only a stolen key can name such a block."""
    (foreign,) = are_foreign(state, entries, tenant).nonzero()
    return entries[: foreign[0]] if len(foreign) else entries


def _with_below(
    state: CacheState, keys: bytes, found: tuple[Ids, Ids, Ids], joined: set[CopyId]
) -> Match:
    """Return a simple cache's match with entries below the device; `found` are entries, blocks and complements."""
    entries, blocks, below = found
    positions = remote_places(state, below)
    hit_tokens = len(entries) * state.covering.tokens_per_block
    return Match(
        entries=entries,
        blocks=blocks,
        below=below,
        joined=joined,
        hit_tokens=hit_tokens,
        tier_tokens=tokens_by_tier(state, [entries], hit_tokens),
        remote_keys=keys_at(keys, positions),
        remote_positions=positions,
    )


def _joined(joined: dict[int, CopyId], entries: Ids) -> set[CopyId]:
    return {joined[entry] for entry in entries.tolist() if entry in joined} if joined else set()


def _check_distinct(state: CacheState, keys: bytes, blocks: Ids, below: Ids) -> None:
    if not state.device.are_distinct(blocks) or (
        len(below) and not _are_distinct_below(state, keys, below)
    ):
        msg = "keys names a block twice; all keys of a chain must differ"
        raise InvalidError(msg, resource="keys")


def _are_distinct_below(state: CacheState, keys: bytes, below: Ids) -> bool:
    """Tell whether no entry below the device is named twice."""
    remote = split_keys(keys_at(keys, remote_places(state, below)))
    return are_distinct(below) and len(set(remote)) == len(remote)


def _num_cached_at_most(state: CacheState, keys: bytes, sources: Sources | None) -> int:
    """Return an upper bound of the number of keys before the first one that is not cached.

    No block is evicted before its children, so the cached blocks of a chain come first, and halving finds their end.
    The number may be too large if a block was evicted by its key, but it is never too small.
    """
    pools = [] if sources is None else [pool for _, pool in searched(state, sources)]

    def is_missing(at: int) -> bool:
        key = keys[at * BYTES_PER_KEY : (at + 1) * BYTES_PER_KEY]
        if state.device.index.get(key) >= 0:
            return False
        if sources is None:
            return True
        is_coming = key in state.loading or key in sources.remote_keys
        return not is_coming and all(pool.index.get(key) < 0 for pool in pools)

    last = len(keys) // BYTES_PER_KEY - 1
    if is_missing(0):
        return 0
    if not is_missing(last):
        return last + 1
    return bisect_left(range(last), True, lo=1, key=is_missing)


# Several groups ---------------------------------------------------------------------------------------------------


def _match_groups(
    state: CacheState, keys: bytes, tenant: int | None, sources: Sources | None
) -> Match:
    """Return the longest prefix for which every group has all blocks that the tokens behind the prefix need."""
    covering = state.covering
    words = key_words(keys)
    if sources is None and covering.first_key_of is not None:
        first_key = covering.block_keys(covering.first_key_of, words)[1][:1].tobytes()
        if not first_key or state.device.index.get(first_key) < 0:
            return NOTHING
    packed, counts = keys_of_groups(covering, words)
    entries, has, joined = look_everywhere(state, packed, tenant, sources)
    num_tokens = len(words) * covering.hash_tokens
    if covering.is_drafted or b"\0" in has.tobytes():
        hit_tokens = _longest(covering, has, counts, num_tokens)
    else:
        hit_tokens = num_tokens // covering.hit_tokens * covering.hit_tokens
    if not hit_tokens:
        return NOTHING
    parts = _parts_of(state, entries, counts, hit_tokens)
    behind = _behind(covering, entries, counts, hit_tokens) if covering.is_drafted else None
    entries = np.concatenate(parts)
    blocks, below = by_tier(entries)
    _check_distinct(state, packed, blocks, below)
    places = remote_places(state, below)
    return Match(
        entries=entries,
        blocks=blocks,
        below=below,
        joined=_joined(joined, entries),
        hit_tokens=hit_tokens,
        tier_tokens=tokens_by_tier(state, parts, hit_tokens),
        parts=tuple(parts),
        behind=behind,
        remote_keys=keys_at(packed, places),
        remote_positions=positions_of(covering, counts)[places] if len(places) else NOWHERE,
    )


def keys_of_groups(covering: Covering, words: Words) -> tuple[bytes, list[int]]:
    """Return the packed keys of all blocks of a chain, group by group, and how many each group has."""
    marked = [covering.block_keys(group, words)[1] for group in covering.shared]
    return np.concatenate(marked).tobytes(), [len(one) for one in marked]


def positions_of(covering: Covering, counts: list[int]) -> Ids:
    """Return the index in the chain of the key of each block, group by group."""
    positions = [
        np.arange(1, count + 1) * covering.groups[at].keys_per_block - 1
        for at, count in zip(covering.shared, counts, strict=True)
    ]
    return np.concatenate(positions)


def look_everywhere(
    state: CacheState, packed: bytes, tenant: int | None, sources: Sources | None
) -> tuple[Ids, NDArray[np.bool_], dict[int, CopyId]]:
    """Return the entries of packed keys, which of them serve a tenant, and the copies in flight that fill some."""
    entries = state.device.index.find(packed)
    is_missing = entries < ZERO
    joined: dict[int, CopyId] = {}
    if sources is not None and b"\1" in is_missing.tobytes():
        joined = look_below(state, packed, (entries, is_missing), sources, tenant)
    has = ~is_missing
    if tenant is not None and not state.device.is_only_of(tenant):
        has[has] = ~are_foreign(state, entries[has], tenant)
    return entries, has, joined


def _parts_of(state: CacheState, entries: Ids, counts: list[int], hit_tokens: int) -> list[Ids]:
    """Return the entries of each group in a prefix."""
    covering = state.covering
    parts, start = [NOWHERE] * len(covering.groups), 0
    ends = covering.hit_ends(hit_tokens)
    for group, count in zip(covering.shared, counts, strict=True):
        first = covering.first_needed(group, hit_tokens)
        parts[group] = entries[start + first : start + ends[group]]
        start += count
    return parts


def tokens_by_tier(state: CacheState, parts: Sequence[Ids], hit_tokens: int) -> TierTokens:
    """Return the tokens of a prefix by tier, as `Match.tier_tokens` has them; `parts` are the entries of each group."""
    covering, firsts = state.covering, firsts_below(state)
    if state.is_simple:
        (entries,) = parts
        counts = [len(entries) - np.count_nonzero(~entries >= first) for first in firsts]
        device, host, disk = (int(one) * covering.tokens_per_block for one in counts)
        return device, host, disk, hit_tokens
    tier_tokens = [hit_tokens] * 3
    for group in covering.shared:
        first, part = covering.first_needed(group, hit_tokens), parts[group]
        # Nearly always nothing is below; bytes are searched faster than an array.
        if b"\1" in (part < 0).tobytes():
            for tier, first_below in enumerate(firsts):
                (lower,) = (~part >= first_below).nonzero()
                if len(lower):
                    first_token = (first + int(lower[0])) * covering.groups[group].tokens_per_block
                    tier_tokens[tier] = min(tier_tokens[tier], first_token)
    device, host, disk = (one // covering.hit_tokens * covering.hit_tokens for one in tier_tokens)
    return device, host, disk, hit_tokens


def _behind(covering: Covering, entries: Ids, counts: list[int], hit_tokens: int) -> Ids:
    """Return the entry just behind a prefix of each group that a draft model reads."""
    starts = np.cumsum([0, *counts])
    places = [
        int(start) + hit_tokens // covering.groups[group].tokens_per_block
        for group, start in zip(covering.shared, starts, strict=False)
        if covering.groups[group].is_drafted
    ]
    return entries[places]


def _longest(covering: Covering, has: NDArray[np.bool_], counts: list[int], num_tokens: int) -> int:
    """Return the tokens of the longest prefix that every group can serve, at most `num_tokens`.

    `has` tells for each block, group by group, whether it is there. A group can serve a prefix if all blocks are there
    from the first one that the tokens behind the prefix need to the end of the prefix.
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
