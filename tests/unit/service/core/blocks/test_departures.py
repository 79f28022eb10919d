"""Laws of the counts of departures: all count by tier and reason, and those of evicted blocks by their spans, too."""

import numpy as np
import pytest

from kvleased.core import commands as c
from kvleased.core.blocks.departures import BOUNDS_SECONDS, Departures, LeaseClock
from kvleased.core.blocks.history import DepartureReason, History
from tests.unit.service.core.builders import (
    WORKER,
    a_cache,
    cached,
    commit,
    found,
    keys,
    leaving,
    on_host,
    reserve,
    tick,
)

DEVICE, HOST = 0, 1


def leave(history: History, count: int, *, since: int, idle_at: float, tier: int = DEVICE) -> None:
    """Evict blocks from a tier."""
    blocks = leaving(np.arange(count), since=since, idle_at=idle_at)
    history.left(tier, blocks, DepartureReason.EVICTED)


def test_clock_goes_between_notes() -> None:
    """The time of a lease lies between those of the notes around it; before the first note it is the first one's."""
    clock = LeaseClock()
    assert not clock.is_set
    clock.note(10, 1.0)
    clock.note(10, 2.0)
    clock.note(20, 3.0)

    assert clock.seconds(np.array([5, 10, 15, 20, 99])).tolist() == [2.0, 2.0, 2.5, 3.0, 3.0]
    assert repr(clock) == "<LeaseClock 2 notes>"


def test_clock_is_bounded() -> None:
    """The clock keeps a bounded number of notes, the first and the last among them, however many there were."""
    clock = LeaseClock()
    for lease_id in range(1, 20_000):
        clock.note(lease_id, float(lease_id))

    assert clock.seconds(np.array([1, 10_000, 19_999])).tolist() == [1.0, 10_000.0, 19_999.0]
    assert len(clock._ids) <= 2048


def test_committed_less_dropped_is_not_what_is_cached() -> None:
    """A block that the host pool has is committed again, and what is cleared is counted by reason alone."""
    cache = a_cache(4, num_slots=2)
    on_host(cache, keys(1))
    cached(cache, keys(1))

    cache.handle(c.Clear(tenant_digest=None), 0.0)

    counters, left = cache.census().counters, cache.survey(0.0).departures.counts
    assert (counters["blocks_committed"], counters["blocks_duplicate"]) == (2, 0)
    assert counters["blocks_dropped"] == 0
    assert (left[DEVICE, DepartureReason.CLEARED], left[HOST, DepartureReason.CLEARED]) == (1, 1)


def test_spans_of_evicted_blocks_are_counted() -> None:
    """How long an evicted block was findable, and how long held by nobody, counts in the bucket of that span."""
    history = History(8)
    history.moment, history.now = 7, 100.0
    history.tick()
    history.moment, history.now = 9, 103.5
    leave(history, 2, since=7, idle_at=103.0, tier=HOST)

    departures = history.counted()

    assert departures.counts[HOST, DepartureReason.EVICTED] == 2
    assert departures.residence.counts[HOST].tolist() == [0, 0, 2] + [0] * (len(BOUNDS_SECONDS) - 2)
    assert departures.residence.seconds[HOST] == pytest.approx(7.0)
    assert departures.idle.counts[HOST, 0] == 2
    assert departures.idle.seconds[HOST] == pytest.approx(1.0)
    assert departures.idle.counts[DEVICE].sum() == 0
    assert repr(departures) == "<Departures 2>"


def test_blocks_of_several_requests_are_counted_each() -> None:
    """Blocks that leave together count one by one, wherever their facts differ."""
    departures = Departures()
    departures.clock.note(1, 10.0)
    departures.clock.note(2, 20.0)
    codes = np.array([DEVICE, DEVICE, DEVICE, DEVICE, DEVICE | HOST << 4, DEVICE], np.uint8)
    since = np.array([1, 1, 2, 1, 1, 0])
    idle_at = np.array([20.5, 20.5, 20.5, 19.0, 19.0, 0.0])

    departures.count(codes, since, np.full(6, 21.0), idle_at)

    assert departures.counts[:2, DepartureReason.EVICTED].tolist() == [5, 1]
    assert departures.residence.counts[DEVICE].tolist()[:5] == [1, 0, 0, 3, 0]
    assert departures.residence.seconds[:2].tolist() == [34.0, 11.0]
    assert departures.idle.counts[DEVICE].tolist()[:3] == [3, 1, 0]
    assert departures.idle.seconds[:2].tolist() == [3.5, 2.0]


def test_blocks_of_an_earlier_life_have_no_spans() -> None:
    """For blocks of an earlier life only the departure counts, for nobody knows since when they were there."""
    history = History(8)
    history.now = 5.0
    leave(history, 3, since=0, idle_at=0.0)

    departures = history.counted()

    assert departures.counts[DEVICE, DepartureReason.EVICTED] == 3
    assert departures.residence.counts.sum() == departures.idle.counts.sum() == 0


def test_spans_are_of_evictions_alone() -> None:
    """Displaced and lost blocks count under their reasons, and have no spans."""
    departures = Departures()
    codes = np.array([DepartureReason.DISPLACED, DepartureReason.DAMAGED], np.uint8)
    departures.count(codes, np.array([1, 1]), np.array([2.0, 2.0]), np.array([1.0, 1.0]))

    assert departures.counts[DEVICE].tolist()[: len(DepartureReason)] == [0, 1, 0, 0, 0, 1]
    assert departures.residence.counts.sum() == departures.idle.counts.sum() == 0


def test_cache_counts_what_it_evicts() -> None:
    """A block that was let go of at second 1 and evicted at 41 was idle for 40 seconds, whenever it is counted."""
    cache = a_cache(4, 0)
    tick(cache, 0.5)
    lease = reserve(cache, 2, now=1.0)
    commit(cache, lease.lease_id, keys(1, 2), now=1.0)
    cache.handle(c.Release(worker_id=WORKER, lease_id=lease.lease_id), 1.0)
    tick(cache, 1.0)
    reserve(cache, 4, now=41.0)

    departures = cache.survey(99.0).departures

    assert found(cache, keys(1)) == (0, 0)
    assert departures.counts[DEVICE, DepartureReason.EVICTED] == 2
    assert departures.idle.seconds[DEVICE] == departures.residence.seconds[DEVICE] == 80.0
