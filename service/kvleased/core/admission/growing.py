"""Own the growth of rows in groups: which blocks come to new places, and which move there from earlier places."""

import numpy as np
from numpy.typing import NDArray

from kvlease.groups import Counts
from kvleased.core.blocks.records import NULL
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import LeaseBook


def grow(
    leases: LeaseBook, rows: Ids, begins: Counts, afters: Counts, blocks: Ids, num_tokens: Counts
) -> Ids:
    """Add blocks, already in their states, to several rows: at the places from `begins` to before `afters`.

    Both are [rows, groups]. The blocks are given row by row, and in each row group by group; places between the present
    ends and `begins` need none. Speculative blocks that are passed over move to the first new places of their group;
    they are not among `blocks`. Returns the blocks at all new places.
    """
    columns = leases.rows
    before = columns.num_blocks[rows].astype(np.int64)
    passed = leases.covering.passed(columns.num_tokens[rows].astype(np.int64), before, afters)
    if passed is not None:
        blocks = _with_moved(leases, rows, afters - begins, passed, blocks)
    added = afters - before
    ids, places = _added(leases, begins, added, before, blocks)
    columns.block_ids[rows.repeat(added.sum(axis=1)), places] = ids
    columns.num_tokens[rows] = np.maximum(columns.num_tokens[rows], num_tokens)
    columns.num_blocks[rows] = afters
    if passed is not None:
        # A crash before this leaves blocks at two places, of which recovery empties the first.
        _empty(leases, rows, *passed)
    leases.kernel.append_many(rows, before, added, ids)
    return blocks


def _added(
    leases: LeaseBook, begins: Counts, added: Counts, before: Counts, blocks: Ids
) -> tuple[Ids, Ids]:
    """Return the ids that are added to rows, NULL where no block is needed, and their places in the rows."""
    num_added = added.ravel()
    total = int(num_added.sum())
    within = np.arange(total) - (num_added.cumsum() - num_added).repeat(num_added)
    ids = np.full(total, NULL, np.intp)
    ids[within >= (begins - before).ravel().repeat(num_added)] = blocks
    return ids, (leases.covering.first_places + before).ravel().repeat(num_added) + within


def _with_moved(
    leases: LeaseBook, rows: Ids, num_new: Counts, passed: tuple[Counts, Counts], blocks: Ids
) -> Ids:
    """Return the blocks at `num_new` new places: in each group those passed over, then the fresh ones."""
    counts = passed[1].ravel()
    num_fresh = num_new.ravel() - counts
    moved: NDArray[np.int32] = leases.rows.block_ids[_places_passed(leases, rows, *passed)]
    return np.insert(blocks, (num_fresh.cumsum() - num_fresh).repeat(counts), moved)


def _empty(leases: LeaseBook, rows: Ids, firsts: Counts, counts: Counts) -> None:
    """Empty the places that rows have passed over; kernels read block 0 there."""
    leases.rows.block_ids[_places_passed(leases, rows, firsts, counts)] = NULL
    for at, group in np.argwhere(counts).tolist():
        first = int(firsts[at, group])
        leases.kernel.give_back(int(rows[at]), group, first, first + int(counts[at, group]))


def _places_passed(leases: LeaseBook, rows: Ids, firsts: Counts, counts: Counts) -> tuple[Ids, Ids]:
    """Return the rows and places that are passed over: `counts` places of each group from `firsts` on."""
    num_passed = counts.ravel()
    within = np.arange(num_passed.sum()) - (num_passed.cumsum() - num_passed).repeat(num_passed)
    places = (leases.covering.first_places + firsts).ravel().repeat(num_passed) + within
    return rows.repeat(counts.sum(axis=1)), places
