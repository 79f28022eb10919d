"""Bugs of groups, forks and trims to switch on: which blocks a lease has where, and what others read of it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease._calling import grants
from kvlease.groups import Keeps
from kvleased.core import commands, state
from kvleased.core.admission import growing
from kvleased.core.ids import Ids
from kvleased.core.lease import covering
from kvleased.core.lease.covering import Covering
from kvleased.core.lease.kernel_table import KernelTable
from kvleased.core.lease.leases import Lease, LeaseBook
from kvleased.core.lease.phases import MOVING, Phase
from kvleased.core.prefix import search
from kvleased.core.tier.flights import Flight, Purpose
from kvleased.core.verbs import committing, forking, trimming
from tests.laws.mended import Mutation


def window_gives_back_a_block_too_many(patch: pytest.MonkeyPatch) -> None:
    """A window moves on by one block more than its tokens allow."""
    first_needed = Covering.first_needed

    def hasty(self: Covering, at: int, num_computed: int) -> int:
        first = first_needed(self, at, num_computed)
        return first + (first > 0 and self.groups[at].keeps is Keeps.WINDOW)

    patch.setattr(Covering, "first_needed", hasty)


def kernels_read_what_was_given_back(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a commit gives back stay in the row that kernels read."""
    patch.setattr(KernelTable, "give_back", lambda *_: None)


def prefix_has_a_hole(patch: pytest.MonkeyPatch) -> None:
    """A window counts as whole if every other block of it is there."""
    longest = search._longest

    def lax(cover: Covering, has: NDArray[np.bool_], counts: list[int], num_tokens: int) -> int:
        filled, start = has.copy(), 0
        for at, count in zip(cover.shared, counts, strict=True):
            if cover.groups[at].keeps is Keeps.WINDOW:
                filled[start : start + count - 1] |= has[start + 1 : start + count]
            start += count
        return longest(cover, filled, counts, num_tokens)

    patch.setattr(search, "_longest", lax)


def groups_share_their_keys(patch: pytest.MonkeyPatch) -> None:
    """Blocks of all groups are kept under the same keys."""
    patch.setattr(covering, "marks", lambda count: np.zeros((count, 4), np.uint64))


def unfinished_state_is_published(patch: pytest.MonkeyPatch) -> None:
    """A state counts as the state after its block's last token, wherever it was written."""
    patch.setattr(committing, "Keeps", SimpleNamespace(STATE=None))


def fork_shares_a_private_block(patch: pytest.MonkeyPatch) -> None:
    """A fork shares blocks that its parent goes on writing."""
    row_of = forking._row_of

    def careless(world: state.CacheState, parent: Lease, num_tokens: int) -> forking._Row:
        row = row_of(world, parent, num_tokens)
        nothing = np.zeros_like(row.is_copied)
        return row._replace(is_shared=row.is_shared | row.is_copied, is_copied=nothing)

    patch.setattr(forking, "_row_of", careless)


def fork_does_not_hold_its_sources(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a fork copies may be overwritten by others as soon as its parent ends."""
    fly = cast("Callable[..., Flight]", state.CacheState.fly)

    def careless(self: state.CacheState, *arguments: object, **named: object) -> Flight:
        flight = fly(self, *arguments, **named)
        if flight.purpose is Purpose.FORK:
            self.device.let_go(flight.sources)
        return flight

    patch.setattr(state.CacheState, "fly", careless)


def fork_takes_its_parents_newest_state_from_the_wrong_place(patch: pytest.MonkeyPatch) -> None:
    """A fork looks for a state where it would be written, although it is farther on."""

    def by_place(cover: Covering, group: int, part: NDArray[np.int32], *tokens: int) -> Ids:
        place = cover.first_needed(group, tokens[0])
        return np.array([-1] * place + [int(part[place])])

    patch.setattr(forking, "_newest_state", by_place)


def trim_loses_the_newest_state(patch: pytest.MonkeyPatch) -> None:
    """A trim gives back the state that is behind its place."""
    patch.setattr(trimming, "_move_down", lambda *_: None)


def trim_gives_back_a_block_too_many(patch: pytest.MonkeyPatch) -> None:
    """A trim rounds the remaining tokens down to whole blocks."""
    whole = trimming.cut

    def cut(book: LeaseBook, row: int) -> Ids:
        num_tokens = int(book.rows.num_tokens[row])
        book.rows.num_tokens[row] = max(1, num_tokens - book.covering.tokens_per_block)
        left = whole(book, row)
        book.rows.num_tokens[row] = num_tokens
        return left

    patch.setattr(trimming, "cut", cut)


def trim_leaves_the_kernels_row(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a trim gives back stay in the row that kernels read."""

    def trim(world: state.CacheState, command: commands.Trim, now: float) -> Any:
        kernel = world.leases.kernel
        world.leases.kernel = cast("KernelTable", SimpleNamespace(append=lambda *_: None))
        try:
            return trimming.trim(world, command, now)
        finally:
            world.leases.kernel = kernel

    from kvleased.core import cache  # noqa: PLC0415 - the table of verbs

    patch.setitem(cache._VERBS, commands.Trim, trim)


def draft_model_lacks_a_block(patch: pytest.MonkeyPatch) -> None:
    """A prefix is found although the extra block that a draft model reads is missing."""
    longest = search._longest

    def lax(cover: Covering, *rest: Any) -> int:
        groups = tuple(replace(group, is_drafted=False) for group in cover.groups)
        blind = SimpleNamespace(shared=cover.shared, groups=groups, hit_tokens=cover.hit_tokens)
        return longest(cast("Covering", blind), *rest)

    patch.setattr(search, "_longest", lax)


def lease_comes_back_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """A lease that moves gets its entries back group by group, although they left in the order of tokens."""

    def rewrite(self: LeaseBook, lease: Lease, entries: Ids, phase: Phase) -> None:
        self.kernel.clear(lease.row)
        self.rows.phase[lease.row] = MOVING
        self.rows.block_ids[lease.row, np.sort(self.places_of(lease.row))] = entries
        self.enter(lease, phase)

    patch.setattr(LeaseBook, "rewrite", rewrite)


def guesses_stay_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """A lease that grows past its speculative blocks keeps them, and takes fresh ones for all its new places."""
    patch.setattr(Covering, "passed", lambda *_: None)
    patch.setattr(Covering, "num_passed_by_one", lambda *_: 0)


def guesses_stand_at_two_places(patch: pytest.MonkeyPatch) -> None:
    """Speculative blocks that move on stay listed at their old places, too."""
    patch.setattr(growing, "_empty", lambda *_: None)


def restart_leaves_guesses_at_two_places(patch: pytest.MonkeyPatch) -> None:
    """Recovery does not end the growth that a crash has cut off."""
    patch.setattr(trimming, "_empty_passed", lambda *_: None)


def answers_are_put_behind_one_another(patch: pytest.MonkeyPatch) -> None:
    """A client appends the states that an extend brings to those that it has, in whatever order the answers come."""

    def append(places: list[int], ids: list[int], end: int, _: int) -> int:
        places.extend([0] * (end - len(places) - len(ids)))
        places.extend(ids)
        return len(ids) - ids.count(0)

    patch.setattr(grants, "_put_states", append)


OF_GROUPS: tuple[tuple[Mutation, str], ...] = (
    (window_gives_back_a_block_too_many, "full and window"),
    (kernels_read_what_was_given_back, "windows"),
    (prefix_has_a_hole, "full and window"),
    (groups_share_their_keys, "full and window"),
    (unfinished_state_is_published, "full and state"),
    (fork_shares_a_private_block, "one"),
    (fork_does_not_hold_its_sources, "one"),
    (fork_takes_its_parents_newest_state_from_the_wrong_place, "wide and guessing"),
    (trim_loses_the_newest_state, "wide and guessing"),
    (trim_gives_back_a_block_too_many, "one"),
    (trim_leaves_the_kernels_row, "full and window"),
    (draft_model_lacks_a_block, "drafted"),
    (lease_comes_back_in_another_order, "full and window"),
    (guesses_stay_where_they_are, "wide and guessing"),
    (guesses_stand_at_two_places, "wide and guessing"),
)
"""Every bug of groups that the simulation can find, and the cache in which it takes fewer histories."""
