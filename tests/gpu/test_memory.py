"""GPU memory lives as long as a descriptor of it, and every process that has one sees the same bytes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from kvlease.errors import InvalidError
from kvlease.memory.cuda import DeviceMemory, device_at, device_of, import_memory
from kvleased.memory.cuda import Gpu
from kvleased.movers.gpu.streams import (
    COPIES_A_CALL_MAX,
    GpuStream,
    GpuStreams,
    batched_copy,
)
from kvleased.movers.spans import Spans
from tests.gpu.contents import read, write

NUM_BYTES: Final = 3_000_000
CHILD: Final = """
import socket, sys, time
import numpy as np
from kvleased.memory.cuda import Gpu
from tests.gpu.contents import write
gpu = Gpu.opened("cuda:0")
fd = gpu.allocate(3_000_000)
write(gpu.map(fd, 3_000_000), np.arange(3_000_000, dtype=np.uint32).astype(np.uint8))
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"made"], [fd])
time.sleep(3600)
"""
PATTERN: Final = np.arange(NUM_BYTES, dtype=np.uint32).astype(np.uint8)


@pytest.fixture
def gpu(device: str) -> Gpu:
    """Return the GPU."""
    return Gpu.opened(device)


def _made(gpu: Gpu) -> DeviceMemory:
    fd = gpu.allocate(NUM_BYTES)
    try:
        return gpu.map(fd, NUM_BYTES)
    finally:
        os.close(fd)


def test_memory_outlives_the_process_that_made_it(gpu: Gpu) -> None:
    """A process that has the descriptor keeps the bytes, also after its maker is killed."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", CHILD, str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[2])
    theirs.close()
    _, (fd,), _, _ = socket.recv_fds(ours, 10, 1)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL

    first = gpu.map(fd, NUM_BYTES)
    second = gpu.map(fd, NUM_BYTES)
    os.close(fd)

    assert (read(first) == PATTERN).all()
    write(first, np.full(7, 9, np.uint8), 5)
    assert read(second, 4, 9).tolist() == [4, *[9] * 7, 12]
    ours.close()


def test_new_memory_is_zero(gpu: Gpu) -> None:
    """A new pool holds no bytes that another program or cache left there."""
    assert not read(_made(gpu)).any()


def test_memory_is_made_in_whole_units(gpu: Gpu) -> None:
    """Memory has the requested size, rounded up to the driver's units."""
    assert gpu.allocation_bytes(1) == gpu.allocation_bytes(gpu.bytes_per_unit) == gpu.bytes_per_unit
    assert gpu.allocation_bytes(gpu.bytes_per_unit + 1) == 2 * gpu.bytes_per_unit
    assert len(_made(gpu)) == NUM_BYTES


def test_descriptor_is_not_inherited(gpu: Gpu) -> None:
    """A mover's child does not inherit the descriptor, and so keeps no memory alive."""
    fd = gpu.allocate(1)

    assert not os.get_inheritable(fd)
    os.close(fd)


def test_too_much_memory_is_refused_with_the_numbers(gpu: Gpu) -> None:
    """A pool that the GPU has no room for is refused with the bytes needed and available."""
    with pytest.raises(InvalidError, match="lower device_bytes") as refused:
        gpu.allocate(1 << 46)

    assert refused.value.rule == "device_memory_full"
    assert refused.value.need == 1 << 46
    assert refused.value.limit == gpu.facts().total_bytes


def test_more_than_there_is_cannot_be_mapped(gpu: Gpu) -> None:
    """A descriptor of less memory than claimed is refused, and leaves nothing behind."""
    fd = gpu.allocate(1)

    with pytest.raises(InvalidError, match="cuMemMap failed"):
        import_memory(
            gpu.device, fd, num_bytes=1, mapped_bytes=gpu.allocation_bytes(gpu.bytes_per_unit + 1)
        )
    os.close(fd)


def test_what_is_no_memory_of_a_gpu_is_refused(gpu: Gpu) -> None:
    """Any other descriptor is refused by the driver, or does not have the bytes."""
    fd = os.memfd_create("none")

    with pytest.raises(InvalidError, match="failed"):
        gpu.map(fd, 1)
    os.close(fd)


def test_gpu_is_known_by_its_uuid(gpu: Gpu) -> None:
    """A GPU is known by its UUID, because processes number GPUs differently; an unknown UUID is refused."""
    assert device_of(gpu.device.uuid) == device_at(gpu.device.ordinal) == gpu.device
    assert gpu.facts().uuid == gpu.device.uuid

    with pytest.raises(InvalidError, match=gpu.device.uuid) as refused:
        device_of("00000000-0000-0000-0000-000000000000")
    assert refused.value.rule == "unknown_device"


def test_gpu_that_is_not_there_is_refused() -> None:
    """A number beyond the visible GPUs is refused, with an explanation of how they are counted."""
    with pytest.raises(InvalidError, match="CUDA_VISIBLE_DEVICES"):
        Gpu.opened("cuda:99")


def test_memory_is_unmapped_with_its_last_reference(gpu: Gpu) -> None:
    """A region without references takes no addresses, so any number can be mapped one after the other."""
    fd = gpu.allocate(1)

    addresses = {gpu.map(fd, 1).address for _ in range(100)}

    assert len(addresses) < 100
    os.close(fd)


@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("num_copies", [1, 100, COPIES_A_CALL_MAX + 5])
def test_scattered_copies_move_their_bytes_and_no_others(
    gpu: Gpu, num_copies: int, *, is_batched: bool
) -> None:
    """Batched or one by one, in both directions, every span arrives and nothing else changes."""
    streams, memory = GpuStreams.opened(gpu), _made(gpu)
    batched = batched_copy() if is_batched else None
    stream = GpuStream(gpu, streams.others._handle, batched)
    host = np.frombuffer(bytearray(PATTERN.tobytes()), np.uint8)
    gpu.pin(host.ctypes.data, len(host))
    write(memory, np.zeros(NUM_BYTES, np.uint8))
    width = 64
    places = np.random.default_rng(1).permutation(NUM_BYTES // width)[:num_copies] * width
    sizes = np.full(num_copies, width - 7)

    stream.copy(Spans(host.ctypes.data + places, memory.address + places, sizes), is_pinned=True)
    _wait(stream)
    host[:] = 0
    there = read(memory)
    stream.copy(Spans(memory.address + places, host.ctypes.data + places, sizes), is_pinned=True)
    _wait(stream)

    expected = np.zeros(NUM_BYTES, np.uint8)
    for place in places.tolist():
        expected[place : place + width - 7] = PATTERN[place : place + width - 7]
    assert (there == expected).all()
    assert (host == expected).all()
    gpu.unpin(host.ctypes.data)


def test_zeroed_spans_are_zero_and_no_others(gpu: Gpu) -> None:
    """Zeroing spans leaves their neighbours alone."""
    streams, memory = GpuStreams.opened(gpu), _made(gpu)
    write(memory, np.full(NUM_BYTES, 7, np.uint8))
    places = np.array([0, 1000, NUM_BYTES - 10]) + memory.address

    streams.urgent.zero(Spans(places, places, np.array([10, 1, 10])))
    _wait(streams.urgent)

    found = read(memory)
    assert np.flatnonzero(found == 0).tolist() == [
        *range(10),
        1000,
        *range(NUM_BYTES - 10, NUM_BYTES),
    ]


def test_pinned_memory_cannot_be_pinned_twice(gpu: Gpu) -> None:
    """Pinning memory twice is refused by the driver, and an unpinned range can be pinned again."""
    host = np.zeros(1 << 16, np.uint8)
    gpu.pin(host.ctypes.data, len(host))

    with pytest.raises(InvalidError, match="cuMemHostRegister failed"):
        gpu.pin(host.ctypes.data, len(host))
    gpu.unpin(host.ctypes.data)
    gpu.pin(host.ctypes.data, len(host))
    gpu.unpin(host.ctypes.data)


def _wait(stream: GpuStream) -> None:
    mark = stream.mark()
    while not mark.is_done:
        pass
