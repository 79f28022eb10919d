"""Own the fixtures of tests with the reference engine: a daemon for each test, and an end for what tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.vllm import births, engine
from tests.integrations.vllm.daemon import Daemon, serving


@pytest.fixture(scope="session", autouse=True)
def _ended() -> Iterator[None]:
    """End the processes that tests share."""
    yield
    engine.forget_reference()
    births.close_nursery()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Run a daemon of the test's own."""
    with serving(tmp_path) as running:
        yield running
