"""Bugs of the tiers below the host pool to switch on: of stores, copies to and from them, and calls that ask."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvleased.core import cache, commands, recovery
from kvleased.core.admission import granting, room
from kvleased.core.blocks.pool import Pool
from kvleased.core.copies import cleaning, landing, mishaps
from kvleased.core.effects import Direction, Done, Mover, Outcome, Tier
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.prefix import looking, search
from kvleased.core.prefix.looking import Sources
from kvleased.core.prefix.search import Match
from kvleased.core.state import CacheState
from kvleased.core.tier.dirt import Dirt, Marks
from kvleased.core.tier.flights import Flight, Purpose, TierTokens
from kvleased.core.verbs import asking, draining, requests
from tests.laws.mended import Mutation

_DISK: Final = 2
"""The number of the disk among the pools."""
_HIDDEN: Final = 2**40
"""Stands for a slot that is another tenant's."""


# Copies ---------------------------------------------------------------------------------------------------------------


def _believe(patch: pytest.MonkeyPatch, direction: Direction) -> None:
    """Treat every position of some copies as successful."""

    def copy_done(state: CacheState, command: commands.CopyDone, now: float) -> Outcome:
        flight = state.flights.get(command.copy_id)
        if flight is not None and flight.direction is direction:
            command = replace(command, failed=())
        return landing.copy_done(state, command, now)

    patch.setitem(cache._VERBS, commands.CopyDone, copy_done)


def failed_load_is_published(patch: pytest.MonkeyPatch) -> None:
    """A block that the disk store could not read is served all the same."""
    _believe(patch, Direction.LOAD)


def failed_fetch_is_published(patch: pytest.MonkeyPatch) -> None:
    """A block that the remote store has forgotten meanwhile is served all the same."""
    _believe(patch, Direction.FETCH)


def failed_store_is_published(patch: pytest.MonkeyPatch) -> None:
    """A block that the disk store could not write is findable there."""
    _believe(patch, Direction.STORE)


def damaged_disk_slot_stays_in_use(patch: pytest.MonkeyPatch) -> None:
    """A slot with damaged bytes is served to the next caller."""
    retire = mishaps._retire

    def lenient(pool: Pool, damaged: Ids) -> int:
        return 0 if pool.tier_number == _DISK else retire(pool, damaged)

    patch.setattr(mishaps, "_retire", lenient)


def _let_go_of_sources(patch: pytest.MonkeyPatch, purpose: Purpose) -> None:
    """Have copies for one purpose not hold what they read."""
    fly = CacheState.fly

    def careless(self: CacheState, *arguments: Any, **named: Any) -> Flight:
        flight = fly(self, *arguments, **named)
        if flight.purpose is purpose:
            self.ends(flight.direction)[0].let_go(flight.sources)
        return flight

    patch.setattr(CacheState, "fly", careless)


def load_does_not_hold_its_slots(patch: pytest.MonkeyPatch) -> None:
    """A disk slot may be dropped while it is being read."""
    _let_go_of_sources(patch, Purpose.DISK_LOAD)


def store_does_not_hold_its_slots(patch: pytest.MonkeyPatch) -> None:
    """A host slot may be dropped while it is being copied to disk."""
    _let_go_of_sources(patch, Purpose.STORE)


def death_of_one_mover_ends_the_copies_of_all(patch: pytest.MonkeyPatch) -> None:
    """The copies of living movers are taken for ended, while they still write."""

    def mover_died(state: CacheState, command: commands.MoverDied, now: float) -> Outcome:
        for mover in Mover:
            landing.mover_died(state, replace(command, mover=mover), now)
        return Outcome(reply=Done())

    patch.setitem(cache._VERBS, commands.MoverDied, mover_died)


def death_of_a_stores_mover_ends_nothing(patch: pytest.MonkeyPatch) -> None:
    """Copies to and from a store are waited for although their mover is dead."""

    def mover_died(state: CacheState, command: commands.MoverDied, now: float) -> Outcome:
        return landing.mover_died(state, replace(command, mover=Mover.MEMORY), now)

    patch.setitem(cache._VERBS, commands.MoverDied, mover_died)


def lost_load_frees_its_target(patch: pytest.MonkeyPatch) -> None:
    """A disk or remote mover that does not answer is taken for one that no longer writes."""

    def copy_lost(state: CacheState, command: commands.CopyLost, now: float) -> Outcome:
        flight = state.flights.get(command.copy_id)
        if flight is not None and flight.direction in (Direction.LOAD, Direction.FETCH):
            return landing.copy_failed(state, commands.CopyFailed(copy_id=command.copy_id), now)
        return landing.copy_lost(state, command, now)

    patch.setitem(cache._VERBS, commands.CopyLost, copy_lost)


# What is found --------------------------------------------------------------------------------------------------------


def slot_of_another_tenant_is_served(patch: pytest.MonkeyPatch) -> None:
    """Nobody checks whose bytes a slot below the device holds."""
    patch.setattr(looking, "_slots_for", lambda pool, keys, _: pool.index.find(keys))


def slot_of_another_tenant_hides_what_is_below(patch: pytest.MonkeyPatch) -> None:
    """A slot under a stolen key is a miss, even if the key's owner has its own block in a lower tier."""
    slots_for, are_foreign = looking._slots_for, search.are_foreign

    def found_for(pool: Pool, keys: bytes, tenant: int | None) -> Ids:
        slots = pool.index.find(keys)
        hidden = (slots >= 0) & (slots_for(pool, keys, tenant) < 0)
        slots[hidden] = _HIDDEN
        return slots

    def are_hidden(state: CacheState, entries: Ids, tenant: int) -> NDArray[np.bool_]:
        return are_foreign(state, entries, tenant) | (~entries >= _HIDDEN)

    patch.setattr(looking, "_slots_for", found_for)
    patch.setattr(search, "are_foreign", are_hidden)


def what_others_have_is_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    """The remote store is not asked for what another tenant has, which tells a thief of keys who has them."""
    patch.setattr(
        asking,
        "look_everywhere",
        lambda state, keys, _, sources: search.look_everywhere(state, keys, None, sources),
    )


def tier_that_is_off_is_searched(patch: pytest.MonkeyPatch) -> None:
    """Blocks on a disk that does not work count as found."""

    def searched(state: CacheState, sources: Sources) -> list[tuple[int, Pool]]:
        del sources
        pools = ((0, state.host), (len(state.host), state.disk))
        return [(first, pool) for first, pool in pools if len(pool.index)]

    patch.setattr(looking, "searched", searched)
    patch.setattr(search, "searched", searched)


def pool_of_a_mover_that_hangs_is_searched(patch: pytest.MonkeyPatch) -> None:
    """Blocks in the host pool count as found while nobody can bring them from there."""
    real = looking.searched

    def hopeful(state: CacheState, sources: Sources) -> list[tuple[int, Pool]]:
        with _taken_for_well(state):
            return real(state, sources)

    patch.setattr(looking, "searched", hopeful)
    patch.setattr(search, "searched", hopeful)


def copies_of_a_mover_that_hangs_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Blocks that leave are copied to the host pool first, although that may take for ever."""
    real = room._room

    def patient(state: CacheState, *arguments: Any, may_wait: bool) -> Ids | None:
        with _taken_for_well(state):
            return real(state, *arguments, may_wait=may_wait)

    patch.setattr(room, "_room", patient)


@contextmanager
def _taken_for_well(state: CacheState) -> Iterator[None]:
    """Treat the host pool's mover as one that does not hang."""
    off, state.tiers_off = state.tiers_off, state.tiers_off - {Tier.HOST}
    try:
        yield
    finally:
        state.tiers_off = off


def answer_is_taken_for_bytes(patch: pytest.MonkeyPatch) -> None:
    """What the remote store says that it has is served before it has arrived."""
    bring = granting.bring  # type: ignore[attr-defined]  # it is where it is called

    def hasty(state: CacheState, lease: Lease, prefix: Match, loaded: Ids) -> None:
        bring(state, lease, prefix, loaded)
        lease.pending = {
            copy_id
            for copy_id in lease.pending
            if state.flights[copy_id].direction is not Direction.FETCH
        }

    patch.setattr(granting, "bring", hasty)


# Calls that ask -------------------------------------------------------------------------------------------------------


def parked_call_is_forgotten_at_a_death(patch: pytest.MonkeyPatch) -> None:
    """When a worker dies, its calls that ask the remote store end without an answer."""
    end_worker = cache._VERBS[commands.WorkerDied]

    def silent(state: CacheState, command: commands.WorkerDied, now: float) -> Outcome:
        for ticket, one in list(state.asking.items()):
            if one.waiter.worker_id == command.worker_id:
                del state.asking[ticket]
        return end_worker(state, command, now)

    patch.setitem(cache._VERBS, commands.WorkerDied, silent)


def parked_call_is_forgotten_at_a_drain(patch: pytest.MonkeyPatch) -> None:
    """A drain refuses calls that wait for room, but not calls that ask."""

    def drain(state: CacheState, command: commands.Drain, now: float) -> Outcome:
        asked, state.asking = state.asking, {}
        outcome = draining.drain(state, command, now)
        state.asking = asked
        return outcome

    patch.setitem(cache._VERBS, commands.Drain, drain)


def parked_call_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A remote store that does not answer is waited for beyond all deadlines."""
    patch.setattr(landing, "end_asking", lambda *_: None)


def superseded_parked_call_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A call that is repeated while it asks takes the place of the first one, which gets no answer."""

    def supersede(state: CacheState, command: commands.Reserve, ticket: int | None) -> None:
        for other, one in list(state.asking.items()):
            mine = one.waiter.command
            assert isinstance(mine, commands.Reserve)
            if other != ticket and mine.request_id == command.request_id:
                del state.asking[other]

    patch.setattr(requests, "supersede_asking", supersede)


def parked_call_goes_on_twice(patch: pytest.MonkeyPatch) -> None:
    """An answer that comes twice lets a call go on twice."""
    go_on = asking._go_on

    def forgetful(state: CacheState, one: Any, keys: frozenset[bytes], now: float) -> None:
        go_on(state, one, keys, now)
        state.asking[one.waiter.ticket] = one

    patch.setattr(asking, "_go_on", forgetful)


# Background copies ----------------------------------------------------------------------------------------------------


def remote_mark_outlives_its_slot(patch: pytest.MonkeyPatch) -> None:
    """A block that comes to a slot counts as shared because the slot's previous block was."""
    take_over, note_remote = landing._take_over, Dirt._note_remote
    before: list[Marks] = []

    def remember(
        state: CacheState, flight: Flight, failed: NDArray[np.bool_], checksums: bytes
    ) -> None:
        before[:] = [state.dirt.remote[1].copy()]
        take_over(state, flight, failed, checksums)

    def keep(self: Dirt, direction: Direction, sources: Ids, targets: Ids) -> None:
        note_remote(self, direction, sources, targets)
        if direction is Direction.OFFLOAD:
            self.remote[1][targets] |= before[0][targets]
            self.share[targets] = ~self.remote[1][targets]

    patch.setattr(landing, "_take_over", remember)
    patch.setattr(Dirt, "_note_remote", keep)


def what_is_not_committed_is_written_through(patch: pytest.MonkeyPatch) -> None:
    """A block that was once committed is copied down although it is now somebody's private block."""

    def marked(state: CacheState, marks: Marks, pool: Pool, below: Pool | None) -> Ids:
        (found,) = marks.nonzero()
        found = found[pool.holds[found] > 0] if pool is state.device else found
        return cleaning._unknown(state, marks, (pool, found), below)

    patch.setattr(cleaning, "_marked", marked)


def several_chores_of_one_mover(patch: pytest.MonkeyPatch) -> None:
    """Background copies are begun before the previous one has ended."""
    patch.setattr(cleaning, "CHORES", ())


def mover_that_failed_rests_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A mover that once failed to copy in the background is never asked to again."""
    patch.setattr(Dirt, "is_resting", lambda self, mover, _: mover in self.resting)


def share_that_was_cut_short_is_done(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a slow network had no time for are taken for shared, or for not worth sharing."""
    shared = Dirt._shared

    def hasty(self: Dirt, sources: Ids, left: Ids, now: float) -> None:
        shared(self, sources, left[:0], now)

    patch.setattr(Dirt, "_shared", hasty)


def slot_that_is_not_taken_holds_up_the_others(patch: pytest.MonkeyPatch) -> None:
    """A block that the remote store did not take is offered again before all others."""
    note = Dirt.landed

    def landed(self: Dirt, flight: Flight, good: NDArray[np.bool_], now: float) -> None:
        note(self, flight, good, now)
        self.share_tried[:] = 0

    patch.setattr(Dirt, "landed", landed)


def retired_slot_outlives_its_container(patch: pytest.MonkeyPatch) -> None:
    """A slot stays out of use because of bytes that were in memory that is gone."""
    patch.setattr(recovery, "give_back_retired", lambda _: None)


def later_calls_wait_for_the_slower_copy(patch: pytest.MonkeyPatch) -> None:
    """If two tiers bring the same bytes, a key stays listed as on its way although the first copy has brought it."""
    patch.setattr(landing, "overtake", lambda *_: None)


def store_that_pushes_blocks_out_serves_nobody(patch: pytest.MonkeyPatch) -> None:
    """A call that waits for less since a block below has gone is served only with the next command."""

    def clean(state: CacheState, now: float) -> bool:
        cleaning.clean(state, now)
        return False

    patch.setattr(cache, "clean", clean)


def damage_is_missed_while_a_lease_leaves(patch: pytest.MonkeyPatch) -> None:
    """A lease goes to a slot that another copy found damaged while the lease was on its way."""
    patch.setattr(landing, "stays", lambda *_: False)


def tier_that_was_asked_is_taken_for_the_one_that_gave(patch: pytest.MonkeyPatch) -> None:
    """Tokens count for the tier from which a copy was to bring them, whatever became of that copy."""

    def attributed(state: CacheState, prefix: Match, brought: Sequence[Flight]) -> TierTokens:
        device, host, disk, every = prefix.tier_tokens
        blocks = Counter(one.direction for one in brought for _ in one.targets)
        below = sum(blocks.values()) - blocks[Direction.RELOAD]
        num_tokens = state.covering.tokens_per_block
        return device - sum(blocks.values()) * num_tokens, host - below * num_tokens, disk, every

    patch.setattr(granting, "attributed", attributed)


OF_TIERS: Final[tuple[tuple[Mutation, str], ...]] = (
    (failed_load_is_published, "evict"),
    (failed_fetch_is_published, "remote"),
    (failed_store_is_published, "through"),
    (damaged_disk_slot_stays_in_use, "evict"),
    (load_does_not_hold_its_slots, "evict"),
    (store_does_not_hold_its_slots, "through"),
    (death_of_one_mover_ends_the_copies_of_all, "through"),
    (death_of_a_stores_mover_ends_nothing, "through"),
    (lost_load_frees_its_target, "remote"),
    (slot_of_another_tenant_is_served, "evict"),
    (tier_that_is_off_is_searched, "evict"),
    (pool_of_a_mover_that_hangs_is_searched, ""),
    (copies_of_a_mover_that_hangs_are_waited_for, ""),
    (answer_is_taken_for_bytes, "remote"),
    (parked_call_is_forgotten_at_a_death, "remote"),
    (parked_call_is_forgotten_at_a_drain, "remote"),
    (parked_call_waits_for_ever, "remote"),
    (superseded_parked_call_is_forgotten, "remote"),
    (parked_call_goes_on_twice, "remote"),
    (remote_mark_outlives_its_slot, "through"),
    (what_is_not_committed_is_written_through, "through"),
    (several_chores_of_one_mover, "through"),
    (mover_that_failed_rests_for_ever, "through"),
    (share_that_was_cut_short_is_done, "through"),
    (retired_slot_outlives_its_container, "evict"),
    (later_calls_wait_for_the_slower_copy, "hits"),
)
"""Every bug of lower tiers that the simulation can find, and the stores with which it finds it."""
