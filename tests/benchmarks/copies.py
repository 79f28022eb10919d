"""Own the figures of copies: evict and reload of leases of scattered blocks beside a loop of memcpy over such lists."""

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time
from typing import Final, Protocol, Self

import cores
import numpy as np
from measure import Figure, in_turns, paired
from node import TOKENS_PER_BLOCK, Node
from numpy.typing import NDArray

from kvlease import Client, Lease, Worker
from kvlease.replies import ReserveSpec
from kvlease.v1 import kvlease_pb2 as pb

KIB: Final = 1 << 10
SIZES: Final = ((16 * KIB, 4096), (64 * KIB, 4096), (256 * KIB, 1024))
"""Bytes of a block, and blocks of either pool: far more than a core's cache, so none is still there afterwards."""
BLOCKS_PER_SMALL_LEASE: Final = 512
"""Blocks of leases that are moved one after the other, to show what a call costs beside its copies."""
RESERVES_A_STEP: Final = 512
ROUNDS: Final = 15
SHARE_OF_FLOOR_MIN: Final = 0.9
SHARE_OF_FLOOR_MIN_SMALL: Final = 0.75
"""The same for blocks below 64 KiB."""
SHARE_OF_FLOOR_MIN_SUMMED: Final = 0.7
"""Of the floor's bytes per second with checksums, which the floor takes none of."""
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
Copy = Callable[[int, int, Ids, Ids, int], None]
"""Copy blocks: target address, source address, ids of the targets, ids of the sources, bytes of a block."""


class Copies(Protocol):
    """Copies without anybody to ask, which take nanoseconds."""

    device_ids: Ids
    processor_seconds: float

    def begin(self, device_ids: Ids) -> None:
        """Copy these blocks from now on."""

    def evict(self) -> int:
        """Copy from the device pool to the host pool."""

    def reload(self) -> int:
        """Copy from the host pool to the device pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is moved, and how."""

    bytes_per_block: int
    num_blocks: int
    integrity: str
    note: str

    @property
    def pool_bytes(self) -> int:
        """Bytes of either pool."""
        return self.bytes_per_block * self.num_blocks

    @property
    def share_min(self) -> float:
        """The share of the floor's bytes per second that is wanted of one lease of all blocks."""
        if self.integrity != "none":
            return SHARE_OF_FLOOR_MIN_SUMMED
        return SHARE_OF_FLOOR_MIN_SMALL if self.bytes_per_block < 64 * KIB else SHARE_OF_FLOOR_MIN


def evict_and_reload(directory: Path) -> list[Figure]:
    """Measure both ways for several sizes of a block, without checksums and with them."""
    copy, note = compiled(directory)
    return [
        figure
        for bytes_per_block, num_blocks in SIZES
        for integrity in ("none", "xxh3")
        for figure in _figures(
            Case(
                bytes_per_block=bytes_per_block,
                num_blocks=num_blocks,
                integrity=integrity,
                note=note,
            ),
            copy,
            directory,
        )
    ]


def _figures(case: Case, copy: Copy, directory: Path) -> list[Figure]:
    """Measure with a daemon and a cache of its own."""
    figures = []
    # What copies takes turns with its floor on one core: another may be half as fast for minutes.
    with attached(case, directory) as (node, worker), Floor(copy, case) as floor, cores.shared():
        node.put_movers_on(cores.SHARED)
        figures += both_ways(node, worker, floor, case, case.num_blocks)
        if case.bytes_per_block == 64 * KIB:
            figures += both_ways(node, worker, floor, case, BLOCKS_PER_SMALL_LEASE)
    return figures


@contextmanager
def attached(case: Case, directory: Path, *options: str) -> Iterator[tuple[Node, Worker]]:
    """Give a daemon of a case's own, with its cache and a worker."""
    with ExitStack() as stack:
        stack.enter_context(cores.awake())
        own_directory = directory / f"{case.bytes_per_block}-{case.integrity}"
        node = stack.enter_context(
            Node(own_directory, "--max-leases", str(case.num_blocks), *options)
        )
        node.register(
            "bench",
            bytes_per_token=case.bytes_per_block // TOKENS_PER_BLOCK,
            num_blocks=case.num_blocks,
            num_slots=case.num_blocks,
            integrity=case.integrity,
        )
        client = stack.enter_context(Client(node.local, deadline_seconds=20, on_doubt="raise"))
        yield node, stack.enter_context(client.attach("bench"))


def both_ways(
    node: Node, worker: Worker, floor: Copies, case: Case, blocks_per_lease: int
) -> list[Figure]:
    """Measure evict and reload of leases of so many blocks each, in turns with the floor."""
    scatter(worker, case.num_blocks)
    num_tokens = blocks_per_lease * TOKENS_PER_BLOCK
    leases = [
        worker.reserve(f"lease-{index}", num_tokens=num_tokens)
        for index in range(case.num_blocks // blocks_per_lease)
    ]
    floor.begin(np.concatenate([lease.block_ids for lease in leases]))
    neighbours = np.mean(np.diff(floor.device_ids) == 1)
    assert neighbours <= NEIGHBOURS_MAX, f"{neighbours:.0%} of the blocks are neighbours"
    sides = (
        lambda: _timed(leases, Lease.evict),
        floor.evict,
        lambda: _timed(leases, Lease.reload),
        floor.reload,
    )
    seconds_before = node.processor_seconds()
    # Evict and reload must alternate, so the first round is the warm-up.
    turns = in_turns(sides, calls_a_round=1, rounds=ROUNDS + 1, warm_up=0)
    seconds = node.processor_seconds() - seconds_before
    evict, floor_evict, reload, floor_reload = (found[1:] for found in turns)
    for lease in leases:
        lease.release()
    what = (
        f"{blocks_per_lease} scattered {case.bytes_per_block // KIB} KiB blocks, {case.integrity}"
    )
    has_goal = blocks_per_lease == case.num_blocks
    figures = [
        _speed(f"evict of {what}", evict, floor_evict, case, has_goal=has_goal),
        _speed(f"reload of {what}", reload, floor_reload, case, has_goal=has_goal),
    ]
    if has_goal:
        gb = 2 * (ROUNDS + 1) * case.pool_bytes / 1e9
        figures.append(_cost(f"cores' time of the same, {case.integrity}", seconds, floor, gb))
    return figures


def _speed(
    name: str, ours: list[float], floor: list[float], case: Case, *, has_goal: bool
) -> Figure:
    """Return a figure in bytes per second, so that more is better."""
    ratio = paired(floor, ours)
    return Figure(
        name=name,
        ours=case.pool_bytes / median(ours),
        floor=case.pool_bytes / median(floor),
        unit="GB/s",
        ratio=ratio,
        goal=f"≥ {case.share_min:g} x" if has_goal else "",
        holds=ratio >= case.share_min if has_goal else None,
        note=case.note,
    )


def _cost(name: str, seconds: float, floor: Copies, gb: float) -> Figure:
    """Return the figure of what all processes of the daemon spent for each GB."""
    return Figure(
        name=name,
        ours=seconds / gb,
        floor=floor.processor_seconds / gb,
        unit="s/GB",
        ratio=seconds / floor.processor_seconds,
        note="all processes of the daemon, both ways",
    )


def _timed(leases: list[Lease], move: Callable[[Lease], object]) -> int:
    start = perf_counter_ns()
    for lease in leases:
        move(lease)
    taken = perf_counter_ns() - start
    assert all(lease.is_live for lease in leases)
    return taken


def scatter(worker: Worker, num_blocks: int) -> None:
    """Have both free lists in no order: lease every block alone, and let go of them in a random one."""
    randomly = np.random.default_rng(1)
    for is_host in (True, False):
        leases: list[Lease] = []
        for first in range(0, num_blocks, RESERVES_A_STEP):
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
        leases = [leases[index] for index in randomly.permutation(num_blocks)]
        worker.step(
            verbs=np.full(num_blocks, pb.STEP_VERB_RELEASE),
            lease_ids=[lease.lease_id for lease in leases],
            num_tokens=np.zeros(num_blocks, np.int32),
        )


class Floor:
    """Two pools of the same kind of memory, and the copies between them without anybody to ask."""

    def __init__(self, copy: Copy, case: Case) -> None:
        self._copy = copy
        self._bytes_per_block = case.bytes_per_block
        self._pools = [_Pool(name, case.pool_bytes) for name in ("device", "host")]
        self._host_ids = np.random.default_rng(1).permutation(case.num_blocks).astype(np.int32)

    def __enter__(self) -> Self:
        """Have the pools."""
        self._device, self._host = (pool.open() for pool in self._pools)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the memory back."""
        for pool in self._pools:
            pool.close()

    def begin(self, device_ids: Ids) -> None:
        """Copy these blocks from now on."""
        self.device_ids = device_ids
        self.processor_seconds = 0.0

    def evict(self) -> int:
        """Copy from the device pool to the host pool."""
        return self._timed(self._host, self._device, self._host_ids, self.device_ids)

    def reload(self) -> int:
        """Copy from the host pool to the device pool."""
        return self._timed(self._device, self._host, self.device_ids, self._host_ids)

    def _timed(self, target: int, source: int, target_ids: Ids, source_ids: Ids) -> int:
        seconds, start = process_time(), perf_counter_ns()
        self._copy(target, source, target_ids, source_ids, self._bytes_per_block)
        taken = perf_counter_ns() - start
        self.processor_seconds += process_time() - seconds
        return taken


class _Pool:
    """A pool in shared memory, all of it there."""

    def __init__(self, name: str, pool_bytes: int) -> None:
        self._name, self._pool_bytes = name, pool_bytes

    def open(self) -> int:
        """Return its address."""
        fd = os.memfd_create(f"bench:{self._name}", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, self._pool_bytes)
        self._mapping = mmap.mmap(fd, self._pool_bytes, mmap.MAP_SHARED)
        os.close(fd)
        mapped = np.frombuffer(self._mapping, np.uint8)
        mapped[:] = 1
        return mapped.ctypes.data

    def close(self) -> None:
        """Give its memory back."""
        self._mapping.close()


def compiled(directory: Path) -> tuple[Copy, str]:
    """Return the loop in C, or one in Python where there is no compiler, and what to say of it."""
    compiler = shutil.which("cc")
    if compiler is None:
        return _without_compiler, "no cc: the floor is a loop of ctypes.memmove"
    source, library = directory / "copy.c", directory / "copy.so"
    source.write_text(_LOOP)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    copy_blocks = ctypes.CDLL(str(library)).copy_blocks
    copy_blocks.restype = None

    def copy(
        target: int, source: int, target_ids: Ids, source_ids: Ids, bytes_per_block: int
    ) -> None:
        pointers = (target, source, target_ids.ctypes.data, source_ids.ctypes.data)
        copy_blocks(
            *map(ctypes.c_void_p, pointers),
            ctypes.c_long(len(target_ids)),
            ctypes.c_long(bytes_per_block),
        )

    return copy, ""


def _without_compiler(
    target: int, source: int, target_ids: Ids, source_ids: Ids, bytes_per_block: int
) -> None:
    for to, of in zip(target_ids.tolist(), source_ids.tolist(), strict=True):
        ctypes.memmove(
            target + to * bytes_per_block, source + of * bytes_per_block, bytes_per_block
        )
