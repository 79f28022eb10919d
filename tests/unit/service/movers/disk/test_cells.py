"""A store's cell is believed only if every bit of it is as it was written."""

from dataclasses import replace

import numpy as np

from kvleased.movers.disk.cells import CELL, Cells, are_whole, have_labels, make_cells
from tests.laws.disks import Pools, labels_of

SHAPE = Pools().shape
SLOTS = np.array([4, 5], np.int32)


def _cells() -> Cells:
    return make_cells(SHAPE, SLOTS, labels_of([1, 2]), np.array([7, 8], np.uint64), 8192)


def test_written_cells_are_whole() -> None:
    """A cell that was just made tells what it was made of."""
    cells = _cells()

    assert are_whole(SHAPE, SLOTS, cells).all()
    assert have_labels(cells, labels_of([1, 2])).all()


def test_flipped_bit_makes_a_cell_nothing() -> None:
    """A flipped bit makes its own cell unreadable, and not the next one."""
    for bit in range(CELL.itemsize * 8):
        cells = _cells()
        cells.view(np.uint8)[bit // 8] ^= 1 << bit % 8

        assert are_whole(SHAPE, SLOTS, cells).tolist() == [False, True], bit


def test_cell_of_another_slot_or_layout_is_nothing() -> None:
    """A whole cell in another slot's place, or of a store with another layout, is not believed."""
    other = replace(SHAPE, layout=bytes(32))

    assert not are_whole(SHAPE, SLOTS + 1, _cells()).any()
    assert not are_whole(other, SLOTS, _cells()).any()


def test_zeros_are_nothing() -> None:
    """A cell of zeros, which was never written, claims nothing."""
    assert not are_whole(SHAPE, SLOTS, np.zeros(2, CELL)).any()
