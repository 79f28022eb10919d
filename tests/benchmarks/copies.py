"""Own the figures of copies: evict and reload of leases with scattered blocks, beside a memcpy loop over such lists."""

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
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

CACHE: Final = "bench"
KIB: Final = 1 << 10
SIZES: Final = ((16 * KIB, 16384), (64 * KIB, 4096), (256 * KIB, 1024))
"""Bytes of a block, and blocks of either pool: 256 MiB, so that hardly any is in a CPU cache when copied again."""
BLOCKS_PER_SMALL_LEASE: Final = 512
"""Blocks of each lease that is moved in turn, to show what a call costs beyond its copies."""
OPERATIONS_A_STEP: Final = 512
ROUNDS: Final = 15
SHARE_OF_FLOOR_MIN: Final = 0.9
SHARE_OF_FLOOR_MIN_SMALL: Final = 0.75
"""The smallest share of the floor's bytes per second for blocks below 64 KiB."""
SHARE_OF_FLOOR_MIN_SUMMED: Final = 0.7
"""The smallest share with checksums, which the floor does not compute."""
NEIGHBOURS_MAX: Final = 0.05
"""The largest share of blocks that directly follow their predecessor in a list that counts as scattered."""

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
    """Copies without a daemon; each returns its nanoseconds."""

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
    """The blocks of one measurement, and how they are moved."""

    bytes_per_block: int
    num_blocks: int
    integrity: str
    note: str
    slots_are_apart: bool = False
    """Whether every second slot is in use, so that no two free slots are neighbours; else all are free."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots, of which as many are free as there are blocks."""
        return 2 * self.num_blocks if self.slots_are_apart else self.num_blocks

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.bytes_per_block * self.num_blocks

    @property
    def share_min(self) -> float:
        """Return the goal for one lease of all blocks, as a share of the floor's bytes per second."""
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
        for slots_are_apart in (False, True)
        for figure in _figures(
            Case(
                bytes_per_block=bytes_per_block,
                num_blocks=num_blocks,
                integrity=integrity,
                note=note,
                slots_are_apart=slots_are_apart,
            ),
            copy,
            directory,
        )
    ]


def _figures(case: Case, copy: Copy, directory: Path) -> list[Figure]:
    """Measure with a daemon and a cache of its own."""
    figures = []
    # Copies and their floor take turns on one core, because another may be half as fast for minutes. On that other one
    # is the control process, which hands over the next blocks while a mover copies.
    with (
        attached(case, directory) as (node, worker),
        SameMemory(copy, case, node) as floor,
        cores.shared(),
    ):
        node.put_movers_on(cores.SHARED)
        node.put_control_on(min(cores.ALL))
        figures += both_ways(node, worker, floor, case, case.num_blocks)
        if case.bytes_per_block == 64 * KIB and not case.slots_are_apart:
            figures += both_ways(node, worker, floor, case, BLOCKS_PER_SMALL_LEASE)
    return figures


@contextmanager
def attached(case: Case, directory: Path, *options: str) -> Iterator[tuple[Node, Worker]]:
    """Give a case's own daemon and worker, with a cache whose free blocks are scattered."""
    with ExitStack() as stack:
        stack.enter_context(cores.awake())
        apart = "apart" if case.slots_are_apart else "together"
        own_directory = directory / f"{case.bytes_per_block}-{case.integrity}-{apart}"
        node = stack.enter_context(
            Node(own_directory, "--max-leases", str(3 * case.num_blocks), *options)
        )
        node.register(
            CACHE,
            bytes_per_token=case.bytes_per_block // TOKENS_PER_BLOCK,
            num_blocks=case.num_blocks,
            num_slots=case.num_slots,
            integrity=case.integrity,
        )
        client = stack.enter_context(Client(node.local, deadline_seconds=20, on_doubt="raise"))
        worker = stack.enter_context(client.attach(CACHE))
        if case.slots_are_apart:
            part_slots(worker, case.num_blocks)
        scatter(worker, case.num_blocks)
        yield node, worker


def both_ways(
    node: Node, worker: Worker, floor: Copies, case: Case, blocks_per_lease: int
) -> list[Figure]:
    """Measure evict and reload of leases of so many blocks each, in turns with the floor."""
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
    size = f"{case.bytes_per_block // KIB} KiB"
    slots = ", slots apart" if case.slots_are_apart else ""
    what = f"{blocks_per_lease} scattered {size} blocks{slots}, {case.integrity}"
    has_goal = blocks_per_lease == case.num_blocks
    figures = [
        _speed(f"evict of {what}", evict, floor_evict, case, has_goal=has_goal),
        _speed(f"reload of {what}", reload, floor_reload, case, has_goal=has_goal),
    ]
    if has_goal:
        gb = 2 * (ROUNDS + 1) * case.pool_bytes / 1e9
        figures.append(
            _cost(f"cores' time of the same{slots}, {case.integrity}", seconds, floor, gb)
        )
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
    """Return the figure of the processor time of all the daemon's processes for each GB."""
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
    """Free blocks in a random order; slots are taken in their order, whatever the order of release."""
    leases = singles(worker, "random", num_blocks)
    release(worker, [leases[at] for at in np.random.default_rng(1).permutation(num_blocks)])


def part_slots(worker: Worker, num_blocks: int) -> None:
    """Put every second slot in use."""
    in_slots: list[Lease] = []
    for half in "first", "second":
        leases = singles(worker, f"{half} half", num_blocks)
        for lease in leases:
            lease.evict()
        in_slots += leases
    release(worker, in_slots[::2])


def singles(worker: Worker, name: str, num_blocks: int) -> list[Lease]:
    """Lease every block alone."""
    leases: list[Lease] = []
    for first in range(0, num_blocks, OPERATIONS_A_STEP):
        _, granted = worker.step(
            verbs=[pb.STEP_VERB_RELEASE],
            lease_ids=[1],
            num_tokens=[0],
            reserves=[
                ReserveSpec(request_id=f"{name} {number}", num_tokens=1)
                for number in range(first, first + OPERATIONS_A_STEP)
            ],
        )
        leases += granted
    return leases


def release(worker: Worker, leases: Sequence[Lease]) -> None:
    """Release leases in this order."""
    for first in range(0, len(leases), OPERATIONS_A_STEP):
        some = leases[first : first + OPERATIONS_A_STEP]
        worker.step(
            verbs=np.full(len(some), pb.STEP_VERB_RELEASE),
            lease_ids=[lease.lease_id for lease in some],
            num_tokens=np.zeros(len(some), np.int32),
        )


class Floor:
    """Two pools of the same kind of memory, and copies between them without a daemon."""

    def __init__(self, copy: Copy, case: Case) -> None:
        self._copy = copy
        self._bytes_per_block = case.bytes_per_block
        self._pools = [_Pool(fd, case.bytes_per_block) for fd in self._descriptors(case)]
        self._host_ids = np.random.default_rng(1).permutation(case.num_blocks).astype(np.int32)

    def _descriptors(self, case: Case) -> tuple[int, int]:
        """Return descriptors of the device and host pools, with their memory populated."""
        device, host = (os.memfd_create(f"bench:{name}") for name in ("device", "host"))
        for fd in device, host:
            os.posix_fallocate(fd, 0, case.pool_bytes)
        return device, host

    def __enter__(self) -> Self:
        """Make the pools."""
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
        device, host = self._pools
        return self._timed(host, device, self._host_ids, self.device_ids)

    def reload(self) -> int:
        """Copy from the host pool to the device pool."""
        device, host = self._pools
        return self._timed(device, host, self.device_ids, self._host_ids)

    def _timed(self, target: "_Pool", source: "_Pool", target_ids: Ids, source_ids: Ids) -> int:
        addresses = target.address, source.address
        seconds, start = process_time(), perf_counter_ns()
        self._copy(*addresses, target_ids, source_ids, self._bytes_per_block)
        taken = perf_counter_ns() - start
        self.processor_seconds += process_time() - seconds
        return taken


class SameMemory(Floor):
    """The same copies as the daemon's: in its own pools, of the same blocks, in the lease's order.

    The memory pages that pools happen to get change the speed of copies by a sixth, for as long as the pools live.
    """

    def __init__(self, copy: Copy, case: Case, node: Node) -> None:
        self._node = node
        self._mark = 1 << 32
        super().__init__(copy, case)

    def _descriptors(self, case: Case) -> tuple[int, int]:  # noqa: ARG002 - the daemon knows how many bytes
        device, host = (self._node.open_memory(CACHE, name) for name in ("device.0", "host"))
        return device, host

    def begin(self, device_ids: Ids) -> None:
        """Mark these blocks with numbers, by which their copies are found."""
        super().begin(device_ids)
        self._mark += len(device_ids)
        self._pools[0].mark(device_ids, self._mark)

    def _timed(self, target: "_Pool", source: "_Pool", target_ids: Ids, source_ids: Ids) -> int:
        target_ids, source_ids = target.marked(self._mark), source.marked(self._mark)
        assert len(target_ids) == len(source_ids) == len(self.device_ids), "copies are not found"
        return super()._timed(target, source, target_ids, source_ids)


class _Pool:
    """A pool in shared memory, as blocks of so many bytes."""

    def __init__(self, fd: int, bytes_per_block: int) -> None:
        num_bytes = os.fstat(fd).st_size
        self._mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        words = np.frombuffer(self._mapping, np.int64).reshape(-1, bytes_per_block // 8)
        self.address = words.ctypes.data
        self._marks: NDArray[np.int64] | None = words[:, 0]

    def mark(self, ids: Ids, first: int) -> None:
        """Number blocks in this order."""
        assert self._marks is not None, "closed"
        self._marks[ids] = np.arange(first, first + len(ids))

    def marked(self, first: int) -> Ids:
        """Return the blocks that are numbered, in the order of their numbers."""
        assert self._marks is not None, "closed"
        (found,) = (self._marks >= first).nonzero()
        return found[self._marks[found].argsort()].astype(np.int32)

    def close(self) -> None:
        """Give its memory back."""
        self._marks = None
        self._mapping.close()


def compiled(directory: Path) -> tuple[Copy, str]:
    """Return the loop in C, or in Python if there is no compiler, and a note about it."""
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
