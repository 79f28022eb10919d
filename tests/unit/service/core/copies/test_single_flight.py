"""Laws of shared copies: a call waits for bytes that are on their way, and does not copy them again."""

from collections.abc import Callable

import pytest

from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Outcome, Reserved
from tests.unit.service.core.builders import (
    MATE,
    WAIT_MS,
    a_cache,
    a_reserve,
    commit,
    copies,
    fail,
    ids,
    keys,
    land,
    lose,
    on_host,
    reserve,
    the_copy,
    wait_for,
    woken,
)


def test_two_reserves_of_one_prefix_share_one_copy() -> None:
    """The second reserve waits for the first one's copy, and starts none for the same bytes."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    first = cache.handle(a_reserve(2, "a", keys(1, 2), wait_ms=WAIT_MS), 0.0)
    second = cache.handle(a_reserve(3, "b", keys(1, 2), worker_id=MATE, wait_ms=WAIT_MS), 0.0)

    landed = land(cache, the_copy(first))

    assert copies(second) == []
    hits = woken(landed, first.ticket, Reserved), woken(landed, second.ticket, Reserved)
    assert ids(hits[0].block_ids) == ids(hits[1].block_ids)[:2]
    assert cache.check() == []


def test_reserve_joins_a_prefetch() -> None:
    """A prefix is served from others' copies and from slots, each byte copied once."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    prefetch = cache.handle(c.Reload(keys=keys(1)), 0.0)
    outcome = cache.handle(a_reserve(2, "r", keys(1, 2), wait_ms=WAIT_MS), 0.0)

    land(cache, the_copy(prefetch))
    landed = land(cache, the_copy(outcome))

    lease = woken(landed, outcome.ticket, Reserved)
    assert len(ids(the_copy(outcome).target_ids)) == 1
    assert len(set(ids(lease.block_ids))) == 2


def test_impatient_reserve_does_not_join_a_copy() -> None:
    """A call that may not wait uses only what is on the device now."""
    cache = a_cache()
    on_host(cache, keys(1))
    cache.handle(c.Reload(keys=keys(1)), 0.0)

    assert reserve(cache, 1, "r", keys(1)).device_hit_tokens == 0


@pytest.mark.parametrize("end", [fail, lose], ids=["failed", "lost"])
def test_reserves_that_shared_a_failed_copy_start_over(
    end: Callable[[Cache, Copy], Outcome],
) -> None:
    """If a shared copy fails, each call that waited for it gets blocks of its own to compute."""
    cache = a_cache()
    on_host(cache, keys(1))
    first = cache.handle(a_reserve(1, "a", keys(1), wait_ms=WAIT_MS), 0.0)
    second = cache.handle(a_reserve(1, "b", keys(1), wait_ms=WAIT_MS), 0.0)

    ended = end(cache, the_copy(first))

    leases = [woken(ended, ticket, Reserved) for ticket in (first.ticket, second.ticket)]
    assert [lease.host_hit_tokens for lease in leases] == [0, 0]
    assert leases[0].block_ids != leases[1].block_ids
    assert cache.check() == []


def test_commit_makes_room_for_nobody() -> None:
    """A block that is committed is still held by its lease, so a commit makes no room."""
    cache = a_cache(2)
    lease = reserve(cache, 2)
    wait_for(cache, 1, "waits")

    commit(cache, lease.lease_id, keys(1, 2))

    assert cache.census().num_waiting == 1
