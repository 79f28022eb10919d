"""Own the form of what a disk store says of itself and of its slots; `store_file` owns where it stands in the file.

Every cell has 128 bytes, so that no cell lies in two sectors even of the smallest size that disks have. A write that is
cut off therefore leaves each cell as it was or as it is to be. The last field of a cell seals all bytes before it.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from kvlease import disk_file
from kvlease.geometry import floor_div
from kvlease.units import BYTES_PER_DISK_HEADER
from kvleased.core.tier.labels import LABEL

BYTES_PER_LAYOUT: Final = 32
"""Bytes of a layout fingerprint."""
BYTES_PER_FILE_ID: Final = 16
"""Bytes that tell a file from all others, even from one that took its place."""

_VERSION: Final = 1
_SLOT_MAGIC: Final = int.from_bytes(b"KVLSLOT\n", "little")
_STORE_MAGIC: Final = int.from_bytes(b"KVLSTOR\n", "little")
_LAYOUT: Final = f"V{BYTES_PER_LAYOUT}"

CELL: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("label", LABEL),
        ("layout", _LAYOUT),
        ("checksum", "<u8"),
        ("num_bytes", "<u8"),
        ("slot", "<u4"),
        ("version", "<u4"),
        ("seal", "<u8"),
    ]
)
"""What a slot holds: the label of its bytes, their layout, number and checksum; all zero means nothing."""
_HEAD: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("layout", _LAYOUT),
        ("bytes_per_slot", "<u8"),
        ("num_slots", "<u8"),
        ("version", "<u4"),
        ("file_id", f"V{BYTES_PER_FILE_ID}"),
        ("spare", "V44"),
        ("seal", "<u8"),
    ]
)
BYTES_PER_CELL: Final = BYTES_PER_DISK_HEADER
assert CELL.itemsize == BYTES_PER_CELL, "a cell is what a plan charges for it"
_SEALED_BYTES: Final = BYTES_PER_CELL - 8

Cells = NDArray[np.void]
"""[slots] of CELL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """What decides where a byte of a store lies and what it means; a store of another shape is another file."""

    layout: bytes
    """The layout fingerprint, 32 bytes."""
    bytes_per_slot: int
    num_slots: int
    store_id: str = ""
    """Hex that tells whose store it is; it appears only in the file's name."""

    @property
    def stride_bytes(self) -> int:
        """Bytes from the start of one slot to the start of the next."""
        return disk_file.stride_bytes(self.bytes_per_slot)

    @property
    def payload_offset_bytes(self) -> int:
        """Where the bytes of slot 0 start: after the store's own cell and one cell for each slot."""
        return disk_file.payload_offset_bytes(self.num_slots)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return disk_file.file_bytes(self.num_slots, self.bytes_per_slot)

    def head(self, file_id: bytes) -> bytes:
        """Return the first cell of a file, which gives the shape and the file's id."""
        head = np.zeros(1, _HEAD)
        head["magic"] = _STORE_MAGIC
        head["layout"] = np.void(self.layout)
        head["bytes_per_slot"] = self.bytes_per_slot
        head["num_slots"] = self.num_slots
        head["version"] = _VERSION
        head["file_id"] = np.void(file_id)
        head["seal"] = _seal(head.view(np.uint8).data[:_SEALED_BYTES])
        return head.tobytes()

    @property
    def digest(self) -> str:
        """A name for the shape and its owner, which reveals nothing that a client said."""
        head = self.head(bytes(BYTES_PER_FILE_ID))
        return blake3(head + bytes.fromhex(self.store_id)).hexdigest(length=16)

    def file_id_of(self, head: bytes) -> bytes | None:
        """Return the file id in a first cell; None if the cell is not of this shape, or cannot be trusted."""
        if len(head) != BYTES_PER_CELL:
            return None
        file_id: bytes = np.frombuffer(head, _HEAD)["file_id"].tobytes()
        return file_id if head == self.head(file_id) else None

    def has_head_with(self, start: bytes) -> bool:
        """Tell whether a first cell of this shape, with any file id, starts with these bytes; each starts with none."""
        padded = start.ljust(BYTES_PER_CELL, b"\0")
        return self.head(np.frombuffer(padded, _HEAD)["file_id"].tobytes()).startswith(start)

    def cell_offset_bytes(self, slot: int) -> int:
        """Return where a slot's cell starts."""
        return (1 + slot) * BYTES_PER_CELL

    def slot_offset_bytes(self, slot: int) -> int:
        """Return where a slot's bytes start."""
        return self.payload_offset_bytes + slot * self.stride_bytes

    def num_slots_within(self, num_bytes: int) -> int:
        """Return how many slots, from the first on, lie within so many first bytes of the file."""
        payload_bytes = max(0, num_bytes - self.payload_offset_bytes)
        return min(self.num_slots, floor_div(payload_bytes, self.stride_bytes))


def is_head(cell: bytes) -> bool:
    """Tell whether a cell is the first one of a store, of whatever shape."""
    if len(cell) != BYTES_PER_CELL:
        return False
    (head,) = np.frombuffer(cell, _HEAD)
    return bool(
        head["magic"] == _STORE_MAGIC and head["seal"] == _seal(memoryview(cell)[:_SEALED_BYTES])
    )


def make_cells(
    shape: StoreShape,
    slots: NDArray[np.int32],
    labels: NDArray[np.void],
    checksums: NDArray[np.uint64],
    num_bytes: int,
) -> Cells:
    """Return the cells of slots that hold `num_bytes` each under these labels."""
    cells = np.zeros(len(slots), CELL)
    cells["magic"] = _SLOT_MAGIC
    cells["label"] = labels
    cells["layout"] = np.void(shape.layout)
    cells["checksum"] = checksums
    cells["num_bytes"] = num_bytes
    cells["slot"] = slots
    cells["version"] = _VERSION
    cells["seal"] = _seals(cells)
    return cells


def are_whole(shape: StoreShape, slots: NDArray[np.int32], cells: Cells) -> NDArray[np.bool_]:
    """Tell which cells can be trusted and describe their own slot in this layout."""
    are_ours: NDArray[np.bool_] = (
        (cells["magic"] == _SLOT_MAGIC)
        & (cells["version"] == _VERSION)
        & (cells["slot"] == slots)
        & (cells["layout"] == np.void(shape.layout))
    )
    claimed = np.flatnonzero(are_ours)
    if len(claimed):
        are_ours[claimed] = cells["seal"][claimed] == _seals(cells[claimed])
    return are_ours


def have_labels(cells: Cells, labels: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tell which cells have exactly these labels, in every byte."""
    said = np.ascontiguousarray(cells["label"]).view(np.uint8).reshape(len(cells), -1)
    wanted = np.ascontiguousarray(labels).view(np.uint8).reshape(len(cells), -1)
    return np.asarray((said == wanted).all(axis=1))


def _seals(cells: Cells) -> NDArray[np.uint64]:
    packed = cells.view(np.uint8).data
    starts = range(0, len(packed), BYTES_PER_CELL)
    return np.array([_seal(packed[start : start + _SEALED_BYTES]) for start in starts], np.uint64)


def _seal(cell: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(cell)
