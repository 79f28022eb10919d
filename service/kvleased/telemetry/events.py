"""Own the recent events and their watchers; what happened is for the caller to say."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Final

from kvlease.errors import BusyError, UnknownCacheError
from kvlease.ids import EPOCH_SHIFT, SEQUENCE_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.calls import checks
from kvleased.telemetry.wall_clock import unix_nanoseconds

GAP: Final = "gap"
"""The kind of event that stands for events which are no longer kept."""
RESYNC: Final = "resync"
"""The kind of event which says that the last event seen is of another life, so nobody knows what was missed."""
SNAPSHOT: Final = "snapshot"

_READ_PERCENT: Final = 75
"""The percentage of the places for watchers that callers who are no operators may fill."""

Snapshot = Callable[[str], Sequence[pb.CacheStats]]
"""Returns what a cache is at this instant; all caches if the name is empty."""

_Event = tuple[int, str, str, int, int, int, int, str, str]


class Events:
    """A ring of the last events; their sequence numbers only grow, also over restarts."""

    def __init__(
        self, epoch: int, max_events: int, max_watchers: int, snapshot: Snapshot = lambda _: ()
    ) -> None:
        """Start an empty ring whose numbers lie above those of every earlier epoch."""
        self.snapshot = snapshot
        """Makes the snapshots for the beginning of a watch, and for after a gap."""
        self.is_known: Callable[[str], bool] = lambda _: True
        """Tells whether there is a cache of this name."""
        self._first = (epoch << EPOCH_SHIFT) + 1
        self._next = self._first
        self._ring: list[_Event | None] = [None] * max_events
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._max_watchers = max_watchers
        self._max_read = max(1, max_watchers * _READ_PERCENT // 100)
        self._num_watchers = 0

    def __repr__(self) -> str:
        """Show life: events and watchers."""
        return f"<Events {self._next - self._first} seen, {self._num_watchers} watchers>"

    @property
    def num_watchers(self) -> int:
        """Watchers there are now."""
        return self._num_watchers

    def append(  # noqa: PLR0913 -- one parameter a field that events have
        self,
        kind: str,
        cache: str,
        *,
        worker_id: int = 0,
        lease_id: int = 0,
        num_blocks: int = 0,
        tenant: str = "",
        tier: str = "",
    ) -> None:
        """Add an event and wake all watchers that wait; everybody who may watch may know the names of tenants."""
        sequence = self._next
        self._ring[sequence % len(self._ring)] = (
            sequence, kind, cache, worker_id, lease_id, num_blocks, unix_nanoseconds(), tenant, tier,
        )  # fmt: skip
        self._next = sequence + 1
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def watch(
        self,
        after_sequence: int,
        cache: str,
        *,
        with_snapshot: bool = False,
        is_operator: bool = True,
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        """Return the events after a sequence number, oldest first, without end; a gap event stands for lost events.

        If the number is of another life of the daemon, a resync event comes first. With snapshots, those of the caches
        come at the beginning, and again after each gap or resync event.

        Raises:
            InvalidError: no event can have such a number.
            UnknownCacheError: there is no such cache, and no event of an earlier cache of that name is kept.
            BusyError: there are as many watchers as are allowed, or the last places are kept for operators.
        """
        checks.count("after_sequence", after_sequence, 0, SEQUENCE_MAX)
        if cache and not self.is_known(cache) and not self._tells_of(cache):
            message = f"there is no cache {cache[:64]!r}, and no event of such a cache is kept; list the caches"
            raise UnknownCacheError(message, resource="cache")
        limit = self._max_watchers if is_operator else self._max_read
        if self._num_watchers >= limit:
            kept = self._max_watchers - limit
            rest = f"; {kept} more are kept for operators" if kept else ""
            message = (
                f"there are already {self._num_watchers} watchers, and {limit} are allowed{rest}"
            )
            raise BusyError(message, resource="watchers", need=1, available=0, limit=limit)
        return self._follow(after_sequence, cache, with_snapshot=with_snapshot)

    async def _follow(
        self, after_sequence: int, cache: str, *, with_snapshot: bool
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        self._num_watchers += 1
        try:
            position = after_sequence + 1 if after_sequence else self._oldest
            # A watcher that has seen the last event before this life's first has missed nothing that is kept.
            is_other = bool(after_sequence) and not self._first - 1 <= after_sequence < self._next
            if is_other:
                position = self._oldest
                yield self._of_stream(RESYNC, position - 1)
            if with_snapshot:
                position = self._next
                for one in self._snapshots(cache):
                    yield one
            while True:
                if position < self._oldest:
                    position = self._oldest
                    yield self._of_stream(GAP, position - 1)
                    if with_snapshot:
                        position = self._next
                        for one in self._snapshots(cache):
                            yield one
                elif position < self._next:
                    event = self._ring[position % len(self._ring)]
                    assert event is not None, "hole in the ring"
                    position += 1
                    # An event of the daemon, which names no cache, is an event of each cache.
                    if not cache or event[2] in {cache, ""}:
                        yield _to_proto(event)
                else:
                    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting[future] = None
                    try:
                        await future
                    finally:
                        # The next event may not come for days, while many watchers come and go.
                        self._waiting.pop(future, None)
        finally:
            self._num_watchers -= 1

    def _tells_of(self, cache: str) -> bool:
        return any(event is not None and event[2] == cache for event in self._ring)

    def _snapshots(self, cache: str) -> Iterator[pb.WatchResponse]:
        """Return the snapshots of the caches, with the sequence number of the newest event."""
        sequence, now = self._next - 1, unix_nanoseconds()
        found = self.snapshot(cache)
        return (
            pb.WatchResponse(
                sequence=sequence,
                kind=SNAPSHOT,
                cache=one.cache,
                unix_nanoseconds=now,
                snapshot=one,
            )
            for one in found
        )

    @staticmethod
    def _of_stream(kind: str, sequence: int) -> pb.WatchResponse:
        return pb.WatchResponse(sequence=sequence, kind=kind, unix_nanoseconds=unix_nanoseconds())

    @property
    def _oldest(self) -> int:
        return max(self._first, self._next - len(self._ring))


def _to_proto(event: _Event) -> pb.WatchResponse:
    sequence, kind, cache, worker_id, lease_id, num_blocks, unix_nanoseconds, tenant, tier = event
    return pb.WatchResponse(
        sequence=sequence,
        kind=kind,
        cache=cache,
        worker_id=worker_id,
        lease_id=lease_id,
        num_blocks=num_blocks,
        unix_nanoseconds=unix_nanoseconds,
        tenant=tenant,
        tier=tier,
    )
