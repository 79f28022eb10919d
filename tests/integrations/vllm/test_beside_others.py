"""Prove that an engine whose connector stands behind another one spoils no cached block."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integrations.vllm.births import until
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, differences, living, prompt, reference
from tests.integrations.vllm.offloads import num_found, offloading
from tests.integrations.vllm.shares import PREFIX, PROMPTS, sharing
from tests.integrations.vllm.test_owned import TINY, job

pytestmark = pytest.mark.vllm

OTHERS = [prompt(400, seed=100 + index) for index in range(24)]
"""More than the pool has blocks for."""

PROMPT = prompt(1000, seed=77)
SMALL_STEPS = {
    "num_gpu_blocks_override": 100,
    "max_model_len": 1152,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
}


def behind(module: str, alone: Job) -> Job:
    """Return the same engine with its connector behind the one of a module beside this one."""
    another = {
        "kv_connector": f"{module.title()}Connector",
        "kv_connector_module_path": f"tests.integrations.vllm.{module}",
        "kv_role": "kv_both",
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [another, alone.kv_transfer_config]},
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

    with living(behind("telling", alone), tmp_path) as life:
        others = life.generate(OTHERS)
        told = life.told()
    with living(alone, tmp_path) as life:
        got = life.generate(PROMPTS[:2])

    assert differences(others, reference(alone, OTHERS)) == []
    assert differences(got, reference(alone, PROMPTS[:2])) == []
    assert min(got.cached) >= len(PREFIX)
    assert told.count("The engine has its memory for itself, and its cache ends") == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["in-turn", "async"])
def test_blocks_that_another_connector_loads_into_are_stored_before(
    is_async: bool, daemon: Daemon, tmp_path: Path
) -> None:
    """What is found is right though another connector writes into freed blocks in the step that plans their store."""
    said = {"max_tokens": 1}
    engine = {"num_gpu_blocks_override": 40, "max_model_len": 1152}
    job = offloading(daemon, engine=engine, is_async=is_async, pool_bytes=32 << 20)
    prompts = [prompt(1030 + 20 * index, seed=300 + index) for index in range(6)]
    with living(behind("landing", job), tmp_path) as life:
        first = life.generate(prompts, sampling=said)
        until(lambda: num_found(daemon) >= sum(len(one) // 32 for one in prompts), "not all stored")
        life.kill()
    daemon.wait_until_unused()

    with living(job, tmp_path) as life:
        found = life.generate(prompts, sampling=said)

    wanted = reference(replace(job, sampling=said), prompts)
    assert differences(first, wanted) == []
    assert min(found.cached) >= 1024
    assert differences(found, wanted) == []


@pytest.mark.parametrize("num_steps", [1, 2], ids=["at-once", "amid-recomputation"])
@pytest.mark.parametrize("mode", ["offload", "owned", "shared"])
def test_nothing_is_kept_of_what_was_computed_from_a_failed_load(
    mode: str, num_steps: int, daemon: Daemon, tmp_path: Path
) -> None:
    """If a request is aborted before all is computed once more, neither this life nor the next one finds the rest."""
    make = {"offload": offloading, "owned": job, "shared": sharing}[mode]
    alone = make(daemon, engine=SMALL_STEPS)
    wanted = reference(alone, [PROMPT])
    with living(behind("failing", alone), tmp_path) as life:
        life.generate([PROMPT], aborts={"0": num_steps})
        again = life.generate([PROMPT])
        told = life.told()
        life.kill()
    daemon.wait_until_unused()

    with living(alone, tmp_path) as life:
        later = life.generate([PROMPT])

    assert "Recovered from KV load failure" in told
    assert [differences(got, wanted) for got in (again, later)] == [[], []]
    assert later.cached[0] >= 900
