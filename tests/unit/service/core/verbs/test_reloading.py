"""Laws of reload, of leases and of cached blocks: what comes back is what went down."""

from collections.abc import Callable

import pytest

from kvlease.errors import (
    CopyFailedError,
    DeadlineError,
    NeverFitsError,
    PoolFullError,
    WrongStateError,
)
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Direction, Evicted, Outcome, Reloaded, Tier
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    OTHER_TENANT,
    STRANGER,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reload,
    an_extend,
    answer,
    cached,
    copies,
    evict,
    evicted,
    fail,
    found,
    ids,
    keys,
    land,
    lose,
    on_host,
    records,
    release,
    reload,
    reload_keys,
    reloaded,
    reserve,
    the_copy,
    tick,
    wakes,
    woken,
)
from tests.unit.service.core.tier_builders import (
    a_tiered_cache,
    doc,
    label_keys,
    looked_up,
    on_disk,
    the_copies,
    turn,
)

# Reload a lease -------------------------------------------------------------------------------------------------------


def test_reloaded_lease_has_its_bytes_in_token_order() -> None:
    """A reloaded lease has blocks in the order of its slots."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2), more=1)
    outcome = reload(cache, lease.lease_id)

    reply = reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert ids(reply.block_ids) == ids(the_copy(outcome).target_ids)
    assert (reply.num_reloaded, reply.num_tokens, reply.row) == (
        3,
        3 * TOKENS_PER_BLOCK,
        lease.row,
    )
    assert found(cache, keys(1, 2)) == (2, 0)
    assert cache.census().host["free"] == 6
    assert cache.check() == []


def test_reload_uses_what_is_on_the_device() -> None:
    """Blocks that came back meanwhile are shared, not copied again."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2))
    land(cache, the_copy(reload_keys(cache, keys(1))))

    outcome = reload(cache, lease.lease_id)
    reply = reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert (reply.num_reloaded, len(ids(reply.block_ids))) == (1, 2)
    assert cache.check() == []


def test_reload_of_what_is_all_on_the_device_is_answered_at_once() -> None:
    """A reload that needs no copy is answered at once."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2))
    land(cache, the_copy(reload_keys(cache, keys(1, 2))))

    reply = answer(reload(cache, lease.lease_id), Reloaded)

    assert (reply.num_reloaded, len(ids(reply.block_ids))) == (0, 2)
    assert cache.check() == []


def test_reload_joins_copies_in_flight() -> None:
    """A lease is back once its own copy, and those that it joined, are done."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2))
    prefetch = reload_keys(cache, keys(1))
    outcome = reload(cache, lease.lease_id)

    own = land(cache, the_copy(outcome))
    joined = land(cache, the_copy(prefetch))

    assert outcome.ticket not in wakes(own)
    assert len(ids(reloaded(joined, outcome.ticket).block_ids)) == 2
    assert cache.check() == []


def test_reload_of_a_lease_on_the_device_names_its_blocks() -> None:
    """A worker that does not know whether its lease was evicted may ask for a reload."""
    cache = a_cache()
    lease = reserve(cache, 2)

    reply = answer(reload(cache, lease.lease_id), Reloaded)

    assert (reply.block_ids, reply.num_reloaded) == (lease.block_ids, 0)


def test_later_reload_waits_in_the_place_of_the_first() -> None:
    """A repeated reload starts no second copy; the first caller is told that it was replaced."""
    cache = a_cache()
    lease = evicted(cache, keys(1))
    first = reload(cache, lease.lease_id)

    second = reload(cache, lease.lease_id)
    landed = land(cache, the_copy(first))

    assert copies(second) == []
    woken(second, first.ticket, WrongStateError)
    reloaded(landed, second.ticket)


def test_reload_while_evicting_waits_until_its_lease_is_down() -> None:
    """A reload waits until the lease is down, and brings back every byte; the caller of the evict is told."""
    cache = a_cache()
    lease = reserve(cache, 2)
    down = evict(cache, lease.lease_id)

    back = reload(cache, lease.lease_id)
    up = land(cache, the_copy(down))
    landed = land(cache, the_copy(up))

    woken(back, down.ticket, WrongStateError)
    assert wakes(up) == []
    assert reloaded(landed, back.ticket).num_reloaded == 2
    assert cache.check() == []


def test_reload_of_a_lease_that_did_not_get_down_finds_it_on_the_device() -> None:
    """If the copy down fails, nothing has moved, and the reload finds the lease on the device."""
    cache = a_cache()
    lease = reserve(cache, 2)
    down = evict(cache, lease.lease_id)
    back = reload(cache, lease.lease_id)

    failed = fail(cache, the_copy(down))

    reply = reloaded(failed, back.ticket)
    assert (reply.block_ids, reply.num_reloaded) == (lease.block_ids, 0)
    assert cache.check() == []


def test_reload_that_gave_up_while_evicting_moves_nothing() -> None:
    """If the reload no longer waits, the lease stays in the host pool."""
    cache = a_cache()
    lease = reserve(cache, 1)
    down = evict(cache, lease.lease_id)
    back = reload(cache, lease.lease_id)

    woken(tick(cache, WAIT_MS / 1000), back.ticket, DeadlineError)

    landed = land(cache, the_copy(down))
    assert (wakes(landed), copies(landed)) == ([], [])


def test_evict_after_a_reload_that_waits_has_the_last_word() -> None:
    """A later evict replaces a waiting reload, and decides where the lease is."""
    cache = a_cache()
    lease = reserve(cache, 1)
    down = evict(cache, lease.lease_id)
    back = reload(cache, lease.lease_id)

    again = evict(cache, lease.lease_id)

    woken(again, back.ticket, WrongStateError)
    woken(land(cache, the_copy(down)), again.ticket, Evicted)


def test_lease_that_is_back_already_answers_the_second_of_two_waiting_reloads() -> None:
    """Two calls that waited for their turn both learn which blocks the lease has."""
    cache = a_cache(4)
    lease = evicted(cache, keys(1))
    land(cache, the_copy(reload_keys(cache, keys(1))))
    reserve(cache, 2, "holder")
    ahead = reserve(cache, 1, "ahead", worker_id=MATE)
    cache.handle(an_extend(ahead.lease_id, 3, worker_id=MATE, wait_ms=WAIT_MS), 0.0)
    first, second = reload(cache, lease.lease_id), reload(cache, lease.lease_id)

    ended = cache.handle(c.Detach(worker_id=MATE), 0.0)

    replies = [reloaded(ended, outcome.ticket) for outcome in (first, second)]
    assert replies[0].block_ids == replies[1].block_ids


def test_second_of_two_waiting_reloads_is_told_that_its_lease_is_on_its_way() -> None:
    """Of two waiting reloads, the first learns of the end of the copy, and the second that the lease is on its way."""
    cache = a_cache(2)
    lease = evicted(cache, keys(1))
    holder = reserve(cache, 2, "holder")
    first, second = reload(cache, lease.lease_id), reload(cache, lease.lease_id)

    ended = release(cache, holder.lease_id)

    woken(ended, second.ticket, WrongStateError)
    assert reloaded(land(cache, the_copy(ended)), first.ticket).num_reloaded == 1


def test_reload_waits_for_room() -> None:
    """A lease comes back once there are blocks for it, and not before."""
    cache = a_cache(4)
    lease = evicted(cache, keys(1, 2))
    other = reserve(cache, 3, "other")
    outcome = reload(cache, lease.lease_id)

    released = release(cache, other.lease_id)
    landed = land(cache, the_copy(released))

    assert copies(outcome) == []
    reloaded(landed, outcome.ticket)


def test_impatient_reload_without_room_is_refused() -> None:
    """A reload that may not wait for room is told what it lacks."""
    cache = a_cache(4)
    lease = evicted(cache, keys(1, 2))
    reserve(cache, 3, "other")

    with pytest.raises(PoolFullError) as refusal:
        cache.handle(a_reload(lease.lease_id, wait_ms=0), 0.0)

    assert (refusal.value.need, refusal.value.available) == (2, 1)


def test_reload_writes_back_what_it_pushes_out() -> None:
    """Blocks that leave for a reloaded lease are written back first, so nothing cached is lost."""
    cache = a_cache(2)
    lease = evicted(cache, keys(1, 2))
    cached(cache, keys(3, 4))
    outcome = reload(cache, lease.lease_id)

    written = land(cache, the_copy(outcome))
    landed = land(cache, the_copy(written))

    reloaded(landed, outcome.ticket)
    assert found(cache, keys(3, 4)) == (0, 2)
    assert cache.check() == []


def test_reload_does_not_evict_its_own_blocks() -> None:
    """Cached blocks that the lease will share do not count as room for its other blocks."""
    cache = a_cache(2)
    lease = evicted(cache, keys(1, 2))
    land(cache, the_copy(reload_keys(cache, keys(1))))
    reserve(cache, 1, "other")

    with pytest.raises(PoolFullError):
        cache.handle(a_reload(lease.lease_id, wait_ms=0), 0.0)

    assert found(cache, keys(1)) == (1, 0)


def test_reload_renews_its_lease() -> None:
    """A reloaded lease has its whole lease time again."""
    cache = a_cache()
    lease = evicted(cache, keys(1))
    copy = the_copy(cache.handle(a_reload(lease.lease_id), 20.0))

    land(cache, copy, now=25.0)
    tick(cache, 25.0 + LEASE_SECONDS - 1)

    assert "leases_expired" not in cache.census().counters


# Reload cached blocks -------------------------------------------------------------------------------------------------


def test_named_blocks_come_back_for_whoever_asks_next() -> None:
    """Blocks of named keys come from the host pool to the device, where nobody holds them."""
    cache = a_cache()
    on_host(cache, keys(1, 2))

    outcome = reload_keys(cache, keys(1, 2, 1))
    reply = reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert reply.num_reloaded == 2
    assert found(cache, keys(1, 2)) == (2, 0)
    assert cache.census().device["ready_held"] == 0


@pytest.mark.parametrize("where", ["nowhere", "on the device", "on their way"])
def test_blocks_that_need_no_copy_are_not_copied(where: str) -> None:
    """A reload of keys that are unknown, on the device or on their way is answered at once."""
    cache = a_cache()
    if where == "on the device":
        cached(cache, keys(1))
    if where == "on their way":
        on_host(cache, keys(1))
        reload_keys(cache, keys(1))

    reply = answer(reload_keys(cache, keys(1)), Reloaded)

    assert reply == Reloaded(block_ids=b"", num_reloaded=0, num_tokens=0, row=0)


def test_blocks_without_room_are_not_brought_back() -> None:
    """No lease leaves to make room for cached blocks; the refusal has all numbers."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2))
    reserve(cache, 3)

    with pytest.raises(PoolFullError) as refusal:
        reload_keys(cache, keys(1, 2))

    assert (refusal.value.resource, refusal.value.need) == ("device_blocks", 2)
    assert (refusal.value.available, refusal.value.limit) == (1, 4)
    assert refusal.value.retry_after_ms == 50


def test_more_blocks_than_the_device_has_never_come_back() -> None:
    """A reload of more blocks than the device has is refused for good."""
    cache = a_cache(2)
    on_host(cache, keys(1, 2))
    on_host(cache, keys(3))

    with pytest.raises(NeverFitsError) as refusal:
        reload_keys(cache, keys(1, 2, 3))

    assert (refusal.value.need, refusal.value.limit) == (3, 2)


def test_cached_blocks_make_room_for_named_ones() -> None:
    """Cached blocks that nobody holds make room for the blocks of named keys."""
    cache = a_cache(2)
    on_host(cache, keys(1, 2))
    cached(cache, keys(3, 4))

    outcome = reload_keys(cache, keys(1, 2))
    reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert found(cache, keys(1, 2)) == (2, 0)


def test_blocks_of_several_tenants_come_back_one_tenant_a_call() -> None:
    """A reload brings back blocks of one tenant, so a failed copy leaves no bytes under another tenant's name."""
    cache = a_cache(3)
    on_host(cache, keys(1, 2))
    on_host(cache, keys(8), worker_id=STRANGER)
    tenants = records(cache).device.tenant.copy()

    fail(cache, the_copy(cache.handle(c.Reload(keys=keys(1, 8)), 0.0)))

    assert records(cache).device.tenant.tolist() == tenants.tolist()


def test_named_blocks_come_back_from_host_and_disk_together() -> None:
    """Each block comes from the highest tier that has it, and the call is answered once all have come."""
    cache = a_tiered_cache(16)
    on_host(cache, keys(2))
    on_disk(cache, doc(3))

    outcome = reload_keys(cache, doc(4))
    up = the_copies(outcome)
    assert len(ids(up[Direction.RELOAD].source_ids)) == 1
    assert ids(up[Direction.LOAD].source_ids) == [0, 2]
    assert label_keys(up[Direction.LOAD].labels) == keys(1, 3)
    landed = land(cache, up[Direction.LOAD])
    assert wakes(landed) == []
    reply = reloaded(land(cache, up[Direction.RELOAD]), outcome.ticket)
    land(cache, the_copy(landed))

    assert reply.num_reloaded == 3
    assert looked_up(cache, doc(3)) == (3, 0, 0)
    assert cache.census().device["ready_held"] == 0
    counters = cache.census().counters
    assert (counters["reloads"], counters["disk_loads"]) == (1, 2)
    assert cache.check() == []


@pytest.mark.parametrize("first", [Direction.RELOAD, Direction.LOAD])
@pytest.mark.parametrize("end", [fail, lose, lambda cache, copy: land(cache, copy, failed=(0,))])
def test_call_for_blocks_of_two_tiers_is_told_of_a_failure_once(
    first: Direction, end: Callable[[Cache, Copy], Outcome]
) -> None:
    """The call is told of the first failure; the copy from the other tier goes on without it."""
    cache = a_tiered_cache()
    on_host(cache, keys(2))
    on_disk(cache, keys(1))
    outcome = reload_keys(cache, doc(2))
    up = the_copies(outcome)

    woken(end(cache, up.pop(first)), outcome.ticket, CopyFailedError)
    (other,) = up.values()

    assert wakes(land(cache, other)) == []
    assert sum(looked_up(cache, keys(2 if first is Direction.LOAD else 1))) == 1
    assert cache.check() == []


def test_call_for_blocks_of_two_tiers_ends_once_at_its_deadline() -> None:
    """A call for two tiers is answered once, at its deadline; blocks that come later are cached for nobody."""
    cache = a_tiered_cache()
    on_host(cache, keys(2))
    on_disk(cache, keys(1))
    outcome = cache.handle(c.Reload(worker_id=WORKER, keys=doc(2), wait_ms=1000), 0.0)

    landed = cache.handle(c.Tick(), 2.0)

    assert len(wakes(landed)) == 1
    woken(landed, outcome.ticket, DeadlineError)
    for copy in the_copies(outcome).values():
        assert wakes(land(cache, copy)) == []
    assert looked_up(cache, doc(2)) == (2, 0, 0)
    assert cache.check() == []


def test_nothing_is_brought_back_from_a_disk_that_is_off() -> None:
    """Nothing is reloaded from a store that is off."""
    cache = a_tiered_cache()
    on_disk(cache, doc(2))
    turn(cache, Tier.DISK, on=False)

    assert answer(reload_keys(cache, doc(2)), Reloaded).num_reloaded == 0


def test_blocks_on_disk_of_several_tenants_come_back_one_tenant_a_call() -> None:
    """The first block found, in whichever tier, decides whose blocks come back."""
    cache = a_tiered_cache()
    on_disk(cache, keys(1), OTHER_TENANT)
    on_host(cache, keys(2))
    on_disk(cache, keys(3), OTHER_TENANT, first_slot=1)

    copy = the_copy(cache.handle(c.Reload(keys=doc(3)), 0.0))

    assert (copy.direction, ids(copy.source_ids)) == (Direction.LOAD, [0, 1])
    assert cache.check() == []


def test_slot_that_two_copies_find_damaged_is_retired_once() -> None:
    """A copy of a cancelled reload may read a slot that a later copy finds damaged; the slot is retired once."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=1)
    prefetch = the_copy(reload_keys(cache, keys(1)))
    called_off = the_copy(reload(cache, lease.lease_id))
    lose(cache, prefetch)
    again = the_copy(reload(cache, lease.lease_id))

    land(cache, again, failed=(1,))
    land(cache, called_off, failed=(0,))

    assert cache.census().host["bad"] == 1
    assert cache.check() == []
