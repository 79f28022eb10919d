"""Disk movers that meet a fault at one system call: a parent with everything imported forks one for each point.

strace counts calls separately in each process. So it is attached to the parent, and the k-th call of every child fails
or kills it, however many calls the parent has made.
"""

import ctypes
import fcntl
import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from kvleased.movers.disk.engine import DiskEngine
from kvleased.movers.disk.store_place import StorePlace
from kvleased.telemetry import logs

SYSCALLS: Final = (
    "openat",
    "mkdir",
    "fstat",
    "newfstatat",
    "flock",
    "getdents64",
    "fallocate",
    "pread64",
    "preadv2",
    "pwritev2",
    "fdatasync",
    "fsync",
    "renameat",
    "unlinkat",
    "sendto",
    "recvmsg",
    "mmap",
    "close",
)
"""The system calls of a disk mover that are traced."""

_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)
_SECONDS_TO_ATTACH: Final = 20.0
_SECONDS_BETWEEN_LOOKS: Final = 0.0005
_SECONDS_BETWEEN_TRIES: Final = 0.005
_FDS_MAX: Final = 256
"""More descriptors than a mover of one cache ever has."""
_STATUS_RAISED: Final = 70
_STATUS_LEAKED: Final = 71


class ForkServer:
    """Fork a disk mover whenever asked, and report how it ended."""

    def __init__(self, directory: Path) -> None:
        """Assign; the directory is for the socket and the logs."""
        self._directory = directory
        self._socket_path = directory / "link"
        self.pid = 0

    def __enter__(self) -> Self:
        """Start the parent of all movers."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._socket_path))
        self._listener.listen()
        their_orders, self._orders = os.pipe()
        self._answers, their_answers = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for fd in (self._orders, self._answers, self._listener.fileno()):
                os.close(fd)
            _serve(their_orders, their_answers, self._socket_path)
        os.close(their_orders)
        os.close(their_answers)
        return self

    def __exit__(self, *_: object) -> None:
        """End the parent, which has no children by now."""
        os.close(self._orders)
        os.waitpid(self.pid, 0)
        os.close(self._answers)
        self._listener.close()

    def fork(self, stores: Path, bytes_max: int) -> tuple[int, socket.socket]:
        """Start a mover; return its process id and our end of its link."""
        os.write(self._orders, f"{bytes_max} {stores}\n".encode())
        pid = int(self._line())
        ready, _, _ = select.select([self._listener, self._answers], [], [])
        if self._listener in ready:
            return pid, self._listener.accept()[0]
        # It was killed before it could connect.
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        return pid, link

    def status(self) -> int:
        """Wait for the mover's end; return its exit code, or a negative number for the signal that killed it."""
        return os.waitstatus_to_exitcode(int(self._line()))

    @contextmanager
    def traced(self, *faults: str) -> Iterator[None]:
        """Have strace watch the movers that are forked meanwhile, and inject faults into them."""
        words = ["strace", "-f", "-qq", "-o", str(self.log), "-e", f"trace={','.join(SYSCALLS)}"]
        for fault in faults:
            words += ["-e", f"inject={fault}"]
        strace = subprocess.Popen([*words, "-p", str(self.pid)], stderr=subprocess.PIPE)
        try:
            self._until_traced(strace)
            yield
        finally:
            strace.send_signal(signal.SIGINT)
            strace.communicate()

    @property
    def log(self) -> Path:
        """The file that strace writes."""
        return self._directory / "strace"

    def calls(self, pid: int) -> Counter[str]:
        """Return how often a mover made each call, according to the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        words = [line.split(maxsplit=1) for line in lines]
        names = (rest.partition("(")[0] for who, rest in words if int(who) == pid)
        return Counter(name for name in names if name in SYSCALLS)

    @property
    def was_injected(self) -> bool:
        """Whether any call was made to fail."""
        return "(INJECTED)" in self.log.read_text(errors="replace")

    def _until_traced(self, strace: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _SECONDS_TO_ATTACH
        while not _tracer_of(self.pid):
            if strace.poll() is not None or time.monotonic() > deadline:
                raise UntraceableError(strace.communicate()[1].decode().strip())
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            got = os.read(self._answers, 1)
            if not got:
                raise ConnectionResetError
            line += got
        return line


class UntraceableError(Exception):
    """strace cannot be attached here; the text says why."""


def why_not(directory: Path) -> str:
    """Return why nothing can be traced here; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    try:
        with ForkServer(directory) as server, server.traced("fsync:error=EIO"):
            return ""
    except UntraceableError as error:
        return f"strace cannot attach: {error}"


def run_mover(stores: Path, bytes_max: int, link: socket.socket) -> int:
    """Act as a disk mover; return the status to exit with."""
    logs.set_level("error")
    place = StorePlace(stores, bytes_max)
    fds_before = _num_fds()
    try:
        DiskEngine(link, place, _SECONDS_BETWEEN_TRIES).run()
        place.leave()
    except BaseException:  # noqa: BLE001 - anything at all counts as raised
        logs.line("error", "mover_raised", trace=_trace())
        return _STATUS_RAISED
    return _STATUS_LEAKED if _num_fds() > fds_before else 0


def _serve(orders: int, answers: int, socket_path: Path) -> None:
    """Fork a child for each line, one at a time; this calls only read, write, clone and wait."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    try:
        while line := _order(orders):
            bytes_max, _, stores = line.decode().strip().partition(" ")
            pid = os.fork()
            if not pid:
                os.close(orders)
                os.close(answers)
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                link.connect(str(socket_path))
                os._exit(run_mover(Path(stores), int(bytes_max), link))
            os.write(answers, f"{pid}\n".encode())
            os.write(answers, f"{os.waitpid(pid, 0)[1]}\n".encode())
    finally:
        os._exit(0)


def _order(orders: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        got = os.read(orders, 1)
        if not got:
            return b""
        line += got
    return line


def _num_fds() -> int:
    """Return how many descriptors are open, using a call that meets no faults."""
    gc.collect()
    return sum(_is_open(fd) for fd in range(_FDS_MAX))


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _tracer_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("TracerPid:")[2].split(maxsplit=1)[0])


def _trace() -> str:

    return traceback.format_exc()
