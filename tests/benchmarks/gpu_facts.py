"""Own what was measured to decide how a GPU's mover works: pinning, lists of copies, checksums, an engine beside it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Final, NamedTuple

import numpy as np
from measure import Figure
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.memory.cuda import in_context, load_driver
from kvleased.memory.cpu import map_region
from kvleased.memory.cuda import Gpu
from kvleased.movers.gpu import streams
from kvleased.movers.gpu.summing import Summing
from kvleased.movers.spans import Spans

KIB: Final = 1 << 10
POOL_BYTES: Final = 1 << 30
PINNED_BYTES: Final = 16 << 30
COPIES_MAX: Final = 65_536
COPY_BYTES: Final = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
CALLS: Final = (128, 512, 4096)
"""Copies in one call of the driver."""
SUMMED_BYTES: Final = (16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 2048 * KIB)
THREADS: Final = (1, 2, 4, 8)
ROUNDS: Final = 4

_PIN: Final = """
import sys, time
from kvleased.memory.cpu import map_region
from kvleased.memory.cuda import Gpu
from kvleased.movers.gpu.pins import CHUNK_BYTES
fd, num_bytes = map(int, sys.argv[1:])
gpu, host = Gpu.opened("cuda:0"), map_region(fd, num_bytes)
begun = time.perf_counter()
for start in range(0, num_bytes, CHUNK_BYTES):
    gpu.pin(host.ctypes.data + start, CHUNK_BYTES)
print(time.perf_counter() - begun, flush=True)
time.sleep(3600)
"""
_ENGINE: Final = """
import time, torch
factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    begun, products = time.perf_counter(), 0
    while time.perf_counter() - begun < 1:
        for _ in range(10):
            factor @ factor
        torch.cuda.synchronize()
        products += 10
    print(2e-12 * products * 8192**3 / (time.perf_counter() - begun), flush=True)
"""


class Pools(NamedTuple):
    """A pool on the GPU and a pinned one on the host."""

    gpu: Gpu
    device_address: int
    host: NDArray[np.uint8]


def facts(_directory: Path) -> list[Figure]:
    """Measure on the first GPU; without one, say so."""
    try:
        gpu = Gpu.opened("cuda:0")
    except InvalidError as error:
        sys.stderr.write(f"gpu-facts: not measured: {error}\n")
        return []
    fd = gpu.allocate(POOL_BYTES)
    memory = gpu.map(fd, POOL_BYTES)
    os.close(fd)
    fd = os.memfd_create("bench:host", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, POOL_BYTES)
    host = map_region(fd, POOL_BYTES)
    os.close(fd)
    gpu.pin(host.ctypes.data, len(host))
    pools = Pools(gpu, memory.address, host)
    try:
        return [*_copies(pools), *_sums(host), *_beside_an_engine(pools), *_pinning(gpu)]
    finally:
        gpu.unpin(host.ctypes.data)
        memory.close()


def _copies(pools: Pools) -> list[Figure]:
    """Measure scattered copies of several sizes, in calls of several lengths, beside one copy of everything."""
    queues, own = streams.GpuStreams.opened(pools.gpu), streams.COPIES_A_CALL_MAX
    figures = []
    try:
        whole = {
            way: _bytes_per_second(queue, _spans(pools, POOL_BYTES, way))
            for way, queue in (("up", queues.urgent), ("down", queues.others))
        }
        for num_bytes in COPY_BYTES:
            for copies_a_call in CALLS:
                streams.COPIES_A_CALL_MAX = copies_a_call  # type: ignore[misc]
                for way, queue in (("up", queues.urgent), ("down", queues.others)):
                    found = _bytes_per_second(queue, _spans(pools, num_bytes, way))
                    name = f"{way}: scattered {num_bytes // KIB} KiB, {copies_a_call} a call"
                    figures.append(_speed(name, found, whole[way], "one copy"))
    finally:
        streams.COPIES_A_CALL_MAX = own  # type: ignore[misc]
    return figures


def _spans(pools: Pools, num_bytes: int, way: str) -> Spans:
    random, num_places = np.random.default_rng(1), POOL_BYTES // num_bytes
    here, there = (
        address + random.permutation(num_places)[:COPIES_MAX] * num_bytes
        for address in (pools.host.ctypes.data, pools.device_address)
    )
    sizes = np.full(len(here), num_bytes)
    return Spans(here, there, sizes) if way == "up" else Spans(there, here, sizes)


def _bytes_per_second(queue: streams.GpuStream, spans: Spans) -> float:
    def once() -> None:
        queue.copy(spans, is_pinned=True)
        mark = queue.mark()
        while not mark.is_done:
            pass

    return spans.total_bytes / _quickest(once)


def _sums(host: NDArray[np.uint8]) -> list[Figure]:
    """Measure checksums of slots of several sizes by several threads."""
    figures = []
    for num_bytes in SUMMED_BYTES:
        images = host[: POOL_BYTES // 2].reshape(-1, num_bytes)
        for num_threads in THREADS:
            with ThreadPoolExecutor(num_threads) as threads:
                seconds = _quickest(lambda images=images, threads=threads: _summed(images, threads))
            name = f"checksums of {num_bytes // KIB} KiB, threads: {num_threads}"
            figures.append(_speed(name, images.nbytes / seconds))
    return figures


def _summed(images: NDArray[np.uint8], threads: ThreadPoolExecutor) -> None:
    summing = Summing(images, threads)
    summing.add(np.arange(len(images), dtype=np.int32))
    while not summing.is_over:
        if not summing.step():
            sleep(20e-6)


def _beside_an_engine(pools: Pools) -> list[Figure]:
    """Measure products of matrices in another process, alone and beside copies towards the GPU."""
    with subprocess.Popen(
        [sys.executable, "-c", _ENGINE], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        if not engine.stdout.readline():
            sys.stderr.write("gpu-facts: no engine was measured, because torch has no CUDA here\n")
            return []
        alone = float(engine.stdout.readline())
        queue = streams.GpuStreams.opened(pools.gpu).urgent
        spans, end = _spans(pools, 64 * KIB, "up"), perf_counter() + 3.5
        while perf_counter() < end:
            queue.copy(spans, is_pinned=True)
            mark = queue.mark()
            while not mark.is_done:
                pass
        beside = [float(engine.stdout.readline()) for _ in range(3)][1]
        engine.kill()
    return [
        Figure(
            name="matrix products of another process, beside copies",
            ours=beside,
            floor=alone,
            unit="TFLOP/s",
            ratio=beside / alone,
            note="floor: alone",
        )
    ]


def _pinning(gpu: Gpu) -> list[Figure]:
    """Measure how long pinning a large host pool takes, whom it holds up, and how long its owner then takes to end."""
    driver, fd = load_driver(), os.memfd_create("bench:large")
    os.posix_fallocate(fd, 0, PINNED_BYTES)
    command = [sys.executable, "-c", _PIN, str(fd), str(PINNED_BYTES)]
    waits, said = [], None
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        with in_context(gpu.device):
            while not said:
                begun = perf_counter()
                driver.cuMemGetInfo()
                waits.append(perf_counter() - begun)
                sleep(0.001)
                said = child.stdout.read()
        pidfd = os.pidfd_open(child.pid)
        begun = perf_counter()
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        ended = perf_counter() - begun
    os.close(pidfd)
    os.close(fd)
    size = f"{PINNED_BYTES >> 30} GiB"
    return [
        Figure(name=f"pinning {size}", ours=float(said), unit="s"),
        Figure(
            name="cuMemGetInfo of another process meanwhile, the slowest",
            ours=1e3 * max(waits),
            unit="ms",
        ),
        Figure(name=f"end of a killed process with {size} pinned", ours=ended, unit="s"),
    ]


def _quickest(once: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        begun = perf_counter()
        once()
        seconds.append(perf_counter() - begun)
    return min(seconds)


def _speed(name: str, found: float, floor: float | None = None, note: str = "") -> Figure:
    return Figure(
        name=name,
        ours=found / 1e9,
        floor=None if floor is None else floor / 1e9,
        unit="GB/s",
        ratio=None if floor is None else found / floor,
        note=f"floor: {note}" if note else "",
    )
