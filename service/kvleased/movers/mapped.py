"""Own the pools of a cache in the form in which each successive mover is told of them."""

from dataclasses import dataclass

from kvleased.movers.protocol import PoolMap

Packet = tuple[bytes, tuple[int, ...]]
"""A packet, and the descriptors sent beside it."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The pools of a cache, which every mover is told of."""

    message: PoolMap
    fds: tuple[int, ...]
    bytes_per_block: int

    def packets(self) -> list[Packet]:
        """Return the packets that tell a mover of the pools."""
        first, *rest = self.message.packets()
        return [(first, self.fds), *((packet, ()) for packet in rest)]
