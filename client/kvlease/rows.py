"""Own a worker's own rows of block ids, which an engine changes between steps; the daemon's table is `tables`'."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.tables import NO_ROW
from kvlease.units import BLOCKS_MAX, checked_count

Ids = NDArray[np.int32] | Sequence[int]


class BlockRows:
    """Rows of block ids, each with a count of its ids; changes are staged here and written elsewhere in one go.

    Ids beyond a row's count are left over from before, and mean nothing. A refused call changes nothing.
    """

    def __init__(self, num_rows: int, blocks_per_row: int) -> None:
        """Make empty rows.

        Raises:
            InvalidError: a number is out of range.
        """
        checked_count("num_rows", num_rows, least=1, most=BLOCKS_MAX)
        checked_count("blocks_per_row", blocks_per_row, most=BLOCKS_MAX)
        self.block_ids: NDArray[np.int32] = np.zeros((num_rows, blocks_per_row), dtype=np.int32)
        self.num_blocks: NDArray[np.int32] = np.zeros(num_rows, dtype=np.int32)
        self._is_staged: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)

    def __repr__(self) -> str:
        """Show life: how many rows have blocks, and how many have changed since they were last written."""
        return (
            f"<BlockRows {np.count_nonzero(self.num_blocks)} of {len(self.num_blocks)} rows in use, "
            f"{np.count_nonzero(self._is_staged)} staged>"
        )

    def add(self, row: int, block_ids: Ids) -> None:
        """Give a row these blocks in place of all that it has.

        Raises:
            InvalidError: rule block_table_row_overflow or row_outside_table.
        """
        self._put(row, 0, block_ids)

    def append(self, row: int, block_ids: Ids) -> None:
        """Append blocks to those that a row has.

        Raises:
            InvalidError: rule block_table_row_overflow or row_outside_table.
        """
        self._check(row)
        self._put(row, int(self.num_blocks[row]), block_ids)

    def move(self, source: int, target: int) -> None:
        """Move the source row's blocks to the target row, and leave the source without blocks.

        Raises:
            InvalidError: rule row_outside_table.
        """
        self._check(source, target)
        if source == target:
            return
        count = self.num_blocks[source]
        self.block_ids[target, :count] = self.block_ids[source, :count]
        self.num_blocks[target] = count
        self._is_staged[target] = True
        self.clear(source)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows.

        Raises:
            InvalidError: rule row_outside_table.
        """
        self._check(one, other)
        for column in (self.block_ids, self.num_blocks):
            column[[one, other]] = column[[other, one]]
        self._is_staged[[one, other]] = True

    def clear(self, row: int) -> None:
        """Take all blocks from a row.

        Raises:
            InvalidError: rule row_outside_table.
        """
        self._check(row)
        self.block_ids[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0
        self._is_staged[row] = True

    def write(self, target: NDArray[np.int32]) -> int:
        """Copy the rows that have changed since the last write into a table of the same shape; return how many.

        Raises:
            InvalidError: rule table_shape_differs.
        """
        if target.shape != self.block_ids.shape:
            message = f"the table to write has shape {target.shape}, but the rows have {self.block_ids.shape}"
            raise InvalidError(message, resource="target", rule="table_shape_differs")
        target[self._is_staged] = self.block_ids[self._is_staged]
        num_written = int(np.count_nonzero(self._is_staged))
        self._is_staged[:] = False
        return num_written

    def gather(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the table for the requests of a step, in their order: counted ids, then zeros; only zeros for NO_ROW.

        Raises:
            InvalidError: rule row_outside_table.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        real = wanted[wanted != NO_ROW]
        if real.size:
            self._check(int(real.min()), int(real.max()))
        counts = np.where(
            wanted == NO_ROW, 0, self.num_blocks[np.where(wanted == NO_ROW, 0, wanted)]
        )
        is_counted = np.arange(self.block_ids.shape[1]) < counts[:, None]
        return np.where(is_counted, self.block_ids[wanted], np.int32(0))

    def _put(self, row: int, start: int, block_ids: Ids) -> None:
        self._check(row)
        end, width = start + len(block_ids), self.block_ids.shape[1]
        if end > width:
            message = f"row {row} would have {end} blocks, but has room for {width}; make rows longer, or pass fewer"
            raise InvalidError(
                message,
                resource="blocks_per_row",
                rule="block_table_row_overflow",
                need=end,
                available=width,
                limit=width,
            )
        self.block_ids[row, start:end] = block_ids
        self.num_blocks[row] = end
        self._is_staged[row] = True

    def _check(self, *rows: int) -> None:
        num_rows = len(self.num_blocks)
        for row in rows:
            if not 0 <= row < num_rows:
                message = f"there is no row {row}; the table's number of rows is {num_rows}"
                raise InvalidError(
                    message, resource="row", rule="row_outside_table", need=row, limit=num_rows
                )
