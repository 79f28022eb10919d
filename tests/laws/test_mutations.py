"""The suite bites: each seeded bug is found by the simulation, and what is near also by exhaustive search."""

from itertools import islice

import pytest

from tests.laws.exhaustive import ROOTS, TINY, search
from tests.laws.histories import play
from tests.laws.mended import Mutation
from tests.laws.mutations import CACHES, MUTATIONS, NEAR, STORES
from tests.laws.shapes import seeds_of

_HISTORIES = 400
_DEPTH = 3


@pytest.mark.parametrize(("name", "mutation"), MUTATIONS.items(), ids=MUTATIONS)
def test_simulation_finds_seeded_bug(
    name: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded bug breaks a law within a bounded number of simulated histories."""
    mutation(monkeypatch)

    seeds = islice(seeds_of(CACHES.get(name, "one"), STORES.get(name, "")), _HISTORIES)
    assert any(play([seed]).violations for seed in seeds)


@pytest.mark.parametrize(("name", "root"), NEAR.items(), ids=NEAR)
def test_exhaustive_search_finds_seeded_bug(
    name: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded bug that needs few steps is found, and with the shortest path to it."""
    MUTATIONS[name](monkeypatch)

    found = search(TINY, ROOTS[root], depth=_DEPTH)

    assert found.violation
    assert len(found.path) <= len(ROOTS[root]) + _DEPTH
