"""Laws of requests that never fit: one block too many is refused at once, and a request that just fits is not."""

from typing import Any

import pytest

from kvlease.errors import (
    Holding,
    NeverFitsError,
    PoolFullError,
)
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Evicted, Extended
from tests.unit.service.core.builders import (
    WAIT_MS,
    WORKER,
    a_cache,
    a_reload,
    a_reserve,
    an_extend,
    answer,
    committed,
    evict,
    evicted,
    keys,
    land,
    on_host,
    reload_keys,
    reserve,
    the_copy,
    wakes,
    woken,
)


def refused(cache: Cache, command: c.Command, kind: Any = PoolFullError, now: float = 0.0) -> Any:
    """Return the refusal of a command."""
    with pytest.raises(kind) as caught:
        cache.handle(command, now)
    return caught.value


CAPACITY = 6


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("wait_ms", [0, WAIT_MS])
def test_reserve_larger_than_the_pool_never_fits(more: int, wait_ms: int) -> None:
    """A request for more blocks than exist is refused at once, even if it may wait; one for all of them is not."""
    cache = a_cache(CAPACITY + 1, null_blocks=1, table_blocks=CAPACITY + 1)
    reserve(cache, 1, "other")
    command = a_reserve(CAPACITY + more, "r", wait_ms=wait_ms)

    if more > 0:
        error = refused(cache, command, NeverFitsError)
        assert (error.need, error.limit, error.remedies) == (7, 6, ("num_tokens=24",))
        assert error.retry_after_ms is None
    elif more == 0 and not wait_ms:
        assert refused(cache, command).limit == CAPACITY
    else:
        outcome = cache.handle(command, 0.0)
        assert (outcome.ticket is None) == (more < 0)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_extend_beyond_the_pool_never_fits(more: int) -> None:
    """A lease may grow to the whole pool, and not by a block more, however long the extend may wait."""
    cache = a_cache(CAPACITY, table_blocks=CAPACITY + 1)
    lease = reserve(cache, 1)
    command = an_extend(lease.lease_id, CAPACITY + more, wait_ms=WAIT_MS)

    if more > 0:
        error = refused(cache, command, NeverFitsError)
        assert (error.need, error.limit, error.remedies) == (7, 6, ("num_tokens=24",))
    else:
        assert len(answer(cache.handle(command, 0.0), Extended).block_ids) == 4 * (5 + more)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_reload_of_more_keys_than_the_pool_never_fits(more: int) -> None:
    """An empty pool can take back as many blocks by their keys as it has; a reload of one more never fits."""
    cache = a_cache(CAPACITY, CAPACITY + 1)
    num_keys = CAPACITY + more
    for at in range(num_keys):
        on_host(cache, keys(at))
    command = c.Reload(worker_id=WORKER, keys=keys(*range(num_keys)))

    if more > 0:
        error = refused(cache, command, NeverFitsError)
        assert (error.need, error.limit, error.remedies) == (7, 6, ("num_keys=6",))
    else:
        assert len(the_copy(cache.handle(command, 0.0)).target_ids) == 4 * num_keys


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_lease_that_filled_the_pool_comes_back(more: int) -> None:
    """A lease of at most the whole pool can be evicted and reloaded; no lease is larger."""
    cache = a_cache(CAPACITY, CAPACITY, table_blocks=CAPACITY + 1)
    if more > 0:
        refused(cache, a_reserve(CAPACITY + more), NeverFitsError)
        return
    lease = evicted(cache, keys(*range(CAPACITY + more)))

    outcome = cache.handle(a_reload(lease.lease_id, wait_ms=0), 0.0)

    assert wakes(land(cache, the_copy(outcome))) == [outcome.ticket]


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("num_shared", [0, 1])
def test_lease_larger_than_the_host_pool_never_leaves(more: int, num_shared: int) -> None:
    """A lease that has more blocks than the host pool has slots never fits there, even if some are there already."""
    cache = a_cache(CAPACITY + 1, CAPACITY)
    if num_shared:
        on_host(cache, keys(0))
    lease = committed(cache, keys(*range(num_shared)), more=CAPACITY + more - num_shared)

    if more > 0:
        error = refused(cache, c.Evict(worker_id=WORKER, lease_id=lease.lease_id), NeverFitsError)
        assert (error.resource, error.need, error.limit) == ("host_slots", 7, 6)
        assert error.remedies == ()
    else:
        down = evict(cache, lease.lease_id)
        woken(land(cache, the_copy(down)), down.ticket, Evicted)


def test_retired_slots_never_count() -> None:
    """Retired slots do not count as room."""
    cache = a_cache(4, 2)
    on_host(cache, keys(1))
    lost = the_copy(reload_keys(cache, keys(1)))
    land(cache, lost, failed=(0,))

    error = refused(
        cache,
        c.Evict(worker_id=WORKER, lease_id=reserve(cache, 2).lease_id),
        NeverFitsError,
    )

    assert (error.need, error.limit) == (2, 1)


def test_full_host_pool_tells_who_has_it() -> None:
    """The refusal of a lease that does not fit the host pool now says who has the slots."""
    cache = a_cache(4, 2)
    evicted(cache, keys(1))

    error = refused(cache, c.Evict(worker_id=WORKER, lease_id=reserve(cache, 2).lease_id))

    assert (error.need, error.available, error.limit) == (2, 1, 2)
    assert error.holdings == (Holding("you", "leased", 1), Holding("nobody", "free", 1))
