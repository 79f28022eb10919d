"""Checksums of slots are those of their bytes, in the order of the slots, whoever takes them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvleased.movers.gpu.summing import STEP_BYTES, THREADED_BYTES, Summing, num_threads
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
        pytest.param(40, THREADED_BYTES - 1, id="nearly large"),
        pytest.param(40, THREADED_BYTES, id="large"),
        pytest.param(5, 5 << 20, id="larger than a task"),
    ],
)
def test_sums_come_in_the_order_of_the_slots(
    threads: ThreadPoolExecutor, num_slots: int, bytes_per_slot: int
) -> None:
    """Slots added in two parts have the checksums of their images, which may be shorter than the slots."""
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (num_slots, bytes_per_slot + 8), np.uint8)[:, :bytes_per_slot]
    order = random.permutation(num_slots).tolist()
    summing = Summing(images, threads)

    summing.add(order[:3])
    while not summing.is_over:
        summing.step()
    summing.add(order[3:])
    while not summing.is_over:
        summing.step()

    assert summing.sums == [checksum(images[slot].data) for slot in order]
    assert not summing.step()


def test_a_look_takes_no_longer_than_some_bytes_do(threads: ThreadPoolExecutor) -> None:
    """Small slots are summed a few at each look, so that other batches are looked at meanwhile."""
    slots_a_step = STEP_BYTES // 4096
    summing = Summing(np.zeros((3 * slots_a_step, 4096), np.uint8), threads)
    summing.add(range(2 * slots_a_step + 1))

    summing.step()

    assert len(summing.sums) == slots_a_step
    assert not summing.is_over


def test_nothing_added_is_nothing_to_wait_for(threads: ThreadPoolExecutor) -> None:
    """A batch without checksums is over as soon as its copies are."""
    summing = Summing(np.zeros((1, 1), np.uint8), threads)
    summing.add([])

    assert summing.is_over
    assert not summing.sums
    assert num_threads() >= 1
