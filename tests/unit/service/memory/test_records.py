"""The core's columns lie apart from each other in the regions that outlive it."""

import numpy as np

from kvleased.core.shape import CacheShape
from kvleased.memory.records import lay_records, records_layout, table_layout

SHAPE = CacheShape(
    num_blocks=5, num_slots=3, tokens_per_block=4, max_blocks_per_lease=5, max_leases=2
)


def test_columns_are_apart_and_aligned() -> None:
    """Every byte of the regions belongs to one column at most; each column starts at a cache line of its region."""
    records = np.zeros(records_layout(SHAPE).region_bytes, np.uint8)
    tables = np.zeros(table_layout(SHAPE).region_bytes, np.uint8)
    laid = lay_records(SHAPE, records, tables)
    columns = [
        getattr(part, name)
        for part in (laid.device, laid.host, laid.rows)
        for name in part.__slots__
    ]

    for column in columns:
        column.view(np.uint8)[...] += 1

    assert max(records.max(), tables.max()) == 1
    for column in columns:
        region = records if np.shares_memory(column, records) else tables
        assert (column.ctypes.data - region.ctypes.data) % 64 == 0


def test_columns_have_an_entry_for_each_block_and_row() -> None:
    """The columns are as long as the pools and the table are."""
    laid = lay_records(
        SHAPE,
        np.zeros(records_layout(SHAPE).region_bytes, np.uint8),
        np.zeros(table_layout(SHAPE).region_bytes, np.uint8),
    )

    assert (len(laid.device.state), len(laid.host.state), laid.device.key.shape) == (5, 3, (5, 32))
    assert laid.rows.block_ids.shape == (2, 5)
