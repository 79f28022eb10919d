"""Laws of the disk store: its blocks are part of every prefix, and a block in any doubt is a miss."""

from collections.abc import Callable

import pytest

from kvlease.errors import CopyFailedError, InvalidError
from kvlease.ids import CopyId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Copy, Direction, Evicted, Mover, Outcome, Reloaded, Reserved, Tier
from kvleased.core.shape import WritePolicy
from tests.unit.service.core.builders import (
    MATE,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_reload,
    a_reserve,
    answer,
    cached,
    copies,
    evict,
    evicted,
    fail,
    ids,
    keys,
    land,
    lose,
    on_host,
    records,
    release,
    reload,
    reload_keys,
    reserve,
    the_copy,
    tick,
    wakes,
    woken,
)
from tests.unit.service.core.grouped import FULL, WINDOW, cache_of, chain, crossed
from tests.unit.service.core.tier_builders import (
    a_patient_reserve,
    a_tiered_cache,
    adopt,
    doc,
    label_keys,
    label_numbers,
    labels_of,
    looked_up,
    on_disk,
    the_copies,
    turn,
)


def hits(lease: Reserved) -> tuple[int, int, int, int]:
    """Return the tokens of a lease's prefix by tier."""
    return (
        lease.device_hit_tokens,
        lease.host_hit_tokens,
        lease.disk_hit_tokens,
        lease.remote_hit_tokens,
    )


def loading(cache: Cache, packed: bytes, request_id: str = "r") -> tuple[Copy, int | None]:
    """Have a reserve load its prefix from disk; return the copy and the caller's ticket."""
    outcome = cache.handle(a_patient_reserve(packed, request_id), 0.0)
    return the_copies(outcome)[Direction.LOAD], outcome.ticket


# What is found --------------------------------------------------------------------------------------------------------


def test_lookup_counts_the_blocks_of_each_tier() -> None:
    """All tiers together make a prefix, and each block counts in the highest tier that has it."""
    cache = a_tiered_cache()
    on_host(cache, keys(2, 3))
    on_disk(cache, doc(6))
    cached(cache, keys(1))

    assert looked_up(cache, doc(6)) == (1, 2, 3)
    assert looked_up(cache, doc(6), None) == (1, 2, 3)
    assert cache.check() == []


def test_reserve_brings_each_block_from_the_highest_tier() -> None:
    """Blocks on the device are held, those in the host pool are reloaded, and only the rest is read from disk."""
    cache = a_tiered_cache()
    on_host(cache, keys(2))
    on_disk(cache, doc(4))
    cached(cache, keys(1))

    outcome = cache.handle(a_patient_reserve(doc(4), more=1), 0.0)
    up = the_copies(outcome)
    landed = land(cache, up[Direction.LOAD])
    assert wakes(landed) == []
    landed = land(cache, up[Direction.RELOAD])

    lease = woken(landed, outcome.ticket, Reserved)
    assert hits(lease) == (4, 4, 8, 0)
    assert ids(up[Direction.RELOAD].target_ids) == ids(lease.block_ids)[1:2]
    assert ids(up[Direction.LOAD].target_ids) == ids(lease.block_ids)[2:4]
    assert cache.check() == []


def test_tokens_of_all_tiers_add_up_to_the_request() -> None:
    """Each token of a request counts in one tier, or as one to be computed."""
    cache = a_tiered_cache()
    on_disk(cache, doc(3))
    cached(cache, keys(1))
    before = cache.census().counters
    copy, _ = loading(cache, doc(4))

    land(cache, copy)

    after = cache.census().counters
    names = ("device", "host", "disk", "remote", "computed")
    counted = [
        after.get(f"prefix_tokens_{one}", 0) - before.get(f"prefix_tokens_{one}", 0)
        for one in names
    ]
    assert counted == [4, 0, 8, 0, 4]


def test_tokens_whose_load_came_to_nothing_count_where_they_are_found_later() -> None:
    """If another request commits blocks while a call waits whose load was lost, they count for the device."""
    cache = a_tiered_cache(4)
    on_host(cache, keys(1))
    on_disk(cache, keys(2))
    other = reserve(cache, 1, "other")
    outcome = cache.handle(a_patient_reserve(doc(2), more=1), 0.0)
    up = the_copies(outcome)
    land(cache, up[Direction.RELOAD])
    assert wakes(lose(cache, up[Direction.LOAD])) == []

    command = c.Commit(
        worker_id=WORKER, lease_id=other.lease_id, num_tokens=4, first_block=0, keys=keys(2)
    )
    committed = cache.handle(command, 0.0)

    assert hits(woken(committed, outcome.ticket, Reserved)) == (4, 4, 0, 0)
    assert cache.check() == []


@pytest.mark.parametrize("end", [fail, lose], ids=["failed", "lost"])
def test_reserve_goes_on_with_the_disk_when_the_host_pool_brings_nothing(
    end: Callable[[Cache, Copy], Outcome],
) -> None:
    """If a copy from the host pool fails or is late, the same blocks come from disk in the time that is left."""
    cache = a_tiered_cache()
    on_host(cache, doc(2))
    on_disk(cache, doc(2))
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)

    ended = end(cache, the_copies(outcome)[Direction.RELOAD])
    landed = land(cache, the_copies(ended)[Direction.LOAD])

    assert hits(woken(landed, outcome.ticket, Reserved)) == (0, 0, 8, 0)
    assert cache.check() == []


def test_load_carries_label_and_checksum() -> None:
    """A load tells the store which bytes it must find, and of which tenant."""
    cache = a_tiered_cache()
    adopt(cache, [3, 5], labels_of(doc(2), generation=9), [11, 22])

    copy, ticket = loading(cache, doc(2))
    landed = land(cache, copy)

    assert ids(copy.source_ids) == [3, 5]
    assert label_keys(copy.labels) == doc(2)
    assert label_numbers(copy.labels, "tenant") == [TENANT] * 2
    assert label_numbers(copy.labels, "generation") == [9, 9]
    assert label_numbers(copy.labels, "position") == [0, 1]
    lease = woken(landed, ticket, Reserved)
    blocks = ids(lease.block_ids)
    assert records(cache).device.checksum[blocks].tolist() == [11, 22]
    assert records(cache).device.position[blocks].tolist() == [0, 1]


def test_load_ends_under_the_checksums_that_were_taken() -> None:
    """Bytes that were stored without a checksum get the one that the store takes as it reads them."""
    cache = a_tiered_cache()
    on_disk(cache, doc(1))
    copy, _ = loading(cache, doc(1))

    cache.handle(c.CopyDone(copy_id=copy.copy_id, checksums=(5).to_bytes(8, "little")), 0.0)

    assert records(cache).device.checksum[ids(copy.target_ids)].tolist() == [5]


def test_impatient_reserve_uses_the_device_alone() -> None:
    """A call that may not wait loads nothing."""
    cache = a_tiered_cache()
    on_disk(cache, doc(2))

    assert hits(reserve(cache, 2, "r", doc(2))) == (0, 0, 0, 0)


def test_another_tenants_disk_slot_is_a_miss() -> None:
    """A stolen key finds nothing, and neither do the keys behind it."""
    cache = a_tiered_cache()
    on_disk(cache, keys(1))
    on_disk(cache, keys(2), OTHER_TENANT, 1)
    on_disk(cache, keys(3), TENANT, 2)

    assert looked_up(cache, doc(3)) == (0, 0, 1)
    assert looked_up(cache, keys(2), OTHER_TENANT) == (0, 0, 1)
    stolen = a_reserve(1, "r", keys(2), wait_ms=WAIT_MS)
    assert hits(answer(cache.handle(stolen, 0.0), Reserved)) == (0, 0, 0, 0)
    assert cache.check() == []


def test_keys_that_repeat_a_disk_slot_are_refused() -> None:
    """Keys that name a block twice are refused, even if the block is on disk alone."""
    cache = a_tiered_cache()
    on_disk(cache, doc(1))

    with pytest.raises(InvalidError, match="names a block twice"):
        cache.handle(a_reserve(2, "r", keys(1, 1), wait_ms=WAIT_MS), 0.0)


def test_long_chain_is_found_where_it_ends() -> None:
    """A prefix of hundreds of blocks is found as a short one is."""
    cache = a_tiered_cache(400, 8, num_disk_slots=400)
    on_disk(cache, doc(300))

    assert looked_up(cache, doc(390)) == (0, 0, 300)
    assert looked_up(cache, doc(200)) == (0, 0, 200)
    assert looked_up(cache, doc(200, 1000)) == (0, 0, 0)


# Groups ---------------------------------------------------------------------------------------------------------------


def grouped_on_disk() -> Cache:
    """Return a cache of two groups with a document of 16 tokens on disk alone."""
    cache = cache_of(FULL, WINDOW, num_slots=1, num_disk_slots=64)
    command = c.Reserve(worker_id=WORKER, request_id="a", keys=b"", num_tokens=16)
    lease = answer(cache.handle(command, 0.0), Reserved)
    commit = c.Commit(
        worker_id=WORKER, lease_id=lease.lease_id, num_tokens=16, first_block=0, keys=chain(16)
    )
    cache.handle(commit, 0.0)
    device = records(cache).device
    ready = (device.state == State.READY).nonzero()[0].tolist()
    labels = b"".join(labels_of(device.key[one].tobytes()) for one in ready)
    release(cache, lease.lease_id)
    adopt(cache, range(len(ready)), labels)
    # Blocks that are on disk already leave without a copy.
    assert copies(cache.handle(c.Evict(keys=chain(16)), 0.0)) == []
    return cache


def test_groups_find_their_prefix_on_disk() -> None:
    """Each tier counts the tokens before the first block that is further down."""
    cache = grouped_on_disk()
    command = c.Reserve(
        worker_id=WORKER, request_id="b", keys=chain(16), num_tokens=20, wait_ms=WAIT_MS
    )

    outcome = cache.handle(command, 0.0)
    landed = land(cache, the_copy(outcome))

    lease = woken(landed, outcome.ticket, Reserved)
    assert the_copy(outcome).direction is Direction.LOAD
    assert hits(lease) == (0, 0, 16, 0)
    assert cache.census().counters["blocks_dropped"] == 0
    assert cache.check() == []


def test_groups_lookup_sees_only_a_tenants_own() -> None:
    """A lookup does not count another tenant's blocks on disk."""
    cache = grouped_on_disk()

    assert looked_up(cache, chain(16)) > (0, 0, 0)
    assert looked_up(cache, chain(16), OTHER_TENANT) == (0, 0, 0)


# Single flight --------------------------------------------------------------------------------------------------------


def test_two_reserves_share_one_load() -> None:
    """A reserve waits for bytes that are on their way from disk, and does not read them again."""
    cache = a_tiered_cache()
    on_disk(cache, doc(2))
    copy, first = loading(cache, doc(2), "a")
    second = cache.handle(a_reserve(3, "b", doc(2), worker_id=MATE, wait_ms=WAIT_MS), 0.0)

    landed = land(cache, copy)

    assert copies(second) == []
    leases = [woken(landed, ticket, Reserved) for ticket in (first, second.ticket)]
    assert [hits(one) for one in leases] == [(0, 0, 8, 0), (8, 0, 0, 0)]
    assert cache.check() == []


def test_reload_of_a_lease_joins_a_load() -> None:
    """A reload waits for bytes of its lease that are on their way for another call."""
    cache = a_tiered_cache()
    lease = reserve(cache, 1, "mine")
    cache.handle(
        c.Commit(
            worker_id=WORKER,
            lease_id=lease.lease_id,
            num_tokens=TOKENS_PER_BLOCK,
            first_block=0,
            keys=keys(1),
        ),
        0.0,
    )
    land(cache, the_copy(cache.handle(c.Evict(worker_id=WORKER, lease_id=lease.lease_id), 0.0)))
    on_disk(cache, doc(2))
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)
    up = the_copies(outcome)

    joined = reload(cache, lease.lease_id)

    assert copies(joined) == []
    land(cache, up[Direction.RELOAD])
    land(cache, up[Direction.LOAD])
    assert cache.check() == []


# What goes wrong ------------------------------------------------------------------------------------------------------


def leaving(cache: Cache) -> tuple[Copy, Reserved, Copy, int | None]:
    """Evict a lease to a slot that a copy to nobody's use still reads, as its block came from disk meanwhile.

    Returns the copy that reads, the lease, the copy that takes the rest of it down, and the caller's ticket.
    """
    on_host(cache, keys(1))
    reading = the_copy(reload_keys(cache, keys(1)))
    on_disk(cache, doc(1))
    turn(cache, Tier.HOST, on=False)
    outcome = cache.handle(a_patient_reserve(doc(1), more=1), 0.0)
    lease = woken(land(cache, the_copies(outcome)[Direction.LOAD]), outcome.ticket, Reserved)
    turn(cache, Tier.HOST, on=True)
    outcome = evict(cache, lease.lease_id)
    down = the_copy(outcome)
    assert len(ids(down.source_ids)) == 1
    return reading, lease, down, outcome.ticket


def test_lease_stays_if_a_slot_that_it_shares_is_damaged_while_it_is_evicted() -> None:
    """The slot was to keep its bytes, which are still on the device; the next evict copies them, too."""
    cache = a_tiered_cache()
    reading, lease, down, ticket = leaving(cache)

    land(cache, reading, failed=(0,))
    error = woken(land(cache, down), ticket, CopyFailedError)
    again = evict(cache, lease.lease_id)
    evicted = woken(land(cache, the_copy(again)), again.ticket, Evicted)

    assert error.retry_after_ms == 50
    assert (evicted.num_evicted, evicted.num_offloaded) == (2, 2)
    assert cache.census().host["bad"] == 1
    assert cache.check() == []


def test_reload_of_a_lease_that_stays_finds_it_there() -> None:
    """A caller that asked for the lease's blocks back while they were to leave has them."""
    cache = a_tiered_cache()
    reading, lease, down, _ = leaving(cache)
    outcome = reload(cache, lease.lease_id)

    land(cache, reading, failed=(0,))
    reloaded = woken(land(cache, down), outcome.ticket, Reloaded)

    assert reloaded.block_ids == lease.block_ids
    assert cache.check() == []


def test_damaged_disk_slot_is_retired() -> None:
    """A slot that does not hold what its label says is never used again; other slots are kept."""
    cache = a_tiered_cache()
    on_disk(cache, doc(3))
    copy, ticket = loading(cache, doc(3))

    landed = land(cache, copy, failed=(1,))

    assert hits(woken(landed, ticket, Reserved)) == (0, 0, 4, 0)
    assert cache.census().disk["bad"] == 1
    assert cache.census().counters["disk_failures"] == 1
    assert cache.census().counters.get("checksum_failures", 0) == 0
    assert cache.check() == []


def test_good_bytes_of_a_load_are_kept() -> None:
    """Blocks that came whole are cached on the device, even if others of the same load were damaged."""
    cache = a_tiered_cache()
    on_disk(cache, doc(2))
    copy, ticket = loading(cache, doc(2))

    landed = land(cache, copy, failed=(0,))

    assert hits(woken(landed, ticket, Reserved)) == (0, 0, 0, 0)
    assert looked_up(cache, keys(2)) == (1, 0, 0)
    assert cache.check() == []


@pytest.mark.parametrize("end", [fail, lose], ids=["failed", "lost"])
def test_reserve_starts_over_without_the_disk(end: Callable[[Cache, Copy], Outcome]) -> None:
    """If the disk store fails, a reserve starts over with the host pool alone, and the slots are kept."""
    cache = a_tiered_cache()
    on_host(cache, keys(1))
    on_disk(cache, doc(3))
    outcome = cache.handle(a_patient_reserve(doc(3)), 0.0)
    up = the_copies(outcome)

    end(cache, up[Direction.LOAD])
    landed = land(cache, up[Direction.RELOAD])

    lease = woken(landed, outcome.ticket, Reserved)
    assert hits(lease) == (0, 4, 0, 0)
    assert cache.census().disk["ready"] == 3
    assert cache.check() == []


def test_each_tier_is_tried_once() -> None:
    """A call for which the disk and then the host pool failed computes all of its tokens."""
    cache = a_tiered_cache()
    on_host(cache, keys(1))
    on_disk(cache, doc(3))
    outcome = cache.handle(a_patient_reserve(doc(3)), 0.0)
    up = the_copies(outcome)

    fail(cache, up[Direction.LOAD])
    landed = fail(cache, up[Direction.RELOAD])

    assert hits(woken(landed, outcome.ticket, Reserved)) == (0, 0, 0, 0)
    assert copies(landed) == []
    assert cache.check() == []


def test_reserve_that_started_over_does_not_join_the_tier_that_failed_it() -> None:
    """A call does not wait for another's copy from a tier that has just failed it."""
    cache = a_tiered_cache()
    cached(cache, keys(1))
    on_disk(cache, keys(2), first_slot=1)
    on_disk(cache, keys(3), first_slot=2)
    loading(cache, keys(2), "b")
    copy, ticket = loading(cache, doc(3), "a")

    landed = fail(cache, copy)

    assert hits(woken(landed, ticket, Reserved)) == (4, 0, 0, 0)
    assert cache.check() == []


def test_bytes_that_come_from_two_tiers_at_once_are_the_first_ones() -> None:
    """A call that may not join a copy loads the bytes from another tier, and a later call waits for neither copy."""
    cache = a_tiered_cache()
    cached(cache, keys(1))
    on_host(cache, keys(2))
    on_host(cache, keys(3))
    on_disk(cache, keys(2), first_slot=1)
    waits = cache.handle(a_patient_reserve(keys(2), "b"), 0.0)
    outcome = cache.handle(a_patient_reserve(doc(3), "a"), 0.0)
    slow, fast = the_copy(waits), the_copy(fail(cache, the_copy(outcome)))

    landed = land(cache, fast)

    assert (slow.direction, fast.direction) == (Direction.RELOAD, Direction.LOAD)
    assert hits(woken(landed, outcome.ticket, Reserved)) == (4, 0, 4, 0)
    assert cache.check() == []
    assert hits(reserve(cache, 2, "c", keys(1, 2))) == (8, 0, 0, 0)
    woken(land(cache, slow), waits.ticket, Reserved)
    assert cache.check() == []


def test_who_waits_for_the_slower_copy_has_what_the_faster_one_brought() -> None:
    """Calls and a reload that joined a slow copy take over the block that a faster copy has filled."""
    cache = a_tiered_cache()
    lease = evicted(cache, keys(2))
    cache.handle(c.Evict(keys=keys(2)), 0.0)
    cached(cache, keys(1))
    on_host(cache, keys(3))
    on_disk(cache, keys(2), first_slot=1)
    waits = [cache.handle(a_patient_reserve(keys(2), name), 0.0) for name in "bd"]
    back = cache.handle(a_reload(lease.lease_id), 0.0)
    outcome = cache.handle(a_patient_reserve(doc(3), "a"), 0.0)
    slow, fast = the_copy(waits[0]), the_copy(fail(cache, the_copy(outcome)))

    landed = land(cache, fast)

    block = ids(woken(landed, outcome.ticket, Reserved).block_ids)[1]
    assert cache.check() == []
    ended = land(cache, slow)
    assert [ids(woken(ended, one.ticket, Reserved).block_ids) for one in waits] == [[block]] * 2
    assert ids(woken(ended, back.ticket, Reloaded).block_ids) == [block]
    assert cache.check() == []


def test_copy_of_a_tier_that_is_off_is_not_joined() -> None:
    """A later call does not wait for a load from a disk that hangs, but computes."""
    cache = a_tiered_cache()
    on_disk(cache, doc(1))
    copy, first = loading(cache, doc(1), "a")

    turn(cache, Tier.DISK, on=False)
    later = answer(cache.handle(a_patient_reserve(doc(1), "b"), 0.0), Reserved)

    assert hits(later) == (0, 0, 0, 0)
    assert hits(woken(land(cache, copy), first, Reserved)) == (0, 0, 4, 0)
    assert cache.check() == []


def test_what_came_by_another_way_is_served_when_a_load_takes_too_long() -> None:
    """If the copy that a call waits for is late, a block that another copy brought meanwhile is a hit."""
    cache = a_tiered_cache()
    waits = brought_by_another(cache, keys(2), keys(2))

    lease = woken(tick(cache, WAIT_MS / 1000), waits, Reserved)

    assert sum(hits(lease)) == TOKENS_PER_BLOCK
    assert not copies(cache.handle(a_patient_reserve(keys(2), "c"), WAIT_MS / 1000))
    assert cache.check() == []


def test_malformed_call_is_refused_when_its_load_takes_too_long() -> None:
    """If blocks that came meanwhile show that a call's keys name a block twice, the late call is refused."""
    cache = cache_of(FULL, WINDOW, num_disk_slots=8)
    waits = brought_by_another(cache, crossed(2), keys(2) + crossed(4))
    cached(cache, keys(4))

    woken(tick(cache, WAIT_MS / 1000), waits, InvalidError)
    assert cache.check() == []


def brought_by_another(cache: Cache, stored: bytes, prefix: bytes) -> int | None:
    """Have a call wait for block 2 from the host pool while it comes from disk, and return the call's ticket."""
    cached(cache, keys(1))
    on_host(cache, keys(2))
    on_host(cache, keys(3))
    on_disk(cache, stored, first_slot=1)
    waits = cache.handle(a_patient_reserve(prefix, "b"), 0.0)
    outcome = cache.handle(a_patient_reserve(doc(3), "a"), 0.0)
    lease = woken(land(cache, the_copy(fail(cache, the_copy(outcome)))), outcome.ticket, Reserved)
    release(cache, lease.lease_id)
    return waits.ticket


def test_only_the_dead_movers_copies_end() -> None:
    """The death of one mover ends only its own copies."""
    cache = a_tiered_cache()
    on_host(cache, keys(1))
    on_disk(cache, doc(2))
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)
    up = the_copies(outcome)

    cache.handle(c.MoverDied(mover=Mover.DISK), 0.0)
    cache.handle(c.MoverDied(mover=Mover.REMOTE), 0.0)

    assert cache.census().num_copies == 1
    landed = land(cache, up[Direction.RELOAD])
    assert hits(woken(landed, outcome.ticket, Reserved)) == (0, 4, 0, 0)
    cache.handle(c.CopyFailed(copy_id=CopyId(up[Direction.LOAD].copy_id)), 0.0)
    assert cache.census().counters["copies_unknown"] == 1
    assert cache.check() == []


def test_lost_load_keeps_both_its_ends() -> None:
    """The target of a lost load is nobody's and its source stays, until the mover is dead; then both are free."""
    cache = a_tiered_cache()
    on_disk(cache, doc(1))
    copy, _ = loading(cache, doc(1))

    lose(cache, copy)
    assert cache.census().device["quarantined"] == 1
    cache.handle(c.MoverDied(mover=Mover.DISK), 0.0)

    assert cache.census().device["quarantined"] == 0
    assert cache.census().disk["ready"] == 1
    assert cache.check() == []


# Off and on -----------------------------------------------------------------------------------------------------------


def test_nothing_is_found_in_a_tier_that_is_off() -> None:
    """While a store is off, everything in it is a miss; afterwards it is found again."""
    cache = a_tiered_cache()
    on_disk(cache, doc(2))

    turn(cache, Tier.DISK, on=False)
    assert looked_up(cache, doc(2)) == (0, 0, 0)
    turn(cache, Tier.DISK, on=True)

    assert looked_up(cache, doc(2)) == (0, 0, 2)


def test_copies_of_a_tier_that_went_off_end_by_their_own_answers() -> None:
    """Copies in flight when a tier goes off end by their own answers."""
    cache = a_tiered_cache()
    on_disk(cache, doc(1))
    copy, ticket = loading(cache, doc(1))

    turn(cache, Tier.DISK, on=False)
    landed = land(cache, copy)

    assert hits(woken(landed, ticket, Reserved)) == (0, 0, 4, 0)


# Another store in its place -------------------------------------------------------------------------------------------


def replaced(cache: Cache) -> Outcome:
    """Report that the disk store is another one."""
    return cache.handle(c.TierChanged(tier=Tier.DISK, is_on=True, is_empty=True), 0.0)


def test_another_store_has_nothing_of_what_was_there() -> None:
    """All slots are free again, even retired ones, and the new store's slots are taken over as in a new life."""
    cache = a_tiered_cache()
    on_disk(cache, doc(4))
    copy, ticket = loading(cache, doc(4))
    landed = land(cache, copy, failed=(3,))
    woken(landed, ticket, Reserved)
    assert cache.census().disk["bad"] == 1

    replaced(cache)

    assert cache.census().disk["free"] == 16
    assert looked_up(cache, keys(4)) == (0, 0, 0)
    assert cache.census().counters["disk_slots_forgotten"] == 3
    assert cache.check() == []
    on_disk(cache, keys(4), first_slot=8)
    assert looked_up(cache, keys(4)) == (0, 0, 1)
    assert cache.check() == []


def test_what_is_left_of_the_store_is_taken_over() -> None:
    """Of a store that lost only some of its bytes, all is found again but what had left it before."""
    cache = a_tiered_cache()
    on_disk(cache, keys(9), first_slot=8)
    cache.handle(c.Clear(), 0.0)
    on_disk(cache, doc(3))

    replaced(cache)
    adopt(cache, [8, 0, 1, 2], labels_of(keys(9)) + labels_of(doc(3)))

    assert looked_up(cache, doc(3)) == (0, 0, 3)
    assert looked_up(cache, keys(9)) == (0, 0, 0)
    assert cache.census().counters["slots_not_adopted"] == 1
    assert cache.check() == []


def test_loads_under_way_end_by_their_own_answers_when_the_store_is_replaced() -> None:
    """Verified blocks are granted; slots that were read are free once the load lets go of them, damaged or not."""
    cache = a_tiered_cache()
    on_disk(cache, doc(3))
    copy, ticket = loading(cache, doc(3))

    replaced(cache)
    assert looked_up(cache, doc(3))[2] == 0
    assert cache.census().disk["quarantined"] == 3
    assert cache.check() == []
    landed = land(cache, copy, failed=(1,))

    woken(landed, ticket, Reserved)
    assert cache.census().disk["free"] == 16
    assert cache.census().counters["disk_failures"] == 0
    assert cache.check() == []


def test_slot_that_was_retired_is_not_given_anew_while_a_mover_may_read_it() -> None:
    """A retired slot is free again only when those that hold it let go of it, as any other slot."""
    cache = a_tiered_cache()
    on_disk(cache, doc(2))
    first, _ = loading(cache, doc(2), "a")
    lose(cache, first)
    second, ticket = loading(cache, doc(2), "b")
    woken(land(cache, second, failed=(0,)), ticket, Reserved)
    assert cache.census().disk["bad"] == 1

    replaced(cache)
    assert cache.census().disk["quarantined"] == 2
    cache.handle(c.MoverDied(mover=Mover.DISK), 0.0)

    assert cache.census().disk["free"] == 16
    assert cache.check() == []


def test_nothing_is_stored_before_all_that_the_store_has_is_known() -> None:
    """While the store still reports what it has, nothing is stored: a slot that seems free may hold a block."""
    cache = a_tiered_cache(16, 16, write_policy=WritePolicy.WRITE_THROUGH)
    cache.handle(c.TierChanged(tier=Tier.DISK, is_on=True, is_empty=True, is_read=False), 0.0)
    lease = reserve(cache, 2)
    command = c.Commit(
        worker_id=WORKER, lease_id=lease.lease_id, num_tokens=8, first_block=0, keys=doc(2)
    )
    down = the_copy(cache.handle(command, 0.0))
    assert copies(land(cache, down)) == []
    assert copies(tick(cache, 2.0)) == []

    store = the_copy(turn(cache, Tier.DISK, on=True))

    assert store.direction is Direction.STORE
    land(cache, store)
    assert looked_up(cache, doc(2)) == (2, 0, 0)
    assert cache.census().disk["ready"] == 2


def test_stores_under_way_when_the_store_is_replaced_are_made_again() -> None:
    """Nobody knows which store got the copies under way, so all slots of the host pool are stored in the new one."""
    cache = a_tiered_cache(16, 16, write_policy=WritePolicy.WRITE_THROUGH)
    lease = reserve(cache, 2)
    command = c.Commit(
        worker_id=WORKER, lease_id=lease.lease_id, num_tokens=8, first_block=0, keys=doc(2)
    )
    store = the_copy(land(cache, the_copy(cache.handle(command, 0.0))))
    assert store.direction is Direction.STORE

    replaced(cache)
    land(cache, store)

    assert looked_up(cache, doc(2)) == (2, 0, 0)
    assert cache.census().disk["free"] == 16
    again = the_copy(tick(cache, 2.0))
    assert (again.direction, ids(again.source_ids)) == (Direction.STORE, ids(store.source_ids))
    land(cache, again)
    assert cache.census().disk["ready"] == 2
    assert cache.check() == []


# Eviction -------------------------------------------------------------------------------------------------------------


def test_block_on_disk_leaves_without_a_copy() -> None:
    """A block that is on disk already leaves without a copy, and nothing is lost."""
    cache = a_tiered_cache(2, 2)
    cached(cache, doc(2))
    on_disk(cache, doc(2))

    lease = answer(cache.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0), Reserved)

    assert len(ids(lease.block_ids)) == 2
    assert cache.census().counters["blocks_dropped"] == 0
    assert looked_up(cache, doc(2)) == (0, 0, 2)


def test_block_is_written_back_while_the_disk_is_off() -> None:
    """A copy in a store that is off does not count, so the block is written back."""
    cache = a_tiered_cache(2, 2)
    cached(cache, doc(2))
    on_disk(cache, doc(2))
    turn(cache, Tier.DISK, on=False)

    outcome = cache.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0)

    assert Direction.OFFLOAD in the_copies(outcome)


def test_slot_that_is_on_disk_is_not_counted_as_dropped() -> None:
    """A block that leaves the host pool counts as dropped only if no other tier has it."""
    cache = a_tiered_cache(4, 2)
    turn(cache, Tier.DISK, on=False)
    on_host(cache, keys(1, 2))
    on_disk(cache, keys(1))

    on_host(cache, keys(3, 4))

    assert cache.census().counters["host_evictions"] == 2
    assert cache.census().counters["blocks_dropped"] == 1
    assert cache.check() == []


def test_strangers_evict_nothing_of_the_disk() -> None:
    """Tenants share the disk store, and each finds its own blocks."""
    cache = a_tiered_cache()
    on_disk(cache, keys(1))
    on_disk(cache, keys(2), OTHER_TENANT, 1)
    command = a_reserve(1, "s", keys(2), worker_id=STRANGER, wait_ms=WAIT_MS)

    outcome = cache.handle(command, 0.0)
    landed = land(cache, the_copy(outcome))

    assert hits(woken(landed, outcome.ticket, Reserved)) == (0, 0, 4, 0)
    assert cache.check() == []
