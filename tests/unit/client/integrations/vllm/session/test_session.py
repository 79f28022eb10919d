"""Laws of a session in doubt: it finds out what was carried out before it exchanges anything else."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlease.errors import DeadlineError, IdReusedError, PoolFullError, UnavailableError
from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity
from kvlease.integrations.vllm.session.attachment import Attachment
from kvlease.integrations.vllm.session.session import EngineSession, SessionEvent, Terms
from kvlease.integrations.vllm.settings import ConnectorSettings
from kvlease.magazine import ExchangeOrder, Inventory

ORDER = ExchangeOrder(take_running=1)
ANSWER = SimpleNamespace(taken_running=[1])


class Magazine:
    """A magazine as the daemon has it: it carries out exchanges of the next sequence in the order in which they arrive.

    `under_way` is an exchange whose caller has gone; it arrives when `arrive` says so.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.sequence = 0
        self.known_sequence = 0
        self.under_way: int | None = None
        self.error: Exception | None = None
        self.carried_out: list[ExchangeOrder] = []

    def arrive(self) -> None:
        """Carry out the exchange that is under way, unless it has become stale."""
        if self.under_way == self.sequence + 1:
            self.sequence += 1
            self.blocks += 1
        self.under_way = None

    def exchange(self, order: ExchangeOrder) -> Any:
        """Carry out an exchange, or fail as told."""
        if self.error is not None:
            error, self.error = self.error, None
            if isinstance(error, DeadlineError):
                self.under_way = self.known_sequence + 1
            raise error
        if self.known_sequence != self.sequence:
            raise IdReusedError
        self.sequence += 1
        self.known_sequence = self.sequence
        self.blocks += order.take_running
        self.carried_out.append(order)
        return ANSWER

    def begin(self, order: ExchangeOrder) -> Callable[[], Any]:
        """Take an exchange that is carried out when its answer is asked for."""
        return lambda: self.exchange(order)

    def inventory(self) -> Inventory:
        """Return the number of blocks."""
        self.known_sequence = self.sequence
        blocks = np.arange(self.blocks, dtype=np.int32)
        return Inventory(blocks=blocks, keys=b"", sequence=self.sequence)


@pytest.fixture
def magazine() -> Magazine:
    """A magazine that nobody has used."""
    return Magazine()


@pytest.fixture
def worker() -> SimpleNamespace:
    """The part of a worker that a session uses."""
    keys = SimpleNamespace(tenant_key=bytes(32))
    return SimpleNamespace(worker_id=1, memory_generation=1, keys=keys, deadline_seconds=0.0)


@pytest.fixture
def session(magazine: Magazine, worker: Any) -> EngineSession:
    """A session with an attachment that has polled and reconciled."""
    terms = Terms(identity=Identity(FIELDS), inputs=None, cache="c", magazine="m")
    session = EngineSession(ConnectorSettings(socket="/nowhere.sock"), terms)
    plan: Any = SimpleNamespace()
    session._attacher.found = session._attacher._current = Attachment(
        worker=worker, magazine=magazine, plan=plan, device=None, memory=(), memory_generation=1
    )
    assert session.poll() is SessionEvent.FRESH
    assert session.reconciled() is not None
    magazine.carried_out.clear()
    return session


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(DeadlineError(), id="late"),
        pytest.param(UnavailableError(), id="away"),
        pytest.param(IdReusedError(), id="stale"),
        pytest.param(ZeroDivisionError(), id="fault"),
    ],
)
def test_exchange_that_may_have_been_carried_out_stops_the_next(
    session: EngineSession, magazine: Magazine, error: Exception
) -> None:
    """After a call without an answer nothing is exchanged until an inventory has been read."""
    magazine.error = error

    first = session.exchange(ORDER, None)
    owed = session.needs_inventory
    session.guard.recover()
    second = session.exchange(ORDER, None)
    truth = session.reconciled()
    third = session.exchange(ORDER, None)

    assert (first, owed, second) == (None, True, None)
    assert truth is not None
    assert third is ANSWER


class Clock:
    """The session's source of time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the sessions."""
    clock = Clock()
    monkeypatch.setattr("kvlease.integrations.vllm.session.session.time", clock)
    return clock


def test_daemon_that_goes_away_is_waited_for(session: EngineSession, clock: Clock) -> None:
    """The wait counts from when the daemon is found away, however idle the engine was, and begins anew each time."""
    clock.now += 3600.0

    session.guard.trip("it went away")
    waited = [session.is_returning]
    session.poll()
    for seconds in (29.0, 2.0):
        clock.now += seconds
        session.poll()
        waited.append(session.is_returning)
    session.guard.recover()
    session.poll()
    session.guard.trip("it went away again")
    session.poll()

    assert not session.is_on
    assert waited == [True, True, False]
    assert session.is_returning


def test_daemon_that_never_was_there_is_not_returning(clock: Clock) -> None:
    """A daemon that was out of reach when the engine started is not waited for."""
    terms = Terms(identity=Identity(FIELDS), inputs=None, cache="c", magazine="m")
    never = EngineSession(ConnectorSettings(socket="/nowhere.sock"), terms)
    clock.now = 0.0

    never.poll()

    assert (never.is_on, never.is_returning) == (False, False)


def test_refused_exchange_leaves_no_doubt(session: EngineSession, magazine: Magazine) -> None:
    """A refused exchange was not carried out."""
    magazine.error = PoolFullError()

    first, second = session.exchange(ORDER, None), session.exchange(ORDER, None)

    assert (first, second) == (None, ANSWER)


def test_what_reconciled_tells_stays_true(session: EngineSession, magazine: Magazine) -> None:
    """An exchange that is under way is carried out before the inventory is read, or never."""
    magazine.error = DeadlineError()
    session.exchange(ORDER, None)
    session.guard.recover()

    truth = session.reconciled()
    magazine.arrive()

    assert truth is not None
    assert len(truth.blocks) == magazine.blocks == 0


def test_exchange_that_arrives_while_reconciling_is_told(
    session: EngineSession, magazine: Magazine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the lost exchange arrives during a reconcile, the doubt stays, and the next reconcile tells of it."""
    magazine.error = DeadlineError()
    session.exchange(ORDER, None)
    session.guard.recover()
    tell = magazine.inventory

    def told_then_arrives() -> Inventory:
        truth = tell()
        magazine.arrive()
        return truth

    monkeypatch.setattr(magazine, "inventory", told_then_arrives)
    first, owed = session.reconciled(), session.needs_inventory
    second = session.reconciled()

    assert (first, owed) == (None, True)
    assert second is not None
    assert len(second.blocks) == magazine.blocks == 1


def test_inventory_alone_ends_no_doubt(session: EngineSession, magazine: Magazine) -> None:
    """An inventory alone does not rule out an exchange that arrives later."""
    magazine.error = DeadlineError()
    session.exchange(ORDER, None)
    session.guard.recover()

    session.inventory()

    assert session.needs_inventory


def test_another_worker_owes_an_inventory(
    session: EngineSession, magazine: Magazine, worker: Any
) -> None:
    """Where the daemon did not resume the worker, the owner is told, and nothing is exchanged before an inventory."""
    worker.worker_id = 2

    event, exchanged = session.poll(), session.exchange(ORDER, None)
    truth = session.reconciled()

    assert (event, exchanged) == (SessionEvent.BACK, None)
    assert [order.take_running for order in magazine.carried_out] == [0]
    assert truth is not None
    assert not session.needs_inventory
    assert session.poll() is SessionEvent.NONE


def test_answer_of_another_worker_is_no_answer(
    session: EngineSession, magazine: Magazine, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of a worker that was replaced during the call is about another magazine."""

    def exchange(_: ExchangeOrder) -> Any:
        worker.worker_id = 2
        return ANSWER

    monkeypatch.setattr(magazine, "exchange", exchange)

    assert session.exchange(ORDER, None) is None
    assert session.needs_inventory


def test_answer_to_a_begun_exchange_ends_the_doubt(
    session: EngineSession, magazine: Magazine
) -> None:
    """While it is on its way nothing else is exchanged, and its answer is taken once."""
    assert session.begin(ORDER)
    assert session.needs_inventory
    assert not session.begin(ORDER)
    assert session.exchange(ORDER, None) is None

    assert session.answered() is ANSWER
    assert not session.needs_inventory
    assert session.answered() is None
    assert magazine.carried_out == [ORDER]


def test_begun_exchange_of_a_silent_daemon_stays_in_doubt(
    session: EngineSession, magazine: Magazine
) -> None:
    """Its answer is not asked for later, when it would be about what the inventory has told by then."""
    assert session.begin(ORDER)
    session.guard.trip("a test")
    assert session.answered() is None
    session.guard.recover()

    assert session.needs_inventory
    assert session.answered() is None
    assert magazine.carried_out == []
    assert session.reconciled() is not None
    assert not session.needs_inventory


def test_begun_exchange_of_another_worker_has_no_answer(
    session: EngineSession, worker: Any
) -> None:
    """A worker that was replaced meanwhile has another magazine."""
    assert session.begin(ORDER)
    worker.worker_id = 2

    assert session.answered() is None
    assert session.needs_inventory


def test_session_that_is_off_begins_nothing(session: EngineSession, magazine: Magazine) -> None:
    """A daemon that does not answer is sent nothing."""
    session.guard.trip("a test")

    assert not session.begin(ORDER)
    session.guard.recover()
    assert not session.needs_inventory
    assert magazine.carried_out == []


def test_other_memory_ends_the_attachment(
    session: EngineSession, magazine: Magazine, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has attached to other memory is given up, and its answers do not count."""

    def exchange(_: ExchangeOrder) -> Any:
        worker.memory_generation = 2
        return ANSWER

    monkeypatch.setattr(magazine, "exchange", exchange)

    assert session.exchange(ORDER, None) is None
    assert not session.is_on
    assert session.poll() is SessionEvent.LOST


def test_breaker_that_opens_and_closes_is_lost_and_back(session: EngineSession) -> None:
    """The owner hears of each opening and closing of the breaker once."""
    session.guard.trip("a test")
    lost = [session.poll(), session.poll()]
    session.guard.recover()
    back = [session.poll(), session.poll()]

    assert lost == [SessionEvent.LOST, SessionEvent.NONE]
    assert back == [SessionEvent.BACK, SessionEvent.NONE]


def test_memory_that_changed_while_off_is_told_as_fresh(
    session: EngineSession, magazine: Magazine, worker: Any
) -> None:
    """New memory is reported as new, whatever happened while off, even a reset."""
    session.guard.trip("a test")
    session.poll()
    plan: Any = SimpleNamespace()
    found = Attachment(
        worker=worker, magazine=magazine, plan=plan, device=None, memory=(), memory_generation=1
    )
    session._attacher._current = session._attacher.found = found
    session.poll()
    session.reset()
    session.guard.recover()

    assert [session.poll(), session.poll()] == [SessionEvent.FRESH, SessionEvent.NONE]


def test_reset_is_no_event_of_its_own(session: EngineSession) -> None:
    """The caller of a reset knows of it; the generation grows and the keys change."""
    assert session.rekeyer is not None
    before, generation = session.rekeyer.keys([b"h"]), session.generation

    session.reset()

    assert session.rekeyer.keys([b"h"]) != before
    assert session.generation == generation + 1
    assert session.poll() is SessionEvent.NONE


def test_counts_tell_what_happened(session: EngineSession, magazine: Magazine) -> None:
    """The figures for metrics count from the beginning of the session."""
    magazine.error = DeadlineError()
    session.exchange(ORDER, None)

    assert session.counts()["unanswered"] == 1
    assert session.counts()["generation"] == 1


def test_session_without_an_attachment_gives_defaults() -> None:
    """A session without an attachment asks nothing and raises nothing."""
    terms = Terms(identity=Identity(FIELDS), inputs=None, cache="c")
    session = EngineSession(ConnectorSettings(socket="/nowhere.sock"), terms)

    answers = (
        session.exchange(ORDER, "default"),
        session.inventory(),
        session.reconciled(),
        session.call(lambda worker: worker.lookup(b""), "default", "lookup"),
        session.worker,
        session.device,
        session.rekeyer,
    )

    assert answers == ("default", None, None, "default", None, None, None)
    assert repr(session) == "<EngineSession off, generation 0, <Guard closed, 0 calls, 0 skipped>>"


@pytest.mark.parametrize(("adapters", "is_found"), [("", False), ("revision 3", True)])
def test_adapters_are_told_apart(
    adapters: str, is_found: bool, worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Two lives of an engine find each other's blocks only where the settings say what the adapters are."""
    keys = []
    identity = Identity(FIELDS, has_adapters=True)
    terms = Terms(identity=identity, inputs=None, cache="c", magazine="m")
    settings = ConnectorSettings(socket="/nowhere.sock", adapters=adapters)
    plan: Any = SimpleNamespace()
    for _ in range(2):
        session = EngineSession(settings, terms)
        session._tell_adapters_apart()
        session._attacher.found = session._attacher._current = Attachment(
            worker=worker, magazine=None, plan=plan, device=None, memory=(), memory_generation=1
        )
        session.poll()
        assert session.rekeyer is not None
        keys.append(session.rekeyer.keys([bytes(32)]))

    assert (keys[0] == keys[1]) == is_found
    assert ("`adapters`" in caplog.text) != is_found


def test_adapters_without_a_name_are_told_by_the_schedulers_half_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning on adapters comes once for each engine, even if its rank has attached by the time of the second."""
    identity = Identity(FIELDS, has_adapters=True)
    terms = Terms(identity=identity, inputs=None, cache="c", magazine="halves")
    settings = ConnectorSettings(socket="/nowhere.sock", start_seconds=0.01)

    rank = EngineSession.open(settings, replace(terms, touches=True))
    rank._sayings.forget()
    scheduler = EngineSession.open(settings, terms)

    for session in (rank, scheduler):
        session.close()
    assert caplog.text.count("`adapters`") == 1
