"""Laws of the list of keys on their way to the device."""

import numpy as np
import pytest

from kvlease.ids import BYTES_PER_KEY, CopyId
from kvleased.core.tier.loading import Loading
from tests.unit.service.core.builders import as_ids, keys

FIRST, SECOND = CopyId(1), CopyId(2)


@pytest.fixture
def loading() -> Loading:
    """Return the list of a device whose block `i` has key `i`, with none on its way."""
    column = np.frombuffer(keys(*range(64)), np.uint8).reshape(-1, BYTES_PER_KEY).copy()
    return Loading(column)


def test_nothing_is_on_its_way_at_first(loading: Loading) -> None:
    """A new list knows no key."""
    assert len(loading) == 0
    assert keys(1) not in loading
    assert loading.find(keys(1, 2)).tolist() == [-1, -1]
    assert loading.blocks.tolist() == []


@pytest.mark.parametrize("count", [1, 40], ids=["few", "many"])
def test_listed_keys_are_found_with_their_copies(loading: Loading, count: int) -> None:
    """A key leads to its block, and a block to the copy that fills it."""
    loading.add(as_ids(range(count)), FIRST)
    loading.add(as_ids([50]), SECOND)

    found = loading.find(keys(0, 50, 60))

    assert found.tolist() == [0, 50, -1]
    assert loading.copy_ids(found[:2]) == [FIRST, SECOND]
    assert keys(50) in loading
    assert keys(60) not in loading
    assert sorted(loading.blocks.tolist()) == [*range(count), 50]
    assert repr(loading) == f"<Loading {count + 1} blocks>"


def test_discarded_keys_are_not_found(loading: Loading) -> None:
    """A block that has landed is not on its way, but the rest of its copy still is."""
    loading.add(as_ids([3, 4]), FIRST)

    loading.discard(as_ids([3]))

    assert loading.find(keys(3, 4)).tolist() == [-1, 4]
    assert len(loading) == 1


def test_same_key_may_come_twice(loading: Loading) -> None:
    """If two blocks are on their way under one key, either may land first."""
    loading._keys[7] = loading._keys[6]
    loading.add(as_ids([6]), FIRST)
    loading.add(as_ids([7]), SECOND)

    loading.discard(as_ids([7]))

    assert loading.find(keys(6)).tolist() == [6]
