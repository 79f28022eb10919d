"""Events are numbered, bounded and never silently left out."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvlease.errors import BusyError, InvalidError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.events import GAP, Events

FIRST = (5 << 20) + 1


async def _take(watcher: AsyncIterator[pb.WatchResponse], count: int) -> list[tuple[int, str]]:
    return [(event.sequence - FIRST, event.kind) async for event in _first(watcher, count)]


async def _first(
    watcher: AsyncIterator[pb.WatchResponse], count: int
) -> AsyncIterator[pb.WatchResponse]:
    for _ in range(count):
        yield await anext(watcher)


async def test_watcher_continues_after_what_it_has_seen() -> None:
    """A watcher gets the events after its number, oldest first, and then those that come."""
    events = Events(5, 8, 1)
    for kind in "abc":
        events.append(kind, "main")
    watcher = events.watch(FIRST, "")

    assert await _take(watcher, 2) == [(1, "b"), (2, "c")]

    waiting = asyncio.ensure_future(anext(watcher))
    await asyncio.sleep(0)
    events.append("d", "main")
    assert (await waiting).kind == "d"


async def test_overtaken_watcher_is_told_of_the_gap() -> None:
    """A watcher that is too slow gets one gap event in place of those that are no longer kept."""
    events = Events(5, 4, 1)
    for kind in "abcdefgh":
        events.append(kind, "main")

    assert await _take(events.watch(FIRST, ""), 3) == [(3, GAP), (4, "e"), (5, "f")]


async def test_watcher_of_one_cache_sees_only_its_events() -> None:
    """Events of other caches are left out."""
    events = Events(5, 8, 1)
    for cache in ("one", "two", "one"):
        events.append("x", cache)

    assert [event.cache async for event in _first(events.watch(0, "one"), 2)] == ["one", "one"]


async def test_number_from_the_future_is_refused() -> None:
    """A watcher cannot have seen an event that never happened."""
    events = Events(5, 8, 1)

    with pytest.raises(InvalidError, match="after_sequence"):
        events.watch(FIRST, "")


async def test_watchers_are_limited() -> None:
    """One watcher more than the limit is refused, until another one goes."""
    events = Events(5, 8, 1)
    events.append("a", "main")
    watcher = events.watch(0, "")
    await anext(watcher)

    with pytest.raises(BusyError):
        events.watch(0, "")

    await watcher.aclose()  # type: ignore[attr-defined]  # a generator behind the protocol
    assert events.num_watchers == 0
    events.watch(0, "")


def test_numbers_of_a_later_epoch_are_larger() -> None:
    """Sequence numbers never go back over a restart."""
    assert repr(Events(6, 1, 1)) == "<Events 0 seen, 0 watchers>"
    with pytest.raises(InvalidError, match=str(6 << 20)):
        Events(6, 1, 1).watch((6 << 20) + 1, "")
