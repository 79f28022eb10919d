"""Laws of what a tenant's worker may do to blocks by key, by number or by pin: it reaches its own tenant's alone."""

from collections.abc import Callable

import pytest

from kvlease.errors import PoolFullError
from kvlease.ids import BYTES_PER_KEY, PinId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import (
    Copy,
    Direction,
    Evicted,
    Found,
    Pinned,
    Released,
    Reloaded,
    Reserved,
    Tier,
)
from tests.unit.service.core.builders import (
    MATE,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    a_cache,
    a_reserve,
    answer,
    cached,
    committed,
    evict,
    evicted,
    found,
    ids,
    keys,
    land,
    on_host,
    records,
    reload,
    reserve,
    started,
    the_copy,
    woken,
)
from tests.unit.service.core.grouped import FULL, WINDOW, cache_of, cached_tokens, chain
from tests.unit.service.core.tier_builders import (
    a_patient_reserve,
    a_tiered_cache,
    label_keys,
    looked_up,
    on_disk,
    probed,
    the_copies,
    the_probe,
    turn,
)


def evict_as(cache: Cache, worker_id: WorkerId | None, packed: bytes, num_blocks: int = 0) -> int:
    """Evict blocks by keys or by number from a cache without a host pool, and return how many left."""
    command = c.Evict(worker_id=worker_id, keys=packed, num_blocks=num_blocks)
    return answer(cache.handle(command, 0.0), Evicted).num_evicted


def scrubbed(cache: Cache) -> None:
    """Zero two blocks for the other tenant, so that it can have them at once."""
    with pytest.raises(PoolFullError):
        reserve(cache, 8, worker_id=STRANGER)
    land(cache, started(cache))


def test_evict_by_key_leaves_another_tenants_blocks() -> None:
    """A stolen key evicts no block of its owner; an operator evicts everybody's."""
    cache = a_cache(num_slots=0)
    cached(cache, keys(1, 2))

    assert evict_as(cache, STRANGER, keys(1, 2)) == 0
    assert found(cache, keys(1, 2)) == (2, 0)
    assert (evict_as(cache, MATE, keys(2)), evict_as(cache, None, keys(1))) == (1, 1)
    assert cache.check() == []


def test_evict_by_number_takes_ones_own() -> None:
    """However many blocks a worker wants evicted, only its own tenant's leave."""
    cache = a_cache(num_slots=0)
    cached(cache, keys(1, 2, 3))

    alone = evict_as(cache, STRANGER, b"", 4)
    cached(cache, keys(7), worker_id=STRANGER)
    beside = evict_as(cache, STRANGER, b"", 4)

    assert (alone, beside) == (0, 1)
    assert found(cache, keys(1, 2, 3)) == (3, 0)
    assert evict_as(cache, None, b"", 4) == 3
    assert cache.check() == []


def test_reload_by_key_brings_back_ones_own() -> None:
    """A reload by key leaves another tenant's blocks below the device where they are."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    stolen = c.Reload(worker_id=STRANGER, keys=keys(1, 2))

    refused = answer(cache.handle(stolen, 0.0), Reloaded)
    outcome = cache.handle(c.Reload(worker_id=MATE, keys=keys(1, 2)), 0.0)
    land(cache, the_copy(outcome))

    assert refused.num_reloaded == 0
    assert found(cache, keys(1, 2)) == (2, 0)


def test_evicted_lease_keeps_its_own_bytes_where_anothers_slot_has_its_key() -> None:
    """A lease with stolen keys goes to slots of its own, and comes back with its own bytes."""
    cache = a_cache(num_slots=8)
    on_host(cache, keys(1, 2))
    scrubbed(cache)
    thief = committed(cache, keys(1, 2), worker_id=STRANGER)

    down = the_copy(evict(cache, thief.lease_id, worker_id=STRANGER))
    land(cache, down)

    slots = ids(down.target_ids)
    assert set(records(cache).host.tenant[slots]) == {OTHER_TENANT}
    assert cache.check() == []


def test_reload_takes_no_block_of_another_tenant_that_has_its_key() -> None:
    """A lease comes back with its own bytes, as private blocks, if another tenant has its keys on the device."""
    cache = a_cache(num_slots=8)
    lease = evicted(cache, keys(1, 2))
    cache.handle(c.Evict(keys=keys(1, 2)), 0.0)
    scrubbed(cache)
    committed(cache, keys(1, 2), worker_id=STRANGER)

    outcome = reload(cache, lease.lease_id)
    reply = woken(land(cache, the_copy(outcome)), outcome.ticket, Reloaded)

    assert reply.num_reloaded == 2
    assert set(records(cache).device.tenant[ids(reply.block_ids)]) == {TENANT}
    assert cache.check() == []


@pytest.mark.parametrize("owner_first", [True, False], ids=["owner first", "thief first"])
def test_lease_gets_no_block_of_another_tenant_whose_copy_ends_first(*, owner_first: bool) -> None:
    """Of two copies of one key, the leases of the one that ends later keep their own blocks if tenants differ."""
    cache = a_tiered_cache(16, uses_remote=True)
    on_disk(cache, keys(1, 2))
    load = cache.handle(a_patient_reserve(keys(1, 2)), 0.0)
    turn(cache, Tier.DISK, on=False)
    stolen = a_reserve(2, "stolen", keys(1, 2), worker_id=STRANGER, wait_ms=WAIT_MS)
    theft = cache.handle(stolen, 0.0)
    fetch = the_copies(probed(cache, the_probe(theft), 1, 1))[Direction.FETCH]

    both = [(load, the_copy(load), TENANT), (theft, fetch, OTHER_TENANT)]
    for outcome, copy, tenant in both if owner_first else reversed(both):
        reply = woken(land(cache, copy), outcome.ticket, Reserved)

        assert set(records(cache).device.tenant[ids(reply.block_ids)]) == {tenant}
    assert cache.check() == []


def a_theft(cache: Cache, packed: bytes) -> Copy:
    """Put blocks of keys on disk, and return a copy that brings other bytes under these keys for another tenant."""
    on_disk(cache, packed)
    turn(cache, Tier.DISK, on=False)
    num_blocks = len(packed) // BYTES_PER_KEY
    stolen = a_reserve(num_blocks, "stolen", packed, worker_id=STRANGER, wait_ms=WAIT_MS)
    probe = the_probe(cache.handle(stolen, 0.0))
    fetch = the_copies(probed(cache, probe, *[1] * num_blocks))[Direction.FETCH]
    turn(cache, Tier.DISK, on=True)
    return fetch


@pytest.mark.parametrize("is_first", [True, False], ids=["theft ends first", "theft ends last"])
def test_copy_for_stolen_keys_hides_nothing_from_their_owner(*, is_first: bool) -> None:
    """While another tenant fetches under stolen keys, their owner finds and gets its own blocks below."""
    cache = a_tiered_cache(16, uses_remote=True)
    theft = a_theft(cache, keys(1, 2))

    seen = looked_up(cache, keys(1, 2)), looked_up(cache, keys(1, 2), OTHER_TENANT)
    outcome = cache.handle(a_patient_reserve(keys(1, 2)), 0.0)
    load = the_copy(outcome)
    if is_first:
        land(cache, theft)
    reply = woken(land(cache, load), outcome.ticket, Reserved)
    if not is_first:
        land(cache, theft)

    assert seen == ((0, 0, 2), (2, 0, 0))
    assert reply.disk_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert set(records(cache).device.tenant[ids(reply.block_ids)]) == {TENANT}
    assert cache.check() == []


def test_reload_by_key_brings_ones_own_beside_a_copy_for_stolen_keys() -> None:
    """A reload by key brings its tenant's blocks also while another tenant fetches under these keys."""
    cache = a_tiered_cache(16, uses_remote=True)
    theft = a_theft(cache, keys(1, 2))

    outcome = cache.handle(c.Reload(worker_id=MATE, keys=keys(1, 2)), 0.0)
    reply = woken(land(cache, the_copy(outcome)), outcome.ticket, Reloaded)
    land(cache, theft)

    assert reply.num_reloaded == 2
    assert found(cache, keys(1, 2)) == (2, 0)
    assert cache.check() == []


def test_slots_under_stolen_keys_hide_nothing_from_their_owner() -> None:
    """What another tenant has in the host pool under stolen keys hides nothing that their owner has on disk."""
    cache = a_tiered_cache(16)
    on_host(cache, keys(1, 2), worker_id=STRANGER)
    on_disk(cache, keys(1, 2))

    seen = looked_up(cache, keys(1, 2)), looked_up(cache, keys(1, 2), OTHER_TENANT)
    outcome = cache.handle(a_patient_reserve(keys(1, 2)), 0.0)
    reply = woken(land(cache, the_copy(outcome)), outcome.ticket, Reserved)

    assert seen == ((0, 0, 2), (0, 2, 0))
    assert reply.disk_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert set(records(cache).device.tenant[ids(reply.block_ids)]) == {TENANT}
    assert cache.check() == []


def test_reload_by_key_brings_ones_own_from_below_a_slot_under_stolen_keys() -> None:
    """A reload by key brings its tenant's blocks from disk also if a thief has these keys in the host pool."""
    cache = a_tiered_cache(16)
    on_host(cache, keys(1, 2), worker_id=STRANGER)
    on_disk(cache, keys(1, 2))

    outcome = cache.handle(c.Reload(worker_id=MATE, keys=keys(1, 2)), 0.0)
    reply = woken(land(cache, the_copy(outcome)), outcome.ticket, Reloaded)

    assert reply.num_reloaded == 2
    assert found(cache, keys(1, 2)) == (2, 0)


def keys_asked_for(cache: Cache, packed: bytes) -> bytes:
    """Return the keys for which the remote store is asked when a thief reserves with stolen keys."""
    command = c.Reserve(
        worker_id=STRANGER, request_id="stolen", keys=packed, num_tokens=12, wait_ms=WAIT_MS
    )
    return label_keys(the_probe(cache.handle(command, 0.0)).labels)


@pytest.mark.parametrize("put", [cached, on_host, on_disk])
def test_remote_store_is_asked_alike_whether_another_tenant_has_the_keys_or_nobody(
    put: Callable[[Cache, bytes], object],
) -> None:
    """Whether a call asks the remote store, and for what, tells a thief nothing of what the owner has here."""
    here, nowhere = (a_tiered_cache(uses_remote=True) for _ in range(2))
    put(here, keys(1, 2, 3))

    asked = [keys_asked_for(cache, keys(1, 2, 3)) for cache in (here, nowhere)]

    assert asked == [keys(1, 2, 3)] * 2


def test_groups_ask_the_remote_store_alike_whether_another_tenant_has_the_keys_or_nobody() -> None:
    """The same holds for a cache with several groups."""
    here, nowhere = (cache_of(FULL, WINDOW, uses_remote=True) for _ in range(2))
    cached_tokens(here, 12)

    asked = [keys_asked_for(cache, chain(12)) for cache in (here, nowhere)]

    assert asked[0] == asked[1] != b""


def test_lookup_with_stolen_keys_finds_nothing() -> None:
    """A key that is another tenant's is a miss."""
    cache = a_cache()
    cached(cache, keys(1, 2))
    command = c.Lookup(keys=keys(1, 2), tenant_digest=OTHER_TENANT)

    assert answer(cache.handle(command, 0.0), Found).hit_tokens == 0


def test_pins_of_others_are_neither_seen_nor_ended() -> None:
    """To another tenant, a pin is answered as one that has ended."""
    cache = a_cache()
    cached(cache, keys(1, 2))
    pin_id = answer(cache.handle(c.Pin(keys=keys(1), tenant_digest=TENANT), 0.0), Pinned).pin_id

    by_other = _unpin(cache, pin_id, OTHER_TENANT)
    seen = [len(cache.list_pins(0, 9, one)) for one in (OTHER_TENANT, TENANT, None)]

    assert (by_other, seen) == (False, [0, 1, 1])
    assert _unpin(cache, pin_id, TENANT)
    assert not _unpin(cache, pin_id, None)


def test_operators_pin_of_mixed_blocks_is_the_operators() -> None:
    """A tenant cannot end a pin that holds another tenant's blocks beside its own."""
    cache = a_cache()
    cached(cache, keys(1))
    cached(cache, keys(7), worker_id=STRANGER)
    pin_id = answer(cache.handle(c.Pin(keys=keys(1, 7)), 0.0), Pinned).pin_id

    assert not _unpin(cache, pin_id, TENANT)
    assert _unpin(cache, pin_id, None)


def _unpin(cache: Cache, pin_id: PinId, tenant: int | None) -> bool:
    command = c.Unpin(pin_id=pin_id, tenant_digest=tenant)
    return answer(cache.handle(command, 0.0), Released).released
