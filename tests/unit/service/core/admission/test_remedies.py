"""Laws of remedies: a call that follows a refusal's remedy is granted, and what would not help is not named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvlease.errors import (
    BusyError,
    DeadlineError,
    InvalidError,
    KVLeaseError,
    NeverFitsError,
    PoolFullError,
    WrongStateError,
)
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Evicted, Forked, Reserved, Tier
from kvleased.core.limits import TenantLimits
from kvleased.core.shape import WritePolicy
from tests.unit.service.core.builders import (
    MATE,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reload,
    a_reserve,
    an_extend,
    answer,
    cached,
    commit,
    committed,
    evict,
    evicted,
    keys,
    land,
    lose,
    on_host,
    release,
    reload_keys,
    reserve,
    the_copy,
    tick,
    wait_for,
    woken,
)
from tests.unit.service.core.grouped import (
    FULL,
    GUESSING,
    STATE,
    WIDE,
    WINDOW,
    cache_of,
    chain,
    commit_tokens,
    reserve_tokens,
)
from tests.unit.service.core.tier_builders import probed, the_probe

LONGEST = "no call may wait longer than 5000 ms"


def refused(cache: Cache, command: c.Command, kind: type[KVLeaseError] = PoolFullError) -> Any:
    """Return the refusal of a command."""
    with pytest.raises(kind) as caught:
        cache.handle(command, 0.0)
    return caught.value


def why(error: KVLeaseError) -> tuple[str | None, tuple[str, ...]]:
    """Return the rule of a refusal, and the remedies that it names."""
    return error.rule, error.remedies


# What copies bring ----------------------------------------------------------------------------------------------------


def test_what_a_remote_store_may_forget_is_not_counted_on() -> None:
    """Fewer tokens are named only if they fit even without the blocks that the remote store says it has."""
    cache = cache_of(WINDOW, num_blocks=5, uses_remote=True)
    reserve(cache, 1, "other")
    outcome = cache.handle(a_reserve(8, "r", keys(*range(1, 7)), wait_ms=WAIT_MS), 0.0)
    probed(cache, the_probe(outcome), *[1] * 6)

    error = woken(tick(cache, WAIT_MS / 1000), outcome.ticket, PoolFullError)

    # With 24 tokens from the store, 28 tokens need 3 blocks; without them they need 4.
    assert (error.need, error.available, error.remedies) == (4, 3, ())


def test_prefix_is_not_made_shorter_by_the_keys_that_are_left_out() -> None:
    """A draft model reads one block behind a prefix, so its key counts, too, when fewer tokens are recommended."""
    cache = cache_of(FULL, replace(WIDE, is_drafted=True), num_blocks=24)
    lease = reserve_tokens(cache, 24, "document")
    commit_tokens(cache, lease.lease_id, 24, chain(24))
    reserve_tokens(cache, 32, "other")
    reader = c.Reserve(worker_id=WORKER, request_id="r", keys=chain(56), num_tokens=56)

    # With 16 tokens found, two free blocks would suffice for 20 tokens; with 5 of the keys, only 8 are found.
    assert why(refused(cache, reader)) == ("blocks", ())


def test_no_wait_is_named_again_that_was_too_short() -> None:
    """A call that has waited for a moment, for blocks that a copy is about to leave, is told to wait for longer."""
    cache = a_cache(4)
    reserve(cache, 3, "held")
    evict(cache, reserve(cache, 1, "leaving").lease_id)

    ticket = cache.handle(a_reserve(2, "r", wait_ms=1), 0.0).ticket
    error = woken(tick(cache, 0.001), ticket, PoolFullError)

    assert error.remedies == ("num_tokens=4 wait_ms=2000",)


def test_fork_is_not_told_to_forget_what_was_computed() -> None:
    """A fork needs all computed tokens; if even these exceed the tenant's maximum, no fewer tokens are named."""
    cache = a_cache(8)
    parent = reserve(cache, 4, "parent")
    cache.handle(
        c.Commit(
            worker_id=WORKER, lease_id=parent.lease_id, num_tokens=14, first_block=0, keys=b""
        ),
        0.0,
    )
    cache.handle(
        c.Limit(tenants={TENANT: TenantLimits(max_blocks=3)}, tenant_default=TenantLimits()), 0.0
    )
    fork = c.Fork(worker_id=WORKER, lease_id=parent.lease_id, request_id="r", num_tokens=16)

    assert refused(cache, fork, NeverFitsError).remedies == ()


def test_lease_that_comes_back_at_once_makes_no_room() -> None:
    """If a reload waits for a lease to be down, a longer wait for the lease's blocks does not help."""
    cache = a_cache(4)
    lease = reserve(cache, 4)
    evict(cache, lease.lease_id)
    cache.handle(a_reload(lease.lease_id), 0.0)

    assert why(refused(cache, a_reserve(2, "r"))) == ("blocks", ())


def test_lease_that_comes_back_takes_more_than_it_left() -> None:
    """A lease that comes back needs one block anew for a shared block that two copies take down."""
    cache = a_cache(6, write_policy=WritePolicy.WRITE_THROUGH)
    committed(cache, keys(1, 2), "first")
    second = reserve(cache, 2, "second", keys(1, 2))
    other = reserve(cache, 2, "other")
    reserve(cache, 2, "held")
    evict(cache, other.lease_id)
    assert why(refused(cache, a_reserve(2, "r"))) == ("copies", ("wait_ms=2000",))

    evict(cache, second.lease_id)
    cache.handle(a_reload(second.lease_id), 0.0)

    # Two blocks come free, and the lease takes one of them, for the block that is being written through meanwhile.
    assert why(refused(cache, a_reserve(2, "r"))) == ("blocks", ("num_tokens=4 wait_ms=2000",))


def test_lease_that_comes_back_takes_anew_a_shared_block_whose_key_has_another_slot() -> None:
    """A block that another copy brought down first is known by that slot, so the lease needs a block for its own."""
    cache = a_cache(5, write_policy=WritePolicy.WRITE_THROUGH)
    committed(cache, keys(1), "first")
    (written_through,) = cache._state.flights
    second = reserve(cache, 1, "second", keys(1))
    other = reserve(cache, 2, "other")
    reserve(cache, 2, "held")
    evict(cache, other.lease_id)
    evict(cache, second.lease_id)
    cache.handle(a_reload(second.lease_id), 0.0)

    cache.handle(c.CopyDone(copy_id=written_through), 0.0)

    assert why(refused(cache, a_reserve(2, "r"))) == ("blocks", ("num_tokens=4 wait_ms=2000",))


def test_lease_that_comes_back_may_lose_the_key_that_a_call_finds() -> None:
    """A prefix leaves the device with a lease if another copy's slot gets its key: then the call needs a block more."""
    cache = a_cache(4, write_policy=WritePolicy.WRITE_THROUGH)
    lease = committed(cache, keys(1), "first")
    (written_through,) = cache._state.flights
    other = reserve(cache, 1, "other")
    reserve(cache, 2, "held")
    evict(cache, other.lease_id)
    call = a_reserve(2, "r", keys(1))
    assert why(refused(cache, call)) == ("copies", ("wait_ms=2000",))

    evict(cache, lease.lease_id)
    cache.handle(a_reload(lease.lease_id), 0.0)

    assert why(refused(cache, call)) == ("blocks", ())
    cache.handle(c.CopyDone(copy_id=written_through), 0.0)
    assert why(refused(cache, call)) == ("blocks", ())


def test_lease_that_comes_back_takes_anew_what_a_lost_copy_keeps() -> None:
    """A block that a lost copy may still read does not come free with its lease, which needs another in its place."""
    cache = a_cache(6)
    lease = reserve(cache, 2, "moved twice")
    other = reserve(cache, 2, "other")
    reserve(cache, 2, "held")
    lose(cache, the_copy(evict(cache, lease.lease_id)))
    evict(cache, lease.lease_id)
    evict(cache, other.lease_id)
    assert why(refused(cache, a_reserve(2, "r"))) == ("copies", ("wait_ms=2000",))

    cache.handle(a_reload(lease.lease_id), 0.0)

    assert why(refused(cache, a_reserve(2, "r"))) == ("blocks", ())


def test_lease_that_comes_back_takes_its_blocks_before_those_who_stand_in_line() -> None:
    """A call that has room now, but stands behind others, is told to wait only if there is room by then, too."""
    cache = a_cache(6)
    lease = reserve(cache, 2, "moved twice")
    lose(cache, the_copy(evict(cache, lease.lease_id)))
    evict(cache, lease.lease_id)
    cache.handle(a_reload(lease.lease_id), 0.0)
    wait_for(cache, 5, "first in line")

    assert why(refused(cache, a_reserve(2, "r"))) == ("position", ("wait_ms=2000",))
    assert why(refused(cache, a_reserve(4, "r"))) == ("position", ())


def test_lease_that_comes_back_takes_blocks_that_are_zeroed_for_a_call() -> None:
    """A call that has room once blocks are zeroed is told to wait only if no lease that comes back takes them first."""
    cache = a_cache(7)
    lease = reserve(cache, 2, "moved twice")
    foreign = reserve(cache, 5, "another tenant's", worker_id=STRANGER)
    release(cache, foreign.lease_id, worker_id=STRANGER)
    lose(cache, the_copy(evict(cache, lease.lease_id)))
    evict(cache, lease.lease_id)
    cache.handle(a_reload(lease.lease_id), 0.0)

    assert why(refused(cache, a_reserve(1, "r"))) == ("copies", ("wait_ms=2000",))
    assert why(refused(cache, a_reserve(4, "r"))) == ("copies", ())
    assert why(refused(cache, a_reserve(3, "r"))) == ("copies", ("wait_ms=2000",))


def test_blocks_that_others_hold_stay_when_a_lease_leaves() -> None:
    """When a lease moves down, only those of its blocks come free that no other lease holds."""
    cache = a_cache(4)
    cached(cache, keys(1, 2))
    first = reserve(cache, 3, "first", keys(1, 2))
    reserve(cache, 3, "second", keys(1, 2))
    evict(cache, first.lease_id)

    assert why(refused(cache, a_reserve(3, "r"))) == ("blocks", ("num_tokens=4 wait_ms=2000",))
    assert why(refused(cache, a_reserve(1, "r"))) == ("copies", ("wait_ms=2000",))


def test_blocks_that_need_no_copy_leave_with_their_lease() -> None:
    """Blocks that the host pool has already come free together with the lease's other blocks, once it is down."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2))
    loading = cache.handle(a_reserve(4, "first", keys(1, 2), wait_ms=WAIT_MS), 0.0)
    first = woken(land(cache, the_copy(loading)), loading.ticket, Reserved)
    leaving = the_copy(evict(cache, first.lease_id))

    assert why(refused(cache, a_reserve(4, "r"))) == ("copies", ("wait_ms=2000",))

    ticket = wait_for(cache, 4, "r")
    assert len(woken(land(cache, leaving), ticket, Reserved).block_ids) == 16


def test_own_prefix_makes_no_room_by_leaving() -> None:
    """Blocks of a call's own prefix do not count as room for it when they are copied down and leave."""
    cache = a_cache(4)
    cached(cache, keys(1, 2))
    reserve(cache, 2, "other")
    cache.handle(c.Evict(keys=keys(1, 2)), 0.0)

    assert why(refused(cache, a_reserve(4, "r", keys(1, 2)))) == ("blocks", ())


def test_blocks_that_are_prefetched_can_be_had_when_they_are_there() -> None:
    """Prefetched blocks are held by nobody once they are there, so a wait is recommended."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2))
    reserve(cache, 2, "other")
    coming = the_copy(reload_keys(cache, keys(1, 2)))

    assert why(refused(cache, a_reserve(2, "r"))) == ("copies", ("wait_ms=2000",))

    ticket = wait_for(cache, 2, "r")
    woken(land(cache, coming), ticket, Reserved)


def test_released_lease_leaves_what_its_copy_still_holds() -> None:
    """Blocks of a lease that was released while it was copied down come free when the copy ends."""
    cache = a_cache(4)
    lease = reserve(cache, 4)
    evict(cache, lease.lease_id)
    release(cache, lease.lease_id)

    assert why(refused(cache, a_reserve(4, "r"))) == ("copies", ("wait_ms=2000",))


def test_blocks_that_are_owed_to_others_are_no_room() -> None:
    """Blocks that come free count as room only if they are not part of another tenant's minimum."""
    limits = {TENANT: TenantLimits(), OTHER_TENANT: TenantLimits(min_blocks=2)}
    cache = a_cache(4, tenants=limits)
    theirs = reserve(cache, 2, worker_id=STRANGER)
    reserve(cache, 2, "mine")
    evict(cache, theirs.lease_id, worker_id=STRANGER)

    assert why(refused(cache, a_reserve(1, "r"))) == ("blocks", ())


def test_blocks_of_an_own_lease_that_leaves_are_room_below_a_maximum() -> None:
    """A tenant at its maximum can have the blocks that its own leaving lease frees, if it waits."""
    cache = a_cache(4, tenants={TENANT: TenantLimits(max_blocks=2)})
    leaving = the_copy(evict(cache, reserve(cache, 2).lease_id))

    error = refused(cache, a_reserve(2, "r"))

    assert (error.resource, *why(error)) == ("tenant_blocks", "limits", ("wait_ms=2000",))
    ticket = wait_for(cache, 2, "r")
    woken(land(cache, leaving), ticket, Reserved)


def test_blocks_that_are_zeroed_are_room_for_a_tenant_with_limits() -> None:
    """Blocks that change tenants count for nobody while they are zeroed, and are available afterwards."""
    cache = a_cache(4, num_slots=0, tenants={TENANT: TenantLimits(max_blocks=3)})
    release(cache, reserve(cache, 4, worker_id=STRANGER).lease_id, worker_id=STRANGER)
    refused(cache, a_reserve(3, "r"))

    assert why(refused(cache, a_reserve(3, "r"))) == ("copies", ("wait_ms=2000",))


def test_call_that_may_not_even_have_its_prefix_is_told_no_wait() -> None:
    """If another tenant's raised minimum needs a call's cached prefix, a wait does not help, and none is named."""
    cache = a_cache(4)
    cached(cache, keys(1, 2, 3, 4))
    limits = {OTHER_TENANT: TenantLimits(min_blocks=2)}
    cache.handle(c.Limit(tenants=limits, tenant_default=TenantLimits()), 0.0)

    error = refused(cache, a_reserve(4, "r", keys(1, 2, 3, 4)))

    assert (error.need, error.available, *why(error)) == (0, 0, "limits", ())


@pytest.mark.parametrize(("num_free", "told"), [(3, ()), (4, ("wait_ms=2000",))])
def test_wait_with_which_a_call_needs_more_is_named_only_where_that_is_coming(
    num_free: int, told: tuple[str, ...]
) -> None:
    """A waiting call loads its states from the host pool, which takes one block more than not waiting."""
    cache = cache_of(FULL, STATE, num_blocks=5 + num_free)
    lease_id = reserve_tokens_of(cache, 1)
    commit(cache, lease_id, chain(4))
    release(cache, lease_id)
    land(cache, the_copy(cache.handle(c.Evict(keys=chain(4)), 0.0)))
    hold_all_but(cache, num_free)
    theirs = reserve_tokens_of(cache, num_free - 1)
    evict(cache, theirs)

    error = refused(cache, a_reserve(2, "r", chain(4)))

    assert (error.need, error.available, error.remedies) == (3, 0, told)


def hold_all_but(cache: Cache, num_blocks: int) -> None:
    """Lease all blocks of the pool except some; each lease has a state besides its tokens."""
    num_tokens = 4 * (cache.shape.usable_blocks - num_blocks - 1)
    command = c.Reserve(worker_id=MATE, request_id="o", keys=b"", num_tokens=num_tokens)
    answer(cache.handle(command, 0.0), Reserved)


# Keys -----------------------------------------------------------------------------------------------------------------


def test_keys_that_are_on_the_device_count_for_no_block() -> None:
    """A refusal names as many keys as there is room for; keys whose blocks are on the device take no room."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2, 3))
    land(cache, the_copy(reload_keys(cache, keys(1))))
    reserve(cache, 2, "other", keys(1))
    reserve(cache, 1, "another")

    error = refused(cache, c.Reload(worker_id=WORKER, keys=keys(1, 2, 3)))

    assert (error.need, error.available, error.remedies) == (2, 1, ("num_keys=2",))
    assert len(the_copy(reload_keys(cache, keys(1, 2))).target_ids) == 4


def test_fewer_keys_are_those_that_need_no_zeroing() -> None:
    """A call that does not wait is told how many of its keys get blocks that are ready for its tenant."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2, 3))
    theirs = a_reserve(2, worker_id=STRANGER, wait_ms=WAIT_MS)
    waiting = cache.handle(theirs, 0.0)
    granted = woken(land(cache, the_copy(waiting)), waiting.ticket, Reserved)
    release(cache, granted.lease_id, worker_id=STRANGER)

    error = refused(cache, c.Reload(worker_id=WORKER, keys=keys(1, 2, 3)))

    assert (error.need, error.available, *why(error)) == (3, 4, "copies", ("num_keys=2",))


def test_fewer_keys_are_of_whose_blocks_are_the_first_by_then() -> None:
    """A first key whose block leaves for the refused call is not named: its tenant's block would need zeroing."""
    cache = a_cache(4)
    on_host(cache, keys(8), worker_id=STRANGER)
    land(cache, the_copy(cache.handle(c.Reload(worker_id=STRANGER, keys=keys(8)), 0.0)))
    on_host(cache, keys(1, 2, 3))
    waiting = cache.handle(a_reserve(2, worker_id=STRANGER, wait_ms=WAIT_MS), 0.0)
    granted = woken(land(cache, the_copy(waiting)), waiting.ticket, Reserved)
    commit(cache, granted.lease_id, keys(9, 10), worker_id=STRANGER)
    release(cache, granted.lease_id, worker_id=STRANGER)
    cached(cache, keys(4))

    error = refused(cache, c.Reload(keys=keys(8, 1, 2, 3)))

    assert (error.need, error.available, *why(error)) == (3, 4, "copies", ())


def test_a_key_of_several_groups_counts_with_all_its_blocks() -> None:
    """If each key names a block in each of two groups, a refusal names half as many keys as there are blocks."""
    cache = cache_of(FULL, WINDOW, num_blocks=9)
    lease_id = reserve_tokens_of(cache, 3)
    commit(cache, lease_id, chain(12))
    release(cache, lease_id)
    land(cache, the_copy(cache.handle(c.Evict(keys=chain(12)), 0.0)))
    cache.handle(c.Reserve(worker_id=WORKER, request_id="o", keys=b"", num_tokens=8), 0.0)

    error = refused(cache, c.Reload(worker_id=WORKER, keys=chain(12)))

    assert (error.need, error.available, error.remedies) == (6, 4, ("num_keys=2",))
    assert len(the_copy(reload_keys(cache, chain(8))).target_ids) == 16


def reserve_tokens_of(cache: Cache, num_blocks: int) -> Any:
    """Return a lease of the given number of blocks, of four tokens each."""
    command = c.Reserve(worker_id=WORKER, request_id="c", keys=b"", num_tokens=4 * num_blocks)
    return answer(cache.handle(command, 0.0), Reserved).lease_id


def test_no_keys_are_named_where_none_would_come() -> None:
    """If there is no room at all, no number of keys is named."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2))
    reserve(cache, 4, "other")

    assert refused(cache, c.Reload(worker_id=WORKER, keys=keys(1, 2))).remedies == ()


def test_more_keys_than_the_pool_learn_how_many_fit_it() -> None:
    """A reload that never fits is told the most keys whose blocks the whole pool has room for."""
    cache = a_cache(2, 4)
    for number in (1, 2, 3):
        on_host(cache, keys(number))

    error = refused(cache, c.Reload(worker_id=WORKER, keys=keys(9, 1, 2, 3)), NeverFitsError)

    assert (error.need, error.limit, error.remedies) == (3, 2, ("num_keys=3",))


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"table_blocks": 4}, id="longest request"),
        pytest.param({"tenants": {TENANT: TenantLimits(max_blocks=4)}}, id="tenant's maximum"),
    ],
)
def test_what_never_fits_is_told_the_keys_that_do(limits: dict[str, Any]) -> None:
    """A reserve of too many tokens with keys for all of them is told how many keys the tokens that fit have."""
    cache = a_cache(8, **limits)

    error = refused(cache, a_reserve(6, "r", keys(1, 2, 3, 4, 5, 6)), NeverFitsError)

    assert error.remedies == ("num_tokens=16 num_keys=4",)
    assert len(reserve(cache, 4, "r", keys(1, 2, 3, 4)).block_ids) == 16


# Forks ----------------------------------------------------------------------------------------------------------------


def a_fork(parent: Reserved, num_tokens: int) -> c.Fork:
    """Return the command that forks a lease."""
    return c.Fork(
        worker_id=WORKER, lease_id=parent.lease_id, request_id="child", num_tokens=num_tokens
    )


def test_fork_learns_how_far_it_can_reach() -> None:
    """A fork for which blocks are lacking is told the most tokens for which there are enough, and then gets them."""
    cache = a_cache(6)
    parent = committed(cache, keys(1, 2), more=1)
    reserve(cache, 1, "other")

    error = refused(cache, a_fork(parent, 20))

    assert (error.resource, error.need, error.available, error.limit) == ("device_blocks", 3, 2, 6)
    assert (*why(error), error.retry_after_ms) == ("blocks", ("num_tokens=16",), 50)
    assert sum(one.num_blocks for one in error.holdings) == 6
    assert "a fork does not wait for room" in error.message
    assert answer(cache.handle(a_fork(parent, 16), 0.0), Forked).num_shared == 2


def test_fork_behind_others_learns_what_takes_no_block() -> None:
    """While other running requests wait, a fork gets what it shares, and no further block."""
    cache = a_cache(5)
    parent, other = committed(cache, keys(1, 2)), reserve(cache, 2, "other")
    cache.handle(an_extend(other.lease_id, 4, wait_ms=1_000), 0.0)

    error = refused(cache, a_fork(parent, 12))

    assert why(error) == ("position", ("num_tokens=8",))
    answer(cache.handle(a_fork(parent, 8), 0.0), Forked)


def test_fork_that_finds_no_room_for_what_is_written_is_told_no_number() -> None:
    """If there is no room for a copy of the computed tokens, fewer tokens do not help, and no number is named."""
    cache = a_cache(2)
    parent = reserve(cache, 2)
    commit(cache, parent.lease_id, b"")
    compute = c.Commit(
        worker_id=WORKER, lease_id=parent.lease_id, num_tokens=6, first_block=0, keys=b""
    )
    cache.handle(compute, 0.0)

    assert why(refused(cache, a_fork(parent, 7))) == ("blocks", ())


# Slots ----------------------------------------------------------------------------------------------------------------


def an_evict(lease_id: Any) -> c.Evict:
    """Return the command that moves a lease down."""
    return c.Evict(worker_id=WORKER, lease_id=lease_id)


def test_lease_that_finds_no_slots_learns_to_what_it_could_be_trimmed() -> None:
    """A lease for which slots are lacking is told how many tokens would fit, and fits after a trim to them."""
    cache = a_cache(8, 4)
    evicted(cache, keys(1), more=1)
    lease = reserve(cache, 4, "r")

    error = refused(cache, an_evict(lease.lease_id))

    assert (error.resource, error.need, error.available, error.limit) == ("host_slots", 4, 2, 4)
    assert why(error) == ("blocks", ("num_tokens=8",))
    assert sum(one.num_blocks for one in error.holdings) == 4
    assert "trim the lease first, or release the lease instead" in error.message
    trim = c.Trim(worker_id=WORKER, lease_id=lease.lease_id, num_tokens=8)
    cache.handle(trim, 0.0)
    leaving = cache.handle(an_evict(lease.lease_id), 0.0)
    assert woken(land(cache, the_copy(leaving)), leaving.ticket, Evicted).num_offloaded == 2


def test_lease_all_of_whose_tokens_are_computed_is_told_no_trim() -> None:
    """If all of a lease's tokens are computed, no trim is named, for computed tokens cannot be trimmed."""
    cache = a_cache(8, 2)
    evicted(cache, keys(1), more=1)
    lease = committed(cache, keys(3, 4), "r")

    error = refused(cache, an_evict(lease.lease_id))

    assert why(error) == ("blocks", ())
    assert "retry_after_ms, or release the lease instead" in error.message


def test_slots_of_a_lease_itself_are_no_room_for_its_other_blocks() -> None:
    """A lease's own slots cannot be dropped to make room for its other blocks, so they are not told as available."""
    cache = a_cache(8, 4)
    on_host(cache, keys(1, 2))
    evicted(cache, keys(7), more=0)
    loading = cache.handle(a_reserve(4, "r", keys(1, 2), wait_ms=WAIT_MS), 0.0)
    lease = woken(land(cache, the_copy(loading)), loading.ticket, Reserved)

    error = refused(cache, an_evict(lease.lease_id))

    assert (error.need, error.available, *why(error)) == (2, 1, "blocks", ("num_tokens=12",))


def test_slots_that_are_being_filled_are_told_as_coming() -> None:
    """Slots that copies of cached blocks are filling are available once those copies have ended."""
    cache = a_cache(8, 2)
    cached(cache, keys(1, 2))
    leaving = the_copy(cache.handle(c.Evict(keys=keys(1, 2)), 0.0))
    lease = reserve(cache, 2, "r")

    error = refused(cache, an_evict(lease.lease_id))

    assert (error.available, *why(error)) == (0, "copies", ())
    land(cache, leaving)
    the_copy(cache.handle(an_evict(lease.lease_id), 0.0))


def test_lease_with_states_is_told_no_trim() -> None:
    """If a trim would move states, no number of tokens to trim to is named."""
    cache = cache_of(FULL, GUESSING, num_blocks=33, num_slots=8)
    first, second = (
        answer(
            cache.handle(
                c.Reserve(worker_id=WORKER, request_id=name, keys=b"", num_tokens=12), 0.0
            ),
            Reserved,
        )
        for name in "ab"
    )
    evict(cache, first.lease_id)

    assert why(refused(cache, an_evict(second.lease_id))) == ("blocks", ())


# Places ---------------------------------------------------------------------------------------------------------------


def test_superseded_call_learns_when_the_later_one_is_answered() -> None:
    """A call that loses its place to a later call of its request is told that it lacks a place, and when to retry."""
    cache = a_cache(2)
    reserve(cache, 2)
    first = wait_for(cache, 1, "r")

    error = woken(cache.handle(a_reserve(1, "r", wait_ms=700), 0.0), first, BusyError)

    assert (error.resource, error.need, error.available, error.limit) == ("waiting_calls", 1, 0, 1)
    assert (error.rule, error.retry_after_ms) == ("superseded", 700)


def test_superseded_call_about_a_lease_is_told_so() -> None:
    """When a later call about a moving lease takes the earlier one's place, the earlier one is told by which rule."""
    cache = a_cache(2)
    lease = reserve(cache, 2)
    first = evict(cache, lease.lease_id)

    error = woken(evict(cache, lease.lease_id), first.ticket, WrongStateError)

    assert (error.resource, error.rule) == ("lease", "superseded")


# The longest wait -----------------------------------------------------------------------------------------------------


def waited(cache: Cache, command: c.Command) -> PoolFullError:
    """Return what a call is told that has waited for as long as any call may."""
    ticket = cache.handle(command, 0.0).ticket
    return woken(tick(cache, WAIT_MS / 1000), ticket, PoolFullError)


@pytest.mark.parametrize(("wait_ms_max", "is_longer"), [(WAIT_MS + 1, True), (WAIT_MS, False)])
def test_longer_wait_is_advised_only_to_who_may_wait_longer(
    wait_ms_max: int, is_longer: bool
) -> None:
    """A call that has waited for as long as any call may is told to ask for fewer tokens, not to wait longer."""
    cache = a_cache(4, wait_ms_max=wait_ms_max)
    reserve(cache, 3)

    error = waited(cache, a_reserve(2, "r", wait_ms=WAIT_MS))

    assert ("allow a longer wait_ms" in error.message) is is_longer
    assert (f"ask for fewer tokens, because {LONGEST}" in error.message) is not is_longer


@pytest.mark.parametrize("is_on", [True, False])
def test_wait_for_a_prefix_that_leaves_is_advised_only_if_it_is_found_below(*, is_on: bool) -> None:
    """Of a prefix in a window a block leaves the device; if the host pool is off by then, the prefix is no hit."""
    cache = cache_of(FULL, WINDOW, num_blocks=11, wait_ms_max=5000)
    own = reserve_tokens(cache, 12, "own").lease_id
    commit_tokens(cache, own, 12)
    other = reserve_tokens(cache, 4, "other").lease_id
    commit_tokens(cache, other, 4, keys(900))
    release(cache, other)
    evicting = cache.handle(c.Evict(worker_id=WORKER, num_blocks=3), 0.0)
    cache.handle(c.TierChanged(tier=Tier.HOST, is_on=is_on), 0.0)
    command = c.Reserve(
        worker_id=WORKER, request_id="r", keys=chain(8) + keys(901, 902), num_tokens=16
    )

    remedies = refused(cache, command).remedies

    assert remedies == ("wait_ms=2000" if is_on else "num_tokens=12 num_keys=3",)
    waiting = cache.handle(replace(command, wait_ms=2000), 0.0)
    effects = land(cache, the_copy(evicting)).effects
    loads = [one for one in effects if isinstance(one, Copy)]
    assert bool(loads) is is_on
    if is_on:
        woken(land(cache, loads[0]), waiting.ticket, Reserved)


def test_longest_wait_behind_others_is_told_to_come_with_a_higher_priority() -> None:
    """A call that waited in vain behind others is told to ask with a higher priority, unless it has the highest."""
    cache = a_cache(4, wait_ms_max=WAIT_MS, ageing_seconds=1e9)
    lease = reserve(cache, 4)
    wait_for(cache, 4, "before", worker_id=MATE)
    behind = cache.handle(a_reserve(1, "r", wait_ms=WAIT_MS), 0.0).ticket
    running = cache.handle(an_extend(lease.lease_id, 4), 0.0)

    error = woken(tick(cache, WAIT_MS / 1000), behind, PoolFullError)

    assert running.reply is not None
    assert f"ask with a higher priority, because {LONGEST}" in error.message


def test_call_that_room_is_made_for_comes_behind_those_that_limits_alone_had_kept() -> None:
    """While blocks are zeroed for a call, limits alone no longer hold the call before it back, so it comes behind."""
    cache = a_cache(6, tenants={OTHER_TENANT: TenantLimits(min_blocks=1)})
    release(cache, reserve(cache, 3, "used").lease_id)
    wait_for(cache, 6, "before")

    error = refused(cache, a_reserve(6, "r", worker_id=STRANGER))

    assert "1 call waits before this one" in error.message


def test_longest_wait_for_a_lease_is_told_to_release_one() -> None:
    """If leases are lacking, or a lease must come back whole, the remedy is a release: tokens and waits do not help."""
    cache = a_cache(4, max_leases=2, wait_ms_max=WAIT_MS)
    lease = evicted(cache, keys(1))
    reserve(cache, 4, "other")

    without_lease = waited(cache, a_reserve(1, "r", wait_ms=WAIT_MS))
    without_blocks = waited(cache, a_reload(lease.lease_id))

    for error in (without_lease, without_blocks):
        assert f"release a lease, because {LONGEST}" in error.message


def test_late_copies_after_the_longest_wait_are_told_as_such() -> None:
    """A call that waited for copies for as long as any call may is not told to wait for longer."""
    cache = a_cache(4, wait_ms_max=WAIT_MS)
    parent = reserve(cache, 1)
    cache.handle(
        c.Commit(worker_id=WORKER, lease_id=parent.lease_id, num_tokens=2, first_block=0, keys=b""),
        0.0,
    )
    fork = c.Fork(
        worker_id=WORKER, lease_id=parent.lease_id, request_id="r", num_tokens=4, wait_ms=WAIT_MS
    )
    ticket = cache.handle(fork, 0.0).ticket

    error = woken(tick(cache, WAIT_MS / 1000), ticket, DeadlineError)

    assert error.remedies == ()
    assert f"try again when they have ended, because {LONGEST}" in error.message


def late_fork(before: Callable[[Cache, Reserved], object]) -> DeadlineError:
    """Return the refusal of a fork whose copy is late, after an event in the meantime."""
    cache = a_cache(4)
    parent = reserve(cache, 1)
    cache.handle(
        c.Commit(worker_id=WORKER, lease_id=parent.lease_id, num_tokens=2, first_block=0, keys=b""),
        0.0,
    )
    fork = c.Fork(
        worker_id=WORKER, lease_id=parent.lease_id, request_id="r", num_tokens=4, wait_ms=WAIT_MS
    )
    ticket = cache.handle(fork, 0.0).ticket
    before(cache, parent)
    return woken(tick(cache, WAIT_MS / 1000), ticket, DeadlineError)


def limited_to(**limit: int) -> Callable[[Cache, Reserved], object]:
    """Return the command that limits the tenant."""
    limits = {TENANT: TenantLimits(**limit)}
    command = c.Limit(tenants=limits, tenant_default=TenantLimits())
    return lambda cache, _: cache.handle(command, 0.0)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(lambda *_: None, id="as it was"),
        pytest.param(limited_to(max_blocks=2, leases_max=2), id="still within its limits"),
    ],
)
def test_late_fork_is_told_to_wait_for_longer_while_it_can_be_forked(
    before: Callable[[Cache, Reserved], object],
) -> None:
    """A fork whose copy is late is told to wait for longer if its parent is still on the device."""
    error = late_fork(before)

    assert error.remedies == (f"wait_ms={2 * WAIT_MS}",)


@pytest.mark.parametrize(
    ("before", "advice"),
    [
        pytest.param(
            lambda cache, parent: release(cache, parent.lease_id), "reserve again", id="ended"
        ),
        pytest.param(
            lambda cache, parent: evict(cache, parent.lease_id), "reload it", id="on its way down"
        ),
        pytest.param(
            lambda cache, _: cache.handle(c.Drain(), 0.0),
            "the cache is being drained",
            id="draining",
        ),
        pytest.param(
            limited_to(max_blocks=1), "may no longer have as many blocks", id="limited since"
        ),
        pytest.param(
            limited_to(leases_max=1), "may no longer have as many leases", id="capped since"
        ),
    ],
)
def test_late_fork_is_not_told_to_wait_where_it_would_be_refused(
    before: Callable[[Cache, Reserved], object], advice: str
) -> None:
    """If the parent has left the device, or nothing new is granted, a late fork is not told to wait for longer."""
    error = late_fork(before)

    assert error.remedies == ()
    assert advice in error.message


def test_extend_of_a_lease_on_its_way_down_is_not_told_to_wait_for_longer() -> None:
    """An extend whose lease is evicted while it waits takes no more blocks, so it is not told to wait for longer."""
    cache = a_cache(5)
    other, lease = reserve(cache, 2, "other"), reserve(cache, 2, "r")
    reserve(cache, 1, "held")
    cache.handle(an_extend(other.lease_id, 5, wait_ms=WAIT_MS), 0.0)
    ticket = cache.handle(an_extend(lease.lease_id, 3, wait_ms=WAIT_MS), 0.0).ticket
    evict(cache, lease.lease_id)

    error = woken(tick(cache, WAIT_MS / 1000), ticket, PoolFullError)

    assert error.remedies == ()


# Repeated keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_ms", [0, WAIT_MS])
def test_reserve_refuses_the_keys_that_its_commit_would(wait_ms: int) -> None:
    """Keys that name a block twice are refused by the reserve, before any commit, whether anything is cached or not."""
    cache = a_cache()
    lease = reserve(cache, 3, "other")
    commands = (
        a_reserve(3, "r", keys(1, 2, 1), wait_ms=wait_ms),
        c.Commit(
            worker_id=WORKER, lease_id=lease.lease_id, num_tokens=12, first_block=0,
            keys=keys(1, 2, 1),
        ),
    )  # fmt: skip

    errors = [refused(cache, command, InvalidError) for command in commands]

    for error in errors:
        assert (error.resource, error.rule) == ("keys", "repeated_key")
        assert error.message == (
            "keys names a block twice: key 2 is the same as key 0; all keys of a chain must differ"
        )
