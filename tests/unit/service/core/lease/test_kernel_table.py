"""Laws of the rows that kernels read: what is in them, and that no reader ever takes half a change."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.groups import GroupShape, Keeps, keeps_everything
from kvleased.core.blocks.records import NULL, KernelRows
from kvleased.core.lease.kernel_table import KernelTable

FULL = keeps_everything(16, 6)
WINDOW = GroupShape(
    keeps=Keeps.WINDOW,
    tokens_per_block=16,
    keys_per_block=1,
    table_blocks=5,
    max_blocks=3,
    kept_tokens=32,
    kernel_blocks_per_block=2,
    kernel_block_stride=3,
)
STATE = GroupShape(
    keeps=Keeps.STATE, tokens_per_block=32, keys_per_block=2, table_blocks=4, max_blocks=2
)
NUM_ROWS = 4


def a_table(*groups: GroupShape) -> KernelTable:
    """Return a table in ordinary memory, with arbitrary values where nothing is published."""
    width = sum(group.table_blocks * group.kernel_blocks_per_block for group in groups)
    rows = KernelRows.plain(NUM_ROWS, len(groups), width)
    rows.kernel_ids[:] = 99
    return KernelTable(rows, groups)


def ints(*numbers: int) -> np.ndarray:
    """Return an array of block ids."""
    return np.array(numbers, np.intp)


def read(table: KernelTable, row: int, groups: tuple[GroupShape, ...]) -> list[list[int]]:
    """Return the published part of a row, group by group."""
    found, first = [], 0
    for group, count in zip(groups, table.rows.num_published[row], strict=True):
        found.append(table.rows.kernel_ids[row, first : first + count].tolist())
        first += group.table_blocks * group.kernel_blocks_per_block
    return found


def expanded(group: GroupShape, ids: list[int]) -> list[int]:
    """Return kernel ids, one by one."""
    return [
        max(block, 0) * group.kernel_block_stride + part
        for block in ids
        for part in range(group.kernel_blocks_per_block)
    ]


def test_published_row_counts_blocks_as_kernels_do() -> None:
    """Block b reads as the kernel blocks b*m … b*m + n-1, and a place that needs no block as block 0."""
    table = a_table(FULL, WINDOW)

    table.publish(1, [ints(4, 2), ints(NULL, 3)])

    assert read(table, 1, (FULL, WINDOW)) == [[4, 2], [0, 1, 9, 10]]
    assert table.published(np.arange(NUM_ROWS)).tolist() == [False, True, False, False]
    assert (table.is_published(1), table.is_published(0)) == (True, False)
    assert repr(table) == "<KernelTable 1 of 4 rows published>"


def test_table_is_used_once_a_row_was_published() -> None:
    """The table need be told of blocks only once a row has been published, be it in an earlier life."""
    table = a_table(FULL)
    before = table.is_used

    table.publish(1, [ints(7)])

    assert (before, table.is_used, KernelTable(table.rows, (FULL,)).is_used) == (False, True, True)


def test_published_row_grows_where_it_is_told() -> None:
    """Appended places follow the present ones of their group, and those of other groups stay."""
    table = a_table(FULL, WINDOW)
    table.publish(2, [ints(4), ints(NULL, 3)])

    table.append(2, 1, 2, ints(5, NULL))
    table.append(2, 0, 1, ints(7))

    assert read(table, 2, (FULL, WINDOW)) == [[4, 7], [0, 1, 9, 10, 15, 16, 0, 1]]


def test_places_given_back_read_as_block_0() -> None:
    """Places that a lease gives back are no longer read, and the others stay."""
    table = a_table(FULL, WINDOW)
    table.publish(0, [ints(4), ints(1, 2, 3)])

    table.give_back(0, 1, 0, 2)

    assert read(table, 0, (FULL, WINDOW)) == [[4], [0, 1, 0, 1, 9, 10]]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda table: table.append(0, 0, 0, ints(1)), id="append"),
        pytest.param(lambda table: table.give_back(0, 0, 0, 1), id="give_back"),
        pytest.param(lambda table: table.give_back(1, 0, 1, 1), id="give_back_nothing"),
        pytest.param(lambda table: table.clear(0), id="clear"),
        pytest.param(
            lambda table: table.append_many(ints(0), ints(0)[:, None], ints(1)[:, None], ints(1)),
            id="append_many",
        ),
    ],
)
def test_unpublished_row_is_left_alone(change: Callable[[KernelTable], None]) -> None:
    """Only `publish` lets kernels read a row; until then nothing in the table changes."""
    table = a_table(FULL)
    table.publish(1, [ints(5)])
    before = [column.copy() for column in (table.rows.sequence, table.rows.kernel_ids)]

    change(table)

    assert np.array_equal(before[0], table.rows.sequence)
    assert np.array_equal(before[1], table.rows.kernel_ids)
    assert not table.is_published(0)


@given(st.data())
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param((FULL,), id="one"),
        pytest.param((WINDOW,), id="parts"),
        pytest.param((FULL, STATE), id="plain"),
        pytest.param((STATE, WINDOW, FULL), id="all"),
    ],
)
def test_step_appends_as_single_appends_do(
    groups: tuple[GroupShape, ...], data: st.DataObject
) -> None:
    """Appends to many rows at once have the same result as one append after another, published or not."""
    one_by_one, at_once = a_table(*groups), a_table(*groups)
    rows = data.draw(st.lists(st.integers(0, NUM_ROWS - 1), unique=True))
    starts = np.zeros((len(rows), len(groups)), np.intp)
    counts, added = starts.copy(), []
    for at, row in enumerate(rows):
        parts = [data.draw(places(group, group.table_blocks // 2)) for group in groups]
        starts[at] = [len(part) for part in parts]
        if data.draw(st.booleans()):
            one_by_one.publish(row, parts)
            at_once.publish(row, parts)
        for index, group in enumerate(groups):
            ids = data.draw(places(group, group.table_blocks // 2))
            counts[at, index] = len(ids)
            added.extend(ids.tolist())
            if one_by_one.is_published(row):
                one_by_one.append(row, index, int(starts[at, index]), ids)

    at_once.append_many(np.array(rows, np.intp), starts, counts, ints(*added))

    assert np.array_equal(one_by_one.rows.num_published, at_once.rows.num_published)
    assert np.array_equal(one_by_one.rows.kernel_ids, at_once.rows.kernel_ids)
    assert not (at_once.rows.sequence & 1).any()


def places(group: GroupShape, most: int) -> st.SearchStrategy[np.ndarray]:
    """Draw block ids, and NULL in groups that may have it."""
    least = NULL if group.gives_back else 0
    return st.lists(st.integers(least, 50), max_size=most).map(lambda ids: ints(*ids))


class _Watched(np.ndarray):
    """A column that notes the sequence numbers at which it is written."""

    sequence: np.ndarray
    seen: list[int]

    def __setitem__(self, key: object, value: object) -> None:
        self.seen.extend(np.atleast_1d(self.sequence[1]).tolist())
        super().__setitem__(key, value)  # type: ignore[call-overload]  # whatever numpy takes


def watched(table: KernelTable) -> list[int]:
    """Return the sequence numbers that row 1 has at each later write of its ids or counts."""
    seen: list[int] = []
    columns = {}
    for name in ("kernel_ids", "num_published"):
        column = getattr(table.rows, name).view(_Watched)
        column.sequence, column.seen = table.rows.sequence, seen
        columns[name] = column
    table.rows = KernelRows(sequence=table.rows.sequence, **columns)
    return seen


@pytest.mark.parametrize("start", [0, 1, 6, 2**32 - 2, 2**32 - 1])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda table: table.publish(1, [ints(5, 6)]), id="publish"),
        pytest.param(lambda table: table.append(1, 0, 1, ints(7)), id="append"),
        pytest.param(
            lambda table: table.append_many(ints(1), ints(1)[:, None], ints(1)[:, None], ints(7)),
            id="append_many",
        ),
        pytest.param(lambda table: table.clear(1), id="clear"),
        pytest.param(lambda table: table.reset(ints(1)), id="reset"),
    ],
)
def test_row_is_written_at_odd_numbers_only(
    start: int, change: Callable[[KernelTable], None]
) -> None:
    """A change begins with an odd number and ends at the next even one, even after a crash and at the last number."""
    table = a_table(FULL)
    table.publish(1, [ints(5)])
    table.rows.sequence[1] = start
    seen = watched(table)

    change(table)

    assert set(seen) == {start | 1}
    assert table.rows.sequence[1] == ((start | 1) + 1) % 2**32


def test_row_given_back_to_is_written_at_an_odd_number() -> None:
    """Places are given back under an odd number, like any other change."""
    table = a_table(FULL)
    table.publish(1, [ints(5, 6)])

    table.give_back(1, 0, 0, 1)

    assert (table.rows.sequence[1], read(table, 1, (FULL,))) == (4, [[0, 6]])


def test_cleared_row_shows_nothing() -> None:
    """Kernels read nothing of a row that is cleared or reset, and other rows stay."""
    table = a_table(FULL, STATE)
    for row in (0, 1, 2):
        table.publish(row, [ints(5), ints(6)])

    table.clear(0)
    assert table.published(ints(0, 1)).tolist() == [False, True]
    table.reset(ints(0, 1, 3))
    assert table.published(np.arange(NUM_ROWS)).tolist() == [False, False, True, False]
    table.publish(1, [ints(3), ints()])
    assert read(table, 1, (FULL, STATE)) == [[3], []]


def test_clear_ends_a_change_that_a_crash_cut_off() -> None:
    """A clear makes a row readable whose number is odd, and in which nothing is published."""
    table = a_table(FULL)
    table.rows.sequence[2] = 7

    table.clear(2)

    assert table.rows.sequence[2] == 8
