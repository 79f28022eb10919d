"""Places of workers are kept for callers that are not joiners, for minima, and for tenants without workers."""

from collections import Counter

import pytest

from kvlease.errors import BusyError
from kvleased.caches.worker_allowances import WorkerAllowances
from kvleased.config.tenant_settings import TenantSettings


def attach_all(
    allowances: WorkerAllowances, has: Counter[str], tenant: str, *, is_joiner: bool = False
) -> tuple[int, BusyError]:
    """Attach workers of a tenant until one is refused; return how many were attached, and the refusal."""
    for count in range(1_000):
        try:
            allowances.require_one(tenant, has, count if is_joiner else None)
        except BusyError as error:
            return count, error
        has[tenant] += 1
    raise AssertionError


def test_one_tenant_without_limits_may_have_all_places() -> None:
    """Where no tenant has limits, there are as many workers as the setting says."""
    count, refusal = attach_all(WorkerAllowances({}, 16), Counter(), "default")

    assert (count, refusal.resource, refusal.rule, refusal.limit) == (16, "workers", "workers", 16)


def test_joiners_leave_half_of_the_places() -> None:
    """Joiners cannot shut out callers that attach on the node."""
    allowances, has = WorkerAllowances({}, 16), Counter[str]()

    count, refusal = attach_all(allowances, has, "default", is_joiner=True)

    assert (count, refusal.rule, refusal.limit) == (8, "joiners", 8)
    assert attach_all(allowances, has, "default")[0] == 8
    assert attach_all(WorkerAllowances({}, 1), Counter(), "default", is_joiner=True)[0] == 1


def test_flood_of_workers_leaves_the_places_of_minima_and_of_newcomers() -> None:
    """Half of the places is divided by the minima; the last eighth is for tenants without workers."""
    tenants = {"chat": TenantSettings(min_percent=50), "batch": TenantSettings(min_bytes=1)}
    allowances, has = WorkerAllowances({}, 16).under(tenants), Counter[str]()

    count, refusal = attach_all(allowances, has, "flood")

    assert (count, refusal.rule) == (16 - 4 - 1 - 2, "kept_places")
    assert attach_all(allowances, has, "another")[0] == 1
    assert attach_all(allowances, has, "chat")[0] == 4
    assert attach_all(allowances, has, "batch")[0] == 1
    assert attach_all(allowances, has, "newcomer")[0] == 1
    assert repr(allowances) == "<WorkerAllowances 16, kept {'chat': 4, 'batch': 1}>"


def test_flood_of_joiners_leaves_the_places_of_minima_to_joiners_too() -> None:
    """A tenant with a minimum gets its places over TCP, too, but no more than those once joiners have their half."""
    allowances = WorkerAllowances({"chat": TenantSettings(min_percent=50)}, 16)
    has = Counter[str]()
    flooded, _ = attach_all(allowances, has, "flood", is_joiner=True)

    for _ in range(4):
        allowances.require_one("chat", has, flooded)
        has["chat"] += 1
    with pytest.raises(BusyError, match="no place is kept for this tenant") as caught:
        allowances.require_one("chat", has, flooded + 4)

    assert flooded == 8
    assert caught.value.rule == "joiners"


def test_refused_tenant_is_told_whose_worker_may_go() -> None:
    """A refused tenant without a worker is told to detach a worker of another tenant."""
    allowances = WorkerAllowances({"chat": TenantSettings(min_percent=100)}, 4)
    has = Counter({"batch": 2})

    for tenant, whose in (("batch", "this tenant's"), ("newcomer", "another tenant's")):
        with pytest.raises(BusyError, match=f"detach one of {whose}") as caught:
            allowances.require_one(tenant, has, None)
        assert caught.value.rule == "kept_places"
        assert "the last 2 places are kept" in caught.value.message

    with pytest.raises(BusyError, match="the last place is kept"):
        allowances.require_one("batch", has + Counter({"chat": 1}), None)


def test_minima_beyond_half_of_the_places_are_rounded_down() -> None:
    """If there are more minima than places to keep, none is kept."""
    tenants = {str(number): TenantSettings(min_percent=1) for number in range(9)}

    assert attach_all(WorkerAllowances(tenants, 16), Counter(), "flood")[0] == 16 - 2
