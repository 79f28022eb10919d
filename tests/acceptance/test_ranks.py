"""Ranks of one engine as processes: one is late, one is killed, and the daemon is killed under both."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvlease import Client, ParallelInputs, Worker, WrongStateError
from tests.acceptance.test_client import INPUTS, TOKENS, Serving, blocks_in_use

pytestmark = pytest.mark.acceptance

TOKENS_PER_BLOCK = 16
PROGRAM = """
import sys
from kvlease import Client
worker = Client({address!r}).attach("demo", engine="left", rank=1)
keys = worker.keys.chain(list(range(64)), 16)
print("attached", flush=True)
for line in sys.stdin:
    verb, _, number = line.strip().partition(" ")
    if verb == "reserve":
        lease = worker.reserve("r", num_tokens=64, keys=keys)
        print(lease.hit_tokens, lease.block_ids.tolist(), flush=True)
    elif verb == "extend":
        print(lease.extend(int(number)), lease.block_ids.tolist(), flush=True)
    elif verb == "commit":
        print(lease.commit(int(number), keys[: int(number) // 16 * 32]).num_committed, flush=True)
    elif verb == "evict":
        lease.evict()
        print(lease.is_evicted, flush=True)
    elif verb == "reload":
        print(lease.is_evicted, flush=True)
        lease.reload()
        print(lease.is_evicted, lease.block_ids.tolist(), flush=True)
    elif verb == "release":
        lease.release()
        print("released", flush=True)
"""


class RightRank:
    """A process that is rank 1 and follows orders."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def said(self) -> str:
        """Return the next line that the process prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def is_told(self, line: str) -> None:
        """Send the process an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def does(self, line: str) -> str:
        """Send the process an order, and return the line that it prints."""
        self.is_told(line)
        return self.said()


@contextmanager
def right_rank(daemon: Serving) -> Iterator[RightRank]:
    """Run a process that is rank 1."""
    program = PROGRAM.format(address=daemon.address("unix"))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            rank = RightRank(process)
            assert rank.said() == "attached"
            yield rank
        finally:
            process.kill()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Serving]:
    """Give a daemon of the test's own, with a cache of two ranks."""
    serving = Serving(tmp_path / "run")
    try:
        serving.wait_until_ready()
        with Client(serving.address("unix")) as client:
            inputs = replace(INPUTS, layout="LBHNC", parallel=ParallelInputs(tensor_ranks=2))
            client.register("demo", inputs)
            while client.get_cache("demo").status != "ready":
                time.sleep(0.01)
        yield serving
    finally:
        serving.stop()


@pytest.fixture
def client(daemon: Serving) -> Iterator[Client]:
    """Give a client of that daemon."""
    with Client(daemon.address("unix"), on_doubt="raise") as client:
        yield client


@pytest.fixture
def left(client: Client) -> Iterator[Worker]:
    """Attach this process as rank 0."""
    with client.attach("demo", engine="left", rank=0) as worker:
        yield worker


def test_a_late_rank_shares_the_lease_and_then_the_prefix_is_there(
    daemon: Serving, client: Client, left: Worker
) -> None:
    """Both ranks have the same blocks, and nothing is findable until the late one has committed, too."""
    keys = left.keys.chain(TOKENS, TOKENS_PER_BLOCK)
    with right_rank(daemon) as right:
        lease = left.reserve("r", num_tokens=64, keys=keys)
        assert lease.commit(64, keys).num_committed == 0
        assert lease.extend(96)
        assert left.lookup(keys).hit_tokens == 0

        told = right.does("reserve")
        assert told == f"0 {lease.block_ids.tolist()}"
        assert right.does("extend 96") == f"True {lease.block_ids.tolist()}"
        assert right.does("extend 112").startswith("True")
        assert right.does("commit 32") == "2"
        assert left.lookup(keys).hit_tokens == 32
        assert right.does("commit 64") == "2"
        assert left.lookup(keys).hit_tokens == 64

        assert lease.extend(112)
        assert right.does("extend 112") == f"True {lease.block_ids.tolist()}"
        lease.release()
        assert blocks_in_use(client, "demo") == 7
        assert right.does("release") == "released"
        assert blocks_in_use(client, "demo") == 0


def test_a_killed_rank_leaves_the_lease_to_the_other(
    daemon: Serving, client: Client, left: Worker
) -> None:
    """The other rank goes on; what the dead rank committed counts, the rest is never published."""
    keys = left.keys.chain(TOKENS, TOKENS_PER_BLOCK)
    with right_rank(daemon) as right:
        right.does("reserve")
        lease = left.reserve("r", num_tokens=64, keys=keys)
        with pytest.raises(WrongStateError, match="rank 1"):
            client.attach("demo", engine="left", rank=1)
        assert right.does("commit 16") == "0"
        right.process.kill()
        right.process.wait()
    daemon.until(lambda: len(client.inspect("demo", "workers").workers) == 1)

    assert lease.commit(64, keys).num_committed == 1
    assert lease.extend(96)
    assert left.lookup(keys).hit_tokens == 16
    assert blocks_in_use(client, "demo") == 6
    lease.release()
    assert blocks_in_use(client, "demo") == 0


def test_ranks_share_their_lease_over_the_death_of_the_daemon(
    daemon: Serving, client: Client, left: Worker
) -> None:
    """The next control process reads from the table's rows which ranks share which lease."""
    keys = left.keys.chain(TOKENS, TOKENS_PER_BLOCK)
    with right_rank(daemon) as right:
        right.does("reserve")
        lease = left.reserve("r", num_tokens=64, keys=keys)

        daemon.kill_control()

        assert lease.extend(96)
        assert right.does("extend 96") == f"True {lease.block_ids.tolist()}"
        assert lease.commit(64, keys).num_committed == 0
        assert right.does("commit 64") == "4"
        assert right.does("release") == "released"
        assert blocks_in_use(client, "demo") == 6
    lease.release()
    assert blocks_in_use(client, "demo") == 0


def test_a_rank_that_comes_back_to_an_evicted_lease_knows_that_it_is(
    daemon: Serving, left: Worker
) -> None:
    """The returning rank gets no blocks, reloads the lease as any owner would, and both have the same blocks."""
    with right_rank(daemon) as right:
        right.does("reserve")
        lease = left.reserve("r", num_tokens=64, keys=left.keys.chain(TOKENS, TOKENS_PER_BLOCK))
        right.is_told("evict")
        lease.evict()
        assert right.said() == "True"
        right.process.kill()
        right.process.wait()

    with right_rank(daemon) as right:
        assert right.does("reserve") == "0 []"
        assert right.does("reload") == "True"
        told = right.said()

    lease.reload()
    assert told == f"False {lease.block_ids.tolist()}"
