"""Laws of the two tables of transitions: the transitions that they have are made, and no others."""

from itertools import product

import numpy as np
import pytest

from kvleased.core.blocks.states import (
    BLOCK_TRANSITIONS,
    SLOT_TRANSITIONS,
    Event,
    State,
    Transitions,
    advance,
    by_state,
    compile_transitions,
)
from tests.unit.service.core.builders import as_ids

TABLES = {"block": BLOCK_TRANSITIONS, "slot": SLOT_TRANSITIONS}
ALLOWED = [
    pytest.param(table, before, event, after, id=f"{name} {before.name} {event.name}")
    for name, table in TABLES.items()
    for before, events in table.items()
    for event, after in events.items()
]
REFUSED = [
    pytest.param(table, before, event, id=f"{name} {before.name} {event.name}")
    for name, table in TABLES.items()
    for before, event in product(State, Event)
    if event not in table[before]
]


@pytest.mark.parametrize(("table", "before", "event", "after"), ALLOWED)
def test_allowed_transition_is_made(
    table: Transitions, before: State, event: Event, after: State
) -> None:
    """A transition in the table is made for just the named entries."""
    states = np.full(3, before, np.uint8)

    advance(compile_transitions(table), states, as_ids([0, 2]), event)

    assert states.tolist() == [after, before, after]


@pytest.mark.parametrize(("table", "before", "event"), REFUSED)
def test_other_transition_is_refused(table: Transitions, before: State, event: Event) -> None:
    """A transition that the table lacks is noticed as our own mistake, and changes nothing."""
    states = np.full(2, before, np.uint8)

    with pytest.raises(AssertionError, match=event.name):
        advance(compile_transitions(table), states, as_ids([1]), event)

    assert states.tolist() == [before, before]


def test_one_illegal_entry_refuses_all() -> None:
    """A transition is made for all entries or for none."""
    states = np.array([State.FREE, State.READY], np.uint8)

    with pytest.raises(AssertionError):
        advance(
            compile_transitions(BLOCK_TRANSITIONS),
            states,
            as_ids([0, 1]),
            Event.GRANT,
        )

    assert states.tolist() == [State.FREE, State.READY]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_table_tells_of_every_state(table: Transitions) -> None:
    """A table has every state, and a retired block stays retired, unless its store is replaced."""
    assert set(table) == set(State)
    assert set(table[State.BAD]) <= {Event.FORGET}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_time_alone_frees_nothing(table: Transitions) -> None:
    """A block leaves quarantine by its owner's word or by proof, never by time alone."""
    ways_out = set(table[State.QUARANTINED])

    assert ways_out <= {Event.COMMIT, Event.REVIVE, Event.PROVE}


def test_only_a_granted_block_is_committed() -> None:
    """A commit makes only those blocks findable that were granted before."""
    committed_from = {
        before for before, events in BLOCK_TRANSITIONS.items() if Event.COMMIT in events
    }

    assert committed_from == {State.RESERVED, State.QUARANTINED}


@pytest.mark.parametrize(
    "states",
    [
        pytest.param([], id="none"),
        pytest.param([3, 3, 3], id="one"),
        pytest.param([3, 3, 1], id="one behind the other"),
        pytest.param([1, 3, 3, 1, 4], id="mixed"),
    ],
)
def test_each_state_is_found_with_all_that_are_in_it(states: list[int]) -> None:
    """Each entry is listed once, under its state and in order."""
    found = by_state(np.array(states, np.uint8))

    assert {state: np.arange(len(states))[where].tolist() for state, where in found} == {
        state: [at for at, one in enumerate(states) if one == state] for state in states
    }
    assert len(found) == len(set(states))
