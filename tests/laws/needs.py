"""Own what a simulated worker itself knows of groups, the places of its tables; it does not ask the core."""

from collections.abc import Sequence
from itertools import count
from typing import Final

from kvlease.groups import GroupShape, Keeps, most_blocks
from kvleased.core import CacheShape
from kvleased.core.blocks.marks import marks

Groups = Sequence[GroupShape]

_BYTES_PER_KEY: Final = 32
_MARKS: Final = [int.from_bytes(mark.tobytes(), "little") for mark in marks(8)]
"""Computed before any bug is switched on."""


def kept_under(key: bytes, group: int) -> bytes:
    """Return the key for a group's block, given the chain's key of its last token; or the other way round."""
    number = int.from_bytes(key, "little") ^ _MARKS[group]
    return number.to_bytes(_BYTES_PER_KEY, "little")


def needed_from(group: GroupShape, num_computed: int) -> int:
    """Return the first place that a later token reads."""
    if group.keeps is Keeps.WINDOW:
        return max(0, num_computed - group.kept_tokens) // group.tokens_per_block
    if group.keeps is Keeps.CHUNK:
        return (num_computed - num_computed % group.kept_tokens) // group.tokens_per_block
    if group.keeps is Keeps.STATE:
        return max(0, num_computed - 1) // group.tokens_per_block
    return 0


def end_of(group: GroupShape, num_computed: int, num_tokens: int) -> int:
    """Return the end of a request's places, given the tokens that it is to cover and those that it has computed."""
    if group.keeps is Keeps.FIXED:
        return group.max_blocks
    end = -(-num_tokens // group.tokens_per_block) + group.extra_blocks
    if group.keeps in (Keeps.WINDOW, Keeps.CHUNK):
        end = min(end, needed_from(group, num_computed) + group.max_blocks)
    return min(end, group.table_blocks)


def growth(groups: Groups, num_computed: int, num_tokens: int, ends: Sequence[int]) -> list[range]:
    """Return the places of each group that are filled so that a request covers so many tokens.

    A table that ends has blocks for a state and all speculative ones at its last places.
    """
    grown = []
    for group, before in zip(groups, ends, strict=True):
        after = max(before, end_of(group, num_computed, num_tokens))
        first = before
        if group.keeps is Keeps.STATE:
            newest = (num_tokens - 1) // group.tokens_per_block
            first = max(before, min(newest, group.table_blocks - 1 - group.extra_blocks))
        grown.append(range(min(first, after), after))
    return grown


def moved_on(groups: Groups, ends: Sequence[int], afters: Sequence[int]) -> list[range]:
    """Return the places of each group whose speculative blocks move on as its places grow."""
    moved = []
    for group, before, after in zip(groups, ends, afters, strict=True):
        guesses = group.extra_blocks if group.keeps is Keeps.STATE else 0
        moved.append(
            range(before - guesses, max(before - guesses, min(before, after - 1 - guesses)))
        )
    return moved


def is_moved_on(
    group: GroupShape,
    part: Sequence[int],
    place: int,
    row: Sequence[int],
    written: int = 2**31 - 1,
) -> bool:
    """Tell whether the row lists, farther on, a block that a worker knows at a place for speculative tokens.

    A rank that is told of states that others have farther on may know of more such places behind its `written` tokens.
    """
    if group.keeps is not Keeps.STATE or not group.extra_blocks:
        return False
    first = min(len(part) - group.extra_blocks, -(-written // group.tokens_per_block))
    return place >= first and part[place] in row[place + 1 :]


def hit_places(groups: Groups, hit_tokens: int) -> list[range]:
    """Return the places of each group whose blocks belong to a prefix that was found."""
    return [
        range(needed_from(group, hit_tokens), hit_tokens // group.tokens_per_block)
        if group.keys_per_block and hit_tokens
        else range(0)
        for group in groups
    ]


def room(groups: Groups, ends: Sequence[int]) -> int:
    """Return the tokens that the places have room for; at the end of a table, speculative blocks have less room."""
    return min(
        (
            (end if end == group.table_blocks else max(0, end - group.extra_blocks))
            * group.tokens_per_block
            for group, end in zip(groups, ends, strict=True)
            if group.keeps is not Keeps.FIXED
        ),
        default=2**31 - 1,
    )


def covered(groups: Groups, ends: Sequence[int], num_tokens: int) -> int:
    """Return how many of the tokens may be computed with the places that there are."""
    return min(
        num_tokens
        if group.keeps in (Keeps.FIXED, Keeps.STATE)
        else min(num_tokens, end * group.tokens_per_block)
        for group, end in zip(groups, ends, strict=True)
    )


def has_prefix(groups: Groups, keys: Sequence[bytes], cached: set[bytes], hit_tokens: int) -> bool:
    """Tell whether all blocks are cached that the tokens behind a prefix need."""
    for at, (group, places) in enumerate(zip(groups, hit_places(groups, hit_tokens), strict=True)):
        drafted = group.is_drafted and hit_tokens > 0
        for place in range(places.start, places.stop + drafted):
            last = (place + 1) * group.keys_per_block - 1
            if last >= len(keys) or kept_under(keys[last], at) not in cached:
                return False
    return True


def longest(shape: CacheShape, most: int | None = None) -> int:
    """Return the tokens of the longest request that may be granted, with at most so many blocks."""
    usable = shape.usable_blocks if most is None else most
    tables = [
        group.table_blocks * group.tokens_per_block
        for group in shape.groups
        if group.keeps is not Keeps.FIXED
    ]
    limit = min(shape.longest_request_tokens, *tables, 1 << 20)
    return next(
        limit - less
        for less in count()
        if sum(most_blocks(group, limit - less) for group in shape.groups) <= usable
    )


def cost(groups: Groups, num_tokens: int) -> int:
    """Return the blocks that a new request of so many tokens gets if nothing of it is cached."""
    return sum(len(places) for places in growth(groups, 0, num_tokens, [0] * len(groups)))
