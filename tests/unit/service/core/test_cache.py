"""Laws of the cache as a whole: one way in, one way out, and a snapshot that adds up."""

import pytest

from kvlease.errors import KVLeaseError, UnknownWorkerError
from kvlease.ids import EPOCH_SHIFT, WorkerId
from kvleased.core import Cache
from kvleased.core import cache as cache_module
from kvleased.core import commands as c
from kvleased.core.effects import Notice
from kvleased.core.state import CacheState
from tests.unit.service.core.builders import (
    EPOCH,
    LEASE_SECONDS,
    MATE,
    OTHER_TENANT,
    SHAPE,
    STRANGER,
    TENANT,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    cached,
    committed,
    evict,
    evicted,
    fail,
    keys,
    land,
    lose,
    on_host,
    records,
    release,
    reload_keys,
    reserve,
    started,
    the_copy,
    tick,
)


def kinds(effects: list[object]) -> list[str]:
    """Return what watchers are told."""
    return [effect.kind for effect in effects if isinstance(effect, Notice)]


def test_repr_shows_life() -> None:
    """A cache shows its leases, its queue and its device pool."""
    cache = a_cache(2)
    reserve(cache, 2)
    cache.handle(a_reserve(1, "next", wait_ms=WAIT_MS), 0.0)

    assert repr(cache) == "<Cache 1 leases, 1 waiting, <Pool 2 reserved>>"


def test_lease_lives_until_it_is_released() -> None:
    """The cache knows a lease from its grant to its release."""
    cache = a_cache(2)
    lease_id = reserve(cache, 2).lease_id

    before = cache.has_lease(lease_id)
    release(cache, lease_id)

    assert (before, cache.has_lease(lease_id)) == (True, False)


def test_cache_tells_its_numbers_and_tenants() -> None:
    """The cache returns the shape and the workers' tenants that it was given."""
    cache = a_cache(4)

    assert cache.shape.num_blocks == 4
    assert (cache.tenant_of(WORKER), cache.tenant_of(STRANGER)) == (TENANT, OTHER_TENANT)
    with pytest.raises(UnknownWorkerError):
        cache.tenant_of(WorkerId(99))


def test_every_command_is_understood() -> None:
    """There is a verb for each kind of command, and no other verb."""
    assert set(cache_module._VERBS) == set(c.Command.__args__)


def test_ids_are_issued_once() -> None:
    """One counter, which starts at the epoch, numbers all leases, copies, tickets and pins."""
    state = CacheState.fresh(SHAPE, EPOCH)

    assert [state.next_id(), state.next_id()] == [
        (EPOCH << EPOCH_SHIFT) + 1,
        (EPOCH << EPOCH_SHIFT) + 2,
    ]


def test_effects_are_taken_once() -> None:
    """The effects of a refused command can be taken only once."""
    cache = a_cache(1, num_slots=0)
    cached(cache, keys(1))

    with pytest.raises(KVLeaseError):
        reserve(cache, 1, worker_id=STRANGER)

    started(cache)
    assert cache.take_effects() == []


def test_watchers_are_told_of_a_lease_s_life() -> None:
    """Watchers get one notice for each step of a lease's life, with the lease and its worker."""
    cache = a_cache()
    effects = list(cache.handle(a_reserve(1), 0.0).effects)
    lease = reserve(cache, 1)
    effects += release(cache, lease.lease_id).effects

    assert effects == [
        Notice(kind="lease_granted", worker_id=WORKER, lease_id=lease.lease_id, num_blocks=1),
        Notice(kind="lease_released", worker_id=WORKER, lease_id=lease.lease_id),
    ]


# Census ---------------------------------------------------------------------------------------------------------------


def a_census_of_everything() -> Cache:
    """Return a cache with blocks and slots in as many states as there can be."""
    cache = a_cache(24, 16)
    on_host(cache, keys(40, 41, 42))
    land(cache, the_copy(reload_keys(cache, keys(40))), failed=(0,))
    lose(cache, the_copy(reload_keys(cache, keys(41))))
    reload_keys(cache, keys(42))
    evicted(cache, keys(1), more=1)
    committed(cache, keys(2), "held", more=1)
    cached(cache, keys(3, 4))
    evict(cache, reserve(cache, 1, "evicting", worker_id=MATE).lease_id, worker_id=MATE)
    cache.handle(c.Pin(keys=keys(3)), 0.0)
    return cache


@pytest.mark.parametrize("tier", ["device", "host"])
def test_census_adds_up(tier: str) -> None:
    """The blocks in all states of a tier add up to its blocks; held ones are among the ready ones."""
    cache = a_census_of_everything()

    counts = dict(getattr(cache.census(), tier))
    held = counts.pop("ready_held")

    assert sum(counts.values()) == len(getattr(records(cache), tier).state)
    assert 0 < held <= counts["ready"]
    assert cache.check() == []


def test_census_counts_everything() -> None:
    """The census counts leases, workers, pins, copies and waiting calls."""
    cache = a_census_of_everything()
    cache.handle(a_reserve(24, "waits", wait_ms=WAIT_MS), 0.0)

    census = cache.census()

    assert (census.num_leases, census.num_workers, census.num_waiting) == (3, 3, 1)
    assert (census.num_pins, census.num_copies) == (1, 3)
    assert {name for name, count in census.device.items() if count} == {
        "free",
        "reserved",
        "filling",
        "ready",
        "quarantined",
        "ready_held",
    }


def test_census_is_a_snapshot() -> None:
    """What happens later does not change a census that was taken."""
    cache = a_cache()
    before = cache.census()

    reserve(cache, 2)

    assert before.device["free"] == 8
    assert "leases_granted" not in before.counters


def test_counters_tell_hits_from_misses() -> None:
    """Each token of a granted lease counts as found on the device, as found in the host pool, or as computed."""
    cache = a_cache()
    on_host(cache, keys(2))
    cached(cache, keys(1))
    outcome = cache.handle(a_reserve(4, "r", keys(1, 2), wait_ms=WAIT_MS), 0.0)

    land(cache, the_copy(outcome))

    counters = cache.census().counters
    assert counters["prefix_tokens_device"] == 4
    assert counters["prefix_tokens_host"] == 4
    # The two leases that committed the prefix have computed four tokens each.
    assert counters["prefix_tokens_computed"] == 8 + 8


def test_counters_tell_of_moves() -> None:
    """Every block that moves counts once, in whichever direction and for whatever reason."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=1)
    land(cache, the_copy(cache.handle(c.Reload(worker_id=WORKER, lease_id=lease.lease_id), 0.0)))
    on_host(cache, keys(2, 3))
    land(cache, the_copy(reload_keys(cache, keys(2))))

    counters = cache.census().counters

    assert (counters["offloads"], counters["reloads"]) == (4, 3)
    assert counters["leases_granted"] == 2


def test_watchers_are_told_of_trouble() -> None:
    """Watchers are told of expired leases and failed copies."""
    cache = a_cache()
    on_host(cache, keys(1))
    failed = fail(cache, the_copy(reload_keys(cache, keys(1))))
    reserve(cache)
    expired = tick(cache, LEASE_SECONDS)

    assert kinds([*failed.effects, *expired.effects]) == ["copy_failed", "lease_expired"]
