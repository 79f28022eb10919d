"""Laws of what is said of a failed attach: when the next try is, which depends on who asks."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity
from kvlease.integrations.vllm.session.session import EngineSession, Terms
from kvlease.integrations.vllm.settings import ConnectorSettings

Said = Callable[..., str]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Said:
    """Give a function that returns what a session's thread says of an absent daemon."""

    def of(**words: Any) -> str:
        socket = str(tmp_path / "k.sock")
        settings = ConnectorSettings(socket=socket, start_seconds=3, retry_seconds=7)
        terms = Terms(identity=Identity(FIELDS), inputs=None, cache="c", **words)
        EngineSession(settings, terms)._attacher._seek()
        return caplog.text

    return of


def test_session_that_goes_on_says_how_often_it_tries(said: Said) -> None:
    """A session that goes on says how often it tries, as it does so for as long as the engine lives."""
    assert "attaching is tried again every 7 s." in said()


def test_session_that_ends_with_the_start_says_for_how_long_it_tries(said: Said) -> None:
    """A session that ends with the start has memory of its own afterwards and tries no more."""
    told = said(ends_with_start=True)

    assert "tried again for up to 3 s, and then at the engine's next start." in told
    assert "every" not in told


def test_session_that_had_a_cache_goes_on(said: Said) -> None:
    """A session that had a cache before goes on: the start ends only the wait for the first attachment."""
    assert "every 7 s." in said(had=SimpleNamespace(), ends_with_start=True)
