"""Bugs of an operator's verbs to switch on: drains, clears, sizes, limits that change, and caps of leases."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvleased.core import (
    cache,
    clearing,
    commands,
    forking,
    keeping,
    refusals,
    resizing,
)
from kvleased.core.charges import Charges
from kvleased.core.effects import Done, Outcome
from kvleased.core.ids import Ids
from kvleased.core.pool import Pool
from kvleased.core.shape import CacheShape
from kvleased.core.state import CacheState
from kvleased.core.states import Event, State
from tests.laws.limited import LIMITS
from tests.laws.mended import Mutation


def cap_of_leases_is_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """A tenant gets as many leases as it asks for."""
    for module in (keeping, refusals):
        patch.setattr(module, "is_capped", lambda *_: False)


def forks_are_not_charged(patch: pytest.MonkeyPatch) -> None:
    """A cap counts what is reserved, and forks go beside it."""
    patch.setattr(forking, "lacks_row", lambda *_: False)


def rows_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A tenant takes the last rows of the block table, which are kept for others."""
    for module in (keeping, refusals):
        patch.setattr(module, "leaves_row", lambda *_: False)


def pins_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A tenant takes the last pins, which are kept for others."""
    patch.setattr(keeping, "pins_by_tenant", lambda _: Counter(dict.fromkeys(LIMITS, 100)))


def ended_lease_is_not_refunded(patch: pytest.MonkeyPatch) -> None:
    """A lease that has ended, or came to nothing, counts to its tenant for ever."""
    patch.setattr(Charges, "refund", lambda *_: None)


def lowered_limits_are_not_applied(patch: pytest.MonkeyPatch) -> None:
    """New limits are acknowledged and forgotten."""

    def limit(state: CacheState, command: commands.Limit, now: float) -> Outcome:
        del now
        resizing.check_owed(state, resizing.limited(state.shape, command))
        return Outcome(reply=Done())

    patch.setitem(cache._VERBS, commands.Limit, limit)


def new_limits_do_not_heed_pins(patch: pytest.MonkeyPatch) -> None:
    """A minimum is promised of blocks that pins hold for others."""
    patch.setattr(resizing, "check_owed", lambda *_: None)


def clear_drops_what_is_held(patch: pytest.MonkeyPatch) -> None:
    """A clear takes cached blocks from the leases that read them."""

    def drop(pool: Pool, blocks: Ids) -> int:
        every = np.flatnonzero(pool.records.state == State.READY)
        pool.holds[every] = 0
        clear_drop(pool, blocks)
        return len(blocks)

    clear_drop = clearing._drop
    patch.setattr(clearing, "_drop", drop)


def clear_drops_what_others_have(patch: pytest.MonkeyPatch) -> None:
    """A clear of one tenant is a clear of all."""
    cached = clearing._cached
    patch.setattr(clearing, "_cached", lambda pool, _: cached(pool, None))


def parked_block_is_granted(patch: pytest.MonkeyPatch) -> None:
    """A block that is out of use stays on the free list."""

    def park(pool: Pool, ids: Ids) -> None:
        pool.change(ids, Event.PARK)
        pool.num_parked += len(ids)

    patch.setattr(resizing, "park", park)


def restart_forgets_what_is_parked(patch: pytest.MonkeyPatch) -> None:
    """A restart has a smaller pool be as large as it was registered, whose memory is gone."""
    rebuild = Pool.rebuild

    def forgetful(self: Pool) -> None:
        parked = self.records.state == State.PARKED
        self.records.state[parked] = State.FREE
        rebuild(self)

    patch.setattr(Pool, "rebuild", forgetful)


def smaller_pool_promises_what_the_larger_did(patch: pytest.MonkeyPatch) -> None:
    """Blocks are parked, and limits go by all that there were."""

    def rule(self: CacheState, shape: CacheShape) -> None:
        honest(self, replace(shape, parked_blocks=self.shape.parked_blocks))

    honest = CacheState.rule
    patch.setattr(CacheState, "rule", rule)


def drain_does_not_refuse(patch: pytest.MonkeyPatch) -> None:
    """A drain is noted, and leases are granted all the same."""

    def drain(state: CacheState, command: commands.Drain, now: float) -> Outcome:
        outcome = begun(state, command, now)
        state.is_draining = False
        return outcome

    begun = cache._VERBS[commands.Drain]
    patch.setitem(cache._VERBS, commands.Drain, drain)


OF_OPERATING: tuple[tuple[Mutation, str], ...] = (
    (cap_of_leases_is_not_heeded, "operated"),
    (forks_are_not_charged, "operated"),
    (rows_are_not_kept, "limited"),
    (pins_are_not_kept, "limited"),
    (ended_lease_is_not_refunded, "operated"),
    (lowered_limits_are_not_applied, "operated"),
    (new_limits_do_not_heed_pins, "operated"),
    (clear_drops_what_is_held, "operated"),
    (clear_drops_what_others_have, "operated"),
    (parked_block_is_granted, "operated"),
    (restart_forgets_what_is_parked, "operated"),
    (smaller_pool_promises_what_the_larger_did, "operated"),
    (drain_does_not_refuse, "operated"),
)
"""Every bug of an operator's verbs, and the cache in which the simulation finds it."""
