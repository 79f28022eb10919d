"""Laws of what an engine tells later: every missed key once, and no key that was asked for after all."""

import pytest

from kvlease.integrations.vllm import untold as ledger
from kvlease.integrations.vllm.untold import Untold


def test_missed_keys_are_told_once_in_the_order_of_their_requests() -> None:
    """Keys that were taken are not told again, whatever becomes of the exchange."""
    untold: Untold[int] = Untold()
    untold.note("a", [1, 2])
    untold.note("b", [3])

    assert len(untold) == 3
    assert untold.take() == [1, 2, 3]
    assert (len(untold), untold.take()) == (0, [])


def test_request_that_misses_again_is_told_of_once() -> None:
    """A waiting request is looked up in every step, and its misses are told of once."""
    untold: Untold[int] = Untold()
    untold.note("a", [1, 2, 3])
    untold.note("a", [1, 2])

    assert (len(untold), untold.take()) == (2, [1, 2])


@pytest.mark.parametrize(("asked", "left"), [(None, []), ([2, 9], [1, 3]), ([1, 2, 3], [])])
def test_keys_that_were_asked_for_are_not_told(asked: list[int] | None, left: list[int]) -> None:
    """Keys that were asked for are not told, because the daemon has counted them with the call."""
    untold: Untold[int] = Untold()
    untold.note("a", [1, 2, 3])

    untold.drop("a", asked)
    untold.drop("never seen", asked)

    assert (len(untold), untold.take()) == (len(left), left)


def test_one_exchange_tells_of_so_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One exchange takes a limited number of keys, and the rest of a long request comes first the next time."""
    monkeypatch.setattr(ledger, "TOLD_MAX", 3)
    untold: Untold[int] = Untold()
    untold.note("a", [1])
    untold.note("b", [2, 3, 4, 5])
    untold.note("c", [6])

    assert [untold.take() for _ in range(3)] == [[1, 2, 3], [4, 5, 6], []]


def test_what_is_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys above the limit are not kept, so an engine whose daemon stays away does not grow."""
    monkeypatch.setattr(ledger, "UNTOLD_MAX", 3)
    untold: Untold[int] = Untold()
    untold.note("a", [1, 2])
    untold.note("b", [3, 4])
    untold.note("c", [5])

    assert untold.take() == [1, 2, 5]


def test_nothing_is_told_of_keys_that_mean_something_else() -> None:
    """After a reset no key is told, because the keys mean other blocks."""
    untold: Untold[int] = Untold()
    untold.note("a", [1])

    untold.clear()

    assert (len(untold), untold.take()) == (0, [])
