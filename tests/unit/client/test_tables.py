"""Laws of columns in shared memory, and of block ids as kernels count them."""

import itertools
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.columns import ColumnLayout
from kvlease.errors import InvalidError
from kvlease.tables import (
    ROW_COLUMNS,
    TableLayout,
    TablePart,
    kernel_block_ids,
    table_width,
    token_slots,
)
from kvleased.core.blocks import records


def test_row_columns_are_those_of_the_daemon() -> None:
    """The daemon and the client lay out the same columns in the same order."""
    assert ROW_COLUMNS == records.ROW_COLUMNS


@given(st.integers(0, 40), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 3))
def test_columns_fill_the_region_aligned_and_apart(
    num_rows: int, widths: list[int], kernel_blocks: int
) -> None:
    """Columns start on cache lines, do not overlap, and end inside the region."""
    parts = [TablePart(num_places=width, kernel_blocks_per_block=kernel_blocks) for width in widths]
    layout = TableLayout(num_rows, tuple(parts))
    with mmap.mmap(-1, layout.region_bytes + 1) as region:
        columns = layout.columns(memoryview(region))
        start = np.frombuffer(region, np.uint8).ctypes.data
        spans = sorted(
            (column.ctypes.data - start, column.nbytes)
            for column in columns.values()
            if column.nbytes
        )
        del columns

    assert all(offset % 64 == 0 for offset, _ in spans)
    assert all(offset + held <= after for (offset, held), (after, _) in itertools.pairwise(spans))
    assert sum(max(spans, default=(0, 0))) <= layout.region_bytes


@pytest.mark.parametrize("num_places", [0, 1, 2])
def test_what_groups_have_is_always_a_matrix(num_places: int) -> None:
    """A table of one group is read like any other, also if each row is a single block."""
    layout = TableLayout(4, (TablePart(num_places=num_places, kernel_blocks_per_block=2),))
    columns = layout.columns(bytes(layout.region_bytes))

    assert columns["block_ids"].shape == (4, num_places)
    assert columns["kernel_ids"].shape == (4, 2 * num_places)
    assert columns["num_blocks"].shape == columns["num_published"].shape == (4, 1)
    assert columns["lease_id"].shape == columns["sequence"].shape == (4,)


def test_layouts_follow_each_other_in_one_region() -> None:
    """Several layouts share a region if each starts where the one before it ends."""
    layout = ColumnLayout((("a", np.uint8, 1), ("b", np.uint64, 2)), 3)
    region = np.zeros(2 * layout.region_bytes, np.uint8)
    first, second = layout.columns(region), layout.columns(region, layout.region_bytes)
    first["a"][:] = 1
    second["b"][:] = 2

    assert layout.columns(region)["a"].tolist() == [1, 1, 1]
    assert not first["b"].any()
    assert second["b"].shape == (3, 2)


def test_short_region_is_refused() -> None:
    """No column is laid beyond the end of a region."""
    layout = TableLayout(4, (TablePart(num_places=3),))

    with pytest.raises(InvalidError) as refusal:
        layout.columns(bytes(layout.region_bytes - 1))

    assert refusal.value.need == layout.region_bytes


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(1, 8))
def test_kernel_blocks_lie_in_their_blocks(ids: list[int], per_block: int) -> None:
    """Block b consists of the kernel blocks b*n … b*n + n-1, in order."""
    expanded = kernel_block_ids(np.array(ids, np.int32), per_block)

    assert expanded.tolist() == [b * per_block + inner for b in ids for inner in range(per_block)]


def test_kernel_blocks_of_a_packed_cache_skip_what_lies_between() -> None:
    """With a stride of 17, blocks 0 and 9 of four kernel blocks start at 0 and 153; table rows expand alike."""
    expanded = kernel_block_ids([[0, 9], [1, 0]], 4, 17)

    assert expanded.dtype == np.int32
    assert expanded.tolist() == [
        [0, 1, 2, 3, 153, 154, 155, 156],
        [17, 18, 19, 20, 0, 1, 2, 3],
    ]


def test_kernel_block_beyond_the_ids_is_refused() -> None:
    """An id that int32 cannot hold is refused; the largest that it can hold is made."""
    assert kernel_block_ids([2**30 - 1], 2).tolist() == [2**31 - 2, 2**31 - 1]
    with pytest.raises(InvalidError) as refusal:
        kernel_block_ids([2**30], 2)

    assert refusal.value.rule == "kernel_block_id_too_large"
    assert (refusal.value.need, refusal.value.limit) == (2**31 + 1, 2**31 - 1)


@given(st.integers(0, 2000), st.integers(1, 600), st.integers(1, 256))
def test_table_is_as_wide_as_whole_stretches_of_tokens(
    num_blocks: int, tokens_per_block: int, token_alignment: int
) -> None:
    """A row ends at a multiple of the alignment, and no narrower row of that kind holds the blocks."""
    width = table_width(num_blocks, tokens_per_block, token_alignment)

    assert width * tokens_per_block % token_alignment == 0
    assert not [
        narrower
        for narrower in range(num_blocks, width)
        if narrower * tokens_per_block % token_alignment == 0
    ]


def test_table_without_alignment_is_as_wide_as_its_blocks() -> None:
    """A table without an alignment is as wide as its blocks."""
    assert table_width(7, 16, None) == 7


@pytest.mark.parametrize("token_alignment", [0, -128])
def test_alignment_that_is_not_positive_is_refused(token_alignment: int) -> None:
    """An alignment that is not positive is refused, and the refusal names it."""
    with pytest.raises(InvalidError) as refusal:
        table_width(7, 16, token_alignment)

    assert (refusal.value.rule, refusal.value.need) == ("bad_token_alignment", token_alignment)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 16), st.data())
def test_slot_is_the_place_in_the_positions_block(
    ids: list[int], per_block: int, data: st.DataObject
) -> None:
    """Position p lies in block ids[p // n], at p % n."""
    positions = data.draw(st.lists(st.integers(0, len(ids) * per_block - 1)))

    slots = token_slots(np.array(ids, np.int32), positions, per_block)

    assert slots.tolist() == [ids[p // per_block] * per_block + p % per_block for p in positions]


@pytest.mark.parametrize("position", [-1, 8])
def test_position_outside_the_blocks_is_refused(position: int) -> None:
    """No position is looked up outside the blocks that cover the tokens."""
    with pytest.raises(InvalidError):
        token_slots(np.array([3, 4], np.int32), [0, position], 4)


@pytest.mark.parametrize(
    "ids", [[1.5], ["1"], [None], [True], 3, [[1], [1, 2]], [2**70], np.array([2**63], np.uint64)]
)
def test_what_is_no_whole_number_is_refused(ids: Any) -> None:
    """A number that is not whole is refused: none is rounded, cut off or read out of a text."""
    for ask in (lambda: kernel_block_ids(ids, 2), lambda: token_slots(ids, [0], 2)):
        with pytest.raises(InvalidError) as refusal:
            ask()

        assert (refusal.value.resource, refusal.value.rule) == ("block_ids", "not_whole_numbers")


@pytest.mark.parametrize(("per_block", "stride"), [(0, None), (-1, None), (2, 0), (2, 1), (1.5, 2)])
def test_blocks_without_kernel_blocks_are_refused(per_block: Any, stride: Any) -> None:
    """A block is at least one kernel block, and blocks do not overlap."""
    with pytest.raises(InvalidError, match="kernel_block"):
        kernel_block_ids([1], per_block, stride)


def test_lists_will_do_for_arrays() -> None:
    """Ids and positions may be in lists, even empty ones, as well as in arrays."""
    assert token_slots([3, 4], [0, 5], 4).tolist() == [12, 17]
    assert token_slots([], [], 4).tolist() == []
    assert kernel_block_ids([], 4).tolist() == []
    assert kernel_block_ids([5, 6], 1).tolist() == [5, 6]


@pytest.mark.parametrize("per_block", [0, -4, 1.5])
def test_slots_of_blocks_without_tokens_are_refused(per_block: Any) -> None:
    """A block covers at least one token."""
    with pytest.raises(InvalidError, match="tokens_per_block"):
        token_slots([1], [0], per_block)
