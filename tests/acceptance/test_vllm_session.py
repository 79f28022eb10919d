"""The session of a vLLM process with a real daemon that is away, killed, stopped, wiped or has another layout."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvlease import Client, FullAttention, PlanInputs
from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity
from kvlease.integrations.vllm.session.session import EngineSession, SessionEvent, Terms
from kvlease.integrations.vllm.settings import ConnectorSettings
from kvlease.magazine import ExchangeOrder
from tests.acceptance.serving import Serving, blocks_in_use

pytestmark = pytest.mark.acceptance

LAYERS = tuple(
    FullAttention(name=str(index), num_kv_heads=2, head_size=64, dtype="float32")
    for index in range(2)
)
INPUTS = PlanInputs(layers=LAYERS, tokens_per_block=16, device_blocks=64, null_blocks=1)
IDENTITY = Identity(tuple(f"{name} of the test" for name in FIELDS))
HASHES = [bytes([number]) * 32 for number in range(1, 9)]
SECONDS_MAX = 90.0
"""Seconds that a test waits for anything; only a very busy machine needs them."""
TAKE_EIGHT = ExchangeOrder(take_running=8)


def terms(**changes: object) -> Terms:
    """Return the terms by which the test's engine attaches."""
    whole = Terms(identity=IDENTITY, inputs=INPUTS, cache="vllm-test", magazine="engine-1")
    return replace(whole, **changes)  # type: ignore[arg-type]


def settings(serving: Serving, **changes: object) -> ConnectorSettings:
    """Return settings with a deadline that a busy machine keeps, and with quick retries."""
    whole = {"deadline_ms": 5_000, "retry_seconds": 0.2, "start_seconds": 30, **changes}
    return ConnectorSettings.read({"socket": str(serving.runtime_dir / "kvlease.sock"), **whole})


@contextmanager
def opened(settings: ConnectorSettings, terms: Terms) -> Iterator[EngineSession]:
    """Open a session, and close it at the end."""
    session = EngineSession.open(settings, terms)
    try:
        yield session
    finally:
        session.close()


def until(look: Callable[[], object], what: str) -> None:
    """Wait until `look` returns something true."""
    end = time.monotonic() + SECONDS_MAX
    while not look():
        assert time.monotonic() < end, f"{what} does not come"
        time.sleep(0.02)


def reconcile(session: EngineSession) -> set[int]:
    """Return the magazine's blocks as soon as the daemon tells them and nothing is in doubt."""
    found: list[set[int]] = []

    def look() -> bool:
        session.poll()
        truth = session.reconciled()
        if truth is not None:
            found.append(set(truth.blocks.tolist()))
        return truth is not None and not session.needs_inventory

    until(look, "the inventory")
    return found[-1]


def take(session: EngineSession) -> set[int]:
    """Take eight blocks."""
    taken = session.exchange(TAKE_EIGHT, None)
    assert taken is not None, session
    return set(taken.taken_running.tolist())


@pytest.fixture
def cache(daemon: Serving) -> Iterator[Client]:
    """Give a client; delete the test's cache at the end, when nobody may use it any more."""
    with Client(daemon.address("unix"), on_doubt="raise") as client:
        yield client
        daemon.until(lambda: client.stats("vllm-test").caches[0].num_workers == 0)
        client.delete_cache("vllm-test")


@pytest.mark.usefixtures("cache")
def test_exchange_needs_an_inventory_first(daemon: Serving) -> None:
    """A fresh session says so, needs an inventory first, and then takes, publishes and finds by vLLM's hashes."""
    with opened(settings(daemon), terms()) as session:
        event, owed = session.poll(), session.needs_inventory
        before = session.exchange(TAKE_EIGHT, None)
        assert reconcile(session) == set()
        blocks = sorted(take(session))
        assert session.rekeyer is not None
        keys = session.rekeyer.keys(HASHES)
        order = ExchangeOrder(publish_blocks=np.array(blocks, np.int32), publish_keys=keys)
        published = session.exchange(order, None)
        found = session.exchange(ExchangeOrder(hold_keys=keys), None)

    assert (event, owed, before) == (SessionEvent.FRESH, True, None)
    assert published is not None
    assert found is not None
    assert published.published.tolist() == [1] * 8
    assert found.held.tolist() == blocks


@pytest.mark.usefixtures("cache")
def test_reset_makes_new_keys_for_this_engine_alone(daemon: Serving) -> None:
    """After a reset this engine finds nothing older, others still do, and equal weight names share keys again."""
    with (
        opened(settings(daemon), terms()) as one,
        opened(settings(daemon), terms(magazine="engine-2")) as other,
    ):
        reconcile(one)
        blocks = np.array(sorted(take(one)), np.int32)
        assert one.rekeyer is not None
        before = one.rekeyer.keys(HASHES)
        one.exchange(ExchangeOrder(publish_blocks=blocks, publish_keys=before), None)
        one.poll()
        generation = one.generation
        one.reset()
        after = one.rekeyer.keys(HASHES)
        missed = one.exchange(ExchangeOrder(hold_keys=after), None)
        reconcile(other)
        assert other.rekeyer is not None
        found = other.exchange(ExchangeOrder(hold_keys=other.rekeyer.keys(HASHES)), None)
        one.reset("step 7")
        other.reset("step 7")
        met = one.rekeyer.keys(HASHES) == other.rekeyer.keys(HASHES)
        event = one.poll()

    assert missed is not None
    assert found is not None
    assert missed.held.tolist() == [-1] * 8
    assert found.held.tolist() == blocks.tolist()
    assert met
    assert (event, one.generation) == (SessionEvent.NONE, generation + 2)


def _errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.usefixtures("cache")
def test_other_layout_is_refused_with_the_fields(
    daemon: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine of another identity, layout or plan runs without a cache, and logs the differences once as an error."""
    values = list(IDENTITY.values)
    values[FIELDS.index("dtype")] = "float16"
    cases = [
        ("dtype", terms(identity=Identity(tuple(values)))),
        ("tokens_per_block", terms(inputs=replace(INPUTS, tokens_per_block=32))),
        ("num_blocks (65, not 64)", terms(disagreements=lambda _: ["num_blocks (65, not 64)"])),
    ]
    with opened(settings(daemon), terms()) as first:
        for field, others in cases:
            caplog.clear()
            # The start waits for no refusal that stays as it is: this test would take minutes.
            with opened(settings(daemon, start_seconds=300), others) as session:
                assert field in session.refusal
                assert (session.is_on, session.poll()) == (False, SessionEvent.NONE)
                assert session.exchange(TAKE_EIGHT, None) is None
            assert [field in one.getMessage() for one in _errors(caplog)] == [True]
        assert first.is_on


@pytest.mark.usefixtures("cache")
def test_cache_of_other_sizes_will_do_for_who_says_so(daemon: Serving) -> None:
    """An engine that only copies to the pool takes a pool of another size, if its identity is the same."""
    larger = terms(inputs=replace(INPUTS, device_blocks=128), magazine="engine-2")
    with (
        opened(settings(daemon), terms()),
        opened(settings(daemon), replace(larger, takes_other_capacity=True)) as session,
    ):
        assert session.poll() is SessionEvent.FRESH
        assert session.plan is not None
        assert session.plan.num_blocks == 64


@pytest.mark.usefixtures("cache")
def test_identity_that_nobody_shares_stays_off(daemon: Serving) -> None:
    """An identity that nobody could share keeps the session off, and the reason can be read."""
    with (
        opened(settings(daemon), terms()),
        opened(settings(daemon), terms(identity=Identity(IDENTITY.values, "seed"))) as session,
    ):
        assert (session.is_on, session.refusal) == (False, "seed")
        assert session.poll() is SessionEvent.NONE


def test_forked_child_neither_uses_nor_ends_the_session(daemon: Serving, cache: Client) -> None:
    """In a forked child every call returns its default, and its end leaves the parent's magazine alone."""
    with opened(settings(daemon), terms()) as session:
        reconcile(session)
        blocks = take(session)
        child = os.fork()
        if not child:
            is_safe = (
                not session.is_on
                and session.exchange(TAKE_EIGHT, None) is None
                and session.reconciled() is None
                and session.call(lambda worker: worker.lookup(b""), None, "lookup") is None
            )
            session.poll()
            session.close()
            os._exit(0 if is_safe else 1)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert reconcile(session) == blocks
        assert blocks_in_use(cache, "vllm-test") == len(blocks)


def test_magazine_ends_with_its_last_process(daemon: Serving, cache: Client) -> None:
    """Blocks stay while any process of the engine is attached, and are free when the last one closes."""
    with opened(settings(daemon), terms()) as scheduler:
        reconcile(scheduler)
        with opened(settings(daemon), terms(inputs=None)) as rank:
            blocks = take(scheduler)
            shared = rank.inventory()
            scheduler.close()
            left = blocks_in_use(cache, "vllm-test")
    freed = blocks_in_use(cache, "vllm-test")

    assert shared is not None
    assert set(shared.blocks.tolist()) == blocks
    assert (left, freed) == (len(blocks), 0)


def test_dropped_session_ends_its_magazine(daemon: Serving, cache: Client) -> None:
    """A session that is dropped without a close, in a process that lives on, keeps no block."""
    session = EngineSession.open(settings(daemon), terms())
    reconcile(session)
    take(session)
    held = blocks_in_use(cache, "vllm-test")

    del session

    until(lambda: blocks_in_use(cache, "vllm-test") == 0, "the end of the magazine")
    assert held == 8


def test_stopped_daemon_costs_one_deadline_and_leaves_no_doubt(
    daemon: Serving, cache: Client
) -> None:
    """A stopped daemon costs one call its deadline; once it goes on, the inventory comes before any exchange.

    The pending exchange is carried out before the inventory is told, or never.
    """
    # A busy machine keeps this deadline while the daemon runs; a hundred calls would take a hundred of it.
    with opened(settings(daemon, deadline_ms=2_000), terms()) as session:
        before = reconcile(session)
        control = daemon.control()
        num_calls = session.guard.counts.calls
        os.kill(control, signal.SIGSTOP)
        try:
            started_at = time.monotonic()
            answers = [session.exchange(TAKE_EIGHT, None) for _ in range(100)]
            seconds = time.monotonic() - started_at
            event = session.poll()
        finally:
            os.kill(control, signal.SIGCONT)
        owed, calls = session.needs_inventory, session.guard.counts.calls - num_calls
        until(lambda: session.poll() is SessionEvent.BACK, "the daemon")
        refused = session.exchange(TAKE_EIGHT, None)
        truth = reconcile(session)
        in_use = blocks_in_use(cache, "vllm-test")
        later = session.inventory()

    assert answers == [None] * 100
    assert seconds < SECONDS_MAX / 3
    assert event is SessionEvent.LOST
    assert owed
    assert session.guard.counts.unanswered >= 1
    assert refused is None
    assert before == set()
    assert calls <= 5
    assert len(truth) in {0, 8}
    assert in_use == len(truth)
    assert later is not None
    assert set(later.blocks.tolist()) == truth


@pytest.mark.usefixtures("cache")
def test_killed_control_process_changes_nothing(daemon: Serving) -> None:
    """The next control process knows the magazine, and its memory and generation are unchanged."""
    with opened(settings(daemon), terms()) as session:
        reconcile(session)
        blocks = take(session)
        device, generation = session.device, session.generation
        session.poll()
        daemon.kill_control()
        more: set[int] = set()
        events = set()

        def goes_on() -> bool:
            events.add(session.poll())
            if session.needs_inventory and session.reconciled() is None:
                return False
            answer = session.exchange(TAKE_EIGHT, None)
            more.update([] if answer is None else answer.taken_running.tolist())
            return answer is not None

        until(goes_on, "an exchange")
        truth = reconcile(session)

    assert session.device is device
    assert session.generation == generation
    assert SessionEvent.FRESH not in events
    assert truth >= blocks | more


@pytest.mark.thorough
@pytest.mark.thorough
def test_daemon_may_come_later_and_be_wiped(tmp_path: Path) -> None:
    """An engine that starts before the daemon runs without it, attaches by itself, and again to new memory."""
    serving = Serving.__new__(Serving)
    serving.runtime_dir, serving.options = tmp_path / "run", ()
    with opened(settings(serving, start_seconds=0.2), terms()) as session:
        absent = (session.is_on, session.poll(), session.exchange(TAKE_EIGHT, None))
        serving.start()
        try:
            until(lambda: session.poll() is SessionEvent.FRESH, "the first daemon")
            reconcile(session)
            take(session)
            first, generation = session.device, session.generation
            assert first is not None
            first[:8] = 7
        finally:
            kill(serving)
        serving.start()
        try:
            until(lambda: session.poll() is SessionEvent.FRESH, "the next daemon")
            second = session.device
            left = reconcile(session)
            taken = take(session)
        finally:
            session.close()
            serving.stop()

    assert absent == (False, SessionEvent.NONE, None)
    assert session.generation == generation + 1
    assert second is not None
    assert second is not first
    assert first[:8].tolist() == [7] * 8
    assert second[:8].tolist() == [0] * 8
    assert (left, len(taken)) == (set(), 8)


def test_cache_that_is_no_more_is_told_of(tmp_path: Path) -> None:
    """An engine learns that its memory is lost, whether or not a new daemon has room for its cache."""
    serving = Serving.__new__(Serving)
    serving.runtime_dir, serving.options = tmp_path / "run", ()
    serving.start()
    try:
        with (
            opened(settings(serving), terms()) as registering,
            opened(settings(serving), terms(inputs=None)) as waiting,
        ):
            assert registering.poll() is waiting.poll() is SessionEvent.FRESH
            kill(serving)
            serving.options = ("--device-bytes-default", "1MiB", "--memory-bytes-max", "1MiB")
            serving.start()
            heard = [heard_last(registering), heard_last(waiting)]
            with Client(serving.address("unix"), on_doubt="raise") as client:
                client.register("vllm-test", replace(INPUTS, device_blocks=4))
            until(lambda: "belongs to another engine" in registering.refusal, "the refusal")
            later = [registering.poll(), waiting.poll()]
    finally:
        serving.stop()

    assert heard == [SessionEvent.GONE] * 2
    assert later == [SessionEvent.NONE] * 2


def kill(serving: Serving) -> None:
    """End a daemon, and its memory with it."""
    serving.process.kill()
    serving.process.wait()
    serving.log.close()


def heard_last(session: EngineSession) -> SessionEvent:
    """Return the event by which a session learns of its daemon's end."""
    heard: list[SessionEvent] = []
    ends = {SessionEvent.GONE, SessionEvent.FRESH}
    until(lambda: heard.append(session.poll()) or heard[-1] in ends, "what became of the session")
    return heard[-1]
