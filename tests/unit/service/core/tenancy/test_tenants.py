"""Laws of tenants: each can have its minimum, none more than its maximum; those above their share give way first."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import KVLeaseError, NeverFitsError, PoolFullError
from kvlease.ids import LeaseId, PinId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.checks.sound import Sound
from kvleased.core.effects import Copy, Evicted, Outcome, Pinned, Reserved, Stepped
from kvleased.core.limits import TenantLimits
from kvleased.core.tenancy.tenants import TenantFacts, level_out
from tests.unit.service.core.builders import (
    EPOCH,
    MATE,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    answer,
    cached,
    commit,
    committed,
    copies,
    evict,
    evicted,
    extend,
    found,
    ids,
    keys,
    land,
    on_host,
    records,
    release,
    reload,
    reload_keys,
    reserve,
    started,
    the_copy,
    wait_for,
    woken,
)


def limited(num_blocks: int = 8, *, others: TenantLimits | None = None, **limits: Any) -> Cache:
    """Return a cache with limits for its first tenant, and others for the other one."""
    tenants = {TENANT: TenantLimits(**limits), OTHER_TENANT: others or TenantLimits()}
    return a_cache(num_blocks, tenants=tenants)


def facts(cache: Cache, tenant: int = TENANT) -> TenantFacts:
    """Return what a cache tells about a tenant."""
    (one,) = [one for one in cache.list_tenants() if one.tenant_digest == tenant]
    return one


def served(cache: Cache, num_blocks: int, name: str, worker_id: WorkerId) -> Reserved:
    """Reserve blocks that are available once some copies are done."""
    outcome = cache.handle(a_reserve(num_blocks, name, worker_id=worker_id, wait_ms=WAIT_MS), 0.0)
    if outcome.ticket is None:
        return answer(outcome, Reserved)
    ticket, landed = outcome.ticket, outcome
    while not any(getattr(one, "ticket", None) == ticket for one in landed.effects):
        landed = land(cache, the_copy(landed))
    return woken(landed, ticket, Reserved)


def held(cache: Cache, num_blocks: int, name: str, worker_id: WorkerId) -> str:
    """Return the code and the resource of a reserve's refusal."""
    with pytest.raises(KVLeaseError) as refusal:
        reserve(cache, num_blocks, name, worker_id=worker_id)
    return f"{refusal.value.code} {refusal.value.resource}"


# What is told ---------------------------------------------------------------------------------------------------------


def test_tenant_is_told_what_it_has() -> None:
    """Blocks count as used while they hold a tenant's bytes, and as held while somebody holds them."""
    cache = limited(min_blocks=2, max_blocks=6, weight=3.0, pinned_blocks_max=2)
    cached(cache, keys(1, 2, 3))
    reserve(cache, 1)
    cache.handle(c.Pin(keys=keys(1), tenant_digest=TENANT), 0.0)

    assert facts(cache) == TenantFacts(
        tenant_digest=TENANT,
        used_blocks=4,
        held_blocks=2,
        pinned_blocks=1,
        min_blocks=2,
        max_blocks=6,
        pinned_blocks_max=2,
        weight=3.0,
        num_leases=1,
        leases_max=8,
    )


def test_tenants_are_listed_without_limits_too() -> None:
    """All tenants that are attached, configured or use blocks are listed; one without limits may have all blocks."""
    cache = a_cache(tenants={1: TenantLimits()})
    cached(cache, keys(1, 2))

    listed = cache.list_tenants()

    assert [(one.tenant_digest, one.used_blocks) for one in listed] == [(1, 0), (7, 2), (8, 0)]
    assert (listed[0].max_blocks, listed[0].pinned_blocks_max) == (8, 8)


def test_counts_go_with_the_blocks() -> None:
    """The count of a tenant's used blocks follows grants, commits, evictions and changes of tenants."""
    cache = a_cache(4)
    cached(cache, keys(1, 2))
    lease = served(cache, 3, "other", STRANGER)

    assert (facts(cache).used_blocks, facts(cache, OTHER_TENANT).used_blocks) == (1, 3)

    release(cache, lease.lease_id, worker_id=STRANGER)
    assert facts(cache, OTHER_TENANT).used_blocks == 0
    assert repr(cache._state.device.owners) == f"<Owners {{0: 0, {TENANT}: 1, {OTHER_TENANT}: 0}}>"
    assert cache.check() == []


def test_blocks_that_are_zeroed_are_nobodys() -> None:
    """A block counts for no tenant while it is being scrubbed."""
    cache = a_cache(2, num_slots=0)
    cached(cache, keys(1, 2))
    cache.handle(a_reserve(2, worker_id=STRANGER, wait_ms=WAIT_MS), 0.0)

    used = [one.used_blocks for one in cache.list_tenants()]

    assert used == [0, 0]
    assert cache.check() == []


# Maximum --------------------------------------------------------------------------------------------------------------


def test_tenant_above_its_maximum_never_fits() -> None:
    """A request that alone exceeds its tenant's maximum is refused for good, with both numbers."""
    cache = limited(max_blocks=3)

    with pytest.raises(NeverFitsError, match="tenant's maximum") as refusal:
        reserve(cache, 4)

    assert (refusal.value.resource, refusal.value.need) == ("tenant_blocks", 4)
    assert (refusal.value.available, refusal.value.limit) == (3, 3)
    assert refusal.value.remedies == ("num_tokens=12",)


@pytest.mark.parametrize(
    ("maxima", "named"),
    [
        pytest.param((("max_percent", 3), ("max_bytes", 4)), "max_percent", id="one"),
        pytest.param((("max_percent", 8), ("max_bytes", 3)), "max_bytes", id="other"),
        pytest.param(
            (("max_percent", 2), ("max_bytes", 3)), "max_percent and max_bytes", id="both"
        ),
    ],
)
def test_refusal_above_a_maximum_names_the_settings_that_are_too_low(
    maxima: tuple[tuple[str, int], ...], named: str
) -> None:
    """Only what has to be raised for the request is named."""
    cache = limited(max_blocks=min(most for _, most in maxima), maxima=maxima)

    with pytest.raises(NeverFitsError, match=f"raise the tenant's {named}$"):
        reserve(cache, 4)


def test_tenant_that_can_have_nothing_is_told_no_number() -> None:
    """If a tenant cannot have even one token, no fewer tokens are named."""
    cache = limited(max_blocks=0)

    with pytest.raises(NeverFitsError) as refusal:
        reserve(cache, 1)

    assert refusal.value.remedies == ()


def test_lease_never_grows_above_its_tenants_maximum() -> None:
    """An extend that takes a lease above its tenant's maximum is refused for good."""
    cache = limited(max_blocks=3)
    lease = reserve(cache, 3)

    with pytest.raises(NeverFitsError):
        extend(cache, lease.lease_id, 4)


def test_evicted_lease_above_a_new_maximum_never_comes_back() -> None:
    """A lease that was evicted under a higher maximum is told that it cannot be reloaded."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2, 3))
    lower = Cache.recovered(
        limited(max_blocks=2).shape, records(cache), EPOCH, {WORKER: TENANT}, 0.0
    )

    with pytest.raises(NeverFitsError):
        reload(lower, lease.lease_id)


def test_tenant_at_its_maximum_gets_no_more() -> None:
    """A tenant at its maximum gets no free blocks; the refusal names its limit."""
    cache = limited(max_blocks=3)
    reserve(cache, 2)

    with pytest.raises(PoolFullError) as refusal:
        reserve(cache, 2, "more", worker_id=MATE)

    assert (refusal.value.resource, refusal.value.need) == ("tenant_blocks", 2)
    assert (refusal.value.available, refusal.value.limit) == (1, 3)


def test_tenant_at_its_maximum_evicts_its_own() -> None:
    """A tenant at its maximum evicts its own cached blocks, even if there are free blocks and others' cached ones."""
    cache = limited(max_blocks=3)
    cached(cache, keys(7, 8), worker_id=STRANGER)
    cached(cache, keys(1, 2, 3))

    reserve(cache, 2)

    assert found(cache, keys(1, 2, 3)) == (1, 0)
    assert found(cache, keys(7, 8), OTHER_TENANT) == (2, 0)
    assert cache.check() == []


def test_patient_tenant_at_its_maximum_waits_for_its_own_blocks() -> None:
    """A tenant at its maximum waits for the copy that frees its own blocks, which is not started a second time."""
    cache = limited(10, max_blocks=4)
    cached(cache, keys(1, 2, 3, 4))
    first = cache.handle(a_reserve(2, "first", wait_ms=WAIT_MS), 0.0)

    again = cache.handle(c.Cancel(ticket=first.ticket or 0), 0.0)
    second = cache.handle(a_reserve(2, "second", wait_ms=WAIT_MS), 0.0)
    landed = land(cache, the_copy(first))

    assert copies(again) == copies(second) == []
    woken(landed, second.ticket, Reserved)
    assert found(cache, keys(1, 2, 3, 4)) == (2, 2)


def test_patient_tenant_at_its_maximum_does_not_wait_for_others_blocks() -> None:
    """A tenant at its maximum does not wait for a copy that frees another tenant's blocks."""
    cache = limited(8, max_blocks=4)
    cached(cache, keys(1, 2, 3, 4))
    cached(cache, keys(7, 8, 9, 10), worker_id=STRANGER)
    others = cache.handle(a_reserve(1, "others", worker_id=STRANGER, wait_ms=WAIT_MS), 0.0)
    cache.handle(c.Cancel(ticket=others.ticket or 0), 0.0)

    outcome = cache.handle(a_reserve(1, wait_ms=WAIT_MS), 0.0)

    assert len(ids(the_copy(outcome).source_ids)) == 1
    woken(land(cache, the_copy(outcome)), outcome.ticket, Reserved)


def test_step_heeds_the_maximum() -> None:
    """A step takes no free blocks for a tenant at its maximum, and does take them for one below it."""
    cache = limited(max_blocks=3)
    lease = reserve(cache, 1)

    codes = [_grow(cache, lease, num_blocks) for num_blocks in (3, 4)]

    assert codes[0] == 0
    assert codes[1] != 0
    assert facts(cache).used_blocks == 3


def _grow(cache: Cache, lease: Reserved, num_blocks: int) -> int:
    step = c.Step(
        worker_id=WORKER,
        verbs=b"\1",
        lease_ids=lease.lease_id.to_bytes(8, "little"),
        num_tokens=(num_blocks * TOKENS_PER_BLOCK).to_bytes(4, "little"),
    )
    (code,) = ids(answer(cache.handle(step, 0.0), Stepped).codes)
    return code


def test_prefetch_heeds_the_maximum() -> None:
    """Blocks that a reload of keys brings back count for their tenant, and only those of one tenant come."""
    cache = limited(max_blocks=2)
    on_host(cache, keys(7, 8), worker_id=STRANGER)
    on_host(cache, keys(1, 2))

    outcome = reload_keys(cache, keys(1, 7, 2, 8))
    reserve_refused = held(cache, 1, "r", WORKER)

    assert len(ids(the_copy(outcome).target_ids)) == 2
    assert reserve_refused == "POOL_FULL tenant_blocks"
    assert cache.check() == []


def test_prefetch_of_more_than_the_maximum_never_fits() -> None:
    """A reload of more keys than its tenant may have blocks is refused for good."""
    cache = a_cache()
    on_host(cache, keys(1, 2, 3))
    lower = Cache.recovered(
        limited(max_blocks=2).shape, records(cache), EPOCH, {WORKER: TENANT}, 0.0
    )

    with pytest.raises(NeverFitsError):
        reload_keys(lower, keys(1, 2, 3))


# Minimum --------------------------------------------------------------------------------------------------------------


def test_free_blocks_are_kept_for_the_minimum_of_an_attached_tenant() -> None:
    """Other tenants do not get the blocks that a tenant's minimum still lacks, and it gets them at once."""
    cache = limited(min_blocks=5)

    refused = held(cache, 4, "more", STRANGER)
    reserve(cache, 3, "fits", worker_id=STRANGER)

    assert refused == "POOL_FULL device_blocks"
    assert len(ids(reserve(cache, 5).block_ids)) == 5


def test_minimum_of_a_tenant_that_is_not_there_is_lent() -> None:
    """The minimum of a tenant without workers is lent to others."""
    cache = limited(min_blocks=5)
    for worker_id in (WORKER, MATE):
        cache.handle(c.Detach(worker_id=worker_id), 0.0)

    assert len(ids(reserve(cache, 8, worker_id=STRANGER).block_ids)) == 8


def test_cached_blocks_up_to_the_minimum_are_not_evicted_for_others() -> None:
    """Others' calls evict a tenant's cached blocks only down to its minimum, whether it is attached or not."""
    cache = limited(4, min_blocks=2)
    cached(cache, keys(1, 2, 3, 4))
    for worker_id in (WORKER, MATE):
        cache.handle(c.Detach(worker_id=worker_id), 0.0)

    refused = held(cache, 3, "more", STRANGER)
    served(cache, 2, "fits", STRANGER)

    assert refused == "POOL_FULL device_blocks"
    assert found(cache, keys(1, 2)) == (2, 0)


def filled_before_a_claim() -> Cache:
    """Return a cache that others' blocks mostly fill when a tenant with half of it as its minimum attaches."""
    cache = a_cache(4, tenants={TENANT: TenantLimits(min_blocks=2)})
    for worker_id in (WORKER, MATE):
        cache.handle(c.Detach(worker_id=worker_id), 0.0)
    cached(cache, keys(5, 6, 7), worker_id=STRANGER)
    cache.handle(c.Attach(worker_id=WORKER, tenant_digest=TENANT), 0.0)
    return cache


def test_prefix_is_not_held_where_it_is_needed_for_a_minimum() -> None:
    """Cached blocks that an attached tenant can claim for its minimum are not taken up by another's prefix."""
    cache = filled_before_a_claim()

    with pytest.raises(PoolFullError):
        reserve(cache, 3, "hits", keys(5, 6, 7), worker_id=STRANGER)

    assert len(ids(served(cache, 2, "claim", WORKER).block_ids)) == 2


def test_prefix_that_only_a_copy_holds_is_not_held_where_it_is_needed_for_a_minimum() -> None:
    """If only a copy to the host pool holds a prefix, taking it up would also take it from another tenant's minimum."""
    cache = filled_before_a_claim()
    leaving = the_copy(cache.handle(c.Evict(keys=keys(5, 6, 7)), 0.0))

    with pytest.raises(PoolFullError):
        reserve(cache, 3, "hits", keys(5, 6, 7), worker_id=STRANGER)

    land(cache, leaving)
    assert len(ids(served(cache, 2, "claim", WORKER).block_ids)) == 2


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({TENANT: TenantLimits(min_blocks=3)}, id="minimum of another"),
        pytest.param({OTHER_TENANT: TenantLimits(max_blocks=2)}, id="own maximum"),
    ],
)
def test_prefix_that_is_held_already_is_shared_whatever_the_limits(
    limits: dict[int, TenantLimits],
) -> None:
    """A request takes nothing from anybody if it needs no block, and no block of its prefix could leave."""
    cache = a_cache(4, tenants={OTHER_TENANT: TenantLimits(max_blocks=4)})
    first = reserve(cache, 3, "first", worker_id=STRANGER)
    commit(cache, first.lease_id, keys(5, 6, 7), worker_id=STRANGER)
    cache.handle(c.Limit(tenants=limits, tenant_default=TenantLimits()), 0.0)

    again = reserve(cache, 2, "again", keys(5, 6), worker_id=STRANGER)

    assert again.block_ids == first.block_ids[: len(again.block_ids)]
    assert held(cache, 2, "more", STRANGER).startswith("POOL_FULL")
    assert cache.check() == []


def test_step_heeds_the_minimum_of_others() -> None:
    """A step takes no free blocks that another tenant's minimum lacks."""
    cache = limited(4, others=TenantLimits(min_blocks=2))
    lease = reserve(cache, 1)

    assert [_grow(cache, lease, 2), _grow(cache, lease, 3) != 0] == [0, True]


# Shares ---------------------------------------------------------------------------------------------------------------


def test_tenant_above_its_share_gives_way_first() -> None:
    """Blocks of the tenant furthest above its share leave first, even if others' are colder."""
    cache = a_cache(8)
    cached(cache, keys(7, 8), worker_id=STRANGER)
    cached(cache, keys(1, 2, 3, 4, 5, 6))

    reserve(cache, 2)

    assert found(cache, keys(7, 8), OTHER_TENANT) == (2, 0)
    assert found(cache, keys(1, 2, 3, 4, 5, 6)) == (4, 0)


def test_weight_decides_the_share() -> None:
    """A tenant of three times the weight may have three times the blocks before it gives way."""
    cache = limited(8, weight=3.0)
    cached(cache, keys(7, 8, 9), worker_id=STRANGER)
    cached(cache, keys(1, 2, 3, 4, 5))

    with pytest.raises(PoolFullError):
        reserve(cache, 1)
    land(cache, started(cache))
    reserve(cache, 1)

    assert found(cache, keys(7, 8, 9), OTHER_TENANT) == (2, 0)
    assert found(cache, keys(1, 2, 3, 4, 5)) == (5, 0)


def test_tenant_without_workers_has_no_share() -> None:
    """Blocks of a tenant without workers leave before those of any attached tenant."""
    cache = a_cache(8)
    cached(cache, keys(1, 2, 3, 4, 5, 6))
    cached(cache, keys(7, 8), worker_id=STRANGER)
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)

    served(cache, 2, "r", WORKER)

    assert found(cache, keys(1, 2, 3, 4, 5, 6)) == (6, 0)


def test_leaves_leave_first_within_a_tenant() -> None:
    """If a part of a chain must leave, its beginning stays."""
    cache = a_cache(8)
    cached(cache, keys(7, 8), worker_id=STRANGER)
    cached(cache, keys(1, 2, 3, 4, 5, 6))

    reserve(cache, 3)

    assert found(cache, keys(1, 2, 3, 4, 5, 6)) == (3, 0)


def test_blocks_of_several_tenants_leave_for_a_large_call() -> None:
    """A call for more blocks than one tenant can give gets the rest from others."""
    cache = a_cache(8, num_slots=0)
    cached(cache, keys(7, 8, 9, 10), worker_id=STRANGER)
    cached(cache, keys(1, 2, 3, 4))

    served(cache, 7, "all", WORKER)

    assert found(cache, keys(7), OTHER_TENANT) == (1, 0)
    assert facts(cache).used_blocks == 7


def test_worker_evicts_nothing_of_others() -> None:
    """A worker that evicts by number evicts its own tenant's coldest blocks; an operator may evict everybody's."""
    cache = limited(8, others=TenantLimits(min_blocks=1))
    cached(cache, keys(7, 8), worker_id=STRANGER)
    cached(cache, keys(1, 2))

    by_worker = cache.handle(c.Evict(worker_id=WORKER, num_blocks=8), 0.0)
    land(cache, the_copy(by_worker))

    assert found(cache, keys(1, 2)) == (0, 2)
    assert found(cache, keys(7, 8), OTHER_TENANT) == (2, 0)
    assert _num_evicted(cache, cache.handle(c.Evict(num_blocks=8), 0.0)) == 2
    assert _num_evicted(cache, cache.handle(c.Evict(num_blocks=8), 0.0)) == 0


def _num_evicted(cache: Cache, outcome: Outcome) -> int:
    if outcome.ticket is None:
        return answer(outcome, Evicted).num_evicted
    return woken(land(cache, the_copy(outcome)), outcome.ticket, Evicted).num_evicted


@given(
    st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 12)), min_size=1, max_size=6),
    st.integers(0, 80),
)
def test_levelling_takes_from_the_highest(sides: Sequence[tuple[int, int]], count: int) -> None:
    """As much is taken as there is, none gives above its cap, and none gives where a higher one could give instead."""
    heights, caps = [height for height, _ in sides], [cap for _, cap in sides]

    counts = level_out(heights, caps, count)

    assert sum(counts) == min(count, sum(caps))
    assert all(0 <= number <= cap for number, cap in zip(counts, caps, strict=True))
    lowest_after = min(
        (one - number for one, number in zip(heights, counts, strict=True) if number),
        default=max(heights),
    )
    spared = [
        one - number for one, number, cap in zip(heights, counts, caps, strict=True) if number < cap
    ]
    assert all(one <= lowest_after + 1 for one in spared)


def test_example_of_the_page() -> None:
    """The worked example of docs/tenants.md happens as written."""
    chat = TenantLimits(min_blocks=40, weight=3.0)
    batch = TenantLimits(max_blocks=50)
    cache = a_cache(100, 0, tenants={TENANT: chat, OTHER_TENANT: batch}, max_leases=16)
    used = []

    def note() -> None:
        used.append((facts(cache).used_blocks, facts(cache, OTHER_TENANT).used_blocks))

    cached(cache, keys(*range(50)), worker_id=STRANGER)
    note()
    cached(cache, keys(*range(50, 70)), worker_id=STRANGER)
    note()
    lease = served(cache, 70, "chat", WORKER)
    note()
    served(cache, 30, "batch", STRANGER)
    note()
    commit(cache, lease.lease_id, keys(*range(100, 170)))
    release(cache, lease.lease_id)
    note()
    with pytest.raises(PoolFullError) as above:
        reserve(cache, 30, "more", worker_id=STRANGER)
    served(cache, 20, "less", STRANGER)
    note()
    cache.handle(c.Attach(worker_id=WorkerId(9), tenant_digest=99), 0.0)
    with pytest.raises(PoolFullError) as below:
        reserve(cache, 15, "eval", worker_id=WorkerId(9))

    assert used == [(0, 50), (0, 50), (70, 30), (70, 30), (70, 30), (50, 50)]
    assert (above.value.resource, above.value.available) == ("tenant_blocks", 20)
    assert (below.value.resource, below.value.available) == ("device_blocks", 10)


# Waiting --------------------------------------------------------------------------------------------------------------


def test_call_that_its_limits_hold_back_keeps_nobody_else_waiting() -> None:
    """While a tenant waits for its own blocks, another's calls are served, including waiting ones."""
    cache = limited(4, max_blocks=1, others=TenantLimits(max_blocks=3))
    own = reserve(cache, 1, "own")
    waiting = wait_for(cache, 1, "waiting")

    first = reserve(cache, 3, "first", worker_id=STRANGER)
    later = wait_for(cache, 1, "later", worker_id=STRANGER)
    outcome = release(cache, first.lease_id, worker_id=STRANGER)

    woken(outcome, later, Reserved)
    woken(release(cache, own.lease_id), waiting, Reserved)


def test_tenants_own_calls_wait_for_their_turn() -> None:
    """A call that limits hold back is served before all later ones of its tenant."""
    cache = limited(4, max_blocks=2)
    reserve(cache, 1, "own")
    wait_for(cache, 2, "large")

    with pytest.raises(PoolFullError, match="1 call waits before"):
        reserve(cache, 1, "small")
    ticket = wait_for(cache, 1, "small")
    outcome = cache.handle(c.Tick(), 1.0)

    assert not outcome.effects
    assert ticket


def test_call_that_wants_room_keeps_others_waiting() -> None:
    """If there are too few blocks for anybody, all tenants wait in turn."""
    cache = limited(4, max_blocks=3)
    reserve(cache, 3, "others", worker_id=STRANGER)
    wait_for(cache, 2, "large")
    small = c.Reserve(
        worker_id=STRANGER,
        request_id="small",
        keys=b"",
        num_tokens=TOKENS_PER_BLOCK,
        priority=0,
    )

    with pytest.raises(PoolFullError) as refusal:
        cache.handle(small, 0.0)

    assert (refusal.value.resource, refusal.value.rule) == ("device_blocks", "position")


def test_weight_decides_who_is_served_more_often() -> None:
    """Among waiting calls of one size, those of a tenant of three times the weight are served three times as often."""
    cache = limited(4, weight=3.0)
    reserve(cache, 4, "all", worker_id=STRANGER)
    calls = [
        wait_for(cache, 4, f"{worker_id} {at}", worker_id=worker_id)
        for at in range(3)
        for worker_id in (STRANGER, WORKER)
    ]

    order = [
        one.call_id for one in sorted(cache.list_waiting(0, 9, 0.0), key=lambda it: it.position)
    ]

    # The third call of the one and the first of the other are level, so the earlier one is first.
    assert [calls.index(ticket) % 2 for ticket in order] == [1, 1, 0, 1, 0, 0]


def test_refusal_says_that_limits_keep_blocks() -> None:
    """If only limits keep a call from blocks, the refusal does not say that the blocks are held."""
    cache = limited(4, max_blocks=2)
    reserve(cache, 1, "own")

    with pytest.raises(
        PoolFullError, match="granted now: the tenant's maximum keeps it"
    ) as refusal:
        reserve(cache, 2, "more")

    assert (refusal.value.rule, refusal.value.resource) == ("limits", "tenant_blocks")
    assert refusal.value.remedies == ("num_tokens=4",)
    reserve(cache, 1, "more")


def test_refusal_says_that_blocks_are_kept_for_others() -> None:
    """If others' minima keep a call from blocks, the refusal says so, and says what the call can have."""
    cache = limited(4, min_blocks=2)

    with pytest.raises(
        PoolFullError, match="what other tenants are guaranteed keeps it"
    ) as refusal:
        reserve(cache, 3, "more", worker_id=STRANGER)

    assert (refusal.value.rule, refusal.value.resource) == ("limits", "device_blocks")
    assert refusal.value.remedies == ("num_tokens=8",)
    reserve(cache, 2, "more", worker_id=STRANGER)


@pytest.mark.parametrize("longest_request_tokens", [2**31 - 1, 16])
def test_request_above_pool_and_maximum_learns_what_its_tenant_can_have(
    longest_request_tokens: int,
) -> None:
    """A request for more than the pool is told at once what its own tenant can have, and gets that."""
    shape = limited(8, max_blocks=3).shape
    cache = a_cache(8, tenants=shape.tenants, longest_request_tokens=longest_request_tokens)

    with pytest.raises(NeverFitsError, match="ask for at most 12 tokens") as refusal:
        reserve(cache, 9)

    assert refusal.value.remedies == ("num_tokens=12",)
    reserve(cache, 3)


def test_tenant_that_can_have_nothing_of_a_small_pool_is_told_no_number() -> None:
    """If a tenant cannot have even one token, the refusal of a request for more than the pool names no fewer tokens."""
    cache = limited(max_blocks=0)

    with pytest.raises(NeverFitsError, match="more than 8; register a larger pool") as refusal:
        reserve(cache, 9)

    assert refusal.value.remedies == ()


# Restart and checks ---------------------------------------------------------------------------------------------------


def test_restart_counts_anew() -> None:
    """After a restart each tenant's count follows from the columns, even above a maximum that was lowered meanwhile."""
    cache = a_cache()
    cached(cache, keys(1, 2, 3))
    cached(cache, keys(7), worker_id=STRANGER)
    committed(cache, keys(9))
    workers = {WORKER: TENANT, STRANGER: OTHER_TENANT}

    shape = limited(max_blocks=2).shape
    after = Cache.recovered(shape, records(cache), EPOCH, workers, 0.0)

    assert [one.used_blocks for one in after.list_tenants()] == [4, 1]
    assert after.check() == []
    reserve(after, 1, "more")
    assert facts(after).used_blocks == 2
    assert after.check() == []


def test_restart_without_limits_keeps_tenants_apart() -> None:
    """After a restart, blocks are counted by tenant if several have some, and not if one has all."""
    cache = a_cache()
    cached(cache, keys(1, 2, 3))
    cached(cache, keys(7), worker_id=STRANGER)

    after = Cache.recovered(cache.shape, records(cache), EPOCH, {WORKER: TENANT}, 0.0)

    assert [one.used_blocks for one in after.list_tenants()] == [3, 1]
    assert after._state.device.owners is not None
    assert after.check() == []


def test_single_tenant_pays_nothing() -> None:
    """With one tenant, and without limits and classes, nothing is counted by tenant."""
    cache = a_cache()
    cached(cache, keys(1, 2, 3))
    evict(cache, committed(cache, keys(4)).lease_id)

    assert cache._state.device.owners is None
    assert facts(cache).used_blocks == 4


def test_miscount_is_found() -> None:
    """A count that disagrees with the columns is a violation."""
    cache = limited(max_blocks=2)
    reserve(cache, 2)
    owners = cache._state.device.owners
    assert owners is not None
    owners._used[1] += 1

    assert cache.check() == [f"tenant {TENANT} uses (2, 0) blocks, but (3, 0) are counted"]


def test_use_above_the_maximum_is_found() -> None:
    """A tenant's use above its maximum is a violation."""
    cache = limited(max_blocks=2)
    fresh = cache._state.device.suitable(3, TENANT)
    assert fresh is not None
    cache._state.device.take(fresh, 0, TENANT)  # type: ignore[arg-type]  # GRANT

    assert f"tenant {TENANT} uses 3 blocks, but may use 2" in cache.check()


# Laws of all histories ------------------------------------------------------------------------------------------------

_LIMITS = {
    TENANT: TenantLimits(min_blocks=3, max_blocks=7, pinned_blocks_max=4),
    OTHER_TENANT: TenantLimits(min_blocks=4, weight=2.0, pinned_blocks_max=3),
}
_ACTS = st.lists(
    st.tuples(
        st.sampled_from([WORKER, MATE, STRANGER]),
        st.sampled_from(["use", "keep", "release", "pin", "unpin", "evict", "reload"]),
        st.integers(1, 5),
        st.integers(0, 2),
    ),
    max_size=40,
)


class Play:
    """A cache that workers use in any way, with every copy landing at once."""

    def __init__(self, cache: Cache) -> None:
        """Start with nothing held."""
        self.cache = cache
        self.leases: list[tuple[WorkerId, LeaseId]] = []
        self.pins: list[PinId] = []
        self.answers: list[object] = []
        self._sound = Sound()

    def send(self, command: c.Command) -> object:
        """Send a command, land its copies, check the cache, and return the answer or the refusal."""
        try:
            outcome = self.cache.handle(command, 0.0)
            answered: object = outcome.reply
            effects = list(outcome.effects)
        except KVLeaseError as error:
            answered, effects = (error.code, str(error)), self.cache.take_effects()
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Copy):
                effects += self.cache.handle(c.CopyDone(copy_id=effect.copy_id), 0.0).effects
        assert self.cache.check(self._sound) == []
        self.answers.append(answered)
        return answered

    def act(self, worker_id: WorkerId, kind: str, count: int, document: int) -> None:
        """Let a worker do one thing with blocks of one of its documents."""
        tenant = OTHER_TENANT if worker_id == STRANGER else TENANT
        packed = keys(*(1_000 * tenant + 100 * document + at for at in range(count)))
        if kind in ("use", "keep"):
            self._use(worker_id, count, packed, is_kept=kind == "keep")
        elif kind == "release" and self.leases:
            self._release(self.leases.pop(0))
        elif kind == "pin":
            reply = self.send(c.Pin(keys=packed, tenant_digest=tenant if document else None))
            if isinstance(reply, Pinned) and reply.pin_id:
                self.pins.append(reply.pin_id)
        elif kind == "unpin" and self.pins:
            self.send(c.Unpin(pin_id=self.pins.pop()))
        elif kind == "evict":
            self.send(c.Evict(worker_id=worker_id, keys=packed))
        elif kind == "reload":
            self.send(c.Reload(worker_id=worker_id, keys=packed))

    def release_all(self) -> None:
        """End all leases."""
        while self.leases:
            self._release(self.leases.pop())

    def _use(self, worker_id: WorkerId, count: int, packed: bytes, *, is_kept: bool) -> None:
        name = f"request {len(self.answers)}"
        reply = self.send(a_reserve(count, name, packed, worker_id=worker_id))
        if isinstance(reply, Reserved):
            self.leases.append((worker_id, reply.lease_id))
            commit(self.cache, reply.lease_id, packed, worker_id=worker_id)
            if not is_kept:
                self._release(self.leases.pop())

    def _release(self, lease: tuple[WorkerId, LeaseId]) -> None:
        self.send(c.Release(worker_id=lease[0], lease_id=lease[1]))


@given(_ACTS, st.sampled_from([WORKER, STRANGER]))
@settings(max_examples=60, deadline=None)
def test_minimum_can_always_be_had_once_others_leases_end(
    acts: Sequence[tuple[WorkerId, str, int, int]], worker_id: WorkerId
) -> None:
    """Whatever happened, and whatever is still pinned, a tenant gets its minimum, once blocks are scrubbed."""
    play = Play(a_cache(12, max_pins=8, tenants=_LIMITS))
    for act in acts:
        play.act(*act)
    play.release_all()
    tenant = OTHER_TENANT if worker_id == STRANGER else TENANT
    others = facts(play.cache, TENANT if tenant == OTHER_TENANT else OTHER_TENANT)
    own = facts(play.cache, tenant)

    need = own.min_blocks - own.pinned_blocks
    replies = [
        play.send(a_reserve(need, "own", worker_id=worker_id)) for _ in range(2 * (need > 0))
    ]

    assert not replies or isinstance(replies[-1], Reserved)
    after = facts(play.cache, others.tenant_digest)
    assert after.used_blocks >= min(others.used_blocks, others.min_blocks)


@given(_ACTS)
@settings(max_examples=50, deadline=None)
def test_limits_that_do_not_bind_change_nothing_for_a_single_tenant(
    acts: Sequence[tuple[WorkerId, str, int, int]],
) -> None:
    """A single tenant with workers gets the same answers with blocks counted for it and without."""
    plain = Play(a_cache(8, max_pins=8))
    counted = Play(a_cache(8, max_pins=8, tenants={TENANT: TenantLimits(min_blocks=1)}))

    for play in (plain, counted):
        play.cache.handle(c.Detach(worker_id=STRANGER), 0.0)
        for worker_id, kind, count, document in acts:
            play.act(MATE if worker_id == STRANGER else worker_id, kind, count, document)

    assert plain.answers == counted.answers
    assert plain.cache._state.device.owners is None


def test_minimum_keeps_a_lease_for_another_tenant_with_workers() -> None:
    """If some tenant has limits, the last lease is left to the tenant that has a worker and none yet."""
    cache = a_cache(8, tenants={TENANT: TenantLimits(min_blocks=1)})
    for number in range(7):
        reserve(cache, 1, f"request {number}")

    with pytest.raises(PoolFullError) as refusal:
        reserve(cache, 1, "one more")
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)

    assert refusal.value.rule == "kept_leases"
    assert reserve(cache, 1, "one more").lease_id


# Forks ----------------------------------------------------------------------------------------------------------------


def test_fork_leaves_others_their_minima() -> None:
    """A fork does not get the blocks that another tenant's minimum lacks."""
    cache = limited(8, others=TenantLimits(min_blocks=4))
    lease = reserve(cache, 4)
    command = c.Fork(
        worker_id=WORKER, lease_id=lease.lease_id, request_id="child", num_tokens=TOKENS_PER_BLOCK
    )

    with pytest.raises(PoolFullError) as refusal:
        cache.handle(command, 0.0)

    assert (refusal.value.need, refusal.value.available) == (1, 0)


def test_fork_above_the_maximum_never_fits() -> None:
    """A fork that takes more blocks than its tenant may ever have is refused for good."""
    cache = limited(8, max_blocks=3)
    lease = reserve(cache, 2)
    command = c.Fork(
        worker_id=WORKER,
        lease_id=lease.lease_id,
        request_id="child",
        num_tokens=4 * TOKENS_PER_BLOCK,
    )

    with pytest.raises(NeverFitsError) as refusal:
        cache.handle(command, 0.0)

    assert (refusal.value.resource, refusal.value.limit) == ("tenant_blocks", 3)
