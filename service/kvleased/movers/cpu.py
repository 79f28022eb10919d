"""Own copies between pools of CPU memory; `engine` handles the packets that ask for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.movers.compiled import loops
from kvleased.movers.pools import (
    Copied,
    OutOfBoundsError,
    Region,
    blocks_inside,
    differing,
    ids_of,
    image_bytes_of,
    replicas,
    slots_in,
)
from kvleased.movers.protocol import Batch, Piece
from kvleased.movers.rows import Part, Pool, Runs, checksum, checksums, runs_of

__all__: Final = ["Copied", "CpuPools", "OutOfBoundsError", "Pool", "Region", "checksum"]


@dataclass(frozen=True, slots=True)
class _Track:
    """One piece of all blocks, on the device and on the host."""

    device: Pool
    host: Pool
    is_replica: bool
    """Whether an earlier rank keeps the same bytes, so that only that rank's piece is offloaded."""


_SLOT_OFFSET: Final = attrgetter("slot_offset_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPools:
    """The device pools of all ranks and the host pool of one cache, as the pieces that a block is made of."""

    devices: tuple[Region, ...]
    slots: Pool
    """[slots, bytes_per_slot]"""
    num_blocks: int
    """Number of blocks whose pieces all lie in their regions."""
    pieces: tuple[Piece, ...]
    tracks: tuple[_Track, ...]
    is_without_gaps: bool
    """Whether a slot's pieces lie one behind the other, from its first byte to the end of the last piece."""

    @classmethod
    def laid(
        cls,
        devices: tuple[Region, ...],
        host: Region,
        *,
        num_blocks: int,
        bytes_per_slot: int,
        pieces: Sequence[Piece] = (),
    ) -> Self:
        """Lay the pieces over the regions; leave out blocks and slots that would lie outside of them."""
        # An empty piece would claim another piece's place in the slot.
        pieces = sorted((one for one in pieces if one.num_bytes), key=_SLOT_OFFSET)
        num_blocks = blocks_inside(num_blocks, pieces, [len(device) for device in devices])
        slots = slots_in(host, bytes_per_slot, pieces)
        tracks = tuple(
            _Track(
                device=_strided(devices[piece.rank], piece, num_blocks),
                host=slots[:, piece.slot_offset_bytes :][:, : piece.num_bytes],
                is_replica=is_replica,
            )
            for piece, is_replica in zip(pieces, replicas(pieces), strict=True)
        )
        return cls(
            devices=devices,
            slots=slots,
            num_blocks=num_blocks,
            pieces=tuple(pieces),
            tracks=tracks,
            is_without_gaps=_are_without_gaps(pieces),
        )

    def with_pieces(self, pieces: Sequence[Piece]) -> Self:
        """Return the same pools with more pieces."""
        return self.laid(
            self.devices,
            self.slots.reshape(-1),
            num_blocks=self.num_blocks,
            bytes_per_slot=self.slots.shape[1],
            pieces=(*self.pieces, *pieces),
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block, over all ranks that keep different bytes."""
        return sum(track.host.shape[1] for track in self.tracks if not track.is_replica)

    def carry_out(self, batch: Batch) -> Copied:
        """Copy or scrub what the batch says; a duplicate never has one block as both source and target.

        Raises:
            OutOfBoundsError: an id lies outside its pool; nothing was written.
        """
        ids = ids_of(batch, num_blocks=self.num_blocks, num_slots=len(self.slots))
        sources, targets, wanted = ids
        if batch.direction is Direction.SCRUB:
            targets = np.sort(targets)
            _scrub(self.tracks, self._runs(targets, targets))
            return Copied()
        if batch.direction is Direction.DUPLICATE:
            self._duplicate(sources, targets)
            return Copied()
        is_offload = batch.direction is Direction.OFFLOAD
        # Copy in the order of the read memory: the processor fetches ahead, and more blocks are found adjacent.
        order = np.argsort(sources)
        sources, targets = sources[order], targets[order]
        if not len(wanted) and not (is_offload and batch.with_checksums):
            loops().copy(self._parts(is_offload=is_offload), self._runs(sources, targets))
            return Copied()
        sums = np.empty(len(order), np.uint64)
        sums[order] = checksums(self._copy_and_sum(sources, targets, is_offload=is_offload))
        if is_offload:
            return Copied(checksums=sums.tobytes())
        return Copied(failed=differing(sums, wanted))

    def scatter_slot(self, block: int, image: NDArray[np.uint8]) -> None:
        """Write one block of the device pool, on every rank, from the bytes of a slot.

        Raises:
            OutOfBoundsError: the block lies outside the pool, or the image is shorter than a block needs.
        """
        if not 0 <= block < self.num_blocks or len(image) < self.image_bytes:
            raise OutOfBoundsError
        for piece, track in zip(self.pieces, self.tracks, strict=True):
            start = piece.slot_offset_bytes
            track.device[block] = image[start : start + piece.num_bytes]

    @property
    def image_bytes(self) -> int:
        """Bytes of a slot up to the end of its last piece."""
        return image_bytes_of(self.pieces)

    def close(self) -> None:
        """Do nothing: the memory goes with the last array over it."""

    def _duplicate(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy blocks to other blocks of the device pool, on every rank; no byte leaves its region."""
        order = np.argsort(sources)
        parts = [Part(track.device, track.device) for track in self.tracks]
        loops().copy(parts, self._runs(sources[order], targets[order]))

    def _copy_and_sum(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], *, is_offload: bool
    ) -> NDArray[np.uint64]:
        """Copy the blocks, and return the xxh3 of each block's bytes in a slot."""
        parts, runs = self._parts(is_offload=is_offload), self._runs(sources, targets)
        if self.is_without_gaps:
            return loops().copy_and_sum(parts, runs)
        loops().copy(parts, runs)
        slot_ids = targets if is_offload else sources
        return loops().sum(self.slots[:, : self.image_bytes], slot_ids)

    def _parts(self, *, is_offload: bool) -> list[Part]:
        """Return what is copied of each block, in the order of a slot; of replicas, one is copied down, and all up."""
        if is_offload:
            return [Part(one.device, one.host) for one in self.tracks if not one.is_replica]
        return [Part(one.host, one.device, is_summed=not one.is_replica) for one in self.tracks]

    def _runs(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> Runs:
        return runs_of(sources, targets, self.bytes_per_block)


def _are_without_gaps(pieces: Sequence[Piece]) -> bool:
    """Tell whether pieces, in the order of a slot and without replicas, leave no byte between them."""
    end = 0
    for piece, is_replica in zip(pieces, replicas(pieces), strict=True):
        if is_replica:
            continue
        if piece.slot_offset_bytes != end:
            return False
        end += piece.num_bytes
    return True


def _strided(region: Region, piece: Piece, num_blocks: int) -> Pool:
    # The constructor refuses whatever does not lie in the buffer, whatever was computed before.
    return np.ndarray(
        (num_blocks, piece.num_bytes),
        np.uint8,
        region,
        piece.offset_bytes if num_blocks else 0,
        (piece.block_stride_bytes, 1),
    )


def _scrub(tracks: Iterable[_Track], runs: Runs) -> None:
    for track in tracks:
        for _, target_id, count in runs.each():
            track.device[target_id : target_id + count] = 0
