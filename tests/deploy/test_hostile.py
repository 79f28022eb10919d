"""Ten thousand hostile requests cost whoever means well neither memory nor descriptors nor patience."""

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvlease import Client, Credentials, PlanInputs, Worker
from kvlease.spec import FullAttention
from tests.acceptance.serving import ROOT, Serving

pytestmark = pytest.mark.deploy

NUM_REQUESTS = int(os.environ.get("KVLEASE_HOSTILE", "10000"))
PER_SECOND = 250.0
"""At which the machine has room for both; what is measured is what a stranger costs, not who gets the processor."""
CONNECTIONS_MAX = 128
NUM_CALLS = 3_000
FACTOR_MAX = 2.0


class Looks(NamedTuple):
    """What the process that serves uses."""

    rss_kib: int
    num_fds: int


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """A daemon with little patience, and a cache."""
    options = [
        "--listen-tcp",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--max-connections",
        str(CONNECTIONS_MAX),
    ]
    options += ["--head-seconds-max", "2", "--body-seconds-max", "2", "--idle-seconds-max", "4"]
    made = Serving(tmp_path / "run", *options)
    try:
        made.wait_until_ready()
        layers = [FullAttention(name="l", num_kv_heads=1, head_size=16, dtype="float16")]
        with Client(made.address("unix")) as client:
            client.register(
                "main", PlanInputs(layers=layers, tokens_per_block=16, device_blocks=64)
            )
            made.until(lambda: client.get_cache("main").status == "ready")
        yield made
    finally:
        made.stop()


def test_hostile_requests_cost_others_nothing(serving: Serving) -> None:
    """Memory and descriptors stay within bounds, and every call of a well-behaved worker is answered.

    How long those calls took is printed, for the hostile take the machine's cores as well: `pytest -s` shows it.
    """
    pid, (http_port, grpc_port) = serving.control(), _ports(Path(serving.log.name))
    credentials = Credentials(token=(serving.runtime_dir / "operator.token").read_text().strip())
    address = f"http://127.0.0.1:{http_port}"
    with (
        Client(serving.address("unix"), on_doubt="raise") as local,
        Client(address, on_doubt="raise", credentials=credentials) as remote,
        local.attach("main") as worker,
        local.attach("main") as other,
    ):
        remote.stats()
        _percentile(worker, NUM_CALLS)
        before, calm = _look(pid), _percentile(worker, NUM_CALLS)
        command = [sys.executable, "-m", "tests.deploy.hostile", str(serving.runtime_dir)]
        command += [str(http_port), str(grpc_port), str(NUM_REQUESTS), str(PER_SECOND)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as foe:
            watching = _Watching(pid)
            watching.start()
            stormy = [_percentile(worker, NUM_CALLS // 4) for _ in _until_ended(foe)]
            watching.is_over.set()
            watching.join()
            assert foe.stdout is not None
            outcomes = json.loads(foe.stdout.read())
        serving.until(lambda: _look(pid).num_fds <= before.num_fds + 4)
        again, after = _percentile(other, NUM_CALLS), _look(pid)

    figures = {
        "rss_kib": (before.rss_kib, watching.worst.rss_kib, after.rss_kib),
        "num_fds": (before.num_fds, watching.worst.num_fds, after.num_fds),
        "p99_microseconds": (calm * 1e6, statistics.median(stormy) * 1e6, again * 1e6),
    }
    sys.stdout.write(f"{json.dumps(figures)}\n{json.dumps(outcomes)}\n")
    assert sum(sum(one.values()) for one in outcomes.values()) == NUM_REQUESTS
    assert not [
        name for name, one in outcomes.items() if one.get("patient", 0) > NUM_REQUESTS // 100
    ], outcomes
    assert watching.worst.rss_kib <= FACTOR_MAX * before.rss_kib, figures
    assert watching.worst.num_fds <= before.num_fds + 3 * CONNECTIONS_MAX + 16, figures
    log = Path(serving.log.name).read_text()
    assert "Traceback" not in log
    assert len(log.splitlines()) < 1000


class _Watching(threading.Thread):
    """Looks at the daemon all the time, and keeps the worst."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid
        self.is_over = threading.Event()
        self.worst = Looks(0, 0)

    def run(self) -> None:
        """Look."""
        while not self.is_over.wait(0.1):
            now = _look(self._pid)
            self.worst = Looks(
                max(self.worst.rss_kib, now.rss_kib), max(self.worst.num_fds, now.num_fds)
            )


def _until_ended(foe: "subprocess.Popen[str]") -> Iterator[None]:
    while foe.poll() is None:
        yield


def _percentile(worker: Worker, num_calls: int) -> float:
    """Return the 99th percentile of the seconds that a reserve and its release take."""
    seconds = []
    for number in range(num_calls):
        begun = time.perf_counter()
        worker.reserve(f"good-{number}", num_tokens=64).release()
        seconds.append(time.perf_counter() - begun)
    return statistics.quantiles(seconds, n=100)[98]


def _look(pid: int) -> Looks:
    status = Path(f"/proc/{pid}/status").read_text()
    rss = re.search(r"VmRSS:\s+(\d+)", status)
    assert rss is not None
    return Looks(int(rss[1]), len([*Path(f"/proc/{pid}/fd").iterdir()]))


def _ports(log: Path) -> tuple[int, int]:
    """Return the ports of REST and gRPC, which the daemon tells when it is ready."""
    text = log.read_text()
    http, grpc = (
        re.search(r"http://127.0.0.1:(\d+)", text),
        re.search(r"grpc://127.0.0.1:(\d+)", text),
    )
    assert http is not None
    assert grpc is not None
    return int(http[1]), int(grpc[1])
