"""Own the packets by which a GPU's mover is asked for memory, and hands it over; who keeps it is others' business.

The answer has a descriptor beside it. A mover alone has the means to make such memory, and must be able to end at any
time, so it keeps none of it.
"""

import json
from dataclasses import asdict, dataclass
from typing import Final

ALLOCATE: Final = b"G"
ALLOCATED: Final = b"V"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Memory of a GPU that is wanted; answered by Allocated."""

    number: int
    num_bytes: int

    def encode(self) -> bytes:
        """Return it as one packet."""
        return ALLOCATE + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "Allocate":
        """Return what a packet says."""
        return cls(**json.loads(packet[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The answer to an Allocate, with a descriptor of the memory beside it unless there is a reason why not."""

    number: int
    device_uuid: str = ""
    """What all processes call the GPU."""
    mapped_bytes: int = 0
    """Bytes that were made and are to be mapped, no fewer than were asked for."""
    reason: str = ""
    """Why there is none, for people."""

    def encode(self) -> bytes:
        """Return it as one packet."""
        return ALLOCATED + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "Allocated":
        """Return what a packet says."""
        return cls(**json.loads(packet[1:]))
