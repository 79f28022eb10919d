"""Laws of the names of rows: what is remembered of a column of ids equals what a new look-up finds."""

from collections.abc import Callable

import numpy as np
import pytest

from kvlease.ids import LeaseId, WorkerId
from kvleased.core.lease.naming import Named, RowNames
from tests.unit.service.core.builders import MATE, WORKER

NUM_ROWS = 4
FIRST, SECOND = LeaseId(101), LeaseId(102)


class Table:
    """A table whose first two rows belong to a worker."""

    def __init__(self) -> None:
        self.lease_ids = np.zeros(NUM_ROWS, np.int64)
        self.names = RowNames(self.lease_ids)
        self.take(0, FIRST)
        self.take(1, SECOND)

    def take(self, row: int, lease_id: LeaseId, worker_id: WorkerId = WORKER) -> None:
        """Give a row to a lease, as its opening does."""
        self.lease_ids[row] = lease_id
        self.names.name(lease_id, row, worker_id)

    def leave(self, row: int) -> None:
        """Take a row from its lease, as its closing does."""
        self.lease_ids[row] = 0
        self.names.give(row, 0)

    def find(self, *lease_ids: LeaseId, worker_id: WorkerId = WORKER) -> Named:
        """Look a column of ids up."""
        return self.names.find(np.array(lease_ids, np.int64).tobytes(), worker_id)


def test_active_leases_of_the_worker_are_found_in_their_rows() -> None:
    """Each id names the row that its lease has."""
    named = Table().find(SECOND, FIRST)

    assert named.rows.tolist() == [1, 0]
    assert (named.are_active, named.are_distinct) == (True, True)
    assert named.is_active.tolist() == [True, True]


def test_same_column_is_looked_up_once() -> None:
    """While no row changes hands, a column's result is remembered."""
    table = Table()

    assert table.find(FIRST, SECOND) is table.find(FIRST, SECOND)


@pytest.mark.parametrize(
    ("change", "is_active"),
    [
        pytest.param(lambda table: table.leave(1), [True, False], id="released"),
        pytest.param(lambda table: table.names.give(1, 0), [True, False], id="not active"),
        pytest.param(lambda table: table.names.give(1, MATE), [True, False], id="another's"),
        pytest.param(lambda table: table.take(0, LeaseId(7)), [False, True], id="row taken"),
    ],
)
def test_column_is_looked_up_again_after_a_row_changed_hands(
    change: Callable[[Table], None], is_active: list[bool]
) -> None:
    """A result that was remembered before a row changed hands is not used after it."""
    table = Table()
    table.find(FIRST, SECOND)

    change(table)

    named = table.find(FIRST, SECOND)
    assert (named.is_active.tolist(), named.are_active) == (is_active, False)


def test_lease_that_came_later_is_found_where_nothing_was() -> None:
    """An id that named nothing is looked up again once a lease may have it."""
    table, third = Table(), LeaseId(103)
    table.find(third)

    table.take(2, third)

    assert table.find(third).rows.tolist() == [2]
    assert table.find(third).are_active


def test_another_worker_or_column_is_another_question() -> None:
    """A remembered result holds for its worker and its ids alone."""
    table = Table()
    table.find(FIRST, SECOND)

    assert not table.find(FIRST, SECOND, worker_id=MATE).is_active.any()
    assert table.find(SECOND, FIRST).rows.tolist() == [1, 0]


def test_row_that_is_named_twice_is_noticed() -> None:
    """The look-up tells whether a column names one lease twice."""
    table = Table()

    assert not table.find(FIRST, FIRST).are_distinct
    assert table.find(FIRST, SECOND).are_distinct


def test_older_lease_with_the_same_lower_bits_is_not_found() -> None:
    """Of two leases with the same lower bits, the younger one is found."""
    table = Table()
    younger = LeaseId(FIRST + (1 << 40))
    table.take(2, younger)

    assert table.find(FIRST, younger).is_active.tolist() == [False, True]


def test_names_are_sound_until_what_is_remembered_is_false() -> None:
    """The check compares what is remembered with what a new look-up finds."""
    table = Table()
    named = table.find(FIRST, SECOND)
    assert table.names.is_sound

    named.is_active[1] = False

    assert not table.names.is_sound
    table.leave(1)
    assert table.names.is_sound


def test_names_show_how_many_rows_have_a_worker() -> None:
    """The text says how full the table is."""
    assert repr(Table().names) == "<RowNames 2 of 4>"
