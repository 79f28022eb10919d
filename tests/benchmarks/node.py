"""Own a real daemon in a directory of its own while a figure is measured, and the caches that figures need."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import cores

from kvlease import Client
from kvlease.options import CacheOptions
from kvlease.plan import PlanInputs
from kvlease.spec import FullAttention

START_SECONDS_MAX: Final = 60.0
POLL_SECONDS: Final = 0.005
IDLE_SECONDS: Final = 0.4
IDLE_SHARE_MAX: Final = 0.1
"""The share of a core below which a daemon counts as idle, measured over IDLE_SECONDS."""
TOKENS_PER_BLOCK: Final = 16


class UnixHttp(http.client.HTTPConnection):
    """HTTP over a Unix socket that is kept alive: the leanest client in Python's library."""

    def __init__(self, path: Path) -> None:
        """Remember the socket's path."""
        super().__init__("localhost", timeout=5)
        self._path = str(path)

    def connect(self) -> None:
        """Connect to the socket instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Node:
    """`kvleased serve`, as an operator starts it; a context manager."""

    def __init__(self, directory: Path, *options: str) -> None:
        """Remember its directory and its options."""
        self.directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        """Start the daemon, and wait until it is ready."""
        self.directory.mkdir(mode=0o700, parents=True)
        arguments = [sys.executable, "-m", "kvleased", "serve", "--no-listen-tcp"]
        arguments += ["--runtime-dir", str(self.directory), "--drain-seconds", "0", *self._options]
        with (self.directory / "log").open("wb") as log, cores.for_servers():
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self.wait_ready(0)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def local(self) -> str:
        """The address of the local socket."""
        return f"unix://{self.directory}/kvlease.sock"

    @property
    def http_socket(self) -> Path:
        """The Unix socket of REST."""
        return self.directory / "http.sock"

    @property
    def grpc_socket(self) -> Path:
        """The Unix socket of gRPC, which listens a moment after the others."""
        path = self.directory / "grpc.sock"
        _until(path.exists, "gRPC did not start")
        return path

    def register(
        self,
        cache: str,
        *,
        bytes_per_token: int,
        num_blocks: int,
        num_slots: int = 0,
        integrity: str = "",
    ) -> None:
        """Create a cache of `bytes_per_token` (a multiple of 4), and wait for its memory."""
        layer = FullAttention(
            name="layers.0", num_kv_heads=1, head_size=bytes_per_token // 4, dtype="float16"
        )
        inputs = PlanInputs(
            layers=(layer,),
            tokens_per_block=TOKENS_PER_BLOCK,
            device_blocks=num_blocks,
            host_bytes=num_slots * bytes_per_token * TOKENS_PER_BLOCK,
        )
        with Client(self.local, deadline_seconds=START_SECONDS_MAX) as client:
            client.register(cache, inputs, CacheOptions(integrity=integrity))
            _until(lambda: client.get_cache(cache).status == "ready", "the memory is not ready")

    # The control process

    def control_pid(self, *, other_than: int = 0) -> int:
        """Wait for the control process, and return its id."""
        give_up_at = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < give_up_at:
            for pid in self._children():
                if pid != other_than and b"\0control\0" in _command_line(pid):
                    return pid
            time.sleep(POLL_SECONDS)
        message = "there is no control process"
        raise RuntimeError(message)

    def restart_control(self, then: Callable[[], object] = lambda: None) -> float:
        """Kill the control process; return the seconds from the start of the next one until `then`, once ready.

        The kernel notes a start in hundredths of a second, rounded down, so this errs by up to one of them upwards.
        """
        old = self.control_pid()
        os.kill(old, signal.SIGKILL)
        pid = self.control_pid(other_than=old)
        self.wait_ready(pid)
        then()
        ready_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        return ready_at - _started_at(pid)

    def processor_seconds(self) -> float:
        """Return the processor seconds that the living processes have used."""
        return sum(map(_processor_seconds, (self._process.pid, *self._children())))

    def put_control_on(self, core: int) -> None:
        """Keep the control process on one core."""
        os.sched_setaffinity(self.control_pid(), {core})

    def put_movers_on(self, core: int) -> None:
        """Keep the movers on one core."""
        for pid in self._children():
            if b"\0mover\0" in _command_line(pid):
                os.sched_setaffinity(pid, {core})

    def open_memory(self, cache: str, region: str) -> int:
        """Return a descriptor of a cache's memory, which the supervisor keeps; `region` is host or device.0."""
        kept = Path(f"/proc/{self._process.pid}/fd")
        wanted = f"/memfd:kvlease:cache/{cache}/{region} "
        (fd,) = (each for each in kept.iterdir() if str(each.readlink()).startswith(wanted))
        return os.open(fd, os.O_RDWR | os.O_CLOEXEC)

    def _children(self) -> list[int]:
        supervisor = self._process.pid
        found = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
        return [int(pid) for pid in found.split()]

    def wait_idle(self) -> None:
        """Wait until its processes have done the work that follows "ready"."""
        seconds = -1.0
        give_up_at = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < give_up_at:
            now = self.processor_seconds()
            if now - seconds <= IDLE_SHARE_MAX * IDLE_SECONDS:
                return
            seconds = now
            time.sleep(IDLE_SECONDS)

    def wait_ready(self, pid: int) -> None:
        """Ask /readyz until the daemon is ready."""

        def is_ready() -> bool:
            assert self._process.poll() is None, (self.directory / "log").read_text()
            connection = UnixHttp(self.http_socket)
            try:
                connection.request("GET", "/readyz")
                return connection.getresponse().status == http.client.OK
            except OSError:
                return False
            finally:
                connection.close()

        _until(is_ready, f"the control process {pid or ''} did not become ready")


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    give_up_at = time.monotonic() + START_SECONDS_MAX
    while not condition():
        if time.monotonic() > give_up_at:
            raise RuntimeError(otherwise)
        time.sleep(POLL_SECONDS)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def _processor_seconds(pid: int) -> float:
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _started_at(pid: int) -> float:
    """Return the seconds since boot at which a process started."""
    return int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's /proc stat, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
