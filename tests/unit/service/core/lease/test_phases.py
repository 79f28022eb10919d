"""Laws of the table of phases: the transitions that it has are made, and no others."""

from itertools import product

import numpy as np
import pytest

from kvlease.ids import LeaseId, WorkerId
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.lease.phases import AFTER_RESTART, PHASE_TRANSITIONS, Phase
from kvleased.core.state import CacheState
from tests.unit.service.core.builders import EPOCH, SHAPE

LIVING = [phase for phase in Phase if phase is not Phase.UNUSED]
PAIRS = [
    pytest.param(before, after, id=f"{before.name} {after.name}")
    for before, after in product(LIVING, LIVING)
]
BLOCKS: Ids = np.array([1, 2])


def a_lease(phase: Phase) -> Lease:
    """Return a lease in a phase."""
    return Lease(
        lease_id=LeaseId(1),
        worker_id=WorkerId(1),
        tenant=7,
        request=None,
        row=0,
        phase=phase,
        deadline=0.0,
        moving_to=NOWHERE,
    )


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_lease_enters_only_a_phase_that_follows(before: Phase, after: Phase) -> None:
    """A lease enters a phase, together with its row, if the table allows it, and otherwise stays where it is."""
    book = CacheState.fresh(SHAPE, EPOCH).leases
    lease = a_lease(before)
    book.rows.phase[0] = before
    may = after in PHASE_TRANSITIONS[before]

    if may:
        book.enter(lease, after)
    else:
        with pytest.raises(AssertionError, match=f"{after.name} after {before.name}"):
            book.enter(lease, after)

    assert lease.phase == book.rows.phase[0] == (after if may else before)


@pytest.mark.parametrize("phase", LIVING, ids=lambda phase: phase.name)
def test_lease_opens_only_in_a_phase_that_begins(phase: Phase) -> None:
    """A lease opens only in a phase in which the table lets leases begin."""
    book = CacheState.fresh(SHAPE, EPOCH).leases
    may = phase in PHASE_TRANSITIONS[Phase.UNUSED]

    if may:
        book.open(a_lease(phase), "request", [(BLOCKS,)], 8, 0)
    else:
        with pytest.raises(AssertionError, match=f"no lease begins as {phase.name}"):
            book.open(a_lease(phase), "request", [(BLOCKS,)], 8, 0)

    assert len(book) == may


def test_every_phase_can_be_reached_and_ended() -> None:
    """Every phase can be reached from the beginning, and may end at once."""
    reached = {Phase.UNUSED}
    for _ in Phase:
        reached |= {after for before in reached for after in PHASE_TRANSITIONS[before]}

    assert reached == set(Phase)
    assert all(Phase.UNUSED in PHASE_TRANSITIONS[phase] for phase in LIVING)


def test_restart_leaves_no_lease_on_its_way() -> None:
    """After a restart a lease is in the phase where its bytes certainly are: no copy outlives the control process."""
    assert set(AFTER_RESTART.values()) == {Phase.ACTIVE, Phase.EVICTED}
    assert set(LIVING) - set(AFTER_RESTART) == {Phase.LOADING}
