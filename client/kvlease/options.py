"""Own how a cache is kept: checksums, write and eviction policy, ghosts; none of it decides where a byte lies."""

from dataclasses import dataclass
from typing import Final, Self

from kvlease._records import check_record, from_proto, to_proto
from kvlease.v1 import kvlease_pb2 as pb

WRITE_AFTER_HITS_MAX: Final = 1 << 16
"""The largest `write_after_hits`; it is not worth counting a block's hits any further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How a cache is kept; an empty field takes the default."""

    integrity: str = ""
    """Whether blocks that leave the device are checksummed: "xxh3" (the default) or "none"."""
    write_policy: str = ""
    """When blocks are copied to lower tiers: "on-evict" (the default), "write-through" or "after-n-hits"."""
    write_after_hits: int | None = None
    """For "after-n-hits": how many hits a block must have before it is copied; None means 1."""
    eviction_policy: str = ""
    """Which policy chooses the blocks to evict: "leaf-lru" (the default), "arc", "s3-fifo", "lfu" or "adaptive"."""
    ghosts: tuple[str, ...] = ()
    """Up to three policies or sizes to try on live keys, each POLICY or POLICY@BLOCKS."""

    def to_proto(self) -> pb.CacheOptions:
        """Return the message that says the same.

        Raises:
            InvalidError: a field is of another type than declared.
        """
        check_record(self, pb.CacheOptions.DESCRIPTOR)
        return to_proto(self, pb.CacheOptions)

    @classmethod
    def from_proto(cls, message: pb.CacheOptions) -> Self:
        """Return what the message says."""
        return from_proto(message, cls)


DEFAULTS: Final = CacheOptions()
