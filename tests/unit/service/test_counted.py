"""Refusals count in the singular or the plural."""

import pytest

from kvlease.errors import KVLeaseError
from kvleased.calls import checks
from kvleased.counted import are, counted, there_are


def test_one_is_no_several() -> None:
    """Noun and verb agree with the number; zero takes the plural."""
    assert [counted(number, "block") for number in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
    assert [are(number, "block") for number in (1, 2)] == ["1 block is", "2 blocks are"]
    assert counted(1, "call", "waits", "wait") == "1 call waits"
    assert there_are(1, "cache") == "there is 1 cache"
    assert there_are(3, "cache") == "there are 3 caches"


def test_refusal_of_one_says_one() -> None:
    """A refusal about one byte of a packed field uses the singular."""
    with pytest.raises(KVLeaseError, match="keys has 1 byte; it must"):
        checks.keys("keys", b"x", 1)
