"""Own the populating of caches' memory in the background; callers say what is populated, and what follows."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from kvleased.caches.entries import CacheEntry
from kvleased.memory import cpu, regions
from kvleased.memory.shortages import ADVICE, MemoryShortages

_ENDS_MAX: Final = 2
"""Ends of the control process amid populating, and earlier failures, after which a cache is given up."""
_LOG: Final = structlog.get_logger()


class Populator:
    """Populates the memory of caches, in one task for each; a cache whose memory cannot be had is given up."""

    def __init__(
        self,
        chunk_bytes: int,
        memory_shortages: MemoryShortages,
        *,
        begin: Callable[[CacheEntry], None],
        make_ready: Callable[[CacheEntry], None],
        give_up: Callable[[CacheEntry], None],
    ) -> None:
        """Take the bytes populated in one go, and what is called when a cache begins, is ready, or is given up."""
        self._chunk_bytes = chunk_bytes
        self._memory_shortages = memory_shortages
        self._begin = begin
        self._turn = asyncio.Lock()
        """Makes caches take turns whose populating an earlier life did not finish.

        If one of them ends the control process again, it is then clear which.
        """
        self._make_ready = make_ready
        self._give_up = give_up
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """The tasks under way, by cache."""

    def start(self, entry: CacheEntry, sizes: Mapping[str, int]) -> None:
        """Begin to populate the regions of a cache; `sizes` has their bytes by kind."""
        task = asyncio.ensure_future(self._populate(entry, sizes))
        self.tasks[entry.name] = task
        task.add_done_callback(lambda ended: self._forget(entry.name, ended))

    def gives_up(self, entry: CacheEntry, sizes: Mapping[str, int]) -> bool:
        """Give up a cache whose populating the last lives did not survive, such as when the kernel kills for memory.

        One such end may have any cause. A second one, or one after a noted failure, would repeat itself without end. A
        cache that was ready once is kept: it had its memory, and its workers must not lose theirs because of a guess.
        """
        num_ends = entry.num_populatings
        failures = self._memory_shortages.num_failures(entry.name, entry.plan)
        if not num_ends or num_ends + failures < _ENDS_MAX or entry.was_ready:
            return False
        pool_kinds = regions.pool_kinds(entry.plan)
        entry.bytes_populated += sum(
            min(cpu.populated_bytes(entry.fds[kind]), num_bytes)
            for kind, num_bytes in sizes.items()
            if kind in pool_kinds
        )
        whose = (
            "the last control process"
            if num_ends == 1
            else f"the last {num_ends} control processes"
        )
        reason = f"{whose} ended while populating it, as happens when the kernel kills a process for lack of memory,"
        self._fail(entry, reason)
        return True

    def _forget(self, name: str, ended: asyncio.Task[None]) -> None:
        # Another cache of the same name may be populated by now.
        if self.tasks.get(name) is ended:
            del self.tasks[name]

    def cancel(self, entry: CacheEntry) -> None:
        """Stop populating a cache."""
        task = self.tasks.pop(entry.name, None)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """Stop all tasks, and wait for their end."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _populate(self, entry: CacheEntry, sizes: Mapping[str, int]) -> None:
        try:
            async with self._turn if entry.num_populatings else contextlib.nullcontext():
                self._begin(entry)
                await self._populate_all(entry, sizes)
        except OSError as error:
            self._fail(entry, error.strerror or type(error).__name__)
            return
        self._make_ready(entry)

    def _fail(self, entry: CacheEntry, reason: str) -> None:
        bytes_populated, of_bytes = entry.bytes_populated, entry.pool_bytes
        pause_seconds = self._memory_shortages.note(
            entry.name, entry.plan, reason, bytes_populated=bytes_populated, of_bytes=of_bytes
        )
        _LOG.error(
            "populating_failed",
            cache=entry.name,
            error=reason,
            bytes_populated=bytes_populated,
            of_bytes=of_bytes,
            seconds_until_retry=pause_seconds,
            advice=ADVICE,
        )
        self._give_up(entry)

    async def _populate_all(self, entry: CacheEntry, sizes: Mapping[str, int]) -> None:
        pool_kinds = regions.pool_kinds(entry.plan)
        pool_bytes, tenth = max(1, entry.pool_bytes), 1
        for kind, region_bytes in sizes.items():
            chunks = cpu.populate_chunks(entry.fds[kind], region_bytes, self._chunk_bytes)
            while (done_bytes := await asyncio.to_thread(next, chunks, None)) is not None:
                entry.bytes_populated += done_bytes if kind in pool_kinds else 0
                if entry.bytes_populated * 10 >= pool_bytes * tenth:
                    tenth = entry.bytes_populated * 10 // pool_bytes + 1
                    _LOG.info(
                        "populating",
                        cache=entry.name,
                        bytes=entry.bytes_populated,
                        of_bytes=entry.pool_bytes,
                    )
