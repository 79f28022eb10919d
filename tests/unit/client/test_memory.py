"""Laws of mapped memory: a process sees the region of its own rank, all of it or nothing."""

import os
from contextlib import closing

import pytest

from kvlease.errors import LayoutMismatchError
from kvlease.memory import WorkerMemory
from kvlease.plan import ParallelInputs, PlanInputs, RankInputs
from kvlease.spec import FullAttention
from kvlease.transports._frames import close_all
from kvlease.transports.base import Attached
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.planning import plan

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
    """Return what an attach of a rank hands over."""
    size = PLAN.ranks[rank].device_bytes if region_bytes is None else region_bytes
    fd = os.memfd_create("device", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    region = pb.Region(kind="device", region_bytes=size)
    return Attached(pb.AttachResponse(regions=[region]), [fd])


@pytest.mark.parametrize("rank", range(3))
def test_device_is_the_region_of_the_rank(rank: int) -> None:
    """The array has the bytes of the rank's pool, and none where the rank keeps nothing."""
    answer = attached(rank)

    with closing(WorkerMemory.mapped(answer, PLAN, rank)) as memory:
        assert memory.device is not None
        assert len(memory.device) == PLAN.ranks[rank].device_bytes

    assert (PLAN.ranks[rank].device_bytes == 0) == (rank == 2)
    close_all(answer.fds)


def test_region_of_another_rank_is_refused() -> None:
    """A region smaller than the rank's pool would be written beyond its end."""
    answer = attached(0)

    with pytest.raises(LayoutMismatchError) as refusal:
        WorkerMemory.mapped(answer, PLAN, 1)

    assert (refusal.value.need, refusal.value.available) == (
        PLAN.ranks[1].device_bytes, PLAN.ranks[0].device_bytes,
    )  # fmt: skip
    close_all(answer.fds)


def test_rank_that_the_plan_lacks_is_refused() -> None:
    """A process of a rank that the daemon's plan does not have maps nothing."""
    answer = attached(0)

    with pytest.raises(LayoutMismatchError, match="rank 3"):
        WorkerMemory.mapped(answer, PLAN, 3)

    close_all(answer.fds)
