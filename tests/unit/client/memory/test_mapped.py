"""Laws of mapped memory: a process sees the region of its own rank, all of it or nothing."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from kvlease.errors import InvalidError, LayoutMismatchError
from kvlease.memory.mapped import PHASE_ACTIVE, WorkerMemory, table_parts
from kvlease.plan import ParallelInputs, PlanInputs, RankInputs
from kvlease.spec import FullAttention, SlidingWindow
from kvlease.tables import TableLayout
from kvlease.transports._frames import close_all
from kvlease.transports.base import Attached
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.planning import plan
from tests.unit.client.frame_server import FrameServer, Regions

LAYERS = tuple(
    FullAttention(name=name, num_kv_heads=1, head_size=16, dtype="float16") for name in "abc"
)
PLAN = plan(
    PlanInputs(
        layers=LAYERS,
        tokens_per_block=16,
        device_blocks=4,
        parallel=ParallelInputs(pipeline_ranks=3),
        ranks=(
            RankInputs(layers=LAYERS[:1]),
            RankInputs(layers=LAYERS[1:]),
            RankInputs(keeps_nothing=True),
        ),
    )
)


def attached(rank: int, region_bytes: int | None = None) -> Attached:
    """Return the answer to a rank's attach."""
    size = PLAN.ranks[rank].device_bytes if region_bytes is None else region_bytes
    fd = os.memfd_create("device", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    region = pb.Region(kind="device", region_bytes=size)
    return Attached(pb.AttachResponse(regions=[region]), [fd])


@pytest.mark.parametrize("rank", range(3))
def test_device_is_the_region_of_the_rank(rank: int) -> None:
    """The array has the bytes of the rank's pool, and no byte where the rank keeps nothing."""
    answer = attached(rank)

    with closing(WorkerMemory.mapped(answer, PLAN, rank)) as memory:
        assert memory.device is not None
        assert len(memory.device) == PLAN.ranks[rank].device_bytes

    assert (PLAN.ranks[rank].device_bytes == 0) == (rank == 2)
    close_all(answer.fds)


def test_region_of_another_rank_is_refused() -> None:
    """A region that is smaller than the rank's pool is refused: it would be written beyond its end."""
    answer = attached(0)

    with pytest.raises(LayoutMismatchError) as refusal:
        WorkerMemory.mapped(answer, PLAN, 1)

    assert (refusal.value.need, refusal.value.available) == (
        PLAN.ranks[1].device_bytes, PLAN.ranks[0].device_bytes,
    )  # fmt: skip
    close_all(answer.fds)


def test_rank_that_the_plan_lacks_is_refused() -> None:
    """A rank that the daemon's plan does not have maps nothing."""
    answer = attached(0)

    with pytest.raises(LayoutMismatchError, match="rank 3"):
        WorkerMemory.mapped(answer, PLAN, 3)

    close_all(answer.fds)


@pytest.mark.parametrize(
    ("device_uuid", "mapped_bytes", "says"),
    [
        pytest.param("no such", 2 << 20, "device|GPU", id="a GPU that is not there"),
        pytest.param("no such", 1, "the plan needs", id="less than the region"),
    ],
)
def test_region_on_a_gpu_that_cannot_be_mapped_is_refused(
    device_uuid: str, mapped_bytes: int, says: str
) -> None:
    """A process without the driver, or with another GPU, maps nothing and is told why."""
    answer = attached(0)
    answer.response.regions[0].device_uuid = device_uuid
    answer.response.regions[0].mapped_bytes = mapped_bytes

    with pytest.raises((InvalidError, LayoutMismatchError), match=says):
        WorkerMemory.mapped(answer, PLAN, 0)

    close_all(answer.fds)


TWO_GROUPS = plan(
    PlanInputs(
        layers=(
            FullAttention(name="full", num_kv_heads=1, head_size=16, dtype="float16"),
            SlidingWindow(
                name="window", num_kv_heads=1, head_size=16, dtype="float16", window_tokens=32
            ),
        ),
        tokens_per_block=16,
        device_blocks=32,
        longest_request_tokens=128,
    )
)


@pytest.fixture
def written() -> Iterator[tuple[WorkerMemory, dict[str, Any]]]:
    """Give the memory of a worker that has mapped only a table, and the columns as the daemon writes them."""
    layout = TableLayout(4, table_parts(TWO_GROUPS.groups))
    fd = os.memfd_create("tables", os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.region_bytes)
    region = pb.Region(kind="tables", region_bytes=layout.region_bytes, read_only=True)
    columns = layout.columns(memoryview(mmap.mmap(fd, layout.region_bytes)))
    answer = Attached(pb.AttachResponse(regions=[region]), [fd])
    with closing(WorkerMemory.mapped(answer, TWO_GROUPS, 0)) as memory:
        yield memory, columns
    close_all(answer.fds)


@pytest.mark.parametrize(("phase", "is_active"), [(PHASE_ACTIVE, True), (PHASE_ACTIVE + 1, False)])
def test_row_has_the_blocks_of_all_groups(
    written: tuple[WorkerMemory, dict[str, Any]], phase: int, is_active: bool
) -> None:
    """A row has a lease's blocks group by group, published or not, with 0 at places that need no block."""
    memory, columns = written
    second = TWO_GROUPS.groups[0].table_blocks
    columns["lease_id"][2], columns["phase"][2] = 9, phase
    columns["num_blocks"][2] = (2, 3)
    columns["block_ids"][2, :2] = (5, 6)
    columns["block_ids"][2, second : second + 3] = (-1, 7, 8)

    row = memory.row(2, 9)

    assert row is not None
    assert (row.is_active, row.block_ids.tolist()) == (is_active, [5, 6, 0, 7, 8])
    assert (row.num_blocks.tolist(), row.block_ids.dtype.name) == ([2, 3], "int32")


@pytest.mark.parametrize(("row", "lease_id"), [(1, 9), (2, 8), (400, 9)])
def test_row_of_another_lease_is_not_shown(
    written: tuple[WorkerMemory, dict[str, Any]], row: int, lease_id: int
) -> None:
    """A lease is shown only by a row that belongs to it."""
    memory, columns = written
    columns["lease_id"][2] = 9

    assert memory.row(row, lease_id) is None


CHILD = """
import faulthandler, os, signal, sys
from kvlease import Client

client = Client("unix://" + sys.argv[1], on_doubt="raise")
worker = client.attach("demo")
device = worker.device

def ended(act):
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def own():
    with Client("unix://" + sys.argv[1], on_doubt="raise") as mine, mine.attach("demo") as other:
        worker.close()
        other.device[:] = 5

def write():
    device[0] = 7

device[0] = 3
print(ended(write) == -signal.SIGSEGV, ended(lambda: device[0]) == -signal.SIGSEGV, device[0])
print(ended(own), device[0])
print(ended(worker.close), device[0])
worker.close()
"""
"""A process whose forked children touch its mapped memory; the last ones have memory of their own, or end normally."""


def test_forked_child_has_no_memory_of_its_parent(tmp_path: Path) -> None:
    """A child that touches a region ends at once; the parent's is unchanged, and the child may attach for itself."""

    def answered(call: pb.Call) -> Message:
        return pb.DetachResponse() if call.HasField("detach") else regions.attached()

    with (
        Regions() as regions,
        FrameServer(path=tmp_path / "s", answer=answered, fds=regions.fds) as server,
    ):
        command = [sys.executable, "-c", CHILD, str(server.path)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ran.stdout.split() == ["True", "True", "3", "0", "5", "0", "5"], ran.stderr
