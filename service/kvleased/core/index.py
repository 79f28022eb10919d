"""Own the way from keys to blocks: open addressing over arrays, so that a thousand keys cost little more than ten.

The table holds ids only; the keys are those of the records. A key is a 256-bit hash, the first word of which says where
to look first, and what is found was compared in full.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY

Ids = NDArray[np.intp]
Words = NDArray[np.uint64]

_EMPTY: Final = -1
_GONE: Final = -2
_PLACES_MIN: Final = 16
_PLACES_PER_ENTRY: Final = 4
"""At least so many, so that most keys are where one looks first."""
_FEW: Final = 16
"""Keys up to which looking for one after the other is quicker than calling numpy."""
_BYTES_PER_WORD: Final = 8
_WORDS_PER_KEY: Final = BYTES_PER_KEY // _BYTES_PER_WORD


class KeyIndex:
    """Blocks by key."""

    def __init__(self, keys: NDArray[np.uint8]) -> None:
        """Start empty over the key column `keys`, [entries, bytes_per_key]."""
        assert keys.flags.c_contiguous, "a copy of the keys would not see them change"
        num_places = _PLACES_MIN
        while num_places < _PLACES_PER_ENTRY * len(keys):
            num_places *= 2
        self._mask = num_places - 1
        self._table: NDArray[np.int32] = np.full(num_places, _EMPTY, np.int32)
        self._words: Words = keys.view(np.uint64)
        self._first_words: Words = self._words[:, 0]
        # One number is read from a view of memory in a third of the time that it takes from an array.
        self._place = self._table.data
        self._word = self._words.reshape(-1).data
        self._key = keys.reshape(-1).data
        self._num_keys = 0
        self._num_gone = 0

    def __len__(self) -> int:
        """Count the keys."""
        return self._num_keys

    def __repr__(self) -> str:
        """Show how full the table is."""
        return f"<KeyIndex {self._num_keys} keys in {self._mask + 1} places>"

    def get(self, key: bytes) -> int:
        """Return the block of a key, -1 where there is none."""
        word = int.from_bytes(key[:_BYTES_PER_WORD], "little")
        at = word & self._mask
        while (block := self._place[at]) != _EMPTY:
            if block >= 0 and self._word[block * _WORDS_PER_KEY] == word:
                begin = block * BYTES_PER_KEY
                if self._key[begin : begin + BYTES_PER_KEY].tobytes() == key:
                    return block
            at = (at + 1) & self._mask
        return -1

    def find(self, packed: bytes) -> Ids:
        """Return the block of each whole key, -1 where there is none."""
        num_keys = len(packed) // BYTES_PER_KEY
        if num_keys <= _FEW:
            return self._find_one_by_one(packed, num_keys)
        wanted = np.frombuffer(packed, np.uint64, num_keys * _WORDS_PER_KEY)
        wanted = wanted.reshape(-1, _WORDS_PER_KEY)
        words = wanted[:, 0].copy()
        places = (words & np.uint64(self._mask)).astype(np.intp)
        found, goes_on = self._look(places, words)
        (left,) = goes_on.nonzero()
        if len(left) > _FEW:
            left = self._look_on(found, left, places[left], words[left])
        for at in left.tolist():
            found[at] = self.get(packed[at * BYTES_PER_KEY : (at + 1) * BYTES_PER_KEY])
        if self._have_keys(found, wanted, packed):
            return found
        return self._find_one_by_one(packed, num_keys)

    def add(self, blocks: Ids) -> None:
        """Make blocks findable under the keys that the records hold; none of those keys is known yet."""
        # The fuller the table, the farther one looks; a quarter of it are keys at most.
        if self._num_keys + self._num_gone + len(blocks) > (self._mask + 1) // 8 * 3:
            self._rehash()
        self._put(blocks)
        self._num_keys += len(blocks)

    def discard(self, blocks: Ids) -> None:
        """Forget blocks under the keys that the records still hold; all of them are known."""
        left, places = blocks, self._places(blocks)
        gone: list[Ids] = []
        while len(left) > _FEW:
            there = self._table[places]
            assert (there != _EMPTY).all(), "the index points elsewhere"
            goes_on = there != left
            gone.append(places[~goes_on])
            left, places = left[goes_on], (places[goes_on] + 1) & self._mask
        gone += [np.array([self._place_of(block) for block in left.tolist()], np.intp)]
        self._vacate(np.concatenate(gone))
        self._num_keys -= len(blocks)

    def blocks(self) -> Ids:
        """Return all blocks that have a key, in no order."""
        return self._table[self._table >= 0].astype(np.intp)

    # Looking ------------------------------------------------------------------------------------------------------

    def _find_one_by_one(self, packed: bytes, num_keys: int) -> Ids:
        starts = range(0, num_keys * BYTES_PER_KEY, BYTES_PER_KEY)
        found = [self.get(packed[at : at + BYTES_PER_KEY]) for at in starts]
        return np.array(found, np.intp)

    def _look(self, places: Ids, words: Words) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the blocks at places where the first word is the wanted one, else -1; and where to look on."""
        blocks = self._table[places].astype(np.intp)
        # What stands for no block is read as the last one, and then not believed.
        is_same = self._first_words[blocks] == words if self._num_keys else blocks >= 0
        is_same &= blocks >= 0
        # Nearly always all of them are; bytes are searched faster than an array.
        if b"\0" not in is_same.tobytes():
            return blocks, ~is_same
        goes_on = blocks != _EMPTY
        goes_on ^= is_same
        blocks[~is_same] = -1
        return blocks, goes_on

    def _look_on(self, found: Ids, left: Ids, places: Ids, words: Words) -> Ids:
        """Look at one place after the other for what is left, while it is much; returns what is left then."""
        while len(left) > _FEW:
            places = (places + 1) & self._mask
            found[left], goes_on = self._look(places, words)
            left, places, words = left[goes_on], places[goes_on], words[goes_on]
        return left

    def _have_keys(self, found: Ids, wanted: Words, packed: bytes) -> bool:
        """Tell whether the keys agree in full, of which the first words do; else somebody made them so."""
        is_found = found >= 0
        if b"\0" not in is_found.tobytes():
            return packed.startswith(self._words.take(found, axis=0).tobytes())
        if b"\1" not in is_found.tobytes():
            return True
        same = self._words.take(found[is_found], axis=0) == wanted[is_found]
        return bool(same.all())

    # Writing ------------------------------------------------------------------------------------------------------

    def _put(self, blocks: Ids) -> None:
        left, places = blocks, self._places(blocks)
        while len(left) > _FEW:
            before = self._table[places]
            is_free = before < 0
            # Several may want one place: who was written last has it, the others go on.
            self._table[places[is_free]] = left[is_free]
            goes_on = self._table[places] != left
            self._num_gone -= int(np.count_nonzero(before[~goes_on] == _GONE))
            left, places = left[goes_on], (places[goes_on] + 1) & self._mask
        for block in left.tolist():
            at = self._word[block * _WORDS_PER_KEY] & self._mask
            while self._place[at] >= 0:
                at = (at + 1) & self._mask
            self._num_gone -= self._place[at] == _GONE
            self._place[at] = block

    def _place_of(self, block: int) -> int:
        at = self._word[block * _WORDS_PER_KEY] & self._mask
        while self._place[at] != block:
            assert self._place[at] != _EMPTY, "the index points elsewhere"
            at = (at + 1) & self._mask
        return at

    def _vacate(self, places: Ids) -> None:
        """Mark places as gone; and as empty where the next one is, for nobody looks past that."""
        self._table[places] = _GONE
        self._num_gone += len(places)
        while len(places) > _FEW:
            places = places[self._table[(places + 1) & self._mask] == _EMPTY]
            self._table[places] = _EMPTY
            self._num_gone -= len(places)
            places = (places - 1) & self._mask
            places = places[self._table[places] == _GONE]
        for place in places.tolist():
            at = place
            while self._place[at] == _GONE and self._place[(at + 1) & self._mask] == _EMPTY:
                self._place[at] = _EMPTY
                self._num_gone -= 1
                at = (at - 1) & self._mask

    def _places(self, blocks: Ids) -> Ids:
        return (self._first_words[blocks] & np.uint64(self._mask)).astype(np.intp)

    def _rehash(self) -> None:
        known = self.blocks()
        self._table.fill(_EMPTY)
        self._num_gone = 0
        self._put(known)
