"""Laws of the invariants: each notices the damage that it is meant for, and a sound cache has no violations."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease.ids import CopyId, PinId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.records import NULL, CacheRecords
from kvleased.core.blocks.states import State
from kvleased.core.checks.sound import Sound
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import Flight
from kvleased.core.waiting import Waiter
from tests.unit.service.core.builders import (
    EPOCH,
    MATE,
    OTHER_TENANT,
    SHAPE,
    STRANGER,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    as_ids,
    cached,
    committed,
    evict,
    evicted,
    keys,
    lose,
    on_host,
    reload,
    reload_keys,
    reserve,
    the_copy,
)
from tests.unit.service.core.grouped import (
    FULL,
    TABLE,
    WINDOW,
    cache_of,
    commit_tokens,
    reserve_tokens,
)

NOBODY, NO_COPY = WorkerId(99), CopyId(99)


def a_busy_cache() -> Cache:
    """Return a cache with leases in several phases, copies in flight, a pin and cached blocks in both tiers."""
    cache = a_cache(24, 16, table_blocks=8)
    on_host(cache, keys(20, 21))
    cached(cache, keys(30, 31))
    reload(cache, evicted(cache, keys(4), more=1).lease_id)
    evicted(cache, keys(1), more=1, worker_id=MATE)
    committed(cache, keys(2), "active", more=2)
    reserve(cache, 2, "other", worker_id=MATE)
    evict(cache, committed(cache, keys(3), "evicting").lease_id)
    lose(cache, the_copy(reload_keys(cache, keys(20))))
    reload_keys(cache, keys(21))
    cache.handle(c.Pin(keys=keys(31)), 0.0)
    return cache


def a_scrubbing_cache() -> Cache:
    """Return a cache whose only block is being zeroed."""
    cache = a_cache(1, num_slots=0)
    cached(cache, keys(1))
    cache.handle(a_reserve(1, worker_id=STRANGER, wait_ms=WAIT_MS), 0.0)
    return cache


# Where to damage ------------------------------------------------------------------------------------------------------


def lease(state: CacheState, phase: Phase = Phase.ACTIVE) -> Lease:
    """Return the first lease in a phase."""
    return next(one for one in state.leases.by_id.values() if one.phase is phase)


def blocks(state: CacheState) -> list[int]:
    """Return the entries of the first active lease: one committed block, then two private ones."""
    return [int(block) for block in state.leases.blocks_of(lease(state))]


def cached_block(state: CacheState) -> int:
    """Return a device block that is cached and held by nobody."""
    return next(iter(state.device.order))


def free_block(state: CacheState) -> int:
    """Return a free device block."""
    return int(state.device.free.ids[0])


def flight(state: CacheState, *, is_lost: bool = False) -> Flight:
    """Return the last copy in flight, or the lost one."""
    return [one for one in state.flights.values() if one.is_lost is is_lost][-1]


def lease_slot(state: CacheState) -> int:
    """Return a slot of the evicted lease."""
    return int(state.leases.blocks_of(lease(state, Phase.EVICTED))[0])


# How to damage --------------------------------------------------------------------------------------------------------


def put(column: NDArray[Any], at: int | Ids | tuple[int, int], value: int) -> None:
    """Write elements of a column."""
    column[at] = value


def add_waiter(state: CacheState) -> None:
    """Add a waiting call where none may wait."""
    state.shape = replace(state.shape, max_waiting=0, max_leases=0)
    state.waiting.join(Waiter(ticket=1, command=a_reserve(), worker_id=WORKER, deadline=1.0))


def add_pins(state: CacheState) -> None:
    """Add as many empty pins as there may be pins, besides the present one."""
    state.pins.update({PinId(number): as_ids([]) for number in range(2)})


def list_block(state: CacheState, holder: Lease, at: int, block: int) -> None:
    """Write another block into a lease's row."""
    state.records.rows.block_ids[holder.row, at] = block


def share_block(state: CacheState) -> None:
    """List a private block of one lease in another lease's row as well."""
    other = [one for one in state.leases.by_id.values() if one.worker_id == MATE][-1]
    list_block(state, other, 0, blocks(state)[1])


def forget_a_lease(state: CacheState) -> None:
    """Make the cache remember that an active lease's id names nothing."""
    active = lease(state)
    packed = np.array([active.lease_id], np.int64).tobytes()
    state.leases.names.find(packed, active.worker_id).is_active[0] = False


Damage = Callable[[CacheState], object]

DAMAGES: dict[str, Damage] = {
    "device: the states do not add up": lambda it: put(it.device.records.state, free_block(it), 9),
    "host: the states do not add up": lambda it: put(it.host.records.state, it.host.free.ids[0], 9),
    "the free list is not the set": lambda it: put(
        it.device.records.state, free_block(it), State.BAD
    ),
    "the index does not name exactly": lambda it: it.device.index.discard(
        as_ids([cached_block(it)])
    ),
    "is indexed under another key": lambda it: put(
        it.device.records.key, (cached_block(it), 0), 77
    ),
    "a ready block's seal does not match": lambda it: put(
        it.device.records.seal, cached_block(it), 0
    ),
    "the evictable blocks are not": lambda it: it.device.order.discard(as_ids([cached_block(it)])),
    "a free block is held": lambda it: put(it.device.holds, free_block(it), 1),
    "a block in use is held by nobody": lambda it: put(it.device.holds, blocks(it)[1], 0),
    "device: holds of blocks": lambda it: put(it.device.holds, blocks(it)[1], 5),
    "host: holds of blocks": lambda it: put(it.host.holds, lease_slot(it), 5),
    "lists a block twice": lambda it: list_block(it, lease(it), 2, blocks(it)[1]),
    "is ACTIVE over blocks in other states": lambda it: put(
        it.device.records.state, blocks(it)[1], State.QUARANTINED
    ),
    "has a block of another tenant": lambda it: put(
        it.device.records.tenant, blocks(it)[1], OTHER_TENANT
    ),
    "is in two leases": share_block,
    "the rows in use are not those of the leases": lambda it: put(it.records.rows.lease_id, -1, 5),
    "does not name lease": lambda it: put(it.records.rows.worker_id, lease(it).row, NOBODY),
    "is in another phase than its lease": lambda it: put(
        it.records.rows.phase, lease(it).row, Phase.EVICTED
    ),
    "is published while its lease is EVICTED": lambda it: put(
        it.kernel.rows.num_published, lease(it, Phase.EVICTED).row, 1
    ),
    "the rows that count as active": lambda it: put(it.leases.names.worker_of, lease(it).row, 0),
    "what is remembered of the ids of steps": forget_a_lease,
    "rows in use and free rows": lambda it: it.leases.free_rows.append(lease(it).row),
    "free rows do not add up": lambda it: it.leases.free_rows.pop(),
    "the leases by worker are not": lambda it: it.leases.by_worker[MATE].clear(),
    "a source of copy": lambda it: put(it.host.records.generation, flight(it).sources, 7),
    "a target of copy": lambda it: put(it.device.records.generation, flight(it).targets, 7),
    "is not FILLING": lambda it: put(it.device.records.state, flight(it).targets, State.RESERVED),
    "is not QUARANTINED": lambda it: put(
        it.device.records.state, flight(it, is_lost=True).targets, State.FILLING
    ),
    "is listed as loading, but is not": lambda it: it.loading.add(
        as_ids([free_block(it)]), flight(it).copy_id
    ),
    "is EVICTING with 0 copies pending": lambda it: lease(it, Phase.EVICTING).pending.clear(),
    "is ACTIVE with 1 copies pending": lambda it: lease(it).pending.add(flight(it).copy_id),
    "waits for a copy that is not in flight": lambda it: lease(it).pending.add(NO_COPY),
    "lists a block that does not exist": lambda it: list_block(it, lease(it), 2, 999),
    "the leases by request are not": lambda it: it.leases.by_request.popitem(),
    "is loading under a key that is on the device": lambda it: it.loading.add(
        as_ids([cached_block(it)]), flight(it).copy_id
    ),
    "is LOADING and nobody waits for it": lambda it: setattr(lease(it), "phase", Phase.LOADING),
    "waits for a lease or a worker that does not exist": lambda it: it.waiting.join(
        Waiter(ticket=1, command=a_reserve(), worker_id=NOBODY, deadline=1.0)
    ),
    "more calls are waiting than the limit allows": add_waiter,
    "there are more pins than the limit allows": add_pins,
    "belongs to a worker that does not exist": lambda it: it.workers.pop(MATE),
}
"""What each invariant says, and the damage that makes it say that."""


def a_grouped_cache() -> Cache:
    """Return a cache of two groups, with one mapped lease whose window has moved on."""
    cache = cache_of(FULL, WINDOW)
    lease_id = reserve_tokens(cache, 16).lease_id
    commit_tokens(cache, lease_id, 12)
    cache.handle(c.Map(worker_id=WORKER, lease_id=lease_id), 0.0)
    return cache


GROUP_DAMAGES: dict[str, Damage] = {
    "has computed more tokens than it has room for": lambda it: put(
        it.records.rows.num_computed, lease(it).row, 17
    ),
    "has 4 places in group 0": lambda it: put(it.records.rows.num_tokens, lease(it).row, 17),
    "lacks a block in group 1": lambda it: list_block(it, lease(it), TABLE + 1, NULL),
    "has not given back in group 1": lambda it: list_block(it, lease(it), TABLE, free_block(it)),
    "kernels read other blocks": lambda it: put(it.kernel.rows.kernel_ids, (lease(it).row, 0), 60),
    "a kernel row is being written": lambda it: put(it.kernel.rows.sequence, 1, 3),
}
"""The same for the invariants of several groups."""


@pytest.mark.parametrize(("text", "damage"), GROUP_DAMAGES.items(), ids=GROUP_DAMAGES)
def test_damage_of_groups_is_noticed(text: str, damage: Damage) -> None:
    """Each invariant of several groups says in words what does not hold."""
    cache, sound = a_grouped_cache(), Sound()
    assert cache.check(sound) == []

    damage(cache._state)

    assert [found for found in cache.check() if re.search(re.escape(text), found)]
    assert cache.check(sound) == cache.check()


@pytest.mark.parametrize(("text", "damage"), DAMAGES.items(), ids=DAMAGES)
def test_damage_is_noticed(text: str, damage: Damage) -> None:
    """Each invariant says in words what does not hold."""
    cache, sound = a_busy_cache(), Sound()
    assert cache.check(sound) == []

    damage(cache._state)

    assert [found for found in cache.check() if re.search(re.escape(text), found)]
    assert cache.check(sound) == cache.check()


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("name", ["generation", "tenant", "checksum", "position", "seal", "key"])
def test_damage_of_any_column_is_noticed_again(tier: str, name: str) -> None:
    """A sound column is checked again once one of its bytes changes, and for as long as it is not sound."""
    cache, sound = a_busy_cache(), Sound()
    assert cache.check(sound) == []
    columns = getattr(cache._state.records, tier)

    (ready,) = (columns.state == State.READY).nonzero()
    getattr(columns, name)[ready[0]] ^= 1

    assert cache.check(sound) == cache.check() != []
    assert cache.check(sound) == cache.check()


def test_sound_tells_what_it_knows() -> None:
    """The text names the data that are known to be sound."""
    sound = Sound()
    assert repr(sound) == "<Sound nothing>"

    a_busy_cache().check(sound)

    assert repr(sound) == "<Sound device, host, disk, lists, places>"


def test_sound_asks_no_law_twice_about_the_same() -> None:
    """An invariant that held is not checked again on the same data; one that did not hold is."""
    sound, answers = Sound(), iter([["broken"], [], ["broken again"]])

    told = [sound.unless_known("law", (at,), lambda: next(answers)) for at in (1, 1, 1, 2)]

    assert told == [["broken"], [], [], ["broken again"]]


def test_reused_scrub_target_is_noticed() -> None:
    """A block that is handed out while it is being scrubbed is noticed."""
    cache = a_scrubbing_cache()
    assert cache.check() == []

    records = cache._state.records
    records.device.state[0] = State.RESERVED

    assert any("is not SCRUBBING" in text for text in cache.check())


def test_finished_load_in_the_list_is_noticed() -> None:
    """A key that is listed as loading after its copy has ended is noticed."""
    cache = a_busy_cache()

    cache._state.loading.add(as_ids([0]), NO_COPY)

    assert "block 0 is listed as loading, but is not" in cache.check()


def test_busy_cache_is_sound() -> None:
    """A cache with everything under way breaks no invariant."""
    cache = a_busy_cache()

    assert {one.phase for one in cache._state.leases.by_id.values()} >= {
        Phase.ACTIVE,
        Phase.EVICTING,
        Phase.EVICTED,
        Phase.RELOADING,
    }
    assert cache.check() == []


def test_empty_cache_is_sound() -> None:
    """A cache without a single block breaks no invariant."""
    shape = replace(SHAPE, num_blocks=0, num_slots=0)

    assert Cache(shape, CacheRecords.plain(shape), EPOCH).check() == []


def test_check_changes_nothing() -> None:
    """A check changes nothing."""
    cache = a_busy_cache()
    before = cache.census()

    cache.check()

    assert cache.census() == before
