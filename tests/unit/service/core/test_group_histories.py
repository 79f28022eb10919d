"""No law breaks in random histories of caches of several groups, and every hit holds the bytes that its key says."""

from typing import Final

import pytest

from kvlease.groups import GroupShape
from tests.unit.service.core.grouped import (
    CHUNK,
    DRAFTED,
    FIXED,
    FULL,
    GUESSING,
    STATE,
    WIDE,
    WINDOW,
)
from tests.unit.service.core.histories import History

MIXES: Final = {
    "full and window": (FULL, WINDOW),
    "window": (WINDOW,),
    "chunk": (CHUNK,),
    "state": (STATE,),
    "full and state": (FULL, STATE),
    "wide and guessing": (WIDE, GUESSING),
    "fixed": (FIXED,),
    "full and fixed": (FULL, FIXED),
    "drafted": (DRAFTED,),
    "drafted and window": (DRAFTED, WINDOW),
    "all": (WIDE, FULL, WINDOW, CHUNK, GUESSING, FIXED),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_no_law_breaks(mix: tuple[GroupShape, ...], seed: int) -> None:
    """Whatever workers do and wherever the control process dies, what a request needs is there and is right."""
    History(seed, mix).live()
