"""Own what a mover must know of a plan; movers themselves know no plans, so that they start quickly."""

from kvlease.plan import CachePlan
from kvleased.movers.protocol import Piece, PoolMap


def pool_map(pool: int, plan: CachePlan, *, store_id: str = "", file_id: str = "") -> PoolMap:
    """Return what a mover needs to know: where the pieces of every block lie, and in which store."""
    pieces = (
        Piece(
            rank=rank.rank,
            offset_bytes=extent.offset_bytes,
            block_stride_bytes=extent.block_stride_bytes,
            num_bytes=extent.num_bytes,
            slot_offset_bytes=rank.slot_cell_offset_bytes + extent.slot_offset_bytes,
        )
        for rank in plan.ranks
        for extent in rank.extents
    )
    return PoolMap(
        pool=pool,
        num_blocks=plan.num_blocks,
        num_slots=plan.num_slots if plan.host_bytes else 0,
        bytes_per_slot=max(1, plan.bytes_per_slot),
        device_bytes=tuple(rank.device_bytes for rank in plan.ranks),
        layout_fingerprint=plan.layout_fingerprint,
        store_id=store_id,
        num_disk_slots=plan.num_disk_slots,
        file_id=file_id,
        pieces=tuple(pieces),
    )
