"""Own the figure of restarts over many blocks: from the start of the next control process to its first answered hit."""

import os
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final, Self

from measure import Figure, paired
from node import TOKENS_PER_BLOCK, Node
from starts import import_seconds

from kvlease import Client

SIZES: Final = ((100_000, 1.0), (1_000_000, 5.0))
"""Blocks in the host pool, and the most seconds until the first hit."""
BYTES_PER_BLOCK: Final = 64
"""Few bytes, so that the blocks' entries determine the time."""
BYTES_PER_KEY: Final = 32
BLOCKS_PER_LEASE: Final = 10_000
KILLS: Final = 5
MIB: Final = 1 << 20


def many_blocks(directory: Path) -> list[Figure]:
    """Measure until a prefix is found again; the sizes and the floor take turns."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(_Filled(directory / str(num_blocks), num_blocks))
            for num_blocks, _ in SIZES
        ]
        seconds: list[list[float]] = [[] for _ in nodes]
        importing: list[float] = []
        for _ in range(KILLS):
            importing.append(import_seconds())
            for node, found in zip(nodes, seconds, strict=True):
                node.wait_idle()
                found.append(node.restart_control(node.hit))
    return [
        Figure(
            name=f"killed over {num_blocks:,} blocks in the host pool, until the first hit",
            ours=median(found) * 1e3,
            unit="ms",
            floor=median(importing) * 1e3,
            ratio=paired(found, importing),
            goal=f"≤ {seconds_max:g} s",
            holds=median(found) <= seconds_max,
            note="from exec; floor: imports alone",
        )
        for (num_blocks, seconds_max), found in zip(SIZES, seconds, strict=True)
    ]


class _Filled(Node):
    """A daemon whose host pool is full of cached blocks."""

    def __init__(self, directory: Path, num_blocks: int) -> None:
        """Remember the number of blocks."""
        super().__init__(directory, "--max-leases", "64", "--memory-bytes-max", str(1024 * MIB))
        self._num_blocks = num_blocks
        self._keys = b""

    def __enter__(self) -> Self:
        """Start the daemon, and fill the host pool through the device pool."""
        super().__enter__()
        self.register(
            "bench",
            bytes_per_token=BYTES_PER_BLOCK // TOKENS_PER_BLOCK,
            num_blocks=BLOCKS_PER_LEASE,
            num_slots=self._num_blocks,
        )
        with (
            Client(self.local, deadline_seconds=20, on_doubt="raise") as client,
            client.attach("bench") as worker,
        ):
            for first in range(0, self._num_blocks, BLOCKS_PER_LEASE):
                self._keys = os.urandom(BLOCKS_PER_LEASE * BYTES_PER_KEY)
                num_tokens = BLOCKS_PER_LEASE * TOKENS_PER_BLOCK
                with worker.reserve(f"fill-{first}", num_tokens=num_tokens) as lease:
                    lease.commit(num_tokens, self._keys)
                worker.evict(num_blocks=BLOCKS_PER_LEASE)
            (stats,) = client.stats("bench").caches
        (ready,) = (pool.ready for pool in stats.pools if pool.tier == "host")
        assert ready == self._num_blocks, f"{ready} of {self._num_blocks} blocks are there"
        return self

    def hit(self) -> None:
        """Look up a prefix that only the host pool has."""
        with Client(self.local, deadline_seconds=20, on_doubt="raise") as client:
            found = client.lookup(self._keys, cache="bench")
        assert found.num_host_blocks == BLOCKS_PER_LEASE, found
