"""Own the packets between the daemon and a mover; what they cause is `engine`'s and `link`'s business.

A packet of a SOCK_SEQPACKET socket pair starts with its kind. To the mover: MAP and UNMAP carry a JSON object (MAP also
the descriptors of the pools), PIECES and BATCH a fixed header and packed arrays. From the mover: DONE answers each
batch. A cache's MAP is followed by its PIECES.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, Final

from kvlease.units import RANKS_MAX
from kvleased.core.effects import Direction

MAP: Final = b"M"
PIECES: Final = b"P"
UNMAP: Final = b"U"
BATCH: Final = b"B"
DONE: Final = b"D"

COPIES_A_BATCH_MAX: Final = 4096
"""Descriptors in one batch; larger ones are split, so that no batch blocks the others for long."""
PACKET_BYTES_MAX: Final = 160 * 1024
"""Bytes of one packet, above what the largest batch takes."""
PIECES_A_PACKET_MAX: Final = 3072
"""Pieces in one packet, so that it is below the bytes above."""
FDS_A_PACKET: Final = RANKS_MAX + 1
"""Descriptors beside one packet: a device region of each rank, and the host region; the kernel allows 253."""

_DIRECTIONS: Final = (
    Direction.OFFLOAD,
    Direction.RELOAD,
    Direction.SCRUB,
    Direction.DUPLICATE,
)
_BATCH_HEADER: Final = struct.Struct("<cBBxIQIII")
_PIECES_HEADER: Final = struct.Struct("<cxxxI")
_PIECE: Final = struct.Struct("<5q")
_DONE_HEADER: Final = struct.Struct("<cB2xIQIIQQ")
_ITEM_BYTES: Final = 4
_CHECKSUM_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Copies of one direction in one cache."""

    number: int
    pool: int
    """The number under which the cache's pools were mapped."""
    direction: Direction
    with_checksums: bool
    source_ids: bytes
    """Packed int32; empty for SCRUB."""
    target_ids: bytes
    checksums: bytes = b""
    """Packed uint64 that reloaded bytes must have, 0 where unknown; empty checks nothing."""

    @property
    def num_copies(self) -> int:
        """Blocks to copy or to scrub."""
        return len(self.target_ids) // _ITEM_BYTES

    def encode(self) -> bytes:
        """Return the batch as one packet."""
        header = _BATCH_HEADER.pack(
            BATCH,
            _DIRECTIONS.index(self.direction),
            self.with_checksums,
            self.pool,
            self.number,
            len(self.source_ids) // _ITEM_BYTES,
            self.num_copies,
            len(self.checksums) // _CHECKSUM_BYTES,
        )
        return b"".join((header, self.source_ids, self.target_ids, self.checksums))

    @classmethod
    def decode(cls, packet: bytes) -> "Batch":
        """Return the batch of a packet."""
        _, direction, with_checksums, pool, number, num_sources, num_targets, num_checksums = (
            _BATCH_HEADER.unpack_from(packet)
        )
        sources_end = _BATCH_HEADER.size + num_sources * _ITEM_BYTES
        targets_end = sources_end + num_targets * _ITEM_BYTES
        assert len(packet) == targets_end + num_checksums * _CHECKSUM_BYTES, "batch cut off"
        return cls(
            number=number,
            pool=pool,
            direction=_DIRECTIONS[direction],
            with_checksums=bool(with_checksums),
            source_ids=packet[_BATCH_HEADER.size : sources_end],
            target_ids=packet[sources_end:targets_end],
            checksums=packet[targets_end:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one batch."""

    number: int
    is_done: bool
    """False where the batch was refused; then nothing of it was written."""
    checksums: bytes = b""
    failed: tuple[int, ...] = ()
    """Positions whose bytes did not have their checksum."""
    num_bytes: int = 0
    nanoseconds: int = 0

    def encode(self) -> bytes:
        """Return the completion as one packet."""
        header = _DONE_HEADER.pack(
            DONE,
            self.is_done,
            len(self.failed),
            self.number,
            len(self.checksums) // _CHECKSUM_BYTES,
            0,
            self.num_bytes,
            self.nanoseconds,
        )
        return b"".join(
            (header, self.checksums, struct.pack(f"<{len(self.failed)}I", *self.failed))
        )

    @classmethod
    def decode(cls, packet: bytes) -> "Completion":
        """Return the completion of a packet."""
        _, is_done, num_failed, number, num_checksums, _, num_bytes, nanoseconds = (
            _DONE_HEADER.unpack_from(packet)
        )
        checksums_end = _DONE_HEADER.size + num_checksums * _CHECKSUM_BYTES
        return cls(
            number=number,
            is_done=bool(is_done),
            checksums=packet[_DONE_HEADER.size : checksums_end],
            failed=struct.unpack_from(f"<{num_failed}I", packet, checksums_end),
            num_bytes=num_bytes,
            nanoseconds=nanoseconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of every block: num_bytes of block b at offset_bytes + b * block_stride_bytes of a rank's region."""

    rank: int
    offset_bytes: int
    block_stride_bytes: int
    num_bytes: int
    slot_offset_bytes: int
    """Where the piece lies in a slot; pieces of several ranks lie at one place where the ranks keep equal bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMap:
    """The pools of one cache; the descriptors of each rank's device region, then the host's, come beside the packet."""

    pool: int
    num_blocks: int
    num_slots: int
    bytes_per_slot: int
    device_bytes: tuple[int, ...]
    """Bytes of each rank's device region."""
    pieces: tuple[Piece, ...] = ()

    def packets(self) -> list[bytes]:
        """Return the packets that say it, of which the first goes with the descriptors."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "pieces"}
        packets = [MAP + json.dumps(fields).encode()]
        for start in range(0, len(self.pieces), PIECES_A_PACKET_MAX):
            packed = (
                _PIECE.pack(*astuple(piece))
                for piece in self.pieces[start : start + PIECES_A_PACKET_MAX]
            )
            packets.append(_PIECES_HEADER.pack(PIECES, self.pool) + b"".join(packed))
        return packets

    @classmethod
    def decode(cls, packet: bytes) -> "PoolMap":
        """Return what a MAP packet says; its pieces are in the packets after it."""
        fields: dict[str, Any] = json.loads(packet[1:])
        return cls(**fields | {"device_bytes": tuple(fields["device_bytes"])})


def decode_pieces(packet: bytes) -> tuple[int, tuple[Piece, ...]]:
    """Return the cache number and the pieces of a PIECES packet."""
    _, pool = _PIECES_HEADER.unpack_from(packet)
    return pool, tuple(_pieces(packet[_PIECES_HEADER.size :]))


def encode_unmap(pool: int) -> bytes:
    """Return the packet that has a mover forget a cache's pools."""
    return UNMAP + json.dumps({"pool": pool}).encode()


def decode_unmap(packet: bytes) -> int:
    """Return the cache number of an unmap packet."""
    return int(json.loads(packet[1:])["pool"])


def _pieces(packed: bytes) -> Iterator[Piece]:
    for rank, offset, stride, num_bytes, slot_offset in _PIECE.iter_unpack(packed):
        yield Piece(
            rank=rank,
            offset_bytes=offset,
            block_stride_bytes=stride,
            num_bytes=num_bytes,
            slot_offset_bytes=slot_offset,
        )
