"""Lower tiers as real processes and files: what outlives the daemon, and movers that end or stand still alone."""

import ctypes
import importlib.util
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from kvlease import (
    CacheOptions,
    Client,
    CopyFailedError,
    DeadlineError,
    FullAttention,
    PlanInputs,
    UnavailableError,
    Worker,
    WrongStateError,
)
from tests.acceptance.serving import SECONDS_TO_START, Serving, pool_of, served

pytestmark = pytest.mark.acceptance

MEMORY: Final = Path("/dev/shm")
PTRACE_SEIZE: Final = 0x4206
PTRACE_DETACH: Final = 17
PTRACE_O_TRACEEXIT: Final = 0x40
WALL: Final = 0x40000000
TOKENS_PER_BLOCK: Final = 16
NUM_BLOCKS: Final = 64
NUM_TOKENS: Final = NUM_BLOCKS // 2 * TOKENS_PER_BLOCK
LAYER: Final = FullAttention(name="0", num_kv_heads=2, head_size=64, dtype="float32")
INPUTS: Final = PlanInputs(
    layers=(LAYER,),
    tokens_per_block=TOKENS_PER_BLOCK,
    device_blocks=NUM_BLOCKS,
    host_bytes=NUM_BLOCKS * 16_384,
)
WITH_DISK: Final = PlanInputs(
    layers=(LAYER,),
    tokens_per_block=TOKENS_PER_BLOCK,
    device_blocks=NUM_BLOCKS,
    host_bytes=NUM_BLOCKS * 16_384,
    disk_bytes=256 * 20_480,
)
WRITE_THROUGH: Final = CacheOptions(write_policy="write-through")

needs_memory = pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="there is no /dev/shm")
needs_disk_mover = pytest.mark.skipif(
    importlib.util.find_spec("kvleased.movers.disk.engine") is None, reason="there is no disk mover"
)


@pytest.fixture
def host_dir() -> Iterator[Path]:
    """Make a directory in memory, for this user alone."""
    directory = Path(tempfile.mkdtemp(prefix="kvlease-test-", dir=MEMORY))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """Make a directory on a disk, for this user alone."""
    directory = tmp_path / "disk"
    directory.mkdir(mode=0o700)
    return directory


def _ready(serving: Serving, client: Client, inputs: PlanInputs, options: CacheOptions) -> None:
    client.register("main", inputs, options)
    serving.until(lambda: client.get_cache("main").status == "ready")


def _fill(worker: Worker) -> bytes:
    """Leave half a pool of cached blocks, block i full of the byte i + 1; return their keys."""
    keys = worker.keys.chain(range(NUM_TOKENS), TOKENS_PER_BLOCK)
    with worker.reserve("fill", num_tokens=NUM_TOKENS) as lease:
        for place, block in enumerate(lease.block_ids):
            pool_of(worker)[block] = place + 1
        lease.commit(NUM_TOKENS, keys)
    return keys


def _found(worker: Worker, keys: bytes) -> tuple[int, int]:
    """Reserve the prefix, compare every byte of its hits, and return the tokens hit on host and disk."""
    with worker.reserve(
        "again", num_tokens=NUM_TOKENS + TOKENS_PER_BLOCK, keys=keys, wait_ms=20_000
    ) as lease:
        pool = pool_of(worker)
        for place, block in enumerate(lease.block_ids[: lease.hit_tokens // TOKENS_PER_BLOCK]):
            assert (pool[block] == place + 1).all()
        return lease.host_hit_tokens, lease.disk_hit_tokens


def _kill_all(serving: Serving) -> None:
    """Kill the supervisor, and wait until the kernel has ended all of its processes."""
    children = list(_children(serving.process.pid))
    serving.process.kill()
    serving.process.wait()
    for pid in children:
        _await_end(pid)
    serving.log.close()


def _await_end(pid: int) -> None:
    try:
        with closing(_Process(pid)) as process:
            process.wait()
    except ProcessLookupError:
        pass


class _Process:
    """A process that is not our child."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def wait(self) -> None:
        """Wait until it has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        assert poll.poll(60_000), "it does not end"

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self._fd)


def _children(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)


def _process(serving: Serving, role: str) -> int:
    """Return the process id of a role, or 0: a signal to that would go to the tests themselves."""
    for pid in _children(serving.process.pid):
        # A child may end between the two reads.
        with suppress(FileNotFoundError, ProcessLookupError):
            if role.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    return 0


def _tier(client: Client, name: str) -> str:
    return next(tier.status for tier in client.get_cache("main").tiers if tier.tier == name)


@needs_memory
def test_host_pool_outlives_all_processes(tmp_path: Path, host_dir: Path) -> None:
    """Blocks evicted before a kill of all processes are found again by an equal registration, byte for byte."""
    options = ("--host-dir", str(host_dir))
    first = Serving(tmp_path / "run", *options)
    try:
        first.wait_until_ready()
        with Client(first.address("unix"), on_doubt="raise") as client:
            _ready(first, client, INPUTS, CacheOptions())
            with client.attach("main") as worker:
                keys = _fill(worker)
                assert worker.evict(keys=keys).num_evicted == NUM_BLOCKS // 2
                tenant_key = worker.keys.chain(range(TOKENS_PER_BLOCK), TOKENS_PER_BLOCK)
    finally:
        _kill_all(first)

    with (
        served(tmp_path / "run", *options) as second,
        Client(second.address("unix"), on_doubt="raise") as client,
    ):
        _ready(second, client, INPUTS, CacheOptions())
        (host,) = client.get_cache("main").tiers
        assert (host.status, host.num_found) == ("ready", NUM_BLOCKS // 2)
        with client.attach("main") as worker:
            assert worker.keys.chain(range(TOKENS_PER_BLOCK), TOKENS_PER_BLOCK) == tenant_key
            assert _found(worker, keys) == (NUM_TOKENS, 0)
        second.until(lambda: client.stats("main").caches[0].num_workers == 0)
        client.delete_cache("main")
        assert [entry.name for entry in host_dir.iterdir()] == ["secret"]


@needs_memory
def test_lease_with_damaged_bytes_has_ended_at_both_ends(tmp_path: Path, host_dir: Path) -> None:
    """A reload that finds the lease's bytes damaged ends the lease, and the worker knows it from the refusal."""
    with (
        served(tmp_path / "run", "--host-dir", str(host_dir)) as serving,
        Client(serving.address("unix")) as client,
    ):
        _ready(serving, client, INPUTS, CacheOptions())
        with client.attach("main") as worker:
            lease = worker.reserve("damaged", num_tokens=NUM_TOKENS)
            assert lease.evict(wait_ms=20_000).num_evicted == NUM_BLOCKS // 2
            (slots,) = host_dir.glob("*.slots")
            slots.write_bytes(b"\xff" * slots.stat().st_size)

            lease.reload(wait_ms=20_000)

            assert isinstance(lease.refusal, CopyFailedError)
            assert not lease.is_live
            assert client.inspect("main", "leases").num_total == 0


@pytest.mark.thorough
@needs_memory
def test_host_pool_above_half_of_the_limit_is_registered_again(
    tmp_path: Path, host_dir: Path
) -> None:
    """A host pool that a cache left behind is used again, and does not count against the memory limit twice."""
    inputs = PlanInputs(
        layers=(LAYER,),
        tokens_per_block=TOKENS_PER_BLOCK,
        device_bytes=5 << 20,
        host_bytes=15 << 20,
    )
    options = ("--host-dir", str(host_dir), "--memory-bytes-max", str(25 << 20))
    for _ in range(3):
        serving = Serving(tmp_path / "run", *options)
        try:
            serving.wait_until_ready()
            with Client(serving.address("unix"), on_doubt="raise") as client:
                _ready(serving, client, inputs, CacheOptions())
        finally:
            _kill_all(serving)


@needs_memory
def test_host_pools_stay_in_the_directory_of_the_start(tmp_path: Path, host_dir: Path) -> None:
    """No host pool is made in a directory that took the place of the first, also after a restart; put back, it is."""
    elsewhere = host_dir.with_name(host_dir.name + "-elsewhere")
    with (
        served(tmp_path / "run", "--host-dir", str(host_dir)) as serving,
        Client(serving.address("unix"), on_doubt="raise") as client,
    ):
        host_dir.rename(elsewhere)
        host_dir.mkdir(mode=0o700)
        for is_restarted in (False, True):
            if is_restarted:
                epoch = client.stats().epoch
                serving.kill_control()
                serving.until(lambda epoch=epoch: client.stats().epoch != epoch)  # type: ignore[misc]
            with pytest.raises(WrongStateError, match="is not the directory that the daemon was"):
                client.register("main", INPUTS)
            assert not list(host_dir.iterdir())
        host_dir.rmdir()
        elsewhere.rename(host_dir)
        _ready(serving, client, INPUTS, CacheOptions())


@pytest.mark.thorough
@needs_memory
def test_second_daemon_in_one_host_directory_is_refused(tmp_path: Path, host_dir: Path) -> None:
    """Two daemons never share the files of a host pool."""
    options = ("--host-dir", str(host_dir))
    with served(tmp_path / "run", *options):
        (tmp_path / "other").mkdir()
        other = Serving(tmp_path / "other" / "run", *options)

        assert other.process.wait(60) == 78
        other.log.close()
        assert "another daemon is using" in (tmp_path / "other" / "log").read_text()


@needs_disk_mover
def test_disk_mover_is_replaced_alone(tmp_path: Path, disk_dir: Path) -> None:
    """A disk mover may die at any time: nothing else is touched, and its stored blocks are found afterwards."""
    with (
        served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving,
        Client(serving.address("unix"), on_doubt="raise") as client,
    ):
        _ready(serving, client, WITH_DISK, WRITE_THROUGH)
        serving.until(lambda: _tier(client, "disk") == "ready")
        with client.attach("main") as worker:
            _fill(worker)
            others = [_process(serving, role) for role in ("control", "mover")]
            mover = _process(serving, "disk-mover")
            assert mover

            os.kill(mover, signal.SIGKILL)

            serving.until(lambda: _process(serving, "disk-mover") not in {0, mover})
            serving.until(lambda: _tier(client, "disk") == "ready")
            assert [_process(serving, role) for role in ("control", "mover")] == others


@needs_disk_mover
def test_stuck_disk_mover_is_replaced_and_holds_up_nobody(tmp_path: Path, disk_dir: Path) -> None:
    """While a disk mover stands still, calls are answered from memory; at its deadline it is killed and replaced."""
    options = ("--disk-dir", str(disk_dir), "--mover-seconds-max", "2")
    with (
        served(tmp_path / "run", *options) as serving,
        Client(serving.address("unix"), on_doubt="raise") as client,
    ):
        _ready(serving, client, WITH_DISK, WRITE_THROUGH)
        serving.until(lambda: _tier(client, "disk") == "ready")
        with client.attach("main") as worker:
            mover = _process(serving, "disk-mover")
            assert mover
            os.kill(mover, signal.SIGSTOP)

            keys = _fill(worker)
            # A block may not leave while it is copied down.
            serving.until(lambda: _num_ready(client, "host") == NUM_BLOCKS // 2)
            assert worker.evict(keys=keys).num_evicted == NUM_BLOCKS // 2
            assert _found(worker, keys) == (NUM_TOKENS, 0)

            serving.until(lambda: _process(serving, "disk-mover") not in {0, mover})
            serving.until(lambda: _tier(client, "disk") == "ready")


@needs_disk_mover
def test_control_process_ends_with_all_movers(tmp_path: Path, disk_dir: Path) -> None:
    """No mover of an earlier life still writes when the next control process reads its records."""
    with (
        served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving,
        Client(serving.address("unix"), on_doubt="raise") as client,
    ):
        _ready(serving, client, WITH_DISK, WRITE_THROUGH)
        before = {role: _process(serving, role) for role in ("mover", "disk-mover")}
        assert all(before.values())
        with client.attach("main") as worker:
            serving.restart_control(worker)

        for role, pid in before.items():
            assert _process(serving, role) not in {0, pid}
            assert not Path(f"/proc/{pid}").exists()


@contextmanager
def _that_cannot_end(pid: int) -> Iterator[None]:
    """Make a killed process stand still in the kernel before it ends, as in a call that never returns."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, pid, None, ctypes.c_void_p(PTRACE_O_TRACEEXIT)):
        pytest.skip(f"ptrace is not permitted: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, WALL)
        assert not libc.ptrace(PTRACE_DETACH, pid, None, None)


@pytest.mark.thorough
@needs_disk_mover
def test_disk_mover_that_cannot_end_does_not_hold_up_the_next_control_process(
    tmp_path: Path, disk_dir: Path
) -> None:
    """The mover's tier is off until it has ended; then another mover takes over, and finds what was stored."""
    with (
        served(tmp_path / "run", "--disk-dir", str(disk_dir)) as serving,
        Client(serving.address("unix"), on_doubt="raise") as client,
    ):
        _ready(serving, client, WITH_DISK, WRITE_THROUGH)
        serving.until(lambda: _tier(client, "disk") == "ready")
        with client.attach("main") as worker:
            keys = _fill(worker)
            serving.until(lambda: _num_ready(client, "disk") == NUM_BLOCKS // 2)
            hung = _process(serving, "disk-mover")
            with _that_cannot_end(hung):
                serving.kill_control()
                serving.until(lambda: _is_heard(worker))
                assert _process(serving, "disk-mover") == hung
                assert _tier(client, "disk") == "off"
                assert worker.keys.chain(range(NUM_TOKENS), TOKENS_PER_BLOCK) == keys
                with worker.reserve("meanwhile", num_tokens=NUM_TOKENS, keys=keys) as lease:
                    assert lease.hit_tokens == NUM_TOKENS
            serving.until(lambda: _process(serving, "disk-mover") not in {0, hung})
            serving.until(lambda: _tier(client, "disk") == "ready")
            assert _num_ready(client, "disk") == NUM_BLOCKS // 2


@needs_disk_mover
def test_disk_mover_that_cannot_end_does_not_hold_up_the_end(
    tmp_path: Path, disk_dir: Path
) -> None:
    """A daemon that is told to stop ends with its usual status, although a child has not ended."""
    serving = Serving(tmp_path / "run", "--disk-dir", str(disk_dir))
    try:
        serving.wait_until_ready()
        with _that_cannot_end(_process(serving, "disk-mover")):
            serving.process.send_signal(signal.SIGTERM)
            assert serving.process.wait(SECONDS_TO_START) == 0
    finally:
        serving.stop()


@needs_disk_mover
def test_disk_store_outlives_all_processes(tmp_path: Path, disk_dir: Path) -> None:
    """Blocks stored before a kill of all processes are found again once the store has been scanned."""
    options = ("--disk-dir", str(disk_dir))
    first = Serving(tmp_path / "run", *options)
    try:
        first.wait_until_ready()
        with Client(first.address("unix"), on_doubt="raise") as client:
            _ready(first, client, WITH_DISK, WRITE_THROUGH)
            with client.attach("main") as worker:
                keys = _fill(worker)
                first.until(lambda: _num_ready(client, "disk") == NUM_BLOCKS // 2)
    finally:
        _kill_all(first)

    with (
        served(tmp_path / "run", *options) as second,
        Client(second.address("unix"), on_doubt="raise") as client,
    ):
        _ready(second, client, WITH_DISK, WRITE_THROUGH)
        second.until(lambda: _tier(client, "disk") == "ready")
        with client.attach("main") as worker:
            assert _found(worker, keys) == (0, NUM_TOKENS)


def _is_heard(worker: Worker) -> bool:
    try:
        worker.heartbeat()
    except (DeadlineError, UnavailableError):
        return False
    return True


def _num_ready(client: Client, tier: str) -> int:
    return next(pool.ready for pool in client.stats("main").caches[0].pools if pool.tier == tier)
