"""Own how copies become batches, and the order in which batches go to a mover; `link` decides when they go.

Flights of the core are independent of each other. Each holds its sources and targets from beginning to end. A source is
never the target of another flight that is still on its way, and a target is nobody's source before it has landed. So
batches may go in any order, and those that a request waits for go first.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvlease.ids import CopyId
from kvleased.core.effects import Copy, Direction
from kvleased.core.tier.labels import BYTES_PER_LABEL
from kvleased.movers.protocol import LABELS_A_PACKET_MAX, Batch, Completion

URGENT: Final = frozenset(
    {Direction.RELOAD, Direction.SCRUB, Direction.DUPLICATE, Direction.LOAD, Direction.FETCH}
)
"""Directions that a request waits for; copies of the others only write back, and give way."""
OVERTAKES_MAX: Final = 8
"""Urgent batches that may overtake a batch that writes back, so that it has its turn, too."""
_BYTES_PER_ID: Final = 4
_BYTES_PER_CHECKSUM: Final = 8

BATCHES_SENT_MAX: Final = 2
"""Batches in the socket, counted apart for urgent ones and the others: one is carried out, one follows without a gap.

An urgent batch is sent even if the others have reached this number, because a mover may let it pass within its own
batch.
"""
BYTES_A_BATCH_MAX: Final = 64 << 20
"""Bytes of one batch, unless a single block has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """How much a mover is given at once, and how long it may be silent."""

    seconds_max: float
    copies_a_batch_max: int
    bytes_a_batch_max: int = BYTES_A_BATCH_MAX
    batches_sent_max: int = BATCHES_SENT_MAX
    """Counted apart for urgent batches and the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """How much work a mover has at one instant."""

    num_waiting: int
    """Batches that have not been sent yet."""
    num_sent: int
    """Batches that were sent to the mover and have no answer yet."""
    oldest_seconds: float
    """How long the oldest batch has been waiting or under way; 0 if there is none."""


class Moved(NamedTuple):
    """One batch that has ended; a copy is one or several batches."""

    pool: int
    copy_id: CopyId
    direction: str
    num_bytes: int
    nanoseconds: int
    """The time that the mover spent on the batch, as it measured it itself."""
    is_done: bool
    """Whether every block of the batch was copied."""


ObserveCopies = Callable[[Moved], None]
"""Count one batch that has ended."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """One flight of the core on its way through a mover, as one or more batches."""

    pool: int
    copy: Copy
    with_checksums: bool
    copies_a_batch: int
    is_sent: bool = False
    """Whether any batch of the copy was given to a mover, which may then be writing."""
    parts: dict[int, Completion] = field(default_factory=dict)
    """The completions of the batches that have ended, by their position."""

    @property
    def is_urgent(self) -> bool:
        """Whether a request waits for it."""
        return self.copy.direction in URGENT

    @property
    def num_copies(self) -> int:
        """Number of blocks of the copy."""
        return max(len(self.copy.target_ids), len(self.copy.source_ids)) // _BYTES_PER_ID

    @property
    def num_parts(self) -> int:
        """Number of batches of the copy."""
        return len(range(0, max(self.num_copies, 1), self.copies_a_batch))

    def batch(self, index: int, number: int) -> Batch:
        """Return one of its batches, with the given number."""
        copy, start = self.copy, index * self.copies_a_batch
        end = start + self.copies_a_batch
        checksums = copy.checksums if self.with_checksums else b""
        return Batch(
            number=number,
            pool=self.pool,
            direction=copy.direction,
            with_checksums=self.with_checksums,
            source_ids=copy.source_ids[start * _BYTES_PER_ID : end * _BYTES_PER_ID],
            target_ids=copy.target_ids[start * _BYTES_PER_ID : end * _BYTES_PER_ID],
            checksums=checksums[start * _BYTES_PER_CHECKSUM : end * _BYTES_PER_CHECKSUM],
            labels=copy.labels[start * BYTES_PER_LABEL : end * BYTES_PER_LABEL],
        )

    @property
    def failed(self) -> tuple[int, ...]:
        """Positions in the whole copy whose bytes were missing or wrong."""
        return tuple(
            index * self.copies_a_batch + position
            for index in range(self.num_parts)
            for position in self.parts[index].failed
        )

    @property
    def checksums(self) -> bytes:
        """The checksums of all blocks of the copy; empty if nobody asked for them."""
        return b"".join(self.parts[index].checksums for index in range(self.num_parts))


def copies_a_batch(copy: Copy, copies_max: int, bytes_max: int, bytes_per_block: int) -> int:
    """Return how many blocks of a copy go into one batch, so few that no batch holds up others for long."""
    most = min(copies_max, LABELS_A_PACKET_MAX) if copy.labels else copies_max
    return max(1, min(most, bytes_max // max(1, bytes_per_block)))


@dataclass(frozen=True, slots=True)
class Part:
    """One batch of a flight."""

    flight: Flight
    index: int
    since: float
    """When it began to wait, on the monotonic clock, in seconds."""


class Queue:
    """Batches that wait: the urgent ones in one queue, and those that write back in another."""

    def __init__(self) -> None:
        """Start empty."""
        self._urgent: deque[Part] = deque()
        self._others: deque[Part] = deque()
        self._num_overtakes = 0

    def __len__(self) -> int:
        """Count the batches."""
        return len(self._urgent) + len(self._others)

    def __iter__(self) -> Iterator[Part]:
        """Iterate over the batches."""
        yield from self._urgent
        yield from self._others

    @property
    def oldest_since(self) -> float | None:
        """When the batch that has waited longest began to wait; None if none waits."""
        return min(
            (queue[0].since for queue in (self._urgent, self._others) if queue), default=None
        )

    def add(self, flight: Flight, now: float) -> None:
        """Queue all batches of a copy, behind earlier ones that are equally urgent."""
        queue = self._urgent if flight.is_urgent else self._others
        queue.extend(Part(flight, index, now) for index in range(flight.num_parts))

    def take(self, *, may_be_urgent: bool, may_be_other: bool) -> Part | None:
        """Return the next batch among those that may go; None if none may go yet."""
        is_turn = not self._urgent or self._num_overtakes >= OVERTAKES_MAX
        if self._others and may_be_other and is_turn:
            self._num_overtakes = 0
            return self._others.popleft()
        if self._urgent and may_be_urgent:
            self._num_overtakes += bool(self._others)
            return self._urgent.popleft()
        return None

    def take_back(self, directions: Collection[Direction]) -> list[Flight]:
        """Drop the copies in these directions of which no batch has been sent yet, and return them."""
        flights = {
            id(part.flight): part.flight
            for part in self
            if part.flight.copy.direction in directions and not part.flight.is_sent
        }
        self._urgent = deque(part for part in self._urgent if id(part.flight) not in flights)
        self._others = deque(part for part in self._others if id(part.flight) not in flights)
        return list(flights.values())

    def forget(self, pool: int) -> None:
        """Drop the batches of a cache that has been deleted."""
        self._urgent = deque(part for part in self._urgent if part.flight.pool != pool)
        self._others = deque(part for part in self._others if part.flight.pool != pool)

    def clear(self) -> None:
        """Drop all batches."""
        self._urgent.clear()
        self._others.clear()
