"""Laws of commit, map and lookup."""

import pytest

from kvlease.errors import (
    InvalidError,
    NotYoursError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Committed, Mapped
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    OTHER_TENANT,
    STRANGER,
    WORKER,
    a_cache,
    a_full_cache,
    answer,
    cached,
    commit,
    committed,
    evict,
    evicted,
    extend,
    found,
    ids,
    keys,
    land,
    on_host,
    records,
    release,
    reload,
    reserve,
    states,
    the_copy,
    tick,
)

# Commit ---------------------------------------------------------------------------------------------------------------


def test_committed_blocks_are_findable() -> None:
    """After the commit, and not before, other leases find the bytes under their keys."""
    cache = a_cache()
    lease = reserve(cache, 2, "r", keys(1, 2))
    assert found(cache, keys(1, 2)) == (0, 0)

    reply = commit(cache, lease.lease_id, keys(1, 2))

    assert reply == Committed(num_committed=2, num_duplicates=0)
    assert found(cache, keys(1, 2)) == (2, 0)
    assert states(cache, lease.block_ids) == {State.READY}


def test_commit_goes_on_where_the_last_one_ended() -> None:
    """Later blocks of a chain are committed with their own positions."""
    cache = a_cache()
    lease = reserve(cache, 3)
    commit(cache, lease.lease_id, keys(1))

    commit(cache, lease.lease_id, keys(2, 3), first_block=1)

    positions = records(cache).device.position[ids(lease.block_ids)]
    assert positions.tolist() == [0, 1, 2]
    assert found(cache, keys(1, 2, 3)) == (3, 0)


def test_repeated_commit_changes_nothing() -> None:
    """A block that is already committed under the same key is counted neither as new nor as a duplicate."""
    cache = a_cache()
    lease = committed(cache, keys(1, 2))

    reply = commit(cache, lease.lease_id, keys(1, 2))

    assert reply == Committed(num_committed=0, num_duplicates=0)
    assert cache.check() == []


def test_commit_of_nothing_changes_nothing() -> None:
    """A commit may name no block at all."""
    cache = a_cache()
    lease = reserve(cache, 1)

    reply = commit(cache, lease.lease_id, b"")

    assert reply == Committed(num_committed=0, num_duplicates=0)


def test_committed_block_is_never_committed_under_another_key() -> None:
    """A committed block, which others may be reading, is not renamed."""
    cache = a_cache()
    lease = committed(cache, keys(1))

    with pytest.raises(InvalidError, match="another key"):
        commit(cache, lease.lease_id, keys(2))

    assert found(cache, keys(1)) == (1, 0)


def test_bytes_that_are_cached_already_stay_private() -> None:
    """If two blocks have the same bytes, one is findable and the other stays private to its lease."""
    cache = a_cache()
    first = committed(cache, keys(1))
    second = reserve(cache, 2, "second")

    reply = commit(cache, second.lease_id, keys(1, 2))

    assert reply == Committed(num_committed=1, num_duplicates=1)
    assert states(cache, second.block_ids) == {State.RESERVED, State.READY}
    assert states(cache, first.block_ids) == {State.READY}
    assert cache.check() == []


def test_key_that_is_on_its_way_is_published_once() -> None:
    """A commit under a key that a copy in flight would publish serves, and what the copy brings does not."""
    cache = a_cache()
    on_host(cache, keys(1))
    copy = the_copy(cache.handle(c.Reload(keys=keys(1)), 0.0))
    lease = reserve(cache, 1)

    reply = commit(cache, lease.lease_id, keys(1))
    land(cache, copy)

    assert (reply.num_committed, reply.num_duplicates) == (1, 0)
    assert found(cache, keys(1)) == (1, 0)
    assert reserve(cache, 1, "next", keys(1)).block_ids == lease.block_ids
    assert cache.check() == []


def test_stolen_key_that_is_on_its_way_to_its_owner_is_not_committed() -> None:
    """What another tenant commits under a key stays private while the owner's block is coming."""
    cache = a_cache()
    on_host(cache, keys(1))
    copy = the_copy(cache.handle(c.Reload(keys=keys(1)), 0.0))
    lease = reserve(cache, 1, worker_id=STRANGER)

    reply = commit(cache, lease.lease_id, keys(1), worker_id=STRANGER)
    land(cache, copy)

    assert (reply.num_committed, reply.num_duplicates) == (0, 1)
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


@pytest.mark.parametrize(
    ("num_tokens", "first_block", "packed", "complaint"),
    [
        pytest.param(8, 0, b"x" * 31, "multiple of 32", id="ragged keys"),
        pytest.param(8, 0, keys(1, 1), "twice", id="one key twice"),
        pytest.param(8, -1, keys(1), "names block -1, ", id="before the first"),
        pytest.param(7, 0, keys(1, 2), "fills 1 block$", id="not full"),
        pytest.param(12, 1, keys(1, 2), "the lease covers 8", id="beyond the lease"),
        pytest.param(-4, 0, keys(1), "num_tokens is -4", id="negative tokens"),
        pytest.param(8, 1, keys(1, 2), "names blocks 1 to 2", id="one block too many"),
        pytest.param(8, -3, keys(1), "names block -3, ", id="all before the first"),
    ],
)
def test_malformed_commit_is_refused(
    num_tokens: int, first_block: int, packed: bytes, complaint: str
) -> None:
    """A commit must name full blocks of its lease, each once; otherwise it commits nothing."""
    cache = a_cache()
    lease = reserve(cache, 2)
    command = c.Commit(
        worker_id=WORKER,
        lease_id=lease.lease_id,
        num_tokens=num_tokens,
        first_block=first_block,
        keys=packed,
    )

    with pytest.raises(InvalidError, match=complaint):
        cache.handle(command, 0.0)

    assert states(cache, lease.block_ids) == {State.RESERVED}


def test_late_commit_counts() -> None:
    """A stalled worker's commit counts: nobody else has written to its blocks."""
    cache = a_cache()
    lease = reserve(cache, 2)
    tick(cache, LEASE_SECONDS)
    assert states(cache, lease.block_ids) == {State.QUARANTINED}

    reply = commit(cache, lease.lease_id, keys(1))

    assert reply.num_committed == 1
    assert states(cache, lease.block_ids) == {State.READY, State.QUARANTINED}
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


def test_commit_of_a_released_lease_is_refused() -> None:
    """A worker that has released its blocks cannot commit them any more."""
    cache = a_cache()
    lease = reserve(cache, 1)
    release(cache, lease.lease_id)
    again = reserve(cache, 1, "next", worker_id=MATE)

    with pytest.raises(UnknownLeaseError):
        commit(cache, lease.lease_id, keys(1))

    assert again.block_ids == lease.block_ids
    assert found(cache, keys(1)) == (0, 0)


def test_commit_of_another_workers_lease_is_refused() -> None:
    """Only a lease's owner knows what its blocks hold."""
    cache = a_cache()
    lease = reserve(cache, 1)

    with pytest.raises(NotYoursError):
        commit(cache, lease.lease_id, keys(1), worker_id=MATE)


def test_commit_of_an_evicted_lease_is_refused() -> None:
    """Nobody writes blocks in the host pool."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=1)

    with pytest.raises(WrongStateError, match="evicted"):
        commit(cache, lease.lease_id, keys(2), first_block=1)


def test_commit_is_each_tenants_own() -> None:
    """A tenant finds only its own commits; an operator finds everybody's."""
    cache = a_cache()
    committed(cache, keys(1), worker_id=STRANGER)

    assert found(cache, keys(1)) == (0, 0)
    assert found(cache, keys(1), OTHER_TENANT) == (1, 0)
    assert found(cache, keys(1), None) == (1, 0)


# Map ------------------------------------------------------------------------------------------------------------------


def map_lease(
    cache: Cache, lease_id: LeaseId, *, worker_id: WorkerId = WORKER, now: float = 0.0
) -> Mapped:
    """Publish a lease's row."""
    return answer(cache.handle(c.Map(worker_id=worker_id, lease_id=lease_id), now), Mapped)


def test_row_is_published_by_map() -> None:
    """A reader of the table sees a lease's blocks once the lease is mapped, and not before."""
    cache = a_cache()
    lease = reserve(cache, 3)
    kernel = records(cache).kernel_rows
    assert kernel.num_published[lease.row] == 0

    reply = map_lease(cache, lease.lease_id)

    assert reply == Mapped(row=lease.row, num_kernel_blocks=3)
    assert kernel.num_published[lease.row] == 3
    assert kernel.kernel_ids[lease.row, :3].tolist() == ids(lease.block_ids)


def test_mapped_row_grows_with_its_lease() -> None:
    """Blocks that an extend adds are published at once if the lease is mapped, and otherwise not."""
    cache = a_cache()
    mapped, unmapped = reserve(cache, 1, "a"), reserve(cache, 1, "b")
    map_lease(cache, mapped.lease_id)

    extend(cache, mapped.lease_id, 3)
    extend(cache, unmapped.lease_id, 3)

    published = records(cache).kernel_rows.num_published
    assert (published[mapped.row], published[unmapped.row]) == (3, 0)


def test_evicted_lease_is_not_mapped() -> None:
    """A lease that leaves the device leaves the table, and only another map brings it back there."""
    cache = a_cache()
    lease = reserve(cache, 1)
    map_lease(cache, lease.lease_id)

    land(cache, the_copy(evict(cache, lease.lease_id)))
    with pytest.raises(WrongStateError, match="evicted"):
        map_lease(cache, lease.lease_id)
    land(cache, the_copy(reload(cache, lease.lease_id)))

    assert records(cache).kernel_rows.num_published[lease.row] == 0


def test_map_revives_a_quarantined_lease() -> None:
    """A worker that maps a lease is alive, so the lease is its own again."""
    cache = a_cache()
    lease = reserve(cache, 1)
    tick(cache, LEASE_SECONDS)

    map_lease(cache, lease.lease_id, now=LEASE_SECONDS)

    assert states(cache, lease.block_ids) == {State.RESERVED}


def test_map_of_another_workers_lease_is_refused() -> None:
    """Only the owner of a lease can map it."""
    cache = a_cache()
    lease = reserve(cache, 1)

    with pytest.raises(NotYoursError):
        map_lease(cache, lease.lease_id, worker_id=MATE)


# Lookup ---------------------------------------------------------------------------------------------------------------


def test_lookup_counts_both_tiers_up_to_the_first_miss() -> None:
    """A prefix may be partly on the device and partly in the host pool."""
    cache = a_cache()
    on_host(cache, keys(2))
    cached(cache, keys(1, 3))

    assert found(cache, keys(1, 2, 3, 4, 1)) == (2, 1)
    assert found(cache, keys(4, 1)) == (0, 0)
    assert found(cache, b"") == (0, 0)


def test_lookup_counts_bytes_on_their_way_as_being_on_the_device() -> None:
    """A block that a copy in flight fills is found once, at the copy's target."""
    cache = a_cache()
    on_host(cache, keys(1))
    cache.handle(c.Reload(keys=keys(1)), 0.0)

    assert found(cache, keys(1)) == (1, 0)
    assert found(cache, keys(1), OTHER_TENANT) == (0, 0)


def test_lookup_changes_nothing() -> None:
    """A lookup neither holds what is cached nor makes it leave later."""
    cache = a_full_cache(3)

    found(cache, keys(2))
    reserve(cache, 1)

    assert found(cache, keys(0, 1, 2)) == (2, 0)
