"""Laws of reading the block table: a worker reads whole rows of its own leases, and a step's tables and slots."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvlease.errors import InvalidError, UnavailableError, UnknownLeaseError, WrongStateError
from kvlease.groups import GroupShape, Keeps, keeps_everything
from kvlease.slots import TokenRuns, run_slots
from kvlease.tables import NO_ROW, RowTable, TableLayout, TablePart
from kvleased.core.blocks.records import NULL, KernelRows
from kvleased.core.lease.kernel_table import KernelTable

FULL = keeps_everything(16, 3)
WINDOW = GroupShape(
    keeps=Keeps.WINDOW,
    tokens_per_block=16,
    keys_per_block=1,
    table_blocks=3,
    max_blocks=3,
    kept_tokens=32,
    kernel_blocks_per_block=2,
    kernel_block_stride=5,
)


class Table:
    """A table at both ends: the daemon writes it, and a worker reads it."""

    def __init__(self, *groups: GroupShape, num_rows: int = 4) -> None:
        """Lay out an empty table."""
        layout = TableLayout(num_rows, tuple(part_of(group) for group in groups))
        region = bytearray(layout.region_bytes)
        self.columns = layout.columns(region)
        names = ("sequence", "num_published", "kernel_ids")
        self.written = KernelTable(KernelRows(**{n: self.columns[n] for n in names}), groups)
        self.rows = RowTable(layout, memoryview(region).toreadonly())

    def publish(self, row: int, lease_id: int, *parts: list[int]) -> None:
        """Give a row to a lease and show its blocks."""
        self.columns["lease_id"][row] = lease_id
        self.written.publish(row, [np.array(part, np.intp) for part in parts])


def part_of(group: GroupShape) -> TablePart:
    """Return a group's part of a row."""
    return TablePart(
        num_places=group.table_blocks,
        kernel_blocks_per_block=group.kernel_blocks_per_block,
        kernel_block_stride=group.kernel_block_stride,
    )


def test_row_shows_what_is_published() -> None:
    """Once blocks are published, a reader sees those of each group, as kernels and as plans count them."""
    it = Table(FULL, WINDOW)

    it.publish(2, 99, [5, 6], [NULL, 3])

    assert it.rows.kernel_ids(2, 99).tolist() == it.rows.block_ids(2, 99).tolist() == [5, 6]
    assert it.rows.kernel_ids(2, 99, 1).tolist() == [0, 1, 15, 16]
    assert it.rows.block_ids(2, 99, 1).tolist() == [0, 3]


@pytest.mark.parametrize("group", [0, 1])
def test_row_that_is_not_mapped_is_not_served(group: int) -> None:
    """A lease that is not mapped has no blocks for kernels and is refused: zeros would be somebody's block 0."""
    it = Table(FULL, WINDOW)
    it.publish(0, 98, [5], [1])
    it.columns["lease_id"][2] = 99

    for read in (it.rows.gather, it.rows.gather_blocks):
        with pytest.raises(WrongStateError, match="lease 99 is not mapped: map it") as refusal:
            read([NO_ROW, 0, 2], [0, 98, 99], group, width=6)
        assert refusal.value.rule == "row_not_mapped"
    with pytest.raises(WrongStateError):
        it.rows.kernel_ids(2, 99, group)
    it.publish(2, 99, [7], [])
    assert it.rows.block_ids(2, 99, group).tolist() == [[7], []][group]
    it.written.clear(2)
    with pytest.raises(WrongStateError):
        it.rows.block_ids(2, 99, group)


def test_copy_outlives_what_is_written_later() -> None:
    """What a reader has copied does not change."""
    it = Table(FULL)
    it.publish(0, 1, [5, 6])
    ids = it.rows.kernel_ids(0, 1)

    it.publish(0, 1, [7])

    assert (ids.tolist(), ids.dtype.name) == ([5, 6], "int32")


@pytest.mark.parametrize(("row", "lease_id"), [(1, 8), (0, 7), (4, 7), (-3, 7), (NO_ROW, 7)])
def test_row_of_another_lease_is_not_served(row: int, lease_id: int) -> None:
    """A row's ids go only to the lease that has the row, and no row outside the table is read."""
    it = Table(FULL)
    it.publish(1, 7, [5])

    for read in (it.rows.block_ids, it.rows.kernel_ids):
        with pytest.raises(UnknownLeaseError):
            read(row, lease_id)


class _Passing(np.ndarray):
    """Lease ids of a table in which a row changes hands after two looks."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:  # Whatever numpy takes and gives.
        self.looks += 1
        found = np.asarray(self)[key]
        return found if self.looks <= 2 else np.zeros_like(found)


def test_row_that_changes_hands_while_read_is_not_served() -> None:
    """A copied row is thrown away unless the lease id is still the same afterwards."""
    it = Table(FULL)
    it.publish(1, 7, [5])
    it.rows._lease_ids = it.columns["lease_id"].view(_Passing)

    with pytest.raises(UnknownLeaseError):
        it.rows.kernel_ids(1, 7)


def test_step_has_a_table_for_each_group() -> None:
    """A step's requests come in order, each with its ids and then zeros; one without a row has only zeros."""
    it = Table(FULL, WINDOW)
    it.publish(3, 30, [5, 6, 7], [1])
    it.publish(1, 10, [8], [NULL, 2])
    rows, leases = [1, NO_ROW, 3], [10, 0, 30]

    assert it.rows.gather(rows, leases).tolist() == [[8, 0, 0], [0, 0, 0], [5, 6, 7]]
    assert it.rows.gather(rows, leases, 1, width=6).tolist() == [
        [0, 1, 10, 11, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [5, 6, 0, 0, 0, 0],
    ]
    assert it.rows.gather_blocks(rows, leases, 1, width=2).tolist() == [[0, 2], [0, 0], [1, 0]]


@pytest.mark.parametrize("rows", [[], [NO_ROW]])
def test_step_without_requests_has_an_empty_table(rows: list[int]) -> None:
    """A table has as many rows as there are requests, even none, and the width that was asked for."""
    it = Table(FULL)

    assert it.rows.gather(rows, [0] * len(rows)).shape == (len(rows), 0)
    assert it.rows.gather(rows, [0] * len(rows), width=5).tolist() == [[0] * 5] * len(rows)


def test_slots_of_a_step_come_from_its_table() -> None:
    """A worker finds each token's place without a call: slot = block id * tokens per block + place in the block."""
    it = Table(FULL, WINDOW)
    it.publish(3, 30, [5, 6, 7], [NULL, 4])
    it.publish(1, 10, [8], [2])
    runs = TokenRuns(rows=[0, 1], first_positions=[14, 17], num_tokens=[2, 1])

    slots = [
        run_slots(
            it.rows.gather_blocks([1, 3], [10, 30], group), runs, tokens_per_block=16
        ).tolist()
        for group in (0, 1)
    ]

    assert slots == [[8 * 16 + 14, 8 * 16 + 15, 6 * 16 + 1], [2 * 16 + 14, 2 * 16 + 15, 4 * 16 + 1]]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        pytest.param({"group": 1}, "no_such_group", id="group"),
        pytest.param({"group": -1}, "no_such_group", id="negative_group"),
        pytest.param({"width": 1}, "block_table_row_overflow", id="width"),
        pytest.param({"rows": [1, 1]}, "rows_without_leases", id="rows"),
        pytest.param({"rows": [1.5]}, "not_whole_numbers", id="half_a_row"),
        pytest.param({"lease_ids": ["7"]}, "not_whole_numbers", id="lease_id"),
        pytest.param({"width": -1}, None, id="negative_width"),
        pytest.param({"group": None}, "wrong_type", id="no_group"),
        pytest.param({"group": False}, "wrong_type", id="group_of_truth"),
        pytest.param({"group": "0"}, "wrong_type", id="group_in_words"),
    ],
)
def test_table_that_cannot_be_is_refused(arguments: dict[str, Any], rule: str | None) -> None:
    """A table that would be cut off is refused, and the refusal names the rule."""
    it = Table(FULL)
    it.publish(1, 7, [5, 6])

    with pytest.raises(InvalidError) as refusal:
        it.rows.gather(**{"rows": [1], "lease_ids": [7]} | arguments)

    assert refusal.value.rule == rule


class _Written(np.ndarray):
    """Sequence numbers by which row 1 is being written for some looks; then it has one block more."""

    table: Table
    looks = 0
    looks_max = 0

    def __getitem__(self, key: Any) -> Any:  # Whatever numpy takes and gives.
        self.looks += 1
        if self.looks == self.looks_max:
            self.table.publish(1, 7, [5, 6, 7])
        return np.asarray(self)[key]


@pytest.mark.parametrize("looks_max", [1, 2, 3, 202, 205])
def test_row_that_is_being_written_is_read_again(looks_max: int) -> None:
    """A reader waits for the end of a change, with or without pauses, and takes other rows as they are."""
    it = Table(FULL)
    it.publish(0, 4, [9])
    it.publish(1, 7, [5])
    it.columns["sequence"][1] |= looks_max > 2
    watched = it.columns["sequence"].view(_Written)
    watched.table, watched.looks_max = it, looks_max
    it.rows._sequence = watched

    assert it.rows.gather([0, 1], [4, 7], width=3).tolist() == [[9, 0, 0], [5, 6, 7]]


def test_row_that_stays_half_written_is_not_served() -> None:
    """If the daemon was killed in the middle of a change, the row is refused until it is written again."""
    it = Table(FULL)
    it.publish(1, 7, [5])
    it.columns["sequence"][1] += 1

    with pytest.raises(UnavailableError) as refusal:
        it.rows.kernel_ids(1, 7)

    assert (refusal.value.rule, refusal.value.retryable) == ("row_being_written", True)
    it.publish(1, 7, [6])
    assert it.rows.kernel_ids(1, 7).tolist() == [6]


def test_kernel_ids_of_groups_follow_each_other() -> None:
    """A group's kernel ids start where the ids of the group before it end."""
    layout = TableLayout(2, (part_of(WINDOW), part_of(FULL), part_of(WINDOW)))

    assert layout.kernel_firsts == [0, 6, 9]


def test_repr_shows_rows_in_use() -> None:
    """The repr counts the rows that have a lease."""
    it = Table(FULL)
    it.columns["lease_id"][:2] = 1

    assert repr(it.rows) == "<RowTable 2 of 4 rows in use>"


NUM_ROWS, WIDTH = 16, 64
LAYOUT = TableLayout(NUM_ROWS, (TablePart(num_places=WIDTH),) * 2)
WRITER = f"""
import mmap, sys
import numpy as np
from kvlease.tables import TableLayout, TablePart
from kvlease.groups import keeps_everything
from kvleased.core.lease.kernel_table import KernelTable
from kvleased.core.blocks.records import KernelRows

layout = TableLayout({NUM_ROWS}, (TablePart(num_places={WIDTH}),) * 2)
columns = layout.columns(mmap.mmap(int(sys.argv[1]), layout.region_bytes))
names = ("sequence", "num_published", "kernel_ids")
groups = [keeps_everything(16, {WIDTH})] * 2
table = KernelTable(KernelRows(**{{name: columns[name] for name in names}}), groups)
parts = [np.full(1 + number % {WIDTH}, number) for number in range(1000)]
columns["lease_id"][:] = np.arange({NUM_ROWS}) + 1
for number in range(10**9):
    part = parts[number % 1000]
    table.publish(number % {NUM_ROWS}, [part, part])
    if number == {NUM_ROWS}:
        print("begun", flush=True)
"""


@pytest.fixture
def hot_table() -> Iterator[RowTable]:
    """Give a table that another process rewrites all the time."""
    fd = os.memfd_create("tables", os.MFD_CLOEXEC)
    os.ftruncate(fd, LAYOUT.region_bytes)
    with subprocess.Popen(  # Our own interpreter.
        [sys.executable, "-c", WRITER, str(fd)], stdout=subprocess.PIPE, pass_fds=[fd]
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        yield RowTable(LAYOUT, memoryview(mmap.mmap(fd, LAYOUT.region_bytes, prot=mmap.PROT_READ)))
        assert writer.poll() is None
        writer.kill()
    os.close(fd)


def test_reader_never_sees_half_a_change(hot_table: RowTable) -> None:
    """While another process rewrites the rows, each copy has exactly the length and ids that one change wrote."""
    rows, leases = list(range(NUM_ROWS)), list(range(1, NUM_ROWS + 1))
    seen: set[int] = set()

    for attempt in range(2000):
        row = attempt % NUM_ROWS
        try:
            table = hot_table.gather(rows, leases, attempt % 2)
            one = hot_table.kernel_ids(row, row + 1)
        except UnavailableError:
            continue  # The writer was paused in the middle of a row: no answer is better than half a row.
        copies = [ids[: np.count_nonzero(ids)] for ids in table if ids.any()]
        for ids in (one, *copies):
            number = int(ids[0])
            assert ids.tolist() == [number] * (1 + number % WIDTH)
            seen.add(number)

    assert len(seen) > 1


@pytest.mark.parametrize("row", [None, 1.5, "1", 2**64, [1, 2]])
def test_row_that_is_no_number_is_refused(row: Any) -> None:
    """A row or a lease that is no number is refused, whatever it is."""
    it = Table(FULL)
    it.publish(1, 7, [5, 6])

    for read in (it.rows.kernel_ids, it.rows.block_ids):
        with pytest.raises(InvalidError):
            read(row, 7)
        with pytest.raises(InvalidError):
            read(1, row)


def test_width_in_blocks_that_is_no_number_is_refused() -> None:
    """The width of a table in block ids is checked as that of one in kernel blocks."""
    it = Table(FULL)

    with pytest.raises(InvalidError, match="width must be an integer"):
        it.rows.gather_blocks([], [], width={})  # type: ignore[arg-type]  # the mistake


def test_numbers_of_numpy_are_numbers() -> None:
    """A row, a lease and a group may be numbers of NumPy."""
    it = Table(FULL)
    it.publish(1, 7, [5, 6])

    assert it.rows.block_ids(np.int32(1), np.int64(7), np.int8(0)).tolist() == [5, 6]  # type: ignore[arg-type]
