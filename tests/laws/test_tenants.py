"""No law breaks under faults if tenants have limits and leases have classes, and every minimum can be had."""

from typing import Final

import pytest

from kvleased.core.eviction import POLICIES
from tests.laws.acts import live
from tests.laws.limited import LimitedWorld

_HISTORIES: Final = 12
_STEPS: Final = 300
_THOROUGH = [pytest.param(chunk, marks=pytest.mark.thorough) for chunk in range(1, 4)]


@pytest.mark.parametrize("chunk", [0, *_THOROUGH])
def test_no_law_of_tenants_breaks_under_faults(chunk: int) -> None:
    """Whatever happens, counts and limits hold after every event, and at the end each tenant can have all it may."""
    pinned = 0

    for seed in range(chunk * _HISTORIES, (chunk + 1) * _HISTORIES):
        world = LimitedWorld(seed, POLICIES[seed % len(POLICIES)])
        live(world, _STEPS)
        pinned += world.seen["pinned"]

    assert pinned
