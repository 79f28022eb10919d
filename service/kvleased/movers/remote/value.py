"""Own the value of one slot in a remote store, and the value's name there; the stores know how it travels.

A value is a fixed header followed by the bytes of the slot. It passes only for the label that it was made for: the
header holds everything that says which bytes they are, a checksum over the bytes, and a checksum over the header.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash
from blake3 import blake3

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.tier.labels import BYTES_PER_LABEL
from kvleased.movers.cpu import checksum

_MAGIC: Final = b"kvlease\0"
_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<8sII32sQ32sQQ")
"""Magic, version, position, key, tenant, layout fingerprint, bytes and checksum of the slot."""
_HEADER_SUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _FIELDS.size + _HEADER_SUM.size
_NAME_PREFIX: Final = f"kvlease:{_VERSION}:"
_LABEL: Final = struct.Struct(f"<{BYTES_PER_KEY}sQ8xI4x")
assert _LABEL.size == BYTES_PER_LABEL
_FINGERPRINT_BYTES: Final = 32

Value = bytes | bytearray | memoryview
"""What a store returns."""
ValueParts = tuple[bytes, memoryview]
"""What a store takes: the header, and the slot in its place."""


class BlockName(NamedTuple):
    """Which block a value is of, taken from its label."""

    key: bytes
    tenant: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueForm:
    """The form of the values of one cache."""

    fingerprint: bytes
    """The layout fingerprint, which says what the bytes of a slot mean."""
    slot_bytes: int
    """Bytes of a slot that its blocks take."""

    @classmethod
    def of(cls, layout_fingerprint: str, slot_bytes: int) -> "ValueForm | None":
        """Return the form of a cache's values; None if its fingerprint is not one, so that it has no values."""
        try:
            fingerprint = bytes.fromhex(layout_fingerprint)
        except ValueError:
            return None
        if len(fingerprint) != _FINGERPRINT_BYTES or slot_bytes <= 0:
            return None
        return cls(fingerprint=fingerprint, slot_bytes=slot_bytes)

    @property
    def value_bytes(self) -> int:
        """Bytes of each value."""
        return HEADER_BYTES + self.slot_bytes

    def name(self, block: BlockName) -> str:
        """Return the name of a block's value, which contains nothing that a client said."""
        identity = struct.pack("<32sQ32s", block.key, block.tenant, self.fingerprint)
        return _NAME_PREFIX + blake3(identity).hexdigest()

    def encode(self, block: BlockName, slot: memoryview, slot_sum: int) -> ValueParts:
        """Return the value of a slot whose checksum was just taken.

        If the slot changes before it is sent, the value is refused wherever it arrives.
        """
        assert len(slot) == self.slot_bytes
        return self._header(block, slot_sum), slot

    def decode(self, block: BlockName, value: Value) -> tuple[memoryview, int] | None:
        """Return a slot's bytes and their checksum; None unless the whole value is exactly what the label asks for."""
        view = memoryview(value)
        if len(view) != self.value_bytes:
            return None
        slot = view[HEADER_BYTES:]
        slot_sum = checksum(slot)
        if view[:HEADER_BYTES] != self._header(block, slot_sum):
            return None
        return slot, slot_sum

    def _header(self, block: BlockName, slot_sum: int) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            block.position,
            block.key,
            block.tenant,
            self.fingerprint,
            self.slot_bytes,
            slot_sum,
        )
        return fields + _HEADER_SUM.pack(xxhash.xxh3_64_intdigest(fields))


def blocks_of(labels: bytes) -> Sequence[BlockName]:
    """Return the blocks that the labels of a packet name."""
    return list(_blocks(labels))


def _blocks(labels: bytes) -> Iterator[BlockName]:
    return map(BlockName._make, _LABEL.iter_unpack(labels))
