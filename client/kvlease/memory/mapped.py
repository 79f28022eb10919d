"""Own the shared memory that a worker has mapped: the device region and the block table, which the daemon fills."""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import LayoutMismatchError
from kvlease.memory.cuda import DeviceMemory, device_of, import_memory
from kvlease.memory.forks import keep_from_children
from kvlease.memory.key_counts import KeyCounts
from kvlease.plan import CachePlan, GroupPlan
from kvlease.tables import RowTable, TableLayout, TablePart
from kvlease.transports.base import Attached
from kvlease.v1 import kvlease_pb2 as pb

KEY_COUNTS: Final = "key_counts"
"""The kind of the region of key counts; it is not memory of the cache, and every attach may bring another one."""

PHASE_ACTIVE: Final = 2
"""The phase of a row whose lease is on the device; a test makes sure that the daemon's records have the same number."""

Identity = tuple[tuple[str, int, int], ...]
"""Kind, device and inode of every region: equal identities mean the same memory.

All regions of a GPU have the same inode; the block table, which is made and dropped with them, tells them apart.
"""


class Row(NamedTuple):
    """One row of the block table as it stands, published or not."""

    is_active: bool
    """Whether the lease is on the device; only then are the ids those of device blocks."""
    block_ids: NDArray[np.int32]
    """The ids, group by group, in token order; 0 at places that need no block."""
    num_blocks: NDArray[np.int32]
    """[groups]: how many of the ids belong to each group."""


class WorkerMemory:
    """The mapped regions of one attachment; the views that callers keep stay valid after `close`."""

    def __init__(
        self,
        identity: Identity,
        regions: dict[str, mmap.mmap],
        plan: CachePlan,
        rank: int,
        gpu: DeviceMemory | None = None,
    ) -> None:
        """Lay arrays over the mapped regions; the device region is that of `rank`, or `gpu` if it is on a GPU."""
        self.identity = identity
        self._regions = regions
        self.device: NDArray[np.uint8] | None = None
        self.gpu = gpu
        self.tables: RowTable | None = None
        self._columns: Mapping[str, NDArray[Any]] = {}
        device_bytes = plan.ranks[rank].device_bytes
        if "device" in regions:
            self.device = np.frombuffer(regions["device"], np.uint8, count=device_bytes)
        elif gpu is None and any(kind == "device" for kind, _, _ in identity):
            # A rank that keeps no layer has an empty region, which cannot be mapped.
            self.device = np.zeros(0, np.uint8)
        if "tables" in regions:
            layout = table_layout(len(regions["tables"]), table_parts(plan.groups))
            view = memoryview(regions["tables"])
            self.tables = RowTable(layout, view)
            self._columns = layout.columns(view)

    def __repr__(self) -> str:
        """Show life: what is mapped."""
        parts = (f"{len(region)} bytes of {kind}" for kind, region in self._regions.items())
        return f"<WorkerMemory {', '.join(parts) or 'nothing mapped'}>"

    @classmethod
    def mapped(cls, attached: Attached, plan: CachePlan, rank: int) -> Self:
        """Map the regions that came with the attach of a rank; the caller must still close the descriptors.

        Raises:
            LayoutMismatchError: a region is smaller than the plan or the daemon says, or the plan lacks the rank.
            InvalidError: a region is memory of a GPU that this process cannot map; the message says why.
        """
        if rank >= len(plan.ranks):
            message = (
                f"this process is rank {rank}, but the cache's number of ranks is {len(plan.ranks)}"
            )
            raise LayoutMismatchError(
                message, resource="rank", need=rank, limit=len(plan.ranks) - 1
            )
        needs = {"device": plan.ranks[rank].device_bytes, "tables": 1}
        regions: dict[str, mmap.mmap] = {}
        gpu = None
        try:
            for region, fd in zip(attached.response.regions, attached.fds, strict=True):
                need_bytes = max(region.region_bytes, needs.get(region.kind, 0))
                if region.device_uuid:
                    gpu = _map_on_gpu(region, fd, need_bytes)
                elif region.kind in needs and need_bytes:
                    regions[region.kind] = _map(region, fd, need_bytes)
            return cls(identity_of(attached), regions, plan, rank, gpu)
        except BaseException:
            for mapped_region in regions.values():
                with suppress(BufferError):
                    mapped_region.close()
            raise

    def row(self, row: int, lease_id: int) -> Row | None:
        """Return a copy of a lease's row; None if the row is not that lease's, or if there is no table."""
        if (
            self.tables is None
            or row >= self.tables.layout.num_rows
            or self._columns["lease_id"][row] != lease_id
        ):
            return None
        num_blocks: NDArray[np.int32] = self._columns["num_blocks"][row].copy()
        places: NDArray[np.int32] = self._columns["block_ids"][row]
        widths = [part.num_places for part in self.tables.layout.parts]
        used = [
            places[end - width : end - width + count]
            for end, width, count in zip(
                accumulate(widths), widths, num_blocks.tolist(), strict=True
            )
        ]
        block_ids = np.maximum(np.concatenate(used), np.int32(0))
        return Row(int(self._columns["phase"][row]) == PHASE_ACTIVE, block_ids, num_blocks)

    def close(self) -> None:
        """Drop the arrays, and unmap every region that no caller has a view of."""
        self.device, self.gpu, self.tables, self._columns = None, None, None, {}
        while self._regions:
            _, region = self._regions.popitem()
            # A caller that still has a view keeps the region mapped until the view ends: better than a fault.
            with suppress(BufferError):
                region.close()


def identity_of(attached: Attached) -> Identity:
    """Return the identity of the cache's memory that an attach handed over."""
    stats = (os.fstat(fd) for fd in attached.fds)
    return tuple(
        (region.kind, stat.st_dev, stat.st_ino)
        for region, stat in zip(attached.response.regions, stats, strict=True)
        if region.kind != KEY_COUNTS
    )


def table_parts(groups: Iterable[GroupPlan]) -> tuple[TablePart, ...]:
    """Return the parts that a row has in a cache with these groups."""
    return tuple(
        TablePart(
            num_places=group.table_blocks,
            kernel_blocks_per_block=group.kernel_blocks_per_block,
            kernel_block_stride=group.kernel_block_stride,
        )
        for group in groups
    )


def table_layout(region_bytes: int, parts: tuple[TablePart, ...]) -> TableLayout:
    """Return the layout of a table region, whose size determines every column's place.

    Raises:
        LayoutMismatchError: no table has that many bytes.
    """
    # Columns only grow with the rows, so if several numbers of rows take the same bytes, every column lies at the same
    # place. A row takes more than one byte, so there are fewer rows than bytes.
    num_fitting = bisect_right(
        range(region_bytes),
        region_bytes,
        key=lambda rows: TableLayout(rows, parts).region_bytes,
    )
    layout = TableLayout(max(0, num_fitting - 1), parts)
    if layout.region_bytes != region_bytes:
        widths = [part.num_places for part in parts]
        message = (
            f"no block table with {widths} blocks per row takes {region_bytes} bytes; "
            "the versions of the client and the daemon differ"
        )
        raise LayoutMismatchError(
            message, resource="tables", need=layout.region_bytes, available=region_bytes
        )
    return layout


def _map(region: pb.Region, fd: int, need_bytes: int) -> mmap.mmap:
    there_bytes = os.fstat(fd).st_size
    if there_bytes < need_bytes:
        message = (
            f"the {region.kind} region has {there_bytes} bytes, but the plan needs {need_bytes}"
        )
        raise LayoutMismatchError(
            message, resource=region.kind, need=need_bytes, available=there_bytes
        )
    access = mmap.PROT_READ if region.read_only else mmap.PROT_READ | mmap.PROT_WRITE
    mapped = mmap.mmap(fd, region.region_bytes, flags=mmap.MAP_SHARED, prot=access)
    keep_from_children(mapped)
    return mapped


def _map_on_gpu(region: pb.Region, fd: int, need_bytes: int) -> DeviceMemory:
    if region.region_bytes < need_bytes or region.mapped_bytes < region.region_bytes:
        message = f"the {region.kind} region has {region.region_bytes} bytes, but the plan needs {need_bytes}"
        raise LayoutMismatchError(
            message, resource=region.kind, need=need_bytes, available=region.region_bytes
        )
    return import_memory(
        device_of(region.device_uuid),
        fd,
        num_bytes=region.region_bytes,
        mapped_bytes=region.mapped_bytes,
    )


def key_counts_of(attached: Attached) -> KeyCounts | None:
    """Map the key counts that came with an attach; None if there are none, or if they cannot be mapped."""
    for region, fd in zip(attached.response.regions, attached.fds, strict=True):
        if region.kind == KEY_COUNTS:
            with suppress(OSError, ValueError):
                return KeyCounts.mapped(fd, region.region_bytes, attached.response.epoch)
    return None
