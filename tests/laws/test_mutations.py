"""The suite bites: each seeded bug is found by the simulation, and what is near also by exhaustive search."""

from collections.abc import Callable

import pytest

from tests.laws.exhaustive import ROOTS, TINY, search
from tests.laws.known_seeds import KNOWN_SEEDS, searched, shows
from tests.laws.mended import Mutation
from tests.laws.mutations import MUTATIONS, NEAR

_DEPTH = 3


@pytest.mark.parametrize(("name", "mutation"), MUTATIONS.items(), ids=MUTATIONS)
def test_simulation_finds_seeded_bug(
    name: str,
    mutation: Mutation,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """A seeded bug breaks a law within a bounded number of simulated histories."""
    mutation(monkeypatch)

    known = KNOWN_SEEDS.get(name)
    if known is not None and not shows(known):
        record_property("stale seed", f"{name}: {known}")
        known = None
    assert known is not None or any(shows(seed) for seed in searched(name))


def test_known_seeds_are_among_those_that_are_searched() -> None:
    """A known seed saves the search that would come to it, and shows no bug that a search would not."""
    beyond = [name for name, seed in KNOWN_SEEDS.items() if seed not in searched(name)]

    assert KNOWN_SEEDS.keys() <= MUTATIONS.keys()
    assert not beyond


@pytest.mark.parametrize(("name", "root"), NEAR.items(), ids=NEAR)
def test_exhaustive_search_finds_seeded_bug(
    name: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded bug that needs few steps is found, and with the shortest path to it."""
    MUTATIONS[name](monkeypatch)

    found = search(TINY, ROOTS[root], depth=_DEPTH)

    assert found.violation
    assert len(found.path) <= len(ROOTS[root]) + _DEPTH
