"""A breaker lets no call through to a store that fails, and closes again by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvleased.movers.remote.breaker import Breaker


def _failed(times: int, **limits: float) -> Breaker:
    breaker = Breaker(**limits)  # type: ignore[arg-type]
    for _ in range(times):
        breaker.fail(0.0, is_grave=False)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    """One failure less than the limit leaves it closed."""
    assert _failed(2, failures_max=3).is_closed
    assert not _failed(3, failures_max=3).is_closed


def test_success_between_failures_keeps_it_closed() -> None:
    """Only failures in a row count."""
    breaker = _failed(2, failures_max=3)

    breaker.succeed()
    breaker.fail(0.0, is_grave=False)

    assert breaker.is_closed
    assert repr(breaker) == "<Breaker closed, 1 failures>"


def test_grave_failure_opens_at_once() -> None:
    """One failure that cost a whole budget opens the breaker."""
    breaker = Breaker()

    breaker.fail(5.0, is_grave=True)

    assert not breaker.is_closed
    assert breaker.seconds_to_trial(5.0) == 0.5
    assert repr(breaker) == "<Breaker open>"


def test_pauses_double_up_to_their_limit() -> None:
    """Each trial that fails doubles the pause."""
    breaker, now, pauses = Breaker(open_seconds_first=1.0, open_seconds_max=5.0), 0.0, []

    for _ in range(5):
        breaker.fail(now, is_grave=True)
        pauses.append(breaker.seconds_to_trial(now))
        now += pauses[-1]

    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_trial_closes_it() -> None:
    """After the pause a trial is due, and if it succeeds all calls are let through."""
    breaker = Breaker(open_seconds_first=1.0)
    breaker.fail(0.0, is_grave=True)

    assert breaker.seconds_to_trial(0.75) == 0.25
    assert breaker.seconds_to_trial(3.0) == 0.0
    breaker.succeed()

    assert breaker.is_closed
    assert breaker.seconds_to_trial(3.0) == 0.0


@pytest.mark.parametrize(("num_successes", "pause"), [(1, 2.0), (2, 1.0)])
def test_pauses_start_anew_once_more_than_the_trial_went_well(
    num_successes: int, pause: float
) -> None:
    """If only the trial succeeded, the next pause is longer; after another success, pauses start anew."""
    breaker = Breaker(open_seconds_first=1.0)
    breaker.fail(0.0, is_grave=True)

    for _ in range(num_successes):
        breaker.succeed()
    breaker.fail(10.0, is_grave=True)

    assert breaker.seconds_to_trial(10.0) == pause


@given(st.lists(st.sampled_from(["good", "bad", "grave"]), max_size=200))
def test_trial_is_always_near(events: list[str]) -> None:
    """Whatever happened, a trial is due within the longest pause, and one success closes it."""
    breaker = Breaker()
    for event in events:
        if event == "good":
            breaker.succeed()
        else:
            breaker.fail(0.0, is_grave=event == "grave")

    assert 0.0 <= breaker.seconds_to_trial(0.0) <= breaker.open_seconds_max
    breaker.succeed()
    assert breaker.is_closed


def test_years_without_a_store_overflow_nothing() -> None:
    """However long the store is away, the pause stays at its limit."""
    breaker = _failed(3_000)

    assert breaker.seconds_to_trial(0.0) == breaker.open_seconds_max
