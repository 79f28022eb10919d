"""Own the description of a test's engine: its arguments, connector and environment; and seeded prompts."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tests.integrations.vllm.births import BUILD
from tests.integrations.vllm.models import ROOT, path_of

KV_BYTES: Final = 32 << 20
"""Default bytes of an engine's cache."""
PATIENT_MS: Final = 10_000
"""The default deadline of a hook's call. With the shorter one that is right for production, an engine on a busy machine
goes on without the cache, and finds nothing."""
HASTY_MS: Final = 250
"""The deadline for engines whose daemon does not answer on purpose."""


Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The description of an engine that `life.py` takes."""

    model: str = "llama"
    """A name in `models.MODELS`, or a path."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the engine beyond the defaults."""
    arguments: Sequence[str] = ()
    """The command line of `vllm serve`, in place of everything above."""
    kv_transfer_config: Mapping[str, Any] | None = None
    """The connector; None for none."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_one_process: bool = True
    """Whether scheduler and worker share the life's process; several ranks need processes of their own."""
    is_async: bool = False
    """Whether steps are scheduled before the last one's tokens are known."""
    data_parallel_index: int = 0
    """Which of several data parallel ranks the engine is, each on its own."""
    caches_prefixes: bool = False
    """Whether prefixes are cached even if the engine's platform switches that off."""
    is_hollow: bool = False
    """Whether the model computes nothing, so that only the rest is measured; in one process only."""
    times: bool = False
    """Whether rounds tell how long the scheduler took; in one process only."""

    def told(self) -> dict[str, Any]:
        """Return the job as `life.py` reads it."""
        model = self.model if "/" in self.model else str(path_of(self.model))
        return {
            "model": model,
            "engine": {**_ENGINE, **self.engine},
            "arguments": list(self.arguments),
            "kv_transfer_config": dict(self.kv_transfer_config or {}),
            "sampling": {**_SAMPLING, **self.sampling},
            "is_async": self.is_async,
            "data_parallel_index": self.data_parallel_index,
            "caches_prefixes": self.caches_prefixes,
            "is_hollow": self.is_hollow,
            "times": self.times,
        }

    def environ(self) -> dict[str, str]:
        """Return the life's environment."""
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # Compiling one small function, which ranks log-probabilities, would take each life longer than its start.
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), str(_plugin_folder()), str(ROOT)]),
            "VLLM_CACHE_ROOT": str(BUILD / "cache"),
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.is_one_process else "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            **self.environment,
        }

    def reference(self) -> "Job":
        """Return an engine that must say the same: without connector and prefix caching, with room for all requests."""
        engine = {name: self.engine[name] for name in _DECISIVE if name in self.engine}
        return Job(model=self.model, engine={**engine, "enable_prefix_caching": False})


_DECISIVE: Final = ("attention_config", "dtype", "kv_cache_dtype", "seed")
"""Arguments that decide what an engine says; how it splits work and where it keeps blocks do not."""
_ENGINE: Final[dict[str, Any]] = {
    "block_size": 32,
    "disable_log_stats": False,
    "dtype": "float32",
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": KV_BYTES,
    "max_model_len": 2048,
    "seed": 0,
}
_SAMPLING: Final[dict[str, Any]] = {
    "ignore_eos": True,
    "logprobs": 3,
    "max_tokens": 16,
    "temperature": 0.0,
}


def beside_offload(job: Job, pool_bytes: int = 16 << 20) -> Job:
    """Return the same engine with the offload pool beside its connector."""
    alone = dict(job.kv_transfer_config or {})
    settings = {**alone["kv_connector_extra_config"], "pool_bytes": pool_bytes}
    offload = {
        **alone,
        "kv_connector": "KVLeaseOffloadingConnector",
        "kv_connector_extra_config": settings,
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [alone, offload]},
    }
    return replace(job, kv_transfer_config=config)


def prompt(num_tokens: int, *, seed: int = 0, prefix: Sequence[int] = ()) -> list[int]:
    """Return a prompt of random tokens behind a prefix; equal seeds give equal prompts."""
    left = num_tokens - len(prefix)
    assert left >= 0
    made = hashlib.shake_128(f"prompt {seed}".encode()).digest(2 * left)
    rest = [int.from_bytes(made[2 * at : 2 * at + 2], "little") % 512 for at in range(left)]
    return [*prefix, *rest]


def _plugin_folder() -> Path:
    """Return a folder through which a life finds this tree's entry points, as if it were installed."""
    folder = BUILD / "plugin"
    info = folder / "kvlease-0.dist-info"
    if not info.exists():
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlease\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nkvlease = kvlease.integrations.vllm.plugin:register\n"
        )
    return folder
