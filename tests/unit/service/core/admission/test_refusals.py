"""Laws of refusals: each says what is lacking and why, who has it, when to try again, and what would be granted."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import (
    BusyError,
    DeadlineError,
    Holding,
    InvalidError,
    KVLeaseError,
    PoolFullError,
)
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.admission.refusals import RETRY_AFTER_MS_MAX
from kvleased.core.effects import Copy, Extended, Notice, Reserved
from tests.unit.service.core.builders import (
    MATE,
    STRANGER,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reload,
    a_reserve,
    an_extend,
    answer,
    cached,
    commit,
    evict,
    evicted,
    ids,
    keys,
    land,
    on_host,
    release,
    reload_keys,
    reserve,
    started,
    the_copy,
    tick,
    wait_for,
    wakes,
    woken,
)
from tests.unit.service.core.grouped import (
    FULL,
    STATE,
    WINDOW,
    cache_of,
    commit_tokens,
    crossed,
    extend_tokens,
    reserve_tokens,
)


def refused(cache: Cache, command: c.Command, kind: Any = PoolFullError, now: float = 0.0) -> Any:
    """Return the refusal of a command."""
    with pytest.raises(kind) as caught:
        cache.handle(command, now)
    return caught.value


def settings(error: KVLeaseError) -> dict[str, int]:
    """Return the settings that a refusal's first remedy names."""
    pairs = (pair.split("=") for pair in " ".join(error.remedies[:1]).split())
    return {name: int(value) for name, value in pairs}


# Why ------------------------------------------------------------------------------------------------------------------


def test_refusal_says_all_there_is_to_say() -> None:
    """A refusal has its numbers, its reason, who has the rest, and what would be granted instead."""
    cache = a_cache(8)
    reserve(cache, 5, "mine")
    reserve(cache, 1, "theirs", worker_id=STRANGER)

    error = refused(cache, a_reserve(3, "r"))

    assert (error.resource, error.need, error.available, error.limit) == ("device_blocks", 3, 2, 8)
    assert (error.rule, error.retry_after_ms, error.remedies) == ("blocks", 50, ("num_tokens=8",))
    assert error.holdings == (
        Holding("you", "leased", 5),
        Holding("others", "leased", 1),
        Holding("nobody", "free", 2),
    )


def test_refusal_for_want_of_rows_says_so() -> None:
    """If all leases are in use, the refusal does not say that blocks are lacking."""
    cache = a_cache(8, max_leases=1)
    reserve(cache, 1)

    error = refused(cache, a_reserve(1, "r"))

    assert (error.resource, error.need, error.available, error.limit) == ("leases", 1, 0, 1)
    assert (error.rule, error.remedies) == ("leases", ())


def test_refusal_for_want_of_rows_tells_who_has_them() -> None:
    """Where leases are lacking, the message counts leases by owner, as holdings count blocks."""
    cache = a_cache(8, max_leases=3)
    for number, worker_id in enumerate((WORKER, STRANGER, STRANGER)):
        reserve(cache, 1, str(number), worker_id=worker_id)

    error = refused(cache, a_reserve(1, "r"))

    assert "all 3 leases are in use, 1 by this tenant and 2 by others: one" in error.message


def test_refusal_for_want_of_a_turn_says_so() -> None:
    """A refused call that would have to wait its turn learns behind how many, and that a wait would help."""
    cache = a_cache(8)
    reserve(cache, 7)
    wait_for(cache, 5, "large")

    error = refused(cache, a_reserve(1, "r"))

    assert (error.rule, error.retry_after_ms, error.remedies) == (
        "position",
        100,
        ("wait_ms=2000",),
    )


def test_refusal_while_blocks_are_scrubbed_says_so() -> None:
    """Blocks that change tenants are not ready yet; the call is told to wait a little."""
    cache = a_cache(4)
    release(cache, reserve(cache, 4, worker_id=STRANGER).lease_id, worker_id=STRANGER)

    error = refused(cache, a_reserve(2, "r"))

    assert (error.rule, error.retry_after_ms, error.remedies) == ("copies", 25, ("wait_ms=2000",))
    land(cache, started(cache))
    reserve(cache, 2, "r")


def test_refusal_at_the_end_of_a_wait_says_how_long_it_was() -> None:
    """A call that waited in vain learns how long it waited, behind how many, and why."""
    cache = a_cache(4)
    reserve(cache, 3)
    head, behind = wait_for(cache, 4, "head"), wait_for(cache, 1, "behind", worker_id=MATE)

    ended = tick(cache, 5.5)

    assert "after 5.5 s" in woken(ended, head, PoolFullError).message
    error = woken(ended, behind, PoolFullError)
    assert error.rule == "position"
    assert "1 call waits before this one" in error.message


def test_malformed_call_ends_its_wait_like_any_other() -> None:
    """A call whose keys name a cached block twice is refused at its deadline, if its turn never comes."""
    cache = cache_of(FULL, WINDOW, num_blocks=9)
    lease = reserve_tokens(cache, 4)
    wait_for(cache, 4, "head")
    malformed = cache.handle(a_reserve(2, "r", crossed(1), wait_ms=WAIT_MS), 0.0).ticket
    commit(cache, lease.lease_id, keys(1))

    assert woken(tick(cache, 5.0), malformed, PoolFullError).need == 4


@pytest.mark.parametrize("num_keys", [0, 1, 2])
def test_need_is_what_is_missing_besides_hits(num_keys: int) -> None:
    """Cached blocks of the call's own prefix count neither as needed nor as available."""
    cache = a_cache(4)
    cached(cache, keys(1, 2))
    reserve(cache, 2, "holder")

    error = refused(cache, a_reserve(4, "r", keys(1, 2)[: 32 * num_keys]))

    assert (error.need, error.available) == (4 - num_keys, 2 - num_keys)


def test_operations_of_a_step_are_refused_by_code_alone() -> None:
    """A refused extend of a step has a code; a refused reserve of a step is explained like any other."""
    cache = a_cache(4)
    lease_id = reserve(cache, 3).lease_id
    reserve(cache, 1, "other")
    command = c.Step(
        worker_id=WORKER,
        verbs=b"\1",
        lease_ids=lease_id.to_bytes(8, "little"),
        num_tokens=(16).to_bytes(4, "little"),
        reserves=(a_reserve(1, "r"),),
    )

    reply: Any = cache.handle(command, 0.0).reply

    assert ids(reply.codes) == [PoolFullError.number]
    assert reply.reserves[0].holdings == (Holding("you", "leased", 4),)


# Places ---------------------------------------------------------------------------------------------------------------


def test_tenant_has_half_of_the_places_while_there_are_others() -> None:
    """A tenant that floods the queue leaves half of it to others, and the refusal says so."""
    cache = a_cache(2, max_waiting=4)
    reserve(cache, 2)
    for name in "ab":
        wait_for(cache, 1, name)

    error = refused(cache, a_reserve(1, "c", wait_ms=WAIT_MS), BusyError)

    assert (error.resource, error.rule, error.limit) == ("waiting_calls", "tenant_places", 2)
    assert (error.need, error.available, error.retry_after_ms) == (1, 0, 150)
    assert sum(one.num_blocks for one in error.holdings) == 2
    wait_for(cache, 1, "d", worker_id=STRANGER)


def test_tenant_that_is_alone_has_all_places() -> None:
    """A tenant may use all places in the queue if no other tenant is attached."""
    cache = a_cache(2, max_waiting=3)
    cache.handle(c.Detach(worker_id=STRANGER), 0.0)
    reserve(cache, 2)
    for name in "abc":
        wait_for(cache, 1, name)

    assert refused(cache, a_reserve(1, "d", wait_ms=WAIT_MS), BusyError).rule == "places"


def test_repeated_call_finds_its_own_place() -> None:
    """A request that waits already may call again, however full the queue is."""
    cache = a_cache(2, max_waiting=2)
    reserve(cache, 2)
    first = wait_for(cache, 1, "a")
    wait_for(cache, 1, "b", worker_id=STRANGER)

    again = cache.handle(a_reserve(1, "a", wait_ms=WAIT_MS), 0.0)

    woken(again, first, BusyError)
    assert cache.census().num_waiting == 2


@pytest.mark.parametrize("priority", [-1, 3])
def test_priority_is_one_of_three(priority: int) -> None:
    """The only priorities are low, normal and high."""
    error = refused(a_cache(), replace(a_reserve(), priority=priority), InvalidError)

    assert (error.resource, error.need, error.limit) == ("priority", priority, 2)


def test_high_priority_is_served_first() -> None:
    """A high request that comes later goes before a normal one, and is served at once if there is room for it."""
    cache = a_cache(4)
    reserve(cache, 2)
    wait_for(cache, 3, "normal")

    high = replace(a_reserve(1, "high"), priority=2)

    assert len(answer(cache.handle(high, 0.0), Reserved).block_ids) == 4


def test_beginning_of_a_wait_is_told() -> None:
    """Watchers are told when a call begins to wait, and how many blocks it needs."""
    cache = a_cache(4)
    lease = reserve(cache, 3)

    new = cache.handle(a_reserve(2, "r", worker_id=MATE, wait_ms=WAIT_MS), 0.0)
    running = cache.handle(an_extend(lease.lease_id, 4, wait_ms=WAIT_MS), 0.0)

    assert new.effects == [Notice(kind="call_waiting", worker_id=MATE, num_blocks=2)]
    assert running.ticket is None


# When to come back ----------------------------------------------------------------------------------------------------


def test_patience_is_bounded() -> None:
    """However many calls wait before it, no call is told to stay away for longer than the longest patience."""
    cache = a_cache(8, max_waiting=400, retry_after_ms=50)
    reserve(cache, 8)
    for number in range(150):
        wait_for(cache, 1, str(number))

    assert refused(cache, a_reserve(1, "r")).retry_after_ms == RETRY_AFTER_MS_MAX


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    num_blocks=st.integers(1, 8),
    is_other=st.booleans(),
)
def test_obeying_the_patience_succeeds_soon(
    lengths: list[int], num_blocks: int, is_other: bool
) -> None:
    """If copies take no longer than a turn, and one lease ends every turn, a few tries suffice."""
    cache = a_cache(8)
    other = STRANGER if is_other else WORKER
    leases = []
    for at, length in enumerate(lengths):
        if sum(lengths[: at + 1]) <= 8:
            leases.append(reserve(cache, length, str(at), worker_id=other).lease_id)

    for _ in range(len(leases) + 2):
        try:
            cache.handle(a_reserve(num_blocks, "r"), 0.0)
            break
        except PoolFullError:
            _land_all(cache)
            if leases:
                release(cache, leases.pop(0), worker_id=other)

    reserve(cache, num_blocks, "r")


# What instead ---------------------------------------------------------------------------------------------------------


@given(
    theirs=st.integers(0, 3),
    num_cached=st.integers(0, 4),
    held=st.integers(1, 7),
    num_keys=st.integers(0, 8),
)
def test_fewer_tokens_are_granted_as_told(
    theirs: int, num_cached: int, held: int, num_keys: int
) -> None:
    """The call that a refusal recommends is granted, after the blocks are zeroed if the refusal says to wait.

    If no other tenant had blocks, it is granted at once, and no larger call is.
    """
    cache = a_cache(8)
    if theirs:
        release(cache, reserve(cache, theirs, worker_id=STRANGER).lease_id, worker_id=STRANGER)
    if num_cached:
        lease = _when_scrubbed(cache, a_reserve(num_cached, "cached"))
        commit(cache, lease.lease_id, keys(*range(num_cached)))
        release(cache, lease.lease_id)
    _when_scrubbed(cache, a_reserve(held, "held"))
    command = a_reserve(8, "r", keys(*range(num_keys)))
    error = refused(cache, command)
    _land_all(cache)
    told = settings(error)
    if "num_tokens" not in told:
        assert not error.available
        return
    assert theirs or "wait_ms" not in told
    fewer = replace(
        command,
        num_tokens=told["num_tokens"],
        keys=command.keys[: 32 * told.get("num_keys", 8)],
        wait_ms=told.get("wait_ms", 0),
    )
    if not theirs:
        refused(cache, replace(fewer, num_tokens=told["num_tokens"] + 1))

    outcome = cache.handle(fewer, 0.0)

    while outcome.ticket is not None and not wakes(outcome):
        # Blocks that are in the way are written back first, and then zeroed.
        outcome = replace(land(cache, the_copy(outcome)), ticket=outcome.ticket)
    if outcome.ticket is None:
        answer(outcome, Reserved)
    else:
        woken(outcome, outcome.ticket, Reserved)


def test_refusal_names_what_is_there_at_once_and_what_a_wait_brings() -> None:
    """If free blocks are another tenant's, a call can have some now, and more once those are zeroed for it."""
    cache = a_cache(8, num_slots=0, wait_ms_max=500)
    theirs = reserve(cache, 3, "theirs", worker_id=STRANGER)
    release(cache, theirs.lease_id, worker_id=STRANGER)
    reserve(cache, 3, "held")

    error = refused(cache, a_reserve(6, "r"))

    assert (error.need, error.available, error.rule) == (6, 5, "blocks")
    assert error.remedies == ("num_tokens=8", "num_tokens=20 wait_ms=500")
    waits = cache.handle(a_reserve(5, "r", wait_ms=500), 0.0)
    woken(land(cache, the_copy(waits)), waits.ticket, Reserved)


def _when_scrubbed(cache: Cache, command: c.Reserve) -> Reserved:
    """Reserve the recommended tokens as soon as the blocks are scrubbed."""
    for _ in range(3):
        try:
            return answer(cache.handle(command, 0.0), Reserved)
        except PoolFullError:
            _land_all(cache)
    return answer(cache.handle(command, 0.0), Reserved)


def _land_all(cache: Cache) -> None:
    """Land all copies that refusals have started."""
    for effect in cache.take_effects():
        if isinstance(effect, Copy):
            land(cache, effect)


def test_extend_learns_how_far_it_can_grow() -> None:
    """A lease that cannot have all that it asks for learns what it can have, and gets that."""
    cache = a_cache(8)
    lease = reserve(cache, 2)
    reserve(cache, 3, "other")

    error = refused(cache, an_extend(lease.lease_id, 6))

    assert error.remedies == ("num_tokens=20",)
    fewer = c.Extend(worker_id=WORKER, lease_id=lease.lease_id, num_tokens=20)
    assert len(answer(cache.handle(fewer, 0.0), Extended).block_ids) == 12


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_lease_that_is_in_its_own_way_is_told_to_commit(num_ahead: int) -> None:
    """A lease that has so much that it could not have the rest if it were alone is told what helps: no wait does."""
    cache = cache_of(STATE, FULL, num_blocks=10)
    lease_id = reserve_tokens(cache, 4).lease_id
    for num_tokens in (8, 12, 16):
        extend_tokens(cache, lease_id, num_tokens)
    more = c.Extend(worker_id=WORKER, lease_id=lease_id, num_tokens=20)
    for _ in range(num_ahead):
        wait_for(cache, 5, "other")

    error = refused(cache, more)

    assert "the lease has 8 blocks itself, so no wait helps: commit" in error.message
    assert error.remedies == ()
    commit_tokens(cache, lease_id, 16)
    answer(cache.handle(more, 0.0), Extended)


def test_lease_that_needs_what_others_have_is_told_to_wait() -> None:
    """A lease for which there is room once others leave is not told to commit."""
    cache = cache_of(STATE, FULL, num_blocks=10)
    lease_id = reserve_tokens(cache, 4).lease_id
    reserve_tokens(cache, 12, "other")

    error = refused(cache, c.Extend(worker_id=WORKER, lease_id=lease_id, num_tokens=20))

    assert "allow a longer wait_ms" in error.message


def test_reload_is_told_no_number_of_tokens() -> None:
    """A refused reload names no smaller number of tokens: a lease comes back whole or not at all."""
    cache = a_cache(4)
    lease = evicted(cache, keys(1, 2))
    reserve(cache, 3, "other")

    error = refused(cache, a_reload(lease.lease_id, wait_ms=0))

    assert (error.need, error.available, error.rule, error.remedies) == (2, 1, "blocks", ())


def test_longer_wait_is_recommended_where_copies_make_room() -> None:
    """If copies are about to free what is lacking, twice the wait is recommended."""
    cache = a_cache(4)
    evict(cache, reserve(cache, 4).lease_id)
    ticket = wait_for(cache, 2, "r")

    error = woken(tick(cache, 5.0), ticket, PoolFullError)

    assert (error.rule, error.retry_after_ms, error.remedies) == ("copies", 25, ("wait_ms=10000",))


@pytest.mark.parametrize(("wait_ms_max", "told"), [(6_000, ("wait_ms=6000",)), (WAIT_MS, ())])
def test_no_wait_is_recommended_that_no_call_may_have(
    wait_ms_max: int, told: tuple[str, ...]
) -> None:
    """A longer wait is named up to the daemon's longest; a call that waited for that long is told of none."""
    cache = a_cache(4, wait_ms_max=wait_ms_max)
    evict(cache, reserve(cache, 4).lease_id)
    ticket = wait_for(cache, 2, "r")

    error = woken(tick(cache, 5.0), ticket, PoolFullError)

    assert (error.rule, error.remedies) == ("copies", told)


def test_reload_of_keys_learns_how_many_there_is_room_for() -> None:
    """A prefetch of more keys than there is room for is told how many keys fit."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2, 3))
    reserve(cache, 2, "other")

    error = refused(cache, c.Reload(worker_id=WORKER, keys=keys(1, 2, 3)))

    assert (error.need, error.available, error.remedies) == (3, 2, ("num_keys=2",))
    assert error.holdings[-1] == Holding("nobody", "free", 2)
    assert the_copy(reload_keys(cache, keys(1, 2)))


def test_late_copies_are_told_with_their_blocks() -> None:
    """A late call whose copies are under way learns how many blocks they bring, and that a longer wait helps."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2))
    reserve(cache, 1, "other")
    ticket = cache.handle(a_reserve(2, "r", keys(1, 2), wait_ms=WAIT_MS), 0.0).ticket

    error = woken(tick(cache, 5.0), ticket, DeadlineError)

    assert (error.resource, error.need, error.available) == ("copies", 2, 0)
    assert (error.retry_after_ms, error.remedies) == (50, ("wait_ms=10000",))
    assert Holding("you", "copying", 2) in error.holdings
    assert error.holdings[-1] == Holding("nobody", "free", 1)


def test_late_eviction_of_cached_blocks_is_told_with_its_blocks() -> None:
    """A late evict of cached blocks learns how many of them are on their way, too."""
    cache = a_cache(4)
    cached(cache, keys(1))
    ticket = cache.handle(c.Evict(keys=keys(1), wait_ms=1_000), 0.0).ticket

    error = woken(tick(cache, 1.0), ticket, DeadlineError)

    # The cache does not remember how long the call waited, and a shorter wait would not help.
    assert (error.need, error.remedies) == (1, ())


def test_no_fewer_tokens_are_named_where_a_prefix_would_come_from_below() -> None:
    """With fewer keys a call would find less in the host pool, so no smaller number of tokens is named."""
    cache = a_cache(4)
    on_host(cache, keys(1))
    reserve(cache, 2, "other")
    command = a_reserve(4, "r", keys(1, 2, 3, 4), wait_ms=WAIT_MS)
    ticket = cache.handle(command, 0.0).ticket

    error = woken(tick(cache, WAIT_MS / 1000), ticket, PoolFullError)

    assert (error.rule, error.remedies) == ("blocks", ())
