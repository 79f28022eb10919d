"""Laws of the survey: parts add up to their whole at one instant, whatever happens during the count."""

from typing import Any

import numpy as np
import pytest

from kvlease.groups import GroupShape
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Tier
from kvleased.core.views.survey import CACHED, HELD, Columns
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    WAIT_MS,
    a_cache,
    a_reserve,
    cached,
    keys,
    on_host,
    reserve,
    tick,
)
from tests.unit.service.core.grouped import (
    CHUNK,
    FIXED,
    FULL,
    GUESSING,
    STATE,
    WINDOW,
    cache_of,
    reserve_tokens,
)


def spread(cache: Cache, tier: Tier = Tier.DEVICE) -> list[list[int]]:
    """Return the numbers of blocks of two tenants and of all others, by kind."""
    return cache.survey(0.0).columns[tier].by_tenant((TENANT, OTHER_TENANT)).tolist()


def test_tenants_add_up_to_the_used_blocks() -> None:
    """Each used block counts once, for its tenant, as cached or held; free blocks count for none."""
    cache = a_cache()
    cached(cache, keys(1, 2))
    cached(cache, keys(3), worker_id=STRANGER)
    reserve(cache, 3)
    reserve(cache, 1, "hit", keys(1))

    (_, *of_one), (_, *of_other), (_, *of_others) = spread(cache)

    assert of_one == [1, 4]
    assert of_other == [1, 0]
    assert of_others == [0, 0]


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_blocks_out_of_use_are_nobodys(tier: Tier) -> None:
    """Parked blocks count for no tenant, even if they held a tenant's bytes before."""
    cache = a_cache()
    cached(cache, keys(1, 2, 3, 4))
    if tier is Tier.HOST:
        on_host(cache, keys(5, 6, 7, 8))

    cache.handle(c.Resize(tier=tier, num_blocks=2), 0.0)

    assert sum(count for _, *kinds in spread(cache, tier) for count in kinds) <= 2


def test_lower_tiers_are_told_by_tenant_too() -> None:
    """A slot of the host pool counts for the tenant of its bytes; an absent tier has no columns."""
    cache = a_cache()
    on_host(cache, keys(1, 2))

    assert spread(cache, Tier.HOST)[0][CACHED] == 2
    assert set(cache.survey(0.0).columns) == {Tier.DEVICE, Tier.HOST}


@pytest.mark.parametrize(
    "digests",
    [
        pytest.param((5, 6, 7), id="told by their lower bits"),
        pytest.param((5, 5 + (1 << 16), 7), id="with the same lower bits"),
    ],
)
def test_every_tenant_is_told_apart(digests: tuple[int, ...]) -> None:
    """Tenants with similar digests are told apart, and so are unknown tenants from known ones."""
    others = (5 + (2 << 16), 9, (1 << 64) - 1)
    tenants = np.array([*digests, *digests, *others], np.uint64)
    states = np.full(len(tenants), State.READY, np.uint8)
    are_held = np.arange(len(tenants)) < len(digests)

    found = Columns(states=states, tenants=tenants, are_held=are_held).by_tenant(digests)

    assert found[:, CACHED].tolist() == [1, 1, 1, 3]
    assert found[:, HELD].tolist() == [1, 1, 1, 0]


def test_columns_are_copies() -> None:
    """Later changes do not change a survey."""
    cache = a_cache()
    before = cache.survey(0.0)
    reserve(cache, 8)

    assert before.columns[Tier.DEVICE].by_tenant((TENANT,))[0].tolist() == [0, 0, 0]
    assert before.available_blocks == 8
    assert cache.survey(0.0).available_blocks == 0


def test_leases_are_told_by_phase_and_age() -> None:
    """Ages are in order, the youngest lease first, and the phases add up to the leases."""
    cache = a_cache()
    for second, name in enumerate(("a", "b", "c")):
        reserve(cache, 1, name, now=float(second))

    found = cache.survey(10.0)

    assert found.lease_seconds.tolist() == [8.0, 9.0, 10.0]
    assert found.phases["active"] == sum(found.phases.values()) == found.census.num_leases == 3
    assert found.quarantined_seconds == found.waiting_seconds == 0.0


def test_oldest_quarantine_and_oldest_wait_are_told() -> None:
    """A quarantine counts from the lease's deadline, and a wait from the arrival of the call."""
    cache = a_cache()
    reserve(cache, 8)
    tick(cache, LEASE_SECONDS + 1)
    cache.handle(a_reserve(1, "waits", wait_ms=WAIT_MS), LEASE_SECONDS + 2)

    found = cache.survey(LEASE_SECONDS + 5)

    assert found.quarantined_seconds == 5.0
    assert found.waiting_seconds == 3.0
    assert found.phases["quarantined"] == 1


@pytest.mark.parametrize(
    ("group", "num_blocks", "tokens_unfilled"),
    [
        pytest.param(FULL, 3, 2, id="everything"),
        pytest.param(WINDOW, 3, 2, id="window"),
        pytest.param(CHUNK, 3, 2, id="chunk"),
        pytest.param(STATE, 1, 0, id="state"),
        pytest.param(GUESSING, 3, 0, id="guessing"),
        pytest.param(FIXED, 2, 0, id="fixed"),
    ],
)
def test_groups_tell_what_leases_do_not_fill(
    group: GroupShape, num_blocks: int, tokens_unfilled: int
) -> None:
    """A lease of 10 tokens has 3 blocks of 4, the last half full; blocks that are no arrays of tokens count as full."""
    cache = cache_of(group, FULL)
    reserve_tokens(cache, 10)

    first, _ = cache.survey(0.0).groups

    assert (first.num_blocks, first.tokens_unfilled) == (num_blocks, tokens_unfilled)


def test_missed_keys_that_nobody_looks_up_are_told() -> None:
    """Missed keys for which there was no room are counted."""
    cache: Any = a_cache()
    cache._state.missing.num_dropped = 3

    assert cache.survey(0.0).missed_keys_dropped == 3


def test_pins_are_part_of_the_census() -> None:
    """The survey has the census of the same instant."""
    cache = a_cache()
    cached(cache, keys(1))
    cache.handle(c.Pin(tenant_digest=TENANT, keys=keys(1)), 0.0)

    assert cache.survey(0.0).census.num_pins == 1
