"""Laws of failed copies, in every phase of a lease: nothing is lost but time."""

import pytest

from kvlease.errors import (
    CopyFailedError,
)
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Evicted, Outcome, Reserved
from tests.unit.service.core.builders import (
    WAIT_MS,
    a_cache,
    a_full_cache,
    a_reserve,
    answer,
    committed,
    evict,
    evicted,
    fail,
    found,
    keys,
    land,
    on_host,
    records,
    release,
    reload,
    reload_keys,
    reloaded,
    reserve,
    the_copy,
    wakes,
    woken,
)


def end_of(outcome: Outcome, end: str, cache: Cache) -> Outcome:
    """Let a copy fail, be lost, or die with its mover."""
    copy_id = the_copy(outcome).copy_id
    command: c.Command = c.MoverDied()
    if end == "failed":
        command = c.CopyFailed(copy_id=copy_id)
    if end == "lost":
        command = c.CopyLost(copy_id=copy_id)
    return cache.handle(command, 0.0)


ENDS = pytest.mark.parametrize("end", ["failed", "lost", "mover died"])


@ENDS
@pytest.mark.parametrize("is_below", [False, True], ids=["new slots", "shared slot"])
def test_eviction_that_comes_to_nothing_leaves_the_lease_on_the_device(
    end: str, is_below: bool
) -> None:
    """The lease has its blocks as before, its caller is told, and it can be evicted again."""
    cache = a_cache()
    if is_below:
        on_host(cache, keys(1))
    lease = committed(cache, keys(1), more=1)
    outcome = evict(cache, lease.lease_id)

    woken(end_of(outcome, end, cache), outcome.ticket, CopyFailedError)

    assert reserve(cache, 2, "committed", b"").block_ids == lease.block_ids
    assert cache.check() == []
    land(cache, the_copy(evict(cache, lease.lease_id)))
    assert cache.check() == []


@ENDS
def test_reload_that_comes_to_nothing_leaves_the_lease_in_the_host_pool(end: str) -> None:
    """The bytes are still in the host pool, the caller is told, and the lease can be reloaded again."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=1)
    outcome = reload(cache, lease.lease_id)

    woken(end_of(outcome, end, cache), outcome.ticket, CopyFailedError)

    assert cache.check() == []
    again = reload(cache, lease.lease_id)
    assert reloaded(land(cache, the_copy(again)), again.ticket).num_reloaded == 2
    assert cache.check() == []


@ENDS
def test_prefetch_that_comes_to_nothing_is_told(end: str) -> None:
    """The caller learns that the blocks did not come; they are still in the host pool."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = reload_keys(cache, keys(1))

    woken(end_of(outcome, end, cache), outcome.ticket, CopyFailedError)

    assert found(cache, keys(1)) == (0, 1)
    assert cache.check() == []


@ENDS
def test_displacing_that_comes_to_nothing_is_told(end: str) -> None:
    """The caller is told, and the cached blocks that were not copied stay on the device."""
    cache = a_full_cache(1)
    outcome = cache.handle(c.Evict(num_blocks=1), 0.0)

    woken(end_of(outcome, end, cache), outcome.ticket, CopyFailedError)

    assert found(cache, keys(0)) == (1, 0)
    assert cache.check() == []


@ENDS
def test_load_that_comes_to_nothing_lets_the_request_compute(end: str) -> None:
    """A request whose prefix did not come gets fresh blocks, and no second load is tried."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)

    lease = woken(end_of(outcome, end, cache), outcome.ticket, Reserved)

    assert (lease.device_hit_tokens, lease.host_hit_tokens) == (0, 0)
    assert records(cache).rows.num_blocks[lease.row] == 2
    assert cache.check() == []


@ENDS
def test_write_back_that_comes_to_nothing_is_tried_again(end: str) -> None:
    """The call that needs room goes on waiting, and another copy makes room for it."""
    cache = a_full_cache(2)
    outcome = cache.handle(a_reserve(1, wait_ms=WAIT_MS), 0.0)

    ended = end_of(outcome, end, cache)

    assert outcome.ticket not in wakes(ended)
    assert outcome.ticket in wakes(land(cache, the_copy(ended)))
    assert cache.check() == []


def test_lease_with_several_copies_is_parted_from_all_by_one_failure() -> None:
    """A reload ends when one of its copies fails; its other copies only bring cached blocks."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2))
    prefetch = reload_keys(cache, keys(1))
    outcome = reload(cache, lease.lease_id)

    failed = fail(cache, the_copy(prefetch))
    land(cache, the_copy(outcome))

    woken(failed, outcome.ticket, CopyFailedError)
    assert found(cache, keys(1, 2)) == (1, 1)
    assert cache.check() == []


def test_block_whose_write_back_failed_is_the_next_to_leave() -> None:
    """A failed copy does not change a block's place in the order."""
    cache = a_full_cache(2)
    outcome = cache.handle(a_reserve(1, wait_ms=WAIT_MS), 0.0)

    failed = fail(cache, the_copy(outcome))

    assert the_copy(failed).source_ids == the_copy(outcome).source_ids


def test_committed_bytes_survive_a_lease_that_moves() -> None:
    """Committed bytes are found after any number of moves, and are copied down only once."""
    cache = a_cache()
    lease = committed(cache, keys(1, 2))
    land(cache, the_copy(evict(cache, lease.lease_id)))
    land(cache, the_copy(reload(cache, lease.lease_id)))

    again = answer(evict(cache, lease.lease_id), Evicted)
    land(cache, the_copy(reload(cache, lease.lease_id)))
    release(cache, lease.lease_id)

    assert again == Evicted(num_evicted=2, num_offloaded=0)
    assert found(cache, keys(1, 2)) == (2, 0)
