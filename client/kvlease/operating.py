"""Own what an operator tells a running daemon and is told by it: drains, clears, deletions, pool sizes and limits."""

from dataclasses import dataclass, replace
from typing import Any, Final

from kvlease._records import check_record, to_proto
from kvlease.v1 import kvlease_pb2 as pb

_FRACTIONS: Final = ("min_percent", "max_percent", "weight", "pinned_percent_max")
"""A tenant's limits that need not be whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedCache:
    """How far the drain of one cache has come."""

    cache: str
    is_draining: bool
    num_leases: int
    """Live leases, which may go on until they end."""
    num_waiting: int
    """Running requests that wait for blocks."""
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How far a drain has come."""

    is_daemon_draining: bool
    """Whether the whole daemon grants nothing new."""
    caches: tuple[DrainedCache, ...]

    @property
    def num_leases(self) -> int:
        """Live leases of these caches."""
        return sum(one.num_leases for one in self.caches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What a clear dropped from a cache, and what holds the rest."""

    num_device: int
    num_host: int
    num_disk: int
    num_held: int
    """Cached blocks and slots that stay because something holds them."""
    lease_ids: tuple[int, ...]
    """Leases that hold some of these blocks."""
    pin_ids: tuple[int, ...]
    """Pins that hold some of these blocks."""
    num_copying: int
    """Held blocks that a copy is reading; such a hold may end soon."""
    num_in_magazines: int
    keeps_remote: bool
    """Whether there is a remote store; a clear drops nothing from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """What ended with a cache, and what is left of it."""

    num_pins: int
    """Pins that ended with the cache."""
    keeps_disk: bool
    """Whether its disk store stays in case the cache is registered again."""
    keeps_remote: bool
    """Whether there is a remote store; nothing is removed from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """The result of a resize."""

    num_blocks: int
    """Blocks that can be granted now."""
    num_parked: int
    """Blocks that are out of use."""
    num_evicted: int
    """Cached blocks that the resize dropped."""
    bytes_given_back: int
    """Bytes of the pool's memory that the system has back, by this resize and earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have; percentages and bytes are of each cache's device pool."""

    min_percent: float = 0.0
    """The part of the pool that it can always get; the larger of this and `min_bytes` holds."""
    min_bytes: int = 0
    max_percent: float = 100.0
    """The most that it has, cached blocks included; the smaller of this and `max_bytes` holds."""
    max_bytes: int = 0
    """The same in bytes; 0 means no such limit."""
    weight: float = 1.0
    """Its share, in proportion to the other tenants' weights."""
    pinned_percent_max: float = 25.0
    """The most that its pins hold."""
    leases_max: int = 0
    """The most leases of one cache that it has at once; 0 means no such limit."""

    def to_proto(self) -> pb.TenantLimits:
        """Return the message that says the same.

        Raises:
            InvalidError: a field is of another type than declared.
        """
        # People write 40 when they mean 40.0.
        whole: dict[str, Any] = {
            name: float(value) for name in _FRACTIONS if type(value := getattr(self, name)) is int
        }
        limits = replace(self, **whole)
        check_record(limits, pb.TenantLimits.DESCRIPTOR)
        return to_proto(limits, pb.TenantLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRule:
    """The limits that one tenant has now."""

    tenant: str
    limits: TenantLimits
    revision: int
    """The revision of these limits, 0 if they come from the settings; new limits must have a higher one."""
