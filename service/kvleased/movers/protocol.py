"""Own the packets between the daemon and a mover; what they cause is `engine`'s and `link`'s business.

A packet of a SOCK_SEQPACKET socket pair starts with its kind. To the mover: MAP and UNMAP carry a JSON object (MAP also
the descriptors of the pools), BATCH a fixed header and packed arrays. From the mover: DONE answers each batch.
"""

import json
import struct
from dataclasses import dataclass
from typing import Any, Final

from kvleased.core.effects import Direction

MAP: Final = b"M"
UNMAP: Final = b"U"
BATCH: Final = b"B"
DONE: Final = b"D"

COPIES_A_BATCH_MAX: Final = 4096
"""Descriptors in one batch; larger ones are split, so that no batch blocks the others for long."""
PACKET_BYTES_MAX: Final = 160 * 1024
"""Bytes of one packet, above what the largest batch takes."""

_DIRECTIONS: Final = (Direction.OFFLOAD, Direction.RELOAD, Direction.SCRUB)
_BATCH_HEADER: Final = struct.Struct("<cBBxIQIII")
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
class PoolMap:
    """The pools of one cache, whose descriptors (device, then host where there is one) come beside the packet."""

    pool: int
    bytes_per_block: int
    num_blocks: int
    num_slots: int

    def encode(self) -> bytes:
        """Return the message as one packet."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return MAP + json.dumps(fields).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "PoolMap":
        """Return the message of a packet."""
        fields: dict[str, Any] = json.loads(packet[1:])
        return cls(**fields)


def encode_unmap(pool: int) -> bytes:
    """Return the packet that has a mover forget a cache's pools."""
    return UNMAP + json.dumps({"pool": pool}).encode()


def decode_unmap(packet: bytes) -> int:
    """Return the cache number of an unmap packet."""
    return int(json.loads(packet[1:])["pool"])
