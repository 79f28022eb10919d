"""No law breaks over many simulated histories full of faults."""

import pytest

from tests.laws.histories import play

_CHUNKS = 32
_HISTORIES = 64
_OPERATIONS = 1_000_000
_FAULTS = 200_000
_QUICK_CHUNKS = 4
_THOROUGH = [
    pytest.param(chunk, marks=pytest.mark.thorough) for chunk in range(_QUICK_CHUNKS, _CHUNKS)
]


@pytest.mark.parametrize("chunk", [*range(_QUICK_CHUNKS), *_THOROUGH])
def test_no_law_breaks_under_faults(chunk: int) -> None:
    """Whatever workers, movers and the control process do or suffer, every invariant holds after every event."""
    tally = play(range(chunk * _HISTORIES, (chunk + 1) * _HISTORIES))

    assert not tally.violations
    # All chunks together make a million operations and two hundred thousand faults.
    assert tally.num_operations >= _OPERATIONS / _CHUNKS
    assert tally.num_faults >= _FAULTS / _CHUNKS
