"""Own the mover's process: it takes one packet after another and carries it out; it decides nothing."""

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

from kvlease.memory.page_tables import enter_pages
from kvleased.memory.cpu import map_region
from kvleased.movers import protocol
from kvleased.movers.compiled import loops
from kvleased.movers.cpu import CpuPools
from kvleased.movers.pools import Copied, OutOfBoundsError, Pools
from kvleased.movers.protocol import Batch, Completion, PoolMap
from kvleased.system.descriptors import receive_packet
from kvleased.telemetry import logs

CPU: Final = "cpu"
"""The device setting that means pools in CPU memory."""

_MAPPING_ADVICE: Final = (
    "no copy of its cache succeeds: let the daemon's processes have more addresses (ulimit -v), then delete the cache "
    "and register it again"
)
_BYTES_PER_STAT_BLOCK: Final = 512
_TOUCH_BYTES: Final = 1 << 20
_MS_BETWEEN_TOUCHES: Final = 2
"""Together with the bytes above, about a tenth of a core, so that nothing else at startup has to wait for it."""
NO_POOLS: Final[Pools] = CpuPools.laid((), np.zeros(0, np.uint8), num_blocks=0, bytes_per_slot=1)
"""Stand-in for pools that are not mapped: every id of a batch is out of bounds."""

Step = Callable[[], object]
"""An act that readies some memory of pools for their first copies; it may be done at any time, or never."""
Lay = Callable[[PoolMap, list[int]], tuple[Pools, list[Step]]]
"""Map the memory behind descriptors, which stay the caller's, as pools without pieces; the last step is done first.

The descriptors must stay open until all steps are done.
"""


def lay_in_memory(message: PoolMap, fds: list[int]) -> tuple[Pools, list[Step]]:
    """Lay pools over CPU memory, and return the steps that enter its pages into this process's page tables."""
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
    """Return the bytes of a host pool, whose descriptor is the last; 0 if its file was cut off.

    Copies that need its slots are then refused, and all others are carried out. To read beyond a file's end would end
    the process, and each process after it.
    """
    num_bytes = message.num_slots * message.bytes_per_slot
    if not num_bytes:
        return 0
    try:
        is_whole = os.fstat(fds[-1]).st_size >= num_bytes
    except OSError:
        is_whole = True  # a failed fstat says nothing of the file
    return num_bytes if is_whole else 0


def touches(regions: list[tuple[NDArray[np.uint8], int]]) -> list[Step]:
    """Return steps that enter the pages of regions into this process's page tables, the last region's first.

    Beside each region is its descriptor, which must stay open until the steps are done.
    """
    return [
        partial(_touch_whole, chunk, fd, len(region))
        for region, fd in regions
        for chunk in _chunks(region)
    ]


@dataclass(frozen=True, slots=True)
class _Untouched:
    """The memory of a pool that is not ready yet."""

    steps: list[Step]
    fds: list[int]
    """The pool's own descriptors of its regions: at each step they tell what has become of the memory."""

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


_TOUCHED: Final = _Untouched([], [])


class Engine:
    """Serve one link until its other end is closed."""

    def __init__(self, link: socket.socket, lay: Lay = lay_in_memory) -> None:
        """Take the link; no pool is mapped yet."""
        self._link = link
        self._lay = lay
        self._pools: dict[int, Pools] = {}
        self._untouched: dict[int, _Untouched] = {}

    def run(self) -> None:
        """Say that the mover is here, and carry out packets until the other end is gone, for whatever reason."""
        try:
            self._link.sendall(protocol.HERE)
            self._serve()
        except (BrokenPipeError, ConnectionResetError) as error:
            # The daemon's process was killed; the supervisor ends this process, too, and starts both anew.
            logs.line("info", "mover_ends", reason="control_gone", error=type(error).__name__)
        finally:
            while self._untouched:
                self._untouched.popitem()[1].close()

    def _serve(self) -> None:
        while True:
            self._touch_while_idle()
            if not self._act_on_next():
                return

    def _act_on_next(self) -> bool:
        """Wait for a packet and carry it out; return false if the other end is closed."""
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
            if pool in self._pools:
                self._pools[pool] = self._pools[pool].with_pieces(pieces)
        elif kind == protocol.UNMAP:
            pool = protocol.decode_unmap(packet)
            self._untouched.pop(pool, _TOUCHED).close()
            self._pools.pop(pool, NO_POOLS).close()

    def _touch_while_idle(self) -> None:
        """Ready memory for first copies until a packet comes, so that those need not wait."""
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
        """Map a pool, or say why that fails: then its copies are refused, and those of other pools go on."""
        try:
            self._pools[message.pool], steps = self._lay(message, fds)
        except OSError as error:
            _Untouched([], fds).close()
            reason = os.strerror(error.errno or 0)
            logs.line(
                "error", "pool_not_mapped", pool=message.pool, reason=reason, advice=_MAPPING_ADVICE
            )
            return
        self._untouched.pop(message.pool, _TOUCHED).close()
        self._untouched[message.pool] = _Untouched(steps, fds)

    def _carry_out(self, pools: Pools, batch: Batch) -> Copied:
        """Carry out a batch; a store's engine does it in its own way.

        Raises:
            OutOfBoundsError: an id lies outside its pool; nothing was written.
        """
        return pools.carry_out(batch)

    def _complete(self, batch: Batch) -> Completion:
        started = time.perf_counter_ns()
        pools = self._pools.get(batch.pool, NO_POOLS)
        try:
            copied = self._carry_out(pools, batch)
        except OutOfBoundsError as error:
            tell_refused(batch, str(error))
            return Completion(number=batch.number, is_done=False)
        return Completion(
            number=batch.number,
            is_done=True,
            checksums=copied.checksums,
            failed=tuple(copied.failed),
            num_bytes=batch.num_copies * pools.bytes_per_block,
            nanoseconds=time.perf_counter_ns() - started,
        )


def tell_refused(batch: Batch, reason: str) -> None:
    """Log why a batch was refused; only a host pool's file that was truncated is not the daemon's own fault."""
    logs.line(
        "error",
        "batch_refused",
        batch=batch.number,
        pool=batch.pool,
        direction=batch.direction.value,
        reason=reason,
        advice="if the host pool's file in host_dir was truncated, host_file_cut_off says what to do; otherwise report "
        "this as a fault of the daemon",
    )


def main(link_fd: int, settings_fd: int = -1) -> None:
    """Run a mover of memory over inherited descriptors; without settings it moves CPU memory."""
    # A terminal sends its signals to all processes, but only the supervisor may end a mover.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    device = _device_of(settings_fd)
    # Made before there is a copy that would wait for them; if they are slow ones, the log says so from the start.
    loops()
    with socket.socket(fileno=link_fd) as link:
        link.setblocking(True)
        if device == CPU:
            Engine(link).run()
        else:
            from kvleased.movers.gpu.engine import CudaEngine  # noqa: PLC0415 - only where there is a GPU

            CudaEngine.opened(link, device).run()


def lay_for_store(settings_fd: int) -> Lay:
    """Return how a store's mover lays pools, on whichever device: it reads slots, and writes blocks."""
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
    """Tell whether all pages of a region exist; false if that cannot be learned, so that they are left alone."""
    try:
        return os.fstat(fd).st_blocks * _BYTES_PER_STAT_BLOCK >= region_bytes
    except OSError:
        return False


def _chunks(region: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [region[start : start + _TOUCH_BYTES] for start in range(0, len(region), _TOUCH_BYTES)]


def _touch_whole(chunk: NDArray[np.uint8], fd: int, region_bytes: int) -> None:
    """Enter the pages of a chunk if the whole region exists; otherwise pages that were given back would come back."""
    if _is_whole(fd, region_bytes):
        enter_pages(chunk)
