"""Own the packets between the daemon and a mover; `engine` and `link` act on them.

A packet of a SOCK_SEQPACKET socket pair starts with its kind. To the mover: MAP, UNMAP and PURGE carry a JSON object
(MAP also the descriptors of the pools); PIECES, BATCH and ASK carry a fixed header and packed arrays. From the mover:
DONE answers each BATCH, TOLD each ASK, and PURGED (a JSON object) each PURGE; FOUND tells what an earlier life left in
a store, and STATUS (a JSON object) whether a store works.

A cache's MAP is followed by its PIECES. Movers of GPUs know two more kinds, which are in `allotting`.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from typing import Any, Final

from kvlease.units import RANKS_MAX
from kvleased.core.effects import Direction
from kvleased.core.tier.labels import BYTES_PER_LABEL

MAP: Final = b"M"
PIECES: Final = b"P"
UNMAP: Final = b"U"
BATCH: Final = b"B"
DONE: Final = b"D"
ASK: Final = b"A"
TOLD: Final = b"T"
FOUND: Final = b"F"
STATUS: Final = b"S"
PURGE: Final = b"X"
PURGED: Final = b"Y"
HERE: Final = b"H"
"""Says that a mover has started; a whole packet."""

COPIES_A_BATCH_MAX: Final = 4096
"""Copies in one batch; larger ones are split, so that no batch blocks the others for long."""
LABELS_A_PACKET_MAX: Final = 1024
"""Labels in one packet, so that it stays below PACKET_BYTES_MAX; a batch of labelled copies has no more than this."""
PACKET_BYTES_MAX: Final = 160 * 1024
"""Bytes of one packet; more than the largest batch takes."""
PIECES_A_PACKET_MAX: Final = 3072
"""Pieces in one packet, so that it stays below PACKET_BYTES_MAX."""
FDS_A_PACKET: Final = RANKS_MAX + 1
"""Descriptors beside one packet: a device region of each rank, and the host region; the kernel allows 253."""

_DIRECTIONS: Final = (
    Direction.OFFLOAD,
    Direction.RELOAD,
    Direction.SCRUB,
    Direction.DUPLICATE,
    Direction.STORE,
    Direction.LOAD,
    Direction.SHARE,
    Direction.FETCH,
)
_BATCH_HEADER: Final = struct.Struct("<cBBxIQIIII")
_ASK_HEADER: Final = struct.Struct("<cxxxIQ")
_FOUND_HEADER: Final = struct.Struct("<cBxxII")
_PIECES_HEADER: Final = struct.Struct("<cxxxI")
_PIECE: Final = struct.Struct("<5q")
_DONE_HEADER: Final = struct.Struct("<cB2xIQIIQQ")
ITEM_BYTES: Final = 4
"""Bytes of a packed id."""
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
    """Packed int32; empty for SCRUB and FETCH."""
    target_ids: bytes
    """Packed int32; empty for SHARE."""
    checksums: bytes = b""
    """Packed uint64 that the source's bytes must have, 0 if unknown; if empty, nothing is checked."""
    labels: bytes = b""
    """`labels.LABEL` each; only for STORE, LOAD, SHARE and FETCH."""

    @property
    def num_copies(self) -> int:
        """Blocks to copy or to scrub."""
        return max(len(self.target_ids), len(self.source_ids)) // ITEM_BYTES

    def encode(self) -> bytes:
        """Return the batch as one packet."""
        header = _BATCH_HEADER.pack(
            BATCH,
            _DIRECTIONS.index(self.direction),
            self.with_checksums,
            self.pool,
            self.number,
            len(self.source_ids) // ITEM_BYTES,
            len(self.target_ids) // ITEM_BYTES,
            len(self.checksums) // _CHECKSUM_BYTES,
            len(self.labels) // BYTES_PER_LABEL,
        )
        return b"".join((header, self.source_ids, self.target_ids, self.checksums, self.labels))

    @classmethod
    def decode(cls, packet: bytes) -> "Batch":
        """Return the batch of a packet."""
        header = _BATCH_HEADER.unpack_from(packet)
        (
            _,
            direction,
            with_checksums,
            pool,
            number,
            num_sources,
            num_targets,
            num_sums,
            num_labels,
        ) = header
        sources_end = _BATCH_HEADER.size + num_sources * ITEM_BYTES
        targets_end = sources_end + num_targets * ITEM_BYTES
        sums_end = targets_end + num_sums * _CHECKSUM_BYTES
        assert len(packet) == sums_end + num_labels * BYTES_PER_LABEL, "batch cut off"
        return cls(
            number=number,
            pool=pool,
            direction=_DIRECTIONS[direction],
            with_checksums=bool(with_checksums),
            source_ids=packet[_BATCH_HEADER.size : sources_end],
            target_ids=packet[sources_end:targets_end],
            checksums=packet[targets_end:sums_end],
            labels=packet[sums_end:],
        )


def direction_of(packet: bytes) -> Direction:
    """Return the direction of a batch without looking at the rest of it."""
    return _DIRECTIONS[packet[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one batch."""

    number: int
    is_done: bool
    """False if the batch was refused; then nothing of it was written."""
    checksums: bytes = b""
    failed: tuple[int, ...] = ()
    """Positions whose bytes do not have their checksum."""
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
    """Where the piece lies in a slot; pieces of ranks that keep equal bytes lie at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMap:
    """The pools of one cache; beside the packet come the descriptors of each rank's device region, then the host's."""

    pool: int
    num_blocks: int
    num_slots: int
    bytes_per_slot: int
    device_bytes: tuple[int, ...]
    """Bytes of each rank's device region."""
    layout_fingerprint: str = ""
    """Hex of the 32 bytes that tell what the bytes mean; they are part of every label in a store."""
    store_id: str = ""
    """Hex that names the cache's files in a store: the same in every life, but different for any other registration."""
    num_disk_slots: int = 0
    file_id: str = ""
    """The disk store's file, as STATUS named it, whose slots the daemon knows; a store looks through any other file."""
    pieces: tuple[Piece, ...] = ()

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, over all ranks."""
        return sum(piece.num_bytes for piece in self.pieces)

    def packets(self) -> list[bytes]:
        """Return the packets that carry this; the first goes with the descriptors."""
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
    """Return the packet that makes a mover forget a cache's pools."""
    return UNMAP + json.dumps({"pool": pool}).encode()


def decode_unmap(packet: bytes) -> int:
    """Return the cache number of an unmap packet."""
    return int(json.loads(packet[1:])["pool"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question: which of some blocks does a remote store have? Answered by Told."""

    number: int
    pool: int
    labels: bytes
    """`labels.LABEL` each, at most LABELS_A_PACKET_MAX."""

    def encode(self) -> bytes:
        """Return the question as one packet."""
        return _ASK_HEADER.pack(ASK, self.pool, self.number) + self.labels

    @classmethod
    def decode(cls, packet: bytes) -> "Ask":
        """Return the question of a packet."""
        _, pool, number = _ASK_HEADER.unpack_from(packet)
        return cls(number=number, pool=pool, labels=packet[_ASK_HEADER.size :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The answer to an Ask."""

    number: int
    is_present: bytes = b""
    """A byte for each label, 1 if the store has it; empty if nobody knows."""

    def encode(self) -> bytes:
        """Return the answer as one packet."""
        return _ASK_HEADER.pack(TOLD, 0, self.number) + self.is_present

    @classmethod
    def decode(cls, packet: bytes) -> "Told":
        """Return the answer of a packet."""
        _, _, number = _ASK_HEADER.unpack_from(packet)
        return cls(number=number, is_present=packet[_ASK_HEADER.size :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """A request to remove the file of a cache's disk store, with all that it holds; answered by Purged."""

    pool: int

    def encode(self) -> bytes:
        """Return the request as one packet."""
        return PURGE + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "Purge":
        """Return the request of a packet."""
        return cls(**json.loads(packet[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """The answer to a Purge: the store's file is gone for good, or there is a reason why it may still be there."""

    pool: int
    reason: str = ""
    """Why it may still be there, for people; empty if it is gone."""

    def encode(self) -> bytes:
        """Return the answer as one packet."""
        return PURGED + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "Purged":
        """Return the answer of a packet."""
        return cls(**json.loads(packet[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Slots that an earlier life left in a cache's disk store and that are whole by their headers."""

    pool: int
    slot_ids: bytes
    """Packed int32, at most LABELS_A_PACKET_MAX."""
    labels: bytes
    checksums: bytes
    """Packed uint64."""
    is_last: bool
    """Whether the whole store has been looked through."""

    def encode(self) -> bytes:
        """Return the finding as one packet."""
        num_slots = len(self.slot_ids) // ITEM_BYTES
        header = _FOUND_HEADER.pack(FOUND, self.is_last, self.pool, num_slots)
        return b"".join((header, self.slot_ids, self.labels, self.checksums))

    @classmethod
    def decode(cls, packet: bytes) -> "Found":
        """Return the finding of a packet."""
        _, is_last, pool, num_slots = _FOUND_HEADER.unpack_from(packet)
        slots_end = _FOUND_HEADER.size + num_slots * ITEM_BYTES
        labels_end = slots_end + num_slots * BYTES_PER_LABEL
        return cls(
            pool=pool,
            slot_ids=packet[_FOUND_HEADER.size : slots_end],
            labels=packet[slots_end:labels_end],
            checksums=packet[labels_end:],
            is_last=bool(is_last),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Whether a store works; sent whenever this or the reason changes."""

    is_on: bool
    reason: str = ""
    """Why the store does not work, for people; empty if it works."""
    pool: int = 0
    """The cache that the store belongs to; 0 means all caches."""
    file_id: str = ""
    """The file that a disk store lies in; a different file has none of the blocks that were stored before."""

    def encode(self) -> bytes:
        """Return the status as one packet."""
        return STATUS + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "Status":
        """Return the status of a packet."""
        return cls(**json.loads(packet[1:]))


def _pieces(packed: bytes) -> Iterator[Piece]:
    for rank, offset, stride, num_bytes, slot_offset in _PIECE.iter_unpack(packed):
        yield Piece(
            rank=rank,
            offset_bytes=offset,
            block_stride_bytes=stride,
            num_bytes=num_bytes,
            slot_offset_bytes=slot_offset,
        )
