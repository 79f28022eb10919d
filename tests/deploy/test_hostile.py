"""Ten thousand hostile requests leave memory and descriptors bounded, and every good call answered."""

import json
import os
import re
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvlease import Client, Credentials
from tests.acceptance.serving import Serving
from tests.deploy.besieged import CONNECTIONS_MAX, attack, besieged, percentile, ports, until_ended

pytestmark = pytest.mark.deploy

NUM_REQUESTS = int(os.environ.get("KVLEASE_HOSTILE", "10000"))
NUM_CALLS = 3_000
FACTOR_MAX = 2.0


class Looks(NamedTuple):
    """What the control process uses."""

    rss_kib: int
    num_fds: int


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """Run the daemon to be attacked."""
    with besieged(tmp_path / "run") as made:
        yield made


def test_hostile_requests_cost_others_nothing(serving: Serving) -> None:
    """Memory and descriptors stay within bounds, and every call of a well-behaved worker is answered.

    How long those calls take is measured by `make bench ONLY=hostile`.
    """
    pid, (http_port, _) = serving.control(), ports(Path(serving.log.name))
    credentials = Credentials(token=(serving.runtime_dir / "operator.token").read_text().strip())
    address = f"http://127.0.0.1:{http_port}"
    with (
        Client(serving.address("unix"), on_doubt="raise") as local,
        Client(address, on_doubt="raise", credentials=credentials) as remote,
        local.attach("main") as worker,
        local.attach("main") as other,
    ):
        remote.stats()
        percentile(worker, NUM_CALLS)
        before, calm = _look(pid), percentile(worker, NUM_CALLS)
        with attack(serving, NUM_REQUESTS) as foe:
            watching = _Watching(pid)
            watching.start()
            stormy = [percentile(worker, NUM_CALLS // 4) for _ in until_ended(foe)]
            watching.is_over.set()
            watching.join()
            assert foe.stdout is not None
            outcomes = json.loads(foe.stdout.read())
        serving.until(lambda: _look(pid).num_fds <= before.num_fds + 4)
        again, after = percentile(other, NUM_CALLS), _look(pid)

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
    """A thread that measures the daemon all the time, and keeps the worst figures."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid
        self.is_over = threading.Event()
        self.worst = Looks(0, 0)

    def run(self) -> None:
        """Measure until told to stop."""
        while not self.is_over.wait(0.1):
            now = _look(self._pid)
            self.worst = Looks(
                max(self.worst.rss_kib, now.rss_kib), max(self.worst.num_fds, now.num_fds)
            )


def _look(pid: int) -> Looks:
    status = Path(f"/proc/{pid}/status").read_text()
    rss = re.search(r"VmRSS:\s+(\d+)", status)
    assert rss is not None
    return Looks(int(rss[1]), len([*Path(f"/proc/{pid}/fd").iterdir()]))
