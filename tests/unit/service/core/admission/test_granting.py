"""Laws of Reserve: it is granted whole or changes nothing, and every refusal says why."""

from dataclasses import replace
from typing import Any

import pytest

from kvlease.errors import (
    DrainingError,
    IdReusedError,
    InvalidError,
    NeverFitsError,
    PoolFullError,
    UnknownWorkerError,
    WrongStateError,
)
from kvlease.ids import WorkerId
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Reserved
from tests.unit.service.core.builders import (
    STRANGER,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    answer,
    cached,
    evict,
    evicted,
    extend,
    ids,
    keys,
    land,
    on_host,
    reload,
    reloaded,
    reserve,
    states,
    the_copy,
    woken,
)

# Reserve --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [7, 8], ids=["capacity - 1", "capacity"])
def test_reserve_up_to_the_capacity_is_granted(num_blocks: int) -> None:
    """A request that fits gets blocks of its own, all of them private."""
    cache = a_cache(8)

    lease = reserve(cache, num_blocks)

    assert len(set(ids(lease.block_ids))) == num_blocks
    assert states(cache, lease.block_ids) == {State.RESERVED}
    assert cache.check() == []


@pytest.mark.parametrize("wait_ms", [0, WAIT_MS], ids=["at once", "patient"])
def test_reserve_beyond_the_capacity_never_fits(wait_ms: int) -> None:
    """A request that no wait can serve is refused for good, with both numbers and the largest size that fits."""
    cache = a_cache(8)

    with pytest.raises(NeverFitsError, match="at most 32 tokens") as refusal:
        cache.handle(a_reserve(9, wait_ms=wait_ms), 0.0)

    assert (refusal.value.resource, refusal.value.need) == ("device_blocks", 9)
    assert (refusal.value.available, refusal.value.limit) == (8, 8)
    assert refusal.value.retry_after_ms is None


def test_longest_request_bounds_a_lease() -> None:
    """A lease has no more blocks than a row of the table, even if the pool has them."""
    cache = a_cache(8, table_blocks=3)
    lease = reserve(cache, 3)

    with pytest.raises(NeverFitsError) as refusal:
        extend(cache, lease.lease_id, 4)

    assert refusal.value.resource == "longest_request_tokens"
    assert refusal.value.limit == 3 * TOKENS_PER_BLOCK


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_cover_the_tokens_and_no_more(num_tokens: int, num_blocks: int) -> None:
    """A request gets just as many blocks as its tokens begin."""
    command = c.Reserve(worker_id=WORKER, request_id="r", keys=b"", num_tokens=num_tokens)

    lease = answer(a_cache().handle(command, 0.0), Reserved)

    assert len(ids(lease.block_ids)) == num_blocks


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_reserve_of_nothing_is_malformed(num_tokens: int) -> None:
    """A lease covers at least one token."""
    command = c.Reserve(worker_id=WORKER, request_id="r", keys=b"", num_tokens=num_tokens)

    with pytest.raises(InvalidError, match="at least 1"):
        a_cache().handle(command, 0.0)


@pytest.mark.parametrize(
    ("prefix", "complaint"),
    [
        pytest.param(b"x" * 33, "multiple of 32", id="ragged"),
        pytest.param(keys(1, 2, 3), "covers only 2", id="more keys than blocks"),
    ],
)
def test_reserve_with_malformed_keys_is_refused(prefix: bytes, complaint: str) -> None:
    """A reserve's keys must be whole, and must name no more blocks than the request covers."""
    with pytest.raises(InvalidError, match=complaint):
        a_cache().handle(a_reserve(2, "r", prefix), 0.0)


@pytest.mark.parametrize(
    ("malformed", "complaint"),
    [
        pytest.param({"keys": b"x" * 33}, "multiple of 32", id="ragged keys"),
        pytest.param({"priority": 9}, "priority", id="priority"),
    ],
)
def test_malformed_reserve_that_never_fits_is_refused_as_malformed(
    malformed: dict[str, Any], complaint: str
) -> None:
    """No smaller request is advised that would be refused in its turn for what is malformed."""
    command = replace(a_reserve(1_000), **malformed)

    with pytest.raises(InvalidError, match=complaint):
        a_cache().handle(command, 0.0)


def test_reserve_that_names_a_cached_block_twice_is_refused() -> None:
    """A reserve whose keys name a cached block twice is refused: all keys of a chain must differ."""
    cache = a_cache()
    cached(cache, keys(1))

    with pytest.raises(InvalidError, match="twice"):
        cache.handle(a_reserve(2, "r", keys(1, 1)), 0.0)

    assert cache.check() == []


def test_reserve_of_an_unknown_worker_is_refused() -> None:
    """Only attached workers get leases."""
    with pytest.raises(UnknownWorkerError):
        a_cache().handle(a_reserve(worker_id=WorkerId(99)), 0.0)


def test_refusal_of_a_full_pool_has_all_numbers() -> None:
    """A refusal names the resource, what was needed, what was available, and when to ask again."""
    cache = a_cache(8)
    reserve(cache, 6)

    with pytest.raises(PoolFullError, match="the rest is held") as refusal:
        reserve(cache, 3, "next")

    assert (refusal.value.resource, refusal.value.need) == ("device_blocks", 3)
    assert (refusal.value.available, refusal.value.limit) == (2, 8)
    assert refusal.value.retry_after_ms == 50


def test_refusal_counts_the_hits_off_the_need() -> None:
    """A refusal's need does not include the blocks that the prefix would have served."""
    cache = a_cache(8)
    cached(cache, keys(1, 2))
    reserve(cache, 6)

    with pytest.raises(PoolFullError) as refusal:
        reserve(cache, 3, "next", keys(1, 2))

    assert (refusal.value.need, refusal.value.available) == (1, 0)


def test_refused_reserve_changes_nothing() -> None:
    """A refused request holds no block, no row and no lease."""
    cache = a_cache(4)
    reserve(cache, 3)
    before = cache.census()

    with pytest.raises(PoolFullError):
        reserve(cache, 2, "next")

    assert cache.census() == before
    assert cache.check() == []


def test_leases_are_bounded_by_the_rows() -> None:
    """When all rows of the table are used, a new lease is refused because there is no row for it."""
    cache = a_cache(8, max_leases=2)
    reserve(cache, 1, "a")
    reserve(cache, 1, "b")

    with pytest.raises(PoolFullError, match="all 2 leases") as refusal:
        reserve(cache, 1, "c")

    assert (refusal.value.resource, refusal.value.need) == ("leases", 1)
    assert (refusal.value.available, refusal.value.limit) == (0, 2)


def test_draining_cache_grants_no_new_lease() -> None:
    """Once a drain begins, new requests are refused."""
    cache = a_cache()
    cache.handle(c.Drain(), 0.0)

    with pytest.raises(DrainingError):
        reserve(cache)


def test_draining_cache_lets_running_requests_finish() -> None:
    """A lease that was granted before the drain can still be extended, evicted and reloaded."""
    cache = a_cache()
    lease = evicted(cache, keys(1))
    cache.handle(c.Drain(), 0.0)

    outcome = reload(cache, lease.lease_id)
    reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert len(ids(extend(cache, lease.lease_id, 3).block_ids)) == 2


# Repeats --------------------------------------------------------------------------------------------------------------


def test_repeated_reserve_is_answered_with_the_same_lease() -> None:
    """A request has one lease, however often its worker reserves it."""
    cache = a_cache()
    first = reserve(cache, 3)

    again = reserve(cache, 3)

    assert again == first
    assert cache.census().num_leases == 1


def test_repeated_reserve_with_other_tokens_is_refused() -> None:
    """A request id stands for one request until its lease ends."""
    cache = a_cache()
    reserve(cache, 3)

    with pytest.raises(IdReusedError, match="request"):
        reserve(cache, 2)


def test_same_request_id_of_another_worker_is_another_request() -> None:
    """Request ids of different workers are independent."""
    cache = a_cache()

    first, second = reserve(cache), reserve(cache, worker_id=STRANGER)

    assert first.lease_id != second.lease_id


def test_repeated_reserve_of_an_evicted_lease_names_no_blocks() -> None:
    """A repeated reserve of a lease in the host pool is answered without blocks, for it has none on the device."""
    cache = a_cache()
    lease = evicted(cache, keys(1))

    again = reserve(cache, 1, "evicted")

    assert (again.lease_id, again.block_ids) == (lease.lease_id, b"")


def test_repeated_reserve_tells_the_hits_of_the_first() -> None:
    """Blocks that a later reload copied are not hits: a worker must not take unwritten blocks for cached ones."""
    cache = a_cache()
    lease = reserve(cache, 2)
    outcome = evict(cache, lease.lease_id)
    land(cache, the_copy(outcome))
    land(cache, the_copy(reload(cache, lease.lease_id)))

    again = reserve(cache, 2)

    assert (again.device_hit_tokens, again.host_hit_tokens) == (0, 0)


def test_repeated_reserve_that_may_not_wait_for_its_load_is_refused() -> None:
    """A repeated reserve that may not wait is refused while the bytes of its lease are on their way."""
    cache = a_cache()
    on_host(cache, keys(1))
    cache.handle(a_reserve(1, "r", keys(1), wait_ms=WAIT_MS), 0.0)

    with pytest.raises(WrongStateError, match="loading"):
        cache.handle(a_reserve(1, "r", keys(1)), 0.0)


def test_repeated_reserve_waits_in_the_place_of_the_first() -> None:
    """The earlier call is told that a later one has replaced it, and the later one gets the lease."""
    cache = a_cache()
    on_host(cache, keys(1))
    first = cache.handle(a_reserve(1, "r", keys(1), wait_ms=WAIT_MS), 0.0)

    second = cache.handle(a_reserve(1, "r", keys(1), wait_ms=WAIT_MS), 0.0)
    landed = land(cache, the_copy(first))

    woken(second, first.ticket, WrongStateError)
    woken(landed, second.ticket, Reserved)
