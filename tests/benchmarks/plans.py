"""Own the figures of the planner: a plan of a hundred layers of three kinds, and all golden vectors."""

import subprocess
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from measure import NS_PER_MS, Figure, median_of

from kvlease.plan import CachePlan, EngineInputs, PlanInputs
from kvlease.spec import FullAttention, LayerSpec, SlidingWindow, StateSpace
from kvleased.planning import plan

NUM_LAYERS: Final = 100
HYBRID_MS_MAX: Final = 20
VECTORS_SECONDS_MAX: Final = 20
TOKENS_PER_BLOCK: Final = 512
_GOLDEN: Final = Path(__file__).parents[1] / "golden"


def plans(directory: Path) -> list[Figure]:  # noqa: ARG001 - every benchmark gets one
    """Measure a plan of a hybrid model, and the runner of the golden vectors over all of its files."""
    inputs = _hybrid()

    def once() -> int:
        start = perf_counter_ns()
        made = plan(inputs)
        taken = perf_counter_ns() - start
        assert isinstance(made, CachePlan)
        return taken

    once()
    milliseconds = median_of(once, 30) / NS_PER_MS
    start = perf_counter_ns()
    for vectors in sorted((_GOLDEN / "vectors").glob("*.json")):
        subprocess.run(
            [sys.executable, _GOLDEN / "run.py", vectors], check=True, stdout=subprocess.DEVNULL
        )
    seconds = (perf_counter_ns() - start) / NS_PER_MS / 1e3
    return [
        Figure(
            name=f"plan of {NUM_LAYERS} layers of three kinds",
            ours=milliseconds,
            unit="ms",
            goal=f"≤ {HYBRID_MS_MAX} ms",
            holds=milliseconds <= HYBRID_MS_MAX,
        ),
        Figure(
            name="all golden vectors, one process a file",
            ours=seconds,
            unit="s",
            goal=f"≤ {VECTORS_SECONDS_MAX} s",
            holds=seconds <= VECTORS_SECONDS_MAX,
        ),
    ]


def _hybrid() -> PlanInputs:
    """Return a model whose layers alternate between recurrent states, windows and full attention."""
    layers: list[LayerSpec] = []
    for index in range(NUM_LAYERS):
        heads = {
            "name": f"layers.{index}",
            "num_kv_heads": 8,
            "head_size": 128,
            "dtype": "bfloat16",
        }
        if index % 4 == 3:
            layers.append(FullAttention(**heads))  # type: ignore[arg-type]  # of two types
        elif index % 4 == 1:
            layers.append(SlidingWindow(**heads, window_tokens=1024))  # type: ignore[arg-type]  # likewise
        else:
            layers.append(
                StateSpace(
                    name=f"layers.{index}",
                    shapes=((3, 8192), (32, 128, 128)),
                    dtypes=("bfloat16", "bfloat16"),
                )
            )
    return PlanInputs(
        layers=tuple(layers),
        tokens_per_block=TOKENS_PER_BLOCK,
        device_bytes=80 << 30,
        host_bytes=256 << 30,
        longest_request_tokens=131_072,
        engine=EngineInputs(state_mode="align", tokens_per_step=8192),
        null_blocks=1,
    )
