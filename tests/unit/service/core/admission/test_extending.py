"""Laws of Extend: a lease grows by all the blocks that it lacks, or not at all."""

import pytest

from kvlease.errors import (
    NotYoursError,
    PoolFullError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.ids import LeaseId
from tests.unit.service.core.builders import (
    STRANGER,
    a_cache,
    a_full_cache,
    an_extend,
    evicted,
    extend,
    found,
    ids,
    keys,
    records,
    reserve,
)


@pytest.mark.parametrize(("num_blocks", "num_added"), [(1, 0), (2, 0), (3, 1), (8, 6)])
def test_extend_adds_what_is_missing(num_blocks: int, num_added: int) -> None:
    """An extend covers the given number of tokens in all; one that covers fewer changes nothing."""
    cache = a_cache(8)
    lease = reserve(cache, 2)

    added = ids(extend(cache, lease.lease_id, num_blocks).block_ids)

    row = records(cache).rows.block_ids[lease.row]
    assert row[2 : 2 + num_added].tolist() == added
    assert len(added) == num_added
    assert cache.check() == []


def test_extend_without_room_is_refused_with_what_is_missing() -> None:
    """An extend's need is what the lease lacks, not what it covers; a lack of rows does not concern it."""
    cache = a_cache(4, max_leases=2)
    lease = reserve(cache, 2)
    reserve(cache, 1, "other")

    with pytest.raises(PoolFullError) as refusal:
        extend(cache, lease.lease_id, 4)

    assert refusal.value.resource == "device_blocks"
    assert (refusal.value.need, refusal.value.available, refusal.value.limit) == (2, 1, 4)


def test_extend_evicts_what_nobody_holds() -> None:
    """An extend evicts cached blocks that nobody holds."""
    cache = a_full_cache(4)
    lease = reserve(cache, 2)

    assert len(ids(extend(cache, lease.lease_id, 4).block_ids)) == 2
    assert found(cache, keys(0)) == (0, 0)


def test_extend_of_another_workers_lease_is_refused() -> None:
    """A worker cannot extend another worker's lease."""
    cache = a_cache()
    lease = reserve(cache)

    with pytest.raises(NotYoursError):
        cache.handle(an_extend(lease.lease_id, 2, worker_id=STRANGER), 0.0)


def test_extend_of_an_unknown_lease_is_refused() -> None:
    """A lease that has ended, or never existed, is not extended."""
    with pytest.raises(UnknownLeaseError):
        a_cache().handle(an_extend(LeaseId(99), 2), 0.0)


def test_extend_of_an_evicted_lease_is_refused() -> None:
    """A lease in the host pool must be reloaded first."""
    cache = a_cache()
    lease = evicted(cache, keys(1))

    with pytest.raises(WrongStateError, match="evicted"):
        extend(cache, lease.lease_id, 2)
