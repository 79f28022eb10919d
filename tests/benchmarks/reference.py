"""Own the exchange with vLLM's block manager, the floor of ours, and the figures of both.

The floor runs in a process of its own, round by round in turns with ours; hashing is on neither side.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import cores
from measure import NS_PER_US, Figure, paired

ROOT: Final = Path(__file__).parents[2]
REFERENCE: Final = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
NO_FLOOR: Final = "no floor: make test-vllm makes .venv-vllm"

Process = subprocess.Popen[str]


@contextmanager
def reference() -> Iterator[Process | None]:
    """Start the floor's process, if it is available, and keep it and this process on one core meanwhile."""
    with cores.shared():
        if REFERENCE.exists():
            yield from _started()
        else:
            yield None


def _started() -> Iterator[Process]:
    process = subprocess.Popen(
        [REFERENCE, ROOT / "tests" / "vllm" / "manager.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ask(process: Process, num_blocks: int, num_calls: int, window_tokens: int) -> dict[str, float]:
    """Return the floor's median nanoseconds of one round; a window of 0 tokens stands for one group."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{num_blocks} {num_calls} {window_tokens}\n")
    process.stdin.flush()
    figures: dict[str, float] = json.loads(process.stdout.readline())
    return figures


def figure(title: str, ours: list[float], floor: list[float], times: int) -> Figure:
    """Return a figure whose goal is to be so many times faster than its floor."""
    if not floor:
        return Figure(name=title, ours=median(ours) / NS_PER_US, unit="µs", note=NO_FLOOR)
    ratio = paired(ours, floor)
    return Figure(
        name=title,
        ours=median(ours) / NS_PER_US,
        floor=median(floor) / NS_PER_US,
        unit="µs",
        ratio=ratio,
        goal=f"≤ 1/{times}",
        holds=ratio <= 1 / times,
        note=f"{1 / ratio:.1f} times faster",
    )
