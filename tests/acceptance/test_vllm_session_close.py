"""The session of a vLLM process that is closed while its thread looks for the daemon."""

import os
import signal
from pathlib import Path

import pytest

from kvlease import Client, FullAttention, PlanInputs
from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity
from kvlease.integrations.vllm.session.session import EngineSession, SessionEvent, Terms
from kvlease.integrations.vllm.settings import ConnectorSettings
from tests.acceptance.serving import Serving

pytestmark = pytest.mark.acceptance

LAYER = FullAttention(name="0", num_kv_heads=2, head_size=64, dtype="float32")
INPUTS = PlanInputs(layers=(LAYER,), tokens_per_block=16, device_blocks=64, null_blocks=1)
IDENTITY = Identity(tuple(f"{name} of the test" for name in FIELDS))
TERMS = Terms(identity=IDENTITY, inputs=INPUTS, cache="vllm-close", magazine="engine-1")


def test_what_is_found_behind_a_close_is_let_go(daemon: Serving) -> None:
    """A close waits for no stopped daemon; a later attach brings no event and leaves no worker."""
    settings = ConnectorSettings.read(
        {
            "socket": str(Path(daemon.runtime_dir) / "kvlease.sock"),
            "deadline_ms": 100,
            "start_seconds": 0.2,
        }
    )
    # This registers the cache, so that an attach can succeed at once.
    EngineSession.open(settings.model_copy(update={"start_seconds": 30}), TERMS).close()
    control = daemon.control()
    os.kill(control, signal.SIGSTOP)
    try:
        session = EngineSession.open(settings, TERMS)
        session.close()
    finally:
        os.kill(control, signal.SIGCONT)

    with Client(daemon.address("unix"), on_doubt="raise") as client:

        def has_ended() -> bool:
            return not session._attacher._thread.is_alive()

        daemon.until(has_ended)
        event, workers = session.poll(), client.get_cache("vllm-close").num_workers
        client.delete_cache("vllm-close")

    assert (event, session.is_on) == (SessionEvent.NONE, False)
    assert workers == 0
