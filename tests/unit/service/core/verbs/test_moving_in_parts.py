"""Laws of moves of large leases in parts: other commands run in between, and nobody sees a move half done."""

import pytest

from kvlease.errors import NeverFitsError, PoolFullError, WrongStateError
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Effect, Evicted, Found, Outcome, Reloaded, Reserved, Wake
from tests.unit.service.core.builders import (
    TOKENS_PER_BLOCK,
    WAIT_MS,
    a_cache,
    a_reload,
    a_reserve,
    answer,
    cached,
    committed,
    copies,
    evict,
    found,
    ids,
    keys,
    land,
    on_host,
    release,
    reload,
    reloaded,
    reserve,
    the_copy,
    tick,
    woken,
)


def parted(num_blocks: int = 8, num_slots: int = 8) -> Cache:
    """Return a cache that moves leases of more than two blocks in parts."""
    return a_cache(num_blocks, num_slots, blocks_at_once=2)


def part(cache: Cache) -> Outcome:
    """Do one part, and return its outcome."""
    cache.settle_part()
    return Outcome(effects=cache.take_effects())


def rest(cache: Cache) -> Outcome:
    """Do all remaining parts, and return their outcome."""
    effects: list[Effect] = []
    while not cache.is_settled:
        effects += part(cache).effects
    return Outcome(effects=effects)


def down(cache: Cache, num_blocks: int = 4) -> int:
    """Return a lease with some blocks that is in the host pool."""
    lease = reserve(cache, num_blocks, "down")
    outcome = evict(cache, lease.lease_id)
    land(cache, the_copy(rest(cache)))
    assert woken(rest(cache), outcome.ticket, Evicted).num_evicted == num_blocks
    assert cache.check() == []
    return lease.lease_id


def test_large_lease_is_taken_down_in_parts_behind_the_promise() -> None:
    """The evict is promised an answer before anything is chosen; later parts begin the copy, and yet others end it."""
    cache = parted()
    lease = reserve(cache, 4)

    outcome = evict(cache, lease.lease_id)
    assert outcome.ticket is not None
    assert not outcome.effects
    assert not part(cache).effects
    copy = the_copy(part(cache))
    assert cache.is_settled
    landed = land(cache, copy)
    assert not landed.effects
    assert not part(cache).effects
    assert woken(part(cache), outcome.ticket, Evicted) == Evicted(num_evicted=4, num_offloaded=4)

    # First the copy lets go of both its ends, then the lease of its blocks, two at a time each.
    for free in (4, 4, 4, 4, 6, 8):
        assert not cache.is_settled
        cache.settle_part()
        assert cache._state.device.num_free == free
    cache.settle_part()
    assert cache.is_settled
    assert cache.check() == []


def test_large_lease_is_brought_back_in_parts_behind_the_promise() -> None:
    """The reload of a large lease is answered with its blocks once all of its parts are done."""
    cache = parted()
    lease_id = down(cache)

    outcome = reload(cache, lease_id)
    assert outcome.ticket is not None
    assert not outcome.effects
    assert not part(cache).effects
    land(cache, the_copy(part(cache)))
    reply = reloaded(rest(cache), outcome.ticket)

    assert (reply.num_reloaded, len(ids(reply.block_ids))) == (4, 4)
    assert cache.check() == []


def test_command_between_two_parts_finds_the_move_whole() -> None:
    """A command that comes before the last part has all other parts done first, so two leases never share blocks."""
    cache = parted(8, 4)
    lease = reserve(cache, 4)
    evict(cache, lease.lease_id)
    cache.settle_part()

    between = cache.handle(a_reserve(1, "other"), 0.0)
    other = answer(between, Reserved)

    assert len(ids(the_copy(between).target_ids)) == 4
    with pytest.raises(PoolFullError):
        evict(cache, other.lease_id)
    assert cache.check() == []


def test_call_that_comes_before_blocks_are_let_go_of_waits_for_their_parts() -> None:
    """The next move begins only after the blocks that the last one held are let go of, in parts."""
    cache = parted(4, 4)
    lease = reserve(cache, 4)
    evicting = evict(cache, lease.lease_id)
    landed = land(cache, the_copy(rest(cache)))
    while not any(isinstance(effect, Wake) for effect in landed.effects):
        landed = part(cache)
    assert woken(landed, evicting.ticket, Evicted).num_evicted == 4
    assert not cache.is_settled

    outcome = reload(cache, lease.lease_id)

    assert not outcome.effects
    assert cache._state.device.num_free == 0
    land(cache, the_copy(rest(cache)))
    assert reloaded(rest(cache), outcome.ticket).num_reloaded == 4


def test_large_lease_without_slots_is_refused_by_its_promise() -> None:
    """A refusal that is found in a part answers the waiting call, and changes nothing."""
    cache = parted(8, 4)
    other = reserve(cache, 2, "other")
    taken = evict(cache, other.lease_id)
    land(cache, the_copy(taken))
    lease = reserve(cache, 3, "large")

    outcome = evict(cache, lease.lease_id)

    woken(rest(cache), outcome.ticket, PoolFullError)
    assert cache.check() == []
    release(cache, lease.lease_id)
    assert cache.census().device["free"] == 8


def test_large_lease_that_never_fits_is_refused_by_its_promise() -> None:
    """A large lease with more blocks than the host pool has slots is refused when its part is done."""
    cache = parted(8, 2)
    lease = reserve(cache, 3)

    outcome = evict(cache, lease.lease_id)

    woken(rest(cache), outcome.ticket, NeverFitsError)
    assert cache.check() == []


def test_large_lease_whose_bytes_are_below_needs_no_copy() -> None:
    """If the host pool has all of the lease's bytes, the lease is in the host pool after the first part."""
    cache = parted()
    lease = committed(cache, keys(1, 2, 3))
    mate = reserve(cache, 4, "mate", keys(1, 2, 3))
    first = evict(cache, mate.lease_id)
    land(cache, the_copy(rest(cache)))
    woken(rest(cache), first.ticket, Evicted)

    outcome = evict(cache, lease.lease_id)
    reply = woken(rest(cache), outcome.ticket, Evicted)
    assert (reply.num_evicted, reply.num_offloaded) == (3, 0)
    assert found(cache, keys(1, 2, 3)) == (0, 3)
    assert cache.check() == []


def test_large_lease_whose_bytes_are_on_the_device_needs_no_copy() -> None:
    """If the device still has all of the lease's blocks, the lease is back after its parts, without a copy."""
    cache = parted()
    lease = committed(cache, keys(1, 2, 3))
    cached(cache, keys(4))
    mate = reserve(cache, 4, "mate", keys(1, 2, 3))
    evicting = evict(cache, lease.lease_id)
    land(cache, the_copy(rest(cache)))
    woken(rest(cache), evicting.ticket, Evicted)

    outcome = reload(cache, lease.lease_id)
    effects = rest(cache)

    assert copies(effects) == []
    assert woken(effects, outcome.ticket, Reloaded).num_reloaded == 0
    assert cache.check() == []
    release(cache, mate.lease_id)


def test_large_lease_waits_for_room_and_is_served_in_its_turn() -> None:
    """A reload without room waits like any other call; two that get room at once get different blocks."""
    cache = parted(8, 8)
    first, second = down(cache), None
    lease = reserve(cache, 4, "second")
    outcome = evict(cache, lease.lease_id)
    land(cache, the_copy(rest(cache)))
    woken(rest(cache), outcome.ticket, Evicted)
    second = lease.lease_id
    filling = reserve(cache, 8, "filling")
    waits = [reload(cache, lease_id) for lease_id in (first, second)]
    assert copies(rest(cache)) == []

    freed = release(cache, filling.lease_id)
    started = [*copies(freed), *copies(rest(cache))]

    targets = [block for copy in started for block in ids(copy.target_ids)]
    assert len(set(targets)) == 8
    for copy in started:
        land(cache, copy)
    del waits
    rest(cache)
    assert cache.check() == []


def test_large_lease_that_may_not_wait_for_room_is_refused() -> None:
    """If there is no room and the call may not wait, it is refused."""
    cache = parted(4, 4)
    lease_id = down(cache)
    reserve(cache, 2, "other")

    outcome = cache.handle(a_reload(lease_id, wait_ms=0), 0.0)
    refused = rest(cache)
    late = reload(cache, lease_id)
    rest(cache)

    woken(refused, outcome.ticket, PoolFullError)
    woken(tick(cache, WAIT_MS / 1000), late.ticket, PoolFullError)


def test_copy_of_a_large_lease_that_fails_leaves_it_where_it_was() -> None:
    """A lease whose copy failed stays on the device, and can be evicted again in parts."""
    cache = parted()
    lease = reserve(cache, 4)
    outcome = evict(cache, lease.lease_id)
    copy = the_copy(rest(cache))

    failed = cache.handle(c.CopyFailed(copy_id=copy.copy_id), 0.0)
    again = evict(cache, lease.lease_id)

    assert [effect.ticket for effect in failed.effects if isinstance(effect, Wake)] == [
        outcome.ticket
    ]
    land(cache, the_copy(rest(cache)))
    assert woken(rest(cache), again.ticket, Evicted).num_evicted == 4


def test_large_lease_that_was_damaged_below_ends() -> None:
    """Damaged bytes end a lease that moves in parts, and its caller is told."""
    cache = parted()
    lease_id = down(cache)
    outcome = reload(cache, lease_id)
    copy: Copy = the_copy(rest(cache))

    land(cache, copy, failed=(1,))
    effects = rest(cache)

    assert any(
        isinstance(effect, Wake) and effect.ticket == outcome.ticket for effect in effects.effects
    )
    assert cache.check() == []
    assert cache.census().host["bad"] == 1


def test_lease_that_moves_already_is_told_so_before_its_parts() -> None:
    """A repeated call replaces the first one, whose parts are done before."""
    cache = parted()
    lease = reserve(cache, 4)
    first = evict(cache, lease.lease_id)

    second = evict(cache, lease.lease_id)

    woken(second, first.ticket, WrongStateError)
    land(cache, the_copy(second))
    assert woken(rest(cache), second.ticket, Evicted).num_evicted == 4


def test_nothing_is_left_to_be_done_in_a_cache_at_rest() -> None:
    """A part of a cache at rest is an empty outcome, and no error."""
    cache = parted()

    assert part(cache).effects == []
    assert cache.is_settled


# Loads and copies by keys ---------------------------------------------------------------------------------------------


def test_end_of_a_large_load_is_done_in_parts() -> None:
    """One part takes over the blocks of a load, another answers its caller; a look at the cache does both first."""
    cache = parted()
    on_host(cache, keys(1, 2, 3, 4))
    outcome = cache.handle(a_reserve(4, "r", keys(1, 2, 3, 4), wait_ms=WAIT_MS), 0.0)

    landed = land(cache, the_copy(outcome))
    first, second = part(cache), part(cache)

    assert not landed.effects
    assert not first.effects
    assert woken(second, outcome.ticket, Reserved).host_hit_tokens == 4 * TOKENS_PER_BLOCK
    assert cache.is_settled
    assert cache.check() == []


def test_end_of_a_large_copy_by_keys_is_not_seen_half_done() -> None:
    """A command after the end of a copy finds the copied blocks in place, and the caller is answered."""
    cache = parted()
    cached(cache, keys(1, 2, 3, 4))
    outcome = cache.handle(c.Evict(keys=keys(1, 2, 3, 4), wait_ms=WAIT_MS), 0.0)
    land(cache, the_copy(outcome))

    behind = cache.handle(c.Lookup(keys=keys(1, 2, 3, 4)), 0.0)

    assert answer(behind, Found).num_host_blocks == 4
    assert woken(behind, outcome.ticket, Evicted) == Evicted(num_evicted=4, num_offloaded=4)
    assert cache.check() == []
