"""Events are numbered, bounded and never silently left out."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from kvlease.errors import BusyError, InvalidError, UnknownCacheError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.telemetry.events import GAP, RESYNC, SNAPSHOT, Events
from kvleased.telemetry.wall_clock import LAST_NANOSECONDS

FIRST = (5 << 20) + 1


async def _take(watcher: AsyncIterator[pb.WatchResponse], count: int) -> list[tuple[int, str]]:
    return [(event.sequence - FIRST, event.kind) async for event in _first(watcher, count)]


async def _first(
    watcher: AsyncIterator[pb.WatchResponse], count: int
) -> AsyncIterator[pb.WatchResponse]:
    for _ in range(count):
        yield await anext(watcher)


async def test_watcher_continues_after_what_it_has_seen() -> None:
    """A watcher gets the events after its number, oldest first, and then new events."""
    events = Events(5, 8, 1)
    for kind in "abc":
        events.append(kind, "main")
    watcher = events.watch(FIRST, "")

    assert await _take(watcher, 2) == [(1, "b"), (2, "c")]

    waiting = asyncio.ensure_future(anext(watcher))
    await asyncio.sleep(0)
    events.append("d", "main")
    assert (await waiting).kind == "d"


async def test_clock_beyond_what_can_be_told_fails_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock beyond the year 2262, which nanoseconds in 64 bits do not hold, events have the last such time."""

    def overflow() -> int:
        raise OverflowError

    monkeypatch.setattr(time, "time_ns", overflow)
    events = Events(5, 8, 1)

    events.append("a", "main")
    told = await anext(events.watch(FIRST - 1, ""))

    assert (told.kind, told.unix_nanoseconds) == ("a", LAST_NANOSECONDS)


async def test_overtaken_watcher_is_told_of_the_gap() -> None:
    """A watcher that is too slow gets one gap event in place of the events that are no longer kept."""
    events = Events(5, 4, 1)
    for kind in "abcdefgh":
        events.append(kind, "main")

    assert await _take(events.watch(FIRST, ""), 3) == [(3, GAP), (4, "e"), (5, "f")]


async def test_watcher_of_one_cache_sees_its_events_and_the_daemons() -> None:
    """A watcher of one cache gets that cache's events and the daemon's, but not those of other caches."""
    events = Events(5, 8, 1)
    for cache in ("one", "two", "", "one"):
        events.append("x", cache)

    seen = [event.cache async for event in _first(events.watch(0, "one"), 3)]

    assert seen == ["one", "", "one"]


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param((4 << 20) + 7, id="an earlier life"),
        pytest.param((9 << 20) + 1, id="a later one, whose clock went ahead"),
    ],
)
async def test_watcher_of_another_life_is_told_to_begin_anew(seen: int) -> None:
    """A number of another life tells nothing about this one, so the watcher gets all events that are kept."""
    events = Events(5, 8, 1)
    events.append("a", "main")

    assert await _take(events.watch(seen, ""), 2) == [(-1, RESYNC), (0, "a")]


async def test_number_before_the_first_event_needs_no_resync() -> None:
    """A watcher whose number is just before this life's first event has missed nothing."""
    events = Events(5, 8, 1)
    events.append("a", "main")

    assert await _take(events.watch(FIRST - 1, ""), 1) == [(0, "a")]


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (-1, "0 or more"),
        (2**53, "from 0 to 9007199254740991"),
        (2**63 - 1, "from 0 to 9007199254740991"),
    ],
)
async def test_number_that_no_event_has_is_refused(number: int, wanted: str) -> None:
    """A watcher's number is from 0 to the largest integer that JSON carries; the refusal of any other says so."""
    with pytest.raises(InvalidError, match=f"^after_sequence is {number}; it must be {wanted}$"):
        Events(5, 8, 1).watch(number, "")


def _snapshots(cache: str) -> list[pb.CacheStats]:
    return [
        pb.CacheStats(cache=name, num_leases=3) for name in ("one", "two") if cache in ("", name)
    ]


async def test_snapshot_comes_first_and_the_stream_goes_on_after_it() -> None:
    """Events that the snapshot includes do not come again, and no later event is left out."""
    events = Events(5, 8, 1, _snapshots)
    events.append("a", "one")
    watcher = events.watch(0, "", with_snapshot=True)

    first = [event async for event in _first(watcher, 2)]
    events.append("b", "two")

    assert [(one.sequence - FIRST, one.kind, one.cache) for one in first] == [
        (0, SNAPSHOT, "one"),
        (0, SNAPSHOT, "two"),
    ]
    assert first[0].snapshot.num_leases == 3
    assert await _take(watcher, 1) == [(1, "b")]


async def test_resync_is_followed_by_a_snapshot() -> None:
    """A watcher that is told to begin anew gets a snapshot, and then new events."""
    events = Events(5, 8, 1, _snapshots)
    events.append("a", "one")
    watcher = events.watch((4 << 20) + 7, "one", with_snapshot=True)

    assert await _take(watcher, 2) == [(-1, RESYNC), (0, SNAPSHOT)]
    events.append("b", "one")
    assert await _take(watcher, 1) == [(1, "b")]


async def test_gap_is_followed_by_a_snapshot() -> None:
    """A watcher that was overtaken gets a gap event and a fresh snapshot, not the events that are left."""
    events = Events(5, 4, 1, _snapshots)
    events.append("a", "one")
    watcher = events.watch(FIRST, "one", with_snapshot=True)
    assert await _take(watcher, 1) == [(0, SNAPSHOT)]
    for kind in "bcdefg":
        events.append(kind, "one")

    assert await _take(watcher, 2) == [(2, GAP), (6, SNAPSHOT)]
    events.append("h", "one")
    assert await _take(watcher, 1) == [(7, "h")]


async def test_watch_of_a_cache_that_there_is_not_is_refused() -> None:
    """To watch a cache that neither exists nor has events kept is refused; one deleted lately can be watched."""
    events = Events(5, 8, 2)
    events.is_known = {"main"}.__contains__
    events.append("cache_deleted", "gone")

    with pytest.raises(UnknownCacheError, match="nope"):
        events.watch(0, "nope")

    assert await _take(events.watch(0, "gone"), 1) == [(0, "cache_deleted")]
    events.watch(0, "main")


async def test_watchers_are_limited() -> None:
    """One watcher more than the limit is refused until another watcher leaves."""
    events = Events(5, 8, 1)
    events.append("a", "main")
    watcher = events.watch(0, "")
    await anext(watcher)

    with pytest.raises(BusyError):
        events.watch(0, "")

    await watcher.aclose()  # type: ignore[attr-defined]  # a generator behind the protocol
    assert events.num_watchers == 0
    events.watch(0, "")


async def test_watchers_that_have_left_are_forgotten() -> None:
    """Watchers that come and go while nothing happens leave nothing behind."""
    events = Events(5, 8, 1)
    for _ in range(10):
        watcher = events.watch(0, "")
        waiting = asyncio.ensure_future(anext(watcher))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    assert (events.num_watchers, len(events._waiting)) == (0, 0)


def test_numbers_of_a_later_epoch_are_larger() -> None:
    """Sequence numbers never go back over a restart."""
    earlier, later = Events(5, 8, 1), Events(6, 8, 1)

    assert repr(later) == "<Events 0 seen, 0 watchers>"
    assert later._first > earlier._first + (1 << 20) - 2


async def test_readers_leave_places_for_operators() -> None:
    """However many readers watch, places are left for operators."""
    events = Events(5, 8, 8)
    events.append("a", "main")
    watchers = [events.watch(0, "", is_operator=False) for _ in range(6)]
    for watcher in watchers:
        await anext(watcher)

    with pytest.raises(BusyError, match="2 more are kept for operators") as refused:
        events.watch(0, "", is_operator=False)

    assert refused.value.limit == 6
    assert (await anext(events.watch(0, ""))).kind == "a"
