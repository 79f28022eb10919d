"""Laws of arrays of ids: what is there twice is found, and the first of each keeps its place."""

import numpy as np
import pytest

from kvleased.core.ids import are_distinct, first_of_each


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
