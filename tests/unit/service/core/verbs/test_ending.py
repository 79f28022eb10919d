"""Laws of the ends of leases and workers: while a worker may still write to its blocks, nobody else gets them."""

import numpy as np
import pytest

from kvlease.errors import InvalidError, NotYoursError, PoolFullError, UnknownWorkerError
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Beat, Detached, Done, Released
from kvleased.core.lease.phases import ENDED, End
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    OTHER_TENANT,
    TENANT,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    answer,
    committed,
    evict,
    evicted,
    extend,
    found,
    keys,
    land,
    leases_of,
    on_host,
    release,
    reload,
    reserve,
    states,
    the_copy,
    tick,
    wakes,
)

NEWEST = LeaseId(1 << 40)


# Release --------------------------------------------------------------------------------------------------------------


def test_release_frees_private_blocks_and_keeps_committed_ones() -> None:
    """Committed blocks stay findable after a release; the other blocks are free again."""
    cache = a_cache(4)
    lease = committed(cache, keys(1, 2), more=2)

    assert answer(release(cache, lease.lease_id), Released).released

    assert cache.census().device["free"] == 2
    assert found(cache, keys(1, 2)) == (2, 0)
    assert cache.check() == []


def test_released_blocks_may_be_let_go_of_after_the_answer() -> None:
    """A release is answered before its blocks are let go of, but the next command finds them free, settled or not."""
    cache = a_cache(2)
    lease = reserve(cache, 2, "a")

    release(cache, lease.lease_id)
    again = reserve(cache, 2, "b")
    release(cache, again.lease_id)
    cache.settle()

    assert cache.census().device["free"] == 2
    assert cache.check() == []


def test_release_of_one_sharer_leaves_the_others_blocks_held() -> None:
    """A shared block is evictable only when the last lease lets go of it."""
    cache = a_cache(1)
    first = committed(cache, keys(1))
    reserve(cache, 1, "second", keys(1))

    release(cache, first.lease_id)

    with pytest.raises(PoolFullError):
        reserve(cache, 1, "third")
    assert cache.census().device["ready_held"] == 1


def test_second_release_is_an_answered_no_op() -> None:
    """A release of a lease that has ended is no error, and is counted."""
    cache = a_cache()
    lease = reserve(cache)
    release(cache, lease.lease_id)

    assert not answer(release(cache, lease.lease_id), Released).released

    assert cache.census().counters["releases_unknown"] == 1


def test_release_of_another_workers_lease_is_refused() -> None:
    """Nobody ends another worker's lease."""
    cache = a_cache()
    lease = reserve(cache)

    with pytest.raises(NotYoursError):
        release(cache, lease.lease_id, worker_id=MATE)


def test_release_by_an_unknown_worker_is_refused() -> None:
    """A worker that is not attached is told that, and not that the lease has ended."""
    with pytest.raises(UnknownWorkerError):
        release(a_cache(), LeaseId(5), worker_id=WorkerId(99))


def test_release_while_loading_lets_the_copy_finish() -> None:
    """Blocks that a copy holds stay held until the copy ends, and then their bytes are cached."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)
    (lease_id,) = leases_of(cache)

    released = release(cache, LeaseId(lease_id))
    assert cache.census().device["filling"] == 1
    land(cache, the_copy(outcome))

    assert wakes(released) == [outcome.ticket]
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


@pytest.mark.parametrize("num_slots_used", [0, 1], ids=["new slots", "shared slot"])
def test_release_while_evicting_frees_both_ends(num_slots_used: int) -> None:
    """A lease that ends on its way down leaves its committed bytes in the host pool and nothing else."""
    cache = a_cache()
    if num_slots_used:
        on_host(cache, keys(1))
    lease = committed(cache, keys(1), more=1)
    outcome = evict(cache, lease.lease_id)

    release(cache, lease.lease_id)
    land(cache, the_copy(outcome))

    assert cache.census().host["free"] == 7
    assert cache.census().host["ready_held"] == 0
    assert cache.census().num_leases == 0
    assert cache.check() == []


def test_release_while_reloading_frees_both_ends() -> None:
    """A lease that ends on its way up leaves its committed bytes on the device and nothing else."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=1)
    outcome = reload(cache, lease.lease_id)

    release(cache, lease.lease_id)
    land(cache, the_copy(outcome))

    assert cache.census().device["free"] == 7
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


# Expiry ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "state"),
    [(LEASE_SECONDS - 0.1, State.RESERVED), (LEASE_SECONDS, State.QUARANTINED)],
    ids=["just in time", "too late"],
)
def test_lease_expires_at_its_deadline(now: float, state: State) -> None:
    """A lease that was not renewed in time is quarantined, not sooner."""
    cache = a_cache()
    lease = reserve(cache)

    tick(cache, now)

    assert states(cache, lease.block_ids) == {state}


def test_quarantined_blocks_are_nobodys_to_have() -> None:
    """Time proves nothing: a stalled worker may still write, so nobody gets its quarantined blocks."""
    cache = a_cache(2)
    reserve(cache, 2)
    tick(cache, LEASE_SECONDS)
    tick(cache, 1000 * LEASE_SECONDS)

    with pytest.raises(PoolFullError):
        reserve(cache, 1, "next", worker_id=MATE)

    assert cache.census().counters["leases_expired"] == 1
    assert cache.check() == []


def test_committed_blocks_of_an_expired_lease_stay_findable() -> None:
    """Nobody writes to a committed block, so it stays findable when its lease expires."""
    cache = a_cache()
    committed(cache, keys(1), more=1)

    tick(cache, LEASE_SECONDS)

    assert found(cache, keys(1)) == (1, 0)
    assert cache.census().device["quarantined"] == 1


def test_expired_lease_in_the_host_pool_ends() -> None:
    """An expired lease in the host pool ends at once, for no worker can write to a slot."""
    cache = a_cache()
    evicted(cache, keys(1), more=1)

    tick(cache, LEASE_SECONDS)

    assert leases_of(cache) == []
    assert cache.census().host["free"] == 7
    assert found(cache, keys(1)) == (0, 1)


@pytest.mark.parametrize("verb", ["extend", "reserve", "heartbeat", "evict"])
def test_owners_word_revives_its_lease(verb: str) -> None:
    """Any later call of a stalled worker about its lease proves that the worker is alive."""
    cache = a_cache()
    lease = reserve(cache, 2)
    tick(cache, LEASE_SECONDS)

    if verb == "extend":
        extend(cache, lease.lease_id, 3, LEASE_SECONDS)
    elif verb == "reserve":
        assert reserve(cache, 2, now=LEASE_SECONDS) == lease
    elif verb == "evict":
        evict(cache, lease.lease_id, now=LEASE_SECONDS)
    else:
        beat(cache, lease.lease_id, now=LEASE_SECONDS)

    tick(cache, 2 * LEASE_SECONDS - 1)
    assert states(cache, lease.block_ids) == {State.RESERVED}
    assert cache.check() == []


def test_release_of_a_quarantined_lease_frees_its_blocks() -> None:
    """A release by the owner proves that it writes no more."""
    cache = a_cache(2)
    lease = reserve(cache, 2)
    tick(cache, LEASE_SECONDS)

    release(cache, lease.lease_id)

    assert cache.census().device["free"] == 2


# Heartbeat ------------------------------------------------------------------------------------------------------------


def beat(
    cache: Cache,
    *lease_ids: LeaseId,
    newest: LeaseId = NEWEST,
    now: float,
    worker_id: WorkerId = WORKER,
) -> tuple[list[int], int]:
    """Send a heartbeat, and return the leases unknown to the daemon and the number of orphans that it ended."""
    command = c.Heartbeat(worker_id=worker_id, lease_ids=lease_ids, newest_lease_id=newest)
    reply = answer(cache.handle(command, now), Beat)
    unknown = [int(one) for one in np.frombuffer(reply.unknown_lease_ids, np.int64)]
    return unknown, reply.num_orphans_ended


def test_heartbeat_renews_what_it_names() -> None:
    """A named lease lives for another lease time."""
    cache = a_cache()
    lease = reserve(cache)

    assert beat(cache, lease.lease_id, now=20.0) == ([], 0)
    tick(cache, 20.0 + LEASE_SECONDS - 1)

    assert states(cache, lease.block_ids) == {State.RESERVED}


def test_heartbeat_names_unknown_leases() -> None:
    """A heartbeat tells a worker which of its leases have ended, and nothing about others' leases."""
    cache = a_cache()
    lease = reserve(cache, worker_id=MATE)

    unknown, _ = beat(cache, LeaseId(77), lease.lease_id, now=0.0)

    assert unknown == [77, lease.lease_id]
    assert leases_of(cache, MATE) == [lease.lease_id]


def test_heartbeat_ends_orphans() -> None:
    """A lease whose grant its worker never received ends with a heartbeat that does not name it."""
    cache = a_cache()
    kept, lost = reserve(cache, 1, "kept"), reserve(cache, 1, "lost")

    _, num_ended = beat(cache, kept.lease_id, newest=lost.lease_id, now=11.0)

    assert num_ended == 1
    assert leases_of(cache) == [kept.lease_id]
    assert cache.census().counters["leases_orphaned"] == 1


def test_heartbeat_tells_how_far_ids_were_granted() -> None:
    """No lease of any worker is newer than the id that a heartbeat returns, and every later lease is."""
    cache = a_cache()
    theirs = reserve(cache, 1, "theirs", worker_id=MATE)
    command = c.Heartbeat(worker_id=WORKER, lease_ids=(), newest_lease_id=LeaseId(0))

    told = answer(cache.handle(command, 0.0), Beat).newest_lease_id

    assert theirs.lease_id <= told < reserve(cache, 1, "later").lease_id


def test_heartbeat_spares_leases_that_are_news() -> None:
    """A lease newer than the newest that the heartbeat knew of is no orphan; an older one that it does not name is."""
    cache = a_cache()
    old = reserve(cache, 1, "old")
    new = reserve(cache, 1, "new")

    assert beat(cache, newest=LeaseId(old.lease_id - 1), now=0.0)[1] == 0
    assert beat(cache, newest=old.lease_id, now=0.0)[1] == 1

    assert leases_of(cache) == [new.lease_id]


def test_heartbeat_spares_leases_that_are_loading() -> None:
    """A lease that is still loading is no orphan, for its worker has not been told of it."""
    cache = a_cache()
    on_host(cache, keys(1))
    cache.handle(a_reserve(1, "r", keys(1), wait_ms=600_000), 0.0)

    assert beat(cache, now=20.0) == ([], 0)

    assert len(leases_of(cache)) == 1


def test_heartbeat_of_an_unknown_worker_is_refused() -> None:
    """A worker that was taken for dead learns that it must attach again."""
    with pytest.raises(UnknownWorkerError):
        beat(a_cache(), now=0.0, worker_id=WorkerId(99))


# Workers --------------------------------------------------------------------------------------------------------------


def test_attached_worker_is_known_by_its_tenant() -> None:
    """A worker belongs to a tenant; zero stands for none."""
    cache = a_cache()

    outcome = cache.handle(c.Attach(worker_id=WorkerId(9), tenant_digest=OTHER_TENANT), 0.0)

    assert answer(outcome, Done) == Done()
    assert (cache.tenant_of(WORKER), cache.tenant_of(WorkerId(9))) == (TENANT, OTHER_TENANT)
    with pytest.raises(InvalidError, match="not the digest of a tenant"):
        cache.handle(c.Attach(worker_id=WorkerId(10), tenant_digest=0), 0.0)


@pytest.mark.parametrize("end", [c.Detach, c.WorkerDied], ids=["detached", "died"])
def test_end_of_a_worker_ends_all_that_is_its_own(end: type[c.Detach | c.WorkerDied]) -> None:
    """A worker that detaches or is proven dead writes no more: all of its blocks are free, even quarantined ones."""
    cache = a_cache(8)
    reserve(cache, 2, "a")
    tick(cache, LEASE_SECONDS)
    reserve(cache, 2, "b")
    other = reserve(cache, 1, worker_id=MATE)

    outcome = cache.handle(end(worker_id=WORKER), LEASE_SECONDS)

    assert answer(outcome, Detached).num_leases == 2
    assert cache.census().device["free"] == 7
    assert leases_of(cache, MATE) == [other.lease_id]
    assert cache.check() == []


def test_second_death_changes_nothing() -> None:
    """A second report of a death is answered; a second detach is refused."""
    cache = a_cache()
    cache.handle(c.WorkerDied(worker_id=WORKER), 0.0)

    again = cache.handle(c.WorkerDied(worker_id=WORKER), 0.0)

    assert answer(again, Detached).num_leases == 0
    with pytest.raises(UnknownWorkerError):
        cache.handle(c.Detach(worker_id=WORKER), 0.0)


def test_worker_without_leases_ends() -> None:
    """A worker that never reserved anything leaves nothing behind."""
    cache = a_cache()

    outcome = cache.handle(c.Detach(worker_id=WORKER), 0.0)

    assert answer(outcome, Detached).num_leases == 0
    assert cache.census().num_workers == 2


# Counting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [c.Detach, c.WorkerDied])
def test_leases_that_end_with_their_worker_are_counted(
    ends: type[c.Detach] | type[c.WorkerDied],
) -> None:
    """Leases that end by a detach are counted apart from those that end by a death; released ones count as released."""
    cache = a_cache()
    for name in ("a", "b", "c"):
        reserve(cache, 1, name)
    release(cache, LeaseId(leases_of(cache)[0]))

    cache.handle(ends(worker_id=WORKER), 1.0)

    how = End.DETACHED if ends is c.Detach else End.DIED
    assert counted(cache) == {End.RELEASED: 1, how: 2}
    assert cache.check() == []


def test_evicted_lease_that_is_not_renewed_is_counted() -> None:
    """In the host pool an unrenewed lease ends and is counted; on the device it is only late, and is not counted."""
    cache = a_cache()
    evicted(cache, keys(1))
    reserve(cache, 1, "on the device", now=1.0)

    tick(cache, 3 * LEASE_SECONDS)

    assert cache.census().counters["leases_expired"] == 2
    assert counted(cache) == {End.EXPIRED: 1}
    assert cache.check() == []


def test_orphan_is_counted() -> None:
    """A lease that its worker has lost is counted as an orphan."""
    cache = a_cache()
    reserve(cache, 1, "lost")

    beat(cache, newest=NEWEST, now=11.0)

    assert counted(cache) == {End.ORPHANED: 1}
    assert cache.check() == []


def test_lease_that_was_never_granted_is_not_counted() -> None:
    """A lease that its caller gives up while the prefix is loading was never granted, so no end is counted."""
    cache = a_cache()
    on_host(cache, keys(1))
    before = counted(cache)
    cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)
    (lease_id,) = leases_of(cache)

    release(cache, LeaseId(lease_id))

    assert counted(cache) == before
    assert cache.check() == []


def test_check_finds_an_end_that_is_not_counted() -> None:
    """The check compares granted leases with those that live or have ended."""
    cache = a_cache()
    reserve(cache)
    cache._state.counters["leases_ended_died"] += 1

    assert cache.check() == ["1 leases were granted or recovered, but 1 are live and 1 have ended"]


def counted(cache: Cache) -> dict[End, int]:
    """Return how many leases ended in each way, without the ways in which none did."""
    counters = cache.census().counters
    return {end: counters[name] for end, name in ENDED.items() if counters.get(name)}
