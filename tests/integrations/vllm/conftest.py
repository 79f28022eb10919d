"""Own the fixtures of tests with the reference engine, and the tally of compared requests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integrations.vllm import births, engine
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.rounds import TALLY

_OPTION = "--requests-min"
_KEY = "vllm_tally"
_LONGEST = "test_soak"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run of all tests demand a minimum of comparisons."""
    parser.addoption(_OPTION, type=int, default=0, help="requests that must be compared at least")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the soaks first: their time is fixed, so nobody waits for one at the end."""
    items.sort(key=lambda item: item.path.stem != _LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a worker of a parallel run."""
    TALLY.add(getattr(node, "workeroutput", {}).get(_KEY, {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the tally to the main process, or judge it there."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_KEY] = TALLY.as_dict()
    elif _too_few(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the tally."""
    if TALLY.requests:
        terminalreporter.write_line(str(TALLY))
    if _too_few(config):
        least = config.getoption(_OPTION)
        terminalreporter.write_line(f"{TALLY.requests} requests are fewer than {least}", red=True)


def _too_few(config: pytest.Config) -> bool:
    return bool(TALLY.requests < config.getoption(_OPTION, default=0))


@pytest.fixture(scope="session", autouse=True)
def _ended() -> Iterator[None]:
    """End the processes that tests share."""
    yield
    engine.forget_reference()
    births.close_nursery()


@pytest.fixture(scope="session")
def _daemons() -> Iterator[list[Daemon]]:
    """Keep an unharmed daemon for the next test."""
    kept: list[Daemon] = []
    yield kept
    for daemon in kept:
        daemon.close()


@pytest.fixture
def daemon(_daemons: list[Daemon], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Give a daemon without any cache: the previous test's, unless it was harmed."""
    if not _daemons:
        fresh = Daemon(tmp_path_factory.mktemp("daemon"))
        _daemons.append(fresh)
        fresh.start()
    (running,) = _daemons
    yield running
    if running.is_harmed or not running.has_forgotten():
        _daemons.clear()
        running.close()
