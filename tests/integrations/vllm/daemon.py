"""Own a real daemon for tests, with its supervisor: how to stop and kill it, and its census."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvlease import CacheStats, Client, Inspection, KVLeaseError
from tests.integrations.vllm.births import until
from tests.integrations.vllm.models import ROOT

_SECONDS_TO_START: Final = 60.0
_SECONDS_TO_FORGET: Final = 10.0
_PAUSE_SECONDS: Final = 0.05
_NAMES_OF_OTHERS: Final = ("vllm_dist_", "psm_", "kvlease-test-", "kvlease-soak-")
"""Prefixes of names in /dev/shm that engines of several ranks, or tests running beside this one, make."""
_IN_USE: Final = ("reserved", "ready_held", "filling", "quarantined")


class Daemon:
    """A daemon that a test starts, stops and kills as often as it wants, always at the same address."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        # The path of a Unix socket must be short.
        self._sockets = tempfile.TemporaryDirectory(prefix="kvlease-")
        self.runtime_dir = Path(self._sockets.name, "run")
        self.address = f"unix://{self.runtime_dir}/kvlease.sock"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.is_harmed = False
        """Whether any of its processes was ever stopped or killed."""

    @property
    def pid(self) -> int:
        """Return the process id of the supervisor."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the daemon, and wait until it answers."""
        command = [sys.executable, "-m", "kvleased", "serve", "--runtime-dir"]
        command += [str(self.runtime_dir), "--no-listen-tcp", "--drain-seconds", "0.1"]
        with (self.folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._options],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until it answers."""
        until(self._answers, "the daemon does not answer", _SECONDS_TO_START)

    def stop(self) -> None:
        """Stop the daemon in good order."""
        assert self._process is not None
        self.is_harmed = True
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_SECONDS_TO_START)
        self._process = None

    def kill(self) -> None:
        """Kill all of the daemon's processes at once; memory that nobody else maps is gone with them."""
        assert self._process is not None
        self.is_harmed = True
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def kill_control(self) -> None:
        """Kill the control process, which the supervisor restarts over the same memory."""
        self.is_harmed = True
        os.kill(self.control(), signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all of the daemon's processes, with their connections as they are."""
        self.is_harmed = True
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue all of the daemon's processes."""
        os.killpg(self.pid, signal.SIGCONT)

    def control(self) -> int:
        """Return the process id of the control process."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(self.runtime_dir / "kvlease.sock"))
            peer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(peer[:4], "little")

    def client(self) -> Client:
        """Return a client that raises all errors."""
        return Client(self.address, on_doubt="raise")

    def close(self) -> None:
        """End the daemon in whatever state it is."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.thaw()
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
        self._sockets.cleanup()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "daemon.log").read_text()[-4000:]
        try:
            with self.client() as client:
                client.stats()
        except Exception:  # noqa: BLE001  # whatever it is, it is not ready
            return False
        return True

    # The census.

    def caches(self) -> list[CacheStats]:
        """Return the figures of each cache."""
        with self.client() as client:
            return list(client.stats().caches)

    def bytes_copied(self) -> float:
        """Return how many bytes the daemon has copied so far between any tiers."""
        # REST opens later than the socket that tells that the daemon is ready.
        path = str(self.runtime_dir / "http.sock")
        with socket.socket(socket.AF_UNIX) as asking:
            until(lambda: asking.connect_ex(path) == 0, "REST does not open", _SECONDS_TO_START)
            asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            with asking.makefile() as told:
                lines = [
                    line.split() for line in told if line.startswith("kvlease_copy_bytes_total")
                ]
        return sum(float(line[-1]) for line in lines)

    def exchanges(self) -> int:
        """Count the exchanges that engines have made."""
        return self.counted("exchanges")

    def counted(self, counter: str) -> int:
        """Return the sum of a counter over all caches."""
        return sum(cache.counters.get(counter, 0) for cache in self.caches())

    def spoil(self, num_ranks: int = 1) -> None:
        """Overwrite the only cache's pool with random bytes, which no process may do."""
        (cache,) = self.caches()
        chance = random.Random(1)  # noqa: S311 - nothing is secret
        with self.client() as client:
            for rank in range(num_ranks):
                with client.attach(cache.cache, rank=rank) as worker:
                    region = worker.device
                    assert region is not None
                    region[:] = memoryview(chance.randbytes(region.nbytes))

    def in_use(self, cache: str = "") -> int:
        """Count the device blocks in use, of all caches or of one."""
        found = [one for one in self.caches() if cache in ("", one.cache)]
        return sum(
            getattr(pool, word)
            for one in found
            for pool in one.pools
            if pool.tier == "device"
            for word in _IN_USE
        )

    def listed(self, cache: str, what: Any) -> Inspection:
        """Return the first entries of one list of a cache, such as its workers or leases."""
        with self.client() as client:
            return client.inspect(cache, what, limit=256)

    def has_forgotten(self) -> bool:
        """Delete all caches once the dead workers are proven dead; return whether that was possible."""
        ends_at = time.monotonic() + _SECONDS_TO_FORGET
        while self.caches():
            with self.client() as client, contextlib.suppress(KVLeaseError):
                for one in client.stats().caches:
                    client.delete_cache(one.cache)
            if time.monotonic() > ends_at:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True

    def wait_until_unused(self, cache: str = "") -> None:
        """Wait until no block is in use, as dead engines' blocks must come back."""
        until(lambda: self.in_use(cache) == 0, "blocks are leaked", _SECONDS_TO_START)


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Daemon]:
    """Run a daemon, and give it once it is ready."""
    daemon = Daemon(folder, *options)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


class Traces:
    """Names in shared memory and descriptors of processes, before and after."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._names = _shared_names()
        self._descriptors = [_descriptors(pid) for pid in pids]

    def new_names(self) -> set[str]:
        """Return the names in /dev/shm that were not there before."""
        return _shared_names() - self._names

    def new_descriptors(self) -> list[int]:
        """Return how many more descriptors each process has than before."""
        return [
            _descriptors(pid) - before
            for pid, before in zip(self._pids, self._descriptors, strict=True)
        ]


def _shared_names() -> set[str]:
    names = {entry.name for entry in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith(_NAMES_OF_OTHERS)}


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
