"""Own the fixtures of tests with the reference engine, and the tally of what their requests said."""

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
    """Let a run of all tests ask for as many comparisons as there should be."""
    parser.addoption(_OPTION, type=int, default=0, help="requests that must be compared at least")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the soaks: they last as long as they last, so that at the end nobody waits for one."""
    items.sort(key=lambda item: item.path.stem != _LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker of a run side by side has counted."""
    TALLY.add(getattr(node, "workeroutput", {}).get(_KEY, {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the tally on, or judge it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_KEY] = TALLY.as_dict()
    elif _too_few(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say the tally."""
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
    """Keep the daemon that no test has harmed, for the next."""
    kept: list[Daemon] = []
    yield kept
    for daemon in kept:
        daemon.close()


@pytest.fixture
def daemon(_daemons: list[Daemon], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Run a daemon without any cache: that of the test before, unless a test harmed it."""
    if not _daemons:
        fresh = Daemon(tmp_path_factory.mktemp("daemon"))
        _daemons.append(fresh)
        fresh.start()
    (running,) = _daemons
    yield running
    if running.is_harmed or not running.has_forgotten():
        _daemons.clear()
        running.close()
