"""Own the way from keys to blocks: chains of blocks in arrays, so that a thousand keys cost little more than ten.

Each place of the table names the block that came there last, and each block the one that came there before it; the
keys are those of the records. A key is a 256-bit hash whose first word gives the place of its block. Every key that is
found has been compared in full.
"""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.ids import ZERO, Ids

Words = NDArray[np.int64]
"""Words of keys; signed, so that they are places once they are masked."""

_NONE: Final = -1
_NOWHERE: Final = np.array(_NONE, np.intp)
"""The same as an array: comparing a column with it takes half the time that a plain number takes."""
_PLACES_MIN: Final = 16
_PLACES_PER_ENTRY: Final = 4
"""At least this many, so that most blocks are alone at their place."""
_FEW: Final = 16
"""Up to this many keys, looking for one after the other is quicker than calling numpy."""
_FEW_CHAINS: Final = 4
"""Up to this many chains, following one after the other is quicker than calling numpy."""
_BYTES_PER_WORD: Final = 8
_WORDS_PER_KEY: Final = BYTES_PER_KEY // _BYTES_PER_WORD
_WORD: Final = np.dtype(np.int64)
_NO_BLOCK: Final = b"\xff\xff\xff"
"""Bytes that occur among packed int32 wherever _NONE does, and hardly ever where there are only blocks."""
_NONE_BYTES: Final = b"\xff\xff\xff\xff"
_NOTHING_FOUND: Final = np.array(_NONE, np.intp).tobytes()

_Looked = tuple[bytes, Ids, NDArray[np.int32]]
"""Packed keys, the place of each, and the block that comes first at each place."""
_NOT_LOOKED: Final[_Looked] = b"", np.empty(0, np.intp), np.empty(0, np.int32)


class Watcher(Protocol):
    """Something that is told of every block that becomes findable, and of every block that is found no more."""

    def add(self, blocks: Ids) -> None:
        """Note blocks that become findable."""

    def discard(self, blocks: Ids) -> None:
        """Note blocks that are found no more."""


class KeyIndex:
    """Blocks by key."""

    def __init__(self, keys: NDArray[np.uint8]) -> None:
        """Start empty over the key column `keys`, [entries, bytes_per_key]."""
        assert keys.flags.c_contiguous, "a copy of the keys would not see them change"
        num_places = _PLACES_MIN
        while num_places < _PLACES_PER_ENTRY * len(keys):
            num_places *= 2
        self._mask = num_places - 1
        self._table: NDArray[np.int32] = np.full(num_places, _NONE, np.int32)
        self._next: NDArray[np.int32] = np.full(len(keys), _NONE, np.int32)
        """The block behind each one at its place."""
        self._low_bits = np.array(self._mask)
        """The mask as an array: masking an array with it takes half the time that a plain number takes."""
        self._words: Words = keys.view(np.int64)
        self._first_words: Words = self._words[:, 0]
        # Reading one number from a memory view takes a third of the time of reading it from an array.
        self._place = self._table.data
        self._after = self._next.data
        self._word = self._words.reshape(-1).data
        self._key = keys.reshape(-1).data
        self._num_keys = 0
        self._looked = _NOT_LOOKED
        """What was looked for last, while nothing has changed: adding these very keys need not look for them again."""
        self.watcher: Watcher | None = None

    def __len__(self) -> int:
        """Count the keys."""
        return self._num_keys

    def __repr__(self) -> str:
        """Show how full the table is."""
        return f"<KeyIndex {self._num_keys} keys in {self._mask + 1} places>"

    def get(self, key: bytes) -> int:
        """Return the block of a key; -1 if there is none."""
        word = int.from_bytes(key[:_BYTES_PER_WORD], "little", signed=True)
        block = self._place[word & self._mask]
        while block != _NONE:
            if self._word[block * _WORDS_PER_KEY] == word:
                begin = block * BYTES_PER_KEY
                if self._key[begin : begin + BYTES_PER_KEY].tobytes() == key:
                    return block
            block = self._after[block]
        return -1

    def find(self, packed: bytes) -> Ids:
        """Return the block of each whole key; -1 if there is none."""
        num_keys = len(packed) // BYTES_PER_KEY
        if num_keys <= _FEW:
            return self._find_one_by_one(packed, num_keys)
        words = np.frombuffer(packed, _WORD, num_keys * _WORDS_PER_KEY)[::_WORDS_PER_KEY]
        places = words & self._low_bits
        first = self._table[places]
        self._looked = packed, places, first
        found: Ids = first.astype(np.intp)
        packed_first = first.tobytes()
        if packed_first == _NONE_BYTES * num_keys:
            return found
        # Where there is no block, this looks at the last block; the result is ignored there.
        differs = self._first_words[found] != words
        if b"\1" in differs.tobytes():
            self._look_behind(found, words, differs)
        elif _NO_BLOCK not in packed_first and packed.startswith(self._keys_at(found)):
            return found
        if self._have_keys(found, packed):
            return found
        return self._find_one_by_one(packed, num_keys)

    def add(self, blocks: Ids, keys: bytes | None = None) -> None:
        """Make blocks findable under the keys that the records hold; none of those keys is known yet.

        The caller may give these keys, packed. If they are the ones looked for last, their places are known.
        """
        places, first = self._begin_of(blocks, keys)
        self._looked = _NOT_LOOKED
        self._num_keys += len(blocks)
        if self.watcher is not None:
            self.watcher.add(blocks)
        # Writing an array into another one of the same element type takes a sixth of the time.
        narrow = blocks.astype(np.int32)
        self._next[blocks] = first
        self._table[places] = narrow
        # Several may want one place: the block that was written last is there, and the others are put before it.
        at_places = self._table[places]
        while at_places.tobytes() != narrow.tobytes():
            (lost,) = (at_places != narrow).nonzero()
            narrow, places = narrow[lost], places[lost]
            if len(lost) <= _FEW:
                for block, place in zip(narrow.tolist(), places.tolist(), strict=True):
                    self._after[block] = self._place[place]
                    self._place[place] = block
                return
            self._next[narrow] = self._table[places]
            self._table[places] = narrow
            at_places = self._table[places]

    def discard(self, blocks: Ids) -> None:
        """Forget distinct blocks under the keys that the records still hold; all of them are known."""
        places = self._places(blocks)
        self._looked = _NOT_LOOKED
        self._num_keys -= len(blocks)
        if self.watcher is not None:
            self.watcher.discard(blocks)
        is_first = self._table[places] == blocks.astype(np.int32)
        if b"\0" not in is_first.tobytes():
            self._table[places] = self._next[blocks]
            return
        self._table[places[is_first]] = self._next[blocks[is_first]]
        (left,) = (~is_first).nonzero()
        while len(left) > _FEW:
            # Take one block of each chain at a time, because the block before it has to stay meanwhile.
            _, chosen = np.unique(places[left], return_index=True)
            self._take_out(blocks[left[chosen]], places[left[chosen]])
            left = np.delete(left, chosen)
        for at in left.tolist():
            self._take_one_out(blocks.item(at), places.item(at))

    def blocks(self) -> Ids:
        """Return all blocks that have a key, in no order."""
        blocks = self._table[self._table != _NONE]
        found = [blocks]
        while len(blocks):
            behind = self._next[blocks]
            blocks = behind[behind != _NONE]
            found.append(blocks)
        return np.concatenate(found).astype(np.intp)

    def pointers(self) -> tuple[bytes, bytes]:
        """Return all that the index knows besides the keys: two indexes with equal pointers find the same keys."""
        return self._table.tobytes(), self._next.tobytes()

    # Looking ------------------------------------------------------------------------------------------------------

    def _find_one_by_one(self, packed: bytes, num_keys: int) -> Ids:
        starts = range(0, num_keys * BYTES_PER_KEY, BYTES_PER_KEY)
        found = [self.get(packed[at : at + BYTES_PER_KEY]) for at in starts]
        return np.array(found, np.intp)

    def _look_behind(self, found: Ids, words: Words, differs: NDArray[np.bool_]) -> None:
        """Where the first block at a place has another first word, go on to the block that has the key's first word."""
        differs &= found != _NOWHERE
        (left,) = differs.nonzero()
        while len(left) > _FEW_CHAINS:
            behind = self._next[found[left]].astype(np.intp)
            found[left] = behind
            if behind.tobytes() == _NOTHING_FOUND * len(left):
                return
            differs = self._first_words[behind] != words[left]
            differs &= behind != _NOWHERE
            left = left[differs]
        for at in left.tolist():
            block, word = self._after[found.item(at)], words.item(at)
            while block != _NONE and self._word[block * _WORDS_PER_KEY] != word:
                block = self._after[block]
            found[at] = block

    def _keys_at(self, found: Ids) -> bytes:
        return self._words.take(found, axis=0).tobytes()

    def _have_keys(self, found: Ids, packed: bytes) -> bool:
        """Tell whether keys whose first words agree agree in full; if not, somebody made them collide."""
        if found.tobytes() == _NOTHING_FOUND * len(found):
            return True
        is_found = found >= ZERO
        if b"\0" not in is_found.tobytes():
            return packed.startswith(self._keys_at(found))
        wanted = np.frombuffer(packed, _WORD, len(found) * _WORDS_PER_KEY)
        same = (
            self._words.take(found[is_found], axis=0)
            == wanted.reshape(-1, _WORDS_PER_KEY)[is_found]
        )
        return bool(same.all())

    # Writing ------------------------------------------------------------------------------------------------------

    def _take_out(self, blocks: Ids, places: Ids) -> None:
        """Take blocks out of their chains, no two of them out of the same chain."""
        before = self._table[places].astype(np.intp)
        is_first = before == blocks
        self._table[places[is_first]] = self._next[blocks[is_first]]
        blocks, before = blocks[~is_first], before[~is_first]
        while len(blocks):
            behind = self._next[before].astype(np.intp)
            is_behind = behind == blocks
            self._next[before[is_behind]] = self._next[blocks[is_behind]]
            blocks, before = blocks[~is_behind], behind[~is_behind]
            assert (before != _NONE).all(), "the index points elsewhere"

    def _take_one_out(self, block: int, place: int) -> None:
        before, behind = _NONE, self._place[place]
        while behind != block:
            assert behind != _NONE, "the index points elsewhere"
            before, behind = behind, self._after[behind]
        if before == _NONE:
            self._place[place] = self._after[block]
        else:
            self._after[before] = self._after[block]

    def _begin_of(self, blocks: Ids, keys: bytes | None) -> tuple[Ids, NDArray[np.int32]]:
        """Return the places of the keys that blocks have, and the first block at each."""
        looked_for, places, first = self._looked
        if keys is not looked_for:
            places = self._places(blocks)
            first = self._table[places]
        return places, first

    def _places(self, blocks: Ids) -> Ids:
        places: Ids = self._first_words[blocks] & self._low_bits
        return places
