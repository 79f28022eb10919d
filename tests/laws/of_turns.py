"""Bugs of tenants' limits and of waiting to switch on: who may have what, and whose turn it is."""

import pytest

from kvleased.core import cache
from kvleased.core.admission import room
from kvleased.core.commands import CopyDone, Reserve
from kvleased.core.copies import landing
from kvleased.core.ids import Ids
from kvleased.core.lease.phases import Phase
from kvleased.core.prefix.overtaking import waiting_for
from kvleased.core.state import CacheState
from kvleased.core.tenancy import tenants
from kvleased.core.tier.flights import HELD_BY_LEASES, Flight
from kvleased.core.verbs import seating
from kvleased.core.waiting import WaitingRoom
from tests.laws.mended import Mutation


def minimum_is_not_kept_for_its_tenant(patch: pytest.MonkeyPatch) -> None:
    """Other tenants get the blocks that a tenant lacks for its minimum."""

    def greedy(state: CacheState, tenant: int, protected: Ids) -> int:
        used, cached = state.device.usage().get(tenant, (0, 0))
        idle = tenants.num_idle(state, protected)
        most = tenants.limits_of(state, tenant).max_blocks - used + cached - idle
        return min(most, state.device.num_available - idle)

    patch.setattr(tenants, "available_to", greedy)
    patch.setattr(room, "available_to", greedy)


def copy_counts_as_a_holder(patch: pytest.MonkeyPatch) -> None:
    """A tenant that takes up cached blocks held only by a copy leaves others no room for their minimum afterwards."""
    patch.setattr(tenants, "_is_any_taken", lambda *of: tenants.num_idle(*of) > 0)


def maximum_is_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """A tenant that has all that it may have gets more without giving up any of its own."""
    patch.setattr(room, "num_above_maximum", lambda *_: 0)
    patch.setattr(tenants, "num_above_maximum", lambda *_: 0)


def ageing_never_raises(patch: pytest.MonkeyPatch) -> None:
    """A call that waits stays in its class for ever."""
    patch.setattr(WaitingRoom, "_age", lambda *_: None)


def waiting_call_loses_its_place(patch: pytest.MonkeyPatch) -> None:
    """A call that is looked at but cannot be served yet goes to the end of its queue."""
    pump = cache.pump

    def rotate(state: CacheState, now: float) -> None:
        pump(state, now)
        first = state.waiting.first(now)
        if first is not None and isinstance(first.command, Reserve):
            state.waiting.leave(first.ticket)
            state.waiting.join(first)

    patch.setattr(cache, "pump", rotate)


def starting_over_is_starting_last(patch: pytest.MonkeyPatch) -> None:
    """A request whose copy failed waits behind all others again."""
    patch.setattr(WaitingRoom, "rejoin", WaitingRoom.join)


def weights_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """All tenants' calls count alike, whatever their weights."""
    patch.setattr(CacheState, "weight_of", lambda *_: 1.0)


def calls_start_over_where_nothing_serves_them(patch: pytest.MonkeyPatch) -> None:
    """A large copy of a lease that comes back ends in parts, even if calls that joined it start over."""

    def is_apart(state: CacheState, flight: Flight, command: CopyDone) -> bool:
        starts_over = command.failed and flight.purpose not in HELD_BY_LEASES
        return flight.num_pairs > state.shape.blocks_at_once and not starts_over

    patch.setattr(landing, "_is_apart", is_apart)


def reload_waits_where_nothing_serves_it(patch: pytest.MonkeyPatch) -> None:
    """A large copy of a lease that leaves ends in parts, even if a call has asked for the lease meanwhile."""

    def is_apart(state: CacheState, flight: Flight, command: CopyDone) -> bool:
        waiting = waiting_for(state, flight) if command.failed else []
        starts_over = any(lease.phase is Phase.LOADING for lease in waiting)
        return flight.num_pairs > state.shape.blocks_at_once and not starts_over

    patch.setattr(landing, "_is_apart", is_apart)


def what_a_later_call_made_free_is_missed(patch: pytest.MonkeyPatch) -> None:
    """Calls that were passed over are not looked at again when a call behind them makes blocks free."""
    serve = seating._serve_once
    patch.setattr(seating, "_serve_once", lambda *of: serve(*of) and False)


OF_TURNS: tuple[tuple[Mutation, str], ...] = (
    (minimum_is_not_kept_for_its_tenant, "limited"),
    (maximum_is_not_heeded, "limited"),
    (ageing_never_raises, "one"),
    (waiting_call_loses_its_place, "one"),
    (starting_over_is_starting_last, "drafted"),
    (weights_do_not_count, "limited"),
)
"""Every bug of limits and turns that the simulation can find, and the cache in which it takes fewer histories."""
