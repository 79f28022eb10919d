"""Laws of the tiers under random traffic: every hit has the bytes of its key, every call is answered, nothing leaks."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvleased.core import cache as cache_module
from kvleased.core import commands as c
from kvleased.core import state as state_module
from kvleased.core.copies import cleaning, landing
from kvleased.core.effects import Direction, Done, Mover, Outcome
from kvleased.core.shape import WritePolicy
from kvleased.core.state import CacheState
from kvleased.core.tier.dirt import Dirt, Marks
from kvleased.core.tier.flights import SOURCE_TIERS, Flight
from tests.unit.service.core.builders import a_cache
from tests.unit.service.core.copies.storms import Storm

SEEDS_MAX = 60
SEEDS_FIRST = (9, 5)
"""The seeds of storms that show bugs earlier than others do."""
LANDED = Dirt.landed
SHAPES: list[dict[str, Any]] = [
    {"num_disk_slots": 12, "uses_remote": True},
    {"num_disk_slots": 12, "uses_remote": True, "write_policy": WritePolicy.WRITE_THROUGH},
    {"num_disk_slots": 40, "write_policy": WritePolicy.AFTER_N_HITS, "write_after_hits": 2},
    {"uses_remote": True, "write_policy": WritePolicy.WRITE_THROUGH, "max_waiting": 3},
]


def weather(numbers: dict[str, Any], seed: int) -> None:
    """Go through one storm, and assert that nothing is amiss afterwards."""
    storm = Storm(a_cache(14, 16, **{"max_leases": 16, **numbers}), random.Random(seed))  # noqa: S311  # a storm is no secret
    storm.rage()
    storm.calm_down()
    assert storm.waiting == {}
    census = storm.cache.census()
    assert census.num_leases == census.num_asking == census.num_copies == 0
    for tier in (census.device, census.host, census.disk):
        assert tier["ready_held"] == 0
        assert sum(tier[name] for name in ("reserved", "filling", "quarantined", "scrubbing")) == 0
    storm.replace_disk()
    assert storm.cache.census().disk["ready"] == storm.cache.census().disk["bad"] == 0


def weather_many() -> None:
    """Go through enough storms to show a bug."""
    for seed in (*SEEDS_FIRST, *range(SEEDS_MAX)):
        weather(SHAPES[seed % 2], seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numbers", SHAPES, ids=["evict", "through", "hits", "remote"])
def test_tiers_weather_any_storm(numbers: dict[str, Any], seed: int) -> None:
    """Whatever the stores and their movers do, no wrong byte is served, and in the end nothing is held."""
    weather(numbers, seed)


# The storms bite ------------------------------------------------------------------------------------------------------


def failed_positions_are_believed(patch: pytest.MonkeyPatch) -> None:
    """Make the cache publish blocks that a store reports as absent or damaged."""

    def copy_done(state: CacheState, command: c.CopyDone, now: float) -> Outcome:
        return landing.copy_done(state, replace(command, failed=()), now)

    patch.setitem(cache_module._VERBS, c.CopyDone, copy_done)


def death_of_one_mover_ends_all_copies(patch: pytest.MonkeyPatch) -> None:
    """Make the death of one mover end the copies of all movers, although the others still write."""

    def mover_died(state: CacheState, command: c.MoverDied, now: float) -> Outcome:
        outcome = Outcome(reply=Done())
        for mover in Mover:
            outcome = landing.mover_died(state, replace(command, mover=mover), now)
        return outcome

    patch.setitem(cache_module._VERBS, c.MoverDied, mover_died)


def lost_load_frees_its_target(patch: pytest.MonkeyPatch) -> None:
    """Make a lost load count as failed, although its mover may still write."""

    def copy_lost(state: CacheState, command: c.CopyLost, now: float) -> Outcome:
        return landing.copy_failed(state, c.CopyFailed(copy_id=command.copy_id), now)

    patch.setitem(cache_module._VERBS, c.CopyLost, copy_lost)


def probed_call_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Make the cache forget a call that asks, so that it is not served when the store has answered."""

    def probed(state: CacheState, command: c.Probed, now: float) -> Outcome:
        del now
        state.asking.pop(command.probe_id, None)
        return Outcome(reply=Done())

    patch.setitem(cache_module._VERBS, c.Probed, probed)


def fetch_is_not_listed_as_loading(patch: pytest.MonkeyPatch) -> None:
    """Make the cache fetch bytes from the remote store once for each call that wants them."""
    ways_up = {
        one: tier for one, tier in SOURCE_TIERS.items() if one is not Direction.FETCH
    }  # fmt: skip
    patch.setattr(state_module, "SOURCE_TIERS", ways_up)
    patch.setattr(landing, "SOURCE_TIERS", ways_up)


def shared_slot_is_shared_again(patch: pytest.MonkeyPatch) -> None:
    """Make the cache send blocks of the remote store back there."""

    def landed(self: Dirt, flight: Flight, good: Marks, now: float) -> None:
        LANDED(self, flight, good, now)
        if flight.direction is Direction.OFFLOAD and self.shares:
            self.share[flight.targets[good]] = True

    patch.setattr(Dirt, "landed", landed)


def background_copies_know_no_bound(patch: pytest.MonkeyPatch) -> None:
    """Make the cache run several copies of one mover in the background at once."""
    patch.setattr(cleaning, "CHORES", ())


@pytest.mark.parametrize(
    "mutation",
    [
        failed_positions_are_believed,
        death_of_one_mover_ends_all_copies,
        lost_load_frees_its_target,
        probed_call_is_forgotten,
        fetch_is_not_listed_as_loading,
        shared_slot_is_shared_again,
        background_copies_know_no_bound,
    ],
)
def test_storms_find_seeded_bug(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each seeded bug, switched on alone, is found."""
    mutation(monkeypatch)

    with pytest.raises(AssertionError):
        weather_many()
