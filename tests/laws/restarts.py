"""Bugs of a restart that believes too much, or too little, of what a crash has left; `mutations` lists all."""

import numpy as np
import pytest

from kvleased.core import recovery
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.commands import Fork, Reserve
from kvleased.core.copies import mishaps
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import AFTER_RESTART, MOVING, Phase
from kvleased.core.state import CacheState
from kvleased.core.verbs import joining, requests
from tests.laws.mended import Mutation


def seals_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A restart believes a block that a crash left with only some of its columns written."""
    patch.setattr(recovery, "sealed", lambda pool: np.ones(len(pool), np.bool_))


def half_moved_row_is_taken_for_active(patch: pytest.MonkeyPatch) -> None:
    """A restart takes a row that was being rewritten for the row of a lease on the device."""
    believed_rows = recovery._believed_rows

    def believe(state: CacheState) -> set[int]:
        phases = state.records.rows.phase
        phases[phases == MOVING] = Phase.ACTIVE
        return believed_rows(state)

    patch.setattr(recovery, "_believed_rows", believe)


def restart_forgets_what_was_asked(patch: pytest.MonkeyPatch) -> None:
    """After a restart any request with the name of a running one gets that request's lease."""
    asks_for = joining.asks_for

    def trusting(state: CacheState, lease: Lease, command: Reserve | Fork) -> bool:
        return lease.request is None or asks_for(state, lease, command)

    patch.setattr(requests, "asks_for", trusting)


def rows_of_the_dead_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A restart continues the leases of workers that have died meanwhile."""
    believed_rows = recovery._believed_rows

    def believe(state: CacheState) -> set[int]:
        for worker_id in state.records.rows.worker_id.tolist():
            state.workers.setdefault(worker_id, 7)
        return believed_rows(state)

    patch.setattr(recovery, "_believed_rows", believe)


def unsound_row_is_believed(patch: pytest.MonkeyPatch) -> None:
    """A restart does not check in which states the blocks of a row are."""
    patch.setattr(recovery, "_is_sound", lambda *_: True)


def quarantine_outlives_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A restart leaves blocks in quarantine that nobody will ever speak for again."""
    distrust = recovery._distrust

    def forgetful(pool: Pool) -> None:
        states = pool.records.state
        quarantined = states == State.QUARANTINED
        distrust(pool)
        states[quarantined] = State.QUARANTINED

    patch.setattr(recovery, "_distrust", forgetful)


def unfinished_fill_outlives_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A restart leaves the targets of copies as they are, although their mover is dead."""

    def free_unheld(pool: Pool) -> None:
        states = pool.records.state
        strays = (states == State.RESERVED) & (pool.holds == 0)
        pool.records.generation[strays] += np.uint64(1)
        states[strays] = State.FREE

    patch.setattr(recovery, "_free_unheld", free_unheld)


def reload_is_taken_for_done_by_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A restart takes a lease that was being reloaded for one that has been reloaded."""
    patch.setitem(AFTER_RESTART, Phase.RELOADING, Phase.ACTIVE)


def adopted_lease_holds_nothing(patch: pytest.MonkeyPatch) -> None:
    """A restart continues a lease without counting what it holds."""
    adopt = recovery._adopt

    def careless(state: CacheState, row: int, now: float) -> None:
        device, host = state.device.holds.copy(), state.host.holds.copy()
        adopt(state, row, now)
        state.device.holds[:], state.host.holds[:] = device, host

    patch.setattr(recovery, "_adopt", careless)


def double_keys_are_kept(patch: pytest.MonkeyPatch) -> None:
    """A restart does not check whether a key is there twice."""
    patch.setattr(recovery, "_drop_doubles", lambda _: None)


def block_of_two_rows_is_believed(patch: pytest.MonkeyPatch) -> None:
    """A restart does not check whether a private block is in two rows."""
    is_sound = recovery._is_sound

    def believe(
        pool: Pool, entries: Ids, used: "np.ndarray[tuple[int], np.dtype[np.int32]]"
    ) -> bool:
        return is_sound(pool, entries, np.zeros_like(used))

    patch.setattr(recovery, "_is_sound", believe)


OF_RESTARTS: tuple[Mutation, ...] = (
    seals_are_not_checked,
    restart_forgets_what_was_asked,
    rows_of_the_dead_are_believed,
    quarantine_outlives_a_restart,
    unfinished_fill_outlives_a_restart,
    reload_is_taken_for_done_by_a_restart,
    adopted_lease_holds_nothing,
)
"""Every bug of a restart that the simulation can find."""


def damaged_slot_is_retired_twice(patch: pytest.MonkeyPatch) -> None:
    """Two copies of one slot find it damaged, because the first copy's lease was called off and came back."""
    patch.setattr(mishaps, "_not_retired", lambda _, slots: slots)


OF_DAMAGE: tuple[Mutation, ...] = (
    damaged_slot_is_retired_twice,
    double_keys_are_kept,
    block_of_two_rows_is_believed,
    half_moved_row_is_taken_for_active,
    unsound_row_is_believed,
)
"""Bugs that tests of the core find in records written by hand, but the simulation never or hardly ever.

The first needs three copies of one slot. No crash of a control process that writes in order causes the next two: a key
is looked for before it is published, and a row loses its id before its blocks are let go of. The others need a crash at
one line of a move whose slots and blocks happen to have the same numbers and fitting states.
"""
