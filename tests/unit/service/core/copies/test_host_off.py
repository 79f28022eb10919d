"""Laws of a host pool whose mover hangs: no call waits for its copies, and its blocks are found again afterwards."""

from kvlease.errors import CopyFailedError
from kvleased.core.effects import Direction, Evicted, Reserved, Tier
from kvleased.core.shape import WritePolicy
from tests.unit.service.core.builders import (
    STRANGER,
    WAIT_MS,
    a_cache,
    a_full_cache,
    a_reserve,
    answer,
    cached,
    commit,
    copies,
    evict,
    fail,
    found,
    ids,
    keys,
    land,
    on_host,
    release,
    reload_keys,
    reserve,
    the_copy,
    woken,
)
from tests.unit.service.core.tier_builders import turn


def test_prefix_of_a_host_pool_that_is_off_is_computed() -> None:
    """A call that may wait is granted at once without its prefix; when the mover answers again, the prefix is found."""
    cache = a_cache()
    on_host(cache, keys(1, 2))

    turn(cache, Tier.HOST, on=False)
    missed = cache.handle(a_reserve(2, "r", keys(1, 2), wait_ms=WAIT_MS), 0.0)
    assert found(cache, keys(1, 2)) == (0, 0)
    release(cache, answer(missed, Reserved).lease_id)
    turn(cache, Tier.HOST, on=True)

    assert answer(missed, Reserved).device_hit_tokens == 0
    assert found(cache, keys(1, 2)) == (0, 2)
    assert cache.check() == []


def test_room_is_made_without_copies_to_a_host_pool_that_is_off() -> None:
    """Blocks that would be written back leave at once, for nobody knows when the copy would end."""
    cache = a_full_cache(2)

    turn(cache, Tier.HOST, on=False)
    outcome = cache.handle(a_reserve(1, wait_ms=WAIT_MS), 0.0)

    assert answer(outcome, Reserved).block_ids
    assert not copies(outcome)
    assert cache.check() == []


def test_call_that_waits_for_a_write_back_is_served_when_the_host_pool_goes_off() -> None:
    """The waiting call gets room without the copy, which goes on and takes nothing from anybody."""
    cache = a_full_cache(4)
    waiting = cache.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0)

    turned = turn(cache, Tier.HOST, on=False)

    woken(turned, waiting.ticket, Reserved)
    land(cache, the_copy(waiting))
    assert cache.check() == []


def test_nothing_is_cleaned_towards_a_host_pool_that_is_off() -> None:
    """Copies in the background wait until the host pool's mover answers."""
    cache = a_cache(write_policy=WritePolicy.WRITE_THROUGH)
    turn(cache, Tier.HOST, on=False)
    lease = reserve(cache)
    commit(cache, lease.lease_id, keys(1))

    assert not cache.take_effects()
    assert the_copy(turn(cache, Tier.HOST, on=True)).source_ids == lease.block_ids


def test_lease_that_is_called_off_on_its_way_down_stays() -> None:
    """A copy that the mover never got has failed: the lease stays on the device, and can be evicted later."""
    cache = a_cache()
    lease = reserve(cache)
    outcome = evict(cache, lease.lease_id)

    turn(cache, Tier.HOST, on=False)
    woken(fail(cache, the_copy(outcome)), outcome.ticket, CopyFailedError)
    turn(cache, Tier.HOST, on=True)
    again = evict(cache, lease.lease_id)

    woken(land(cache, the_copy(again)), again.ticket, Evicted)
    assert cache.check() == []


def test_keys_of_a_host_pool_that_is_off_are_not_brought_back() -> None:
    """A reload of such keys is told that nothing came, and takes no block of the device."""
    cache = a_cache()
    on_host(cache, keys(1))

    turn(cache, Tier.HOST, on=False)

    assert not copies(reload_keys(cache, keys(1)))
    assert cache.census().device["free"] == 8


def test_blocks_that_need_no_scrub_leave_while_the_mover_hangs_that_would_scrub() -> None:
    """A call whose free blocks would have to be scrubbed gets its own cached blocks at once instead."""
    cache = a_cache(4)
    strangers = reserve(cache, 2, "strangers", worker_id=STRANGER)
    cached(cache, keys(1, 2))
    release(cache, strangers.lease_id, worker_id=STRANGER)
    turn(cache, Tier.HOST, on=False)

    outcome = cache.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0)

    assert ids(answer(outcome, Reserved).block_ids)
    assert the_copy(outcome).direction is Direction.SCRUB
    assert cache.check() == []
