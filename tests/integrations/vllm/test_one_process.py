"""Prove that a second engine in one process is refused, and that the first one goes on as it was."""

import json
from pathlib import Path

import pytest

from tests.integrations.vllm.births import ran
from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.offloads import offloading

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "connector",
    ["KVLeaseOffloadingConnector", "KVLeaseOwnedConnector", "KVLeaseSharedConnector"],
)
def test_second_engine_of_a_process_is_refused(connector: str, daemon: Daemon) -> None:
    """The worker's connector is vLLM's one of the process, whose copies would go to the wrong engine's tensors."""
    job = offloading(daemon, connector=connector, engine={"kv_cache_memory_bytes": 16 << 20})

    run = ran(
        Path(__file__).with_name("twice.py"), json.dumps(job.told()), environment=job.environ()
    )

    assert run.returncode == 0, run.stderr[-4_000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("TOLD ")]
    refusal, goes_on, is_right_after = json.loads(line.removeprefix("TOLD "))
    assert refusal.startswith("InvalidError: another engine of this process")
    assert goes_on
    assert is_right_after
