"""Prove that an engine whose connector stands behind another one, which tells of its ranks, spoils no cached block."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, differences, living, prompt, reference
from tests.integrations.vllm.shares import PREFIX, PROMPTS, sharing
from tests.integrations.vllm.test_owned import TINY, job

pytestmark = pytest.mark.vllm

OTHERS = [prompt(400, seed=100 + index) for index in range(24)]
"""More than the pool has blocks for."""


def behind_another(alone: Job) -> Job:
    """Return the same engine with its connector behind one that tells of its ranks."""
    telling = {
        "kv_connector": "TellingConnector",
        "kv_connector_module_path": "tests.integrations.vllm.told",
        "kv_role": "kv_both",
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [telling, alone.kv_transfer_config]},
    }
    return replace(alone, kv_transfer_config=config)


@pytest.mark.parametrize("mode", ["owned", "shared"])
def test_engine_that_nobody_heard_of_writes_into_its_own_memory(
    mode: str, daemon: Daemon, tmp_path: Path
) -> None:
    """It serves for itself and says why; what was cached before is found afterwards, with the same tokens."""
    alone = (job if mode == "owned" else sharing)(daemon, engine=TINY)
    with living(alone, tmp_path) as life:
        life.generate(PROMPTS[:2])

    with living(behind_another(alone), tmp_path) as life:
        others = life.generate(OTHERS)
        told = life.told()
    with living(alone, tmp_path) as life:
        got = life.generate(PROMPTS[:2])

    assert differences(others, reference(alone, OTHERS)) == []
    assert differences(got, reference(alone, PROMPTS[:2])) == []
    assert min(got.cached) >= len(PREFIX)
    assert told.count("The engine has its memory for itself, and its cache ends") == 1
