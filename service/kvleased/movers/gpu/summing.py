"""Own how checksums of slots are taken beside a GPU's copies: large slots by threads, small ones a few at each look.

One thread sums a fifth of what a bus brings. Threads help only where slots are large: while it sums a small one, the
library lets no other thread run.
"""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Final

from kvlease.geometry import ceil_div
from kvleased.movers.rows import Pool, checksum

STEP_BYTES: Final = 4 << 20
"""Bytes of small slots that are summed before the next look at what else there is to do."""
TASK_BYTES: Final = 2 << 20
"""Bytes of large slots that a thread sums in one go."""
THREADED_BYTES: Final = 256 << 10
"""Bytes of a slot from which on threads are worth it: of smaller ones the handing over takes as long as the sum."""
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
        self._due: deque[int] = deque()
        self._futures: deque[Future[list[int]]] = deque()
        self._sums: list[int] = []

    def __repr__(self) -> str:
        """Show how far it is."""
        return f"<Summing {len(self._sums)} summed, {len(self._due)} due>"

    @property
    def is_over(self) -> bool:
        """Whether all slots that were added have been summed."""
        return not self._due and not self._futures

    @property
    def sums(self) -> list[int]:
        """The checksums taken so far."""
        return self._sums

    def add(self, slot_ids: Sequence[int]) -> None:
        """Sum more slots, whose bytes are there."""
        bytes_per_slot = self._images.shape[1]
        if bytes_per_slot < THREADED_BYTES:
            self._due.extend(slot_ids)
            return
        slots_a_task = ceil_div(TASK_BYTES, bytes_per_slot)
        self._futures.extend(
            self._threads.submit(self._summed, slot_ids[start : start + slots_a_task])
            for start in range(0, len(slot_ids), slots_a_task)
        )

    def step(self) -> bool:
        """Do what can be done without waiting, but not for long; tell whether anything was done."""
        num_before = len(self._sums)
        while self._futures and self._futures[0].done():
            self._sums += self._futures.popleft().result()
        if self._due:
            num_now = min(len(self._due), max(1, STEP_BYTES // max(1, self._images.shape[1])))
            self._sums += self._summed([self._due.popleft() for _ in range(num_now)])
        return len(self._sums) > num_before

    def _summed(self, slot_ids: Sequence[int]) -> list[int]:
        return [checksum(self._images[slot].data) for slot in slot_ids]
