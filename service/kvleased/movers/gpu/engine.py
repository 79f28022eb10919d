"""Own the mover's process of a GPU: batches of both directions are under way at once, and their ends are polled for.

It also makes the memory of device pools, and hands over the descriptors without keeping any.
"""

import os
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvleased.memory.cpu import map_region
from kvleased.memory.cuda import Gpu
from kvleased.movers import protocol
from kvleased.movers.engine import Engine, Step, slots_bytes_of, tell_refused, touches
from kvleased.movers.gpu.allotting import ALLOCATE, Allocate, Allocated
from kvleased.movers.gpu.cuda import POLL_SECONDS, CudaPools, Memory, Streams, Work
from kvleased.movers.gpu.pins import Pins
from kvleased.movers.gpu.streams import GpuStreams
from kvleased.movers.gpu.summing import num_threads
from kvleased.movers.pools import OutOfBoundsError, Pools
from kvleased.movers.protocol import Batch, Completion, PoolMap
from kvleased.telemetry import logs


class CudaLayer:
    """Lay pools whose device regions are memory of one GPU."""

    def __init__(self, gpu: Gpu, streams: Streams) -> None:
        """Take the GPU, and the streams for its copies."""
        self.gpu = gpu
        self._streams = streams
        self._threads = ThreadPoolExecutor(num_threads(), thread_name_prefix="checksums")

    @classmethod
    def opened(cls, setting: str) -> Self:
        """Open the GPU that the setting `device` names.

        Raises:
            InvalidError: the GPU cannot be used.
        """
        gpu = Gpu.opened(setting)
        return cls(gpu, GpuStreams.opened(gpu))

    def lay_pinned(self, message: PoolMap, fds: list[int]) -> tuple[Pools, list[Step]]:
        """Lay a cache over its regions; the host pool is pinned step by step."""
        pools, _, pins = self._laid(message, fds)
        return pools, [pins.pin_next] * pins.num_chunks

    def lay_unpinned(self, message: PoolMap, fds: list[int]) -> tuple[Pools, list[Step]]:
        """Lay a cache over its regions, for a process that copies little between the host pool and the device."""
        pools, host, _ = self._laid(message, fds)
        return pools, touches([(host, fd) for fd in fds[-1:]])

    def _laid(self, message: PoolMap, fds: list[int]) -> tuple[CudaPools, NDArray[np.uint8], Pins]:
        host_bytes = slots_bytes_of(message, fds)
        *device_fds, host_fd = fds if message.num_slots else (*fds, -1)
        host = map_region(host_fd, host_bytes)
        devices = tuple(
            self.gpu.map(fd, region_bytes) if region_bytes else _NOTHING
            for fd, region_bytes in zip(device_fds, message.device_bytes, strict=True)
        )
        pins = Pins(self.gpu, host)
        pools = CudaPools.laid(
            devices,
            host,
            num_blocks=message.num_blocks,
            bytes_per_slot=message.bytes_per_slot,
            streams=self._streams,
            pins=pins,
            threads=self._threads,
        )
        return pools, host, pins


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A batch that the GPU works on."""

    work: Work
    num_bytes: int
    started_ns: int = field(default_factory=time.perf_counter_ns)


class CudaEngine(Engine):
    """Serve one link: begin batches as they come, and answer each when it has ended."""

    def __init__(self, link: socket.socket, layer: CudaLayer) -> None:
        """Take the link; no pool is mapped yet."""
        super().__init__(link, layer.lay_pinned)
        self._gpu = layer.gpu
        self._under_way: list[_UnderWay] = []
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)

    @classmethod
    def opened(cls, link: socket.socket, setting: str) -> Self:
        """Open the GPU that the setting `device` names.

        Raises:
            InvalidError: the GPU cannot be used.
        """
        return cls(link, CudaLayer.opened(setting))

    def __repr__(self) -> str:
        """Show which GPU it has, and how many batches are under way."""
        return f"<CudaEngine {self._gpu!r}, {len(self._under_way)} batches under way>"

    def _serve(self) -> None:
        while True:
            if self._under_way and not self._poll.poll(0):
                self._go_on()
                continue
            if not self._under_way:
                self._touch_while_idle()
            if not self._act_on_next():
                return

    def _act(self, packet: bytes, fds: list[int]) -> None:
        """Begin a batch, or carry out any other packet."""
        kind = packet[:1]
        if kind == protocol.BATCH:
            self._begin(Batch.decode(packet))
        elif kind == ALLOCATE:
            self._allocate(Allocate.decode(packet))
        else:
            if kind == protocol.UNMAP:
                # Batches that were sent before may still read and write the memory.
                self._finish()
            super()._act(packet, fds)

    def _begin(self, batch: Batch) -> None:
        pools, work, reason = self._pools.get(batch.pool), None, "its pool is not mapped"
        try:
            work = pools.begin(batch) if isinstance(pools, CudaPools) else None
        except OutOfBoundsError as error:
            reason = str(error)
        if work is None:
            tell_refused(batch, reason)
            self._link.sendall(Completion(number=batch.number, is_done=False).encode())
            return
        num_bytes = batch.num_copies * self._pools[batch.pool].bytes_per_block
        self._under_way.append(_UnderWay(work, num_bytes))

    def _go_on(self) -> None:
        """Look once at each batch that is under way, and answer those that have ended."""
        has_gone_on = False
        for one in list(self._under_way):
            has_gone_on |= one.work.step()
            if one.work.is_over:
                self._under_way.remove(one)
                self._answer(one)
        if not has_gone_on:
            time.sleep(POLL_SECONDS)

    def _finish(self) -> None:
        while self._under_way:
            self._go_on()

    def _answer(self, one: _UnderWay) -> None:
        copied = one.work.copied()
        completion = Completion(
            number=one.work.batch.number,
            is_done=True,
            checksums=copied.checksums,
            failed=tuple(copied.failed),
            num_bytes=one.num_bytes,
            nanoseconds=time.perf_counter_ns() - one.started_ns,
        )
        self._link.sendall(completion.encode())

    def _allocate(self, asked: Allocate) -> None:
        try:
            fd = self._gpu.allocate(asked.num_bytes)
        except InvalidError as error:
            logs.line("error", "device_memory_refused", reason=str(error))
            refused = Allocated(number=asked.number, reason=str(error))
            self._link.sendall(refused.encode())
            return
        made = Allocated(
            number=asked.number,
            device_uuid=self._gpu.device.uuid,
            mapped_bytes=self._gpu.allocation_bytes(asked.num_bytes),
        )
        try:
            socket.send_fds(self._link, [made.encode()], [fd])
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class _Nothing:
    """The device region of a rank that keeps no layer."""

    address: int = 0

    def __len__(self) -> int:
        """Count no byte."""
        return 0

    def close(self) -> None:
        """Do nothing."""


_NOTHING: Final[Memory] = _Nothing()
