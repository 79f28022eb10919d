"""Laws of what is told of refusals: each counts once, the most frequent first, with its reason and what to do."""

from pathlib import Path

import pytest

from kvlease.errors import NeverFitsError, PoolFullError
from kvleased.core.reasons import Reason
from kvleased.tallies import REFUSALS_MAX, Tally
from kvleased.verbs.refused import ADVICE, refusals

RUNBOOK = Path(__file__).parents[4] / "docs/runbooks/KvleasePoolExhausted.md"


def test_refusals_are_summed_over_transports_and_say_why() -> None:
    """A refusal counts once, by whichever transport it was sent, the most frequent first, with what to do."""
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
    """What too few leases refused is not told as a want of blocks; all together are what was answered."""
    tally = Tally()
    for _ in range(4):
        tally.refused("reserve", PoolFullError(rule="tenant_leases", resource="leases"))
    tally.refused("reserve", PoolFullError(rule="copies"))
    tally.refused("reserve", NeverFitsError(resource="blocks"))
    codes = {("reserve", "local", "POOL_FULL"): 7, ("reserve", "rest", "NEVER_FITS"): 1}

    found = {(one["code"], one["reason"]): one for one in refusals(codes, {"main": tally})}

    assert {kind: one["count"] for kind, one in found.items()} == {
        ("POOL_FULL", "tenant_leases"): 4,
        # Of a cache that was deleted since.
        ("POOL_FULL", ""): 2,
        ("POOL_FULL", "copies"): 1,
        ("NEVER_FITS", "blocks"): 1,
    }
    assert "leases_max" in str(found["POOL_FULL", "tenant_leases"]["why"])
    assert "ask for less" in str(found["NEVER_FITS", "blocks"]["why"])


def test_refusals_name_their_cache() -> None:
    """What two caches refused alike is told of each; what came before any cache was asked is of none."""
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
    """Who reads of calls without a token learns where kvlease has one from, and who called."""
    (found,) = refusals({("list_caches", "rest", "UNKNOWN_WORKER"): 3})

    assert "KVLEASE_TOKEN_FILE" in str(found["why"])
    assert "caller_refused" in str(found["why"])


def test_refusals_that_are_not_told_apart_are_told() -> None:
    """Kinds above the limit of a tally are told by their codes."""
    tally = Tally()
    for number in range(REFUSALS_MAX + 3):
        tally.refused("pin", PoolFullError(rule=f"rule-{number}"))

    found = refusals({("pin", "local", "POOL_FULL"): REFUSALS_MAX + 3}, {"main": tally})

    assert (found[0]["reason"], found[0]["count"], len(found)) == ("", 3, REFUSALS_MAX + 1)


@pytest.mark.parametrize("reason", list(Reason))
def test_each_reason_has_its_advice(reason: Reason) -> None:
    """There is a sentence for whatever keeps callers from room, and the runbook knows it, too."""
    assert ADVICE[reason.value].endswith(".")
    assert f"`{reason.value}`" in RUNBOOK.read_text()
