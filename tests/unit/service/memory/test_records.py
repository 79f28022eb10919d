"""The core's columns lie apart from each other in the regions that outlive it."""

from dataclasses import replace

import numpy as np

from kvlease.groups import keeps_everything
from kvlease.memory.mapped import table_parts
from kvlease.plan import PlanInputs
from kvlease.spec import FullAttention, SlidingWindow
from kvleased.config.settings import Settings
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.shape import CacheShape
from kvleased.memory.host_files import HEAD_BYTES
from kvleased.memory.records import (
    host_records_layout,
    lay_records,
    magazines_layout,
    records_layout,
    table_layout,
)
from kvleased.planning import plan
from kvleased.verbs.shapes import shape_of

SHAPE = CacheShape(
    num_blocks=5,
    num_slots=3,
    groups=(
        keeps_everything(4, 5),
        replace(keeps_everything(8, 3), kernel_blocks_per_block=2, kernel_block_stride=3),
    ),
    hash_tokens=4,
    hit_tokens=8,
    max_leases=2,
)


def test_columns_are_apart_and_aligned() -> None:
    """Every byte of the regions belongs to one column at most; each column starts at a cache line of its region."""
    records = np.zeros(records_layout(SHAPE).region_bytes, np.uint8)
    host_records = np.zeros(host_records_layout(SHAPE).region_bytes, np.uint8)
    tables = np.zeros(table_layout(SHAPE).region_bytes, np.uint8)
    magazines = np.zeros(magazines_layout(SHAPE).region_bytes, np.uint8)
    laid = lay_records(SHAPE, records, host_records, tables, magazines)
    columns = [
        getattr(part, name)
        for part in (laid.device, laid.host, laid.rows, laid.kernel_rows, laid.magazines)
        for name in part.__slots__
    ]

    for column in columns:
        column.view(np.uint8)[...] += 1

    regions = (records, host_records, tables, magazines)
    assert max(region.max() for region in regions) == 1
    assert not host_records[:HEAD_BYTES].any()
    for column in columns:
        region = next(region for region in regions if np.shares_memory(column, region))
        assert (column.ctypes.data - region.ctypes.data) % 64 == 0


def test_columns_have_an_entry_for_each_block_and_row() -> None:
    """The columns are as long as the pools and the table are."""
    laid = lay_records(
        SHAPE,
        np.zeros(records_layout(SHAPE).region_bytes, np.uint8),
        np.zeros(host_records_layout(SHAPE).region_bytes, np.uint8),
        np.zeros(table_layout(SHAPE).region_bytes, np.uint8),
        np.zeros(magazines_layout(SHAPE).region_bytes, np.uint8),
    )

    assert (len(laid.device.state), len(laid.host.state), laid.device.key.shape) == (5, 3, (5, 32))
    plain = CacheRecords.plain(SHAPE)
    for name in ("device", "host", "rows", "kernel_rows", "magazines"):
        ours, theirs = getattr(laid, name), getattr(plain, name)
        for column in ours.__slots__:
            assert getattr(ours, column).shape == getattr(theirs, column).shape
            assert getattr(ours, column).dtype == getattr(theirs, column).dtype


def test_both_ends_lay_the_table_alike() -> None:
    """A worker lays the table out from the plan as the daemon does from its shape, however groups' columns lie."""
    layers = (
        FullAttention(name="full", num_kv_heads=1, head_size=16, dtype="float16"),
        SlidingWindow(
            name="window", num_kv_heads=1, head_size=16, dtype="float16", window_tokens=32
        ),
    )
    cache_plan = plan(
        PlanInputs(layers=layers, tokens_per_block=16, device_blocks=32, longest_request_tokens=128)
    )

    layout = table_layout(shape_of(cache_plan, Settings()))

    assert layout.parts == table_parts(cache_plan.groups)
    assert len(layout.parts) == 2
