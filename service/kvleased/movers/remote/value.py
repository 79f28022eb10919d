"""Own the value of one slot as it lies in a remote store, and its name there; how it travels is the stores' business.

A value is a fixed header and then the bytes of the slot. It passes only for the label that it was made for: all that
tells which bytes they are stands in the header, and a checksum over the header, another over the bytes.
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
"""What a store gives."""
ValueParts = tuple[bytes, memoryview]
"""What a store takes: the header, and the slot where it lies."""


class BlockName(NamedTuple):
    """Which block it is, out of its label."""

    key: bytes
    tenant: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueForm:
    """How the values of one cache look."""

    fingerprint: bytes
    """The layout fingerprint: what the bytes of a slot mean."""
    slot_bytes: int
    """Bytes of a slot that blocks lie in."""

    @classmethod
    def of(cls, layout_fingerprint: str, slot_bytes: int) -> "ValueForm | None":
        """Return the form of a cache's values; None where its fingerprint tells nothing, so that no value is its."""
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
        """Return the name of a block's value: nothing in it was said by a client."""
        identity = struct.pack("<32sQ32s", block.key, block.tenant, self.fingerprint)
        return _NAME_PREFIX + blake3(identity).hexdigest()

    def encode(self, block: BlockName, slot: memoryview, slot_sum: int) -> ValueParts:
        """Return the value of a slot whose checksum was just taken.

        A slot that changes before it is sent makes a value that is refused wherever it comes to.
        """
        assert len(slot) == self.slot_bytes
        return self._header(block, slot_sum), slot

    def decode(self, block: BlockName, value: Value) -> tuple[memoryview, int] | None:
        """Return a slot's bytes and their checksum; None unless all of the value is exactly what the label asks for."""
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
    """Return which blocks the labels of a packet name."""
    return list(_blocks(labels))


def _blocks(labels: bytes) -> Iterator[BlockName]:
    return map(BlockName._make, _LABEL.iter_unpack(labels))
