"""Own the pools of a cache as every mover of theirs is told of them, one life after the other."""

from dataclasses import dataclass

from kvleased.movers.protocol import PoolMap

Packet = tuple[bytes, tuple[int, ...]]
"""A packet and the descriptors beside it."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The pools of a cache, which every mover is told of."""

    message: PoolMap
    fds: tuple[int, ...]
    bytes_per_block: int

    def packets(self) -> list[Packet]:
        """Return the packets that tell of them."""
        first, *rest = self.message.packets()
        return [(first, self.fds), *((packet, ()) for packet in rest)]
