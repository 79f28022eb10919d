"""Laws of complaints about an engine: each is logged once in a process, and again if it comes back."""

import gc
import weakref
from pathlib import Path

import pytest

from kvlease.errors import InvalidError
from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity
from kvlease.integrations.vllm.session import sayings
from kvlease.integrations.vllm.session.session import EngineSession, Terms
from kvlease.integrations.vllm.settings import ConnectorSettings

WRONG = InvalidError("it is wrong")


def _session(folder: Path, magazine: str = "m", refusal: str = "") -> EngineSession:
    identity = Identity(FIELDS, refusal=refusal)
    terms = Terms(identity=identity, inputs=None, cache="c", magazine=magazine)
    return EngineSession(ConnectorSettings(socket=str(folder / "k.sock")), terms)


def test_refusal_is_said_once_for_all_sessions_of_an_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is logged once for scheduler and worker in one process; another engine there has its own."""
    sessions = [_session(tmp_path, name) for name in ("one", "one", "other")]

    for session in sessions:
        session._attacher._refused(WRONG, 0)

    assert caplog.text.count("it is wrong") == 2
    assert [session.refusal for session in sessions] == ["INVALID: it is wrong"] * 3


def test_refusal_that_comes_again_is_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal that comes back after the engine was attached is logged again."""
    session = _session(tmp_path)

    for _ in range(2):
        session._attacher._refused(WRONG, 0)
        session._attacher.refusal = ""
        session._attacher._sayings.forget()

    assert caplog.text.count("it is wrong") == 2


def test_identity_that_nobody_shares_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A complaint from before any call is logged once, too."""
    one, other = (_session(tmp_path, refusal="it is unfit") for _ in range(2))

    both = [
        EngineSession.open(one.settings, one.terms),
        EngineSession.open(other.settings, other.terms),
    ]

    assert [session.is_closed for session in both] == [True, True]
    assert caplog.text.count("it is unfit") == 1


def test_sayings_belong_to_those_who_have_them() -> None:
    """A record of complaints lives as long as its owners; without a magazine each owner has one of its own."""
    told = sayings.of("forgotten")
    shared = weakref.ref(told)
    told.note("x")
    assert shared() is sayings.of("forgotten")
    del told
    gc.collect()

    assert shared() is None
    assert sayings.of("forgotten").note("x")
    assert sayings.of("") is not sayings.of("")
    assert repr(sayings.of("")) == "<Sayings 0 said>"
