"""Bugs that this core itself once had, or came close to; each also has a golden case among the tests of the core.

Bugs that other systems had are in `mutations`, which lists all.
"""

import sys
from collections.abc import Callable, Container
from dataclasses import replace

import numpy as np
import pytest

from kvlease.errors import KVLeaseError, PoolFullError
from kvlease.ids import LeaseId
from kvleased.core import cache, commands, recovery, state
from kvleased.core.admission import room
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.copies import landing, mishaps
from kvleased.core.effects import Beat, Outcome
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.lease.naming import RowNames
from kvleased.core.lease.phases import End
from kvleased.core.prefix import looking
from kvleased.core.tier.flights import Flight, Purpose
from kvleased.core.tier.loading import Loading
from kvleased.core.verbs import ending, forking, moving, prefetching

Mutation = Callable[[pytest.MonkeyPatch], None]
"""What switches one bug on."""


def released_lease_is_extended_in_the_same_step(patch: pytest.MonkeyPatch) -> None:
    """A step does its extends before its releases, even for a lease that it names first in a release."""
    patch.setattr(RowNames, "are_distinct", lambda *_: True)


def end_of_a_workers_leases_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Leases that end with their worker, by its death or an operator's command, are in no counter."""
    end_lease = ending.end_lease

    def silent(
        world: state.CacheState, lease: Lease, end: End, reason: KVLeaseError | None = None
    ) -> None:
        if end in (End.DETACHED, End.DIED):
            ending.forget_lease(world, lease, reason)
        else:
            end_lease(world, lease, end, reason)

    patch.setattr(ending, "end_lease", silent)


def recovered_lease_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """After a restart more leases end than there ever were, because the leases that went on are in no counter."""
    adopt = recovery._adopt

    def silent(world: state.CacheState, row: int, now: float) -> None:
        adopt(world, row, now)
        del world.counters["leases_recovered"]

    patch.setattr(recovery, "_adopt", silent)


def restart_forgets_whose_bytes_a_free_block_holds(patch: pytest.MonkeyPatch) -> None:
    """After a restart no free block counts as holding another tenant's bytes."""
    rebuild = Pool.rebuild

    def forgetful(self: Pool) -> None:
        rebuild(self)
        self._tenants = set()

    patch.setattr(Pool, "rebuild", forgetful)


def restart_frees_under_the_old_generation(patch: pytest.MonkeyPatch) -> None:
    """A restart frees blocks that nobody holds without giving them a new generation."""

    def free_unheld(pool: Pool) -> None:
        states = pool.records.state
        used = np.isin(states, (State.RESERVED, State.FILLING, State.SCRUBBING))
        states[used & (pool.holds == 0)] = State.FREE

    patch.setattr(recovery, "_free_unheld", free_unheld)


def restart_grants_the_null_block(patch: pytest.MonkeyPatch) -> None:
    """A restart takes every free block for one that can be granted."""
    rebuild = Pool.rebuild

    def generous(self: Pool) -> None:
        null_blocks, self._null_blocks = self._null_blocks, 0
        rebuild(self)
        self._null_blocks = null_blocks

    patch.setattr(Pool, "rebuild", generous)


def key_on_its_way_is_committed_again(patch: pytest.MonkeyPatch) -> None:
    """A commit does not look at what a copy in flight will publish."""
    commit = cache._VERBS[commands.Commit]

    def blind(world: state.CacheState, command: commands.Commit, now: float) -> Outcome:
        loading, world.loading = world.loading, Loading(world.records.device.key)
        try:
            return commit(world, command, now)
        finally:
            world.loading = loading

    patch.setitem(cache._VERBS, commands.Commit, blind)


def shared_slot_makes_room_for_its_own_eviction(patch: pytest.MonkeyPatch) -> None:
    """The slots that an eviction shares may be dropped to make room for that same eviction."""
    host_slots = room.host_slots

    def greedy(
        world: state.CacheState,
        count: int,
        protected: Container[int] = (),
        *,
        at_most: bool = False,
    ) -> Ids | None:
        del protected
        return host_slots(world, count, at_most=at_most)

    patch.setattr(moving, "host_slots", greedy)


def block_that_was_taken_up_meanwhile_is_evicted(patch: pytest.MonkeyPatch) -> None:
    """An eviction takes every block that it copied, even one that a lease came to hold meanwhile."""

    def evictable(self: Pool, ids: Ids) -> Ids:
        ready: Ids = ids[self.records.state[ids] == State.READY]
        return ready

    patch.setattr(Pool, "evictable", evictable)


def released_blocks_are_never_let_go_of(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a release leaves for after its answer are left for ever."""
    patch.setattr(ending, "settle", lambda state: state.unsettled.leaving.clear())


def failed_flight_keeps_others_waiting(patch: pytest.MonkeyPatch) -> None:
    """Only the lease that started a copy learns that it failed, not the leases that joined it."""
    waiting_for = landing.waiting_for

    def own(world: state.CacheState, flight: Flight) -> list[Lease]:
        return [one for one in waiting_for(world, flight) if one.lease_id == flight.lease_id]

    patch.setattr(landing, "waiting_for", own)
    patch.setattr(mishaps, "waiting_for", own)


def heartbeat_tells_nothing_of_grants(patch: pytest.MonkeyPatch) -> None:
    """A worker knows only the ids that reached it, so it cannot disown a lease whose answer was lost."""
    beat = cache._VERBS[commands.Heartbeat]

    def silent(world: state.CacheState, command: commands.Heartbeat, now: float) -> Outcome:
        outcome = beat(world, command, now)
        assert isinstance(outcome.reply, Beat)
        return replace(outcome, reply=replace(outcome.reply, newest_lease_id=LeaseId(0)))

    patch.setitem(cache._VERBS, commands.Heartbeat, silent)


def reload_mixes_tenants(patch: pytest.MonkeyPatch) -> None:
    """A reload of several tenants' keys brings bytes of one to blocks of another, where a failed copy leaves them."""
    patch.setattr(prefetching, "of_one_tenant", lambda _, slots: slots)


def restart_leaves_the_end_of_a_row_out(patch: pytest.MonkeyPatch) -> None:
    """A lease that was being extended in a crash is published without its last blocks."""
    patch.setattr(recovery, "_show_kernels", lambda _, __: None)


def fork_does_not_say_who_has_the_pool(patch: pytest.MonkeyPatch) -> None:
    """A fork that finds no room is refused without the holdings of the pool."""
    patch.setattr(forking, "fork_full", lambda *_: PoolFullError(retry_after_ms=50))


def fork_heeds_no_minimum(patch: pytest.MonkeyPatch) -> None:
    """A fork takes the free blocks that another tenant lacks for its minimum."""
    patch.setattr(forking, "num_available", lambda world, *_: world.device.num_available)


def refused_call_keeps_its_room_from_those_that_wait(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a call evicts in vain stay free until something else happens, although other calls wait for them."""
    pump = cache.pump

    def only_after_answers(world: state.CacheState, now: float) -> None:
        if sys.exception() is None:
            pump(world, now)

    patch.setattr(cache, "pump", only_after_answers)


def what_gets_no_slot_leaves_only_later(patch: pytest.MonkeyPatch) -> None:
    """A call that waits for copies down gets room only at the next event, when blocks without a slot are dropped."""

    def some(world: state.CacheState, victims: Ids, below: Ids) -> bool:
        is_dirty = room.are_dirty(world, victims)
        own_slots = below[looking.parted(world, below).host]
        slots = room.host_slots(world, int(np.count_nonzero(is_dirty)), own_slots, at_most=True)
        if slots is None or not len(slots):
            return False
        room.evict_blocks(world, victims[~is_dirty])
        sources = victims[is_dirty][: len(slots)]
        world.fly(Purpose.WRITE_BACK, sources, slots, keyed=slots >= 0)
        return True

    patch.setattr(room, "write_back", some)


def room_is_made_of_the_callers_own_prefix(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are written back for a request take the slots from which it is about to load."""
    write_back = room.write_back
    patch.setattr(room, "write_back", lambda world, victims, _: write_back(world, victims))


def room_is_made_of_what_a_draft_model_reads_too_soon(patch: pytest.MonkeyPatch) -> None:
    """The block behind a call's prefix leaves before the one that the call waits for, which shortens the prefix."""
    patch.setattr(room, "_parted_by", lambda _, leaving: (leaving, NOWHERE))


MENDED: tuple[Mutation, ...] = (
    released_lease_is_extended_in_the_same_step,
    restart_forgets_whose_bytes_a_free_block_holds,
    restart_frees_under_the_old_generation,
    restart_grants_the_null_block,
    key_on_its_way_is_committed_again,
    shared_slot_makes_room_for_its_own_eviction,
    block_that_was_taken_up_meanwhile_is_evicted,
    released_blocks_are_never_let_go_of,
    failed_flight_keeps_others_waiting,
    heartbeat_tells_nothing_of_grants,
    reload_mixes_tenants,
    restart_leaves_the_end_of_a_row_out,
    fork_does_not_say_who_has_the_pool,
    fork_heeds_no_minimum,
    refused_call_keeps_its_room_from_those_that_wait,
    what_gets_no_slot_leaves_only_later,
    end_of_a_workers_leases_is_not_counted,
    recovered_lease_is_not_counted,
)
"""Every mended bug that the simulation can find."""
