"""Own how checksums of slots are taken beside a GPU's copies: by threads, some slots at a time.

One thread sums a fifth of what a bus brings. While compiled loops sum, other threads run, however small the slots are.
"""

import os
from collections import deque
from concurrent.futures import Executor, Future
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.geometry import ceil_div
from kvleased.movers.compiled import loops
from kvleased.movers.rows import Pool, checksums

TASK_BYTES: Final = 2 << 20
"""Bytes of slots that a thread sums in one go; handing them over takes a fifth of that time."""
THREADS_MAX: Final = 8
"""Threads that sum, if each has a core; beyond these, no size of a slot gains by more."""


def num_threads() -> int:
    """Return how many threads are to sum: at most the cores that this process may use."""
    return min(THREADS_MAX, len(os.sched_getaffinity(0)))


class Summing:
    """The checksums of some slots, in the order in which the slots are added."""

    def __init__(self, images: Pool, threads: Executor) -> None:
        """Take the slots' bytes, [slots, bytes], of which none may be summed yet."""
        self._images = images
        self._threads = threads
        self._futures: deque[Future[NDArray[np.uint64]]] = deque()
        self._sums: list[NDArray[np.uint64]] = []

    def __repr__(self) -> str:
        """Show how far it is."""
        return f"<Summing {len(self.sums)} summed, {len(self._futures)} tasks due>"

    @property
    def is_over(self) -> bool:
        """Whether all slots that were added have been summed."""
        return not self._futures

    @property
    def sums(self) -> NDArray[np.uint64]:
        """The checksums taken so far."""
        return np.concatenate([*self._sums, np.empty(0, np.uint64)])

    def add(self, slot_ids: NDArray[np.int32]) -> None:
        """Have more slots summed, whose bytes are there."""
        slots_a_task = ceil_div(TASK_BYTES, max(1, self._images.shape[1]))
        self._futures.extend(
            self._threads.submit(self._summed, slot_ids[start : start + slots_a_task])
            for start in range(0, len(slot_ids), slots_a_task)
        )

    def step(self) -> bool:
        """Take the sums that are there, without waiting; tell whether there were any."""
        num_before = len(self._futures)
        while self._futures and self._futures[0].done():
            self._sums.append(self._futures.popleft().result())
        return len(self._futures) < num_before

    def _summed(self, slot_ids: NDArray[np.int32]) -> NDArray[np.uint64]:
        return checksums(loops().sum(self._images, slot_ids))
