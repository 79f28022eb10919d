"""The session of a vLLM process whose cache lies in the daemon's memory, which no other memory can replace."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvlease import Client
from kvlease.integrations.vllm.session.session import SessionEvent
from tests.acceptance.serving import Serving
from tests.acceptance.test_vllm_session import (
    IDENTITY,
    INPUTS,
    kill,
    opened,
    settings,
    terms,
    until,
)

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize(
    "is_made_anew",
    [
        pytest.param(False, id="away", marks=pytest.mark.thorough),
        pytest.param(True, id="made anew"),
    ],
)
def test_kept_memory_that_ended_is_replaced_by_no_other(
    is_made_anew: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if the cache is registered anew, the session is told of its end once, and never attaches to another."""
    caplog.set_level("INFO", "kvlease.integrations.vllm")
    serving = Serving.__new__(Serving)
    serving.runtime_dir, serving.options = tmp_path / "run", ()
    serving.start()
    try:
        # The start waits in vain, because there is no cache yet.
        patience = settings(serving, start_seconds=0.5)
        with opened(patience, terms(inputs=None if is_made_anew else INPUTS)) as session:
            _register(serving)
            until(lambda: session.poll() is SessionEvent.FRESH, "the first memory")
            session.keep(session.memory)
            kill(serving)
            serving.start()
            if is_made_anew:
                _register(serving)
            heard: list[SessionEvent] = []
            until(lambda: heard.append(session.poll()) or heard[-1].ends_memory, "the end")
            later = {session.poll() for _ in range(8)}
    finally:
        serving.stop()

    said = [record.action for record in caplog.records if hasattr(record, "action")]
    assert heard[-1] is SessionEvent.GONE
    assert later == {SessionEvent.NONE}
    assert said.count("attached") == 1
    assert said[-1] != "attach"
    assert not session.is_on


def _register(serving: Serving) -> None:
    serving.wait_until_ready()
    with Client(serving.address("unix"), on_doubt="raise") as client:
        client.register("vllm-test", replace(INPUTS, model_digest=IDENTITY.model_digest))
