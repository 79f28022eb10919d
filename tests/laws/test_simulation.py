"""No law breaks over many simulated histories full of faults."""

import pytest

from tests.laws.acts import live
from tests.laws.world import World

_HISTORIES = 64
_STEPS = 300


@pytest.mark.parametrize("chunk", range(8))
def test_no_law_breaks_under_faults(chunk: int) -> None:
    """Whatever workers, movers and the control process do or suffer, every invariant holds after every event."""
    operations = faults = 0

    for seed in range(chunk * _HISTORIES, (chunk + 1) * _HISTORIES):
        world = World(seed)
        live(world, _STEPS)
        operations += sum(world.seen.values())
        faults += sum(world.faults.values())

    # Eight chunks make at least 100,000 operations.
    assert operations > 12_500
    assert faults > 1_500
