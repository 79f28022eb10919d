"""Laws of making room: calls that may wait cost nobody cached bytes, and no tenant gets another's."""

from dataclasses import replace
from typing import Any

import pytest

from kvlease.errors import (
    PoolFullError,
)
from kvlease.ids import BYTES_PER_KEY, CopyId, Epoch
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Outcome, Reserved, Tier
from kvleased.core.limits import TenantLimits
from kvleased.core.shape import WritePolicy
from tests.unit.service.core.builders import (
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_full_cache,
    a_reserve,
    answer,
    cached,
    commit,
    copies,
    evict,
    evicted,
    fail,
    found,
    ids,
    keys,
    land,
    on_host,
    records,
    release,
    reserve,
    started,
    the_copy,
    wakes,
    woken,
)
from tests.unit.service.core.grouped import FULL
from tests.unit.service.core.tier_builders import turn

# Writing back ---------------------------------------------------------------------------------------------------------


def land_until_woken(cache: Cache, outcome: Outcome, num_copies_max: int) -> tuple[Outcome, int]:
    """Land one copy after another until the call is answered, and return how many copies that took."""
    ticket, num_copies = outcome.ticket, 0
    while ticket not in wakes(outcome):
        num_copies += 1
        assert num_copies <= num_copies_max
        outcome = land(cache, the_copy(outcome))
    return outcome, num_copies


def test_patient_call_loses_nothing() -> None:
    """Before cached blocks make room for a call that may wait, they are copied to the host pool."""
    cache = a_full_cache(4)

    outcome = cache.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0)
    land_until_woken(cache, outcome, 1)

    assert found(cache, keys(0, 1, 2, 3)) == (2, 2)
    assert cache.check() == []


def test_impatient_call_drops_what_it_needs() -> None:
    """A call that may not wait gets its blocks at once; what was cached in them is lost."""
    cache = a_full_cache(4)

    reserve(cache, 2)

    assert found(cache, keys(0, 1, 2, 3)) == (2, 0)
    assert cache.census().counters["blocks_dropped"] == 2


@pytest.mark.parametrize("num_slots", [0, 1, 3, 7, 8, 9])
def test_patient_call_is_served_however_small_the_host_pool(num_slots: int) -> None:
    """Blocks leave even if the host pool cannot hold all of them: each round of copies makes room."""
    cache = a_full_cache(8, num_slots)
    outcome = cache.handle(a_reserve(8, wait_ms=WAIT_MS), 0.0)
    if not num_slots:
        answer(outcome, Reserved)
        return

    served, _ = land_until_woken(cache, outcome, 8)

    assert len(ids(woken(served, outcome.ticket, Reserved).block_ids)) == 8
    assert cache.check() == []


@pytest.mark.parametrize("num_slots", [1, 3])
def test_what_gets_no_slot_leaves_at_once(num_slots: int) -> None:
    """A call waits only for copies that have slots, and an event that changes nothing does not serve it earlier."""
    cache = a_full_cache(8, num_slots)

    outcome = cache.handle(a_reserve(8, wait_ms=WAIT_MS), 0.0)
    unchanged = cache.handle(c.CopyDone(copy_id=CopyId(3)), 0.0)

    assert wakes(unchanged) == copies(unchanged) == []
    assert cache.census().device["free"] == 8 - num_slots
    landed = land(cache, the_copy(outcome))
    assert len(ids(woken(landed, outcome.ticket, Reserved).block_ids)) == 8
    assert cache.check() == []


def test_coldest_blocks_are_those_that_get_no_slot() -> None:
    """If the host pool has room for only some of the leaving blocks, the most recently used are kept."""
    cache = a_cache(4, num_slots=1)
    for number in (1, 2, 3, 4):
        cached(cache, keys(number))

    outcome = cache.handle(a_reserve(4, wait_ms=WAIT_MS), 0.0)
    land(cache, the_copy(outcome))

    assert [found(cache, keys(number)) for number in (1, 2, 3, 4)] == [(0, 0)] * 3 + [(0, 1)]


def a_counting_cache(num_blocks: int, num_slots: int = 8, write_after_hits: int = 2) -> Cache:
    """Return a cache that copies blocks to the host pool once they were found so often."""
    policy = {
        "write_policy": WritePolicy.AFTER_N_HITS,
        "write_after_hits": write_after_hits,
    }
    return a_cache(num_blocks, num_slots, **policy)


def found_once(cache: Cache, packed: bytes) -> Outcome:
    """Reserve and release blocks of keys that are on the device; return what the reserve started."""
    outcome = cache.handle(a_reserve(len(packed) // BYTES_PER_KEY, "finder", packed), 0.0)
    release(cache, answer(outcome, Reserved).lease_id)
    return outcome


def test_block_that_was_not_found_often_enough_leaves_without_a_copy() -> None:
    """Under after-n-hits, blocks with too few hits are dropped for a patient call, which waits for nothing."""
    cache = a_counting_cache(4)
    cached(cache, keys(0, 1, 2, 3))
    found_once(cache, keys(0))

    outcome = cache.handle(a_reserve(4, wait_ms=WAIT_MS), 0.0)

    assert len(ids(answer(outcome, Reserved).block_ids)) == 4
    assert copies(outcome) == []
    assert cache.census().counters["blocks_dropped"] == 4
    assert cache.check() == []


def test_only_what_was_found_often_enough_is_written_back() -> None:
    """Under after-n-hits, a patient call waits for copies of blocks with enough hits, and of no others."""
    cache = a_counting_cache(4)
    cached(cache, keys(1))
    cached(cache, keys(2, 3, 4))
    found_once(cache, keys(1))
    fail(cache, the_copy(found_once(cache, keys(1))))

    outcome = cache.handle(a_reserve(4, wait_ms=WAIT_MS), 0.0)
    assert len(ids(the_copy(outcome).source_ids)) == 1
    land_until_woken(cache, outcome, 1)

    assert [found(cache, keys(number)) for number in (1, 2, 3, 4)] == [(0, 1)] + [(0, 0)] * 3
    assert cache.check() == []


def test_hits_of_an_earlier_block_keep_nothing() -> None:
    """Hits are those of one block: what is committed in its place later has none, and leaves without a copy."""
    cache = a_counting_cache(1, write_after_hits=1)
    cached(cache, keys(1))
    land(cache, the_copy(found_once(cache, keys(1))))
    cached(cache, keys(2))

    outcome = cache.handle(a_reserve(1, wait_ms=WAIT_MS), 0.0)

    assert copies(outcome) == []
    assert found(cache, keys(2)) == (0, 0)


def test_what_came_up_from_below_counts_as_found_often_enough() -> None:
    """Under after-n-hits, a block that was loaded is copied again if the host pool has lost it meanwhile."""
    cache = a_counting_cache(1, num_slots=1)
    on_host(cache, keys(1))
    loaded = cache.handle(a_reserve(1, "a", keys(1), wait_ms=WAIT_MS), 0.0)
    lease_id = woken(land(cache, the_copy(loaded)), loaded.ticket, Reserved).lease_id
    cache.handle(c.Clear(), 0.0)
    release(cache, lease_id)

    outcome = cache.handle(a_reserve(1, "b", wait_ms=WAIT_MS), 0.0)
    land_until_woken(cache, outcome, 1)

    assert found(cache, keys(1)) == (0, 1)
    assert cache.check() == []


def test_what_a_restart_finds_counts_as_found_often_enough() -> None:
    """Under after-n-hits, hits before a restart are not known, so blocks of before it are copied before they leave."""
    cache = a_counting_cache(2)
    cached(cache, keys(1, 2))
    again = Cache.recovered(cache.shape, records(cache), Epoch(2), {WORKER: TENANT}, 0.0)

    outcome = again.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0)
    land_until_woken(again, outcome, 1)

    assert found(again, keys(1, 2)) == (0, 2)
    assert again.check() == []


@pytest.mark.parametrize("asked", [{"keys": keys(1, 2)}, {"num_blocks": 2}])
def test_evict_call_copies_what_nobody_found(asked: dict[str, Any]) -> None:
    """Under after-n-hits, an evict call moves cached blocks whatever their hits: its caller wants them kept."""
    cache = a_counting_cache(2)
    cached(cache, keys(1, 2))

    land(cache, the_copy(cache.handle(c.Evict(**asked), 0.0)))

    assert found(cache, keys(1, 2)) == (0, 2)


def test_evicted_lease_keeps_bytes_that_nobody_found() -> None:
    """Under after-n-hits, an evict of a lease moves all its blocks, committed or not, whatever their hits."""
    cache = a_counting_cache(4)

    evicted(cache, keys(1, 2), more=1)

    assert found(cache, keys(1, 2)) == (0, 2)
    assert cache.census().host["free"] == 8 - 3
    assert cache.check() == []


def test_full_host_pool_does_not_keep_anybody_waiting() -> None:
    """If no slot is available, cached blocks leave without a copy."""
    cache = a_cache(4, num_slots=2)
    evicted(cache, keys(8, 9))
    cached(cache, keys(0, 1, 2, 3))

    lease = answer(cache.handle(a_reserve(3, wait_ms=WAIT_MS), 0.0), Reserved)

    assert len(ids(lease.block_ids)) == 3
    assert cache.check() == []


@pytest.mark.parametrize("num_slots", [1, 2])
def test_patient_call_does_not_lose_its_own_prefix_to_the_room_that_it_makes(
    num_slots: int,
) -> None:
    """Blocks written back for a request take no slot from which that request is about to load."""
    cache = a_cache(2, num_slots=num_slots)
    on_host(cache, keys(9))
    cached(cache, keys(1, 2))

    outcome = cache.handle(a_reserve(2, prefix=keys(9), wait_ms=WAIT_MS), 0.0)
    woken_outcome, _ = land_until_woken(cache, outcome, 2)

    lease = woken(woken_outcome, outcome.ticket, Reserved)
    assert (lease.device_hit_tokens, lease.host_hit_tokens) == (0, TOKENS_PER_BLOCK)
    assert cache.check() == []


def a_drafted_cache(num_blocks: int, num_slots: int, **numbers: Any) -> Cache:
    """Return a cache that a draft model reads, with the first two blocks of a three-block document held."""
    groups = (replace(FULL, is_drafted=True),)
    cache = a_cache(num_blocks, num_slots, groups=groups, **numbers)
    lease = reserve(cache, 2, "document")
    commit(cache, lease.lease_id, keys(1, 2))
    cached(cache, keys(3))
    return cache


def a_reader(num_blocks: int) -> c.Reserve:
    """Return a reserve that may wait and finds two of three blocks, for a draft model reads the third one."""
    return a_reserve(num_blocks, "reader", keys(1, 2, 3), wait_ms=WAIT_MS)


def test_patient_call_does_not_push_out_what_its_draft_model_reads() -> None:
    """A call's write-back does not take the slot of the key behind its prefix, for its prefix would be shorter then."""
    cache = a_drafted_cache(4, num_slots=1)
    land(cache, the_copy(cache.handle(c.Evict(keys=keys(3)), 0.0)))
    cached(cache, keys(8, 9))

    lease = answer(cache.handle(a_reader(4), 0.0), Reserved)

    assert lease.device_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert found_behind(cache, keys(3))
    assert cache.check() == []


def found_behind(cache: Cache, key: bytes) -> bool:
    """Return whether a key is in the host pool or on the device."""
    state = cache._state
    return state.device.index.get(key) >= 0 or state.host.index.get(key) >= 0


@pytest.mark.parametrize("num_slots", [0, 1])
def test_what_a_draft_model_reads_leaves_after_all_else(num_slots: int) -> None:
    """Although the block behind the prefix is the coldest, other blocks make room for the call."""
    cache = a_drafted_cache(5, num_slots)
    cached(cache, keys(8, 9))

    outcome = cache.handle(a_reader(4), 0.0)
    if num_slots:
        outcome, _ = land_until_woken(cache, outcome, 2)

    assert found_behind(cache, keys(3))
    assert cache.check() == []


def test_what_a_draft_model_reads_leaves_where_there_is_nothing_else() -> None:
    """If nothing else can leave, the block behind the prefix does, and the call is served with a shorter prefix."""
    cache = a_drafted_cache(4, num_slots=0)

    lease = answer(cache.handle(a_reader(4), 0.0), Reserved)

    assert lease.device_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert not found_behind(cache, keys(3))
    assert cache.check() == []


def test_tenant_at_its_maximum_gives_up_what_its_draft_model_reads() -> None:
    """A tenant at its maximum gives up its own block behind the prefix: other tenants' blocks cannot take its place."""
    limits = {TENANT: TenantLimits(max_blocks=4)}
    cache = a_drafted_cache(6, num_slots=0, tenants=limits)
    cached(cache, keys(8, 9), worker_id=STRANGER)

    lease = answer(cache.handle(a_reader(4), 0.0), Reserved)

    assert lease.device_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert not found_behind(cache, keys(3))
    assert cache.check() == []


def read_after_waiting(cache: Cache) -> Reserved:
    """Return the lease of a call that must wait, once the copies that it waits for have landed."""
    outcome = cache.handle(a_reader(4), 0.0)
    assert outcome.reply is None
    landed, _ = land_until_woken(cache, outcome, 4)
    assert cache.check() == []
    return woken(landed, outcome.ticket, Reserved)


@pytest.mark.parametrize("limits", [{}, {TENANT: TenantLimits(max_blocks=4)}])
@pytest.mark.parametrize("num_slots", [0, 1])
def test_what_a_draft_model_reads_leaves_after_the_scrub_that_a_call_waits_for(
    num_slots: int, limits: dict[int, TenantLimits]
) -> None:
    """The block behind the prefix leaves only once another tenant's blocks are zeroed, so the prefix stays whole."""
    cache = a_drafted_cache(5 if limits else 4, num_slots, tenants=limits)
    num_foreign = 2 if limits else 1
    cached(cache, keys(*range(8, 8 + num_foreign)), worker_id=STRANGER)
    for copy in copies(cache.handle(c.Evict(keys=keys(*range(8, 8 + num_foreign))), 0.0)):
        land(cache, copy)

    lease = read_after_waiting(cache)

    assert lease.device_hit_tokens == 2 * TOKENS_PER_BLOCK


@pytest.mark.parametrize("num_slots", [0, 1])
def test_wait_is_named_where_what_a_draft_model_reads_leaves_in_the_end(num_slots: int) -> None:
    """Like a waiting call, a refusal counts on the block that leaves once all others are ready."""
    cache = a_drafted_cache(4, num_slots)
    cached(cache, keys(8), worker_id=STRANGER)
    for copy in copies(cache.handle(c.Evict(keys=keys(8)), 0.0)):
        land(cache, copy)

    with pytest.raises(PoolFullError) as refusal:
        cache.handle(replace(a_reader(4), wait_ms=0), 0.0)

    assert (refusal.value.rule, refusal.value.remedies) == ("copies", ("wait_ms=2000",))
    assert read_after_waiting(cache).device_hit_tokens == 2 * TOKENS_PER_BLOCK


def test_no_wait_is_named_where_what_a_draft_model_reads_is_not_enough() -> None:
    """If the block that leaves last is not enough, since another tenant holds the rest, no wait is named."""
    cache = a_drafted_cache(4, num_slots=0)
    reserve(cache, 1, "other", worker_id=STRANGER)

    with pytest.raises(PoolFullError) as refusal:
        cache.handle(replace(a_reader(4), wait_ms=0), 0.0)

    assert refusal.value.rule == "blocks"
    assert refusal.value.remedies == ("num_tokens=12",)


def test_blocks_of_others_leave_and_are_zeroed_before_what_a_draft_model_reads() -> None:
    """Other blocks make room first, and the block behind the prefix stays until all of them are ready."""
    cache = a_drafted_cache(4, num_slots=0)
    cached(cache, keys(8), worker_id=STRANGER)

    outcome = cache.handle(a_reader(4), 0.0)

    assert (found_behind(cache, keys(3)), found_behind(cache, keys(8))) == (True, False)
    landed, _ = land_until_woken(cache, outcome, 1)
    lease = woken(landed, outcome.ticket, Reserved)
    assert (lease.device_hit_tokens, found_behind(cache, keys(3))) == (2 * TOKENS_PER_BLOCK, False)
    assert cache.check() == []


def test_what_a_draft_model_reads_waits_for_the_scrub_of_a_mover_that_hangs() -> None:
    """Without a host pool, other blocks leave rather than be waited for; if there are none, the block still stays."""
    cache = a_drafted_cache(4, num_slots=1)
    cached(cache, keys(8), worker_id=STRANGER)
    turn(cache, Tier.HOST, on=False)

    lease = read_after_waiting(cache)

    assert lease.device_hit_tokens == 2 * TOKENS_PER_BLOCK


def test_what_a_draft_model_reads_is_not_dropped_while_others_are_written_back() -> None:
    """The block behind the prefix is the coldest, but with only one slot the other block's copy is waited for first."""
    cache = a_drafted_cache(4, num_slots=1)
    cached(cache, keys(8))

    lease = read_after_waiting(cache)

    assert lease.device_hit_tokens == 2 * TOKENS_PER_BLOCK


def test_wait_is_named_for_a_lease_that_leaves_before_what_a_draft_model_reads() -> None:
    """The block behind a call's prefix stays until the lease has left and the lease's block is zeroed."""
    cache = a_drafted_cache(4, num_slots=1)
    other = reserve(cache, 1, "other", worker_id=STRANGER)
    leaving = evict(cache, other.lease_id, worker_id=STRANGER)

    with pytest.raises(PoolFullError) as refused:
        reserve(cache, 4, "reader", keys(1, 2, 3))
    outcome = cache.handle(a_reader(4), 0.0)
    zeroed = land(cache, the_copy(land(cache, the_copy(leaving))))

    assert refused.value.remedies == ("wait_ms=2000",)
    lease = woken(zeroed, outcome.ticket, Reserved)
    assert lease.device_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert cache.check() == []


def test_second_caller_waits_for_the_room_that_is_coming() -> None:
    """A copy that makes room is not started again for the next caller."""
    cache = a_full_cache(4)
    first = cache.handle(a_reserve(2, "a", wait_ms=WAIT_MS), 0.0)

    again = cache.handle(c.Cancel(ticket=first.ticket or 0), 0.0)
    second = cache.handle(a_reserve(2, "b", wait_ms=WAIT_MS), 0.0)
    landed = land(cache, the_copy(first))

    assert copies(again) == copies(second) == []
    woken(landed, second.ticket, Reserved)


def test_clean_blocks_leave_without_a_copy() -> None:
    """A block whose bytes are in the host pool already makes room at once."""
    cache = a_cache(2)
    on_host(cache, keys(1, 2))
    land(cache, the_copy(cache.handle(c.Reload(keys=keys(1, 2)), 0.0)))

    outcome = cache.handle(a_reserve(2, wait_ms=WAIT_MS), 0.0)

    assert len(ids(answer(outcome, Reserved).block_ids)) == 2
    assert found(cache, keys(1, 2)) == (0, 2)


# Tenants --------------------------------------------------------------------------------------------------------------


def test_block_is_scrubbed_before_it_changes_tenants() -> None:
    """A tenant gets no block with another's bytes: a refused call starts the scrub, and the next call is served."""
    cache = a_cache(2)
    cached(cache, keys(1, 2))

    with pytest.raises(PoolFullError):
        reserve(cache, 2, worker_id=STRANGER)
    land(cache, started(cache))

    assert len(ids(reserve(cache, 2, worker_id=STRANGER).block_ids)) == 2
    assert cache.check() == []


def test_patient_call_waits_for_the_scrub() -> None:
    """A call that may wait is served once the blocks are zeroed, by one scrub and not two."""
    cache = a_cache(2, num_slots=0)
    cached(cache, keys(1, 2))
    outcome = cache.handle(a_reserve(2, worker_id=STRANGER, wait_ms=WAIT_MS), 0.0)

    landed = land(cache, the_copy(outcome))

    woken(landed, outcome.ticket, Reserved)
    assert copies(landed) == []
