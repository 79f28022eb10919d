"""Own what tests of offloading share: engines that offload, their prompts, and counts of what is found."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.integrations.vllm.daemon import Daemon
from tests.integrations.vllm.engine import Job, Life, prompt
from tests.integrations.vllm.jobs import PATIENT_MS
from tests.integrations.vllm.rounds import Round

PREFIX_TOKENS = 1000
PREFIX = prompt(PREFIX_TOKENS, seed=1)
PROMPTS = [prompt(1040 + 7 * index, seed=index, prefix=PREFIX) for index in range(4)]
FOUND_MIN = 0.95 * PREFIX_TOKENS
TINY = {
    "num_gpu_blocks_override": 100,
    "max_model_len": 1152,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
}
"""An engine whose requests are prefilled in pieces, evict each other's blocks and are preempted."""
MODELS = ["llama", "hybrid"]


def offloading(
    daemon: Daemon | str,
    model: str = "llama",
    engine: Mapping[str, Any] | None = None,
    connector: str = "KVLeaseOffloadingConnector",
    **words: Any,
) -> Job:
    """Return an engine that offloads; keyword arguments are settings of the connector or of the job."""
    address = daemon if isinstance(daemon, str) else daemon.address
    of_job = {
        name: words.pop(name)
        for name in ("is_async", "is_one_process", "caches_prefixes")
        if name in words
    }
    return Job(
        model=model,
        engine=engine or {},
        kv_transfer_config={
            "kv_connector": connector,
            "kv_connector_module_path": "kvlease.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "socket": address,
                "deadline_ms": PATIENT_MS,
                **words,
            },
        },
        **of_job,
    )


def num_found(daemon: Daemon) -> int:
    """Return how many blocks of the pool are findable."""
    return sum(
        pool.ready + pool.ready_held
        for cache in daemon.caches()
        for pool in cache.pools
        if pool.tier == "device"
    )


def loaded_tokens(life: Life) -> float:
    """Return the tokens that the life has loaded from outside."""
    return life.metrics("vllm:external_prefix_cache_hits")["vllm:external_prefix_cache_hits"]


def part(wanted: Round, first: int | None, end: int | None, step: int = 1) -> Round:
    """Return some requests of a round."""
    return replace(wanted, requests=wanted.requests[first:end:step])
