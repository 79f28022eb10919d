"""Laws of what an operator changes while a cache runs: drains, cached blocks, pool sizes and tenants' limits."""

from dataclasses import replace

import numpy as np
import pytest

from kvlease.errors import DrainingError, NeverFitsError, PoolFullError, WrongStateError
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.blocks.states import State
from kvleased.core.effects import (
    Cleared,
    Drained,
    Extended,
    Outcome,
    Pinned,
    Reserved,
    Resized,
    Tier,
)
from kvleased.core.limits import UNLIMITED, TenantLimits
from tests.unit.service.core.builders import (
    EPOCH,
    MATE,
    OTHER_TENANT,
    SHAPE,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_full_cache,
    a_reserve,
    an_extend,
    answer,
    cached,
    copies,
    evict,
    evicted,
    fail,
    ids,
    keys,
    land,
    leases_of,
    on_host,
    records,
    release,
    reload,
    reserve,
    the_copy,
    woken,
)
from tests.unit.service.core.tier_builders import (
    a_patient_reserve,
    a_remote_cache,
    a_tiered_cache,
    doc,
    on_disk,
    probed,
    the_probe,
)


def limit(cache: Cache, **tenant: float) -> None:
    """Set the tenant's limits."""
    limits = TenantLimits(**tenant)  # type: ignore[arg-type]  # whole numbers where they must be
    cache.handle(c.Limit(tenants={TENANT: limits}, tenant_default=UNLIMITED), 0.0)


def resize(cache: Cache, num_blocks: int, tier: Tier = Tier.DEVICE) -> Resized:
    """Resize a pool without a wait."""
    return answer(cache.handle(c.Resize(tier=tier, num_blocks=num_blocks), 0.0), Resized)


def finish(cache: Cache, outcome: Outcome) -> None:
    """Land the copy that an outcome starts."""
    land(cache, the_copy(outcome))


def clear(cache: Cache, tenant: int | None = None) -> Cleared:
    """Clear cached blocks."""
    return answer(cache.handle(c.Clear(tenant_digest=tenant), 0.0), Cleared)


# Drains ---------------------------------------------------------------------------------------------------------------


def test_drain_tells_how_many_leases_are_left_until_it_is_undone() -> None:
    """A repeated drain tells how many leases are left; once the drain is undone, leases are granted again."""
    cache = a_cache()
    lease = reserve(cache, 1)

    first = answer(cache.handle(c.Drain(), 0.0), Drained)
    with pytest.raises(DrainingError, match="1 lease is left"):
        cache.handle(a_reserve(1, "late"), 0.0)
    cache.handle(c.Release(worker_id=WORKER, lease_id=lease.lease_id), 0.0)
    second = answer(cache.handle(c.Drain(), 0.0), Drained)

    assert (first.num_leases, second.num_leases, cache.is_draining) == (1, 0, True)
    cache.handle(c.Undrain(), 0.0)
    assert not cache.is_draining
    reserve(cache, 1, "again")


@pytest.mark.parametrize("is_daemon", [False, True])
def test_refusal_says_whose_drain_it_is_and_when_to_come_again(*, is_daemon: bool) -> None:
    """A refusal tells a drain of the daemon from one of a cache, even if both are drained or one drain has ended."""
    cache = a_cache()
    cache.handle(c.Drain(is_daemon=not is_daemon), 0.0)
    cache.handle(c.Drain(is_daemon=is_daemon), 0.0)
    whose = "daemon" if is_daemon else "cache"

    with pytest.raises(DrainingError, match=f"the {whose} is being drained") as caught:
        cache.handle(a_reserve(1, "late"), 0.0)

    assert (caught.value.resource, caught.value.retry_after_ms) == (whose, 5_000)


def test_call_whose_load_fails_while_the_cache_drains_is_told_so() -> None:
    """It has no lease any more, so it is a new request like others; it must not wait for room that it cannot get."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)
    cache.handle(c.Drain(), 0.0)

    failed = fail(cache, the_copy(outcome))

    woken(failed, outcome.ticket, DrainingError)
    assert cache.check() == []


# Caps of leases -------------------------------------------------------------------------------------------------------


def test_cap_refuses_one_lease_too_many_with_its_numbers() -> None:
    """A tenant at its cap is refused with its numbers; another tenant is not affected."""
    cache = a_cache(tenants={TENANT: TenantLimits(leases_max=2)})
    reserve(cache, 1, "first")
    reserve(cache, 1, "second")

    with pytest.raises(PoolFullError) as refused:
        cache.handle(a_reserve(1, "third"), 0.0)

    error = refused.value
    assert (error.resource, error.rule, error.need, error.available, error.limit) == (
        "tenant_leases", "tenant_leases", 1, 0, 2,
    )  # fmt: skip
    assert error.remedies == ()
    assert repr(cache._state.leases.charges) == f"<Charges {{{TENANT}: 2}}>"
    reserve(cache, 1, "theirs", worker_id=STRANGER)
    assert cache.check() == []


def test_cap_is_refunded_when_a_lease_ends() -> None:
    """A lease stops counting towards the cap when it is released, or when its worker ends."""
    cache = a_cache(tenants={TENANT: TenantLimits(leases_max=1)})
    lease = reserve(cache, 1, "first")

    cache.handle(c.Release(worker_id=WORKER, lease_id=lease.lease_id), 0.0)
    reserve(cache, 1, "second")
    cache.handle(c.WorkerDied(worker_id=WORKER), 0.0)

    (facts,) = [one for one in cache.list_tenants() if one.tenant_digest == TENANT]
    assert (facts.num_leases, facts.leases_max) == (0, 1)
    assert cache.check() == []


def test_refused_lease_is_not_charged() -> None:
    """A reserve that is refused for lack of room does not count towards the cap."""
    cache = a_cache(4, tenants={TENANT: TenantLimits(leases_max=1)})
    reserve(cache, 3, "theirs", worker_id=STRANGER)

    with pytest.raises(PoolFullError):
        cache.handle(a_reserve(2, "too large"), 0.0)

    reserve(cache, 1, "fits")


def test_cap_holds_for_forks() -> None:
    """The cap of leases also refuses a fork."""
    cache = a_cache(tenants={TENANT: TenantLimits(leases_max=1)})
    lease = reserve(cache, 1)

    with pytest.raises(PoolFullError) as refused:
        cache.handle(
            c.Fork(worker_id=WORKER, lease_id=lease.lease_id, request_id="fork", num_tokens=4), 0.0
        )

    assert refused.value.resource == "tenant_leases"


def test_capped_call_waits_for_its_own_tenant_and_keeps_nobody_else_waiting() -> None:
    """A capped call is served once a lease of its tenant ends, and others are served before it meanwhile."""
    cache = a_cache(tenants={TENANT: TenantLimits(leases_max=1)})
    first = reserve(cache, 1, "first")
    waiting = cache.handle(a_reserve(1, "second", wait_ms=5_000), 0.0)
    (facts,) = cache.list_waiting(0, 8, 0.0)

    reserve(cache, 1, "theirs", worker_id=STRANGER)
    ended = cache.handle(c.Release(worker_id=WORKER, lease_id=first.lease_id), 0.0)

    assert facts.reason == "tenant_leases"
    woken(ended, waiting.ticket, Reserved)


def test_limits_of_a_call_that_waits_for_blocks_are_looked_at_too() -> None:
    """If tenants have caps alone, a call that waits for blocks keeps later calls behind it, as without caps."""
    cache = a_cache(4, tenants={TENANT: TenantLimits(leases_max=8)})
    reserve(cache, 4, "all", worker_id=STRANGER)
    cache.handle(a_reserve(2, "first", wait_ms=5_000), 0.0)

    with pytest.raises(PoolFullError) as refused:
        cache.handle(a_reserve(3, "second", worker_id=STRANGER), 0.0)

    assert refused.value.rule == "position"


def test_lowered_cap_ends_nothing() -> None:
    """A tenant above a lowered cap keeps its leases, and gets no more until it is below; that is no violation."""
    cache = a_cache()
    first = reserve(cache, 1, "first")
    reserve(cache, 1, "second")

    limit(cache, leases_max=1)

    assert cache.check() == []
    cache.handle(c.Release(worker_id=WORKER, lease_id=first.lease_id), 0.0)
    with pytest.raises(PoolFullError):
        cache.handle(a_reserve(1, "third"), 0.0)


def test_check_finds_wrong_counts_of_leases() -> None:
    """Counts that disagree with the leases are a violation, and so is a tenant that gets past its cap."""
    cache = a_cache()
    reserve(cache, 1, "first")
    state = cache._state
    limit(cache, leases_max=1)
    reserve_beside = a_reserve(1, "second")
    state.caps_leases = False
    cache.handle(reserve_beside, 0.0)

    assert cache.check() == [f"tenant {TENANT} has 2 leases, but may have 1"]
    state.leases_by_tenant()[TENANT] = 1
    assert f"tenants have {{{TENANT}: 2}} leases, but {{{TENANT}: 1}} are counted" in cache.check()


def test_cap_counts_leases_of_an_earlier_life() -> None:
    """After a restart the surviving leases count towards the cap, even if the cap allows fewer by now."""
    shape = replace(SHAPE, tenants={TENANT: TenantLimits(leases_max=1)})
    plain = CacheRecords.plain(SHAPE)
    cache = Cache(SHAPE, plain, EPOCH)
    cache.handle(c.Attach(worker_id=WORKER, tenant_digest=TENANT), 0.0)
    reserve(cache, 1, "first")
    reserve(cache, 1, "second")

    restarted = Cache.recovered(shape, plain, EPOCH, {WORKER: TENANT}, 0.0)

    assert len(leases_of(restarted)) == 2
    assert restarted.check() == []
    with pytest.raises(PoolFullError):
        restarted.handle(a_reserve(1, "third"), 0.0)


# Limits that change ---------------------------------------------------------------------------------------------------


def test_new_maximum_holds_from_the_next_call_on() -> None:
    """Blocks above a lowered maximum stay; the tenant's next block replaces one of its own, or is refused."""
    cache = a_cache()
    lease = reserve(cache, 4)

    limit(cache, max_blocks=4)

    assert cache.check() == []
    with pytest.raises(PoolFullError) as refused:
        cache.handle(a_reserve(1, "more"), 0.0)
    assert refused.value.resource == "tenant_blocks"
    with pytest.raises(NeverFitsError):
        cache.handle(an_extend(lease.lease_id, 5), 0.0)


def test_new_minimum_is_kept_for_its_tenant() -> None:
    """Other tenants do not get the blocks that a tenant has just been guaranteed."""
    cache = a_cache()

    limit(cache, min_blocks=6)

    with pytest.raises(PoolFullError):
        cache.handle(a_reserve(3, "theirs", worker_id=STRANGER), 0.0)
    reserve(cache, 2, "theirs", worker_id=STRANGER)
    reserve(cache, 6, "mine")


def test_minima_that_pins_leave_no_room_for_are_refused() -> None:
    """Minima for which pins leave no room are refused, and nothing changes."""
    cache = a_full_cache(8)
    pin = cache.handle(c.Pin(keys=keys(0, 1, 2)), 0.0)
    answer(pin, Pinned)
    promise = c.Limit(tenants={OTHER_TENANT: TenantLimits(min_blocks=6)}, tenant_default=UNLIMITED)

    with pytest.raises(PoolFullError) as checked:
        cache.check_limits(promise)
    with pytest.raises(PoolFullError) as refused:
        cache.handle(promise, 0.0)

    assert (refused.value.resource, refused.value.need, refused.value.available) == (
        "tenant_minima", 9, 8,
    )  # fmt: skip
    assert checked.value.message == refused.value.message
    assert not cache.shape.tenants


def test_waiting_call_that_can_never_be_served_any_more_is_told_so() -> None:
    """A call that waits for more than its tenant may have now is refused; one that waits for less waits on."""
    cache = a_cache(4)
    reserve(cache, 4, "all", worker_id=STRANGER)
    large = cache.handle(a_reserve(3, "large", wait_ms=5_000), 0.0)
    cache.handle(a_reserve(2, "small", wait_ms=5_000), 0.0)

    limited = cache.handle(
        c.Limit(tenants={TENANT: TenantLimits(max_blocks=2)}, tenant_default=UNLIMITED), 0.0
    )

    woken(limited, large.ticket, NeverFitsError)
    assert cache.census().num_waiting == 1


def test_call_that_asks_a_store_and_can_never_be_served_any_more_is_told_so() -> None:
    """A call that waits for the remote store's answer is refused if the pool is made too small for it meanwhile."""
    cache = a_remote_cache()
    asked = cache.handle(a_patient_reserve(doc(2), more=4), 0.0)

    resized = cache.handle(c.Resize(tier=Tier.DEVICE, num_blocks=4), 0.0)

    woken(resized, asked.ticket, NeverFitsError)
    probed(cache, the_probe(asked), 0, 0)
    reserve(cache, 1)
    assert cache.check() == []


def test_call_whose_copy_failed_and_that_can_never_be_served_any_more_is_told_so() -> None:
    """A call for more than its tenant may have by now does not start over when its copy fails; nobody waits for it."""
    cache = a_tiered_cache()
    on_disk(cache, doc(2))
    loading = cache.handle(a_patient_reserve(doc(2), more=4), 0.0)
    limit(cache, max_blocks=3)

    failed = fail(cache, the_copy(loading))

    woken(failed, loading.ticket, NeverFitsError)
    reserve(cache, 1)
    assert cache.check() == []


def test_waiting_extend_that_can_never_be_granted_any_more_holds_up_nobody() -> None:
    """A call to extend a lease beyond its tenant's new maximum is refused at once; others' calls go on."""
    cache = a_cache(8)
    lease = reserve(cache, 2, "mine")
    reserve(cache, 4, "theirs", worker_id=STRANGER)
    ends = reserve(cache, 2, "ends", worker_id=STRANGER)
    growing = cache.handle(an_extend(lease.lease_id, 6, wait_ms=WAIT_MS), 0.0)

    limited = cache.handle(
        c.Limit(tenants={TENANT: TenantLimits(max_blocks=3)}, tenant_default=UNLIMITED), 0.0
    )

    woken(limited, growing.ticket, NeverFitsError)
    release(cache, ends.lease_id, worker_id=STRANGER)
    reserve(cache, 1, "next", worker_id=STRANGER)
    assert cache.check() == []


def test_waiting_extend_that_still_fits_into_a_smaller_pool_waits_on() -> None:
    """A pool that is made smaller, but not too small for a waiting call to extend a lease, grants it later."""
    cache = a_cache(8)
    lease = reserve(cache, 2, "mine")
    ends = reserve(cache, 4, "ends", worker_id=MATE)
    growing = cache.handle(an_extend(lease.lease_id, 6, wait_ms=WAIT_MS), 0.0)

    assert cache.handle(c.Resize(tier=Tier.DEVICE, num_blocks=6), 0.0).effects == ()

    woken(release(cache, ends.lease_id, worker_id=MATE), growing.ticket, Extended)


@pytest.mark.parametrize(
    "change",
    [
        c.Limit(tenants={TENANT: TenantLimits(max_blocks=3)}, tenant_default=UNLIMITED),
        c.Resize(tier=Tier.DEVICE, num_blocks=4),
    ],
    ids=["maximum", "pool"],
)
def test_waiting_reload_that_can_never_be_granted_any_more_holds_up_nobody(
    change: c.Command,
) -> None:
    """A lease that has more blocks than it may have by now does not come back; its call is refused at once."""
    cache = a_cache(8)
    lease = evicted(cache, b"", more=5)
    ends = reserve(cache, 4, "ends", worker_id=MATE)
    waiting = reload(cache, lease.lease_id)

    changed = cache.handle(change, 0.0)

    woken(changed, waiting.ticket, NeverFitsError)
    release(cache, ends.lease_id, worker_id=MATE)
    reserve(cache, 1, "next", worker_id=MATE)
    with pytest.raises(NeverFitsError):
        reload(cache, lease.lease_id)
    assert cache.check() == []


def test_lease_that_can_never_come_back_from_a_smaller_pool_is_told_what_helps() -> None:
    """The refusal says how many blocks the lease has, and how many the pool, and which ones could be brought back."""
    cache = a_cache(8)
    lease = evicted(cache, b"", more=5)
    resize(cache, 4)

    with pytest.raises(NeverFitsError, match="has 5 blocks, but the device pool has 4") as refused:
        reload(cache, lease.lease_id)

    assert (refused.value.resource, refused.value.need, refused.value.limit) == (
        "device_blocks", 5, 4,
    )  # fmt: skip
    assert refused.value.message.endswith(
        "release the lease, or bring some of its 4 parked blocks back into use with kvlease resize"
    )
    resize(cache, 8)
    assert reload(cache, lease.lease_id).ticket is not None


def test_reload_that_waits_for_an_evict_is_refused_if_it_can_never_be_granted_any_more() -> None:
    """A lease on its way down does not come back at once if its tenant may have fewer blocks by then."""
    cache = a_cache(8)
    lease = reserve(cache, 5)
    down = evict(cache, lease.lease_id)
    waiting = reload(cache, lease.lease_id)
    limit(cache, max_blocks=3)

    landed = land(cache, the_copy(down))

    woken(landed, waiting.ticket, NeverFitsError)
    assert cache.census().num_waiting == 0
    assert cache.check() == []


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_smaller_pool_grants_what_is_left_of_it() -> None:
    """Blocks at the end of the memory are out of use; limits, refusals and counts go by the remaining blocks."""
    cache = a_cache(8)

    resized = resize(cache, 5)

    assert (resized.num_blocks, resized.num_parked, resized.num_evicted) == (5, 3, 0)
    assert ids(cache.parked(Tier.DEVICE)) == [5, 6, 7]
    assert cache.shape.usable_blocks == 5
    with pytest.raises(NeverFitsError) as refused:
        cache.handle(a_reserve(6), 0.0)
    assert refused.value.limit == 5
    reserve(cache, 5)
    assert cache.census().device["parked"] == 3
    assert cache.check() == []


def test_pool_grows_again_to_what_was_registered() -> None:
    """Parked blocks come back in the order of the memory, and are taken after those that stayed in use."""
    cache = a_cache(8)
    resize(cache, 4)

    assert resize(cache, 6).num_parked == 2
    assert ids(cache.parked(Tier.DEVICE)) == [6, 7]
    with pytest.raises(NeverFitsError) as refused:
        resize(cache, 9)
    assert (refused.value.need, refused.value.available, refused.value.limit) == (9, 8, 8)
    resize(cache, 8)
    reserve(cache, 8)
    assert cache.check() == []


def test_device_pool_does_not_shrink_to_nothing_and_the_host_pool_may() -> None:
    """The device pool keeps at least one block; the host pool may shrink to no slot."""
    cache = a_cache(8)

    with pytest.raises(
        NeverFitsError, match="not 0; to grant no blocks, drain the cache"
    ) as refused:
        resize(cache, 0)
    assert refused.value.remedies == ("num_blocks=1",)

    assert resize(cache, 0, Tier.HOST).num_parked == 8
    assert resize(cache, 8, Tier.HOST).num_parked == 0


def test_cached_blocks_leave_and_held_ones_do_not() -> None:
    """Blocks that nobody holds leave; if that is not enough, nothing changes and the refusal has the numbers."""
    cache = a_full_cache(6)
    cache.handle(c.Pin(keys=keys(0, 1)), 0.0)

    with pytest.raises(PoolFullError) as refused:
        resize(cache, 1)
    assert (refused.value.resource, refused.value.need, refused.value.available) == (
        "device_blocks", 5, 4,
    )  # fmt: skip
    assert cache.census().device["parked"] == 0
    assert "4 can: among the others are 2 pinned; end pins with kvlease unpin" in str(refused.value)
    assert "leases" not in str(refused.value)

    assert resize(cache, 2).num_evicted == 4
    with pytest.raises(PoolFullError, match="1 block would have to leave the device pool"):
        resize(cache, 1)
    assert cache.census().counters["blocks_cleared"] == 4
    assert cache.check() == []


def test_refused_resize_names_all_that_holds_blocks_and_what_to_do() -> None:
    """A refusal counts leases and pins apart, for each is ended in a way of its own."""
    cache = a_cache(6)
    cached(cache, keys(0, 1))
    cache.handle(c.Pin(keys=keys(0, 1)), 0.0)
    reserve(cache, 3, "running")

    with pytest.raises(PoolFullError) as refused:
        resize(cache, 1)

    told = str(refused.value)
    assert "3 leased" in told
    assert "2 pinned" in told
    assert "when leases have ended" in told
    assert "kvlease unpin" in told


@pytest.mark.parametrize(
    ("num_blocks", "advice"),
    [
        pytest.param(
            6, "bring some of its 4 parked blocks back into use with kvlease resize", id="parked"
        ),
        pytest.param(9, "or register a larger pool", id="never"),
    ],
)
def test_what_only_a_resize_keeps_out_is_told_so(num_blocks: int, advice: str) -> None:
    """A request that fits the registered pool is told to unpark blocks; a larger one, to register a larger pool."""
    cache = a_cache(8, table_blocks=10)
    resize(cache, 4)

    with pytest.raises(NeverFitsError, match=advice):
        cache.handle(a_reserve(num_blocks, "long"), 0.0)


@pytest.mark.parametrize(
    ("num_blocks", "advice"),
    [
        pytest.param(6, "or register the cache with more longest_request_tokens$", id="parked"),
        pytest.param(
            9,
            "or register the cache with more longest_request_tokens and a larger pool$",
            id="never",
        ),
    ],
)
def test_pool_alone_is_not_named_where_the_longest_request_is_limited(
    num_blocks: int, advice: str
) -> None:
    """A request above the registered limit is told to raise that, not only to bring more blocks into use."""
    cache = a_cache(8, table_blocks=10, longest_request_tokens=5 * TOKENS_PER_BLOCK)
    resize(cache, 4)

    with pytest.raises(NeverFitsError, match=advice):
        cache.handle(a_reserve(num_blocks, "long"), 0.0)


def test_longest_request_is_that_of_the_blocks_in_use() -> None:
    """A resize shortens the longest request that fits, and lengthens it again; one token more is refused."""
    cache = a_cache(8, table_blocks=10)
    assert cache.longest_request_tokens == 8 * TOKENS_PER_BLOCK

    resize(cache, 4)

    assert cache.longest_request_tokens == 4 * TOKENS_PER_BLOCK
    reserve(cache, 4, "fits")
    with pytest.raises(NeverFitsError):
        cache.handle(a_reserve(5, "too long"), 0.0)
    resize(cache, 8)
    assert cache.longest_request_tokens == 8 * TOKENS_PER_BLOCK


def test_slots_leave_the_host_pool() -> None:
    """A smaller host pool drops its coldest slots."""
    cache = a_full_cache(4, num_slots=4)
    finish(cache, cache.handle(c.Evict(num_blocks=4, wait_ms=1_000), 0.0))

    assert resize(cache, 1, Tier.HOST).num_evicted == 3
    assert cache.census().host["parked"] == 3
    lease = reserve(cache, 2, "lease")
    with pytest.raises(NeverFitsError) as refused:
        cache.handle(c.Evict(worker_id=WORKER, lease_id=lease.lease_id, wait_ms=1_000), 0.0)
    assert refused.value.limit == 1


def test_shrink_that_leaves_no_room_for_minima_is_refused() -> None:
    """A resize may not break the minima, but the new limits count if it brings some."""
    cache = a_cache(8, tenants={TENANT: TenantLimits(min_blocks=6)})

    with pytest.raises(PoolFullError, match="guaranteed"):
        resize(cache, 5)

    lower = c.Limit(tenants={TENANT: TenantLimits(min_blocks=4)}, tenant_default=UNLIMITED)
    cache.handle(c.Resize(tier=Tier.DEVICE, num_blocks=5, limits=lower), 0.0)
    assert cache.shape.tenants[TENANT].min_blocks == 4
    assert cache.check() == []


def test_lease_that_is_longer_than_any_can_be_now_goes_on() -> None:
    """An evicted lease with more tokens than the smaller pool admits is not refused what it has already."""
    cache = a_cache(8, table_blocks=10)
    lease = reserve(cache, 6)
    command = c.Evict(worker_id=WORKER, lease_id=lease.lease_id, wait_ms=1_000)
    finish(cache, cache.handle(command, 0.0))
    resize(cache, 4)
    late = replace(an_extend(lease.lease_id, 6), num_tokens=6 * TOKENS_PER_BLOCK)

    with pytest.raises(WrongStateError):
        cache.handle(late, 0.0)
    for num_blocks in (7, 9):
        with pytest.raises(NeverFitsError):
            cache.handle(an_extend(lease.lease_id, num_blocks), 0.0)


def test_smaller_pool_outlives_a_restart() -> None:
    """Parked blocks stay parked after a restart in every tier, but not in another container."""
    plain = CacheRecords.plain(SHAPE)
    cache = Cache(SHAPE, plain, EPOCH)
    resize(cache, 5)
    resize(cache, 6, Tier.HOST)

    restarted = Cache.recovered(SHAPE, plain, EPOCH, {}, 0.0)

    assert (restarted.shape.usable_blocks, restarted.census().host["parked"]) == (5, 2)
    assert restarted.check() == []
    assert resize(restarted, 8).num_parked == 0


def test_tenants_use_nothing_of_what_is_parked() -> None:
    """A parked block counts for no tenant."""
    cache = a_full_cache(6)
    assert resize(cache, 4).num_evicted == 2

    (alone,) = [one for one in cache.list_tenants() if one.tenant_digest == TENANT]
    limit(cache, max_blocks=6)
    (parted,) = [one for one in cache.list_tenants() if one.tenant_digest == TENANT]

    assert alone.used_blocks == parted.used_blocks == 4


def test_check_finds_parked_blocks_that_are_held_or_not_counted() -> None:
    """The check finds a parked block that is held, and a wrong count of parked blocks."""
    cache = a_cache()
    resize(cache, 6)
    cache._state.device.holds[7] = 1

    assert any("parked" in one for one in cache.check())
    cache._state.device.holds[7] = 0
    assert cache.check() == []
    cache._state.device.num_parked = 1
    assert any("parked" in one for one in cache.check())


# Clears ---------------------------------------------------------------------------------------------------------------


def test_clear_drops_what_nobody_holds() -> None:
    """A clear drops everybody's cached blocks in every tier, and the freed blocks are available at once."""
    cache = a_full_cache(4, num_slots=4)
    finish(cache, cache.handle(c.Evict(num_blocks=2, wait_ms=1_000), 0.0))

    cleared = clear(cache)

    assert (cleared.num_device, cleared.num_host, cleared.num_disk, cleared.num_held) == (
        2,
        2,
        0,
        0,
    )
    assert cache.census().counters["blocks_cleared"] == 4
    assert cache.census().device["free"] == cache.census().host["free"] == 4
    assert cache.check() == []


def test_clear_of_a_tenant_leaves_the_others() -> None:
    """Blocks of tenants that the clear does not name stay findable."""
    cache = a_cache()
    cached(cache, keys(1, 2))
    lease = reserve(cache, 2, "theirs", worker_id=STRANGER)
    commit = c.Commit(
        worker_id=STRANGER, lease_id=lease.lease_id, num_tokens=8, first_block=0, keys=keys(3, 4)
    )
    cache.handle(commit, 0.0)
    cache.handle(c.Release(worker_id=STRANGER, lease_id=lease.lease_id), 0.0)

    assert clear(cache, TENANT).num_device == 2
    assert cache.census().device["ready"] == 2
    assert clear(cache, TENANT).num_device == 0


def test_clear_names_what_holds_the_rest() -> None:
    """A clear names each kind of holder: leases on the device and below, pins, copies and magazines."""
    cache = a_full_cache(6, num_slots=6)
    lease = reserve(cache, 1, "holder", keys(0))
    reserve(cache, 1, "beside")
    pin = answer(cache.handle(c.Pin(keys=keys(1)), 0.0), Pinned)
    moving = cache.handle(c.Evict(keys=keys(2), wait_ms=1_000), 0.0)

    cleared = clear(cache)

    assert np.frombuffer(cleared.lease_ids, np.int64).tolist() == [lease.lease_id]
    assert np.frombuffer(cleared.pin_ids, np.int64).tolist() == [pin.pin_id]
    assert (cleared.num_held, cleared.num_copying, cleared.num_in_magazines) == (3, 1, 0)
    assert cleared.num_device == 2
    assert len(copies(moving)) == 1


def test_clear_leaves_an_evicted_lease_its_slots() -> None:
    """Slots that an evicted lease shares with the cache stay, and the clear names the lease."""
    cache = a_full_cache(2, num_slots=6)
    lease = reserve(cache, 2, "holder", keys(0, 1))
    command = c.Evict(worker_id=WORKER, lease_id=lease.lease_id, wait_ms=1_000)
    finish(cache, cache.handle(command, 0.0))

    cleared = clear(cache)

    assert cleared.num_held == int((records(cache).host.state == State.READY).sum()) == 2
    assert np.frombuffer(cleared.lease_ids, np.int64).tolist() == [lease.lease_id]
