"""Own what tests of shared pools have in common: engines that share, and their prompts."""

from typing import Any

from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, prompt
from tests.integrations.vllm.jobs import PATIENT_MS

PREFIX = prompt(320, seed=1)
PROMPTS = [prompt(400 + 7 * index, seed=index, prefix=PREFIX) for index in range(4)]
TINY = {"num_gpu_blocks_override": 49, "max_model_len": 1024, "max_num_seqs": 8}
"""48 blocks of 32 tokens: three longest requests of the tests below fill them."""
MANY = [
    prompt(230 + 37 * (index % 7), seed=index, prefix=PREFIX[:200] if index % 2 else ())
    for index in range(16)
]


def sharing(daemon: Daemon, **words: Any) -> Job:
    """Return an engine that shares the daemon's pool with other such engines."""
    extra = words.pop("extra", {})
    module, _, name = words.pop("connector", "").rpartition(".")
    config = {
        "kv_connector": name or "KVLeaseSharedConnector",
        "kv_connector_module_path": module or "kvlease.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "socket": daemon.address,
            "start_seconds": 60,
            "deadline_ms": PATIENT_MS,
            **extra,
        },
    }
    return Job(kv_transfer_config=config, **words)
