"""Laws of refusals: each counts once, the most frequent come first, and each has its reason and advice."""

from pathlib import Path

import pytest

from kvlease.errors import NeverFitsError, PoolFullError
from kvleased.caches.tallies import REFUSALS_MAX, Tally
from kvleased.core.reasons import Reason
from kvleased.verbs.refused import ADVICE, refusals

RUNBOOK = Path(__file__).parents[4] / "docs/runbooks/KvleasePoolExhausted.md"


def test_refusals_are_summed_over_transports_and_say_why() -> None:
    """A refusal counts once over all transports; the most frequent come first, with advice."""
    codes = {
        ("reserve", "local", "POOL_FULL"): 2,
        ("reserve", "grpc", "POOL_FULL"): 3,
        ("map", "rest", "UNKNOWN_LEASE"): 7,
        ("map", "rest", "CANCELLED"): 1,
        ("map", "rest", "OK"): 100,
    }

    found = refusals(codes)

    assert [(one["verb"], one["code"], one["count"]) for one in found] == [
        ("map", "UNKNOWN_LEASE", 7),
        ("reserve", "POOL_FULL", 5),
        ("map", "CANCELLED", 1),
    ]
    assert [bool(one["why"]) for one in found] == [True, True, False]


def test_refusals_have_the_reason_of_their_metric() -> None:
    """Refusals for too few leases are not counted as for blocks, and all counts add up to the refusals answered."""
    tally = Tally()
    for _ in range(4):
        tally.refused("reserve", PoolFullError(rule="tenant_leases", resource="leases"))
    tally.refused("reserve", PoolFullError(rule="copies"))
    tally.refused("reserve", NeverFitsError(resource="blocks"))
    codes = {("reserve", "local", "POOL_FULL"): 7, ("reserve", "rest", "NEVER_FITS"): 1}

    found = {(one["code"], one["reason"]): one for one in refusals(codes, {"main": tally})}

    assert {kind: one["count"] for kind, one in found.items()} == {
        ("POOL_FULL", "tenant_leases"): 4,
        # Refusals of a cache that was deleted since.
        ("POOL_FULL", ""): 2,
        ("POOL_FULL", "copies"): 1,
        ("NEVER_FITS", "blocks"): 1,
    }
    assert "leases_max" in str(found["POOL_FULL", "tenant_leases"]["why"])
    assert "ask for less" in str(found["NEVER_FITS", "blocks"]["why"])


def test_refusal_above_a_tenants_maximum_is_told_whose_it_is() -> None:
    """A request above its tenant's maximum is not said to need a larger pool, which might not help."""
    tally = Tally()
    tally.refused("reserve", NeverFitsError(resource="tenant_blocks"))

    (found,) = refusals({("reserve", "local", "NEVER_FITS"): 1}, {"main": tally})

    assert "max_percent" in str(found["why"])
    assert "larger pool" not in str(found["why"])


def test_refusals_name_their_cache() -> None:
    """The same refusal by two caches is listed for each; one from before any cache was asked names no cache."""
    first, second = Tally(), Tally()
    first.refused("reserve", PoolFullError(rule="copies"))
    for _ in range(2):
        second.refused("reserve", PoolFullError(rule="copies"))

    found = refusals({("reserve", "local", "POOL_FULL"): 7}, {"first": first, "second": second})

    assert [(one["cache"], one["reason"], one["count"]) for one in found] == [
        ("", "", 4),
        ("second", "copies", 2),
        ("first", "copies", 1),
    ]


def test_refused_token_is_no_matter_of_workers_alone() -> None:
    """Advice on calls without a token says where kvlease gets one, and where the log names the callers."""
    (found,) = refusals({("list_caches", "rest", "UNKNOWN_WORKER"): 3})

    assert "KVLEASE_TOKEN_FILE" in str(found["why"])
    assert "caller_refused" in str(found["why"])


def test_refusals_that_are_not_told_apart_are_told() -> None:
    """Kinds above a tally's limit are listed by their codes."""
    tally = Tally()
    for number in range(REFUSALS_MAX + 3):
        tally.refused("pin", PoolFullError(rule=f"rule-{number}"))

    found = refusals({("pin", "local", "POOL_FULL"): REFUSALS_MAX + 3}, {"main": tally})

    assert (found[0]["reason"], found[0]["count"], len(found)) == ("", 3, REFUSALS_MAX + 1)


@pytest.mark.parametrize("reason", list(Reason))
def test_each_reason_has_its_advice(reason: Reason) -> None:
    """Each reason for a lack of room has its advice, and the runbook describes it."""
    assert ADVICE[reason.value].endswith(".")
    assert f"`{reason.value}`" in RUNBOOK.read_text()
