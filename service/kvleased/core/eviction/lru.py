"""Own the default policy: the least recently used block leaves first, and no block leaves before its children.

A chain is always touched from its root, so a parent is never colder than its children, if the blocks of one release are
added tail first. So the order needs no tree, but the caller must add tail first.

The order is a ring of places, the coldest first. A block that is taken out only forgets its place, which is skipped
later. So adding blocks, taking them out and finding victims are array operations for any number of blocks. A block that
is set aside remembers its place as a negative number, and is put back there if the order has not gone past it.
"""

from collections.abc import Iterator
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvleased.core.ids import Ids

_PLACES_MIN: Final = 64
_PLACES_AT_ONCE: Final = 64
"""How many places are looked at together, at least."""
_FIRST: Final = 1 << 60
"""The number of the first place; numbers go up and down from there and never reach 0, which stands for no place."""
_PLACES_PER_PART_SHIFT: Final = 42
"""Place numbers of one part of an order, as a power of two: more than it ever uses."""
_NOWHERE: Final = np.array(0, np.int64)
"""The place of a block that is not there; as an array, it is written in half the time of a plain number."""
_NOTHING: Final[Ids] = np.empty(0, np.intp)


class LeafFirstLRU:
    """Evict the blocks that were let go of longest ago."""

    def __init__(self, num_blocks: int) -> None:
        """Start empty; blocks are numbered from 0 to `num_blocks` - 1."""
        num_places = _PLACES_MIN
        while num_places < 2 * num_blocks:
            num_places *= 2
        self._mask = num_places - 1
        self._ring: NDArray[np.int32] = np.zeros(num_places, np.int32)
        self._place: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        """By block: its place; 0 if it is not evictable, and the negative of its former place if it was set aside."""
        self._has_aside = False
        """Whether any block was ever set aside."""
        self._first = self._begin = self._end = _FIRST
        self._num_blocks = 0
        self._offered = _NOTHING
        """The blocks that `coldest` returned last, as long as they are still the coldest."""

    @classmethod
    def part(cls, place: NDArray[np.int64], number: int) -> Self:
        """Return one of several orders that share the blocks among them, and write places into the same column.

        Blocks are not discarded from one part alone: the caller clears their places and tells each part by `left`.
        """
        order = cls(0)
        order._place = place
        order._first = order._begin = order._end = _FIRST + (number << _PLACES_PER_PART_SHIFT)
        return order

    def __len__(self) -> int:
        """Count the evictable blocks."""
        return self._num_blocks

    def __contains__(self, block: int) -> bool:
        """Tell whether a block is evictable."""
        return bool(self._place[block] > 0)

    def __iter__(self) -> Iterator[int]:
        """Go through the evictable blocks, the coldest first."""
        return iter(self.blocks().tolist())

    def __repr__(self) -> str:
        """Show how many blocks are evictable."""
        return f"<LeafFirstLRU {len(self)} evictable>"

    def blocks(self) -> Ids:
        """Return the evictable blocks, the coldest first."""
        return self._between(self._begin, self._end)

    def holds(self, blocks: Ids) -> NDArray[np.bool_]:
        """Tell for each block whether it is evictable."""
        is_there: NDArray[np.bool_] = self._place[blocks] > 0
        return is_there

    def add(self, blocks: Ids) -> None:
        """Add absent blocks as the hottest ones, in the given order."""
        self._make_room(len(blocks))
        self._write(blocks, self._end)
        self._end += len(blocks)

    def add_coldest(self, blocks: Ids) -> None:
        """Put absent blocks back at the cold end, the first given one as the coldest."""
        self._offered = _NOTHING
        self._make_room(len(blocks))
        self._begin -= len(blocks)
        self._write(blocks, self._begin)

    def discard(self, blocks: Ids) -> None:
        """Take distinct blocks out; absent ones are ignored."""
        if self._num_blocks or self._has_aside:
            self._offered = _NOTHING
            # If there are few, bytes are counted in half the time of an array.
            self._num_blocks -= (self._place[blocks] > _NOWHERE).tobytes().count(1)
            self._place[blocks] = _NOWHERE
            if not self._num_blocks:
                self._begin = self._end

    def cached(self, blocks: Ids) -> None:
        """Do nothing: this policy does not care when blocks were cached."""

    def set_aside(self, blocks: Ids) -> None:
        """Take distinct blocks out to be copied; absent ones are ignored."""
        self._offered = _NOTHING
        self._has_aside = True
        places = self._place[blocks]
        self._num_blocks -= int(np.count_nonzero(places > _NOWHERE))
        self._place[blocks] = -np.abs(places)

    def put_back(self, blocks: Ids) -> None:
        """Put blocks that were set aside back at their places, or at the cold end if those have gone by."""
        gone_by = self.restore(blocks)
        if len(gone_by):
            self.add_coldest(gone_by)

    def put_all_back(self) -> Ids:
        """Put all blocks that were set aside back, to set them aside again later; return them."""
        aside = np.flatnonzero(self._place < 0)
        self.put_back(aside)
        return aside

    def restore(self, blocks: Ids) -> Ids:
        """Put blocks that were set aside back at their places; return those whose places have gone by, in order."""
        self._offered = _NOTHING
        places = -self._place[blocks]
        is_kept = (places >= self._begin) & (places < self._end)
        is_kept[is_kept] = self._ring[places[is_kept] & self._mask] == blocks[is_kept]
        kept = blocks[is_kept]
        self._place[kept] = places[is_kept]
        self._num_blocks += len(kept)
        gone_by: Ids = blocks[~is_kept][places[~is_kept].argsort()]
        return gone_by

    def evicted(self, blocks: Ids) -> None:
        """Take distinct blocks out; if they are those that `coldest` just returned, the order begins behind them."""
        if blocks is not self._offered:
            self.discard(blocks)
            return
        self._offered = _NOTHING
        self._num_blocks -= len(blocks)
        self._begin = self._place.item(blocks.item(-1)) + 1 if self._num_blocks else self._end
        self._place[blocks] = _NOWHERE

    def peek(self, count: int) -> Ids:
        """Return up to `count` of the coldest blocks while the caller hides some blocks' places for a moment."""
        return self._coldest(count)

    def left(self, count: int) -> None:
        """Note that so many blocks of this part have lost their places."""
        self._num_blocks -= count

    def coldest(self, count: int, protected: Ids) -> Ids:
        """Return up to `count` of the coldest blocks that are not protected."""
        if not len(protected):
            found = self._coldest(count, has_gaps=self._end - self._begin != self._num_blocks)
            if len(found):
                self._begin = self._place.item(found.item(0))
                self._offered = found
            return found
        places = self._place[protected]
        self._place[protected] = _NOWHERE
        found = self._coldest(count)
        self._place[protected] = places
        return found

    def _coldest(self, count: int, *, has_gaps: bool = True) -> Ids:
        if not has_gaps:
            return self._at(self._begin, min(self._end, self._begin + count))
        found: list[Ids] = []
        begin, missing, at_once = self._begin, count, max(count, _PLACES_AT_ONCE)
        while missing > 0 and begin < self._end:
            end = min(self._end, begin + at_once)
            found.append(self._between(begin, end)[:missing])
            begin, missing, at_once = end, missing - len(found[-1]), 2 * at_once
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.intp)

    def _between(self, begin: int, end: int) -> Ids:
        """Return the blocks at places from `begin` to `end` - 1 that are still there."""
        blocks = self._at(begin, end)
        is_there = self._place[blocks] == np.arange(begin, end)
        # Searching bytes takes a fraction of the time of choosing elements.
        return blocks if b"\0" not in is_there.tobytes() else blocks[is_there]

    def _at(self, begin: int, end: int) -> Ids:
        """Return the blocks that were put at places from `begin` to `end` - 1."""
        at = begin & self._mask
        before_turn = self._ring[at : at + end - begin]
        num_behind = end - begin - len(before_turn)
        if num_behind:
            before_turn = np.concatenate([before_turn, self._ring[:num_behind]])
        blocks: Ids = before_turn.astype(np.intp)
        return blocks

    def _write(self, blocks: Ids, first: int) -> None:
        self._place[blocks] = np.arange(first, first + len(blocks))
        at = first & self._mask
        before_turn = len(self._ring) - at
        if len(blocks) <= before_turn:
            self._ring[at : at + len(blocks)] = blocks
        else:
            self._ring[at:] = blocks[:before_turn]
            self._ring[: len(blocks) - before_turn] = blocks[before_turn:]
        self._num_blocks += len(blocks)

    def _make_room(self, count: int) -> None:
        """If the ring has no room for so many more, move its blocks together, without the places of those that left."""
        if self._end - self._begin + count <= len(self._ring):
            return
        at = self._at(self._begin, self._end)
        places = self._place[at]
        blocks = at[np.abs(places) == np.arange(self._begin, self._end)]
        aside = blocks[self._place[blocks] < 0]
        num_places = len(self._ring)
        while num_places < 2 * (len(blocks) + count):
            num_places *= 2
        if num_places > len(self._ring):
            self._mask = num_places - 1
            self._ring = np.zeros(num_places, np.int32)
        self._begin = self._end = self._first
        self._num_blocks = 0
        self._write(blocks, self._begin)
        self._end += len(blocks)
        self._place[aside] *= -1
        self._num_blocks -= len(aside)


def ring_numbers(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the part that each place belongs to."""
    half = 1 << (_PLACES_PER_PART_SHIFT - 1)
    numbers: NDArray[np.int64] = (places - (_FIRST - half)) >> _PLACES_PER_PART_SHIFT
    return numbers
