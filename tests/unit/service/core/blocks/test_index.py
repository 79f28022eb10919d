"""Laws of the index: it finds what a dict finds, whatever the keys are."""

import numpy as np
import pytest

from kvleased.core.blocks.index import Ids, KeyIndex
from tests.unit.service.core.builders import as_ids

NUM_ENTRIES = 100


def a_column(first_words: list[int]) -> np.typing.NDArray[np.uint8]:
    """Return keys that have the given first words, and differ in their last."""
    words = np.zeros((len(first_words), 4), np.uint64)
    words[:, 0] = first_words
    words[:, 3] = np.arange(len(first_words))
    return words.view(np.uint8)


FALLS = {
    "spread out": a_column([at * 0x9E3779B97F4A7C15 % 2**64 for at in range(NUM_ENTRIES)]),
    "side by side": a_column(list(range(NUM_ENTRIES))),
    "in one place": a_column([512 * at for at in range(NUM_ENTRIES)]),
    "with the same first word": a_column([7] * NUM_ENTRIES),
    "around the end of the table": a_column([2**64 - 1 - at % 3 for at in range(NUM_ENTRIES)]),
}
EVERYTHING: Ids = as_ids(range(NUM_ENTRIES))
every_fall = pytest.mark.parametrize("keys", FALLS.values(), ids=FALLS)


def found(index: KeyIndex, keys: np.typing.NDArray[np.uint8], blocks: Ids) -> list[int]:
    """Return the blocks found under keys, which must be the same at once and one by one."""
    packed = keys[blocks].tobytes()
    at_once = index.find(packed).tolist()
    assert at_once == [index.get(packed[at : at + 32]) for at in range(0, len(packed), 32)]
    return at_once


@every_fall
@pytest.mark.parametrize("num_blocks", [1, 16, 17, 100])
def test_known_keys_are_found_and_others_are_not(
    keys: np.typing.NDArray[np.uint8], num_blocks: int
) -> None:
    """An added block is found under its key, and none under another."""
    index = KeyIndex(keys)

    index.add(EVERYTHING[:num_blocks])

    expected = [at if at < num_blocks else -1 for at in range(NUM_ENTRIES)]
    assert found(index, keys, EVERYTHING) == expected
    assert sorted(index.blocks().tolist()) == EVERYTHING[:num_blocks].tolist()


@every_fall
@pytest.mark.parametrize("num_gone", [1, 40])
def test_forgotten_keys_are_not_found(keys: np.typing.NDArray[np.uint8], num_gone: int) -> None:
    """A block that was taken out is not found, its neighbours are, and it may come back."""
    index = KeyIndex(keys)
    index.add(EVERYTHING)

    index.discard(EVERYTHING[10 : 10 + num_gone])
    gone = range(10, 10 + num_gone)
    assert found(index, keys, EVERYTHING) == [-1 if at in gone else at for at in range(NUM_ENTRIES)]
    assert len(index) == NUM_ENTRIES - num_gone

    index.add(as_ids(gone))
    assert found(index, keys, EVERYTHING) == EVERYTHING.tolist()


@every_fall
def test_index_outlives_its_places(keys: np.typing.NDArray[np.uint8]) -> None:
    """However often keys come and go, those in the index are found."""
    index = KeyIndex(keys)
    index.add(EVERYTHING)
    choose = np.random.default_rng(0)

    for _ in range(200):
        blocks = choose.permutation(EVERYTHING)[: choose.integers(1, NUM_ENTRIES)]
        index.discard(blocks)
        assert found(index, keys, blocks) == [-1] * len(blocks)
        keys[blocks, 8:16] = choose.integers(0, 256, (len(blocks), 8))
        index.add(blocks)
        assert found(index, keys, EVERYTHING) == EVERYTHING.tolist()


@every_fall
@pytest.mark.parametrize("num_others", [0, 1, 40])
def test_keys_that_were_looked_for_are_found_once_they_are_added(
    keys: np.typing.NDArray[np.uint8], num_others: int
) -> None:
    """Keys that were just looked up are added like any others, even if others came in between."""
    index = KeyIndex(keys)
    index.add(EVERYTHING[:30])
    packed = keys[70:].tobytes()

    assert index.find(packed).tolist() == [-1] * 30
    if num_others:
        index.add(EVERYTHING[30 : 30 + num_others])
        index.discard(EVERYTHING[20:30])
    index.add(EVERYTHING[70:], packed)

    there = {*range(20 if num_others else 30), *range(30, 30 + num_others), *range(70, NUM_ENTRIES)}
    assert found(index, keys, EVERYTHING) == [
        at if at in there else -1 for at in range(NUM_ENTRIES)
    ]


def test_gone_keys_leave_nothing_behind() -> None:
    """However many different keys come and go, an index does not fill up."""
    keys = a_column(list(range(NUM_ENTRIES)))
    index = KeyIndex(keys)

    for first in range(0, 50 * NUM_ENTRIES, NUM_ENTRIES):
        keys.view(np.uint64)[:, 0] = np.arange(first, first + NUM_ENTRIES)
        index.add(EVERYTHING)
        # The last key stays for a while.
        index.discard(EVERYTHING[:-1])
        assert found(index, keys, EVERYTHING[-2:]) == [-1, NUM_ENTRIES - 1]
        index.discard(EVERYTHING[-1:])
        keys.view(np.uint64)[-1, 0] = 0

    assert len(index) == 0


def test_part_of_a_key_is_no_key() -> None:
    """The bytes after the last whole key name no block."""
    keys = a_column([1])
    index = KeyIndex(keys)
    index.add(as_ids([0]))

    assert index.find(keys.tobytes() + b"key").tolist() == [0]


def test_empty_column_has_no_keys() -> None:
    """An index without entries finds nothing."""
    assert KeyIndex(a_column([])).find(bytes(32 * 20)).tolist() == [-1] * 20


def test_repr_shows_life() -> None:
    """The text of an index shows how many keys it has, and for how many it has room."""
    index = KeyIndex(a_column([1, 2]))
    index.add(as_ids([1]))

    assert repr(index) == "<KeyIndex 1 keys in 16 places>"
