"""Own the figure of starts: the control process is killed and restarted over kept memory of several sizes."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final, Self

from measure import Figure, paired
from node import TOKENS_PER_BLOCK, Node

from kvlease import Client
from kvleased.memory.limits import memory_limit_bytes

MIB: Final = 1 << 20
POOL_MIB: Final = (64, 1024, 8192)
"""Sizes of the device pool; those that do not fit twice into this machine's memory are left out."""
IMPORTS: Final = (
    "import asyncio, google.protobuf, httptools, numpy, prometheus_client, structlog, uvloop\n"
    "import fastapi, uvicorn"
)
"""Libraries that a control process needs; a bare interpreter that imports them is the floor."""
BYTES_PER_BLOCK: Final = 64 << 10
BYTES_PER_KEY: Final = 32
BLOCKS_PER_LEASE: Final = 8192
KILLS: Final = 5
SECONDS_MAX: Final = 1.2
SPREAD_MAX: Final = 1.2
"""How much longer the slowest size may take than the quickest."""


def restarts(directory: Path) -> list[Figure]:
    """Measure from the new control process's start until it is ready; the sizes and the floor take turns."""
    sizes = [mib for mib in POOL_MIB if mib * MIB * 2 <= _memory_bytes()]
    with ExitStack() as stack:
        nodes = [stack.enter_context(_Filled(directory / str(mib), mib)) for mib in sizes]
        seconds: list[list[float]] = [[] for _ in nodes]
        importing: list[float] = []
        for node in nodes:
            node.wait_idle()
        turns = list(zip(nodes, seconds, strict=True))
        for _ in range(KILLS):
            importing.append(import_seconds())
            for node, found in turns:
                found.append(node.restart_control())
                node.wait_idle()
            turns.append(turns.pop(0))
    quickest = min(median(found) for found in seconds)
    return [
        Figure(
            name=f"start over a kept pool of {_written(mib)}, half of it cached",
            ours=median(found) * 1e3,
            unit="ms",
            floor=median(importing) * 1e3,
            ratio=paired(found, importing),
            goal=f"< {SECONDS_MAX:g} s, spread ≤ {SPREAD_MAX:g} x",
            holds=median(found) < SECONDS_MAX and median(found) <= SPREAD_MAX * quickest,
            note=f"{median(found) / quickest:.2f} x the quickest size; floor: imports alone",
        )
        for mib, found in zip(sizes, seconds, strict=True)
    ]


def import_seconds() -> float:
    """Return the seconds that a bare interpreter takes to import what a control process needs."""
    start = perf_counter()
    subprocess.run([sys.executable, "-P", "-c", IMPORTS], check=True)
    return perf_counter() - start


class _Filled(Node):
    """A daemon with one pool, half of whose blocks are cached, so that there is an index to restore."""

    def __init__(self, directory: Path, mib: int) -> None:
        limit_bytes = (mib + 256) * MIB
        super().__init__(directory, "--memory-bytes-max", str(limit_bytes))
        self._num_blocks = mib * MIB // BYTES_PER_BLOCK

    def __enter__(self) -> Self:
        """Start the daemon, and fill the pool."""
        super().__enter__()
        self.register(
            "bench",
            bytes_per_token=BYTES_PER_BLOCK // TOKENS_PER_BLOCK,
            num_blocks=self._num_blocks,
        )
        with (
            Client(self.local, deadline_seconds=20, on_doubt="raise") as client,
            client.attach("bench") as worker,
        ):
            for first in range(0, self._num_blocks // 2, BLOCKS_PER_LEASE):
                count = min(BLOCKS_PER_LEASE, self._num_blocks // 2 - first)
                num_tokens = count * TOKENS_PER_BLOCK
                with worker.reserve(f"fill-{first}", num_tokens=num_tokens) as lease:
                    lease.commit(num_tokens, os.urandom(count * BYTES_PER_KEY))
        return self


def _memory_bytes() -> int:
    """Return the bytes that this process may still use."""
    text = Path("/proc/meminfo").read_text()
    available_kib = next(
        int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable")
    )
    return min(available_kib << 10, memory_limit_bytes())


def _written(mib: int) -> str:
    return f"{mib} MiB" if mib < 1024 else f"{mib // 1024} GiB"
