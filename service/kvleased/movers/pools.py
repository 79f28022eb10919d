"""Own what movers know of pools on any device: their contract, and where the pieces of blocks lie in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.geometry import floor_div
from kvleased.core.effects import Direction
from kvleased.movers.protocol import Batch, Piece
from kvleased.movers.rows import Pool

Region = NDArray[np.uint8]
"""All bytes of a region, in one dimension."""


class OutOfBoundsError(Exception):
    """A batch names a block outside its pool; nothing of it is carried out."""

    def __init__(self, reason: str = "its parts do not match, or are not for this mover") -> None:
        """Say what is wrong with the batch."""
        super().__init__(reason)


@dataclass(slots=True)
class Copied:
    """The result of a batch."""

    checksums: bytes = b""
    failed: list[int] = field(default_factory=list)


class BatchIds(NamedTuple):
    """The ids in a batch, in its order."""

    sources: NDArray[np.int32]
    """Of a scrub, the same as the targets."""
    targets: NDArray[np.int32]
    wanted: NDArray[np.uint64]
    """The checksums that the sources of a reload must have, 0 if unknown; if empty, nothing is checked."""


class Pools(Protocol):
    """The device pools of all ranks and the host pool of one cache."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks whose pieces all lie in their regions."""

    @property
    def slots(self) -> Pool:
        """[slots, bytes_per_slot]: the host pool."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block, over all ranks that keep different bytes."""

    @property
    def image_bytes(self) -> int:
        """Bytes of a slot up to the end of its last piece."""

    def with_pieces(self, pieces: Sequence[Piece]) -> Self:
        """Return the same pools with more pieces."""

    def carry_out(self, batch: Batch) -> Copied:
        """Copy or scrub what the batch says.

        Raises:
            OutOfBoundsError: an id lies outside its pool; nothing was written.
        """

    def scatter_slot(self, block: int, image: NDArray[np.uint8]) -> None:
        """Write one block of the device pool, on every rank, from the bytes of a slot; they are read by the end.

        Raises:
            OutOfBoundsError: the block lies outside the pool, or the image is shorter than a block needs.
        """

    def close(self) -> None:
        """Let go of the memory; no copy may still use it."""


def blocks_inside(num_blocks: int, pieces: Sequence[Piece], device_bytes: Sequence[int]) -> int:
    """Return how many blocks lie in their regions with all of their pieces."""
    return min((num_blocks, *(_rows_inside(piece, device_bytes[piece.rank]) for piece in pieces)))


def slots_in(host: Region, bytes_per_slot: int, pieces: Sequence[Piece]) -> Pool:
    """Return the slots of a host region; none if a piece would lie outside its slot."""
    if any(piece.slot_offset_bytes + piece.num_bytes > bytes_per_slot for piece in pieces):
        host = host[:0]
    num_slots = floor_div(len(host), bytes_per_slot)
    return host[: num_slots * bytes_per_slot].reshape(num_slots, bytes_per_slot)


def replicas(pieces: Sequence[Piece]) -> list[bool]:
    """Tell for each piece whether an earlier rank keeps the same bytes, so that only that rank's piece is offloaded."""
    first_rank: dict[int, int] = {}
    for piece in pieces:
        first_rank.setdefault(piece.slot_offset_bytes, piece.rank)
    return [first_rank[piece.slot_offset_bytes] != piece.rank for piece in pieces]


def image_bytes_of(pieces: Sequence[Piece]) -> int:
    """Return the bytes of a slot up to the end of its last piece."""
    return max((one.slot_offset_bytes + one.num_bytes for one in pieces), default=0)


def ids_of(batch: Batch, *, num_blocks: int, num_slots: int) -> BatchIds:
    """Return the ids in a batch between device and host.

    Raises:
        OutOfBoundsError: an id lies outside its pool, or the arrays do not match in length.
    """
    targets = np.frombuffer(batch.target_ids, np.int32)
    if batch.direction is Direction.SCRUB:
        check_bounds(targets, num_blocks, "device")
        return BatchIds(targets, targets, _NO_SUMS)
    sources = np.frombuffer(batch.source_ids, np.int32)
    is_offload = batch.direction is Direction.OFFLOAD
    is_within = batch.direction is Direction.DUPLICATE
    device, host = (num_blocks, "device"), (num_slots, "host")
    check_bounds(sources, *(device if is_offload or is_within else host))
    check_bounds(targets, *(host if is_offload else device))
    is_checked = batch.direction is Direction.RELOAD
    wanted = np.frombuffer(batch.checksums if is_checked else b"", np.uint64)
    if len(sources) != len(targets) or len(wanted) not in {0, len(targets)}:
        raise OutOfBoundsError
    assert not is_within or not np.intersect1d(sources, targets).size, "a source is overwritten"
    return BatchIds(sources, targets, wanted)


def check_bounds(ids: NDArray[np.int32], num_rows: int, tier: str) -> None:
    """Refuse ids of a tier's blocks or slots that lie outside the memory or file of that tier."""
    if not len(ids):
        return
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= num_rows:
        raise OutOfBoundsError(
            f"it names {least if least < 0 else most} of the {tier} tier, which has {num_rows}"
        )


def differing(sums: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> list[int]:
    """Return the positions whose sums differ from the wanted ones."""
    # 0 stands for "no checksum was taken", which proves nothing either way.
    return np.flatnonzero((wanted != 0) & (sums != wanted)).tolist()


def _rows_inside(piece: Piece, region_bytes: int) -> int:
    """Return how many blocks have offset_bytes + b * block_stride_bytes + num_bytes <= region_bytes."""
    room = region_bytes - piece.offset_bytes - piece.num_bytes
    return floor_div(room, piece.block_stride_bytes) + 1 if room >= 0 else 0


_NO_SUMS: Final = np.zeros(0, np.uint64)
