"""Laws of kept rows and pins: some are kept for each tenant, so that another that takes all it can shuts none out."""

from dataclasses import replace

import pytest

from kvlease.errors import PoolFullError
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Forked, Outcome, Pinned, Reserved
from kvleased.core.lease.allowances import Allowances
from kvleased.core.limits import TenantLimits
from tests.unit.service.core.builders import (
    OTHER_TENANT,
    STRANGER,
    TENANT,
    WORKER,
    a_cache,
    a_reserve,
    answer,
    cached,
    keys,
    reserve,
    woken,
)

_GUARDED = {OTHER_TENANT: TenantLimits(min_blocks=4)}


def flooded(cache: Cache, count: int) -> list[Reserved]:
    """Have a tenant take the given number of rows by leases of one block, and be refused one more."""
    leases = [reserve(cache, 1, f"flood-{number}") for number in range(count)]
    with pytest.raises(PoolFullError) as refused:
        cache.handle(a_reserve(1, "one more"), 0.0)
    assert (refused.value.resource, refused.value.rule) == ("leases", "kept_leases")
    return leases


def pin(cache: Cache, tenant: int | None, number: int) -> Pinned:
    """Pin the block of a key for a tenant."""
    return answer(cache.handle(c.Pin(keys=keys(number), tenant_digest=tenant), 0.0), Pinned)


def _of_rows(cache: Cache, count: int) -> Allowances:
    """Divide the given number of rows under a cache's limits."""
    return Allowances.of_rows(replace(cache.shape, max_leases=count))


# Rows -----------------------------------------------------------------------------------------------------------------


def test_flood_of_leases_leaves_the_rows_of_a_minimum() -> None:
    """A minimum keeps as large a part of the rows as it is of the pool, besides an equal part of half of the rest."""
    cache = a_cache(40, max_leases=20, tenants={OTHER_TENANT: TenantLimits(min_blocks=16)})

    flooded(cache, 20 - 8 - 3)

    for number in range(8 + 3):
        reserve(cache, 1, f"chat-{number}", worker_id=STRANGER)
    with pytest.raises(PoolFullError, match="all 20 leases are in use"):
        cache.handle(a_reserve(1, "late", worker_id=STRANGER), 0.0)
    assert cache.check() == []


def test_tenant_without_a_minimum_has_its_even_part() -> None:
    """A tenant with a minimum takes no row that is kept for others in equal parts."""
    cache = a_cache(40, max_leases=20, tenants={OTHER_TENANT: TenantLimits(min_blocks=16)})
    for number in range(20 - 3):
        reserve(cache, 1, f"chat-{number}", worker_id=STRANGER)

    with pytest.raises(
        PoolFullError,
        match="has 17 leases and others have 0; 3 of 20 leases are left, and",
    ):
        cache.handle(a_reserve(1, "chat", worker_id=STRANGER), 0.0)
    reserve(cache, 1, "another")


def test_without_limits_nothing_is_kept() -> None:
    """If no tenant has limits, one tenant may have all rows, and nothing is looked up for it."""
    cache = a_cache(8, max_leases=8)

    for number in range(8):
        reserve(cache, 1, str(number))

    assert not cache._state.keeps_rows
    with pytest.raises(PoolFullError) as refused:
        cache.handle(a_reserve(1, "late"), 0.0)
    assert refused.value.rule == "leases"


def test_rows_are_kept_for_attached_tenants_only() -> None:
    """Rows that are kept for a tenant without workers are lent to others."""
    cache = a_cache(8, max_leases=8, tenants=_GUARDED)
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)

    for number in range(8):
        reserve(cache, 1, str(number))


def test_no_more_rows_are_kept_than_a_tenant_may_have() -> None:
    """If a tenant's cap is below what would be kept for it, the rest is left to others."""
    limits = {OTHER_TENANT: TenantLimits(min_blocks=4, leases_max=1)}
    cache = a_cache(16, max_leases=8, tenants=limits)

    flooded(cache, 7)


def test_fork_leaves_kept_rows() -> None:
    """A fork takes a row, and leaves those that are kept."""
    cache = a_cache(16, max_leases=8, tenants={OTHER_TENANT: TenantLimits(min_blocks=8)})
    parent = flooded(cache, 3)[0]
    fork = c.Fork(
        worker_id=WORKER, lease_id=parent.lease_id, request_id="fork", num_tokens=4, wait_ms=0
    )

    with pytest.raises(PoolFullError) as refused:
        cache.handle(fork, 0.0)

    assert refused.value.rule == "kept_leases"
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)
    outcome = cache.handle(fork, 0.0)
    assert isinstance(outcome, Outcome)
    assert outcome.ticket is not None or isinstance(outcome.reply, Forked)


def test_call_that_waits_for_a_row_keeps_no_other_tenant_waiting() -> None:
    """A tenant gets its kept row at once, though another's call waits; that call gets its own tenant's next row."""
    cache = a_cache(16, max_leases=8, tenants={OTHER_TENANT: TenantLimits(min_blocks=8)})
    leases = flooded(cache, 3)
    waiting = cache.handle(a_reserve(1, "waits", wait_ms=5_000), 0.0)
    (facts,) = cache.list_waiting(0, 9, 0.0)

    reserve(cache, 1, "chat", worker_id=STRANGER)
    outcome = cache.handle(c.Release(worker_id=WORKER, lease_id=leases[0].lease_id), 0.0)

    assert facts.reason == "kept_leases"
    assert woken(outcome, waiting.ticket, Reserved)


# Pins -----------------------------------------------------------------------------------------------------------------


def test_flood_of_pins_leaves_those_of_others() -> None:
    """However often one key is pinned, the pins of others are kept, and a minimum's even while nobody is attached."""
    cache = a_cache(16, max_pins=8, tenants=_GUARDED)
    cached(cache, keys(1))
    cached(cache, keys(2), worker_id=STRANGER)
    for _ in range(8 - 2 - 1):
        pin(cache, TENANT, 1)

    with pytest.raises(PoolFullError, match="the last 3 are kept for other tenants") as refused:
        pin(cache, TENANT, 1)
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)
    with pytest.raises(PoolFullError, match="the last 2 are kept"):
        pin(cache, TENANT, 1), pin(cache, TENANT, 1)

    assert refused.value.rule == "kept_pins"
    assert [pin(cache, OTHER_TENANT, 2).num_blocks for _ in range(2)] == [1, 1]
    with pytest.raises(PoolFullError, match="unpin one first") as refused:
        pin(cache, None, 2)
    assert refused.value.rule == "pins"


@pytest.mark.parametrize(
    ("budget", "count", "refusal"), [(5, 5, "the last 3 are kept"), (0, 8, "unpin one first")]
)
def test_pins_are_kept_whatever_leases_a_tenant_may_have(
    budget: int, count: int, refusal: str
) -> None:
    """A cap of leases does not limit pins; a tenant that may pin no block is kept no pin, even if it is attached."""
    limits = {OTHER_TENANT: TenantLimits(min_blocks=4, leases_max=1, pinned_blocks_max=budget)}
    cache = a_cache(16, max_pins=8, tenants=limits)
    cached(cache, keys(1))
    cached(cache, keys(2), worker_id=STRANGER)
    for _ in range(count):
        pin(cache, TENANT, 1)

    with pytest.raises(PoolFullError, match=refusal):
        pin(cache, TENANT, 1)


def test_operator_may_pin_what_is_kept_and_counts_to_nobody() -> None:
    """An operator may take kept pins, and its pin over blocks of several tenants counts for none of them."""
    cache = a_cache(16, max_pins=4)
    cached(cache, keys(1))
    cached(cache, keys(2), worker_id=STRANGER)
    both = c.Pin(keys=keys(1) + keys(2), tenant_digest=None)
    for _ in range(3):
        assert answer(cache.handle(both, 0.0), Pinned).num_blocks == 2

    with pytest.raises(PoolFullError, match="the last 1 are kept"):
        pin(cache, TENANT, 1)
    pin(cache, None, 1)


# Shares ---------------------------------------------------------------------------------------------------------------


def test_parts_are_rounded_down_where_they_do_not_all_fit() -> None:
    """If there are more tenants with minima than rows, none is kept a row, so that each can have one."""
    tenants = {number: TenantLimits(min_blocks=2) for number in range(4)}
    cache = a_cache(8, max_leases=3, tenants=tenants)

    assert _of_rows(cache, 3).parts == dict.fromkeys(range(4), 0)
    assert _of_rows(cache, 6).parts == dict.fromkeys(range(4), 1)
    assert _of_rows(cache, 4).parts == dict.fromkeys(range(4), 1)


def test_allowances_show_what_is_kept() -> None:
    """After the minima, half of the remaining rows is kept in equal parts."""
    cache = a_cache(8, tenants=_GUARDED)

    assert repr(_of_rows(cache, 8)) == f"<Allowances {{{OTHER_TENANT}: 4}}, 2 in equal parts>"
    assert _of_rows(cache, 8).most == 6
