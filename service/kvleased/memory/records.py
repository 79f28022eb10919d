"""Own where the core's columns lie in the regions of records, tables and magazines; the core owns their meaning.

The host tier's columns have a region of their own, so that it can outlive the others, together with the slots.
"""

from dataclasses import dataclass, fields
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvlease.columns import Column, ColumnLayout
from kvlease.tables import TableLayout, TablePart
from kvleased.core.blocks.records import (
    HOLDER_COLUMNS,
    MAGAZINE_COLUMNS,
    MAGAZINES_MAX,
    TIER_COLUMNS,
    CacheRecords,
    KernelRows,
    LeaseRows,
    MagazineRecords,
    TierRecords,
)
from kvleased.core.shape import CacheShape
from kvleased.memory.host_files import HEAD_BYTES


@dataclass(frozen=True, slots=True)
class RecordsLayout:
    """The columns of the device tier, then those of the disk tier, in one region."""

    num_blocks: int
    num_disk_slots: int

    @property
    def region_bytes(self) -> int:
        """Bytes of the region."""
        return self._device.region_bytes + self._disk.region_bytes

    def tiers(self, region: NDArray[np.uint8]) -> tuple[TierRecords, TierRecords]:
        """Lay the columns of device and disk over the region."""
        device = self._device.columns(region)
        disk = self._disk.columns(region, self._device.region_bytes)
        return TierRecords(**device), TierRecords(**disk)

    @property
    def _device(self) -> ColumnLayout:
        return _tier_layout(self.num_blocks)

    @property
    def _disk(self) -> ColumnLayout:
        return _tier_layout(self.num_disk_slots)


@dataclass(frozen=True, slots=True)
class HostRecordsLayout:
    """The columns of the host tier, behind a head that says whose they are if they are in a file."""

    num_slots: int

    @property
    def region_bytes(self) -> int:
        """Bytes of the region; 0 if there is no host tier."""
        return HEAD_BYTES + self._columns.region_bytes if self.num_slots else 0

    def tier(self, region: NDArray[np.uint8]) -> TierRecords:
        """Lay the columns over the region."""
        if not self.num_slots:
            return TierRecords.plain(0)
        return TierRecords(**self._columns.columns(region, HEAD_BYTES))

    @property
    def _columns(self) -> ColumnLayout:
        return _tier_layout(self.num_slots)


@dataclass(frozen=True, slots=True)
class MagazinesLayout:
    """The columns of the magazines, then the columns that hold, for each device block, what the magazines need."""

    num_blocks: int

    @property
    def region_bytes(self) -> int:
        """Bytes of the region."""
        return self._places.region_bytes + self._blocks.region_bytes

    def columns(self, region: NDArray[np.uint8]) -> MagazineRecords:
        """Lay the columns over the region."""
        places = self._places.columns(region)
        return MagazineRecords(**places, **self._blocks.columns(region, self._places.region_bytes))

    @property
    def _places(self) -> ColumnLayout:
        return ColumnLayout(cast("tuple[Column, ...]", MAGAZINE_COLUMNS), MAGAZINES_MAX)

    @property
    def _blocks(self) -> ColumnLayout:
        return ColumnLayout(cast("tuple[Column, ...]", HOLDER_COLUMNS), self.num_blocks)


def magazines_layout(shape: CacheShape) -> MagazinesLayout:
    """Return how the magazines of a cache lie."""
    return MagazinesLayout(num_blocks=shape.num_blocks)


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
    return RecordsLayout(num_blocks=shape.num_blocks, num_disk_slots=shape.num_disk_slots)


def host_records_layout(shape: CacheShape) -> HostRecordsLayout:
    """Return how the records of a cache's host tier lie."""
    return HostRecordsLayout(num_slots=shape.num_slots)


def lay_records(
    shape: CacheShape,
    records: NDArray[np.uint8],
    host_records: NDArray[np.uint8],
    tables: NDArray[np.uint8],
    magazines: NDArray[np.uint8],
) -> CacheRecords:
    """Lay all columns of a cache over its regions."""
    device, disk = records_layout(shape).tiers(records)
    host = host_records_layout(shape).tier(host_records)
    columns = table_layout(shape).columns(tables)
    kernel_columns = {field.name: columns.pop(field.name) for field in fields(KernelRows)}
    return CacheRecords(
        device=device,
        host=host,
        disk=disk,
        rows=LeaseRows(**columns),
        kernel_rows=KernelRows(**kernel_columns),
        magazines=magazines_layout(shape).columns(magazines),
    )


def _tier_layout(num_entries: int) -> ColumnLayout:
    return ColumnLayout(cast("tuple[Column, ...]", TIER_COLUMNS), num_entries)
