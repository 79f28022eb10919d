"""The suite bites: each seeded bug is found by the simulation."""

import pytest

from tests.laws.acts import live
from tests.laws.mended import Mutation
from tests.laws.mutations import MUTATIONS
from tests.laws.world import World

_SEEDS = 120
_STEPS = 300


def _is_found(seed: int) -> bool:
    try:
        live(World(seed), _STEPS)
    except (AssertionError, KeyError, ValueError):
        return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_simulation_finds_seeded_bug(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug breaks a law within a bounded number of simulated histories."""
    mutation(monkeypatch)

    assert any(_is_found(seed) for seed in range(_SEEDS))
