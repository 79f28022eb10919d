"""Own the figures of copies between a GPU and the host: as in `copies`, beside the driver's copies of such lists."""

import os
import sys
from pathlib import Path
from time import perf_counter_ns, process_time
from typing import Final, Self

import numpy as np
from copies import KIB, Case, Ids, attached, both_ways
from measure import Figure

from kvlease.errors import InvalidError
from kvleased.memory.cpu import map_region
from kvleased.memory.cuda import Gpu
from kvleased.movers.gpu.streams import GpuStream, GpuStreams
from kvleased.movers.spans import End, Spans, Way

DEVICE: Final = "cuda:0"
SIZES_ON_GPU: Final = (
    (16 * KIB, 16384),
    (64 * KIB, 16384),
    (256 * KIB, 4096),
    (2048 * KIB, 512),
)
"""Bytes of a block, and blocks of either pool: mostly 1 GiB, which a bus carries in the time of 256 MiB on a processor;
blocks of all layers of a model of eight billion parameters have 2 MiB."""


def evict_and_reload(directory: Path) -> list[Figure]:
    """Measure both ways for several sizes of a block, without checksums and with them; only on a GPU."""
    try:
        gpu = Gpu.opened(DEVICE)
    except InvalidError as error:
        sys.stderr.write(f"gpu: not measured: {error}\n")
        return []
    cases = [
        Case(bytes_per_block=size, num_blocks=num_blocks, integrity=integrity, note=str(gpu.device))
        for size, num_blocks in SIZES_ON_GPU
        for integrity in ("none", "xxh3")
    ]
    return [figure for case in cases for figure in _figures(case, gpu, directory)]


def _figures(case: Case, gpu: Gpu, directory: Path) -> list[Figure]:
    """Measure with a daemon and a cache of its own."""
    with (
        attached(case, directory, "--device", DEVICE) as (node, worker),
        GpuFloor(gpu, case) as floor,
    ):
        return both_ways(node, worker, floor, case, case.num_blocks)


class GpuFloor:
    """A pool on the GPU and a pinned host pool, and the driver's copies between them without a daemon."""

    def __init__(self, gpu: Gpu, case: Case) -> None:
        self._gpu = gpu
        self._case = case
        self._host_ids = np.random.default_rng(1).permutation(case.num_blocks).astype(np.int32)

    def __enter__(self) -> Self:
        """Make the pools."""
        fd = self._gpu.allocate(self._case.pool_bytes)
        self._device = self._gpu.map(fd, self._case.pool_bytes)
        os.close(fd)
        fd = os.memfd_create("bench:host", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, self._case.pool_bytes)
        self._host = map_region(fd, self._case.pool_bytes)
        os.close(fd)
        self._gpu.pin(self._host.ctypes.data, len(self._host))
        self._streams = GpuStreams.opened(self._gpu)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the memory back."""
        self._gpu.unpin(self._host.ctypes.data)
        self._device.close()

    def begin(self, device_ids: Ids) -> None:
        """Copy these blocks from now on."""
        self.device_ids = device_ids
        self.processor_seconds = 0.0

    def evict(self) -> int:
        """Copy from the device pool to the host pool."""
        way = Way(self._on_device, self._on_host, self._case.bytes_per_block)
        return self._timed(self._streams.others, way, self.device_ids, self._host_ids)

    def reload(self) -> int:
        """Copy from the host pool to the device pool."""
        way = Way(self._on_host, self._on_device, self._case.bytes_per_block)
        return self._timed(self._streams.urgent, way, self._host_ids, self.device_ids)

    @property
    def _on_device(self) -> End:
        return End(self._device.address, self._case.bytes_per_block)

    @property
    def _on_host(self) -> End:
        return End(self._host.ctypes.data, self._case.bytes_per_block)

    def _timed(self, stream: GpuStream, way: Way, sources: Ids, targets: Ids) -> int:
        spans = Spans.of([way], sources, targets)
        seconds, start = process_time(), perf_counter_ns()
        stream.copy(spans, is_pinned=True)
        mark = stream.mark()
        while not mark.is_done:
            pass
        taken = perf_counter_ns() - start
        self.processor_seconds += process_time() - seconds
        return taken
