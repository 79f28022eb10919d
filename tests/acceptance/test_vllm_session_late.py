"""The session of a vLLM process that attaches later than others of its engine, to a daemon replaced meanwhile."""

from dataclasses import replace

import pytest

from kvlease.integrations.vllm.session.session import SessionEvent
from tests.acceptance.serving import Serving, new_cache
from tests.acceptance.test_vllm_session import INPUTS, opened, settings, terms, until

pytestmark = pytest.mark.acceptance


def test_cache_that_other_processes_had_is_told_of(daemon: Serving) -> None:
    """A late process learns that the other processes' cache is gone, even if a new one has its name."""
    with new_cache(daemon, "vllm-test", INPUTS) as client:
        had = client.get_cache("vllm-test").plan

    with new_cache(daemon, "vllm-test", replace(INPUTS, device_blocks=4)):
        with opened(settings(daemon, start_seconds=0.5), terms(inputs=None, had=had)) as late:
            until(lambda: late.poll() is SessionEvent.GONE, "what became of the cache")
        with opened(settings(daemon, start_seconds=0.5), terms(inputs=None)) as first:
            until(lambda: first.refusal, "the refusal")
            assert first.poll() is SessionEvent.NONE
