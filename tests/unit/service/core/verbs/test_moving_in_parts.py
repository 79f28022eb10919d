"""Laws of moves of large leases, which are done in parts: others are heard in between, and nobody sees a half."""

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
    """Have one part done, and return what came of it."""
    cache.settle_part()
    return Outcome(effects=cache.take_effects())


def rest(cache: Cache) -> Outcome:
    """Have all parts done that are left, and return what came of them."""
    effects: list[Effect] = []
    while not cache.is_settled:
        effects += part(cache).effects
    return Outcome(effects=effects)


def down(cache: Cache, num_blocks: int = 4) -> int:
    """Return a lease of so many blocks that is in the host pool."""
    lease = reserve(cache, num_blocks, "down")
    outcome = evict(cache, lease.lease_id)
    land(cache, the_copy(rest(cache)))
    assert woken(rest(cache), outcome.ticket, Evicted).num_evicted == num_blocks
    assert cache.check() == []
    return lease.lease_id


def test_large_lease_is_taken_down_in_parts_behind_the_promise() -> None:
    """The call has its promise before anything is chosen; the copy begins in a later part, and ends in others."""
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

    # Both ends were held by the copy, and the blocks by the lease: two at once are let go of, and then the others.
    for free in (4, 4, 4, 4, 6, 8):
        assert not cache.is_settled
        cache.settle_part()
        assert cache._state.device.num_free == free
    cache.settle_part()
    assert cache.is_settled
    assert cache.check() == []


def test_large_lease_is_brought_back_in_parts_behind_the_promise() -> None:
    """The reload of a large lease is answered with its blocks when all of its parts are done."""
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
    """Whatever comes before the last part has all others done first: the blocks of two leases never meet."""
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
    """Back and forth without a pause: what the last move held is let go of in parts before the next begins."""
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
    """What is found out in a part answers the call that was promised an answer, and changes nothing."""
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
    """A lease that has more blocks than the host pool has slots hears so."""
    cache = parted(8, 2)
    lease = reserve(cache, 3)

    outcome = evict(cache, lease.lease_id)

    woken(rest(cache), outcome.ticket, NeverFitsError)
    assert cache.check() == []


def test_large_lease_whose_bytes_are_below_needs_no_copy() -> None:
    """Where the host pool has all blocks already, the lease is down with the first part."""
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
    """Where the device has all blocks still, the lease is back with its parts."""
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
    """A reload that finds no room waits as any other call; two that get room at once get different blocks."""
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
    """Where there is no room, and no time to wait for it, the promise is a refusal."""
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
    """In parts, too, a lease whose copy came to nothing is on the device, and can be evicted again."""
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
    """Bytes that do not match their checksum end the lease, and its caller is told, also where it moves in parts."""
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
    """A repeated call takes the place of the first one, whose parts are done before."""
    cache = parted()
    lease = reserve(cache, 4)
    first = evict(cache, lease.lease_id)

    second = evict(cache, lease.lease_id)

    woken(second, first.ticket, WrongStateError)
    land(cache, the_copy(second))
    assert woken(rest(cache), second.ticket, Evicted).num_evicted == 4


def test_nothing_is_left_to_be_done_in_a_cache_at_rest() -> None:
    """To ask for a part where there is none is no mistake."""
    cache = parted()

    assert part(cache).effects == []
    assert cache.is_settled


# Loads and copies by keys ---------------------------------------------------------------------------------------------


def test_end_of_a_large_load_is_done_in_parts() -> None:
    """Its blocks are taken over in one part, and its caller is answered in another; who looks has both done first."""
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
    """What comes behind the end of the copy finds its blocks where it brought them, and the caller is answered."""
    cache = parted()
    cached(cache, keys(1, 2, 3, 4))
    outcome = cache.handle(c.Evict(keys=keys(1, 2, 3, 4), wait_ms=WAIT_MS), 0.0)
    land(cache, the_copy(outcome))

    behind = cache.handle(c.Lookup(keys=keys(1, 2, 3, 4)), 0.0)

    assert answer(behind, Found).num_host_blocks == 4
    assert woken(behind, outcome.ticket, Evicted) == Evicted(num_evicted=4, num_offloaded=4)
    assert cache.check() == []
