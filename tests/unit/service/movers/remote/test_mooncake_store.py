"""A real Mooncake Store serves like any other store: whole values or misses, in time, and again after a fault."""

import importlib.util
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from threading import Timer
from typing import Final

import numpy as np
import pytest

from kvleased.movers.remote.value import ValueForm, blocks_of
from tests.servers import mooncake
from tests.servers.mooncake import MooncakeMaster
from tests.unit.service.movers.remote.remote_node import (
    FINGERPRINT,
    NUM_SLOTS,
    SLOT_BYTES,
    Node,
    labels,
    served_by_process,
    wait_until,
)

EVERY_SLOT = list(range(NUM_SLOTS))
_LINE_SECONDS_MAX: Final = 30.0
_PUT_BYTES = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 26, 1 << 25, "tcp", "", sys.argv[1]) == 0
for name in sys.argv[3:]:
    assert store.put(name, bytes(int(sys.argv[2]))) == 0
print("put", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """A master that the test may kill."""
    server = MooncakeMaster(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def node(master: MooncakeMaster) -> Iterator[Node]:
    """A node that uses it as its store."""
    with served_by_process(master.url, environment=mooncake.environment()) as (node, _):
        node.until_on()
        yield node


def test_what_one_node_shares_another_fetches(master: MooncakeMaster, node: Node) -> None:
    """Blocks come whole from another client's memory; a block that nobody has is a miss."""
    with served_by_process(master.url, environment=mooncake.environment(), seed=2) as (there, _):
        shared = node.share(EVERY_SLOT, EVERY_SLOT, sums=node.sums(EVERY_SLOT))
        asked = there.ask([*EVERY_SLOT, 99])
        fetched = there.fetch([20, 3, 4, 5], [7, 0, 99, 11])

        assert shared.failed == ()
        assert asked == bytes([1] * NUM_SLOTS + [0])
        assert fetched.failed == (2,)
        for block_id, slot_id in ((20, 7), (3, 0), (5, 11)):
            assert np.array_equal(there.block(block_id), node.slots[slot_id])
        assert not there.block(4).any()


def test_values_larger_than_a_call_travel_whole(master: MooncakeMaster) -> None:
    """A value above one call's limit takes a call of its own."""
    environment = mooncake.environment()
    shape = {"page_bytes": 5 << 19, "num_slots": 2, "num_blocks": 3}
    with served_by_process(master.url, environment=environment, **shape) as (node, _):
        assert node.share([0, 1], [0, 1]).failed == ()
        assert node.fetch([2, 0], [0, 1]).failed == ()
        assert np.array_equal(node.block(2), node.slots[0])


@pytest.mark.parametrize("excess_bytes", [0, -1, 1])
def test_foreign_value_is_a_miss_and_makes_room(
    master: MooncakeMaster, node: Node, excess_bytes: int
) -> None:
    """A value that another client put under one of our names is never taken for ours, and ours can take its name."""
    form = ValueForm.of(FINGERPRINT, SLOT_BYTES)
    assert form is not None
    names = [form.name(block) for block in blocks_of(labels([0]))]
    command = [sys.executable, "-c", _PUT_BYTES, f"127.0.0.1:{master.port}"]
    command += [str(form.value_bytes + excess_bytes), *names]
    environment = {"PATH": "", **mooncake.environment()}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        wait_until(lambda: other.stdout.readline() == b"put\n")
        node.share([1], [1])
        fetched = node.fetch([5, 6], [0, 1])

        assert fetched.failed == (0,)
        assert not node.block(5).any()
        assert np.array_equal(node.block(6), node.slots[1])

        assert node.share([0], [0]).failed == ()
        assert node.fetch([5], [0]).failed == ()
        assert np.array_equal(node.block(5), node.slots[0])


def test_store_that_nobody_lends_memory_says_so_and_stays_on(master: MooncakeMaster) -> None:
    """A store without memory takes nothing; the log says once what to do, and what the store has is still asked for."""
    url = master.url.replace("segment_bytes=67108864&", "")
    with served_by_process(url, environment=mooncake.environment()) as (node, process):
        node.until_on()

        refused = [node.share([0, 1], [0, 1]).failed for _ in range(2)]

        assert refused == [(0, 1), (0, 1)]
        assert node.ask([0]) == b"\0"
        assert process.stderr is not None
        lines = (line for line in process.stderr if b"remote_puts_refused" in line)
        # A thread writes the log, so the line may come after the answers.
        too_late = Timer(_LINE_SECONDS_MAX, process.kill)
        too_late.start()
        told = list(islice(lines, 1))
        too_late.cancel()
        process.kill()
        told += lines
    assert len(told) == 1
    assert b"raise segment_bytes in remote_url" in told[0]


def test_killed_master_gives_misses_and_comes_back(master: MooncakeMaster) -> None:
    """Without its master a store gives misses, although its library blocks for seconds; later it is used again."""
    environment = mooncake.environment()
    with served_by_process(master.url, environment=environment, ms_max=1_000) as (node, process):
        node.until_on()
        node.share([0], [0])
        master.kill()

        failed = [node.fetch([5], [0]).failed for _ in range(20)]
        shared = node.share([1], [1]).failed
        wait_until(lambda: node.ask([0]) == b"" and any(not one.is_on for one in node.statuses))
        master.come_up()
        node.statuses.clear()

        assert failed == [(0,)] * 20
        assert shared == (0,)
        node.until_on()
        wait_until(lambda: node.share([1], [1]).failed == ())
        assert node.fetch([6], [1]).failed == ()
        assert np.array_equal(node.block(6), node.slots[1])
        assert process.poll() is None


def test_stopped_master_gives_misses_and_comes_back(master: MooncakeMaster) -> None:
    """A master that hangs costs one budget, however long its library waits, and is used again when it goes on."""
    environment = mooncake.environment()
    with served_by_process(master.url, environment=environment, ms_max=1_000) as (node, process):
        node.until_on()
        node.share([0], [0])
        master.stop()
        try:
            failed = [node.fetch([5], [0]).failed for _ in range(20)]
            asked = [node.ask([0]) for _ in range(20)]
        finally:
            master.go_on()

        assert failed == [(0,)] * 20
        assert asked == [b""] * 20
        wait_until(lambda: node.fetch([5], [0]).failed == ())
        assert np.array_equal(node.block(5), node.slots[0])
        assert process.poll() is None


def test_master_that_is_not_there_is_said(tmp_path: Path) -> None:
    """A mover whose master was never there starts and says why there are only misses."""
    gone = MooncakeMaster(tmp_path)
    gone.kill()

    with served_by_process(gone.url, ms_max=1_000, environment=mooncake.environment()) as (node, _):
        assert not node.status().is_on
        assert node.fetch([0], [0]).failed == (0,)


def test_trial_of_a_master_ends_with_its_mover() -> None:
    """A mover that is killed while it tries a silent master leaves no process, which would try for minutes."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("kvlease[mooncake] is not installed")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"mooncake://127.0.0.1:{silent.getsockname()[1]}?host=127.0.0.1"
        with served_by_process(url, environment=mooncake.environment()) as (_, process):
            # The trial has begun once it has connected.
            silent.settimeout(60)
            silent.accept()[0].close()
            (trial,) = (os.pidfd_open(pid) for pid in _children(process.pid))

            process.kill()

            assert select.select([trial], [], [], 10)[0]
            os.close(trial)


def _children(pid: int) -> list[int]:
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in " ".join(found).split()]
