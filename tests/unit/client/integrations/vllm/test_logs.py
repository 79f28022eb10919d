"""Own the laws of the engine's log: kvlease's lines stand there like vLLM's own, unless somebody set logging up."""

import io
import logging
from collections.abc import Iterator

import pytest

from kvlease.integrations.vllm.logs import join_engine_log


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """Give the library's logger, and restore it afterwards."""
    one = logging.getLogger("kvlease")
    kept = one.handlers, one.level, one.propagate, one.filters
    one.handlers, one.filters = [], []
    yield one
    one.handlers, level, one.propagate, one.filters = kept
    one.setLevel(level)


def join(*handlers: logging.Handler) -> None:
    """Join the engine's log with only these handlers at the root; while a test runs, pytest has its own there."""
    root = logging.getLogger()
    kept, root.handlers = root.handlers, list(handlers)
    try:
        join_engine_log()
    finally:
        root.handlers = kept


@pytest.fixture
def engine_log() -> Iterator[io.StringIO]:
    """Give the text that vLLM's own handler writes, from level INFO on."""
    theirs, written = logging.getLogger("vllm"), io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
    kept, theirs.handlers = theirs.handlers, [handler]
    theirs.setLevel(logging.INFO)
    yield written
    theirs.handlers = kept
    theirs.setLevel(logging.NOTSET)


def test_lines_stand_in_the_engines_log_once(ours: logging.Logger, engine_log: io.StringIO) -> None:
    """The lines have the engine's form and level, and appear once, however often a connector joins the log."""
    join()
    join()

    said = logging.getLogger("kvlease.integrations.vllm.session.attacher")
    said.info("attached")
    said.debug("in detail")

    assert engine_log.getvalue() == "INFO [test_logs.py] attached\n"
    assert not ours.propagate


def test_who_has_decided_is_left_to_it(ours: logging.Logger, engine_log: io.StringIO) -> None:
    """Where a logger above ours has a handler already, nothing changes."""
    handler = logging.StreamHandler(io.StringIO())
    join(handler)
    assert (ours.handlers, ours.level, ours.propagate) == ([], logging.NOTSET, True)

    ours.addHandler(handler)
    join()

    assert (ours.handlers, ours.level, ours.propagate) == ([handler], logging.NOTSET, True)
    assert not engine_log.getvalue()


def test_without_an_engine_nothing_changes(ours: logging.Logger) -> None:
    """A process in which vLLM has no handler keeps Python's defaults."""
    join()

    assert (ours.handlers, ours.propagate) == ([], True)


def test_heartbeats_are_left_out(ours: logging.Logger, engine_log: io.StringIO) -> None:
    """Everything that the library logs is shown, except heartbeats."""
    join()

    ours.warning("heartbeats fail", extra={"action": "heartbeat"})
    ours.warning("a worker is not closed", extra={"action": "detach"})

    assert engine_log.getvalue() == "WARNING [test_logs.py] a worker is not closed\n"
