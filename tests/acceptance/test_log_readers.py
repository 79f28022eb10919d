"""A daemon whose log is not read, or cannot be written, serves as usual, and its memory survives a kill."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease import Client, PlanInputs
from kvlease.spec import FullAttention
from tests.acceptance.serving import ROOT, Serving

pytestmark = pytest.mark.acceptance

SMALLEST_PIPE_BYTES = 4096
NUM_ATTACHED = 30
"""Enough attaches that their log lines overflow a small pipe."""


class Unread(Serving):
    """A daemon whose standard streams are what a test gives it."""

    def __init__(self, directory: Path, streams: int | None) -> None:
        self.streams = streams
        super().__init__(directory / "run")

    def start(self) -> None:
        """Start the daemon with the test's streams, or with none at all."""
        serve = [sys.executable, "-m", "kvleased", "serve", "--runtime-dir", str(self.runtime_dir)]
        options = ["--no-listen-tcp", "--drain-seconds", "0.1"]
        closed = ["/bin/sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-'] if self.streams is None else []
        self.log = (self.runtime_dir.parent / "log").open("w+")
        self.process = subprocess.Popen(
            [*closed, *serve, *options], cwd=ROOT, stdout=self.streams, stderr=self.streams
        )


@pytest.fixture(
    params=[
        "gone",
        "stopped",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("full", "closed")),
    ]
)
def unread(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Unread]:
    """Run a daemon whose log's reader is gone or reads nothing, whose disk is full, or that has no stream."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE_BYTES)
    full = os.open("/dev/full", os.O_WRONLY)
    streams = {"full": full, "closed": None}.get(request.param, writer)
    serving = Unread(tmp_path, streams)
    os.close(writer)
    try:
        if request.param == "gone":
            os.read(reader, 1)
            os.close(reader)
        serving.wait_until_ready()
        yield serving
    finally:
        serving.stop()
        os.close(full)
        if request.param != "gone":
            os.close(reader)


def test_log_that_nobody_reads_holds_up_nobody(unread: Unread) -> None:
    """All verbs are answered, a killed control process comes back over the same memory, and the daemon ends."""
    layers = [FullAttention(name="l", num_kv_heads=1, head_size=16, dtype="float16")]
    with Client(unread.address("unix"), on_doubt="raise", deadline_seconds=60) as client:
        client.register("main", PlanInputs(layers=layers, tokens_per_block=16, device_blocks=64))
        unread.until(lambda: client.get_cache("main").status == "ready")
        for _ in range(NUM_ATTACHED):
            client.attach("main").close()
        with client.attach("main") as worker:
            lease = worker.reserve("kept", num_tokens=64)

            unread.restart_control(worker)

            lease.extend(80)
            assert len(lease.block_ids) == 5
    unread.stop()

    assert unread.process.returncode == 0
    assert not [path for path in unread.runtime_dir.iterdir() if path.is_socket()]


def test_standard_stream_is_never_a_socket(tmp_path: Path) -> None:
    """No descriptor that the daemon opens takes a closed stream's number, where the log would be written to it."""
    serving = Unread(tmp_path, None)
    try:
        serving.wait_until_ready()
        for fd in range(3):
            stream = Path(f"/proc/{serving.control()}/fd/{fd}")
            assert stream.readlink() == Path(os.devnull)
    finally:
        serving.stop()
