"""Own what an operator tells a running daemon, and is told: drains, what was cleared or deleted, sizes, and limits."""

from dataclasses import dataclass, replace
from typing import Any, Final

from kvlease._records import check_record, to_proto
from kvlease.v1 import kvlease_pb2 as pb

_FRACTIONS: Final = ("min_percent", "max_percent", "weight", "pinned_percent_max")
"""Limits of a tenant that need not be whole numbers."""


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
    """What was dropped of a cache, and what holds the rest."""

    num_device: int
    num_host: int
    num_disk: int
    num_held: int
    """Cached blocks and slots that stay, because they are held."""
    lease_ids: tuple[int, ...]
    """Leases that hold some of them."""
    pin_ids: tuple[int, ...]
    """Pins that do."""
    num_copying: int
    """Those of them that a copy reads, which may end soon."""
    num_in_magazines: int
    keeps_remote: bool
    """Whether there is a remote store, of which nothing is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """What ended with a cache, and what is left of it."""

    num_pins: int
    """Pins that ended with it."""
    keeps_disk: bool
    """Whether its disk store stays, for when it is registered again."""
    keeps_remote: bool
    """Whether there is a remote store, of which nothing is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """What came of a resize."""

    num_blocks: int
    """Blocks that can be granted now."""
    num_parked: int
    """Blocks that are out of use."""
    num_evicted: int
    """Cached blocks that were dropped for it."""
    bytes_given_back: int
    """Bytes of the pool's memory that the system has back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have: of the device pool of each cache, where nothing else is said."""

    min_percent: float = 0.0
    """What it can always come to have; the larger of this and `min_bytes` holds."""
    min_bytes: int = 0
    max_percent: float = 100.0
    """What it has at most, cached blocks among it; the smaller of this and `max_bytes` holds."""
    max_bytes: int = 0
    """0 is no such limit."""
    weight: float = 1.0
    """Its share against the others' weights."""
    pinned_percent_max: float = 25.0
    """What its pins hold at most."""
    leases_max: int = 0
    """Leases of one cache that it has at once; 0 is no such limit."""

    def to_proto(self) -> pb.TenantLimits:
        """Return the message that says the same.

        Raises:
            InvalidError: a field is of another type than declared.
        """
        # People write 40 where 40.0 is meant.
        whole: dict[str, Any] = {
            name: float(value) for name in _FRACTIONS if type(value := getattr(self, name)) is int
        }
        limits = replace(self, **whole)
        check_record(limits, pb.TenantLimits.DESCRIPTOR)
        return to_proto(limits, pb.TenantLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRule:
    """The limits of one tenant that hold now."""

    tenant: str
    limits: TenantLimits
    revision: int
    """0 where they come from the settings; limits that are set must have a higher one."""
