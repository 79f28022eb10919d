"""Own the places of a row, by group: which places a lease has at which time, and which keys name their blocks."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvlease.groups import (
    Counts,
    Keeps,
    first_filled,
    first_guessed,
    last_covered,
    most_blocks,
    num_passed,
)
from kvleased.core.blocks.marks import Words, key_words, marks
from kvleased.core.lease.places import ENDLESS, Places
from kvleased.core.shape import CacheShape


class Covering:
    """The places of all groups of a cache, derived once from its shape."""

    def __init__(self, shape: CacheShape) -> None:
        """Derive everything from a cache's numbers."""
        self.groups = shape.groups
        self.is_simple = shape.is_simple
        self.hash_tokens = shape.hash_tokens
        self.hit_tokens = shape.hit_tokens
        self.tokens_per_block = shape.groups[0].tokens_per_block
        """Of the first group, which is the only one of a simple cache."""
        self.block_of_column = np.array(self.tokens_per_block, np.int32)
        """The same as an array: it divides a column of tokens in a third of the time that a plain number takes."""
        self.widths = np.array([group.table_blocks for group in shape.groups], np.int64)
        self.starts = list(accumulate((g.table_blocks for g in shape.groups), initial=0))[:-1]
        """Where each group's part of a row begins."""
        self.first_places = np.array(self.starts, np.int64)
        """The same as an array, to calculate with many rows."""
        self.shared = _shared(shape)
        """The groups whose blocks are found by key; empty if prefixes are not shared."""
        self.is_drafted = any(shape.groups[at].is_drafted for at in self.shared)
        """Whether some group needs more blocks of a prefix to be cached than are used of it."""
        self.first_key_of = next(
            (at for at in self.shared if shape.groups[at].keeps is Keeps.EVERYTHING), None
        )
        """A group whose first block is part of every prefix that is found; None if there is no such group."""
        self.giving_back = tuple(at for at, group in enumerate(shape.groups) if group.gives_back)
        self.guessing = tuple(at for at in self.giving_back if shape.groups[at].extra_blocks)
        """The groups that also keep states of speculative tokens."""
        self.marks = marks(len(shape.groups))
        self.end_tokens = np.concatenate(
            [np.arange(1, g.table_blocks + 1) * max(1, g.tokens_per_block) for g in shape.groups]
        )
        """The token at which each place of a row ends."""
        self.fit(shape)
        self.planned_tokens = self._longest(replace(shape, parked_blocks=0))
        """Tokens of the longest request that fits when no block is parked."""
        self._places = np.arange(shape.table_width)
        self._of_one = [Places(group) for group in shape.groups]

    # Blocks that a lease has --------------------------------------------------------------------------------------

    def used(self, ends: Sequence[int]) -> NDArray[np.intp]:
        """Return the places of a row before the ends of its groups, group by group."""
        pieces = zip(self.starts, ends, strict=True)
        return np.concatenate([self._places[start : start + end] for start, end in pieces])

    def growth(
        self, num_computed: Counts, num_tokens: Counts, ends: Counts
    ) -> tuple[Counts, Counts]:
        """Return where the fresh places that leases need to cover their tokens begin and end, [leases, groups].

        `ends` is where the places of each lease end now. Places between that end and the fresh ones need no block.
        """
        afters, begins = np.empty(ends.shape, np.int64), np.empty(ends.shape, np.int64)
        for at, group in enumerate(self.groups):
            before = ends[:, at]
            afters[:, at] = np.maximum(last_covered(group, num_computed, num_tokens), before)
            begins[:, at] = np.maximum(first_filled(group, num_tokens), before)
        return np.minimum(begins, afters), afters

    def growth_of_one(
        self, num_computed: int, num_tokens: int, ends: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return where the fresh places of one lease begin and end in each group."""
        begins, afters = [], []
        for one, before in zip(self._of_one, ends, strict=True):
            begin, after = one.growth(num_computed, num_tokens, before)
            begins.append(begin)
            afters.append(after)
        return begins, afters

    def passed(
        self, num_tokens: Counts, ends: Counts, afters: Counts
    ) -> tuple[Counts, Counts] | None:
        """Return the speculative places whose blocks move on as leases grow: the first such place, and how many.

        Both are [leases, groups]; the result is None if no block moves on. The leases now cover `num_tokens` with the
        places before `ends`, and grow up to `afters`. There are never more such places than fresh ones.
        """
        if not self.guessing:
            return None
        firsts, counts = np.zeros(ends.shape, np.int64), np.zeros(ends.shape, np.int64)
        for at in self.guessing:
            group = self.groups[at]
            firsts[:, at] = first_guessed(group, num_tokens)
            counts[:, at] = num_passed(group, num_tokens, ends[:, at], afters[:, at])
        return (firsts, counts) if counts.any() else None

    def num_passed_by_one(self, num_tokens: int, ends: Sequence[int], afters: Sequence[int]) -> int:
        """Return how many speculative places of one lease move their blocks on, in all groups."""
        return sum(
            self._of_one[at].num_passed(num_tokens, ends[at], afters[at]) for at in self.guessing
        )

    def hit_ends(self, hit_tokens: int) -> list[int]:
        """Return for each group where the places that hold blocks of a found prefix end."""
        ends = [one.first_needed(hit_tokens) for one in self._of_one]
        for at in self.shared:
            ends[at] = hit_tokens // self.groups[at].tokens_per_block
        return ends

    def first_needed(self, at: int, num_computed: int) -> int:
        """Return the first place of a group that is needed after so many tokens."""
        return self._of_one[at].first_needed(num_computed)

    def last_covered(self, at: int, num_computed: int, num_tokens: int) -> int:
        """Return where the places that a lease has in a group end at most."""
        return self._of_one[at].last_covered(num_computed, num_tokens)

    def first_held(self, at: int, num_computed: int, end: int) -> int:
        """Return the first place of a group such that it and all later places before `end` have a block."""
        first = self.first_needed(at, num_computed)
        group = self.groups[at]
        return max(first, end - 1 - group.extra_blocks) if group.keeps is Keeps.STATE else first

    def fit(self, shape: CacheShape) -> None:
        """Find the longest request again, because another number of blocks can be granted now."""
        self.longest_tokens = self._longest(shape)
        """Tokens of the longest request that ever fits."""
        self.longest_of_column = np.array(self.longest_tokens, np.uint32)
        """The same as an array, for comparisons with a column of tokens."""

    # Tokens -------------------------------------------------------------------------------------------------------

    def covered(self, ends: Sequence[int], num_tokens: int) -> int:
        """Return how many of `num_tokens` may be computed with the places before the ends."""
        pairs = zip(self._of_one, ends, strict=True)
        return min([one.covered(end, num_tokens) for one, end in pairs])

    def room_tokens(self, ends: Sequence[int]) -> int:
        """Return how many tokens the places before the ends have room for."""
        return min([one.room(end) for one, end in zip(self._of_one, ends, strict=True)])

    def whole_tokens(self, ends: Sequence[int]) -> int:
        """Return the room, in tokens, of those groups alone that have no window or chunk to move on."""
        rooms = [
            one.room(end)
            for group, one, end in zip(self.groups, self._of_one, ends, strict=True)
            if group.keeps not in (Keeps.WINDOW, Keeps.CHUNK)
        ]
        return min(rooms, default=ENDLESS)

    def most(self, num_tokens: int) -> list[int]:
        """Return for each group the most blocks that a request of so many tokens holds at once."""
        return [most_blocks(group, num_tokens) for group in self.groups]

    def wanted(self, num_tokens: int) -> list[int]:
        """Return `most` as it would be if tables were long enough for any request."""
        keeps_all = [group.keeps is Keeps.EVERYTHING for group in self.groups]
        found = zip(self.groups, keeps_all, self.most(num_tokens), strict=True)
        return [
            -(-num_tokens // group.tokens_per_block) if keeps else most
            for group, keeps, most in found
        ]

    # Keys ---------------------------------------------------------------------------------------------------------

    def block_keys(self, at: int, words: Words, first_key: int = 0) -> tuple[int, Words]:
        """Return the first block of a group that ends within a part of a chain, and the keys of all such blocks.

        `words` are the keys of that part, which starts at `first_key`. The blocks follow one another. The keys returned
        are those under which the blocks are kept, one for each block.
        """
        keys_per_block = self.groups[at].keys_per_block
        first = first_key // keys_per_block
        chosen = words[(first + 1) * keys_per_block - 1 - first_key :: keys_per_block]
        return first, chosen ^ self.marks[at]

    def every_key(self, keys: bytes) -> bytes:
        """Return, in order, all keys under which blocks that end at the tokens of packed keys can be kept."""
        if len(self.shared) <= 1 and not self.marks[list(self.shared)].any():
            return keys
        marked = key_words(keys)[:, None] ^ self.marks[list(self.shared)]
        return marked.tobytes()

    def _longest(self, shape: CacheShape) -> int:
        def is_too_long(num_tokens: int) -> bool:
            return sum(self.most(num_tokens)) > shape.usable_blocks

        tables = [
            group.table_blocks * group.tokens_per_block
            for group in shape.groups
            if group.keeps is not Keeps.FIXED
        ]
        most_tokens = min(shape.longest_request_tokens, *tables, ENDLESS)
        return bisect_left(range(1, most_tokens + 1), True, key=is_too_long)


def _shared(shape: CacheShape) -> tuple[int, ...]:
    if not shape.shares_prefixes:
        return ()
    found = tuple(at for at, group in enumerate(shape.groups) if group.keys_per_block)
    for at in found:
        group = shape.groups[at]
        assert group.keys_per_block * shape.hash_tokens == group.tokens_per_block, (
            "a block is a whole number of keys"
        )
        assert shape.hit_tokens % group.tokens_per_block == 0, "a prefix ends where blocks end"
    return found
