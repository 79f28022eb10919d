"""Laws of the copies in the background: each block goes down once, and no call gets less room because of them."""

from collections.abc import Callable
from typing import Any

import pytest

from kvlease.errors import PoolFullError
from kvlease.ids import Epoch, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.checks.tier_checks import tier_violations
from kvleased.core.copies.cleaning import BLOCKS_MAX
from kvleased.core.effects import (
    Copy,
    Direction,
    Evicted,
    Forked,
    Mover,
    Outcome,
    Reserved,
    Tier,
)
from kvleased.core.shape import WritePolicy
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import Flight, Purpose
from tests.unit.service.core.builders import (
    TENANT,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    answer,
    cached,
    commit,
    committed,
    copies,
    evict,
    fail,
    found,
    ids,
    keys,
    land,
    lose,
    on_host,
    records,
    release,
    reserve,
    the_copy,
    tick,
    woken,
)
from tests.unit.service.core.grouped import STATE, cache_of, chain, reserve_tokens
from tests.unit.service.core.tier_builders import (
    a_patient_reserve,
    a_remote_cache,
    a_tiered_cache,
    dirty_slots,
    doc,
    label_keys,
    label_numbers,
    looked_up,
    on_disk,
    probed,
    probes,
    the_copies,
    the_probe,
    turn,
)

THROUGH = WritePolicy.WRITE_THROUGH


def outcome_of_commit(cache: Cache, packed: bytes, request_id: str = "r") -> Outcome:
    """Commit the blocks of keys, and return what that starts."""
    lease = reserve(cache, len(packed) // 32, request_id)
    command = c.Commit(
        worker_id=WORKER,
        lease_id=lease.lease_id,
        num_tokens=4 * (len(packed) // 32),
        first_block=0,
        keys=packed,
    )
    return cache.handle(command, 0.0)


def settled(cache: Cache, outcome: Outcome) -> list[Copy]:
    """Land all copies that are started until none is left, and return them."""
    landed, left = [], copies(outcome)
    while left:
        copy = left.pop(0)
        landed.append(copy)
        left += copies(land(cache, copy))
    assert cache.check() == []
    return landed


def loaded(cache: Cache, packed: bytes) -> tuple[Reserved, Copy]:
    """Reserve blocks that the disk store has; return the lease, and the copy that starts when they have come."""
    outcome = cache.handle(a_patient_reserve(packed), 0.0)
    landed = land(cache, the_copy(outcome))
    return woken(landed, outcome.ticket, Reserved), the_copies(landed)[Direction.OFFLOAD]


def of_direction(landed: list[Copy], direction: Direction) -> list[int]:
    """Return the sources of all copies of one direction."""
    return sorted(
        one for copy in landed if copy.direction is direction for one in ids(copy.source_ids)
    )


# Down to the host pool ------------------------------------------------------------------------------------------------


def test_write_through_copies_what_is_committed() -> None:
    """Every committed block comes to the host pool, while its lease goes on."""
    cache = a_cache(8, 16, write_policy=THROUGH)

    landed = settled(cache, outcome_of_commit(cache, doc(4)))

    assert {copy.direction for copy in landed} == {Direction.OFFLOAD}
    assert len(of_direction(landed, Direction.OFFLOAD)) == 4
    assert cache.census().host["ready"] == 4
    assert cache.census().counters["offloads"] == 4


def test_what_was_written_through_leaves_without_a_copy() -> None:
    """Blocks that are below already leave without another copy."""
    cache = a_cache(4, 16, write_policy=THROUGH)
    settled(cache, outcome_of_commit(cache, doc(4)))
    for lease_id in cache._state.leases.by_id.copy():
        release(cache, lease_id)

    lease = answer(cache.handle(a_reserve(4, "n", wait_ms=WAIT_MS), 0.0), Reserved)

    assert len(ids(lease.block_ids)) == 4
    assert found(cache, doc(4)) == (0, 4)


def test_nothing_is_copied_on_commit_unless_wanted() -> None:
    """By default blocks are written back when they are about to leave."""
    cache = a_cache(8, 16)

    assert copies(outcome_of_commit(cache, doc(4))) == []


def test_nothing_is_copied_where_there_is_no_host_pool() -> None:
    """A cache without a host pool has nowhere to write through to."""
    cache = a_cache(8, 0, write_policy=THROUGH)

    assert copies(outcome_of_commit(cache, doc(4))) == []


def test_each_mover_has_one_copy_in_the_background() -> None:
    """What is committed during a copy is part of the next one."""
    cache = a_cache(32, 32, write_policy=THROUGH)
    first = the_copy(outcome_of_commit(cache, doc(3)))

    assert copies(outcome_of_commit(cache, doc(3, 10), "s")) == []
    second = the_copy(land(cache, first))

    assert len(ids(first.source_ids)) == 3
    assert len(ids(second.source_ids)) == 3


def test_background_copy_has_a_bound() -> None:
    """No copy in the background is longer than the bound on what a request may have to wait behind."""
    cache = a_cache(4096, 4096, write_policy=THROUGH)

    first = the_copy(outcome_of_commit(cache, doc(600)))

    assert len(ids(first.source_ids)) == BLOCKS_MAX
    landed = settled(cache, Outcome(effects=[first]))
    assert [len(ids(copy.source_ids)) for copy in landed] == [
        BLOCKS_MAX,
        BLOCKS_MAX,
        600 - 2 * BLOCKS_MAX,
    ]


def test_background_copies_leave_slots_for_those_who_need_them() -> None:
    """A lease can be evicted while blocks are written through."""
    cache = a_cache(16, 8, write_policy=THROUGH)
    lease = reserve(cache, 1, "mine")
    outcome_of_commit(cache, doc(8))

    evicting = evict(cache, lease.lease_id)

    assert evicting.ticket is not None
    assert cache.check() == []


def test_nothing_is_written_through_while_calls_wait() -> None:
    """While calls wait, nothing is written through, for the blocks that leave for them go first."""
    cache = a_cache(4, 8, write_policy=THROUGH)
    first = the_copy(outcome_of_commit(cache, doc(2)))
    cache.handle(a_reserve(4, "waits", wait_ms=WAIT_MS), 0.0)

    assert copies(land(cache, first)) == []


def test_write_through_stops_where_no_slot_is_left() -> None:
    """If no slot is left but those of evicted leases, blocks stay on the device."""
    cache = a_cache(8, 2, write_policy=THROUGH)
    lease = reserve(cache, 2, "evicted")
    land(cache, the_copy(evict(cache, lease.lease_id)))

    assert copies(outcome_of_commit(cache, doc(2))) == []
    assert cache.check() == []


def test_write_through_goes_on_in_a_smaller_host_pool() -> None:
    """What is kept available for others is a part of the slots in use, however many there were before."""
    cache = a_cache(8, 16, write_policy=THROUGH)
    cache.handle(c.Resize(tier=Tier.HOST, num_blocks=2), 0.0)

    settled(cache, outcome_of_commit(cache, doc(2)))

    assert cache.census().host["ready"] == 2
    assert cache.check() == []


def test_background_copies_hold_little_of_a_smaller_pool() -> None:
    """A copy in the background holds only a part of the blocks that are in use."""
    cache = a_cache(64, 64, write_policy=THROUGH)
    cache.handle(c.Resize(tier=Tier.DEVICE, num_blocks=16), 0.0)

    assert len(ids(the_copy(outcome_of_commit(cache, doc(8))).source_ids)) == 2


def test_blocks_that_have_left_are_not_written_through() -> None:
    """A block that was evicted before its turn is not written through."""
    cache = a_cache(16, 16, write_policy=THROUGH)
    lease = committed(cache, doc(2), "first")
    cache.take_effects()
    release(cache, lease.lease_id)
    copy_id = next(iter(cache._state.flights))
    outcome_of_commit(cache, doc(2, 20), "second")
    cache.handle(c.CopyFailed(copy_id=copy_id), 0.0)
    for lease_id in cache._state.leases.by_id.copy():
        release(cache, lease_id)
    answer(cache.handle(a_reserve(16, "all"), 0.0), Reserved)

    assert copies(tick(cache, 5.0)) == []
    assert cache.check() == []


def test_hits_bring_a_block_down() -> None:
    """A block goes to the host pool once it was found as often as configured, and not before."""
    cache = a_cache(16, 16, write_policy=WritePolicy.AFTER_N_HITS, write_after_hits=2)
    cached(cache, doc(2))

    once = cache.handle(a_reserve(2, "a", doc(2)), 0.0)
    twice = cache.handle(a_reserve(2, "b", doc(2)), 0.0)
    settled(cache, twice)
    again = cache.handle(a_reserve(2, "c", doc(2)), 0.0)

    assert copies(once) == []
    assert len(ids(the_copy(twice).source_ids)) == 2
    assert copies(again) == []
    assert found(cache, doc(2)) == (2, 0)
    assert cache.census().host["ready"] == 2


def test_hits_of_an_earlier_block_do_not_count() -> None:
    """The hits of a block do not count for what is filled into it later."""
    cache = a_cache(1, 8, write_policy=WritePolicy.AFTER_N_HITS, write_after_hits=2)
    cached(cache, keys(1))
    release(cache, answer(cache.handle(a_reserve(1, "a", keys(1)), 0.0), Reserved).lease_id)
    cached(cache, keys(2))

    assert copies(cache.handle(a_reserve(1, "b", keys(2)), 0.0)) == []


def test_hits_of_what_came_up_again_start_from_nothing() -> None:
    """A block that was brought up is below already, and is not copied again however often it is found."""
    cache = a_cache(4, 8, write_policy=WritePolicy.AFTER_N_HITS, write_after_hits=1)
    on_host(cache, keys(1))
    outcome = cache.handle(a_patient_reserve(keys(1)), 0.0)
    land(cache, the_copy(outcome))

    assert copies(cache.handle(a_reserve(1, "b", keys(1)), 0.0)) == []
    assert cache.check() == []


# Down to the disk -----------------------------------------------------------------------------------------------------


def test_write_through_reaches_the_disk() -> None:
    """Every committed block goes to the host pool and from there to the disk store, each time once."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH)

    landed = settled(cache, outcome_of_commit(cache, doc(5)))

    assert len(of_direction(landed, Direction.OFFLOAD)) == 5
    assert len(of_direction(landed, Direction.STORE)) == 5
    assert cache.census().disk["ready"] == 5
    assert cache.census().counters["disk_stores"] == 5
    assert copies(tick(cache, 1.0)) == []


def test_store_carries_label_and_checksum() -> None:
    """A store copy carries the label of each block, and its checksum, which the store verifies first."""
    cache = a_tiered_cache(8, 1)
    records(cache).disk.generation[:] = 4
    cached(cache, keys(1))
    down = the_copy(cache.handle(c.Evict(keys=keys(1)), 0.0))

    landed = cache.handle(
        c.CopyDone(copy_id=down.copy_id, checksums=(11).to_bytes(8, "little")), 0.0
    )

    store = the_copies(landed)[Direction.STORE]
    assert store.source_ids == down.target_ids
    assert store.checksums == (11).to_bytes(8, "little")
    assert label_keys(store.labels) == keys(1)
    assert label_numbers(store.labels, "generation") == [4]
    assert label_numbers(store.labels, "tenant") == [TENANT]
    land(cache, store)
    slot = ids(store.target_ids)
    assert records(cache).disk.checksum[slot].tolist() == [11]
    assert cache.check() == []


@pytest.mark.parametrize("policy", WritePolicy)
def test_what_the_disk_had_is_copied_to_a_free_slot(policy: WritePolicy) -> None:
    """A block that was loaded from the disk store is in the host pool the next time, and nobody waits for that copy."""
    cache = a_tiered_cache(16, 16, write_policy=policy)
    on_disk(cache, doc(2))

    lease, down = loaded(cache, doc(2))

    assert down.direction is Direction.OFFLOAD
    assert ids(down.source_ids) == ids(lease.block_ids)
    release(cache, lease.lease_id)
    assert copies(land(cache, down)) == []
    cache.handle(c.Evict(keys=doc(2)), 0.0)
    assert looked_up(cache, doc(2)) == (0, 2, 0)
    assert cache.check() == []


def test_what_the_disk_had_takes_slots_that_the_disk_has_too() -> None:
    """Only blocks that the disk store has leave the host pool for what was loaded, the coldest first."""
    cache = a_tiered_cache(32, 4)
    for number in (20, 21, 22):
        settled(cache, dirty_slots(cache, keys(number)))
    on_disk(cache, doc(4) + keys(20))

    lease, down = loaded(cache, doc(4))

    assert ids(down.source_ids) == ids(lease.block_ids)[:2]
    assert looked_up(cache, keys(20)) == (0, 0, 1)
    assert looked_up(cache, keys(21)) == (0, 1, 0)
    assert cache.census().counters["blocks_dropped"] == 0
    assert copies(land(cache, down)) == []


def test_nothing_is_lost_for_what_the_disk_had() -> None:
    """Where every slot has a block's only copy, what was loaded is not copied, not even when a slot comes free."""
    cache = a_tiered_cache(16, 1)
    on_disk(cache, keys(1))
    outcome = cache.handle(a_patient_reserve(keys(1)), 0.0)
    (store,) = copies(dirty_slots(cache, keys(21)))

    assert copies(land(cache, the_copy(outcome))) == []

    assert looked_up(cache, keys(21)) == (0, 1, 0)
    fail(cache, store)
    assert [copy.direction for copy in copies(tick(cache, 2.0))] == [Direction.STORE]


def test_coldest_slots_are_kept_clean() -> None:
    """Without write-through, a part of the host pool can leave without loss at any time."""
    cache = a_tiered_cache(16, 8)
    assert copies(dirty_slots(cache, doc(7))) == []

    store = the_copies(dirty_slots(cache, keys(20)))[Direction.STORE]

    coldest = next(iter(cache._state.host.order))
    assert len(ids(store.source_ids)) == 1
    land(cache, store)
    assert next(iter(cache._state.host.order)) == ids(store.source_ids)[0] != coldest
    on_host(cache, keys(21))
    assert cache.census().counters["host_evictions"] == 1
    assert cache.census().counters["blocks_dropped"] == 0
    assert cache.check() == []


def test_slot_that_is_on_disk_is_not_stored_again() -> None:
    """A block that came from the disk is not stored again when it goes down."""
    cache = a_tiered_cache(16, 8, write_policy=THROUGH)
    on_disk(cache, doc(2))

    landed = settled(cache, outcome_of_commit(cache, doc(3)))

    assert len(of_direction(landed, Direction.STORE)) == 1
    assert cache.census().disk["ready"] == 3


def test_disk_that_is_full_drops_its_coldest() -> None:
    """The disk store drops the blocks that were used longest ago to make room."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH, num_disk_slots=2)

    settled(cache, outcome_of_commit(cache, doc(3)))

    counters = cache.census().counters
    assert cache.census().disk["ready"] == 2
    assert counters["disk_evictions"] == 1
    assert counters["blocks_dropped"] == 0
    assert copies(tick(cache, 1.0)) == []


def test_disk_all_of_which_is_being_read_takes_nothing() -> None:
    """If all disk slots are being read, nothing is stored."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH, num_disk_slots=1)
    on_disk(cache, keys(30))
    cache.handle(a_patient_reserve(keys(30), "reads"), 0.0)

    landed = land(cache, the_copy(outcome_of_commit(cache, doc(1))))

    assert copies(landed) == []
    assert cache.check() == []


def test_nothing_is_stored_while_the_disk_is_off() -> None:
    """While a store is off, nothing is sent to it; afterwards it gets all that it missed."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH)
    turn(cache, Tier.DISK, on=False)
    settled(cache, outcome_of_commit(cache, doc(2)))

    landed = settled(cache, turn(cache, Tier.DISK, on=True))

    assert len(of_direction(landed, Direction.STORE)) == 2


@pytest.mark.parametrize("end", ["failed", "lost", "died"])
def test_store_that_fails_is_left_in_peace_and_tried_again(end: str) -> None:
    """A failed copy in the background is started again a little later, not at once."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH)
    store = the_copy(land(cache, the_copy(outcome_of_commit(cache, doc(1)))))

    if end == "failed":
        outcome = fail(cache, store)
    elif end == "lost":
        outcome = lose(cache, store)
        assert copies(tick(cache, 5.0)) == []
        outcome = cache.handle(c.CopyFailed(copy_id=store.copy_id), 4.5)
        assert [copy.direction for copy in copies(outcome)] == [Direction.STORE]
        return
    else:
        outcome = cache.handle(c.MoverDied(mover=Mover.DISK), 0.0)

    assert copies(outcome) == []
    assert copies(tick(cache, 0.5)) == []
    assert the_copy(tick(cache, 1.5)).direction is Direction.STORE
    assert cache.check() == []


def test_slot_that_the_store_does_not_take_is_not_tried_again() -> None:
    """A slot that the store refuses on its own stays in the host pool, and is not offered again."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH)
    store = the_copy(land(cache, the_copy(outcome_of_commit(cache, doc(2)))))

    landed = land(cache, store, failed=(0,))

    assert copies(landed) == []
    assert cache.census().counters["disk_store_failures"] == 1
    assert cache.census().host["ready"] == 2
    assert cache.census().disk["ready"] == 1
    assert copies(tick(cache, 9.0)) == []
    assert cache.check() == []


def test_write_through_that_fails_is_tried_again() -> None:
    """A block whose copy to the host pool failed is copied a little later."""
    cache = a_cache(16, 16, write_policy=THROUGH)
    first = the_copy(outcome_of_commit(cache, doc(1)))

    assert copies(fail(cache, first)) == []
    assert the_copy(tick(cache, 2.0)).source_ids == first.source_ids


def test_copies_that_somebody_asked_for_are_not_repeated() -> None:
    """If a copy that a caller asked for fails, the caller is told and decides."""
    cache = a_tiered_cache(16, 16)
    cached(cache, doc(1))
    down = the_copy(cache.handle(c.Evict(keys=doc(1)), 0.0))
    fail(cache, down)

    assert copies(tick(cache, 9.0)) == []


def test_leases_own_bytes_never_go_to_the_disk() -> None:
    """Private blocks of a lease have no key, so they never go to the disk."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH)
    lease = reserve(cache, 2, "private")

    landed = settled(cache, evict(cache, lease.lease_id))

    assert of_direction(landed, Direction.STORE) == []


def restarted(cache: Cache) -> Cache:
    """Return the cache of the next life over the same records, with its stores reported to work."""
    again = Cache.recovered(cache.shape, records(cache), Epoch(2), {WORKER: TENANT}, 0.0)
    for tier in (Tier.DISK, Tier.REMOTE):
        again._state.tiers_off.discard(tier)
    return again


def test_stores_count_for_nothing_after_a_restart_until_they_are_said_to_work() -> None:
    """After a restart, a store is neither searched nor written to until its mover has reported."""
    cache = a_remote_cache(16, 16, num_disk_slots=16, write_policy=THROUGH)
    on_disk(cache, doc(3))
    land(cache, the_copy(outcome_of_commit(cache, keys(9))))

    again = Cache.recovered(cache.shape, records(cache), Epoch(2), {WORKER: TENANT}, 0.0)

    assert looked_up(again, doc(3)) == (0, 0, 0)
    assert copies(again.handle(c.Tick(), 1.0)) == []
    assert probes(again.handle(a_patient_reserve(keys(50), "other"), 1.0)) == []
    shared, stored = turn(again, Tier.REMOTE, on=True), turn(again, Tier.DISK, on=True)
    assert the_copy(shared).direction is Direction.SHARE
    assert the_copy(stored).direction is Direction.STORE
    assert looked_up(again, doc(3)) == (0, 0, 3)
    assert again.check() == []


def test_many_slots_that_are_on_disk_are_passed_over() -> None:
    """After a restart all slots are looked at, a part at a time, and those that are below already are not copied."""
    cache = a_tiered_cache(8, 8, write_policy=THROUGH)
    settled(cache, outcome_of_commit(cache, doc(6)))
    again = restarted(cache)

    landed = settled(again, tick(again, 1.0)) + settled(again, tick(again, 2.0))

    assert landed == []
    assert again.census().disk["ready"] == 6


def test_restart_goes_on_with_what_was_not_copied_yet() -> None:
    """Blocks that the earlier life did not copy down are copied by the next one."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH)
    outcome_of_commit(cache, doc(4))
    again = restarted(cache)

    landed = settled(again, tick(again, 1.0))

    assert len(of_direction(landed, Direction.OFFLOAD)) == 4
    assert len(of_direction(landed, Direction.STORE)) == 4


# Down to the remote store ---------------------------------------------------------------------------------------------


def test_write_through_is_shared() -> None:
    """Every committed block goes to the remote store, under the label that others ask by."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)

    landed = settled(cache, outcome_of_commit(cache, doc(3)))

    shares = [copy for copy in landed if copy.direction is Direction.SHARE]
    assert sorted(label_keys(b"".join(one.labels for one in shares))) == sorted(doc(3))
    assert {one for share in shares for one in label_numbers(share.labels, "generation")} == {0}
    assert all(share.target_ids == b"" for share in shares)
    assert cache.census().counters["remote_stores"] == 3
    assert cache.census().host["ready_held"] == 0
    assert copies(tick(cache, 1.0)) == []


def test_coldest_slots_are_shared() -> None:
    """Without write-through, the blocks that leave next are shared."""
    cache = a_remote_cache(8, 1)

    share = the_copy(dirty_slots(cache, keys(1)))
    land(cache, share)
    on_host(cache, keys(2))

    assert share.direction is Direction.SHARE
    assert cache.census().counters["blocks_dropped"] == 0


def test_refusals_of_the_remote_store_are_counted_apart() -> None:
    """What the remote store does not accept is no failure of the disk store."""
    cache = a_remote_cache(8, 1)

    land(cache, the_copy(dirty_slots(cache, keys(1))), failed=(0,))

    counters = cache.census().counters
    assert counters["remote_store_failures"] == 1
    assert not counters.get("disk_store_failures")


def test_fetched_blocks_are_not_shared_again() -> None:
    """The mark of a block from the remote store goes with it on its way down and up."""
    cache = a_remote_cache(4, 1, num_disk_slots=4)
    outcome = cache.handle(a_patient_reserve(keys(1)), 0.0)
    landed = land(cache, the_copy(probed(cache, the_probe(outcome), 1)))
    lease = woken(landed, outcome.ticket, Reserved)
    release(cache, lease.lease_id)

    down = the_copy(cache.handle(c.Evict(keys=keys(1)), 0.0))
    first = settled(cache, land(cache, down))
    again = cache.handle(a_patient_reserve(keys(1), "again"), 0.0)
    landed = land(cache, the_copy(again))
    release(cache, woken(landed, again.ticket, Reserved).lease_id)
    second = settled(cache, cache.handle(c.Evict(keys=keys(1)), 0.0))

    assert [copy.direction for copy in first] == [Direction.STORE]
    assert second == []


def test_what_came_from_disk_is_known_to_be_shared() -> None:
    """The mark of the remote store's blocks goes to the disk and back, too."""
    cache = a_remote_cache(4, 1, num_disk_slots=4)
    settled(cache, dirty_slots(cache, keys(1)))
    settled(cache, dirty_slots(cache, keys(2)))
    assert looked_up(cache, keys(1)) == (0, 0, 1)
    outcome = cache.handle(a_patient_reserve(keys(1)), 0.0)
    landed = land(cache, the_copy(outcome))
    lease = woken(landed, outcome.ticket, Reserved)
    turn(cache, Tier.DISK, on=False)
    release(cache, lease.lease_id)

    settled(cache, cache.handle(c.Evict(keys=keys(1)), 0.0))

    assert cache.census().counters["remote_stores"] == 2


def test_committed_block_is_shared_whatever_was_there_before() -> None:
    """A mark belongs to the bytes, and ends with them."""
    cache = a_remote_cache(1, 8, write_policy=THROUGH)
    outcome = cache.handle(a_patient_reserve(keys(1)), 0.0)
    landed = land(cache, the_copy(probed(cache, the_probe(outcome), 1)))
    release(cache, woken(landed, outcome.ticket, Reserved).lease_id)

    landed_copies = settled(cache, outcome_of_commit(cache, keys(2)))

    assert Direction.SHARE in {copy.direction for copy in landed_copies}


def test_nothing_is_shared_while_the_remote_store_is_off() -> None:
    """While the remote store is off, nothing is sent to it; afterwards it gets all that it missed."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    turn(cache, Tier.REMOTE, on=False)
    settled(cache, outcome_of_commit(cache, doc(2)))

    landed = settled(cache, turn(cache, Tier.REMOTE, on=True))

    assert len(of_direction(landed, Direction.SHARE)) == 2


def test_store_that_was_away_is_offered_everything_anew() -> None:
    """A store that was away may come back empty, so all is sent again; one that only goes on is sent nothing twice."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    settled(cache, outcome_of_commit(cache, doc(2)))
    still_on = settled(cache, turn(cache, Tier.REMOTE, on=True))
    turn(cache, Tier.REMOTE, on=False)

    landed = settled(cache, turn(cache, Tier.REMOTE, on=True))

    assert still_on == []
    assert len(of_direction(landed, Direction.SHARE)) == 2


def test_remote_store_of_others_comes_back_in_vain() -> None:
    """A cache without a remote store shares nothing when one comes back."""
    cache = a_tiered_cache(16, 16, write_policy=THROUGH)
    settled(cache, outcome_of_commit(cache, doc(2)))
    turn(cache, Tier.REMOTE, on=False)

    assert settled(cache, turn(cache, Tier.REMOTE, on=True)) == []


def test_share_that_fails_holds_nothing_and_is_tried_again() -> None:
    """When a share fails, its slots may leave at once, and it is tried again later."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    share = the_copy(land(cache, the_copy(outcome_of_commit(cache, doc(1)))))

    fail(cache, share)

    assert cache.census().host["ready_held"] == 0
    assert the_copy(tick(cache, 2.0)).direction is Direction.SHARE


def test_slot_that_is_not_taken_does_not_hold_up_the_others() -> None:
    """A slot that the store did not take is offered again after all others, the longest refused first."""
    cache = a_remote_cache(16, 4, write_policy=THROUGH)
    share = the_copy(land(cache, the_copy(outcome_of_commit(cache, keys(1)))))
    land(cache, the_copy(outcome_of_commit(cache, keys(2), "other")))
    first = ids(share.source_ids)

    land(cache, share, failed=(0,))
    second = the_copy(tick(cache, 2.0))
    land(cache, second, failed=(0,))

    assert ids(second.source_ids) != first
    assert ids(the_copy(tick(cache, 4.0)).source_ids) == first


def waits_for_a_state_on_disk() -> tuple[Cache, int, Copy]:
    """Return a cache with a call that waits to load a state, its ticket, and a copy to the disk that is under way."""
    cache = cache_of(STATE, num_blocks=5, num_slots=16, num_disk_slots=2, write_policy=THROUGH)
    on_disk(cache, chain(4))
    stores = []
    for branch in (1, 2):
        lease_id = reserve_tokens(cache, 4, f"stored-{branch}").lease_id
        command = c.Commit(
            worker_id=WORKER,
            lease_id=lease_id,
            num_tokens=4,
            first_block=0,
            keys=chain(4, branch),
        )
        stores += copies(land(cache, the_copy(cache.handle(command, 0.0))))
        release(cache, lease_id)
    for name in "xyz":
        reserve_tokens(cache, 4, name)
    waiting = c.Reserve(
        worker_id=WORKER, request_id="r", keys=chain(4), num_tokens=8, wait_ms=WAIT_MS
    )
    ticket = cache.handle(waiting, 0.0).ticket
    assert ticket is not None
    return cache, ticket, stores[0]


def test_call_whose_state_leaves_the_disk_is_served_if_it_needs_less_now() -> None:
    """A load of a state takes a second block; once the state has left the disk, the call is served with one."""
    cache, ticket, store = waits_for_a_state_on_disk()

    landed = land(cache, store)

    assert the_copy(landed).direction is Direction.STORE
    assert woken(landed, ticket, Reserved).disk_hit_tokens == 0
    assert looked_up(cache, chain(4)) == (0, 0, 0)


def test_call_whose_state_leaves_the_disk_beside_a_suspected_slot_is_served_at_once() -> None:
    """A state leaves for another copy even if a slot is free, as long as that slot failed alone."""
    cache, ticket, store = waits_for_a_state_on_disk()
    fail(cache, store)

    copied = tick(cache, 2.0)

    assert the_copy(copied).direction is Direction.STORE
    assert woken(copied, ticket, Reserved).disk_hit_tokens == 0


def test_slot_may_be_found_damaged_while_it_is_shared() -> None:
    """A load may retire a slot that a copy in the background still reads; the slot is then not copied again."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    (share,) = copies(land(cache, the_copy(outcome_of_commit(cache, doc(1)))))
    release(cache, cache.list_leases(0, 1, 0.0)[0].lease_id)
    cache.handle(c.Evict(keys=doc(1)), 0.0)
    load = the_copy(cache.handle(a_patient_reserve(doc(1), "s"), 0.0))

    land(cache, load, failed=(0,))

    assert cache.census().host["bad"] == 1
    assert cache.check() == []
    assert copies(fail(cache, share)) == []
    assert copies(tick(cache, 2.0)) == []
    assert cache.check() == []


def test_slot_that_takes_a_damaged_one_s_place_is_not_shared_again() -> None:
    """If a slot is damaged while it is shared, the slot that has its key by the end of the copy is shared, too."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    (share,) = copies(land(cache, the_copy(outcome_of_commit(cache, doc(1)))))
    release(cache, cache.list_leases(0, 1, 0.0)[0].lease_id)
    cache.handle(c.Evict(keys=doc(1)), 0.0)
    load = the_copy(cache.handle(a_patient_reserve(doc(1), "s"), 0.0))
    land(cache, load, failed=(0,))
    (lease,) = cache.list_leases(0, 1, 0.0)
    command = c.Commit(
        worker_id=WORKER, lease_id=lease.lease_id, num_tokens=4, first_block=0, keys=doc(1)
    )
    land(cache, the_copy(cache.handle(command, 0.0)))
    turn(cache, Tier.REMOTE, on=False)

    land(cache, share)

    assert cache.check() == []


def test_lost_share_holds_its_slots_until_the_mover_is_dead() -> None:
    """The slots of a lost share stay held until its mover is dead, for the mover may still read them."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    share = the_copy(land(cache, the_copy(outcome_of_commit(cache, doc(1)))))

    lose(cache, share)
    assert cache.census().host["ready_held"] == 1
    cache.handle(c.MoverDied(mover=Mover.REMOTE), 0.0)

    assert cache.census().host["ready_held"] == 0
    assert cache.check() == []


# Those who ask for room -----------------------------------------------------------------------------------------------


def test_reserve_never_waits_for_a_store() -> None:
    """A reserve gets its blocks even if copies to the disk hold all slots."""
    cache = a_tiered_cache(1, 1)
    store = the_copies(dirty_slots(cache, keys(1)))[Direction.STORE]
    cached(cache, keys(2))

    answer(cache.handle(a_reserve(1, "r", wait_ms=WAIT_MS), 0.0), Reserved)

    land(cache, store)
    assert cache.check() == []


def test_refusal_knows_of_blocks_that_are_being_copied() -> None:
    """If a copy in the background holds cached blocks, a refused call is told to come again soon."""
    cache = a_cache(2, 16, write_policy=THROUGH)
    outcome = outcome_of_commit(cache, doc(2))
    for lease_id in cache._state.leases.by_id.copy():
        release(cache, lease_id)

    with pytest.raises(PoolFullError) as refused:
        cache.handle(a_reserve(2, "n"), 0.0)

    assert len(copies(outcome)) == 1
    assert refused.value.rule == "copies"
    assert refused.value.retry_after_ms == 25


def test_evict_moves_what_is_not_below() -> None:
    """An evict by keys copies only blocks that no lower tier has."""
    cache = a_tiered_cache(8, 8)
    cached(cache, doc(3))
    on_disk(cache, keys(2))

    outcome = cache.handle(c.Evict(keys=doc(3)), 0.0)

    landed = land(cache, the_copy(outcome))
    assert woken(landed, outcome.ticket, Evicted).num_evicted == 3
    assert looked_up(cache, doc(3)) == (0, 2, 1)
    assert cache.check() == []


@pytest.mark.parametrize("numbers", [{}, {"num_disk_slots": 4}, {"uses_remote": True}])
def test_commits_and_releases_start_nothing_by_themselves(numbers: dict[str, Any]) -> None:
    """Commits and releases start no copy if nothing is to leave."""
    cache = a_cache(8, 8, **numbers)
    lease = reserve(cache, 2, "r")
    commit(cache, lease.lease_id, doc(2))

    assert copies(release(cache, lease.lease_id)) == []


# Marks ----------------------------------------------------------------------------------------------------------------


def test_fork_copies_hand_on_no_marks() -> None:
    """A fork's copies of private blocks have no key, and go to no store."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    parent = reserve(cache, 2, "parent")
    commit(cache, parent.lease_id, keys(1))
    cache.take_effects()
    cache.handle(
        c.Commit(worker_id=WORKER, lease_id=parent.lease_id, num_tokens=6, first_block=1, keys=b""),
        0.0,
    )
    command = c.Fork(worker_id=WORKER, lease_id=parent.lease_id, request_id="child", num_tokens=8)

    outcome = cache.handle(command, 0.0)
    copy = the_copies(outcome)[Direction.DUPLICATE]
    landed = land(cache, copy)

    woken(landed, outcome.ticket, Forked)
    assert copies(landed) == []
    assert cache.check() == []


def test_restart_shares_only_what_was_not_shared() -> None:
    """Blocks that were shared by an earlier life, or came from the remote store, are not offered again."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    settled(cache, outcome_of_commit(cache, doc(2)))
    outcome = cache.handle(a_patient_reserve(keys(40), "fetched"), 0.0)
    fetched = land(cache, the_copy(probed(cache, the_probe(outcome), 1)))
    settled(cache, fetched)
    land(cache, the_copy(outcome_of_commit(cache, keys(8), "cut off")))
    cached(cache, keys(9))

    again = restarted(cache)
    landed = settled(again, tick(again, 1.0))

    shares = [label_keys(copy.labels) for copy in landed if copy.direction is Direction.SHARE]
    assert sorted(shares) == [keys(8), keys(9)]
    assert again.check() == []


@pytest.mark.parametrize("goes", ["restart", "mover"])
def test_what_was_shared_is_remembered_while_nothing_is_known_of_the_store(goes: str) -> None:
    """Neither a new control process, which takes the store to be off, nor a new mover makes blocks be shared again."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    settled(cache, outcome_of_commit(cache, doc(4)))
    if goes == "restart":
        workers = {WORKER: TENANT}
        cache = Cache.recovered(cache.shape, records(cache), Epoch(2), workers, 0.0)
        turn(cache, Tier.REMOTE, on=False)
    else:
        away = c.TierChanged(tier=Tier.REMOTE, is_on=False, is_mover_away=True)
        cache.handle(away, 0.0)

    landed = settled(cache, turn(cache, Tier.REMOTE, on=True))

    assert of_direction(landed, Direction.SHARE) == []


def test_store_that_was_away_is_given_all_again() -> None:
    """A store that was away may have lost its blocks, so all are shared again."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    settled(cache, outcome_of_commit(cache, doc(4)))
    turn(cache, Tier.REMOTE, on=False)

    landed = settled(cache, turn(cache, Tier.REMOTE, on=True))

    assert len(of_direction(landed, Direction.SHARE)) == 4


def test_share_that_was_cut_short_is_made_up() -> None:
    """Blocks that a slow network had no time for are shared a little later, and those that were sent are not."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    share = the_copy(land(cache, the_copy(outcome_of_commit(cache, doc(2)))))

    landed = land(cache, share, failed=(1,))

    assert copies(landed) == []
    assert copies(tick(cache, 0.5)) == []
    again = the_copy(tick(cache, 1.5))
    assert (again.direction, label_keys(again.labels)) == (Direction.SHARE, keys(2))
    land(cache, again)
    assert copies(tick(cache, 9.0)) == []
    assert cache.check() == []


def test_slot_that_is_never_taken_is_given_up() -> None:
    """A block that the store refuses is offered a limited number of times, until its slot has other bytes."""
    cache = a_remote_cache(16, 16, write_policy=THROUGH)
    share = the_copy(land(cache, the_copy(outcome_of_commit(cache, doc(1)))))
    num_tries = 0
    for at in range(1, 40):
        num_tries += 1
        cache.handle(c.CopyDone(copy_id=share.copy_id, failed=(0,)), 2.0 * at)
        started = copies(tick(cache, 2.0 * at + 1.5))
        if not started:
            break
        (share,) = started

    assert num_tries == 8
    assert cache.check() == []


# Invariants -----------------------------------------------------------------------------------------------------------


def a_busy_cache() -> Cache:
    """Return a cache with copies in the background, copies up from all tiers, and a call that asks the remote store."""
    cache = a_remote_cache(16, 16, num_disk_slots=8, write_policy=THROUGH)
    on_disk(cache, keys(40))
    settled(cache, outcome_of_commit(cache, doc(2)))
    outcome = cache.handle(a_patient_reserve(keys(40, 41), "up"), 0.0)
    probed(cache, the_probe(outcome), 1)
    land(cache, the_copy(outcome_of_commit(cache, doc(2, 10), "down")))
    cache.handle(a_patient_reserve(keys(50), "asks"), 0.0)
    return cache


def _flight(state: CacheState, direction: Direction) -> Flight:
    return next(one for one in state.flights.values() if one.direction is direction)


def _second_chore(state: CacheState) -> None:
    _flight(state, Direction.LOAD).purpose = Purpose.STORE


def _unready_source(state: CacheState) -> None:
    state.host.records.state[_flight(state, Direction.SHARE).sources] = State.RESERVED


def _unnamed(state: CacheState) -> None:
    _flight(state, Direction.FETCH).remote_keys = b""


def _other_ticket(state: CacheState) -> None:
    (asking,) = state.asking.values()
    asking.waiter.ticket = 1


def _nobodys(state: CacheState) -> None:
    (asking,) = state.asking.values()
    asking.waiter.worker_id = WorkerId(99)


def _shared_mark(state: CacheState) -> None:
    (ready,) = (state.host.records.state == State.READY).nonzero()
    state.dirt.share[ready[0]] = state.dirt.remote[1][ready[0]] = True


def test_busy_cache_is_sound() -> None:
    """Concurrent copies between all tiers keep every invariant."""
    cache = a_busy_cache()

    directions = {flight.direction for flight in cache._state.flights.values()}
    assert directions == {Direction.STORE, Direction.SHARE, Direction.LOAD, Direction.FETCH}
    assert cache.census().num_asking == 1
    assert cache.check() == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(
            lambda one: one.loading.discard(one.loading.blocks[:1]),
            "not those on their way",
            id="loading",
        ),
        pytest.param(_unnamed, "does not name the key", id="unnamed"),
        pytest.param(_second_chore, "has several chores", id="chores"),
        pytest.param(_unready_source, "reads blocks that are not ready", id="unready"),
        pytest.param(_other_ticket, "under another ticket", id="ticket"),
        pytest.param(_nobodys, "asks for nobody", id="nobody"),
        pytest.param(lambda one: one.tiers_off.add(Tier.REMOTE), "nobody answers", id="off"),
        pytest.param(_shared_mark, "the remote store has", id="shared"),
        pytest.param(
            lambda one: one.disk.holds.__setitem__(7, 1), "a free block is held", id="held"
        ),
    ],
)
def test_damage_between_the_tiers_is_noticed(
    damage: Callable[[CacheState], object], words: str
) -> None:
    """Each invariant of the tiers notices the damage that it is meant for."""
    cache = a_busy_cache()

    damage(cache._state)

    assert any(words in text for text in tier_violations(cache._state) + cache.check())
