"""Laws of the guard: no error gets out, a silent daemon is asked seldom, and a refusal is heard."""

import logging
import weakref
from collections.abc import Callable

import pytest

from kvlease.errors import (
    DeadlineError,
    InvalidError,
    PoolFullError,
    StartingError,
    UnavailableError,
    UnknownCacheError,
)
from kvlease.integrations.vllm.session import outages
from kvlease.integrations.vllm.session.guard import Guard


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


def make_guard(clock: Clock, *, is_probed: bool = False) -> Guard:
    """Return a guard with a deadline of 1 s that tries again after 10 s."""
    return Guard(deadline_seconds=1, retry_seconds=10, is_probed=is_probed, clock=clock)


def failing(error: BaseException) -> Callable[[], str]:
    """Return a function that raises."""

    def fail() -> str:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(UnavailableError(), id="away"),
        pytest.param(DeadlineError(), id="late"),
        pytest.param(StartingError(), id="starting"),
    ],
)
def test_unanswered_call_opens_the_breaker(error: Exception) -> None:
    """A call without an answer gives its default; the next calls give theirs without asking."""
    guard = make_guard(Clock())

    first = guard.call(failing(error), "default", "call")
    second = guard.call(lambda: pytest.fail("it was asked"), "default", "call")

    assert (first, second) == ("default", "default")
    assert guard.is_open
    assert (guard.counts.unanswered, guard.counts.skipped, guard.counts.opened) == (1, 1, 1)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(PoolFullError(), id="full"),
        pytest.param(InvalidError(), id="invalid"),
        pytest.param(UnknownCacheError(), id="stale"),
    ],
)
def test_refused_call_leaves_the_breaker_closed(error: Exception) -> None:
    """A refusal is an answer: the next call is made, and the refusal's code is kept until a call succeeds."""
    guard = make_guard(Clock())

    refused = guard.call(failing(error), "default", "call")
    code = guard.refusal("call")
    answered = guard.call(lambda: "answer", "default", "call")

    assert (refused, code, answered) == ("default", error.code, "answer")  # type: ignore[attr-defined]
    assert guard.refusal("call") == ""
    assert not guard.is_open


def test_open_breaker_lets_one_call_through_after_its_time() -> None:
    """After retry_seconds one of several calls is made; if it fails, the others stay out again."""
    clock = Clock()
    guard = make_guard(clock)
    guard.call(failing(DeadlineError()), None, "call")
    clock.now += 10

    guard.call(failing(DeadlineError()), None, "call")
    skipped = guard.call(lambda: pytest.fail("it was asked"), "default", "call")

    assert skipped == "default"
    assert guard.counts.calls == 2


def test_success_of_the_one_call_closes_the_breaker() -> None:
    """A call that succeeds after retry_seconds gives its answer, and all others are made again."""
    clock = Clock()
    guard = make_guard(clock)
    guard.call(failing(DeadlineError()), None, "call")
    clock.now += 10

    answers = [guard.call(lambda: "answer", "default", "call") for _ in range(2)]

    assert answers == ["answer", "answer"]
    assert not guard.is_open


def test_probed_breaker_waits_for_its_probe() -> None:
    """With a probe, no hook spends its time on trying: the probe's success closes the breaker."""
    clock = Clock()
    guard = make_guard(clock, is_probed=True)
    guard.call(failing(DeadlineError()), None, "call")
    clock.now += 1_000

    before = guard.call(lambda: "answer", "default", "call")
    guard.recover()
    after = guard.call(lambda: "answer", "default", "call")

    assert (before, after) == ("default", "answer")


def test_mistake_of_our_own_does_not_get_out(caplog: pytest.LogCaptureFixture) -> None:
    """Any Exception gives the default, is counted, and is logged once with its traceback."""
    guard = make_guard(Clock())

    calls = [guard.call(failing(ZeroDivisionError()), "default", "call") for _ in range(3)]
    shielded = guard.shield(failing(KeyError("x")), "default", "hook")

    assert [*calls, shielded] == ["default"] * 4
    assert guard.counts.faults == 4
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_what_ends_the_process_gets_out() -> None:
    """An interrupt is not a failure of the daemon."""
    guard = make_guard(Clock())

    with pytest.raises(KeyboardInterrupt):
        guard.call(failing(KeyboardInterrupt()), None, "call")


def test_breaker_is_logged_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    """However many calls fail, one line says that the daemon is away, and one that it is back."""
    clock = Clock()
    guard = make_guard(clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            guard.call(failing(DeadlineError()), None, "call")
            clock.now += 10
        guard.call(lambda: "answer", None, "call")

    actions = [record.action for record in caplog.records]  # type: ignore[attr-defined]

    assert actions == ["breaker_open", "breaker_closed"]


def test_refusal_is_logged_once_per_code(caplog: pytest.LogCaptureFixture) -> None:
    """The same refusal again is not logged; another one is."""
    guard = make_guard(Clock())
    with caplog.at_level(logging.WARNING):
        for error in (PoolFullError(), PoolFullError(), UnknownCacheError()):
            guard.call(failing(error), None, "call")

    codes = [record.code for record in caplog.records]  # type: ignore[attr-defined]

    assert codes == ["POOL_FULL", "UNKNOWN_CACHE"]


def test_late_answer_is_an_answer_and_counted() -> None:
    """An answer after the deadline is still an answer."""
    clock = Clock()
    guard = make_guard(clock)

    def slow() -> str:
        clock.now += 2
        return "answer"

    answer = guard.call(slow, "default", "call")

    assert answer == "answer"
    assert guard.counts.late == 1


def test_repr_shows_life() -> None:
    """The repr shows the state and the calls."""
    guard = make_guard(Clock())
    guard.call(failing(DeadlineError()), None, "call")
    guard.call(lambda: None, None, "call")

    assert repr(guard) == "<Guard open, 1 calls, 1 skipped>"


def test_guards_of_one_daemon_tell_of_an_outage_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first guard to find the daemon away logs it, and the last to hear it again; none waits for one that left."""
    caplog.set_level(logging.WARNING)
    away = outages.of("unix:///nobody")
    first, second, third = (
        Guard(deadline_seconds=1, retry_seconds=10, away=outages.of("unix:///nobody"))
        for _ in range(3)
    )
    for guard in (first, second, third):
        guard.call(failing(UnavailableError()), None, "call")
    assert [one.is_open and one.is_away for one in (first, second, third)] == [True] * 3
    assert len(caplog.messages) == 1
    assert first.counts.opened == second.counts.opened == 1

    second.recover()
    third.leave()
    assert len(caplog.messages) == 1
    first.end_outage()

    assert caplog.messages[1:] == ["The kvlease daemon answers again."]
    assert not away
    assert first.is_open
    assert not second.is_open


def test_guards_of_other_daemons_have_outages_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A daemon that is there says nothing about another one."""
    caplog.set_level(logging.WARNING)
    for address in ("unix:///one", "unix:///other"):
        guard = Guard(deadline_seconds=1, retry_seconds=10, away=outages.of(address))
        assert guard.begin_outage()
        assert not guard.begin_outage()
        guard.recover()

    assert caplog.messages == ["The kvlease daemon answers again."] * 2


def test_outages_belong_to_the_guards_that_have_them() -> None:
    """What the guards of a daemon share exists as long as one of them does."""
    guard = Guard(deadline_seconds=1, retry_seconds=10, away=outages.of("unix:///forgotten"))
    shared = weakref.ref(outages.of("unix:///forgotten"))
    is_shared = shared() is outages.of("unix:///forgotten")
    del guard

    assert is_shared
    assert shared() is None
