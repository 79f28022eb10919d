"""Laws of the ends of copies: bytes that arrive are verified, and blocks in doubt are kept from everyone."""

import numpy as np
import pytest

from kvlease.errors import CopyFailedError
from kvlease.ids import CopyId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Copy, Direction, Done, Reloaded, Reserved, Tier
from tests.unit.service.core.builders import (
    MATE,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    answer,
    cached,
    committed,
    copies,
    evict,
    evicted,
    fail,
    found,
    ids,
    keys,
    land,
    lose,
    on_host,
    records,
    reload,
    reload_keys,
    reloaded,
    reserve,
    the_copy,
    wakes,
    woken,
)


def loading(cache: Cache, packed: bytes, request_id: str = "r") -> tuple[Copy, int | None]:
    """Have a reserve load its prefix from the host pool; return the copy and the caller's ticket."""
    command = a_reserve(len(packed) // 32, request_id, packed, wait_ms=WAIT_MS)
    outcome = cache.handle(command, 0.0)
    return the_copy(outcome), outcome.ticket


# Calls that wait anew -------------------------------------------------------------------------------------------------


def test_call_that_starts_over_is_served_by_the_end_of_the_copy_that_it_joined() -> None:
    """A call that joined the large copy of a lease that comes back is served at once if that copy is damaged."""
    cache = a_cache(blocks_at_once=1)
    lease = committed(cache, keys(1, 2, 3), "evicted")
    evict(cache, lease.lease_id)
    land(cache, settled(cache))
    cache.settle()
    reload(cache, lease.lease_id)
    back = settled(cache)
    joined = cache.handle(a_reserve(3, "joined", keys(1, 2, 3), wait_ms=WAIT_MS), 0.0)
    assert copies(joined) == []

    ended = land(cache, back, failed=(2,))

    granted = woken(ended, joined.ticket, Reserved)
    assert granted.device_hit_tokens == 2 * TOKENS_PER_BLOCK


def test_reload_of_a_large_lease_begins_at_the_end_of_the_copy_that_takes_it_down() -> None:
    """A call that asks for a large lease while that leaves is served once the lease is down, not by a later command."""
    cache = a_cache(blocks_at_once=1)
    lease = committed(cache, keys(1, 2, 3), "evicted")
    evict(cache, lease.lease_id)
    down = settled(cache)
    reload(cache, lease.lease_id)

    back = the_copy(land(cache, down))

    assert (back.direction, back.source_ids) == (Direction.RELOAD, down.target_ids)


def test_reload_of_a_large_lease_whose_blocks_stay_is_answered_once_it_is_down() -> None:
    """If another lease keeps the blocks here, the end of the copy that takes the lease down answers its reload."""
    cache = a_cache(blocks_at_once=1)
    lease = committed(cache, keys(1, 2, 3), "evicted")
    reserve(cache, 3, "other", keys(1, 2, 3))
    evict(cache, lease.lease_id)
    down = settled(cache)
    outcome = reload(cache, lease.lease_id)

    landed = land(cache, down)

    assert woken(landed, outcome.ticket, Reloaded).num_reloaded == 0


def settled(cache: Cache) -> Copy:
    """Do what a large move has put off, and return the copy that it starts."""
    cache.settle()
    (copy,) = [one for one in cache.take_effects() if isinstance(one, Copy)]
    return copy


# Checksums ------------------------------------------------------------------------------------------------------------


def test_checksum_travels_down_and_up() -> None:
    """Bytes on their way up must have the checksum that the mover took on their way down."""
    cache = a_cache()
    cached(cache, keys(1, 2))
    down = the_copy(cache.handle(c.Evict(keys=keys(1, 2)), 0.0))
    checksums = np.array([11, 22], np.uint64).tobytes()
    cache.handle(c.CopyDone(copy_id=down.copy_id, checksums=checksums), 0.0)

    up = the_copy(reload_keys(cache, keys(1, 2)))
    land(cache, up)

    assert (down.direction, down.checksums) == (Direction.OFFLOAD, b"")
    assert (up.direction, up.checksums) == (Direction.RELOAD, checksums)
    assert records(cache).device.checksum[ids(up.target_ids)].tolist() == [11, 22]


def test_copy_without_checksums_leaves_none() -> None:
    """A copy without checksums erases the checksums of earlier bytes."""
    cache = a_cache()
    on_host(cache, keys(1))

    assert set(the_copy(reload_keys(cache, keys(1))).checksums) == {0}


def test_damaged_slot_is_retired() -> None:
    """A slot whose bytes differ from what was written is never used again, and its key is a miss."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    outcome = reload_keys(cache, keys(1, 2))

    landed = land(cache, the_copy(outcome), failed=(0,))

    woken(landed, outcome.ticket, CopyFailedError)
    assert found(cache, keys(1)) == (0, 0)
    assert found(cache, keys(2)) == (1, 0)
    assert cache.census().host["bad"] == 1
    assert cache.census().counters["checksum_failures"] == 1
    assert cache.check() == []


def test_reserve_starts_over_without_the_damaged_bytes() -> None:
    """A request gets the blocks that came whole, and computes the rest."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    copy, ticket = loading(cache, keys(1, 2))

    landed = land(cache, copy, failed=(1,))

    lease = woken(landed, ticket, Reserved)
    assert (lease.device_hit_tokens, lease.host_hit_tokens) == (0, 4)
    assert cache.census().host["bad"] == 1
    assert cache.check() == []


def test_reserve_that_started_over_counts_its_tokens_once() -> None:
    """The tokens on the device, those brought up and those to be computed add up to the request."""
    cache = a_cache()
    on_host(cache, keys(1, 2, 3))
    land(cache, the_copy(reload_keys(cache, keys(1))))
    copy, _ = loading(cache, keys(1, 2, 3))
    before = cache.census().counters

    land(cache, copy, failed=(1,))

    after = cache.census().counters
    names = [f"prefix_tokens_{part}" for part in ("device", "host", "computed")]
    assert [after[name] - before.get(name, 0) for name in names] == [TOKENS_PER_BLOCK] * 3
    assert after["leases_granted"] == before["leases_granted"] + 1


def test_reserve_that_joined_a_damaged_copy_starts_over_too() -> None:
    """No call is served bytes that did not match, however many wait for them."""
    cache = a_cache()
    on_host(cache, keys(1))
    copy, first = loading(cache, keys(1), "a")
    second = cache.handle(a_reserve(1, "b", keys(1), worker_id=MATE, wait_ms=WAIT_MS), 0.0)

    landed = land(cache, copy, failed=(0,))

    leases = [woken(landed, ticket, Reserved) for ticket in (first, second.ticket)]
    assert [lease.device_hit_tokens for lease in leases] == [0, 0]
    assert cache.check() == []


def test_commit_of_a_key_on_its_way_is_found_though_the_copy_fails() -> None:
    """What is computed while a copy is to bring it serves at once, and also who waits for the copy."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    copy, ticket = loading(cache, keys(1, 2))
    lease = committed(cache, keys(1, 2), "computed")

    failed = fail(cache, copy)

    assert woken(failed, ticket, Reserved).device_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert woken(failed, ticket, Reserved).block_ids == lease.block_ids
    assert cache.check() == []


def test_copy_of_a_key_that_is_committed_meanwhile_ends_as_any_other() -> None:
    """Who waited for the copy gets the committed block, and what the copy brought is free again."""
    cache = a_cache()
    on_host(cache, keys(1, 2))
    copy, ticket = loading(cache, keys(1, 2))
    lease = committed(cache, keys(1), "computed")

    reply = woken(land(cache, copy), ticket, Reserved)

    assert ids(reply.block_ids)[0] == ids(lease.block_ids)[0]
    assert cache.census().device["reserved"] == 0
    assert cache.check() == []


@pytest.mark.parametrize("at", [0, 1], ids=["committed", "private"])
def test_evicted_lease_with_damaged_bytes_ends(at: int) -> None:
    """A lease whose bytes are damaged ends, for nothing else has them; its worker recomputes."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=1)
    outcome = reload(cache, lease.lease_id)

    landed = land(cache, the_copy(outcome), failed=(at,))

    woken(landed, outcome.ticket, CopyFailedError)
    assert cache.census().num_leases == 0
    assert cache.census().host["bad"] == 1
    assert cache.check() == []


def test_lease_that_shares_a_damaged_slot_ends() -> None:
    """A lease in the host pool that shares the damaged slot ends, too."""
    cache = a_cache()
    evicted(cache, keys(1))
    outcome = reload_keys(cache, keys(1))

    land(cache, the_copy(outcome), failed=(0,))

    assert cache.census().num_leases == 0
    assert cache.check() == []


def test_lease_with_whole_bytes_outlives_damage_beside_them() -> None:
    """A lease that joined a copy in which other bytes were damaged keeps its own, and can be reloaded again."""
    cache = a_cache()
    lease = evicted(cache, keys(1))
    on_host(cache, keys(2))
    prefetch = reload_keys(cache, keys(1, 2))
    outcome = reload(cache, lease.lease_id)

    landed = land(cache, the_copy(prefetch), failed=(1,))

    woken(landed, outcome.ticket, CopyFailedError)
    assert cache.census().num_leases == 1
    assert len(ids(reserve(cache, 1, "again", keys(1)).block_ids)) == 1
    assert reload(cache, lease.lease_id).reply is not None
    assert cache.check() == []


def test_damaged_bytes_reach_no_block() -> None:
    """The target of damaged bytes is free, under a new generation."""
    cache = a_cache(1)
    on_host(cache, keys(1))
    outcome = reload_keys(cache, keys(1))
    generation = records(cache).device.generation[0]

    land(cache, the_copy(outcome), failed=(0,))

    assert cache.census().device["free"] == 1
    assert records(cache).device.generation[0] > generation


# Failures and losses --------------------------------------------------------------------------------------------------


def test_failed_copy_frees_its_targets() -> None:
    """If a mover reports a failure, it writes no more, so the targets are free."""
    cache = a_cache()
    on_host(cache, keys(1))

    fail(cache, the_copy(reload_keys(cache, keys(1))))

    assert cache.census().device["free"] == 8
    assert cache.census().counters["copies_failed"] == 1


def test_lost_copy_keeps_both_ends() -> None:
    """A silent mover may still read and write, so nobody gets either end of its copy."""
    cache = a_cache(1)
    on_host(cache, keys(1))

    lose(cache, the_copy(reload_keys(cache, keys(1))))

    census = cache.census()
    assert census.device["quarantined"] == 1
    assert census.host["ready_held"] == 1
    assert census.counters["copies_lost"] == 1
    assert cache.check() == []


@pytest.mark.parametrize("end", ["done", "failed", "mover died"])
def test_end_of_a_lost_copy_frees_both_ends(end: str) -> None:
    """When the mover answers after all, or is dead, its result is not used, and both ends are let go of."""
    cache = a_cache(1)
    on_host(cache, keys(1))
    copy = the_copy(reload_keys(cache, keys(1)))
    lose(cache, copy)

    if end == "done":
        land(cache, copy)
    elif end == "failed":
        fail(cache, copy)
    else:
        cache.handle(c.MoverDied(), 0.0)

    assert cache.census().device["free"] == 1
    assert cache.census().host["ready_held"] == 0
    assert found(cache, keys(1)) == (0, 1)
    assert cache.check() == []


def test_second_loss_changes_nothing() -> None:
    """A copy is lost only once, and one that has ended is not lost."""
    cache = a_cache()
    on_host(cache, keys(1))
    copy = the_copy(reload_keys(cache, keys(1)))
    lose(cache, copy)
    before = cache.census()

    assert answer(lose(cache, copy), Done) == Done()
    cache.handle(c.CopyLost(copy_id=CopyId(99)), 0.0)

    assert cache.census() == before


@pytest.mark.parametrize("kind", [c.CopyDone, c.CopyFailed])
def test_end_of_an_unknown_copy_is_counted(kind: type[c.CopyDone | c.CopyFailed]) -> None:
    """The end of a copy of an earlier life, or a second end of one copy, is counted and changes nothing."""
    cache = a_cache()

    cache.handle(kind(copy_id=CopyId(99)), 0.0)

    assert cache.census().counters["copies_unknown"] == 1


def test_bytes_lost_on_their_way_can_be_brought_again() -> None:
    """Bytes of a lost copy can be copied again, to another block."""
    cache = a_cache()
    on_host(cache, keys(1))
    lost = the_copy(reload_keys(cache, keys(1)))
    lose(cache, lost)

    outcome = reload_keys(cache, keys(1))
    land(cache, the_copy(outcome))
    land(cache, lost)

    assert the_copy(outcome).target_ids != lost.target_ids
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


def test_death_of_the_mover_ends_all_its_copies() -> None:
    """When a mover dies, all of its copies have failed, whatever they were for."""
    cache = a_cache()
    on_host(cache, keys(1))
    reload_keys(cache, keys(1))
    lease = reserve(cache, 2)
    outcome = evict(cache, lease.lease_id)

    died = cache.handle(c.MoverDied(), 0.0)

    woken(died, outcome.ticket, CopyFailedError)
    assert cache.census().num_copies == 0
    assert cache.census().counters["copies_failed"] == 2
    assert cache.check() == []


def test_reused_block_is_noticed() -> None:
    """A copy whose target was handed out meanwhile is noticed as our own mistake."""
    cache = a_cache()
    on_host(cache, keys(1))
    copy = the_copy(reload_keys(cache, keys(1)))
    records(cache).device.generation[ids(copy.target_ids)] += np.uint64(1)

    with pytest.raises(AssertionError, match="reused"):
        land(cache, copy)


# Scrubbing ------------------------------------------------------------------------------------------------------------


def scrubbing(cache: Cache) -> tuple[Copy, int | None]:
    """Have a worker of another tenant wait for both blocks of a cache, which must be scrubbed first."""
    cached(cache, keys(1, 2))
    command = a_reserve(2, worker_id=STRANGER, wait_ms=WAIT_MS)
    outcome = cache.handle(command, 0.0)
    return the_copy(outcome), outcome.ticket


def test_scrubbed_block_belongs_to_no_tenant() -> None:
    """A zeroed block suits every tenant."""
    cache = a_cache(2, num_slots=0)
    copy, ticket = scrubbing(cache)

    landed = land(cache, copy)

    assert (copy.direction, copy.source_ids) == (Direction.SCRUB, b"")
    woken(landed, ticket, Reserved)
    assert TENANT not in records(cache).device.tenant


@pytest.mark.parametrize("end", [c.CopyFailed, c.MoverDied], ids=["failed", "mover died"])
def test_scrub_that_failed_is_tried_again(end: type[c.CopyFailed | c.MoverDied]) -> None:
    """A block whose scrub failed may hold another tenant's bytes, so it is scrubbed again before it is granted."""
    cache = a_cache(2, num_slots=0)
    copy, ticket = scrubbing(cache)
    command = c.MoverDied() if end is c.MoverDied else c.CopyFailed(copy_id=copy.copy_id)

    failed = cache.handle(command, 0.0)

    assert ticket not in wakes(failed)
    assert set(ids(the_copy(failed).target_ids)) == set(ids(copy.target_ids))
    woken(land(cache, the_copy(failed)), ticket, Reserved)


def test_block_whose_scrub_was_lost_is_kept_until_the_mover_speaks() -> None:
    """A block that a lost scrub may still zero is nobody's, and needs another scrub."""
    cache = a_cache(2, num_slots=0)
    copy, ticket = scrubbing(cache)

    lost = lose(cache, copy)
    assert cache.census().device["quarantined"] == 2
    late = land(cache, copy)

    assert copies(lost) == []
    assert ticket not in wakes(late)
    woken(land(cache, the_copy(late)), ticket, Reserved)
    assert cache.check() == []


# Races ----------------------------------------------------------------------------------------------------------------


def test_lease_that_died_while_it_was_evicted_leaves_only_cached_bytes() -> None:
    """A copy that lands after its lease has ended frees the private blocks, and leaves the committed ones cached."""
    cache = a_cache()
    lease = committed(cache, keys(1), more=1)
    outcome = evict(cache, lease.lease_id)

    cache.handle(c.WorkerDied(worker_id=WORKER), 0.0)
    land(cache, the_copy(outcome))

    assert cache.census().host["reserved"] == 0
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


def test_states_of_a_copys_target() -> None:
    """The target of a copy is being filled while the copy is in flight, and committed once it has landed."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = reload_keys(cache, keys(1))
    (target,) = ids(the_copy(outcome).target_ids)
    assert records(cache).device.state[target] == State.FILLING

    reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert records(cache).device.state[target] == State.READY


def test_slots_are_told_as_retired_when_no_others_are_in_use() -> None:
    """Retired slots are told of once no others are in use; parked slots are not in use either."""
    cache = a_cache(num_slots=3)
    state = records(cache).host.state

    state[:2] = State.BAD
    assert cache.num_retired(Tier.HOST) == 0
    state[2] = State.PARKED
    assert cache.num_retired(Tier.HOST) == 2
    state[:] = State.PARKED
    assert cache.num_retired(Tier.HOST) == 0
    assert a_cache().num_retired(Tier.DISK) == 0
