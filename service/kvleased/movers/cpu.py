"""Own copies between pools of CPU memory; `engine` handles the packets that ask for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlease.geometry import floor_div
from kvleased.core.effects import Direction
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
from kvleased.movers.rows import (
    RUN_BYTES_MAX,
    SMALL_BYTES,
    SMALLEST_BYTES_MAX,
    Pool,
    Run,
    checksum,
    copied_at_once,
    copy_and_sum,
    copy_and_sum_each,
    copy_and_sum_small,
    copy_each,
    copy_runs,
    runs_from,
)

__all__: Final = ["Copied", "CpuPools", "OutOfBoundsError", "Pool", "Region", "checksum"]


@dataclass(frozen=True, slots=True)
class _Track:
    """One piece of all blocks, on the device and on the host."""

    device: Pool
    host: Pool
    is_replica: bool
    """Whether an earlier rank keeps the same bytes, so that only that rank's piece is offloaded."""


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
    parts_of_slot: tuple[_Track, ...]
    """The tracks whose pieces make up a slot, in its order; empty if other bytes lie between them."""

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
        pieces = tuple(piece for piece in pieces if piece.num_bytes)
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
            pieces=pieces,
            tracks=tracks,
            parts_of_slot=_parts_of_slot(pieces, tracks),
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
        # Copy in the order of the written memory: that is quicker, and more blocks are found adjacent.
        order = np.argsort(targets)
        sources, targets = sources[order], targets[order]
        if is_offload and batch.with_checksums:
            sums = _in_order(order, self._copy_and_sum(sources, targets, is_offload=True))
            return Copied(checksums=sums.tobytes())
        if len(wanted):
            sums = _in_order(order, self._copy_and_sum(sources, targets, is_offload=False))
            return Copied(failed=differing(sums, wanted))
        self._copy(sources, targets, is_offload=is_offload)
        return Copied()

    def gather_slot(self, slot: int) -> memoryview:
        """Return the bytes of a slot that its pieces take, as they are; a block's checksum is taken over these.

        Raises:
            OutOfBoundsError: the slot lies outside the pool.
        """
        if not 0 <= slot < len(self.slots):
            raise OutOfBoundsError
        return self.slots[slot, : self.image_bytes].data

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
        order = np.argsort(targets)
        runs = self._runs(sources[order], targets[order])
        for track in self.tracks:
            if track.device.flags.c_contiguous:
                copy_runs(track.device, track.device, runs)
                continue
            for source_id, target_id, count in runs:
                source = track.device[source_id : source_id + count]
                track.device[target_id : target_id + count] = source

    def _copy(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], *, is_offload: bool
    ) -> None:
        if not self._is_whole:
            self._copy_pieces(self._runs(sources, targets), is_offload=is_offload)
            return
        source, target = self._whole_ends(is_offload=is_offload)
        firsts = self._firsts(sources, targets)
        if not self._is_scattered(firsts, targets):
            copy_runs(source, target, runs_from(firsts, sources, targets))
        elif self.bytes_per_block > SMALL_BYTES or not copied_at_once(
            source, target, sources, targets
        ):
            copy_each(source, target, sources, targets)

    def _copy_and_sum(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], *, is_offload: bool
    ) -> list[int]:
        """Copy the blocks, and return the xxh3 of each block's bytes in a slot."""
        if not self._is_whole:
            runs = self._runs(sources, targets)
            return self._copy_and_sum_pieces(runs, is_offload=is_offload)
        source, target = self._whole_ends(is_offload=is_offload)
        firsts = self._firsts(sources, targets)
        if self.bytes_per_block > RUN_BYTES_MAX or not self._is_scattered(firsts, targets):
            return copy_and_sum(source, target, runs_from(firsts, sources, targets))
        if self.bytes_per_block <= SMALLEST_BYTES_MAX:
            return copy_and_sum_small(source, target, sources, targets)
        return copy_and_sum_each(source, target, sources, targets)

    @staticmethod
    def _is_scattered(firsts: NDArray[np.intp], targets: NDArray[np.int32]) -> bool:
        """Tell whether most blocks are adjacent to the previous block at one end only, or at none."""
        return 2 * len(firsts) > len(targets)

    def _whole_ends(self, *, is_offload: bool) -> tuple[Pool, Pool]:
        """Return the source and the target pool of blocks that are one piece each."""
        (track,) = self.tracks
        return (track.device, track.host) if is_offload else (track.host, track.device)

    def _copy_pieces(self, runs: Iterable[Run], *, is_offload: bool) -> None:
        if is_offload:
            ends = [(one.device, one.host) for one in self.tracks if not one.is_replica]
        else:
            ends = [(one.host, one.device) for one in self.tracks]
        for source_id, target_id, count in runs:
            for source, target in ends:
                target[target_id : target_id + count] = source[source_id : source_id + count]

    def _copy_and_sum_pieces(self, runs: Iterable[Run], *, is_offload: bool) -> list[int]:
        """Copy block by block, and return the xxh3 of each block's bytes in a slot."""
        sums = []
        for source_id, target_id, count in runs:
            for source, target in zip(
                range(source_id, source_id + count),
                range(target_id, target_id + count),
                strict=True,
            ):
                if self.parts_of_slot:
                    sums.append(self._copy_and_sum_parts(source, target, is_offload=is_offload))
                    continue
                self._copy_pieces([(source, target, 1)], is_offload=is_offload)
                sums.append(checksum(self.gather_slot(target if is_offload else source)))
        return sums

    def _copy_and_sum_parts(self, source_id: int, target_id: int, *, is_offload: bool) -> int:
        """Copy one block and return its xxh3, which takes in each piece while that is still in the cache."""
        summing = xxhash.xxh3_64()
        for part in self.parts_of_slot:
            pools = (part.device, part.host) if is_offload else (part.host, part.device)
            source = pools[0][source_id]
            pools[1][target_id] = source
            summing.update(source.data)
        if not is_offload:
            for track in self.tracks:
                if track.is_replica:
                    track.device[target_id] = track.host[source_id]
        return summing.intdigest()

    @property
    def _is_whole(self) -> bool:
        """Whether a block is one piece that follows the previous block at both ends, so that runs are pieces, too."""
        return len(self.tracks) == 1 and all(
            pool.flags.c_contiguous for pool in (self.tracks[0].device, self.tracks[0].host)
        )

    def _runs(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> list[Run]:
        """Return the runs of blocks that are adjacent at both ends, none of them too long."""
        return runs_from(self._firsts(sources, targets), sources, targets)

    def _firsts(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the positions at which those runs start."""
        blocks_max = max(1, floor_div(RUN_BYTES_MAX, max(1, self.bytes_per_block)))
        breaks = np.ones(len(targets), bool)
        breaks[1:] = (sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)
        positions = np.arange(len(targets))
        if breaks.all():
            return positions
        stretches = np.maximum.accumulate(np.where(breaks, positions, 0))
        return np.flatnonzero((positions - stretches) % blocks_max == 0)


def _parts_of_slot(pieces: Sequence[Piece], tracks: Sequence[_Track]) -> tuple[_Track, ...]:
    own = [pair for pair in zip(pieces, tracks, strict=True) if not pair[1].is_replica]
    own.sort(key=lambda pair: pair[0].slot_offset_bytes)
    end = 0
    for piece, _ in own:
        if piece.slot_offset_bytes != end:
            return ()
        end += piece.num_bytes
    return tuple(track for _, track in own)


def _strided(region: Region, piece: Piece, num_blocks: int) -> Pool:
    # The constructor refuses whatever does not lie in the buffer, whatever was computed before.
    return np.ndarray(
        (num_blocks, piece.num_bytes),
        np.uint8,
        region,
        piece.offset_bytes if num_blocks else 0,
        (piece.block_stride_bytes, 1),
    )


def _scrub(tracks: Iterable[_Track], runs: Sequence[Run]) -> None:
    for track in tracks:
        for _, target_id, count in runs:
            track.device[target_id : target_id + count] = 0


def _in_order(order: NDArray[np.intp], sums: list[int]) -> NDArray[np.uint64]:
    """Return the sums, found in another order, as checksums in the order of the batch; no checksum is 0."""
    found = np.empty(len(order), np.uint64)
    found[order] = sums
    found[found == 0] = 1
    return found
