"""Own the packets that ask a GPU's mover for memory, and those that hand it over; other modules keep the memory.

The answer has a descriptor beside it. Only a mover has the means to make such memory, but it must be able to end at any
time, so it keeps none of it.
"""

import json
from dataclasses import asdict, dataclass
from typing import Final

ALLOCATE: Final = b"G"
ALLOCATED: Final = b"V"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """A request for memory of a GPU; answered by Allocated."""

    number: int
    num_bytes: int

    def encode(self) -> bytes:
        """Return the request as one packet."""
        return ALLOCATE + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "Allocate":
        """Return the request of a packet."""
        return cls(**json.loads(packet[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The answer to an Allocate, with a descriptor of the memory beside it unless there is a reason why not."""

    number: int
    device_uuid: str = ""
    """The name that all processes have for the GPU."""
    mapped_bytes: int = 0
    """Bytes that were made and are to be mapped, at least as many as were asked for."""
    reason: str = ""
    """Why there is no memory, for people."""

    def encode(self) -> bytes:
        """Return the answer as one packet."""
        return ALLOCATED + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "Allocated":
        """Return the answer of a packet."""
        return cls(**json.loads(packet[1:]))
