"""Own where the core's columns lie in the "records" and "tables" regions; what they mean is the core's business."""

from dataclasses import dataclass, fields
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvlease.columns import Column, ColumnLayout
from kvlease.tables import TableLayout, TablePart
from kvleased.core.records import TIER_COLUMNS, CacheRecords, KernelRows, LeaseRows, TierRecords
from kvleased.core.shape import CacheShape


@dataclass(frozen=True, slots=True)
class RecordsLayout:
    """The columns of the device tier, then those of the host tier, in one region."""

    num_blocks: int
    num_slots: int

    @property
    def region_bytes(self) -> int:
        """Bytes of the region."""
        return self._device.region_bytes + self._host.region_bytes

    def tiers(self, region: NDArray[np.uint8]) -> tuple[TierRecords, TierRecords]:
        """Lay the columns of device and host over the region."""
        device = self._device.columns(region)
        host = self._host.columns(region, self._device.region_bytes)
        return TierRecords(**device), TierRecords(**host)

    @property
    def _device(self) -> ColumnLayout:
        return ColumnLayout(cast("tuple[Column, ...]", TIER_COLUMNS), self.num_blocks)

    @property
    def _host(self) -> ColumnLayout:
        return ColumnLayout(cast("tuple[Column, ...]", TIER_COLUMNS), self.num_slots)


def table_layout(shape: CacheShape) -> TableLayout:
    """Return how the block table of a cache lies."""
    parts = (
        TablePart(
            num_places=group.table_blocks,
            kernel_blocks_per_block=group.kernel_blocks_per_block,
            kernel_block_stride=group.kernel_block_stride,
        )
        for group in shape.groups
    )
    return TableLayout(num_rows=shape.max_leases, parts=tuple(parts))


def records_layout(shape: CacheShape) -> RecordsLayout:
    """Return how the records of a cache lie."""
    return RecordsLayout(num_blocks=shape.num_blocks, num_slots=shape.num_slots)


def lay_records(
    shape: CacheShape, records: NDArray[np.uint8], tables: NDArray[np.uint8]
) -> CacheRecords:
    """Lay all columns of a cache over its two regions."""
    device, host = records_layout(shape).tiers(records)
    columns = table_layout(shape).columns(tables)
    kernel_columns = {field.name: columns.pop(field.name) for field in fields(KernelRows)}
    return CacheRecords(
        device=device,
        host=host,
        rows=LeaseRows(**columns),
        kernel_rows=KernelRows(**kernel_columns),
    )
