"""The suite bites: the simulation finds each seeded bug, and exhaustive search also finds those that need few steps."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import pytest

from tests.laws import mended, of_groups, of_ranks, of_remedies, of_tiers, of_turns
from tests.laws.exhaustive import ROOTS, TINY, search
from tests.laws.histories import breaks_a_law
from tests.laws.known_seeds import KNOWN_SEEDS, searched
from tests.laws.mended import Mutation
from tests.laws.mutations import MUTATIONS, NEAR
from tests.unit.client import test_extends_at_once as extends_at_once
from tests.unit.service.core.admission import test_group_guesses as group_guesses
from tests.unit.service.core.admission import test_remedies as remedies
from tests.unit.service.core.admission import test_room as room
from tests.unit.service.core.copies import test_cleaning as cleaning
from tests.unit.service.core.copies import test_disk as disk
from tests.unit.service.core.copies import test_landing as landing
from tests.unit.service.core.grouped import STATE
from tests.unit.service.core.lease import test_rank_parts as rank_parts
from tests.unit.service.core.lease import test_rank_restarts as rank_restarts
from tests.unit.service.core.lease import test_ranks as ranks
from tests.unit.service.core.tenancy import test_tenant_acts as tenant_acts
from tests.unit.service.core.tenancy import test_tenants as tenants
from tests.unit.service.core.verbs import test_seating as seating

_DEPTH = 3
_NOTICED_BY: dict[Mutation, Callable[[], None]] = {
    mended.room_is_made_of_the_callers_own_prefix: partial(
        room.test_patient_call_does_not_lose_its_own_prefix_to_the_room_that_it_makes, 1
    ),
    mended.room_is_made_of_what_a_draft_model_reads_too_soon: (
        room.test_blocks_of_others_leave_and_are_zeroed_before_what_a_draft_model_reads
    ),
    of_groups.answers_are_put_behind_one_another: partial(
        extends_at_once.test_states_stand_where_the_daemon_has_them_in_whatever_order_answers_come,
        (STATE,),
        (8, 12, 16),
        (0, 2, 1),
    ),
    of_groups.restart_leaves_guesses_at_two_places: (
        group_guesses.test_growth_that_a_crash_cuts_off_is_ended_after_a_restart
    ),
    of_ranks.reload_tells_of_blocks_that_others_may_trim: (
        rank_parts.test_what_a_reload_tells_of_is_not_trimmed_by_another_rank
    ),
    of_ranks.evict_outlives_a_reload: (
        rank_parts.test_reload_of_a_lease_that_is_here_takes_back_the_wish_to_evict_it
    ),
    of_ranks.who_joins_a_leaving_lease_is_told_of_its_blocks: (
        rank_parts.test_rank_that_joins_a_lease_on_its_way_down_is_told_of_no_blocks
    ),
    of_ranks.rank_joins_what_was_published_in_a_crash: (
        rank_parts.test_rank_that_comes_back_does_not_write_what_a_crash_left_findable
    ),
    of_ranks.restart_takes_what_all_have_computed_for_the_prefix: (
        rank_restarts.test_a_rank_that_comes_back_after_a_restart_asks_anew_as_it_would_before
    ),
    of_ranks.restart_believes_no_rank_beyond_what_was_asked_for: (
        rank_restarts.test_a_rank_that_had_filled_what_there_was_room_for_goes_on_from_there
    ),
    of_ranks.states_of_another_rank_go_untold: (
        rank_restarts.test_a_rank_is_told_of_the_state_that_another_has_asked_for_further_on
    ),
    of_ranks.rank_that_never_learned_of_a_lease_has_come: (
        rank_parts.test_rank_whose_call_ended_while_the_lease_was_loading_is_yet_to_come
    ),
    of_turns.calls_start_over_where_nothing_serves_them: (
        landing.test_call_that_starts_over_is_served_by_the_end_of_the_copy_that_it_joined
    ),
    of_turns.reload_waits_where_nothing_serves_it: (
        landing.test_reload_of_a_large_lease_begins_at_the_end_of_the_copy_that_takes_it_down
    ),
    of_turns.copy_counts_as_a_holder: (
        tenants.test_prefix_that_only_a_copy_holds_is_not_held_where_it_is_needed_for_a_minimum
    ),
    of_remedies.late_call_is_taken_for_granted_again: partial(
        remedies.test_late_fork_is_not_told_to_wait_where_it_would_be_refused,
        remedies.limited_to(max_blocks=1),
        "may no longer have as many blocks",
    ),
    of_remedies.late_call_may_have_its_lease_again: partial(
        remedies.test_late_fork_is_not_told_to_wait_where_it_would_be_refused,
        remedies.limited_to(leases_max=1),
        "may no longer have as many leases",
    ),
    of_remedies.less_than_a_mate_asks_for_is_named: partial(
        ranks.test_rank_is_told_of_no_less_than_another_asks_for, ranks.LEFT, ()
    ),
    of_remedies.what_lost_copies_keep_is_taken_for_room: (
        remedies.test_lease_that_comes_back_takes_anew_what_a_lost_copy_keeps
    ),
    of_remedies.key_that_a_lease_brings_back_is_counted_on: (
        remedies.test_lease_that_comes_back_may_lose_the_key_that_a_call_finds
    ),
    of_remedies.those_are_passed_who_no_longer_are: (
        remedies.test_call_that_room_is_made_for_comes_behind_those_that_limits_alone_had_kept
    ),
    of_remedies.prefix_that_leaves_is_taken_for_found: partial(
        remedies.test_wait_for_a_prefix_that_leaves_is_advised_only_if_it_is_found_below,
        is_on=False,
    ),
    of_remedies.first_key_is_taken_for_what_it_was: (
        remedies.test_fewer_keys_are_of_whose_blocks_are_the_first_by_then
    ),
    of_tiers.slot_that_is_not_taken_holds_up_the_others: (
        cleaning.test_slot_that_is_not_taken_does_not_hold_up_the_others
    ),
    of_tiers.damage_is_missed_while_a_lease_leaves: (
        disk.test_lease_stays_if_a_slot_that_it_shares_is_damaged_while_it_is_evicted
    ),
    of_tiers.tier_that_was_asked_is_taken_for_the_one_that_gave: (
        disk.test_tokens_whose_load_came_to_nothing_count_where_they_are_found_later
    ),
    of_turns.what_a_later_call_made_free_is_missed: (
        seating.test_call_gets_what_one_behind_it_made_free
    ),
    of_tiers.slot_of_another_tenant_hides_what_is_below: (
        tenant_acts.test_slots_under_stolen_keys_hide_nothing_from_their_owner
    ),
    of_tiers.what_others_have_is_not_asked_for: (
        tenant_acts.test_groups_ask_the_remote_store_alike_whether_another_tenant_has_the_keys_or_nobody
    ),
    of_tiers.store_that_pushes_blocks_out_serves_nobody: (
        cleaning.test_call_whose_state_leaves_the_disk_is_served_if_it_needs_less_now
    ),
}
"""The laws of the core that notice bugs that the simulation rarely finds."""

_THOROUGH: Final = 6
"""`make test` plays bugs of other systems and one in so many of the others; `make test-thorough` plays the rest."""


def _played() -> Iterator[object]:
    """Yield each seeded bug, marked by which run plays it."""
    for at, (name, mutation) in enumerate(MUTATIONS.items()):
        is_quick = name.startswith("M") or at % _THOROUGH == 0
        marks = () if is_quick else (pytest.mark.thorough,)
        yield pytest.param(name, mutation, id=name, marks=marks)


@pytest.mark.parametrize(("name", "mutation"), [*_played()])
def test_simulation_finds_seeded_bug(
    name: str,
    mutation: Mutation,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """A seeded bug breaks a law within a bounded number of simulated histories."""
    mutation(monkeypatch)

    known = KNOWN_SEEDS.get(name)
    if known is not None and not breaks_a_law(known):
        record_property("stale seed", f"{name}: {known}")
        known = None
    assert known is not None or any(breaks_a_law(seed) for seed in searched(name))


@pytest.mark.parametrize(
    ("mutation", "law"), _NOTICED_BY.items(), ids=[one.__name__ for one in _NOTICED_BY]
)
def test_law_of_the_core_notices_what_histories_seldom_show(
    mutation: Mutation, law: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded bug that takes the simulation too many histories to find breaks a law of the core that is about it."""
    law()

    mutation(monkeypatch)

    # A missing answer cannot be unpacked, and a missing refusal is not caught.
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        law()


def test_known_seeds_are_among_those_that_are_searched() -> None:
    """A known seed only saves the search that would come to it: it shows no bug that the search would not find."""
    beyond = [name for name, seed in KNOWN_SEEDS.items() if seed not in searched(name)]

    assert KNOWN_SEEDS.keys() <= MUTATIONS.keys()
    assert not beyond


@pytest.mark.parametrize(("name", "root"), NEAR.items(), ids=NEAR)
def test_exhaustive_search_finds_seeded_bug(
    name: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded bug that needs few steps is found, with the shortest path to it."""
    MUTATIONS[name](monkeypatch)

    found = search(TINY, ROOTS[root], depth=_DEPTH)

    assert found.violation
    assert len(found.path) <= len(ROOTS[root]) + _DEPTH
