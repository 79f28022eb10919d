"""Laws of pins: what is pinned stays on the device until it is unpinned."""

import pytest

from kvlease.errors import (
    PoolFullError,
)
from kvlease.ids import PinId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Pinned, Released
from kvleased.core.limits import TenantLimits
from tests.unit.service.core.builders import (
    OTHER_TENANT,
    STRANGER,
    TENANT,
    WAIT_MS,
    a_cache,
    a_full_cache,
    a_reserve,
    answer,
    cached,
    found,
    keys,
    reserve,
)


def pin(cache: Cache, packed: bytes, tenant: int | None = None) -> Pinned:
    """Pin cached blocks, as a tenant's worker or as an operator."""
    return answer(cache.handle(c.Pin(keys=packed, tenant_digest=tenant), 0.0), Pinned)


def unpin(cache: Cache, pin_id: PinId) -> bool:
    """End a pin."""
    return answer(cache.handle(c.Unpin(pin_id=pin_id), 0.0), Released).released


def test_pinned_blocks_are_not_evicted() -> None:
    """While a pin holds a block, other blocks make room."""
    cache = a_full_cache(3)
    reply = pin(cache, keys(2, 99, 2))

    reserve(cache, 2)

    assert reply.num_blocks == 1
    assert found(cache, keys(2)) == (1, 0)
    with pytest.raises(PoolFullError):
        reserve(cache, 1, "next")
    assert cache.check() == []


def test_unpinned_blocks_are_evictable_again() -> None:
    """A pin ends once; a second unpin is answered, and does nothing."""
    cache = a_full_cache(3)
    reply = pin(cache, keys(0, 1, 2))

    assert [unpin(cache, reply.pin_id), unpin(cache, reply.pin_id)] == [True, False]

    reserve(cache, 3)
    assert cache.check() == []


def test_block_can_be_pinned_twice() -> None:
    """Each of two pins holds a block by itself."""
    cache = a_full_cache(1)
    first = pin(cache, keys(0))
    pin(cache, keys(0))

    unpin(cache, first.pin_id)

    with pytest.raises(PoolFullError):
        reserve(cache, 1)


def test_pin_of_nothing_is_no_pin() -> None:
    """A pin of keys that are not on the device counts for nothing."""
    cache = a_cache(max_pins=1)

    replies = [pin(cache, keys(1)), pin(cache, keys(2))]

    assert {(reply.pin_id, reply.num_blocks) for reply in replies} == {(0, 0)}
    assert unpin(cache, replies[0].pin_id) is False


def test_pins_are_bounded() -> None:
    """There are no more pins than the limit, and the refusal names it."""
    cache = a_cache(max_pins=1)
    cached(cache, keys(1))
    pin(cache, keys(1))

    with pytest.raises(PoolFullError, match="unpin one first") as refusal:
        pin(cache, keys(1))

    assert (refusal.value.resource, refusal.value.limit) == ("pins", 1)
    assert refusal.value.retry_after_ms == 50


def test_pinned_prefix_is_shared_with_leases() -> None:
    """A pin and a lease may hold the same block; it is evictable only when both are gone."""
    cache = a_full_cache(2)
    reply = pin(cache, keys(0))
    outcome = cache.handle(a_reserve(1, "r", keys(0), wait_ms=WAIT_MS), 0.0)
    unpin(cache, reply.pin_id)

    with pytest.raises(PoolFullError):
        reserve(cache, 2, "next")

    assert outcome.reply is not None


# Budgets --------------------------------------------------------------------------------------------------------------


def test_worker_pins_its_own_tenants_blocks_only() -> None:
    """To a worker's pin, another tenant's blocks are not there."""
    cache = a_cache()
    cached(cache, keys(1, 2))
    cached(cache, keys(7), worker_id=STRANGER)

    assert pin(cache, keys(1, 7), TENANT).num_blocks == 1
    assert pin(cache, keys(1, 2), OTHER_TENANT).pin_id == 0


def test_pinned_blocks_of_a_tenant_are_bounded() -> None:
    """A tenant's pinned blocks, each counted once, stay within its budget; the refusal says how many there may be."""
    cache = a_cache(max_pins=8, tenants={TENANT: TenantLimits(pinned_blocks_max=3)})
    cached(cache, keys(1, 2, 3, 4))
    pin(cache, keys(1, 2), TENANT)
    pin(cache, keys(2, 3), TENANT)

    with pytest.raises(PoolFullError, match="unpin some") as refusal:
        pin(cache, keys(3, 4), TENANT)

    assert (refusal.value.resource, refusal.value.limit) == ("pinned_blocks", 3)
    assert (refusal.value.need, refusal.value.available) == (1, 0)
    assert refusal.value.retry_after_ms == 50


@pytest.mark.parametrize("tenant", [TENANT, None], ids=["worker", "operator"])
def test_pin_of_no_more_blocks_needs_no_budget(tenant: int | None) -> None:
    """Above a budget that was lowered, a pin of what is pinned, or of nothing, is made; more are refused."""
    cache = a_cache(max_pins=8, tenants={TENANT: TenantLimits(pinned_blocks_max=3)})
    cached(cache, keys(1, 2, 3, 4))
    pin(cache, keys(1, 2, 3), TENANT)
    limits = TenantLimits(pinned_blocks_max=1)
    cache.handle(c.Limit(tenants={TENANT: limits}, tenant_default=limits), 0.0)

    assert pin(cache, keys(9), tenant).num_blocks == 0
    assert pin(cache, keys(1, 3), tenant).num_blocks == 2
    with pytest.raises(PoolFullError, match="1 more block would be pinned, but only 0 more"):
        pin(cache, keys(1, 4), tenant)


def test_operator_is_bounded_by_all_tenants_together() -> None:
    """An operator may pin more of a tenant's blocks than that tenant may, but no more than all tenants may together."""
    limits = {TENANT: TenantLimits(pinned_blocks_max=1)}
    cache = a_cache(max_pins=8, tenants=limits, tenant_default=TenantLimits(pinned_blocks_max=1))
    cached(cache, keys(1, 2, 3))

    assert pin(cache, keys(1, 2)).num_blocks == 2
    with pytest.raises(PoolFullError) as refusal:
        pin(cache, keys(3))

    assert (refusal.value.resource, refusal.value.limit) == ("pinned_blocks", 2)


@pytest.mark.parametrize("tenant", [TENANT, None], ids=["worker", "operator"])
def test_pins_leave_every_minimum(tenant: int | None) -> None:
    """Blocks that another tenant's minimum needs cannot be pinned; its own pinned blocks count towards it."""
    cache = a_cache(8, max_pins=8, tenants={OTHER_TENANT: TenantLimits(min_blocks=5)})
    cached(cache, keys(7), worker_id=STRANGER)
    pin(cache, keys(7), OTHER_TENANT)
    cached(cache, keys(1, 2, 3))
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)
    cached(cache, keys(11))

    pin(cache, keys(1, 2, 3), tenant)
    with pytest.raises(PoolFullError) as refusal:
        pin(cache, keys(11), tenant)

    assert (refusal.value.resource, refusal.value.available) == ("pinned_blocks", 0)
    assert cache.check() == []


@pytest.mark.parametrize("tenant", [TENANT, None], ids=["worker", "operator"])
def test_pin_leaves_what_a_living_tenant_is_owed(tenant: int | None) -> None:
    """Leased and newly pinned blocks leave another tenant its minimum; the refusal says how many may be pinned."""
    cache = a_cache(8, max_pins=8, tenants={OTHER_TENANT: TenantLimits(min_blocks=3)})
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)
    reserve(cache, 3, "runs")
    cached(cache, keys(1, 2, 3, 4))
    cache.handle(c.Attach(worker_id=STRANGER, tenant_digest=OTHER_TENANT), 0.0)

    with pytest.raises(PoolFullError, match="must be able to get the others") as refusal:
        pin(cache, keys(1, 2, 3, 4), tenant)

    assert (refusal.value.rule, refusal.value.need, refusal.value.available) == (
        "tenant_minimum", 4, 2,
    )  # fmt: skip
    assert sum(one.num_blocks for one in refusal.value.holdings) == 8
    assert pin(cache, keys(1, 2), tenant).num_blocks == 2
    assert cache.check() == []


def test_operators_pin_of_several_tenants_blocks_leaves_every_minimum() -> None:
    """Blocks of two tenants in one pin leave a third one its minimum, as they would in two pins."""
    cache = a_cache(11, max_pins=8, tenants={9: TenantLimits(min_blocks=6)})
    reserve(cache, 4, "runs")
    cached(cache, keys(1, 2))
    cached(cache, keys(3, 4), worker_id=STRANGER)
    cache.handle(c.Attach(worker_id=WorkerId(4), tenant_digest=9), 0.0)

    with pytest.raises(PoolFullError, match="must be able to get the others") as refusal:
        pin(cache, keys(1, 3))

    assert (refusal.value.rule, refusal.value.need, refusal.value.available) == (
        "tenant_minimum", 2, 1,
    )  # fmt: skip
    pin(cache, keys(1))
    with pytest.raises(PoolFullError):
        pin(cache, keys(3))
    assert cache.check() == []


def test_pins_above_what_is_left_are_found() -> None:
    """Pinned blocks that a minimum needs are a violation."""
    cache = a_cache(4, tenants={OTHER_TENANT: TenantLimits(min_blocks=2)})
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)
    cached(cache, keys(1, 2, 3))
    state = cache._state
    blocks = state.device.cached(keys(1, 2, 3))
    state.device.hold(blocks)
    state.pins[PinId(1)] = blocks

    assert cache.check() == ["pins and minima add up to more than the pool"]
