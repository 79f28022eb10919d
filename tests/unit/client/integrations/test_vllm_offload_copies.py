"""Own the laws of rows: a chunk comes back from its row as it was, and a row says which keys it carries."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease.integrations.vllm.offload.copies import (
    HEAD_BYTES,
    KEY_BYTES,
    HostCopies,
    PageTensor,
    RowLayout,
    Rows,
    moves_of,
    pairs_of,
)

NUM_BLOCKS = 16
PAGE_BYTES = 24
LAYOUT = RowLayout.of_pages(
    [[(0, PAGE_BYTES), (1, PAGE_BYTES)], [(1, PAGE_BYTES)]],
    bytes_per_block=2 * PAGE_BYTES,
    blocks_per_chunk=2,
)
"""Two groups with different pages, and chunks of two blocks."""


def tensors(seed: int) -> list[NDArray[np.uint8]]:
    """Return two tensors of an engine, the second one with gaps between its pages."""
    random = np.random.default_rng(seed)
    return [
        random.integers(1, 255, (NUM_BLOCKS, PAGE_BYTES), np.uint8),
        random.integers(1, 255, (NUM_BLOCKS, PAGE_BYTES + 8), np.uint8),
    ]


def described(arrays: list[NDArray[np.uint8]]) -> list[PageTensor]:
    """Return what the copies know of the tensors."""
    return [
        PageTensor(address=one.ctypes.data, block_stride_bytes=one.strides[0]) for one in arrays
    ]


def new_rows(num_rows: int = 8) -> Rows:
    """Return a new pool for rows."""
    stride_bytes = HEAD_BYTES + 2 * 2 * PAGE_BYTES
    return Rows(np.zeros(num_rows * stride_bytes, np.uint8), num_rows, stride_bytes)


def ids(*numbers: int) -> NDArray[np.int32]:
    """Return the ids of blocks or rows."""
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    ("first_blocks", "blocks", "group_blocks", "row_ids"),
    [
        pytest.param((0, 0), (3, 9, 1, 2), (4, 0), (5, 2), id="whole chunks of one group"),
        pytest.param((0, 2), (3, 9, 1, 2), (2, 2), (5, 2), id="a chunk of each group"),
        pytest.param(
            (1, 3), (3, 9, 1, 2), (3, 1), (5, 2, 7), id="chunks without their first block"
        ),
        pytest.param((0, 0), (3, 9, 1), (3, 0), (5, 2), id="a chunk without its last block"),
    ],
)
def test_stored_blocks_come_back_elsewhere(
    first_blocks: tuple[int, int],
    blocks: tuple[int, ...],
    group_blocks: tuple[int, int],
    row_ids: tuple[int, ...],
) -> None:
    """Blocks that are stored and loaded into other blocks have their group's pages, and nothing else changes."""
    there, back, rows, copies = tensors(1), tensors(2), new_rows(), HostCopies()
    before = [one.copy() for one in back]
    targets = ids(*(15 - block for block in blocks))
    stored = moves_of(LAYOUT, ids(*blocks), group_blocks, first_blocks, len(row_ids))
    loaded = moves_of(LAYOUT, targets, group_blocks, first_blocks, len(row_ids))

    copies.store(1, pairs_of(rows, ids(*row_ids), described(there), stored))
    pairs = pairs_of(rows, ids(*row_ids), described(back), loaded)
    copies.load(2, [(shares, pages, num_bytes) for pages, shares, num_bytes in pairs])

    assert copies.finished() == [1, 2]
    in_first, all_blocks = blocks[: group_blocks[0]], blocks
    for tensor, moved in ((0, in_first), (1, all_blocks)):
        for block in range(NUM_BLOCKS):
            source = 15 - block
            wanted = there[tensor][source] if source in moved else before[tensor][block]
            assert (back[tensor][block, :PAGE_BYTES] == wanted[:PAGE_BYTES]).all()
            assert (back[tensor][block, PAGE_BYTES:] == before[tensor][block, PAGE_BYTES:]).all()


@pytest.mark.parametrize(
    ("blocks", "group_blocks", "num_chunks"),
    [
        pytest.param((1, 2, 3), (3, 0), 1, id="too few chunks"),
        pytest.param((1, 2, 3), (2, 0), 1, id="too many blocks"),
        pytest.param((1, 2), (2, 0), 2, id="too many chunks"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(
    blocks: tuple[int, ...], group_blocks: tuple[int, int], num_chunks: int
) -> None:
    """Nothing moves where the numbers of blocks and chunks do not match."""
    with pytest.raises(ValueError, match="fills"):
        moves_of(LAYOUT, ids(*blocks), group_blocks, (0, 0), num_chunks)


def test_pages_that_exceed_a_block_are_refused() -> None:
    """A layout with a group that needs more than a block is refused with both numbers."""
    with pytest.raises(ValueError, match="take 30 bytes of a block, but a block has 20"):
        RowLayout.of_pages([[(0, 10), (1, 20)]], bytes_per_block=20, blocks_per_chunk=1)


def test_rows_carry_the_keys_that_they_are_signed_with() -> None:
    """A row carries its key from the signing until it is blanked, and no other key."""
    rows, names = new_rows(), bytes(range(KEY_BYTES)) + b"\x09" * KEY_BYTES
    rows.sign(ids(6, 1), names)

    assert rows.carrying(ids(6, 1), names).tolist() == [True, True]
    assert rows.carrying(ids(1, 1), names).tolist() == [False, True]
    rows.blank(ids(1))
    assert rows.carrying(ids(6, 1), names).tolist() == [True, False]


def test_rows_know_their_bounds() -> None:
    """Ids below 0 and beyond the last row name no row."""
    rows = new_rows(8)

    assert rows.has(ids(0, 7))
    assert rows.has(ids())
    assert not rows.has(ids(-1, 7))
    assert not rows.has(ids(0, 8))
