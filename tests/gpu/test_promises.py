"""What kvlease relies on a real driver for, and no stand-in can show: ends of processes, privileges, namespaces."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.memory.cuda import DeviceMemory
from kvleased.memory.cpu import map_region
from kvleased.memory.cuda import Gpu
from kvleased.movers.gpu.streams import GpuStreams
from kvleased.movers.spans import Spans
from tests.gpu.contents import read, write

ROOT: Final = Path(__file__).parents[2]
NUM_BYTES: Final = 64 << 20
NUM_KILLS: Final = 8
NOBODY: Final = 65534
COPIER: Final = """
import sys
import numpy as np
from kvleased.memory.cpu import map_region
from kvleased.memory.cuda import Gpu
from kvleased.movers.gpu.streams import GpuStreams
from kvleased.movers.spans import Spans
device_fd, host_fd, num_bytes = map(int, sys.argv[1:])
gpu = Gpu.opened("cuda:0")
memory, host = gpu.map(device_fd, num_bytes), map_region(host_fd, 2 * num_bytes)
gpu.pin(host.ctypes.data, len(host))
host[:num_bytes] = 0xAA
streams = GpuStreams.opened(gpu)
places = np.random.default_rng(1).permutation(num_bytes >> 16) << 16
sizes = np.full(len(places), 1 << 16)
here, there = host.ctypes.data + places, memory.address + places
print("copying", flush=True)
marks = []
while True:
    streams.urgent.copy(Spans(here, there, sizes), is_pinned=True)
    streams.others.copy(Spans(there, here + num_bytes, sizes), is_pinned=True)
    marks.append(streams.others.mark())
    while len(marks) > 8:
        marks = [mark for mark in marks if not mark.is_done]
"""
PINNER: Final = """
import os, sys
from kvleased.memory.cpu import map_region
from kvleased.memory.cuda import Gpu
fd, num_bytes = map(int, sys.argv[1:])
gpu = Gpu.opened("cuda:0")
host = map_region(fd, num_bytes)
gpu.pin(host.ctypes.data, len(host))
print("pinned as", os.getuid())
"""
READER: Final = """
import os, sys
from kvleased.memory.cuda import Gpu
from tests.gpu.contents import read
gpu = Gpu.opened("cuda:0")
print(os.getpid(), *read(gpu.map(int(sys.argv[1]), 4096), 0, 3).tolist())
"""


@pytest.fixture(autouse=True)
def is_real(device: str, request: pytest.FixtureRequest) -> None:
    """Skip the tests on the stand-in."""
    assert device
    if "stand-in" in request.node.name:
        pytest.skip("this is asked of a real driver")


@pytest.fixture
def gpu(device: str) -> Gpu:
    """Return the GPU."""
    return Gpu.opened(device)


@pytest.fixture
def host_fd() -> Iterator[int]:
    """Give memory of the host behind a descriptor."""
    fd = os.memfd_create("host", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, 2 * NUM_BYTES)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("kill", range(NUM_KILLS))
def test_nothing_is_written_after_a_process_has_ended(gpu: Gpu, host_fd: int, kill: int) -> None:
    """When the end of a killed process is known, none of its copies writes any more, on the GPU or on the host."""
    fd = gpu.allocate(NUM_BYTES)
    memory, host = gpu.map(fd, NUM_BYTES), map_region(host_fd, 2 * NUM_BYTES)
    streams = GpuStreams.opened(gpu)
    copier = subprocess.Popen(
        [sys.executable, "-c", COPIER, str(fd), str(host_fd), str(NUM_BYTES)],
        pass_fds=[fd, host_fd],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert copier.stdout is not None
    assert copier.stdout.readline() == "copying\n"
    time.sleep(0.05 + 0.003 * kill)
    pidfd = os.pidfd_open(copier.pid)

    copier.send_signal(signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    was_copied = host[NUM_BYTES :: 1 << 16].any()
    _zero(streams, memory)
    host[NUM_BYTES:] = 0
    time.sleep(0.3)

    assert was_copied
    assert not read(memory).any()
    assert not host[NUM_BYTES:].any()
    copier.stdout.close()
    copier.returncode = -signal.SIGKILL
    os.close(pidfd)
    os.close(fd)


def test_memory_is_pinned_without_privileges(host_fd: int) -> None:
    """Nobody's process, which may lock no memory, pins a host pool."""
    if os.getuid():
        pytest.skip("only root can become nobody")

    def fall() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    found = subprocess.run(
        [sys.executable, "-c", PINNER, str(host_fd), str(2 * NUM_BYTES)],
        pass_fds=[host_fd],
        cwd=ROOT,
        preexec_fn=fall,
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.stdout == f"pinned as {NOBODY}\n", found.stderr


def test_descriptor_crosses_namespaces(gpu: Gpu) -> None:
    """A process in namespaces of its own, as in another container, maps the memory behind a descriptor."""
    fd = gpu.allocate(4096)
    write(gpu.map(fd, 4096), np.array([7, 8, 9], np.uint8))

    found = subprocess.run(
        ["unshare", "-pfminu", "--mount-proc", sys.executable, "-c", READER, str(fd)],
        pass_fds=[fd],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.stdout.split() == ["1", "7", "8", "9"], found.stderr
    os.close(fd)


def test_descriptor_crosses_by_message_after_its_maker_has_ended(gpu: Gpu) -> None:
    """A descriptor that nobody has but a socket's queue keeps the memory."""
    ours, theirs = socket.socketpair()
    fd = gpu.allocate(4096)
    write(gpu.map(fd, 4096), np.array([5], np.uint8))
    socket.send_fds(theirs, [b"x"], [fd])
    os.close(fd)

    _, (received,), _, _ = socket.recv_fds(ours, 1, 1)

    assert read(gpu.map(received, 4096), 0, 1).tolist() == [5]
    os.close(received)
    ours.close()
    theirs.close()


def test_copy_over_two_pinned_ranges_is_refused(gpu: Gpu, host_fd: int) -> None:
    """The driver takes two ranges that were pinned one after the other for two, so copies are cut between them."""
    fd = gpu.allocate(NUM_BYTES)
    memory, host = gpu.map(fd, NUM_BYTES), map_region(host_fd, 2 * NUM_BYTES)
    half = host.ctypes.data + NUM_BYTES
    gpu.pin(host.ctypes.data, NUM_BYTES)
    gpu.pin(half, NUM_BYTES)
    stream = GpuStreams.opened(gpu).urgent
    spans = Spans(_one(half - 4096), _one(memory.address), _one(8192))

    try:
        with pytest.raises(InvalidError, match="failed"):
            stream.copy(spans, is_pinned=True)
    finally:
        gpu.unpin(half)
        gpu.unpin(host.ctypes.data)
        os.close(fd)


def _zero(streams: GpuStreams, memory: DeviceMemory) -> None:
    spans = Spans(_one(memory.address), _one(memory.address), _one(len(memory)))
    streams.urgent.zero(spans)
    mark = streams.urgent.mark()
    while not mark.is_done:
        pass


def _one(value: int) -> NDArray[np.int64]:
    return np.array([value])
