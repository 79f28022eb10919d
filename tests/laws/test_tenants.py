"""No law breaks under faults if tenants have limits and leases have classes, and every minimum can be had.

What a tenant finds does not depend on what others ask for.
"""

from typing import Final

import pytest

from kvleased.core import commands
from kvleased.core.eviction import POLICIES
from tests.laws.acts import live
from tests.laws.limited import LimitedWorld
from tests.laws.picks import pick_chain
from tests.laws.shapes import SHAPE, with_tiers
from tests.laws.views import compare_lookup
from tests.laws.world import World

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


def test_what_a_thief_fetches_counts_for_the_thief_alone() -> None:
    """While a copy from the remote store is under way for stolen keys, a lookup of their owner finds nothing."""
    world = World(0, shape=with_tiers(SHAPE, "remote"), tenants=(7, 8))
    owner, thief = world.workers.values()
    keys = pick_chain(world, owner.tenant, 2)
    stolen = commands.Reserve(
        worker_id=thief.worker_id,
        request_id="stolen",
        keys=b"".join(keys),
        num_tokens=3 * SHAPE.hash_tokens,
        wait_ms=2000,
    )
    world.send(stolen)
    (probe_id,) = world.stores.probes
    world.send(commands.Probed(probe_id=probe_id, is_present=bytes([1, 1])))

    assert len(world.cache._state.loading) == len(keys)
    for worker in (owner, thief):
        compare_lookup(world, worker, keys)
