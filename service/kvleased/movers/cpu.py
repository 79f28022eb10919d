"""Own copies between pools of CPU memory; the packets that ask for them are `engine`'s business."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlease.geometry import floor_div
from kvleased.core.effects import Direction
from kvleased.movers.protocol import Batch, Piece
from kvleased.movers.rows import (
    RUN_BYTES_MAX,
    SMALL_BYTES,
    Pool,
    Run,
    checksum,
    copied_at_once,
    copy_and_sum,
    copy_and_sum_each,
    copy_runs,
    runs_from,
)

__all__: Final = ["Copied", "CpuPools", "OutOfBoundsError", "Pool", "Region", "checksum"]

Region = NDArray[np.uint8]
"""All bytes of a region, in one dimension."""


class OutOfBoundsError(Exception):
    """A batch names a block outside its pool; nothing of it is carried out."""


@dataclass(slots=True)
class Copied:
    """What a batch led to."""

    checksums: bytes = b""
    failed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Track:
    """One piece of all blocks, at both ends."""

    device: Pool
    host: Pool
    is_replica: bool
    """Whether a rank before this one keeps the same bytes, so that only that one is offloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPools:
    """The device pools of all ranks and the host pool of one cache, as the pieces that a block is made of."""

    devices: tuple[Region, ...]
    slots: Pool
    """[slots, bytes_per_slot]"""
    num_blocks: int
    """Blocks all of whose pieces lie in their regions."""
    pieces: tuple[Piece, ...]
    tracks: tuple[_Track, ...]
    parts_of_slot: tuple[_Track, ...]
    """The tracks whose pieces make up a slot, in its order; none if other bytes lie between them."""

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
        """Lay the pieces over the regions; whatever would lie outside of them is no block, or slot, of the pools."""
        # An empty piece would claim the place of another one in the slot.
        pieces = tuple(piece for piece in pieces if piece.num_bytes)
        fitting = (_rows_inside(piece, len(devices[piece.rank])) for piece in pieces)
        num_blocks = min((num_blocks, *fitting))
        if any(piece.slot_offset_bytes + piece.num_bytes > bytes_per_slot for piece in pieces):
            host = host[:0]
        num_slots = floor_div(len(host), bytes_per_slot)
        slots = host[: num_slots * bytes_per_slot].reshape(num_slots, bytes_per_slot)
        first_rank: dict[int, int] = {}
        for piece in pieces:
            first_rank.setdefault(piece.slot_offset_bytes, piece.rank)
        tracks = tuple(
            _Track(
                device=_strided(devices[piece.rank], piece, num_blocks),
                host=slots[:, piece.slot_offset_bytes :][:, : piece.num_bytes],
                is_replica=first_rank[piece.slot_offset_bytes] != piece.rank,
            )
            for piece in pieces
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
        """Bytes of a block over all ranks that keep different ones."""
        return sum(track.host.shape[1] for track in self.tracks if not track.is_replica)

    def carry_out(self, batch: Batch) -> Copied:
        """Copy or scrub what the batch says; a duplicate never has one block as both source and target.

        Raises:
            OutOfBoundsError: some id lies outside its pool; then nothing was written.
        """
        targets = np.frombuffer(batch.target_ids, np.int32)
        sources = np.frombuffer(batch.source_ids, np.int32)
        if batch.direction is Direction.SCRUB:
            _check_bounds(targets, self.num_blocks)
            targets = np.sort(targets)
            _scrub(self.tracks, self._runs(targets, targets))
            return Copied()
        if batch.direction is Direction.DUPLICATE:
            self._duplicate(sources, targets)
            return Copied()
        is_offload = batch.direction is Direction.OFFLOAD
        num_slots = len(self.slots)
        _check_bounds(sources, self.num_blocks if is_offload else num_slots)
        _check_bounds(targets, num_slots if is_offload else self.num_blocks)
        wanted = np.frombuffer(b"" if is_offload else batch.checksums, np.uint64)
        if len(sources) != len(targets) or len(wanted) not in {0, len(targets)}:
            raise OutOfBoundsError
        # In the order of the memory that is written: that is quicker, and more blocks are found adjacent.
        order = np.argsort(targets)
        sources, targets = sources[order], targets[order]
        if is_offload and batch.with_checksums:
            sums = _in_order(order, self._copy_and_sum(sources, targets, is_offload=True))
            return Copied(checksums=sums.tobytes())
        if len(wanted):
            sums = _in_order(order, self._copy_and_sum(sources, targets, is_offload=False))
            # 0 stands for "no checksum was taken", which proves nothing either way.
            return Copied(failed=np.flatnonzero((wanted != 0) & (sums != wanted)).tolist())
        self._copy(sources, targets, is_offload=is_offload)
        return Copied()

    def gather_slot(self, slot: int) -> memoryview:
        """Return the bytes of a slot that pieces lie in, as they are: a block's checksum is one over these.

        Raises:
            OutOfBoundsError: the slot lies outside the pool.
        """
        if not 0 <= slot < len(self.slots):
            raise OutOfBoundsError
        return self.slots[slot, : self.image_bytes].data

    def scatter_slot(self, block: int, image: NDArray[np.uint8]) -> None:
        """Write one block of the device pool, on every rank, from the bytes of a slot.

        Raises:
            OutOfBoundsError: the block lies outside the pool, or the image is shorter than what a block takes.
        """
        if not 0 <= block < self.num_blocks or len(image) < self.image_bytes:
            raise OutOfBoundsError
        for piece, track in zip(self.pieces, self.tracks, strict=True):
            start = piece.slot_offset_bytes
            track.device[block] = image[start : start + piece.num_bytes]

    @property
    def image_bytes(self) -> int:
        """Bytes of a slot up to the end of its last piece."""
        return max((one.slot_offset_bytes + one.num_bytes for one in self.pieces), default=0)

    def _duplicate(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy blocks to other ones of the device pool, on every rank: none of them leaves its region."""
        _check_bounds(sources, self.num_blocks)
        _check_bounds(targets, self.num_blocks)
        if len(sources) != len(targets):
            raise OutOfBoundsError
        assert not np.intersect1d(sources, targets).size, "a block is copied over while it is read"
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
        is_small = self.bytes_per_block <= SMALL_BYTES and 2 * len(firsts) > len(targets)
        if not (is_small and copied_at_once(source, target, sources, targets)):
            copy_runs(source, target, runs_from(firsts, sources, targets))

    def _copy_and_sum(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32], *, is_offload: bool
    ) -> list[int]:
        """Copy, and return the checksum of each block's bytes in a slot."""
        if not self._is_whole:
            runs = self._runs(sources, targets)
            return self._copy_and_sum_pieces(runs, is_offload=is_offload)
        source, target = self._whole_ends(is_offload=is_offload)
        firsts = self._firsts(sources, targets)
        if len(firsts) == len(targets) and target.shape[1] <= RUN_BYTES_MAX:
            return copy_and_sum_each(source, target, sources, targets)
        return copy_and_sum(source, target, runs_from(firsts, sources, targets))

    def _whole_ends(self, *, is_offload: bool) -> tuple[Pool, Pool]:
        """Return source and target of blocks that are one piece each."""
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
        """Copy block by block, and return the checksum of each one's bytes in a slot."""
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
        """Copy one block and return its checksum, to which each piece adds while it is in the cache."""
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
        return summing.intdigest() or 1

    @property
    def _is_whole(self) -> bool:
        """Whether a block is one piece that follows the block before at both ends, so that runs are one piece, too."""
        return len(self.tracks) == 1 and all(
            pool.flags.c_contiguous for pool in (self.tracks[0].device, self.tracks[0].host)
        )

    def _runs(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> list[Run]:
        """Return each stretch of blocks, not too long, that are adjacent at both ends."""
        return runs_from(self._firsts(sources, targets), sources, targets)

    def _firsts(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the positions at which those stretches start."""
        blocks_max = max(1, floor_div(RUN_BYTES_MAX, max(1, self.bytes_per_block)))
        breaks = np.ones(len(targets), bool)
        breaks[1:] = (sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)
        positions = np.arange(len(targets))
        if breaks.all():
            return positions
        stretches = np.maximum.accumulate(np.where(breaks, positions, 0))
        return np.flatnonzero((positions - stretches) % blocks_max == 0)


def _rows_inside(piece: Piece, region_bytes: int) -> int:
    """Return how many blocks have offset_bytes + b * block_stride_bytes + num_bytes <= region_bytes."""
    room = region_bytes - piece.offset_bytes - piece.num_bytes
    return floor_div(room, piece.block_stride_bytes) + 1 if room >= 0 else 0


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
    # The constructor refuses what does not lie in the buffer, whatever was computed before.
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


def _check_bounds(ids: NDArray[np.int32], num_rows: int) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= num_rows):
        raise OutOfBoundsError


def _in_order(order: NDArray[np.intp], sums: list[int]) -> NDArray[np.uint64]:
    """Return what was found in another order in the order of the batch."""
    found = np.empty(len(order), np.uint64)
    found[order] = sums
    return found
