"""Own the mover's process: it takes one packet after the other and carries it out; it decides nothing."""

import ctypes
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.descriptors import receive_packet
from kvleased.memory.cpu import map_region
from kvleased.movers import protocol
from kvleased.movers.cpu import CpuPools
from kvleased.movers.pools import Copied, OutOfBoundsError, Pools
from kvleased.movers.protocol import Batch, Completion, PoolMap
from kvleased.telemetry import logs

CPU: Final = "cpu"
"""The device of pools in CPU memory, as settings name it."""

_LIBC: Final = ctypes.CDLL(None)
_MADV_POPULATE_WRITE: Final = 23
_BYTES_PER_STAT_BLOCK: Final = 512
_TOUCH_BYTES: Final = 1 << 20
_MS_BETWEEN_TOUCHES: Final = 2
"""With the bytes above, about a tenth of a core: nothing else of a start shall have to wait for it."""
NO_POOLS: Final[Pools] = CpuPools.laid((), np.zeros(0, np.uint8), num_blocks=0, bytes_per_slot=1)
"""What a batch for pools that are not mapped meets: every id is out of bounds."""

Step = Callable[[], object]
"""What readies some of the memory of pools for their first copies; it may be done at any time, or never."""
Lay = Callable[[PoolMap, list[int]], tuple[Pools, list[Step]]]
"""Map what lies behind descriptors, which stay the caller's, as pools without a piece; the last step goes first.

The descriptors have to stay open until all steps are done.
"""


def lay_in_memory(message: PoolMap, fds: list[int]) -> tuple[Pools, list[Step]]:
    """Lay pools over CPU memory; its pages are entered into this process's page tables step by step."""
    host_bytes = slots_bytes_of(message, fds)
    sizes = (*message.device_bytes, host_bytes)[: len(fds)]
    regions = [map_region(fd, region_bytes) for fd, region_bytes in zip(fds, sizes, strict=True)]
    steps = touches(list(zip(regions, fds, strict=True))[::-1])
    host = regions.pop() if message.num_slots else np.zeros(0, np.uint8)
    pools = CpuPools.laid(
        tuple(regions),
        host,
        num_blocks=message.num_blocks,
        bytes_per_slot=message.bytes_per_slot,
        pieces=message.pieces,
    )
    return pools, steps


def slots_bytes_of(message: PoolMap, fds: list[int]) -> int:
    """Return the bytes of a host pool, whose descriptor is the last; none where its file was cut off.

    Copies that need its slots are then refused, and all others carried out: to read behind a file's end would end the
    process, and each one after it.
    """
    num_bytes = message.num_slots * message.bytes_per_slot
    if not num_bytes:
        return 0
    try:
        is_whole = os.fstat(fds[-1]).st_size >= num_bytes
    except OSError:
        is_whole = True  # that the question fails says nothing of the file
    return num_bytes if is_whole else 0


def touches(regions: list[tuple[NDArray[np.uint8], int]]) -> list[Step]:
    """Return what enters the pages of regions into this process's page tables, those of the last region first.

    Beside each region is its descriptor, which has to stay open meanwhile.
    """
    return [
        partial(_touch_whole, chunk, fd, len(region))
        for region, fd in regions
        for chunk in _chunks(region)
    ]


@dataclass(frozen=True, slots=True)
class _Untouched:
    """What is left to ready of the memory of a pool."""

    steps: list[Step]
    fds: list[int]
    """Descriptors of its regions, its own: what has become of the memory is asked again at each step."""

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


_TOUCHED: Final = _Untouched([], [])


class Engine:
    """Serve one link until its other end is closed."""

    def __init__(self, link: socket.socket, lay: Lay = lay_in_memory) -> None:
        """Take the link; nothing is mapped yet."""
        self._link = link
        self._lay = lay
        self._pools: dict[int, Pools] = {}
        self._untouched: dict[int, _Untouched] = {}

    def run(self) -> None:
        """Say that it is there, and carry out packets as they come until the other end is gone, in whatever way."""
        try:
            self._link.sendall(protocol.HERE)
            self._serve()
        except (BrokenPipeError, ConnectionResetError) as error:
            # Its process was killed; the supervisor ends this one, too, and starts both anew.
            logs.line("info", "mover_ends", reason="control_gone", error=type(error).__name__)

    def _serve(self) -> None:
        while True:
            self._touch_while_idle()
            if not self._act_on_next():
                return

    def _act_on_next(self) -> bool:
        """Wait for a packet and carry it out; false where the other end is closed."""
        packet, fds = receive_packet(self._link, protocol.PACKET_BYTES_MAX, protocol.FDS_A_PACKET)
        if packet:
            self._act(packet, fds)
        return bool(packet)

    def _act(self, packet: bytes, fds: list[int]) -> None:
        """Carry out one packet."""
        kind = packet[:1]
        if kind == protocol.BATCH:
            self._link.sendall(self._complete(Batch.decode(packet)).encode())
        elif kind == protocol.MAP:
            self._map(PoolMap.decode(packet), fds)
        elif kind == protocol.PIECES:
            pool, pieces = protocol.decode_pieces(packet)
            self._pools[pool] = self._pools[pool].with_pieces(pieces)
        elif kind == protocol.UNMAP:
            pool = protocol.decode_unmap(packet)
            self._untouched.pop(pool, _TOUCHED).close()
            self._pools.pop(pool, NO_POOLS).close()

    def _touch_while_idle(self) -> None:
        """Until a packet comes, ready memory, which first copies would wait for."""
        if not self._untouched:
            return
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        for pool, untouched in list(self._untouched.items()):
            while untouched.steps:
                if poll.poll(_MS_BETWEEN_TOUCHES):
                    return
                untouched.steps.pop()()
            self._untouched.pop(pool).close()

    def _map(self, message: PoolMap, fds: list[int]) -> None:
        self._pools[message.pool], steps = self._lay(message, fds)
        self._untouched.pop(message.pool, _TOUCHED).close()
        self._untouched[message.pool] = _Untouched(steps, fds)

    def _carry_out(self, pools: Pools, batch: Batch) -> Copied:
        """Do what a batch says; a store's engine does it in its own way.

        Raises:
            OutOfBoundsError: some id lies outside its pool; then nothing was written.
        """
        return pools.carry_out(batch)

    def _complete(self, batch: Batch) -> Completion:
        started = time.perf_counter_ns()
        pools = self._pools.get(batch.pool, NO_POOLS)
        try:
            copied = self._carry_out(pools, batch)
        except OutOfBoundsError:
            logs.line("error", "batch_refused", batch=batch.number, pool=batch.pool)
            return Completion(number=batch.number, is_done=False)
        return Completion(
            number=batch.number,
            is_done=True,
            checksums=copied.checksums,
            failed=tuple(copied.failed),
            num_bytes=batch.num_copies * pools.bytes_per_block,
            nanoseconds=time.perf_counter_ns() - started,
        )


def main(link_fd: int, settings_fd: int = -1) -> None:
    """Run a mover of memory over inherited descriptors; without settings it moves CPU memory."""
    # A terminal sends its signals to all processes; the supervisor alone ends a mover.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    device = _device_of(settings_fd)
    with socket.socket(fileno=link_fd) as link:
        link.setblocking(True)
        if device == CPU:
            Engine(link).run()
        else:
            from kvleased.movers.gpu.engine import CudaEngine  # noqa: PLC0415 - only where there is a GPU

            CudaEngine.opened(link, device).run()


def lay_for_store(settings_fd: int) -> Lay:
    """Return how the mover of a store lays pools, wherever their blocks are: it reads slots, and writes blocks."""
    device = _device_of(settings_fd)
    if device == CPU:
        return lay_in_memory
    from kvleased.movers.gpu.engine import CudaLayer  # noqa: PLC0415 - only where there is a GPU

    return CudaLayer.opened(device).lay_unpinned


def _device_of(settings_fd: int) -> str:
    if settings_fd < 0:
        return CPU
    settings = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
    return str(settings.get("device", CPU))


def _is_whole(fd: int, region_bytes: int) -> bool:
    """Tell whether all pages of a region exist; where that is not to be learnt they are left alone."""
    try:
        return os.fstat(fd).st_blocks * _BYTES_PER_STAT_BLOCK >= region_bytes
    except OSError:
        return False


def _chunks(region: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [region[start : start + _TOUCH_BYTES] for start in range(0, len(region), _TOUCH_BYTES)]


def _touch_whole(chunk: NDArray[np.uint8], fd: int, region_bytes: int) -> None:
    """Enter the pages of a piece of a region, all of which exists: what was given back of it would come back."""
    if _is_whole(fd, region_bytes):
        _LIBC.madvise(
            ctypes.c_void_p(chunk.ctypes.data), ctypes.c_size_t(chunk.nbytes), _MADV_POPULATE_WRITE
        )
