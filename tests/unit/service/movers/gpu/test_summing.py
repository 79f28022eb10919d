"""Checksums of slots are those of their bytes, in the order of the slots, whoever takes them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvleased.movers.gpu.summing import TASK_BYTES, Summing, num_threads
from kvleased.movers.rows import checksum


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Give threads."""
    with ThreadPoolExecutor(3) as threads:
        yield threads


@pytest.mark.parametrize(
    ("num_slots", "bytes_per_slot"),
    [
        pytest.param(40, 4096, id="small"),
        pytest.param(40, TASK_BYTES // 16, id="several tasks"),
        pytest.param(5, 5 << 20, id="larger than a task"),
    ],
)
def test_sums_come_in_the_order_of_the_slots(
    threads: ThreadPoolExecutor, num_slots: int, bytes_per_slot: int
) -> None:
    """Slots added in two parts have the checksums of their images, which may be shorter than the slots."""
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (num_slots, bytes_per_slot + 8), np.uint8)[:, :bytes_per_slot]
    order = random.permutation(num_slots).astype(np.int32)
    summing = Summing(images, threads)

    summing.add(order[:3])
    while not summing.is_over:
        summing.step()
    summing.add(order[3:])
    while not summing.is_over:
        summing.step()

    assert summing.sums.tolist() == [checksum(images[slot].data) for slot in order]
    assert not summing.step()


def test_nothing_added_is_nothing_to_wait_for(threads: ThreadPoolExecutor) -> None:
    """A batch without checksums is over as soon as its copies are."""
    summing = Summing(np.zeros((1, 1), np.uint8), threads)
    summing.add(np.empty(0, np.int32))

    assert summing.is_over
    assert not len(summing.sums)
    assert num_threads() >= 1
