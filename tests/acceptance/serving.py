"""A daemon of a test's own, whose processes can be killed, and helpers that look at its memory and pools."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlease import Client, DeadlineError, PlanInputs, UnavailableError, Worker

ROOT = Path(__file__).parents[2]
SECONDS_TO_START = 120.0
DEADLINE_SECONDS = 60.0
"""A deadline that even a busy machine keeps while the control process is restarted."""


class Serving:
    """A daemon of its own, started from the command line."""

    def __init__(self, runtime_dir: Path, *options: str) -> None:
        self.runtime_dir = runtime_dir
        self.options = options
        self.start()

    def start(self) -> None:
        """Start the daemon."""
        command = [
            sys.executable,
            "-m",
            "kvleased",
            "serve",
            "--runtime-dir",
            str(self.runtime_dir),
        ]
        options = ["--no-listen-tcp", "--drain-seconds", "0.1"]
        self.log = (self.runtime_dir.parent / "log").open("w+")
        self.process = subprocess.Popen(
            [*command, *options, *self.options], cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT
        )

    def address(self, scheme: str) -> str:
        """Return the daemon's address of one kind."""
        sockets = {"unix": "kvlease.sock", "http+unix": "http.sock", "grpc+unix": "grpc.sock"}
        return f"{scheme}://{self.runtime_dir}/{sockets[scheme]}"

    def wait_until_ready(self) -> None:
        """Wait until every socket answers."""
        self.until(
            lambda: all(
                (self.runtime_dir / name).exists()
                for name in ("kvlease.sock", "http.sock", "grpc.sock")
            )
        )
        self.until(self._answers)

    def _answers(self) -> bool:
        try:
            with Client(self.address("grpc+unix")) as grpc, Client(self.address("unix")) as local:
                return grpc.stats().epoch == local.stats().epoch
        except Exception:  # noqa: BLE001 - whatever it is, it is not ready
            return False

    def until(self, is_done: Callable[[], bool]) -> None:
        """Wait until the condition holds, for as long as the daemon lives."""
        end = time.monotonic() + SECONDS_TO_START
        while not is_done():
            assert self.process.poll() is None, (
                f"the daemon ended: {Path(self.log.name).read_text()}"
            )
            assert time.monotonic() < end, (
                f"what is waited for does not come: {Path(self.log.name).read_text()}"
            )
            time.sleep(0.02)

    def kill_control(self) -> None:
        """Kill the control process, which the supervisor restarts over the same memory."""
        os.kill(self.control(), signal.SIGKILL)

    def restart_control(self, worker: Worker) -> None:
        """Kill the control process, and wait until the next one knows the worker."""
        self.kill_control()
        self.until(lambda: _is_heard(worker))

    def restart(self, *, is_killed: bool) -> None:
        """Stop or kill the whole daemon, start it anew with other memory, and wait for another epoch."""
        with Client(self.address("unix")) as client:
            epoch = client.stats().epoch
        if is_killed:
            self.process.kill()
        self.stop()
        self.start()
        # An immediate answer may come from the old life, which ends only a moment after its supervisor is killed.
        self.until(lambda: self._answers() and self._epoch() != epoch)

    def _epoch(self) -> int:
        with Client(self.address("unix")) as client:
            return client.stats().epoch

    def control(self) -> int:
        """Return the process id of the control process."""
        with Client(self.address("unix")) as client:
            client.stats()
            transport: Any = client._port.transport
            peer = transport._pool._idle[0]._socket.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, 12
            )
        return int.from_bytes(peer[:4], "little")

    def stop(self) -> None:
        """Stop the daemon, or kill it if it does not stop."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()


@contextmanager
def served(runtime_dir: Path, *options: str) -> Iterator[Serving]:
    """Run a daemon, and give it once it is ready."""
    serving = Serving(runtime_dir, *options)
    try:
        serving.wait_until_ready()
        yield serving
    finally:
        serving.stop()


@contextmanager
def new_cache(serving: Serving, name: str, inputs: PlanInputs) -> Iterator[Client]:
    """Register a new cache, give its client, and delete the cache when its workers have gone."""
    with Client(
        serving.address("unix"), deadline_seconds=DEADLINE_SECONDS, on_doubt="raise"
    ) as client:
        client.register(name, inputs)
        serving.until(lambda: client.get_cache(name).status == "ready")
        yield client
        serving.until(lambda: client.stats(name).caches[0].num_workers == 0)
        client.delete_cache(name)


def _is_heard(worker: Worker) -> bool:
    try:
        worker.heartbeat()
    except (DeadlineError, UnavailableError):
        # On a busy machine the next control process may take longer to start than a call waits for it.
        return False
    return True


def told_in(file: Path) -> list[dict[str, Any]]:
    """Return what a daemon wrote into its log or trace file, without the line that it may be writing just now."""
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line[0] == "{" and line[-1] == "\n"]


def blocks_in_use(client: Client, cache: str) -> int:
    """Count the device blocks that somebody holds."""
    device = next(pool for pool in client.stats(cache).caches[0].pools if pool.tier == "device")
    return device.reserved + device.ready_held + device.filling + device.quarantined


def pool_of(worker: Worker) -> Any:
    """Return the device region with one row a block, as an array or, on a GPU, as `Rows`."""
    if worker.gpu is not None:
        from tests.gpu.contents import Rows  # noqa: PLC0415 - only where there is a GPU

        return Rows(worker)
    assert worker.device is not None
    return worker.device.reshape(worker.plan.num_blocks, worker.plan.bytes_per_block)


def command(address: str, *arguments: str) -> str:
    """Run `kvlease` and return what it prints."""
    program = Path(sys.executable).with_name("kvlease")
    run = subprocess.run(
        [program, *arguments, "--address", address],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout
