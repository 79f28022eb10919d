"""A daemon with device pools on a GPU keeps the promises it keeps on a CPU, whichever of its processes ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from kvlease import CacheOptions, Client, FullAttention, PlanInputs, Worker
from kvlease.errors import PoolFullError
from tests.acceptance.serving import ROOT, Serving, pool_of, served

TOKENS_PER_BLOCK: Final = 16
NUM_BLOCKS: Final = 64
NUM_TOKENS: Final = NUM_BLOCKS // 2 * TOKENS_PER_BLOCK
INPUTS: Final = PlanInputs(
    layers=(FullAttention(name="0", num_kv_heads=2, head_size=64, dtype="float32"),),
    tokens_per_block=TOKENS_PER_BLOCK,
    device_blocks=NUM_BLOCKS,
    host_bytes=NUM_BLOCKS * 16_384,
)
READER: Final = """
import sys
from kvlease import Client
from tests.gpu.contents import read
with Client(sys.argv[1], on_doubt="raise") as client, client.attach("main") as worker:
    print(*[int(read(worker.gpu, int(block) * 16_384, 1)[0]) for block in sys.argv[2:]])
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Run a daemon on the GPU that its environment names."""
    directory = tmp_path_factory.mktemp("daemon") / "run"
    directory.mkdir(mode=0o700)
    with served(directory) as serving:
        yield serving


@pytest.fixture
def worker(serving: Serving) -> Iterator[Worker]:
    """Attach a worker to a new cache."""
    with Client(serving.address("unix"), on_doubt="raise") as client:
        client.register("main", INPUTS, CacheOptions(write_policy="write-through"))
        serving.until(lambda: client.get_cache("main").status == "ready")
        with client.attach("main") as worker:
            yield worker
        serving.until(lambda: client.stats("main").caches[0].num_workers == 0)
        client.delete_cache("main")


def filled(worker: Worker) -> bytes:
    """Leave half a pool of cached blocks, block i full of the byte i + 1; return their keys."""
    keys = worker.keys.chain(range(NUM_TOKENS), TOKENS_PER_BLOCK)
    with worker.reserve("fill", num_tokens=NUM_TOKENS) as lease:
        pool = pool_of(worker)
        pool[lease.block_ids] = np.arange(1, NUM_BLOCKS // 2 + 1, dtype=np.uint8)[:, None]
        lease.commit(NUM_TOKENS, keys)
    return keys


def hits(worker: Worker, keys: bytes) -> tuple[int, int]:
    """Reserve the prefix, compare every byte of its hits, and return the tokens hit on device and host."""
    with worker.reserve(
        "again", num_tokens=NUM_TOKENS + TOKENS_PER_BLOCK, keys=keys, wait_ms=20_000
    ) as lease:
        found = pool_of(worker)[lease.block_ids[: lease.hit_tokens // TOKENS_PER_BLOCK]]
        assert (found == np.arange(1, len(found) + 1, dtype=np.uint8)[:, None]).all()
        return lease.device_hit_tokens, lease.host_hit_tokens


def child_of(serving: Serving, role: str) -> int:
    """Return the process id of a role, or 0 if there is none just now."""
    children = Path(f"/proc/{serving.process.pid}/task/{serving.process.pid}/children").read_text()
    for pid in children.split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        # A process that has just ended has no command line any more.
        if role.encode() in words[4:5]:
            return int(pid)
    return 0


def test_worker_maps_memory_of_the_gpu(worker: Worker) -> None:
    """The device pool is not host memory, but the block table is."""
    assert worker.device is None
    assert worker.gpu is not None
    assert len(worker.gpu) == worker.plan.ranks[0].device_bytes
    assert worker.tables is not None


def test_another_process_sees_the_same_bytes(serving: Serving, worker: Worker) -> None:
    """Another worker of the cache reads what the first writes to a block."""
    with worker.reserve("mine", num_tokens=2 * TOKENS_PER_BLOCK) as lease:
        blocks = lease.block_ids.tolist()
        pool_of(worker)[blocks] = np.array([[17], [99]], np.uint8)
        arguments = [sys.executable, "-c", READER, serving.address("unix"), *map(str, blocks)]

        seen = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)

    assert seen.stdout.split() == ["17", "99"]


def test_blocks_come_back_from_the_host(worker: Worker) -> None:
    """Blocks that left the device are hits on the host, with their bytes."""
    keys = filled(worker)
    with worker.reserve(
        "all", num_tokens=(NUM_BLOCKS - 1) * TOKENS_PER_BLOCK, wait_ms=20_000
    ) as lease:
        pool_of(worker)[lease.block_ids] = 0xEE

    device_tokens, host_tokens = hits(worker, keys)

    assert device_tokens + host_tokens == NUM_TOKENS
    assert host_tokens


def test_bytes_outlive_the_control_process(serving: Serving, worker: Worker) -> None:
    """The next control process has the same memory, and the next mover maps it again."""
    keys = filled(worker)
    generation = worker.memory_generation

    serving.restart_control(worker)

    assert sum(hits(worker, keys)) == NUM_TOKENS
    assert worker.memory_generation == generation


def test_bytes_outlive_the_mover_that_made_them(serving: Serving, worker: Worker) -> None:
    """When the mover that made the memory is killed, the next one copies the same blocks."""
    keys = filled(worker)
    mover = child_of(serving, "mover")

    os.kill(mover, signal.SIGKILL)
    serving.until(lambda: child_of(serving, "mover") not in {0, mover})
    with worker.reserve("all", num_tokens=(NUM_BLOCKS - 1) * TOKENS_PER_BLOCK, wait_ms=20_000):
        pass

    assert sum(hits(worker, keys)) == NUM_TOKENS


def test_new_cache_is_other_memory(serving: Serving, worker: Worker) -> None:
    """A cache that is registered anew has another memory identity, though all GPU memory has one inode."""
    with Client(serving.address("unix"), on_doubt="raise") as client:
        client.register("other", INPUTS)
        serving.until(lambda: client.get_cache("other").status == "ready")
        with client.attach("other") as first:
            identity = first.memory_identity
        serving.until(lambda: client.stats("other").caches[0].num_workers == 0)
        client.delete_cache("other")
        client.register("other", INPUTS)
        serving.until(lambda: client.get_cache("other").status == "ready")
        with client.attach("other") as second:
            assert identity not in {second.memory_identity, worker.memory_identity}
        serving.until(lambda: client.stats("other").caches[0].num_workers == 0)
        client.delete_cache("other")


def test_pool_that_the_gpu_has_no_room_for_is_refused(serving: Serving) -> None:
    """A pool too large for the GPU is refused with the bytes needed and available, and leaves nothing behind."""
    inputs = PlanInputs(layers=INPUTS.layers, tokens_per_block=16, device_bytes=1 << 42)
    with Client(serving.address("unix"), on_doubt="raise") as client:
        with pytest.raises(PoolFullError, match="lower device_bytes"):
            client.register("large", inputs)

        assert [cache.cache for cache in client.list_caches()] == []


def test_smaller_pool_keeps_its_memory_and_its_promises(serving: Serving, worker: Worker) -> None:
    """A smaller pool on a GPU grants fewer blocks, and gives no mapped memory back."""
    with Client(serving.address("unix"), on_doubt="raise") as client:
        smaller = client.resize("main", "device", NUM_BLOCKS // 2)
        larger = client.resize("main", "device", NUM_BLOCKS - 1)

    keys = filled(worker)
    assert (smaller.bytes_given_back, larger.num_blocks) == (0, NUM_BLOCKS - 1)
    assert sum(hits(worker, keys)) == NUM_TOKENS


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("role", ["supervisor", "control"])
def test_no_driver_where_calls_are_answered(serving: Serving, role: str) -> None:
    """Neither the supervisor nor the control process has the driver, or its bindings, mapped."""
    pid = serving.process.pid if role == "supervisor" else serving.control()

    maps = Path(f"/proc/{pid}/maps").read_text()

    assert "libcuda" not in maps
    assert "cuda/bindings" not in maps
    assert "libcuda" in Path(f"/proc/{child_of(serving, 'mover')}/maps").read_text()


def test_control_process_says_that_it_has_no_cuda(serving: Serving) -> None:
    """`/livez?verbose` names no module that must not be in a control process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(serving.runtime_dir / "http.sock"))
        connection.sendall(
            b"GET /livez?verbose HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert b"modules that no control process should have loaded: none" in answer
