"""Bugs of an operator's verbs to switch on: drains, clears, sizes, changing limits, and caps on leases."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvleased.core import cache, commands
from kvleased.core.admission import shortages
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import Event, State
from kvleased.core.effects import Done, Outcome
from kvleased.core.ids import Ids
from kvleased.core.lease.charges import Charges
from kvleased.core.lease.leases import Lease
from kvleased.core.shape import CacheShape
from kvleased.core.state import CacheState
from kvleased.core.tenancy import keeping
from kvleased.core.tenancy.tenants import check_tokens_fit
from kvleased.core.verbs import clearing, forking, requests, resizing
from tests.laws.limited import LIMITS
from tests.laws.mended import Mutation


def cap_of_leases_is_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """A tenant gets as many leases as it asks for."""
    for module in (keeping, shortages):
        patch.setattr(module, "is_capped", lambda *_: False)


def forks_are_not_charged(patch: pytest.MonkeyPatch) -> None:
    """A cap counts reserved leases, but not forks."""
    patch.setattr(forking, "lacks_row", lambda *_: False)


def rows_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A tenant takes the last rows of the block table, which are kept for others."""
    for module in (keeping, shortages):
        patch.setattr(module, "must_leave_rows", lambda *_: False)


def pins_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A tenant takes the last pins, which are kept for others."""
    patch.setattr(keeping, "pins_by_tenant", lambda _: Counter(dict.fromkeys(LIMITS, 100)))


def pins_are_capped_as_leases_are(patch: pytest.MonkeyPatch) -> None:
    """A tenant has no more pins kept for it than it may have leases."""

    def reshape(self: CacheState, shape: CacheShape) -> None:
        honest(self, shape)
        self.pin_allowances._most_of = self.row_allowances._most_of

    honest = CacheState.reshape
    patch.setattr(CacheState, "reshape", reshape)


def ended_lease_is_not_refunded(patch: pytest.MonkeyPatch) -> None:
    """A lease that has ended, or was never granted, counts against its tenant for ever."""
    patch.setattr(Charges, "refund", lambda *_: None)


def lowered_limits_are_not_applied(patch: pytest.MonkeyPatch) -> None:
    """New limits are acknowledged but forgotten."""

    def limit(state: CacheState, command: commands.Limit, now: float) -> Outcome:
        del now
        resizing.check_owed(state, resizing.limited(state.shape, command))
        return Outcome(reply=Done())

    patch.setitem(cache._VERBS, commands.Limit, limit)


def lowered_limit_refuses_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """An extend by nothing is refused to a tenant that has more than it may have now."""

    def check(state: CacheState, num_tokens: int, lease: Lease | None = None) -> None:
        honest(state, num_tokens, lease)
        if lease is not None and state.is_limited:
            check_tokens_fit(state, lease.tenant, num_tokens)

    honest = requests.check_tokens
    patch.setattr(requests, "check_tokens", check)


def new_limits_do_not_heed_pins(patch: pytest.MonkeyPatch) -> None:
    """A minimum is promised from blocks that pins hold for others."""
    patch.setattr(resizing, "check_owed", lambda *_: None)


def clear_drops_what_is_held(patch: pytest.MonkeyPatch) -> None:
    """A clear drops cached blocks that leases are reading."""

    def drop(pool: Pool, blocks: Ids) -> int:
        every = np.flatnonzero(pool.records.state == State.READY)
        pool.holds[every] = 0
        clear_drop(pool, blocks)
        return len(blocks)

    clear_drop = clearing._drop
    patch.setattr(clearing, "_drop", drop)


def clear_drops_what_others_have(patch: pytest.MonkeyPatch) -> None:
    """A clear of one tenant clears all."""
    cached = clearing._cached
    patch.setattr(clearing, "_cached", lambda pool, _: cached(pool, None))


def parked_block_is_granted(patch: pytest.MonkeyPatch) -> None:
    """A block that is out of use stays on the free list."""

    def park(pool: Pool, ids: Ids) -> None:
        pool.change(ids, Event.PARK)
        pool.num_parked += len(ids)

    patch.setattr(resizing, "park", park)


def restart_forgets_what_is_parked(patch: pytest.MonkeyPatch) -> None:
    """A restart makes a smaller pool as large as it was registered, although that memory is gone."""
    rebuild = Pool.rebuild

    def forgetful(self: Pool) -> None:
        parked = self.records.state == State.PARKED
        self.records.state[parked] = State.FREE
        rebuild(self)

    patch.setattr(Pool, "rebuild", forgetful)


def smaller_pool_promises_what_the_larger_did(patch: pytest.MonkeyPatch) -> None:
    """Blocks are parked, but limits still count all the blocks that there were."""

    def reshape(self: CacheState, shape: CacheShape) -> None:
        honest(self, replace(shape, parked_blocks=self.shape.parked_blocks))

    honest = CacheState.reshape
    patch.setattr(CacheState, "reshape", reshape)


def _forget_of_a_drain(patch: pytest.MonkeyPatch, what: str) -> None:
    def drain(state: CacheState, command: commands.Drain, now: float) -> Outcome:
        outcome = begun(state, command, now)
        setattr(state, what, False)
        return outcome

    begun = cache._VERBS[commands.Drain]
    patch.setitem(cache._VERBS, commands.Drain, drain)


def drain_does_not_refuse(patch: pytest.MonkeyPatch) -> None:
    """A drain is noted, but leases are granted all the same."""
    _forget_of_a_drain(patch, "is_draining")


def drain_of_the_daemon_is_told_as_of_the_cache(patch: pytest.MonkeyPatch) -> None:
    """A refused caller is told that the cache is drained, even if the daemon is."""
    _forget_of_a_drain(patch, "drains_daemon")


OF_OPERATING: tuple[tuple[Mutation, str], ...] = (
    (cap_of_leases_is_not_heeded, "operated"),
    (forks_are_not_charged, "operated"),
    (rows_are_not_kept, "limited"),
    (pins_are_not_kept, "limited"),
    (pins_are_capped_as_leases_are, "operated"),
    (ended_lease_is_not_refunded, "operated"),
    (lowered_limits_are_not_applied, "operated"),
    (lowered_limit_refuses_what_is_there, "operated"),
    (new_limits_do_not_heed_pins, "operated"),
    (clear_drops_what_is_held, "operated"),
    (clear_drops_what_others_have, "operated"),
    (parked_block_is_granted, "operated"),
    (restart_forgets_what_is_parked, "operated"),
    (smaller_pool_promises_what_the_larger_did, "operated"),
    (drain_does_not_refuse, "operated"),
    (drain_of_the_daemon_is_told_as_of_the_cache, "operated"),
)
"""Every bug of an operator's verbs, and the cache in which the simulation finds it."""
