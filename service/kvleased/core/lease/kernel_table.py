"""Own the kernel rows, which kernels read of mapped leases, as their only writer; `leases` has the blocks themselves.

Block b of a group stands in its row as n kernel blocks, b*m … b*m + n-1, with n = kernel_blocks_per_block and
m = kernel_block_stride; a place that needs no block (NULL) reads as block 0.

Workers read the rows while the daemon writes them, without a lock. A row's `sequence` is odd from before the first byte
of a change until after the last, and afterwards it is larger by two. A reader takes its copy only if the number was
even before it copied and is the same afterwards; otherwise it copies again. That is enough for two reasons. The daemon
alone writes, one command at a time, so no two changes of a row overlap. And stores become visible in the order in which
they are made, as they do on x86-64.

A crash within a change leaves an odd number, so readers refuse the row until it is written again. Recovery asks
`published` which rows were in use, publishes the rows of the leases that it believes anew, and calls `reset` on all
others. So a row that stays mapped is never seen unmapped.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvlease.groups import GroupShape
from kvleased.core.blocks.records import KernelRows

_SEQUENCE_MASK: Final = 2**32 - 1
_ZERO: Final = np.array(0, np.int32)
"""0 as an array: comparing a column with it takes half the time that a plain number takes."""

Ints = NDArray[np.integer[Any]]
"""Block ids, or NULL, or counts."""


class KernelTable:
    """Write the rows that kernels read; `append`, `append_many` and `give_back` skip rows that are not published."""

    def __init__(self, rows: KernelRows, groups: Sequence[GroupShape]) -> None:
        """Take over rows as they are; after a crash, `reset` them."""
        self.rows = rows
        self.is_used = bool(rows.num_published.any())
        """Whether any row was ever published; until then an append has nothing to do here."""
        self._has_nulls = any(group.gives_back for group in groups)
        self._num_parts = [group.kernel_blocks_per_block for group in groups]
        self._strides = [group.kernel_block_stride for group in groups]
        widths = (group.table_blocks * group.kernel_blocks_per_block for group in groups)
        self._firsts = list(accumulate(widths, initial=0))[:-1]
        """Where each group's kernel ids start in a row."""
        self._parts_of = np.array(self._num_parts, np.intp)
        self._stride_of = np.array(self._strides, np.intp)
        self._first_of = np.array(self._firsts, np.intp)
        self._num_first: Ints = rows.num_published[:, 0]
        """By row: how many kernel blocks of the first group are published."""
        self._is_plain = all(parts == 1 for parts in (*self._num_parts, *self._strides))

    def __repr__(self) -> str:
        """Show life: how many rows are published."""
        num_published = np.count_nonzero(self.rows.num_published.any(axis=1))
        return f"<KernelTable {num_published} of {len(self.rows.sequence)} rows published>"

    def is_published(self, row: int) -> bool:
        """Tell whether kernels may read a row."""
        return any(self.rows.num_published[row].tolist())

    def published(self, rows: Ints) -> NDArray[np.bool_]:
        """Tell for each of many rows whether kernels may read it."""
        if len(self._firsts) == 1:
            return self._num_first[rows] > _ZERO
        return np.any(self.rows.num_published[rows], axis=1)  # type: ignore[no-any-return]  # 2-D, so an array

    def publish(self, row: int, parts: Sequence[Ints]) -> None:
        """Write a whole row: for each group its block ids, with NULL at places that need no block."""
        sequence = self._begin(row)
        for group, ids in enumerate(parts):
            kernel_ids = self._expanded(group, ids)
            first = self._firsts[group]
            self.rows.kernel_ids[row, first : first + len(kernel_ids)] = kernel_ids
            self.rows.num_published[row, group] = len(kernel_ids)
        self._end(row, sequence)

    def append(self, row: int, group: int, at: int, ids: Ints) -> None:
        """Put block ids, or NULL, at the places of a group from `at` on; the group's published part then ends there."""
        if not self.is_published(row):
            return
        sequence = self._begin(row)
        kernel_ids = self._expanded(group, ids)
        start = at * self._num_parts[group]
        end = start + len(kernel_ids)
        first = self._firsts[group]
        self.rows.kernel_ids[row, first + start : first + end] = kernel_ids
        self.rows.num_published[row, group] = end
        self._end(row, sequence)

    def append_many(self, rows: Ints, starts: Ints, counts: Ints, ids: Ints) -> None:
        """Append to several rows at once, in all groups; each row is named once.

        `starts` and `counts` are [rows, groups]: how many places a row has of a group, and how many are added,
        including NULL ones. `ids` are the added ids, row by row, and within each row group by group.
        """
        is_published = self.published(rows)
        # Nearly always all rows are published, or none; bytes are searched faster than an array.
        packed = is_published.tobytes()
        if b"\1" not in packed:
            return
        if b"\0" in packed:
            ids = ids[is_published.repeat(counts.sum(axis=1))]
            rows, starts, counts = rows[is_published], starts[is_published], counts[is_published]
        sequences = self.rows.sequence[rows] | np.uint32(1)
        self.rows.sequence[rows] = sequences
        self._put_many(rows, starts, counts, np.maximum(ids, 0) if self._has_nulls else ids)
        ends = starts + counts
        self.rows.num_published[rows] = ends if self._is_plain else ends * self._parts_of
        self.rows.sequence[rows] = sequences + np.uint32(1)

    def give_back(self, row: int, group: int, first: int, end: int) -> None:
        """Let the places of a group from `first` to just before `end` read as block 0."""
        if first >= end or not self.is_published(row):
            return
        sequence = self._begin(row)
        start = self._firsts[group]
        num_parts = self._num_parts[group]
        places = self.rows.kernel_ids[row, start + first * num_parts : start + end * num_parts]
        places.reshape(-1, num_parts)[:] = np.arange(num_parts)
        self._end(row, sequence)

    def clear(self, row: int) -> None:
        """Let kernels read nothing of a row."""
        if not self.is_published(row) and not self.rows.sequence[row] & 1:
            return
        sequence = self._begin(row)
        self.rows.num_published[row] = 0
        self._end(row, sequence)

    def reset(self, rows: Ints) -> None:
        """Let kernels read nothing of some rows, and end the changes that a crash cut off."""
        self.rows.sequence[rows] |= np.uint32(1)
        self.rows.num_published[rows] = 0
        self.rows.sequence[rows] += np.uint32(1)

    def _begin(self, row: int) -> int:
        """Make readers wait; return the row's odd sequence number, which a crash may have left there."""
        self.is_used = True
        sequence = self.rows.sequence.item(row) | 1
        self.rows.sequence[row] = sequence
        return sequence

    def _end(self, row: int, sequence: int) -> None:
        self.rows.sequence[row] = (sequence + 1) & _SEQUENCE_MASK

    def _expanded(self, group: int, ids: Ints) -> Ints:
        """Return the kernel ids of block ids."""
        if self._has_nulls:
            ids = np.maximum(ids, 0)
        num_parts, stride = self._num_parts[group], self._strides[group]
        if num_parts == stride == 1:
            return ids
        expanded: Ints = (ids[:, None].astype(np.intp) * stride + np.arange(num_parts)).ravel()
        return expanded

    def _put_many(self, rows: Ints, starts: Ints, counts: Ints, ids: Ints) -> None:
        """Write the kernel ids of block ids; the cases: one group with one kernel block a block, and any groups."""
        if self._is_plain and len(self._firsts) == 1:
            num_added, start_of = counts[:, 0], starts[:, 0]
            places = (start_of - num_added.cumsum() + num_added).repeat(num_added)
            self.rows.kernel_ids[rows.repeat(num_added), places + np.arange(len(ids))] = ids
            return
        num_added = counts.ravel()
        group_of = np.tile(np.arange(len(self._firsts)), len(rows)).repeat(num_added)
        row_of = rows.repeat(counts.sum(axis=1))
        place_of = (starts.ravel() - num_added.cumsum() + num_added).repeat(num_added)
        num_parts = self._parts_of[group_of]
        columns = self._first_of[group_of] + (place_of + np.arange(len(ids))) * num_parts
        within = np.arange(num_parts.sum()) - (num_parts.cumsum() - num_parts).repeat(num_parts)
        self.rows.kernel_ids[row_of.repeat(num_parts), columns.repeat(num_parts) + within] = (
            ids * self._stride_of[group_of]
        ).repeat(num_parts) + within
