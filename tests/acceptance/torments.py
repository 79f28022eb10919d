"""The faults that a soak inflicts on a daemon, its stores and its workers, one after the other at random."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvlease.units import BYTES_PER_SECTOR
from tests.acceptance.serving import ROOT, Serving
from tests.acceptance.soaking import Board
from tests.acceptance.tiering import child_or_none
from tests.later import Later
from tests.servers.redis import RedisServer

SLACK_SECONDS = 10.0
"""Seconds beyond its deadline after which a call counts as hung, also on a busy machine."""
HEAD_BYTES = BYTES_PER_SECTOR
"""The head that marks a file as a store of this cache; a damaged head turns the tier off until the file is removed."""
MOVERS = ("mover", "disk-mover", "remote-mover")


class Crew:
    """The workers' processes, which are restarted when killed."""

    def __init__(self, serving: Serving, folder: Path, tenants: tuple[str, ...]) -> None:
        self.folder = folder
        self.board = Board(folder / "board", len(tenants))
        self._serving = serving
        self._tenants = tenants
        self._log = (folder / "workers.log").open("a")
        self.processes = [self._start(number) for number in range(len(tenants))]
        self._stopped_until = [0.0] * len(tenants)
        self.hung: list[str] = []
        self.ended: list[str] = []

    def tend(self) -> None:
        """Restart ended workers, and check that no worker's call is past its deadline."""
        for number, process in enumerate(self.processes):
            if (status := process.poll()) is not None:
                if status != -signal.SIGKILL:
                    self.ended.append(f"worker {number} ended with {status}")
                self.board.set(number, "answer_due_at", 0)
                self.processes[number] = self._start(number)
            elif due_at := self.board.get(number, "answer_due_at"):
                late = time.monotonic() - max(due_at / 1e9, self._stopped_until[number])
                if late > SLACK_SECONDS:
                    self.hung.append(f"worker {number} is {late:.1f} s late in a call")
                    process.kill()

    def pause(self, number: int, seconds: float) -> None:
        """Stop a worker for so many seconds."""
        self._stopped_until[number] = time.monotonic() + seconds
        self.processes[number].send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """Have all workers end by themselves."""
        (self.folder / "stop").touch()
        for number, process in enumerate(self.processes):
            try:
                status = process.wait(60)
            except subprocess.TimeoutExpired:
                self.hung.append(f"worker {number} does not end")
                continue
            if status not in {0, -signal.SIGKILL}:
                self.ended.append(f"worker {number} ended with {status}")

    def close(self) -> None:
        """Kill the remaining workers."""
        for process in self.processes:
            process.kill()
            process.wait()
        self._log.close()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.acceptance.soak_worker"]
        command += [self._serving.address("unix"), str(number), self._tenants[number]]
        return subprocess.Popen([*command, str(self.folder)], cwd=ROOT, stderr=self._log)


class Tormentor:
    """Inflict one fault after the other, and undo those that must be undone in time."""

    def __init__(
        self, seed: int, serving: Serving, crew: Crew, redis: RedisServer, disk_dir: Path
    ) -> None:
        self.random = random.Random(seed)  # noqa: S311 - faults, no secrets
        self.done: Counter[str] = Counter()
        self._serving = serving
        self._crew = crew
        self._redis = redis
        self._disk_dir = disk_dir
        self._later = Later()
        self._is_redis_busy = False

    def act(self) -> None:
        """Inflict one fault at random."""
        torments: dict[Callable[[], None], int] = {
            self.kill_mover: 6,
            self.stop_mover: 6,
            self.kill_control: 1,
            self.stop_control: 3,
            self.kill_worker: 3,
            self.stop_worker: 4,
            self.kill_redis: 2,
            self.stop_redis: 4,
            self.spoil_values: 6,
            self.flush_values: 1,
            self.flip_store: 6,
            self.cut_store: 1,
            self.remove_store: 1,
        }
        (torment,) = self.random.choices(list(torments), list(torments.values()))
        self.done[torment.__name__] += 1
        torment()

    def undo_due(self) -> None:
        """Undo the faults that are due."""
        self._later.do_due()

    def undo_all(self) -> None:
        """Undo all faults."""
        self._later.do_all()

    def kill_mover(self) -> None:
        """Kill a mover."""
        self._signal(child_or_none(self._serving, self._mover()), signal.SIGKILL)

    def stop_mover(self) -> None:
        """Stop a mover, perhaps for longer than its deadline."""
        self._pause(child_or_none(self._serving, self._mover()), self._moment())

    def kill_control(self) -> None:
        """Kill the control process."""
        self._signal(child_or_none(self._serving, "control"), signal.SIGKILL)

    def stop_control(self) -> None:
        """Stop the control process."""
        self._pause(child_or_none(self._serving, "control"), self._moment())

    def kill_worker(self) -> None:
        """Kill a worker in the middle of anything."""
        self.random.choice(self._crew.processes).kill()

    def stop_worker(self) -> None:
        """Stop a worker, perhaps beyond the time of its leases."""
        number = self.random.randrange(len(self._crew.processes))
        seconds, process = self.random.uniform(0.1, 5), self._crew.processes[number]
        self._crew.pause(number, seconds)
        self._after(seconds, lambda: process.send_signal(signal.SIGCONT))

    def kill_redis(self) -> None:
        """Kill the remote store with all its values; it comes back empty."""
        if not self._is_redis_busy:
            self._is_redis_busy = True
            self._redis.kill()
            self._after(self.random.uniform(0.1, 2), self._revive_redis)

    def stop_redis(self) -> None:
        """Stop the remote store for a while."""
        if not self._is_redis_busy:
            self._is_redis_busy = True
            self._redis.stop()
            self._after(self._moment(), self._continue_redis)

    def spoil_values(self) -> None:
        """Change values of the remote store: some flipped, some cut short, some exchanged."""
        if self._is_redis_busy:
            return
        with self._redis.client() as client:
            for _ in range(10):
                one, other = client.randomkey(), client.randomkey()
                if one is not None and other is not None:
                    value = self._spoiled(client.get(one) or b"", client.get(other) or b"")
                    client.set(one, value)

    def _spoiled(self, value: bytes, other: bytes) -> bytes:
        how = self.random.randrange(4)
        at = self.random.randrange(len(value) or 1)
        if how == 0 and value:
            return value[:at] + bytes([value[at] ^ 1 << self.random.randrange(8)]) + value[at + 1 :]
        return (other, value[:at], value + bytes(8), other)[how]

    def flush_values(self) -> None:
        """Have the remote store forget everything."""
        if not self._is_redis_busy:
            with self._redis.client() as client:
                client.flushall()

    def flip_store(self) -> None:
        """Flip bits of the disk store, in its slots' headers or payloads."""
        for path in self._disk_dir.glob("*.store"):
            num_bytes = path.stat().st_size
            with contextlib.suppress(OSError), path.open("r+b", buffering=0) as store:
                for _ in range(20):
                    at = self.random.randrange(HEAD_BYTES, max(num_bytes, HEAD_BYTES + 1))
                    byte = os.pread(store.fileno(), 1, at) or b"\0"
                    os.pwrite(store.fileno(), bytes([byte[0] ^ 1 << self.random.randrange(8)]), at)

    def cut_store(self) -> None:
        """Cut the disk store short."""
        for path in self._disk_dir.glob("*.store"):
            num_bytes = max(path.stat().st_size, HEAD_BYTES)
            os.truncate(path, self.random.randrange(HEAD_BYTES, num_bytes + 1))

    def remove_store(self) -> None:
        """Remove the disk store's file."""
        for path in self._disk_dir.glob("*.store"):
            path.unlink()

    def _moment(self) -> float:
        """Return a number of seconds: mostly few, sometimes more than anybody waits."""
        return min(4.0, self.random.expovariate(2))

    def _mover(self) -> str:
        return self.random.choice(MOVERS)

    def _revive_redis(self) -> None:
        self._redis.come_up()
        self._is_redis_busy = False

    def _continue_redis(self) -> None:
        self._redis.go_on()
        self._is_redis_busy = False

    def _pause(self, process_id: int | None, seconds: float) -> None:
        self._signal(process_id, signal.SIGSTOP)
        self._after(seconds, lambda: self._signal(process_id, signal.SIGCONT))

    def _after(self, seconds: float, undo: Callable[[], None]) -> None:
        self._later.put(seconds, undo)

    @staticmethod
    def _signal(process_id: int | None, number: signal.Signals) -> None:
        if process_id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)
