"""No law breaks in any history of a tiny world, up to a depth."""

from typing import Final

import pytest

from tests.laws.exhaustive import ROOTS, SHAPES, search

_SHAPES: Final = [
    pytest.param(name, marks=pytest.mark.thorough if name == "two slots" else ()) for name in SHAPES
]
"""`make test` searches the smallest world and the richest; `make test-thorough` also searches the one in between."""


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("shape", _SHAPES)
def test_no_history_of_a_tiny_world_breaks_a_law(shape: str, root: str) -> None:
    """Whatever two workers, the mover and the control process do within a few steps, every invariant holds."""
    found = search(SHAPES[shape], ROOTS[root], depth=2)

    assert not found.violation, str(found)
    assert len(found.seen) > 100


@pytest.mark.thorough
@pytest.mark.parametrize("root", ["cached", "on host"])
def test_no_longer_history_breaks_a_law_where_calls_start_over(root: str) -> None:
    """With one more step, a call waits for blocks that are on their way, and another call comes only after it."""
    found = search(SHAPES["tiny"], ROOTS[root], depth=3)

    assert not found.violation, str(found)
    assert len(found.seen) > 1_000
