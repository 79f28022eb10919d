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
"""Storms in which bugs show that others show late."""
LANDED = Dirt.landed
SHAPES: list[dict[str, Any]] = [
    {"num_disk_slots": 12, "uses_remote": True},
    {"num_disk_slots": 12, "uses_remote": True, "write_policy": WritePolicy.WRITE_THROUGH},
    {"num_disk_slots": 40, "write_policy": WritePolicy.AFTER_N_HITS, "write_after_hits": 2},
    {"uses_remote": True, "write_policy": WritePolicy.WRITE_THROUGH, "max_waiting": 3},
]


def weather(numbers: dict[str, Any], seed: int) -> None:
    """Go through one storm, and find nothing amiss when it is over."""
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
    """Go through storms enough that a bug shows."""
    for seed in (*SEEDS_FIRST, *range(SEEDS_MAX)):
        weather(SHAPES[seed % 2], seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numbers", SHAPES, ids=["evict", "through", "hits", "remote"])
def test_tiers_weather_any_storm(numbers: dict[str, Any], seed: int) -> None:
    """Whatever the stores and their movers do, no wrong byte is served, and in the end nothing is held."""
    weather(numbers, seed)


# The storms bite ------------------------------------------------------------------------------------------------------


def failed_positions_are_believed(patch: pytest.MonkeyPatch) -> None:
    """What a store says was not there, or was not what it should be, is published all the same."""

    def copy_done(state: CacheState, command: c.CopyDone, now: float) -> Outcome:
        return landing.copy_done(state, replace(command, failed=()), now)

    patch.setitem(cache_module._VERBS, c.CopyDone, copy_done)


def death_of_one_mover_ends_all_copies(patch: pytest.MonkeyPatch) -> None:
    """The copies of movers that live are taken for ended, while they still write."""

    def mover_died(state: CacheState, command: c.MoverDied, now: float) -> Outcome:
        outcome = Outcome(reply=Done())
        for mover in Mover:
            outcome = landing.mover_died(state, replace(command, mover=mover), now)
        return outcome

    patch.setitem(cache_module._VERBS, c.MoverDied, mover_died)


def lost_load_frees_its_target(patch: pytest.MonkeyPatch) -> None:
    """A copy that was not answered in time is taken for failed, though its mover may still write."""

    def copy_lost(state: CacheState, command: c.CopyLost, now: float) -> Outcome:
        return landing.copy_failed(state, c.CopyFailed(copy_id=command.copy_id), now)

    patch.setitem(cache_module._VERBS, c.CopyLost, copy_lost)


def probed_call_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A call that asked is not served when the store has answered."""

    def probed(state: CacheState, command: c.Probed, now: float) -> Outcome:
        del now
        state.asking.pop(command.probe_id, None)
        return Outcome(reply=Done())

    patch.setitem(cache_module._VERBS, c.Probed, probed)


def fetch_is_not_listed_as_loading(patch: pytest.MonkeyPatch) -> None:
    """Bytes that come from the remote store are fetched once for each who wants them."""
    ways_up = {
        one: tier for one, tier in SOURCE_TIERS.items() if one is not Direction.FETCH
    }  # fmt: skip
    patch.setattr(state_module, "SOURCE_TIERS", ways_up)
    patch.setattr(landing, "SOURCE_TIERS", ways_up)


def shared_slot_is_shared_again(patch: pytest.MonkeyPatch) -> None:
    """What came from the remote store goes back there."""

    def landed(self: Dirt, flight: Flight, good: Marks, now: float) -> None:
        LANDED(self, flight, good, now)
        if flight.direction is Direction.OFFLOAD and self.shares:
            self.share[flight.targets[good]] = True

    patch.setattr(Dirt, "landed", landed)


def background_copies_know_no_bound(patch: pytest.MonkeyPatch) -> None:
    """Several copies of one mover go on in the background at once."""
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
    """Bugs are switched on one by one, and each is found."""
    mutation(monkeypatch)

    with pytest.raises(AssertionError):
        weather_many()
