"""Bugs of ranks that call apart to switch on: who has a part in a lease, what each was told, what all have written."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlease.errors import KVLeaseError
from kvlease.ids import WorkerId
from kvleased.core import cache, commands, recovery
from kvleased.core.admission import granting
from kvleased.core.blocks.records import LeaseRows
from kvleased.core.effects import Extended, Outcome
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.lease.ranks import Members
from kvleased.core.state import CacheState, pack
from kvleased.core.verbs import committing, ending, joining, requests, trimming
from tests.laws.mended import Mutation

_MOVED = (Phase.EVICTED, Phase.RELOADING)


def first_rank_publishes(patch: pytest.MonkeyPatch) -> None:
    """A block is findable as soon as one of the ranks has committed it."""
    patch.setattr(committing, "agreed_commit", lambda _, __, command: command)


def second_rank_gets_a_lease_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """A rank that comes to a request that another rank has asked for is granted other blocks."""
    find = joining.find

    def find_own(state: CacheState, command: commands.Reserve | commands.Fork) -> Lease | None:
        lease = find(state, command)
        if lease is not None and lease.members is not None:
            return lease if command.worker_id in lease.members.present else None
        return lease

    patch.setattr(requests, "find", find_own)
    patch.setattr(joining, "find", find_own)


def trim_heeds_no_other_rank(patch: pytest.MonkeyPatch) -> None:
    """A trim takes the blocks that another rank still wants."""
    agreed_trim = joining.agreed_trim

    def own_trim(state: CacheState, lease: Lease, members: Members, command: commands.Trim) -> int:
        agreed_trim(state, lease, members, command)
        return command.num_tokens

    patch.setattr(trimming, "agreed_trim", own_trim)


def _during(
    patch: pytest.MonkeyPatch, verb: type[commands.Command], name: str, replaced: Callable[..., Any]
) -> None:
    """Have one of the verbs that end something see another function."""
    carry_out = cache._VERBS[verb]

    def other(state: CacheState, command: commands.Command, now: float) -> Outcome:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(ending, name, replaced)
            return carry_out(state, command, now)

    patch.setitem(cache._VERBS, verb, other)


def release_of_one_rank_ends_the_lease(patch: pytest.MonkeyPatch) -> None:
    """The first rank that has finished a request ends the lease for all."""
    _during(patch, commands.Release, "part", lambda *_: False)


def death_of_one_rank_ends_the_lease(patch: pytest.MonkeyPatch) -> None:
    """A lease dies with the first of its ranks, while the others write its blocks."""
    _during(patch, commands.WorkerDied, "part", lambda *_: False)


def death_of_a_rank_leaves_its_part(patch: pytest.MonkeyPatch) -> None:
    """A dead rank still counts as having a part in the lease."""
    _during(patch, commands.WorkerDied, "part", lambda _, lease, *__: lease.members is not None)


def one_rank_evicts_for_all(patch: pytest.MonkeyPatch) -> None:
    """A lease leaves the device as soon as one of its ranks wants that."""
    patch.setattr(Members, "all_want_down", property(lambda self: bool(self.evicts)))


def restart_goes_on_with_one_rank(patch: pytest.MonkeyPatch) -> None:
    """After a restart a lease belongs only to the first of its ranks."""
    workers_of = recovery._workers_of
    patch.setattr(recovery, "_workers_of", lambda state, row: workers_of(state, row)[:1])


def reload_tells_of_blocks_that_others_may_trim(patch: pytest.MonkeyPatch) -> None:
    """A rank is told where all blocks of a lease are now, but the tokens that it wants stay as they were before."""
    tell_all = joining.tell_all

    def tell(state: CacheState, lease: Lease, members: Members, worker_id: WorkerId) -> None:
        num_tokens = members.present[worker_id].num_tokens
        tell_all(state, lease, members, worker_id)
        members.present[worker_id].num_tokens = num_tokens or members.present[worker_id].num_tokens

    patch.setattr(joining, "tell_all", tell)


def repeated_reserve_tells_of_blocks_that_others_may_trim(patch: pytest.MonkeyPatch) -> None:
    """A rank that asks again for its lease is told of all its blocks, but counts only on its own part."""
    join = joining.join

    def join_once(state: CacheState, lease: Lease, worker_id: WorkerId) -> None:
        if lease.members is None or worker_id not in lease.members.present:
            join(state, lease, worker_id)

    patch.setattr(joining, "join", join_once)


def evict_outlives_a_reload(patch: pytest.MonkeyPatch) -> None:
    """A rank's wish to evict stays even after the rank has been told that its blocks are here."""
    patch.setattr(joining, "withdraw_evict", lambda *_: None)


def who_joins_a_leaving_lease_is_told_of_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """A rank that comes while a lease is copied down gets blocks that will belong to others in a moment."""
    patch.setattr(joining, "OFF_DEVICE", _MOVED)
    patch.setattr(granting, "OFF_DEVICE", _MOVED)


def end_of_a_lease_answers_no_evict(patch: pytest.MonkeyPatch) -> None:
    """A call that waits for the other ranks waits for ever if the last one releases the lease."""
    answer_waiting = ending._answer_waiting

    def silent(state: CacheState, lease: Lease, reason: KVLeaseError | None) -> None:
        if lease.members is not None:
            lease.members.evicts.clear()
        answer_waiting(state, lease, reason)

    patch.setattr(ending, "_answer_waiting", silent)


def rank_joins_what_was_published_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    """A rank that comes back is let in although blocks are findable whose tokens a crash kept from being counted."""

    def is_counted(state: CacheState, lease: Lease, members: Members) -> bool:
        return int(state.leases.rows.num_computed[lease.row]) != members.hit_tokens

    patch.setattr(joining, "_has_published", is_counted)


def rank_that_left_has_written_what_comes_later(patch: pytest.MonkeyPatch) -> None:
    """What a rank had committed before a trim counts for the blocks that take the places of those that left."""
    patch.setattr(Members, "forget_behind", lambda *_: None)


def _restart_over(patch: pytest.MonkeyPatch, change: Callable[[LeaseRows], None]) -> None:
    """Have rows changed when the control process starts again."""
    recover = cache.recover

    def changed(state: CacheState, *known: Any) -> None:
        change(state.records.rows)
        recover(state, *known)

    patch.setattr(cache, "recover", changed)


def restart_takes_what_all_have_computed_for_the_prefix(patch: pytest.MonkeyPatch) -> None:
    """After a restart a rank that comes back goes on with what the others have published since, under their keys."""

    def forget(rows: LeaseRows) -> None:
        rows.hit_tokens[:] = rows.num_computed

    _restart_over(patch, forget)


def restart_forgets_the_ranks_that_have_parted(patch: pytest.MonkeyPatch) -> None:
    """After a restart a rank that was there and left counts as one that has yet to come."""

    def forget(rows: LeaseRows) -> None:
        rows.ranks_ever[:] = rows.ranks

    _restart_over(patch, forget)


def restart_believes_no_rank_beyond_what_was_asked_for(patch: pytest.MonkeyPatch) -> None:
    """After a restart a rank counts as no further than its lease was asked to cover, although it had room for more."""
    members_of = recovery._members_of

    def less(state: CacheState, row: int, workers: Sequence[WorkerId]) -> Members | None:
        members = members_of(state, row, workers)
        if members is not None:
            members.ahead_tokens = int(state.records.rows.num_tokens[row])
        return members

    patch.setattr(recovery, "_members_of", less)


def states_of_another_rank_go_untold(patch: pytest.MonkeyPatch) -> None:
    """A rank is told of no state if its newest one is at the place of that of a rank that asked for more tokens."""
    patch.setattr(joining, "_end_with_states", lambda _, __, ___, end: end)


def places_are_counted_from_the_first_block_told(patch: pytest.MonkeyPatch) -> None:
    """A rank is told that states are right behind what it knew before, however far another rank has jumped."""
    tell = joining.tell

    def counted(
        state: CacheState, lease: Lease, members: Members, command: commands.Extend
    ) -> Extended:
        before = np.array(members.present[command.worker_id].told)
        reply = tell(state, lease, members, command)
        num_added = reply.num_blocks or pack(np.array([len(reply.block_ids) // 4]))
        places = before + np.frombuffer(num_added, np.int32)
        return replace(reply, num_places=reply.num_places and pack(places))

    patch.setattr(joining, "tell", counted)
    patch.setattr(requests, "tell", counted)


def rank_that_never_learned_of_a_lease_has_come(patch: pytest.MonkeyPatch) -> None:
    """A rank whose call ended while its lease was loading counts as having been there."""
    part = Members.part
    patch.setattr(
        Members, "part", lambda self, worker_id, **_: part(self, worker_id, has_learned=True)
    )


OF_RANKS: tuple[tuple[Mutation, str], ...] = tuple(
    (one, "ranks")
    for one in (
        first_rank_publishes,
        second_rank_gets_a_lease_of_its_own,
        trim_heeds_no_other_rank,
        release_of_one_rank_ends_the_lease,
        death_of_one_rank_ends_the_lease,
        death_of_a_rank_leaves_its_part,
        one_rank_evicts_for_all,
        restart_goes_on_with_one_rank,
        end_of_a_lease_answers_no_evict,
        rank_that_left_has_written_what_comes_later,
        repeated_reserve_tells_of_blocks_that_others_may_trim,
        restart_forgets_the_ranks_that_have_parted,
        places_are_counted_from_the_first_block_told,
    )
)
"""Bugs of ranks that the simulation finds soon, and the cache in which they show; `test_mutations` has the others."""
