"""Laws of a worker's own rows: counts rule, a refusal changes nothing, and a write carries all changes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.rows import BlockRows
from kvlease.tables import NO_ROW

NUM_ROWS, WIDTH = 3, 4
ROW = st.integers(0, NUM_ROWS - 1)
IDS = st.lists(st.integers(1, 99), max_size=3)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ROW, IDS),
        st.tuples(st.just("append"), ROW, IDS),
        st.tuples(st.sampled_from(["move", "swap"]), ROW, ROW),
        st.tuples(st.just("clear"), ROW),
        st.tuples(st.just("write")),
    ),
    max_size=20,
)


def modelled(model: list[list[int]], act: str, row: int, other: Any = None) -> None:
    """Do to plain lists what an act does to rows."""
    if act == "add":
        model[row] = list(other)
    elif act == "append":
        model[row] = model[row] + list(other)
    elif act == "swap":
        model[row], model[other] = model[other], model[row]
    elif act == "clear":
        model[row] = []
    elif row != other:
        model[row], model[other] = [], model[row]


@given(ACTS)
def test_rows_are_lists_that_arrive_when_written(acts: list[tuple[Any, ...]]) -> None:
    """The counted ids are those of the lists at any time, and the written table has them after the last write."""
    rows, model = BlockRows(NUM_ROWS, WIDTH), [[] for _ in range(NUM_ROWS)]
    target = np.zeros((NUM_ROWS, WIDTH), np.int32)
    for act, *arguments in acts:
        if act == "write":
            rows.write(target)
            continue
        try:
            getattr(rows, act)(*arguments)
        except InvalidError as refusal:
            assert refusal.rule == "block_table_row_overflow"
        else:
            modelled(model, act, *arguments)
    rows.write(target)

    assert rows.num_blocks.tolist() == [len(ids) for ids in model]
    assert [ids[: len(m)].tolist() for ids, m in zip(target, model, strict=True)] == model
    assert rows.gather([2, NO_ROW, 0]).tolist() == [
        model[2] + [0] * (WIDTH - len(model[2])),
        [0] * WIDTH,
        model[0] + [0] * (WIDTH - len(model[0])),
    ]


def test_ids_beyond_the_count_are_left_over() -> None:
    """A shorter row does not clear the longer row before it."""
    rows = BlockRows(1, 4)
    rows.add(0, [1, 2, 3, 4])
    rows.add(0, [9])

    assert rows.block_ids.tolist() == [[9, 2, 3, 4]]
    assert rows.num_blocks.tolist() == [1]


@pytest.mark.parametrize("act", ["add", "append"])
def test_row_that_would_overflow_is_refused_and_left_alone(act: str) -> None:
    """The refusal names both numbers, and the row stays as it was."""
    rows = BlockRows(2, 2)
    rows.add(0, [7])
    before = repr(rows)

    with pytest.raises(InvalidError) as refusal:
        getattr(rows, act)(0, [1, 2, 3])

    assert refusal.value.rule == "block_table_row_overflow"
    assert (refusal.value.need, refusal.value.available) == ((4 if act == "append" else 3), 2)
    assert repr(rows) == before
    assert rows.block_ids.tolist() == [[7, 0], [0, 0]]


def test_write_copies_changed_rows_only() -> None:
    """A row without changes since the last write is not touched, and the next write has nothing to do."""
    rows, target = BlockRows(3, 1), np.full((3, 1), 5, np.int32)
    rows.add(1, [8])

    assert repr(rows) == "<BlockRows 1 of 3 rows in use, 1 staged>"
    assert rows.write(target) == 1
    assert rows.write(target) == 0
    assert target.tolist() == [[5], [8], [5]]


def test_table_of_another_shape_is_not_written() -> None:
    """Rows are only written into a table of their own shape."""
    with pytest.raises(InvalidError, match="shape"):
        BlockRows(3, 1).write(np.zeros((3, 2), np.int32))


@pytest.mark.parametrize(
    ("act", "arguments"),
    [
        ("add", (3, [])),
        ("append", (-1, [])),
        ("move", (0, 3)),
        ("swap", (3, 0)),
        ("clear", (-1,)),
        ("gather", ([0, 3],)),
        ("gather", ([-2],)),
    ],
)
def test_row_outside_the_table_is_refused(act: str, arguments: tuple[Any, ...]) -> None:
    """A row before the first one or behind the last is refused."""
    with pytest.raises(InvalidError) as refusal:
        getattr(BlockRows(3, 2), act)(*arguments)

    assert refusal.value.rule == "row_outside_table"


def test_step_of_no_real_request_gathers_zeros() -> None:
    """A request that only fills an engine's step has a row of zeros."""
    assert BlockRows(1, 2).gather([NO_ROW]).tolist() == [[0, 0]]
