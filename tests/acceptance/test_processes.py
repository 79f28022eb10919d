"""The daemon as real processes: killed ones come back, committed blocks stay, and dead workers' blocks are freed."""

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvlease import Client, UnavailableError
from kvlease.v1 import kvlease_pb2 as pb
from tests.acceptance import serving

pytestmark = pytest.mark.acceptance

_T = TypeVar("_T")

DEADLINE_SECONDS = 90.0
NUM_BLOCKS = 64
INPUTS = pb.PlanInputs(
    layers=[
        pb.LayerSpec(
            name=f"layers.{index}",
            kind="full_attention",
            num_kv_heads=2,
            head_size=64,
            dtype="float32",
        )
        for index in range(4)
    ],
    tokens_per_block=16,
    device_blocks=NUM_BLOCKS,
    host_bytes=32 * 65_536,
)
KEYS = b"".join(number.to_bytes(32, "little") for number in range(1, 5))


def until(look: Callable[[], _T], what: str) -> _T:
    """Return the first true value of `look`, which is called again while the daemon is not there yet."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except (ConnectionError, FileNotFoundError, EOFError):
            pass
        time.sleep(0.01)
    pytest.fail(f"waited {DEADLINE_SECONDS} s for {what}")


class Connection:
    """A connection to the local socket that speaks frames."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(DEADLINE_SECONDS)
        self._sock.connect(str(path))
        self.fds: list[int] = []

    def close(self) -> None:
        """Close the socket and every descriptor that came over it."""
        self._sock.close()
        for fd in self.fds:
            os.close(fd)

    def reply(self, fds: tuple[int, ...] = (), **call: Any) -> pb.Reply:
        """Send one call and return its reply."""
        body = pb.Call(call_number=1, **call).SerializeToString()
        socket.send_fds(self._sock, [struct.pack("<I", len(body)) + body], fds)
        data, received, _, _ = socket.recv_fds(self._sock, 1 << 16, 8)
        self.fds += received
        while len(data) < 4 or len(data) < 4 + struct.unpack_from("<I", data)[0]:
            more = self._sock.recv(1 << 16)
            if not more:
                raise EOFError
            data += more
        return pb.Reply.FromString(data[4:])

    def call(self, fds: tuple[int, ...] = (), **call: Any) -> Any:
        """Send one call and return its response; an error fails the test."""
        reply = self.reply(fds, **call)
        assert reply.WhichOneof("response") != "error", reply.error
        return getattr(reply, reply.WhichOneof("response"))


class Served:
    """`kvleased serve`, running."""

    def __init__(self, runtime_dir: Path, *flags: str) -> None:
        self.path = runtime_dir / "kvlease.sock"
        self._log = (runtime_dir / "log").open("w+")
        arguments = [
            "--runtime-dir",
            str(runtime_dir),
            "--no-listen-tcp",
            "--drain-seconds",
            "1",
            *flags,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvleased", "serve", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        until(lambda: self.events("ready"), "the daemon")

    def lines(self) -> list[str]:
        """Return the log."""
        return Path(self._log.name).read_text().splitlines()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log's events of one name."""
        told = serving.told_in(Path(self._log.name))
        return [event for event in told if event["event"] == name]

    def child(self, role: str) -> int:
        """Return the process id of a child, or 0."""
        for pid in _children(self.process.pid):
            # A child may end between the two looks.
            with suppress(FileNotFoundError, ProcessLookupError):
                if role.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return pid
        return 0

    def living(self, role: str) -> int:
        """Return the process id of a living child, never 0: a signal to 0 would go to the tests themselves."""
        pid = self.child(role)
        assert pid, f"no {role} is running"
        return pid

    def connect(self) -> Connection:
        """Return a new connection."""
        return Connection(self.path)

    def stats(self) -> pb.CacheStats:
        """Return the only cache's figures."""
        connection = self.connect()
        try:
            reply: pb.StatsResponse = connection.call(stats=pb.StatsRequest())
            return reply.caches[0]
        finally:
            connection.close()

    def register(self) -> None:
        """Register the cache and wait for its memory."""
        connection = self.connect()
        connection.call(register_cache=pb.RegisterCacheRequest(cache="main", inputs=INPUTS))
        until(
            lambda: (
                connection.call(get_cache=pb.GetCacheRequest(cache="main")).info.status == "ready"
            ),
            "memory",
        )
        connection.close()

    def stop(self) -> None:
        """Kill all remaining processes."""
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Run a daemon with one cache."""
    served = Served(tmp_path)
    try:
        served.register()
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run one daemon with one cache for the tests that change nothing."""
    served = Served(tmp_path_factory.mktemp("shared"))
    try:
        served.register()
        yield served
    finally:
        served.stop()


@pytest.fixture
def worker(served: Served) -> Iterator[tuple[Connection, pb.AttachResponse]]:
    """Attach this process; give its connection and the response."""
    connection = served.connect()
    pidfd = os.pidfd_open(os.getpid())
    yield connection, connection.call((pidfd,), attach=pb.AttachRequest(cache="main"))
    os.close(pidfd)
    connection.close()


def _commit_blocks(
    connection: Connection, attached: pb.AttachResponse
) -> tuple[pb.ReserveResponse, mmap.mmap]:
    """Reserve four blocks, fill block i with the byte i + 1, and commit them."""
    region = mmap.mmap(connection.fds[0], attached.regions[0].region_bytes)
    lease = connection.call(
        token=attached.token, reserve=pb.ReserveRequest(request_id="r", keys=KEYS, num_tokens=64)
    )
    for place, block in enumerate(struct.unpack("<4i", lease.block_ids)):
        region[block * 65_536 : (block + 1) * 65_536] = bytes([place + 1]) * 65_536
    commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=64, keys=KEYS)
    assert connection.call(token=attached.token, commit=commit).num_committed == 4
    return lease, region


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_killed_control_process_comes_back_over_the_same_memory(
    served: Served, worker: tuple[Connection, pb.AttachResponse], end: signal.Signals
) -> None:
    """When the control process named in the log is killed, the next has a greater epoch, all blocks and all leases."""
    connection, attached = worker
    lease, region = _commit_blocks(connection, attached)
    mover = served.child("mover")
    (started,) = served.events("control_started")
    (ready,) = served.events("ready")
    assert started["child_pid"] == ready["pid"] == served.child("control")

    os.kill(started["child_pid"], end)
    until(lambda: len(served.events("ready")) == 2, "the next control process")
    again = served.connect()
    pidfd = os.pidfd_open(os.getpid())
    resume = pb.AttachRequest(
        cache="main", resume_token=attached.token, lease_ids=struct.pack("<q", lease.lease_id)
    )
    resumed = again.call((pidfd,), attach=resume)

    assert resumed.epoch > attached.epoch
    assert (resumed.worker_id, resumed.tenant_key) == (attached.worker_id, attached.tenant_key)
    assert resumed.lease_ids == struct.pack("<q", lease.lease_id)
    assert (
        again.call(token=attached.token, lookup=pb.LookupRequest(keys=KEYS)).num_device_blocks == 4
    )
    assert again.reply(epoch=attached.epoch, stats=pb.StatsRequest()).error.code == "STALE_EPOCH"
    with mmap.mmap(again.fds[0], 0) as mapped_again:
        assert mapped_again[:] == region[:]
    assert not Path(f"/proc/{mover}").exists()
    os.close(pidfd)
    again.close()


@pytest.mark.parametrize(("bytes_max", "num_warnings"), [(1 << 46, 1), (1 << 20, 0)])
def test_more_memory_than_there_is_is_warned_of(
    tmp_path: Path, bytes_max: int, num_warnings: int
) -> None:
    """A start warns of pools above the memory limit of the cgroup or machine, for which it would be killed."""
    served = Served(tmp_path, "--memory-bytes-max", str(bytes_max))
    try:
        warnings = served.events("memory_bytes_max_above_limit")
        assert len(warnings) == num_warnings
        assert all(one["limit_bytes"] < one["memory_bytes_max"] == bytes_max for one in warnings)
    finally:
        served.stop()


def test_killed_control_process_leaves_one_event_a_line(
    served: Served, worker: tuple[Connection, pb.AttachResponse]
) -> None:
    """A restart logs that pins are not kept, and no process leaves a bare traceback among the events."""
    connection, attached = worker
    _commit_blocks(connection, attached)

    os.kill(served.child("control"), signal.SIGKILL)
    until(lambda: len(served.events("ready")) == 2, "the next control process")

    (told,) = served.events("pins_not_kept")
    assert told["caches"] == ["main"]
    assert all(line.startswith("{") for line in served.lines())


def test_no_process_writes_lines_below_the_log_level(tmp_path: Path) -> None:
    """With `--log-level error`, a start, a killed control process, its movers' ends and a stop write no line."""
    (stores := tmp_path / "stores").mkdir(mode=0o700)
    options = ("--log-level", "error", "--disk-dir", str(stores))
    with serving.served(tmp_path / "run", *options) as quiet:
        epoch = _epoch_at(quiet.address("unix"))
        quiet.kill_control()
        quiet.until(lambda: _epoch_at(quiet.address("unix")) > epoch)

    assert Path(quiet.log.name).read_text() == ""


def test_killed_worker_frees_its_blocks(served: Served) -> None:
    """A pidfd tells of a worker's death: its leases end and its blocks are free without any call."""
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from test_processes import *\n"
        "connection = Connection(Path(sys.argv[2]))\n"
        "attached = connection.call((os.pidfd_open(os.getpid()),), attach=pb.AttachRequest(cache='main'))\n"
        "request = pb.ReserveRequest(request_id='r', num_tokens=16 * 60)\n"
        "connection.call(token=attached.token, reserve=request)\n"
        "print('granted', flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", script, str(Path(__file__).parent), str(served.path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"granted\n"
        assert served.stats().pools[0].reserved == 60

        process.kill()
        until(lambda: served.stats().num_workers == 0, "the worker's death")

    assert (served.stats().num_leases, served.stats().pools[0].free) == (0, NUM_BLOCKS)


def test_killed_mover_is_replaced_and_bytes_survive(
    served: Served, worker: tuple[Connection, pb.AttachResponse]
) -> None:
    """A killed mover is replaced by one with the same pools, and evicted bytes come back."""
    connection, attached = worker
    lease, region = _commit_blocks(connection, attached)
    evict = pb.EvictRequest(lease_id=lease.lease_id)
    assert connection.call(token=attached.token, evict=evict).num_evicted == 4
    region[:] = bytes(len(region))

    os.kill(mover := served.living("mover"), signal.SIGKILL)
    until(lambda: served.child("mover") not in {0, mover}, "the next mover")
    reload = pb.ReloadRequest(lease_id=lease.lease_id)
    reloaded = connection.call(token=attached.token, reload=reload)

    assert (reloaded.num_reloaded, reloaded.num_tokens) == (4, 64)
    for place, block in enumerate(struct.unpack("<4i", reloaded.block_ids)):
        assert region[block * 65_536 : (block + 1) * 65_536] == bytes([place + 1]) * 65_536


def test_stuck_mover_is_replaced(tmp_path: Path) -> None:
    """A mover that stands still is killed at its deadline, and its copies are tried again or refused."""
    served = Served(tmp_path, "--mover-seconds-max", "0.5")
    try:
        served.register()
        connection = served.connect()
        pidfd = os.pidfd_open(os.getpid())
        attached = connection.call((pidfd,), attach=pb.AttachRequest(cache="main"))
        lease, _ = _commit_blocks(connection, attached)
        os.kill(mover := served.living("mover"), signal.SIGSTOP)

        connection.reply(token=attached.token, evict=pb.EvictRequest(lease_id=lease.lease_id))

        until(lambda: served.child("mover") not in {0, mover}, "the next mover")
        until(lambda: served.stats().pools[0].quarantined == 0, "the end of quarantine")
        assert served.stats().num_leases == 1
        os.close(pidfd)
        connection.close()
    finally:
        served.stop()


@pytest.mark.thorough
def test_silent_control_process_is_replaced(tmp_path: Path) -> None:
    """A control process whose loop stands still is killed; the next has all leases and still replaces movers."""
    served = Served(tmp_path, "--control-silent-seconds-max", "3")
    try:
        served.register()
        connection = served.connect()
        pidfd = os.pidfd_open(os.getpid())
        attached = connection.call((pidfd,), attach=pb.AttachRequest(cache="main"))
        _commit_blocks(connection, attached)

        os.kill(control := served.living("control"), signal.SIGSTOP)
        until(lambda: len(served.events("ready")) == 2, "the next control process")

        (silent,) = served.events("control_silent")
        (ended,) = served.events("control_ended")
        assert (silent["child_pid"], silent["seconds"]) == (control, 3)
        assert ended["status"] == -signal.SIGKILL
        assert served.stats().num_leases == 1
        assert sample(served, 'kvlease_control_restarts_total{reason="silent"}') == 1
        os.kill(mover := served.living("mover"), signal.SIGKILL)
        until(lambda: served.child("mover") not in {0, mover}, "the next mover")
        until(lambda: sample(served, 'kvlease_mover_ends_total{mover="memory"}') == 1, "its count")
        os.close(pidfd)
        connection.close()
    finally:
        served.stop()


def test_daemon_that_stood_still_replaces_nobody(tmp_path: Path) -> None:
    """While the whole daemon stands still, as in a frozen container, the control process does not count as silent."""
    served = Served(tmp_path, "--control-silent-seconds-max", "3")
    try:
        served.register()
        both = [served.process.pid, served.living("control")]
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)
        for pid in both:
            os.kill(pid, signal.SIGCONT)

        served.stats()
        time.sleep(2)

        assert served.living("control") == both[1]
        assert served.events("control_silent") == []
    finally:
        served.stop()


@pytest.mark.parametrize("role", ["control", "mover"])
def test_no_torch_where_it_does_not_belong(shared: Served, role: str) -> None:
    """Neither the control process nor the CPU mover has torch mapped, after serving."""
    shared.stats()

    maps = Path(f"/proc/{shared.child(role)}/maps").read_text()

    assert "torch" not in maps
    assert "python" in maps


def test_control_process_says_what_it_has_imported(shared: Served) -> None:
    """`sys.modules` of the live control process names neither torch nor CUDA, and it says so itself."""
    shared.stats()

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(shared.path.with_name("http.sock")))
        connection.sendall(
            b"GET /livez?verbose HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert b"modules that no control process should have loaded: none" in answer


def test_terminated_daemon_drains_and_leaves_nothing(served: Served) -> None:
    """SIGTERM ends all processes with status 0; an idle daemon does not wait for its deadline."""
    children = _children(served.process.pid)

    served.process.send_signal(signal.SIGTERM)

    assert served.process.wait(DEADLINE_SECONDS) == 0
    assert served.events("drained")
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_repeated_sigterm_still_drains(served: Served) -> None:
    """A SIGTERM to the whole process group reaches the supervisor twice, and the daemon still drains."""
    for _ in range(3):
        served.process.send_signal(signal.SIGTERM)

    assert served.process.wait(DEADLINE_SECONDS) == 0
    assert served.events("drained")


def test_signal_that_means_nothing_is_told_and_ends_nothing(served: Served) -> None:
    """SIGUSR1, which by default ends a process, is only logged; the daemon goes on, and still drains."""
    children = _children(served.process.pid)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        served.process.send_signal(number)
    until(lambda: "SIGUSR2" in str(served.events("signals_ignored")), "a line about both")

    assert "SIGUSR1" in str(served.events("signals_ignored"))
    assert _children(served.process.pid) == children
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(DEADLINE_SECONDS) == 0
    assert served.events("drained")


def test_clock_that_was_set_back_takes_no_epoch_back(tmp_path: Path) -> None:
    """The next daemon in a directory has a greater epoch than the last, because event numbers must not go back."""
    Served(tmp_path).stop()
    remembered = next(tmp_path.rglob(".epoch"))
    ahead = int(remembered.read_text()) + 1_000_000
    remembered.write_text(f"{ahead}\n")

    again = Served(tmp_path)
    try:
        assert again.events("control_started")[0]["epoch"] == ahead + 1
    finally:
        again.stop()


def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """While a drain waits for leases, a second ^C ends everything with status 1."""
    served = Served(tmp_path, "--drain-seconds", "3600")
    try:
        served.register()
        connection = served.connect()
        pidfd = os.pidfd_open(os.getpid())
        _commit_blocks(connection, connection.call((pidfd,), attach=pb.AttachRequest(cache="main")))
        os.close(pidfd)
        children = _children(served.process.pid)
        served.process.send_signal(signal.SIGINT)
        until(lambda: served.events("draining"), "the draining")

        served.process.send_signal(signal.SIGINT)

        assert served.process.wait(DEADLINE_SECONDS) == 1
        assert not any(_is_running(pid) for pid in children)
        connection.close()
    finally:
        served.stop()


def test_nothing_outlives_a_killed_supervisor(served: Served) -> None:
    """When the supervisor is killed, the kernel kills its children."""
    children = _children(served.process.pid)

    served.process.kill()
    served.process.wait()

    until(lambda: not any(_is_running(pid) for pid in children), "the children's end")


@pytest.mark.thorough
def test_second_daemon_in_one_directory_is_refused(shared: Served) -> None:
    """Two daemons never share a directory: the second one says why and ends with status 78."""
    arguments = [
        sys.executable,
        "-m",
        "kvleased",
        "serve",
        "--runtime-dir",
        str(shared.path.parent),
    ]

    second = subprocess.run(
        arguments, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )

    assert second.returncode == 78
    assert "another daemon" in second.stderr
    assert shared.stats().cache == "main"


def test_wiped_directory_is_noticed_and_stays_one_daemons(served: Served) -> None:
    """When the sockets are gone the log says so and what to do, and no second daemon starts in the directory."""
    directory, connection = served.path.parent, served.connect()

    for pattern in ("*.sock", "*.lock", "*.token"):
        for path in directory.glob(pattern):
            path.unlink()
    (lost,) = until(lambda: served.events("sockets_lost"), "the loss")
    second = subprocess.run(
        [sys.executable, "-m", "kvleased", "serve", "--runtime-dir", str(directory)],
        capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip

    assert str(served.path) in lost["paths"]
    assert "restart the daemon" in lost["advice"]
    assert (second.returncode, "another daemon" in second.stderr) == (78, True)
    # Existing connections go on.
    assert connection.call(stats=pb.StatsRequest()).caches[0].cache == "main"
    connection.close()


def test_ready_is_told_once_all_listen(shared: Served) -> None:
    """Once "ready" is logged every address that it names listens; nothing begins to listen afterwards."""
    (grpc_ready,), (ready,) = shared.events("grpc_ready"), shared.events("ready")

    assert grpc_ready["socket"] == ready["grpc"]
    assert grpc_ready["timestamp"] <= ready["timestamp"]


def test_sockets_are_private(shared: Served) -> None:
    """Sockets have mode 0600 in a directory of mode 0700."""
    assert shared.path.parent.stat().st_mode & 0o777 == 0o700
    for name in ("kvlease.sock", "http.sock", "grpc.sock"):
        assert (shared.path.parent / name).stat().st_mode & 0o777 == 0o600


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def sample(served: Served, name: str) -> float:
    """Return one sample of the metrics."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(served.path.with_name("http.sock")))
        asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with asking.makefile("r") as answer:
            lines = answer.read().splitlines()
    (found,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(found.split()[-1])


def _epoch_at(address: str) -> int:
    """Return the daemon's epoch, or 0 while nobody answers."""
    with suppress(UnavailableError), Client(address) as client:
        return client.stats().epoch
    return 0
