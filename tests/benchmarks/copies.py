"""Own the figures of copies: evict and reload of leases of scattered blocks beside a loop of memcpy over such lists."""

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Final

import cores
import numpy as np
from measure import Figure, in_turns, paired
from node import TOKENS_PER_BLOCK, Node
from numpy.typing import NDArray

from kvlease import Client, Lease, Worker
from kvlease.replies import ReserveSpec
from kvlease.v1 import kvlease_pb2 as pb

BYTES_PER_BLOCK: Final = 64 << 10
NUM_BLOCKS: Final = 4096
POOL_BYTES: Final = NUM_BLOCKS * BYTES_PER_BLOCK
"""Bytes of either pool: far more than a processor's cache, so none of it is still there when it comes back."""
BLOCKS_PER_LEASE: Final = NUM_BLOCKS
BLOCKS_PER_SMALL_LEASE: Final = 512
"""Blocks of leases that are moved one after the other, to show what a call costs beside its copies."""
RESERVES_A_STEP: Final = 512
ROUNDS: Final = 15
SHARE_OF_FLOOR_MIN: Final = 0.8
"""Of the floor's bytes per second, without checksums."""
NEIGHBOURS_MAX: Final = 0.05
"""The share of blocks that follow their predecessor in the pool, up to which a list counts as scattered."""

_LOOP: Final = """
#include <stdint.h>
#include <string.h>
void copy_blocks(char *to, const char *from, const int32_t *to_ids, const int32_t *from_ids, long num, long bytes) {
    for (long i = 0; i < num; i++)
        memcpy(to + (int64_t)to_ids[i] * bytes, from + (int64_t)from_ids[i] * bytes, bytes);
}
"""

Ids = NDArray[np.int32]
Copy = Callable[[int, int, Ids, Ids], None]
"""Copy blocks: target address, source address, ids of the targets, ids of the sources."""


def evict_and_reload(directory: Path) -> list[Figure]:
    """Measure both ways, without checksums and with them; only the former has a goal."""
    copy, note = _compiled(directory)
    figures = []
    for integrity in ("none", "xxh3"):
        with ExitStack() as stack:
            stack.enter_context(cores.awake())
            options = ("--max-leases", str(NUM_BLOCKS))
            node = stack.enter_context(Node(directory / integrity, *options))
            node.register(
                "bench",
                bytes_per_token=BYTES_PER_BLOCK // TOKENS_PER_BLOCK,
                num_blocks=NUM_BLOCKS,
                num_slots=NUM_BLOCKS,
                integrity=integrity,
            )
            client = stack.enter_context(Client(node.local, deadline_seconds=20, on_doubt="raise"))
            worker = stack.enter_context(client.attach("bench"))
            for blocks_per_lease in (BLOCKS_PER_LEASE, BLOCKS_PER_SMALL_LEASE):
                figures += _both_ways(worker, _Floor(copy), integrity, blocks_per_lease, note)
    return figures


def _both_ways(
    worker: Worker, floor: "_Floor", integrity: str, blocks_per_lease: int, note: str
) -> list[Figure]:
    _scatter(worker)
    num_tokens = blocks_per_lease * TOKENS_PER_BLOCK
    leases = [
        worker.reserve(f"lease-{index}", num_tokens=num_tokens)
        for index in range(NUM_BLOCKS // blocks_per_lease)
    ]
    floor.device_ids = np.concatenate([lease.block_ids for lease in leases])
    neighbours = np.mean(np.diff(floor.device_ids) == 1)
    assert neighbours <= NEIGHBOURS_MAX, f"{neighbours:.0%} of the blocks are neighbours"
    sides = (
        lambda: _timed(leases, Lease.evict),
        floor.evict,
        lambda: _timed(leases, Lease.reload),
        floor.reload,
    )
    # Evict and reload must alternate, so the first round is the warm-up.
    turns = in_turns(sides, calls_a_round=1, rounds=ROUNDS + 1, warm_up=0)
    evict, floor_evict, reload, floor_reload = (found[1:] for found in turns)
    for lease in leases:
        lease.release()
    what = f"of {blocks_per_lease} scattered 64 KiB blocks, {integrity}"
    has_goal = integrity == "none" and blocks_per_lease == BLOCKS_PER_LEASE
    return [
        _speed(f"evict {what}", evict, floor_evict, has_goal=has_goal, note=note),
        _speed(f"reload {what}", reload, floor_reload, has_goal=has_goal, note=note),
    ]


def _speed(
    name: str, ours: list[float], floor: list[float], *, has_goal: bool, note: str
) -> Figure:
    """Return a figure in bytes per second, so that more is better."""
    ratio = paired(floor, ours)
    return Figure(
        name=name,
        ours=POOL_BYTES / median(ours),
        floor=POOL_BYTES / median(floor),
        unit="GB/s",
        ratio=ratio,
        goal=f"≥ {SHARE_OF_FLOOR_MIN:g} x" if has_goal else "",
        holds=ratio >= SHARE_OF_FLOOR_MIN if has_goal else None,
        note=note,
    )


def _timed(leases: list[Lease], move: Callable[[Lease], object]) -> int:
    start = perf_counter_ns()
    for lease in leases:
        move(lease)
    taken = perf_counter_ns() - start
    assert all(lease.is_live for lease in leases)
    return taken


def _scatter(worker: Worker) -> None:
    """Have both free lists in no order: lease every block alone, and let go of them in a random one."""
    randomly = np.random.default_rng(1)
    for is_host in (True, False):
        leases: list[Lease] = []
        for first in range(0, NUM_BLOCKS, RESERVES_A_STEP):
            names = range(first, first + RESERVES_A_STEP)
            _, granted = worker.step(
                verbs=[pb.STEP_VERB_RELEASE],
                lease_ids=[1],
                num_tokens=[0],
                reserves=[
                    ReserveSpec(request_id=f"{is_host}-{name}", num_tokens=1) for name in names
                ],
            )
            leases += granted
        if is_host:
            for lease in leases:
                lease.evict()
        leases = [leases[index] for index in randomly.permutation(NUM_BLOCKS)]
        worker.step(
            verbs=np.full(NUM_BLOCKS, pb.STEP_VERB_RELEASE),
            lease_ids=[lease.lease_id for lease in leases],
            num_tokens=np.zeros(NUM_BLOCKS, np.int32),
        )


class _Floor:
    """Two pools of the same kind of memory, and the copies between them without anybody to ask."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._device, self._host = _pool("device"), _pool("host")
        self.device_ids: Ids = np.zeros(0, np.int32)
        self._host_ids = np.random.default_rng(1).permutation(NUM_BLOCKS).astype(np.int32)

    def evict(self) -> int:
        """Copy from the device pool to the host pool."""
        start = perf_counter_ns()
        self._copy(self._host, self._device, self._host_ids, self.device_ids)
        return perf_counter_ns() - start

    def reload(self) -> int:
        """Copy from the host pool to the device pool."""
        start = perf_counter_ns()
        self._copy(self._device, self._host, self.device_ids, self._host_ids)
        return perf_counter_ns() - start


def _pool(name: str) -> int:
    """Return the address of a pool in shared memory, all of it there; it stays until the process ends."""
    fd = os.memfd_create(f"bench:{name}", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, POOL_BYTES)
    mapped = np.frombuffer(mmap.mmap(fd, POOL_BYTES, mmap.MAP_SHARED), np.uint8)
    os.close(fd)
    mapped[:] = 1
    _KEPT.append(mapped)
    return mapped.ctypes.data


_KEPT: Final[list[NDArray[np.uint8]]] = []


def _compiled(directory: Path) -> tuple[Copy, str]:
    """Return the loop in C, or one in Python where there is no compiler, and what to say of it."""
    compiler = shutil.which("cc")
    if compiler is None:
        return _without_compiler, "no cc: the floor is a loop of ctypes.memmove"
    source, library = directory / "copy.c", directory / "copy.so"
    source.write_text(_LOOP)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    copy_blocks = ctypes.CDLL(str(library)).copy_blocks
    copy_blocks.restype = None

    def copy(target: int, source: int, target_ids: Ids, source_ids: Ids) -> None:
        pointers = (target, source, target_ids.ctypes.data, source_ids.ctypes.data)
        copy_blocks(
            *map(ctypes.c_void_p, pointers),
            ctypes.c_long(len(target_ids)),
            ctypes.c_long(BYTES_PER_BLOCK),
        )

    return copy, ""


def _without_compiler(target: int, source: int, target_ids: Ids, source_ids: Ids) -> None:
    for to, of in zip(target_ids.tolist(), source_ids.tolist(), strict=True):
        ctypes.memmove(
            target + to * BYTES_PER_BLOCK, source + of * BYTES_PER_BLOCK, BYTES_PER_BLOCK
        )
