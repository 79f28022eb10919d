"""Laws of arrays of ids: repeated ids are found, and the first of each keeps its place."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvlease.ids import EPOCH_SHIFT, Epoch
from kvleased.core.ids import IdCount, are_distinct, first_of_each


@pytest.mark.parametrize(
    ("ids", "first"),
    [
        pytest.param([], [], id="none"),
        pytest.param([3], [3], id="one"),
        pytest.param([5, 1, 3], [5, 1, 3], id="distinct"),
        pytest.param([5, 1, 5, 3, 1], [5, 1, 3], id="twice"),
    ],
)
def test_each_id_is_kept_where_it_is_first(ids: list[int], first: list[int]) -> None:
    """Ids are distinct if and only if all of them are kept."""
    given = np.array(ids, np.intp)

    assert first_of_each(given).tolist() == first
    assert are_distinct(given) == (first == ids)


@pytest.mark.parametrize(
    "ids", [range(5_000), range(0, 5_000 << 20, 1 << 20)], ids=["dense", "alike"]
)
def test_one_that_is_twice_among_many_is_found(ids: Sequence[int]) -> None:
    """Many ids that share their lower bits are told apart, and the one that is there twice is found."""
    given = np.array(ids, np.intp)
    assert are_distinct(given)
    assert are_distinct(given - 2_500)

    given[4_000] = given[17]

    assert not are_distinct(given)
    assert first_of_each(given).tolist() == [one for at, one in enumerate(ids) if at != 4_000]


def test_ids_of_an_epoch_are_above_all_before() -> None:
    """The text of a count shows how far it is, above the ids of all earlier epochs."""
    count = IdCount(Epoch(3))
    count.newest += 1

    assert repr(count) == f"<IdCount at {(3 << EPOCH_SHIFT) + 1}>"
