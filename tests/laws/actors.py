"""Who acts in the simulated world: workers with their leases, the mover with its jobs, and calls that wait."""

from dataclasses import dataclass, field
from functools import cache as remember
from hashlib import blake2b
from typing import Final

from kvlease.groups import keeps_everything
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import CacheShape
from kvleased.core.effects import Copy

SHAPE = CacheShape(
    num_blocks=25,
    null_blocks=1,
    num_slots=14,
    groups=(keeps_everything(4, 12),),
    hash_tokens=4,
    hit_tokens=4,
    max_leases=16,
    max_waiting=6,
    max_pins=3,
    lease_seconds=30.0,
    layout_digest=99,
)
Mark = tuple[object, ...]
ZERO: Mark = ("zero",)
_NO_LEASE: Final = LeaseId(0)


class ViolationError(AssertionError):
    """A law did not hold."""


@dataclass(eq=False)
class Held:
    """A lease as its worker sees it."""

    lease_id: LeaseId
    request_id: str
    keys: list[bytes]
    blocks: list[int]
    marks: list[Mark | None]
    is_evicted: bool = False
    is_moving: bool = False


@dataclass(eq=False)
class Worker:
    """A process with leases; `is_dead` is known to the world before it is known to the core."""

    worker_id: WorkerId
    tenant: int
    leases: dict[LeaseId, Held] = field(default_factory=dict)
    newest_lease_id: LeaseId = _NO_LEASE
    is_stalled: bool = False


@dataclass(eq=False)
class Job:
    """A batch of copies that the mover works on."""

    copy: Copy
    done: int = 0
    is_lost: bool = False


@dataclass(eq=False)
class Call:
    """A call that waits for its answer."""

    worker: Worker | None
    command: object
    held: Held | None
    deadline: float
    is_heard: bool = True
    """Whether the answer will reach the caller."""


@remember
def key_of(tenant: int, chain: tuple[int, ...]) -> bytes:
    """Return the key of the last block of a chain of tokens."""
    return blake2b(repr((tenant, chain)).encode(), digest_size=32).digest()
