"""Bugs in what a refusal names, to switch on: a caller that asks for it instead must be granted it."""

import pytest

from kvleased.core.admission import coming, refusals, remedies
from kvleased.core.admission.room import num_at_once, num_available
from kvleased.core.blocks.pool import Pool
from kvleased.core.commands import Reload
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.state import CacheState
from kvleased.core.verbs import prefetching, seating
from tests.laws.mended import Mutation


def lease_that_comes_back_is_taken_for_room(patch: pytest.MonkeyPatch) -> None:
    """A longer wait is named to a caller that would wait for blocks of a lease that returns as soon as it is down."""
    patch.setattr(coming, "_comes_back", lambda _: False)


def shared_blocks_are_taken_for_room(patch: pytest.MonkeyPatch) -> None:
    """A longer wait is named for blocks that others still hold after the copies in flight have ended."""

    def let_go(pool: Pool, held: list[Ids], protected: Ids) -> Ids:
        del pool, protected
        return held[0] if held else NOWHERE

    patch.setattr(coming, "_idle_after", let_go)


def what_lost_copies_keep_is_taken_for_room(patch: pytest.MonkeyPatch) -> None:
    """A longer wait is named for blocks that a lease leaves to a lost copy, but takes anew when it comes back."""
    patch.setattr(coming, "_num_kept", lambda *_: 0)


def key_that_a_lease_brings_back_is_counted_on(patch: pytest.MonkeyPatch) -> None:
    """A longer wait is named for a prefix that leaves the device and comes back without its key."""
    patch.setattr(coming, "_num_lost", lambda *_: 0)


def late_call_is_taken_for_granted_again(patch: pytest.MonkeyPatch) -> None:
    """A longer wait for copies is named to a call whose tenant may no longer have as much."""
    patch.setattr(refusals, "is_granted_again", lambda *_: True)


def late_call_may_have_its_lease_again(patch: pytest.MonkeyPatch) -> None:
    """A longer wait for copies is named to a call whose tenant may no longer have as many leases."""
    patch.setattr(refusals, "lacks_row", lambda *_, **__: False)


def less_than_a_mate_asks_for_is_named(patch: pytest.MonkeyPatch) -> None:
    """Fewer tokens are named to a rank while another rank waits for the same request with more."""
    patch.setattr(remedies, "_is_bound", lambda *_: False)


def owed_blocks_are_taken_for_room(patch: pytest.MonkeyPatch) -> None:
    """A longer wait is named for blocks that belong to another tenant's minimum as soon as they are free."""

    def num_soon(state: CacheState, tenant: int, protected: Ids) -> int:
        blocks = coming._blocks_coming(state, protected)
        return num_available(state, tenant, protected) + len(blocks)

    patch.setattr("kvleased.core.admission.shortages.num_soon", num_soon)


def blocks_to_be_zeroed_are_named_as_ready(patch: pytest.MonkeyPatch) -> None:
    """A number of tokens is named as available at once, although other tenants' blocks must be zeroed for it first."""
    patch.setattr(
        remedies,
        "num_at_once",
        lambda state, tenant, protected: max(0, num_available(state, tenant, protected)),
    )


def keys_are_taken_for_blocks(patch: pytest.MonkeyPatch) -> None:
    """As many keys are named as there are blocks, although some keys bring no block, and some several."""

    def fewer_keys(state: CacheState, command: Reload, num_blocks: int) -> tuple[str, ...]:
        del state, command
        return (f"num_keys={num_blocks}",) if num_blocks > 0 else ()

    patch.setattr(prefetching, "_fewer_keys", fewer_keys)


def those_are_passed_who_no_longer_are(patch: pytest.MonkeyPatch) -> None:
    """Fewer tokens are named to a caller that was ahead of others, but is behind them once room is made for it."""
    patch.setattr(seating, "_num_ahead_since", lambda *_: 0)


def prefix_that_leaves_is_taken_for_found(patch: pytest.MonkeyPatch) -> None:
    """A longer wait is named to a call whose prefix leaves the device by then, while the host pool is off."""
    patch.setattr(coming, "_are_leaving", lambda *_: False)


def first_key_is_taken_for_what_it_was(patch: pytest.MonkeyPatch) -> None:
    """Fewer keys are named for the tenant of the last, though a block that has just left is the first."""

    def of_the_last(state: CacheState, command: Reload) -> tuple[str, ...]:
        below = prefetching._cached_below(state, state.covering.every_key(command.keys), None)
        tenant = prefetching._tenant_of(state, below[-1:])
        return prefetching._fewer_keys(state, command, num_at_once(state, tenant, NOWHERE))

    patch.setattr(prefetching, "_fewer_keys_at_once", of_the_last)


OF_REMEDIES: tuple[tuple[Mutation, str], ...] = (
    (lease_that_comes_back_is_taken_for_room, "one"),
    (shared_blocks_are_taken_for_room, "one"),
    (owed_blocks_are_taken_for_room, "limited"),
    (blocks_to_be_zeroed_are_named_as_ready, "one"),
    (keys_are_taken_for_blocks, "full, window and chunk"),
)
"""Every bug of remedies that the simulation can find, and the cache in which it takes fewer histories."""
