"""Laws of what an earlier life left in the disk store: it is believed unless something speaks against it."""

import numpy as np
import pytest

from kvlease.ids import Epoch
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.records import TIER_COLUMNS, CacheRecords
from kvleased.core.blocks.states import State
from kvleased.core.effects import Reserved, Tier
from tests.unit.service.core.builders import (
    OTHER_TENANT,
    TENANT,
    WORKER,
    a_cache,
    evicted,
    keys,
    land,
    on_host,
    records,
    the_copy,
    woken,
)
from tests.unit.service.core.tier_builders import (
    a_patient_reserve,
    a_tiered_cache,
    adopt,
    doc,
    labels_of,
    looked_up,
    on_disk,
    turn,
)

COLUMNS = tuple(name for name, _, _ in TIER_COLUMNS)


def counts(cache: Cache) -> tuple[int, int]:
    """Return how many slots were taken over, and how many were not."""
    counters = cache.census().counters
    return counters["slots_adopted"], counters["slots_not_adopted"]


def test_found_slots_are_ready_under_their_labels() -> None:
    """Slots that the store found are findable, as slots stored in this life are."""
    cache = a_tiered_cache()

    adopt(cache, [4, 2], labels_of(doc(2), generation=7), [11, 12])

    disk = records(cache).disk
    assert looked_up(cache, doc(2)) == (0, 0, 2)
    assert disk.generation[[4, 2]].tolist() == [7, 7]
    assert disk.checksum[[4, 2]].tolist() == [11, 12]
    assert disk.position[[4, 2]].tolist() == [0, 1]
    assert disk.tenant[[4, 2]].tolist() == [TENANT] * 2
    assert counts(cache) == (2, 0)
    assert cache.check() == []


def test_generation_only_grows() -> None:
    """A slot is not taken over under an older generation than the cache has for it: a load would not find it."""
    cache = a_tiered_cache()
    records(cache).disk.generation[:2] = 5

    labels = labels_of(keys(1), generation=4) + labels_of(keys(2), generation=9)
    assert adopt(cache, [0, 1], labels) == 1

    assert records(cache).disk.generation[:2].tolist() == [5, 9]
    assert looked_up(cache, keys(1)) == (0, 0, 0)
    assert looked_up(cache, keys(2)) == (0, 0, 1)


@pytest.mark.parametrize(
    ("slots", "labels"),
    [
        pytest.param([-1], labels_of(keys(1)), id="slot below all"),
        pytest.param([16], labels_of(keys(1)), id="slot beyond all"),
        pytest.param([0], labels_of(keys(1)), id="slot in use"),
        pytest.param([1], labels_of(keys(9)), id="key that is there"),
        pytest.param([1], labels_of(keys(1), tenant=0), id="no tenant"),
        pytest.param([1], labels_of(keys(1), generation=2**62), id="impossible generation"),
    ],
)
def test_what_may_not_be_believed_is_left_free(slots: list[int], labels: bytes) -> None:
    """A label that cannot be right is not taken over, and is counted."""
    cache = a_tiered_cache()
    on_disk(cache, keys(9))

    assert adopt(cache, slots, labels) == 0

    assert counts(cache) == (1, 1)
    assert looked_up(cache, keys(1)) == (0, 0, 0)
    assert cache.check() == []


def test_what_is_found_twice_is_taken_once() -> None:
    """Of two slots with one key, and of two labels of one slot, the first is taken over."""
    cache = a_tiered_cache()
    labels = b"".join(labels_of(keys(number)) for number in (1, 1, 2, 3))

    assert adopt(cache, [0, 1, 2, 2], labels) == 2

    assert looked_up(cache, keys(1, 2)) == (0, 0, 2)
    assert counts(cache) == (2, 2)
    assert cache.check() == []


def test_key_of_a_bad_label_is_free_for_a_good_one() -> None:
    """A label that is not believed does not keep a later slot with its key from being taken over."""
    cache = a_tiered_cache()

    adopt(cache, [99, 1], labels_of(keys(1)) + labels_of(keys(1)))

    assert looked_up(cache, keys(1)) == (0, 0, 1)


def test_nothing_is_found_where_there_is_no_store() -> None:
    """A cache without a disk store takes nothing over."""
    cache = a_cache()

    adopt(cache, [0], labels_of(keys(1)))

    assert counts(cache) == (0, 1)


def test_leaves_leave_first_among_what_was_found() -> None:
    """Found chains are evicted from their ends, in whichever order their slots were found."""
    cache = a_tiered_cache(num_disk_slots=3)
    labels = [labels_of(doc(3))[start : start + 56] for start in (56, 0, 112)]
    assert len(labels_of(doc(3))) == 3 * 56

    adopt(cache, [0, 1, 2], b"".join(labels))

    assert list(cache._state.disk.order) == [2, 0, 1]


def test_tenants_of_found_slots_are_kept_apart() -> None:
    """Slots that an earlier life stored for a tenant are found by that tenant alone."""
    cache = a_tiered_cache()

    adopt(cache, [0, 1], labels_of(keys(1)) + labels_of(keys(2), tenant=OTHER_TENANT))

    assert looked_up(cache, keys(1, 2)) == (0, 0, 1)
    assert looked_up(cache, keys(2), OTHER_TENANT) == (0, 0, 1)


# Restarts of the control process --------------------------------------------------------------------------------------


def restarted(cache: Cache) -> Cache:
    """Return the cache of the next life over the same records, with no worker and a working disk store."""
    again = Cache.recovered(cache.shape, records(cache), Epoch(2), {}, 0.0)
    turn(again, Tier.DISK, on=True)
    return again


def test_disk_slots_are_findable_after_a_restart() -> None:
    """Slots that are READY and sealed are believed; those that were being filled are free under a new generation."""
    cache = a_tiered_cache(num_slots=2)
    on_disk(cache, doc(3))
    disk = records(cache).disk
    disk.state[5] = State.FILLING
    disk.checksum[1] = 77
    before = disk.generation.copy()

    again = restarted(cache)

    assert looked_up(again, doc(3)) == (0, 0, 1)
    assert looked_up(again, keys(3)) == (0, 0, 1)
    assert disk.state[[1, 5]].tolist() == [State.FREE, State.FREE]
    assert (disk.generation - before).tolist() == [0, 1, 0, 0, 0, 1] + [0] * 10
    assert again.check() == []


def test_loads_that_a_restart_cut_off_leave_nothing() -> None:
    """When a restart cuts a load off, the slots that it read stay as they were, and its target blocks are free."""
    cache = a_tiered_cache()
    on_disk(cache, doc(2))
    the_copy(cache.handle(a_patient_reserve(doc(2)), 0.0))

    again = restarted(cache)

    assert looked_up(again, doc(2)) == (0, 0, 2)
    assert again.census().device["free"] == 8
    assert again.check() == []


def test_host_pool_that_outlived_its_container_is_findable() -> None:
    """If only the host pool's columns survive, its cached slots are found, and its private ones are free."""
    cache = a_tiered_cache()
    evicted(cache, keys(1, 2), more=1)
    old = records(cache)
    (private,) = (old.host.state == State.RESERVED).nonzero()[0].tolist()
    generation = int(old.host.generation[private])
    fresh = CacheRecords.plain(cache.shape)
    for name in COLUMNS:
        getattr(fresh.host, name)[:] = getattr(old.host, name)

    again = Cache.recovered(cache.shape, fresh, Epoch(2), {}, 0.0)

    assert looked_up(again, keys(1, 2)) == (0, 2, 0)
    assert again.census().host["ready"] == 2
    assert again.census().host["free"] == 6
    assert again.census().device["free"] == 8
    assert int(fresh.host.generation[private]) > generation
    assert np.count_nonzero(fresh.rows.lease_id) == 0
    assert again.check() == []


def test_what_outlived_a_container_serves_its_next_worker() -> None:
    """A new process of the same tenant reuses what the host pool kept from before."""
    cache = a_tiered_cache()
    on_host(cache, keys(1, 2))
    fresh = CacheRecords.plain(cache.shape)
    for name in COLUMNS:
        getattr(fresh.host, name)[:] = getattr(records(cache).host, name)
    cache = Cache.recovered(cache.shape, fresh, Epoch(2), {}, 0.0)

    cache.handle(c.Attach(worker_id=WORKER, tenant_digest=TENANT), 0.0)
    outcome = cache.handle(a_patient_reserve(keys(1, 2)), 0.0)
    landed = land(cache, the_copy(outcome))
    assert woken(landed, outcome.ticket, Reserved).host_hit_tokens == 8
