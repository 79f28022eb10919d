"""No law breaks in any history of a tiny world, up to a depth."""

import pytest

from tests.laws.exhaustive import ROOTS, SHAPES, search


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_history_of_a_tiny_world_breaks_a_law(shape: str, root: str) -> None:
    """Whatever two workers, the mover and the control process do within a few steps, every invariant holds."""
    found = search(SHAPES[shape], ROOTS[root], depth=2)

    assert not found.violation, str(found)
    assert len(found.seen) > 100
