"""No call of a store is waited for beyond its deadline, and no two calls overlap."""

import threading
from collections.abc import Callable, Iterator

import pytest

from kvleased.movers.remote.bounded import Bounded, StuckError
from kvleased.movers.remote.store import RemoteError, no_answer
from tests.unit.service.movers.remote.remote_node import PLENTY_SECONDS, wait_until


class Store:
    """A store with one operation, which waits until the test lets it go on."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_cuts = 0
        self.is_closed = threading.Event()
        self.advice = ""

    def wait(self) -> str:
        """Wait for the test."""
        assert self.may_end.wait(60)
        return "late"

    def cut(self) -> None:
        """Count the cut."""
        self.num_cuts += 1

    def close(self) -> None:
        """Note that the store was closed."""
        self.is_closed.set()


@pytest.fixture
def store() -> Iterator[Store]:
    """A store whose waiting call ends with the test."""
    store = Store()
    yield store
    store.may_end.set()


def _bounded(store: Store, stuck_seconds_max: float = 60.0) -> Bounded:
    return Bounded(lambda: store, stuck_seconds_max)  # type: ignore[arg-type,return-value]


def _late(bounded: Bounded, store: Store) -> None:
    with pytest.raises(RemoteError, match="within 10 ms") as refusal:
        bounded.call(lambda _: store.wait(), 0.01)
    assert refusal.value.is_timeout


def test_answers_come_back(store: Store) -> None:
    """A call in time returns the store's answer; the last call closes the store."""
    bounded = _bounded(store)

    assert bounded.call(lambda _: 7, PLENTY_SECONDS) == 7
    bounded.close()
    assert store.is_closed.wait(60)


def test_late_answer_is_never_taken_for_another(store: Store) -> None:
    """A late call is cut off; until it ends, other calls are refused, and its answer is given to none of them."""
    bounded = _bounded(store)
    bounded.call(lambda _: None, PLENTY_SECONDS)
    _late(bounded, store)

    with pytest.raises(RemoteError, match="has not returned yet"):
        bounded.call(lambda _: "other", PLENTY_SECONDS)
    assert repr(bounded) == "<Bounded stuck>"
    store.may_end.set()
    wait_until(lambda: not bounded.is_stuck)

    assert bounded.call(lambda _: "next", PLENTY_SECONDS) == "next"
    assert store.num_cuts == 1
    assert repr(bounded) == "<Bounded ready>"


def test_late_call_is_told_with_what_the_store_advises(store: Store) -> None:
    """The error of a late call has the store's advice along with the deadline, as it was before the cut."""
    bounded = _bounded(store)
    bounded.call(lambda _: None, PLENTY_SECONDS)
    store.advice = "name it otherwise"

    with pytest.raises(RemoteError, match="no answer within 10 ms; name it otherwise"):
        bounded.call(lambda _: store.wait(), 0.01)


def test_call_that_never_ends_costs_the_process(store: Store) -> None:
    """A call that hangs beyond its time is a reason to end the process."""
    bounded = _bounded(store, stuck_seconds_max=0.0)
    bounded.check()
    _late(bounded, store)

    with pytest.raises(StuckError):
        bounded.check()


def test_store_that_cannot_be_opened_is_opened_again() -> None:
    """If a store cannot be opened, each call tries again until it can."""
    outcomes: Iterator[Callable[[], Store]] = iter((_refuse, Store))

    def opened() -> Store:
        return next(outcomes)()

    bounded = Bounded(opened)  # type: ignore[arg-type]

    with pytest.raises(RemoteError, match="not yet"):
        bounded.call(lambda _: 7, PLENTY_SECONDS)

    assert bounded.call(lambda _: 7, PLENTY_SECONDS) == 7


def test_oddest_failure_is_only_a_failure(store: Store) -> None:
    """Whatever a library raises is a failed call, and the next call is made."""
    bounded = _bounded(store)

    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        bounded.call(lambda _: 1 // 0, PLENTY_SECONDS)

    assert bounded.call(lambda _: 7, PLENTY_SECONDS) == 7


def test_reasons_can_be_shown() -> None:
    """A server's words are cut short and stripped of control characters."""
    assert str(RemoteError("a\x1b[31m\n" + 400 * "b")) == "a?[31m?" + 233 * "b"


def _refuse() -> Store:
    raise RemoteError("not yet")


def test_store_that_is_late_is_told_with_what_to_do() -> None:
    """Where a store knows no better advice, the reason says what to check and what to change."""
    assert "check the server" in str(no_answer(0.25))
    assert str(no_answer(0.25)).endswith("or raise remote_ms_max")
