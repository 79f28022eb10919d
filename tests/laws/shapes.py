"""The caches that are simulated, by the seed of a history: half have one group, the others go through all mixes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from math import lcm
from typing import Final

from kvlease.groups import GroupShape, Keeps, keeps_everything, most_blocks
from kvleased.core import CacheShape
from kvleased.core.shape import WritePolicy
from tests.unit.service.core.grouped import (
    CHUNK,
    DRAFTED,
    FIXED,
    FULL,
    GUESSING,
    HASH_TOKENS,
    STATE,
    WIDE,
    WINDOW,
)

SHAPE: Final = CacheShape(
    num_blocks=25,
    null_blocks=1,
    num_slots=14,
    groups=(keeps_everything(4, 12),),
    hash_tokens=HASH_TOKENS,
    hit_tokens=4,
    max_leases=16,
    max_waiting=6,
    max_pins=3,
    lease_seconds=30.0,
    layout_digest=99,
)
"""One group, as in most caches."""

LONGEST_TOKENS: Final = 56
_SPLIT: Final = replace(FULL, kernel_blocks_per_block=2, kernel_block_stride=2)
_SPARSE: Final = replace(WINDOW, kernel_blocks_per_block=2, kernel_block_stride=3)
_FAR: Final = replace(WINDOW, kept_tokens=15, max_blocks=6)


def shape_of(*groups: GroupShape, longest_tokens: int = LONGEST_TOKENS) -> CacheShape:
    """Return a cache that is too small for two long requests, with a host pool that hardly holds one."""
    shared = [group.tokens_per_block for group in groups if group.keys_per_block]
    most = sum(most_blocks(group, longest_tokens) for group in groups)
    num_blocks = max(9, most + most // 2 + 3)
    return replace(
        SHAPE,
        num_blocks=num_blocks,
        num_slots=num_blocks * 2 // 3,
        groups=groups,
        hit_tokens=lcm(*shared),
        shares_prefixes=bool(shared),
        longest_request_tokens=longest_tokens,
        max_leases=12,
    )


MIXES: Final[Mapping[str, CacheShape]] = {
    "full and window": shape_of(_SPLIT, WINDOW),
    "full, window and chunk": shape_of(WIDE, _SPARSE, CHUNK),
    "full and state": shape_of(FULL, STATE),
    "wide and guessing": shape_of(WIDE, GUESSING),
    "full and fixed": shape_of(FULL, FIXED),
    "drafted": shape_of(DRAFTED),
    "drafted and window": shape_of(DRAFTED, WINDOW),
    "windows": shape_of(WINDOW, _FAR),
    "chunk": shape_of(CHUNK),
    "state": shape_of(STATE),
    "fixed": shape_of(FIXED),
    "all": shape_of(WIDE, FULL, _SPARSE, CHUNK, GUESSING, FIXED),
}
"""Caches of several groups, or of one group that is not simply kept, by name."""


_ONE_IN_LIMITED: Final = 8
_MAGAZINES_AMONG_THEM: Final = 4
_ONE_IN_OPERATED: Final = 16
"""Of _ONE_IN_LIMITED histories one has limits and one has magazines; of _ONE_IN_OPERATED one has an operator, too."""
_APART: Final = (32, 26)
"""The period, and which of so many consecutive histories has engines whose ranks call apart."""


def name_of(seed: int) -> str:
    """Return the name of the cache of a history: "one", "limited" (its tenants have limits), or one of the mixes.

    "magazines" is like "one", with engines that have magazines; "ranks" has engines whose ranks call apart; "operated"
    is like "limited", with an operator.
    """
    period, apart = _APART
    if seed % period == apart:
        return "ranks"
    if seed % 2:
        return [*MIXES][seed // 2 % len(MIXES)]
    if seed % _ONE_IN_LIMITED == _MAGAZINES_AMONG_THEM:
        return "magazines"
    if seed % _ONE_IN_LIMITED:
        return "one"
    return "operated" if seed % _ONE_IN_OPERATED else "limited"


def ranks_of(seed: int) -> CacheShape:
    """Return the cache of a history in which an engine's two ranks call apart; half of these have one group."""
    nth, is_mixed = divmod(seed // _APART[0], 2)
    mix = [*MIXES][nth % len(MIXES)]
    shape = MIXES[mix] if is_mixed else SHAPE
    period, which = _RANKS_TO_THE_END
    if is_mixed and nth % period == which:
        shape = to_the_end(shape)
    shape = replace(shape, num_ranks=2)
    return replace(shape, blocks_at_once=1) if nth % _RANKS_IN_PARTS == 0 else shape


_TO_THE_END: Final = (16, 5)
"""The period, and which of so many consecutive histories has requests that may fill a block table to its last place."""
_RANKS_TO_THE_END: Final = (7, 3)
"""The same, of histories with groups and ranks that call apart."""


def mix_of(seed: int) -> CacheShape:
    """Return the cache of a history that has one of the mixes."""
    shape, (period, which) = MIXES[name_of(seed)], _TO_THE_END
    return to_the_end(shape) if seed % period == which else shape


def to_the_end(shape: CacheShape) -> CacheShape:
    """Return the same cache for requests of as many tokens as the shortest table of its groups has room for."""
    tables = [
        group.table_blocks * group.tokens_per_block
        for group in shape.groups
        if group.keeps is not Keeps.FIXED
    ]
    return shape_of(*shape.groups, longest_tokens=min(tables, default=LONGEST_TOKENS))


_WITHOUT_HOST: Final = (128, 98)
"""The period, and which of so many histories has one group and no host pool, unless it has stores."""


def has_host(seed: int) -> bool:
    """Tell whether the cache of a history has a host pool."""
    period, without = _WITHOUT_HOST
    return seed % period != without or bool(tiers_of(seed))


_IN_PARTS: Final = ((16, 7), (64, 42))
"""Periods, and which of so many consecutive histories move leases in parts, however few blocks they have."""


_RANKS_IN_PARTS: Final = 5
"""Of so many histories with ranks that call apart, one moves leases in parts."""


def has_parts(seed: int) -> bool:
    """Tell whether a history moves leases in parts."""
    return any(seed % period == which for period, which in _IN_PARTS)


_HANGING: Final = (11, 4)
"""The period, and which of so many consecutive histories has a memory mover that hangs now and then."""


def hangs(seed: int) -> bool:
    """Tell whether the memory mover of a history hangs now and then."""
    period, which = _HANGING
    return seed % period == which


_OBEYED: Final = (3, 0)
"""The period, and in which of so many histories remedies are obeyed; copying the process takes half of the time."""


def obeys(seed: int) -> bool:
    """Tell whether remedies are obeyed in a history; no other choice uses a period with this divisor."""
    period, which = _OBEYED
    return seed % period == which


TIERS: Final = ("evict", "through", "hits", "remote", "disk")
"""The stores that a cache may have below its host pool, and when blocks go there."""
_TIERED: Final = (1, 3)
"""Which of `_ONE_IN_ROW` consecutive histories have stores; no other choice uses a period with that divisor."""
_ONE_IN_ROW: Final = 5


def tiers_of(seed: int) -> str:
    """Return which stores the cache of a history has; "" if none."""
    return TIERS[seed // _ONE_IN_ROW % len(TIERS)] if seed % _ONE_IN_ROW in _TIERED else ""


def with_tiers(shape: CacheShape, tiers: str) -> CacheShape:
    """Return a cache with stores: a disk smaller than the host pool or larger than both, a remote one, or both."""
    large, small = 2 * shape.num_blocks, shape.num_slots // 2
    if tiers == "evict":
        return replace(shape, num_disk_slots=large, uses_remote=True)
    if tiers == "through":
        policy = WritePolicy.WRITE_THROUGH
        return replace(shape, num_disk_slots=small, uses_remote=True, write_policy=policy)
    if tiers == "hits":
        return replace(shape, num_disk_slots=large, write_policy=WritePolicy.AFTER_N_HITS)
    if tiers == "remote":
        return replace(shape, uses_remote=True, write_policy=WritePolicy.WRITE_THROUGH)
    return replace(shape, num_disk_slots=small) if tiers else shape


def seeds_of(name: str, tiers: str = "") -> Iterator[int]:
    """Go through the seeds of the histories with the named cache and stores."""
    return (seed for seed in count() if name_of(seed) == name and tiers_of(seed) == tiers)
