"""Prove that the daemon's plan is a real engine's placement: every offset, stride, group and block."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.engine import Job, living
from tests.integrations.vllm.models import ROOT

pytestmark = pytest.mark.vllm

CASES = [
    pytest.param("llama", {"num_gpu_blocks_override": 100}, id="llama, so many blocks"),
    pytest.param("llama", {"block_size": 64, "max_model_len": 512}, id="llama, large blocks"),
    pytest.param("hybrid", {}, id="hybrid"),
    pytest.param("hybrid", {"disable_hybrid_kv_cache_manager": True}, id="hybrid in one group"),
]


@pytest.mark.parametrize(("model", "engine"), CASES)
def test_plan_is_what_the_engine_has(model: str, engine: dict[str, Any], tmp_path: Path) -> None:
    """Scheduler and worker name the same inputs, and their plan has the tensors' placement."""
    job = probing(Job(model=model, engine=engine), tmp_path)

    with living(job, tmp_path):
        told = reports(tmp_path)

    assert_agreed(told, {"scheduler", "worker-0"})


def test_plan_of_two_ranks_is_what_the_engine_has(tmp_path: Path) -> None:
    """Each of two tensor parallel ranks has the plan's placement, and all processes name the same inputs."""
    engine = {"tensor_parallel_size": 2}
    job = probing(Job(engine=engine), tmp_path)

    with living(job, tmp_path):
        told = reports(tmp_path)

    assert_agreed(told, {"scheduler", "worker-0", "worker-1"})


def probing(job: Job, folder: Path) -> Job:
    """Return the engine with the probe as its connector."""
    # The daemon's planner runs in the engine's process, so that nothing is lost on the way.
    paths = [str(ROOT / "client"), str(ROOT / "service"), str(ROOT)]
    return Job(
        model=job.model,
        engine=job.engine,
        environment={**job.environment, "PYTHONPATH": ":".join(paths)},
        is_one_process=job.is_one_process,
        kv_transfer_config={
            "kv_connector": "ProbeConnector",
            "kv_connector_module_path": "tests.integrations.vllm.probe",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"folder": str(folder)},
        },
    )


def reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the probes wrote."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def assert_agreed(told: dict[str, dict[str, Any]], processes: set[str]) -> None:
    """Check that all processes of an engine wrote, found no difference and named the same inputs."""
    assert told.keys() == processes
    assert {name: words["error"] for name, words in told.items() if words["error"]} == {}
    found = {name: words["differences"] for name, words in told.items() if words["differences"]}
    assert found == {}
    assert len({words["inputs"] for words in told.values()}) == 1
