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

_RUN_BYTES_MAX: Final = 1 << 18
"""Bytes of a run of adjacent blocks that is copied in one go: it should still be in the cache for its checksums."""

Region = NDArray[np.uint8]
"""All bytes of a region, in one dimension."""
Pool = NDArray[np.uint8]
"""[blocks, bytes] or [slots, bytes]: a piece of every block, wherever it lies."""
_Run = tuple[int, int, int]
"""First source, first target, blocks."""


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
        runs = self._runs(sources[order], targets[order])
        if is_offload and batch.with_checksums:
            sums = _in_order(order, self._copy(runs, is_offload=True, is_summed=True))
            return Copied(checksums=sums.tobytes())
        if len(wanted):
            sums = _in_order(order, self._copy(runs, is_offload=False, is_summed=True))
            # 0 stands for "no checksum was taken", which proves nothing either way.
            return Copied(failed=np.flatnonzero((wanted != 0) & (sums != wanted)).tolist())
        self._copy(runs, is_offload=is_offload, is_summed=False)
        return Copied()

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
                _copy(track.device, track.device, runs)
                continue
            for source_id, target_id, count in runs:
                source = track.device[source_id : source_id + count]
                track.device[target_id : target_id + count] = source

    def _copy(self, runs: Iterable[_Run], *, is_offload: bool, is_summed: bool) -> list[int]:
        """Copy, and return the checksum of each block's bytes in a slot; none where none are wanted."""
        if not self._is_whole:
            return self._copy_pieces(runs, is_offload=is_offload, is_summed=is_summed)
        (track,) = self.tracks
        source, target = (track.device, track.host) if is_offload else (track.host, track.device)
        if is_summed:
            return _copy_and_sum(source, target, runs)
        _copy(source, target, runs)
        return []

    def _copy_pieces(self, runs: Iterable[_Run], *, is_offload: bool, is_summed: bool) -> list[int]:
        if is_offload:
            ends = [(one.device, one.host) for one in self.tracks if not one.is_replica]
        else:
            ends = [(one.host, one.device) for one in self.tracks]
        num_bytes = self.image_bytes
        sums: list[int] = []
        for source_id, target_id, count in runs:
            for source, target in ends:
                target[target_id : target_id + count] = source[source_id : source_id + count]
            if is_summed:
                first = target_id if is_offload else source_id
                sums += [
                    checksum(self.slots[slot, :num_bytes].data)
                    for slot in range(first, first + count)
                ]
        return sums

    @property
    def _is_whole(self) -> bool:
        """Whether a block is one piece that follows the block before at both ends, so that runs are one piece, too."""
        return len(self.tracks) == 1 and all(
            pool.flags.c_contiguous for pool in (self.tracks[0].device, self.tracks[0].host)
        )

    def _runs(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> list[_Run]:
        """Return (source, target, blocks) of each stretch of blocks, not too long, that are adjacent at both ends."""
        blocks_max = max(1, floor_div(_RUN_BYTES_MAX, max(1, self.bytes_per_block)))
        positions = np.arange(len(targets))
        breaks = np.ones(len(targets), bool)
        breaks[1:] = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        stretches = np.maximum.accumulate(np.where(breaks, positions, 0))
        firsts = np.flatnonzero((positions - stretches) % blocks_max == 0)
        counts = np.diff(firsts, append=len(targets))
        return list(
            zip(sources[firsts].tolist(), targets[firsts].tolist(), counts.tolist(), strict=True)
        )


def checksum(block: memoryview) -> int:
    """Return the xxh3 of a block's bytes, never 0, which stands for "none was taken"."""
    return xxhash.xxh3_64_intdigest(block) or 1


def _rows_inside(piece: Piece, region_bytes: int) -> int:
    """Return how many blocks have offset_bytes + b * block_stride_bytes + num_bytes <= region_bytes."""
    room = region_bytes - piece.offset_bytes - piece.num_bytes
    return floor_div(room, piece.block_stride_bytes) + 1 if room >= 0 else 0


def _strided(region: Region, piece: Piece, num_blocks: int) -> Pool:
    # The constructor refuses what does not lie in the buffer, whatever was computed before.
    return np.ndarray(
        (num_blocks, piece.num_bytes),
        np.uint8,
        region,
        piece.offset_bytes if num_blocks else 0,
        (piece.block_stride_bytes, 1),
    )


def _scrub(tracks: Iterable[_Track], runs: Sequence[_Run]) -> None:
    for track in tracks:
        for _, target_id, count in runs:
            track.device[target_id : target_id + count] = 0


def _copy(source: Pool, target: Pool, runs: Iterable[_Run]) -> None:
    # Slices of a memoryview cost half of what those of an array do.
    read, written = _bytes_of(source), _bytes_of(target)
    bytes_per_block = target.shape[1]
    for source_id, target_id, count in runs:
        start, to = source_id * bytes_per_block, target_id * bytes_per_block
        num_bytes = count * bytes_per_block
        written[to : to + num_bytes] = read[start : start + num_bytes]


def _copy_and_sum(source: Pool, target: Pool, runs: Iterable[_Run]) -> list[int]:
    """Copy, and return the checksum of each block as it now lies in the target, taken while it is in the cache."""
    read, written = _bytes_of(source), _bytes_of(target)
    bytes_per_block = target.shape[1]
    sums: list[int] = []
    for source_id, target_id, count in runs:
        start, to = source_id * bytes_per_block, target_id * bytes_per_block
        num_bytes = count * bytes_per_block
        written[to : to + num_bytes] = read[start : start + num_bytes]
        sums += [
            checksum(written[block : block + bytes_per_block])
            for block in range(to, to + num_bytes, bytes_per_block)
        ]
    return sums


def _check_bounds(ids: NDArray[np.int32], num_rows: int) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= num_rows):
        raise OutOfBoundsError


def _bytes_of(pool: Pool) -> memoryview:
    return pool.reshape(-1).data


def _in_order(order: NDArray[np.intp], sums: list[int]) -> NDArray[np.uint64]:
    """Return what was found in another order in the order of the batch."""
    found = np.empty(len(order), np.uint64)
    found[order] = sums
    return found
