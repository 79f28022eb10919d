"""The actors of the simulated world: workers with their leases, the mover with its jobs, and calls that wait."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache as remember
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from kvlease.ids import LeaseId, WorkerId
from kvleased.core.blocks.records import NULL
from kvleased.core.effects import Copy
from kvleased.core.lease.ranks import Place
from tests.laws.needs import Groups, kept_under, needed_from

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
    """One key for each hash_tokens."""
    parts: list[list[int]]
    """The block at each place of each group; NULL if there is none."""
    marks: list[list[Mark | None]]
    """What each block holds, as far as the worker knows."""
    computed: int = 0
    """Tokens that are committed or were found; the core knows of them."""
    written: int = 0
    """Tokens whose states are written; if they exceed `computed`, a commit is on its way or was lost."""
    is_evicted: bool = False
    is_moving: bool = False
    is_trimming: bool = False
    is_behind: bool = False
    """Whether an answer was lost while the lease moved, so that its worker has not read its row since."""
    rank: int | None = None
    """Which part of every block its worker writes, if others share the lease; None if it writes all of them."""
    vain_tokens: int = 0
    """Tokens up to which its worker may have been told of blocks in vain; it is not told of those blocks again."""

    @property
    def ends(self) -> list[int]:
        """The end of the places of each group."""
        return [len(part) for part in self.parts]

    @property
    def num_blocks(self) -> int:
        """Number of places that have a block."""
        return sum(len(part) - part.count(NULL) for part in self.parts)

    def blocks(self, groups: Groups) -> Iterator[int]:
        """Go through the blocks that the worker still counts on, without those that a commit on its way gives back."""
        for group, part in zip(groups, self.parts, strict=True):
            for block in part[needed_from(group, self.written) :]:
                if block != NULL:
                    yield block

    def places(self) -> Iterator[tuple[int, int, int, Mark | None]]:
        """Go through the places that have a block: group, place, block and mark."""
        for at, (part, marks) in enumerate(zip(self.parts, self.marks, strict=True)):
            for place, block in enumerate(part):
                if block != NULL:
                    yield at, place, block, marks[place]

    def slot(self, at: int, place: int) -> int:
        """Return the first place from `place` on that has a block, where a state may be; or the end."""
        part = self.parts[at]
        while place < len(part) and part[place] == NULL:
            place += 1
        return place

    def snapshot(self) -> "Held":
        """Return what the worker knows at this instant."""
        return replace(
            self,
            keys=[*self.keys],
            parts=[[*part] for part in self.parts],
            marks=[[*marks] for marks in self.marks],
        )


@dataclass(eq=False)
class Worker:
    """A process with leases; the world knows that it is dead before the core does."""

    worker_id: WorkerId
    tenant: int
    leases: dict[LeaseId, Held] = field(default_factory=dict)
    newest_lease_id: LeaseId = _NO_LEASE
    is_stalled: bool = False
    place: Place | None = None
    """Its rank and engine; None if it calls for all ranks."""

    @property
    def rank(self) -> int | None:
        """Its rank, if ranks call apart."""
        return None if self.place is None else self.place.rank


def are_mates(one: Worker, other: Worker) -> bool:
    """Tell whether two workers are the same, or may share leases."""
    places = (one.place, other.place)
    return one is other or (None not in places and places[0].engine == places[1].engine)  # type: ignore[union-attr]


@dataclass(eq=False)
class Job:
    """A batch of copies that the mover works on."""

    copy: Copy
    done: int = 0
    is_lost: bool = False
    failed: set[int] = field(default_factory=set)
    """Positions whose bytes were missing or wrong."""
    is_of_other_disk: bool = False
    """Whether the disk has been replaced since the job began."""
    labels: list[Any] | None = None
    """The labels of the copy, once somebody has read them."""

    @cached_property
    def sources(self) -> list[int]:
        """The ids that are read from, if the copy has any."""
        return [int(one) for one in np.frombuffer(self.copy.source_ids, np.int32)]

    @cached_property
    def targets(self) -> list[int]:
        """The ids that are written to, if the copy has any."""
        return [int(one) for one in np.frombuffer(self.copy.target_ids, np.int32)]

    @property
    def num_pairs(self) -> int:
        """Number of blocks that are copied or scrubbed."""
        return max(len(self.sources), len(self.targets))


@dataclass(eq=False)
class Call:
    """A call that waits for its answer."""

    worker: Worker | None
    command: object
    held: Held | None
    deadline: float
    is_heard: bool = True
    """Whether the answer will reach the caller."""
    parent: Held | None = None
    """What the worker knew, when the call began, of the lease that it forks."""


_PARTS: Final = "parts"


def part_of(mark: Mark, rank: int | None) -> Mark:
    """Return what a rank's part of a block holds, or the whole block if no rank is named."""
    return mark[1 + rank] if rank is not None and mark[0] == _PARTS else mark  # type: ignore[return-value]


def every_part(mark: Mark) -> tuple[Mark, ...]:
    """Return what each part of a block holds; a block whose parts are equal counts as one part."""
    return mark[1:] if mark[0] == _PARTS else (mark,)  # type: ignore[return-value]


def with_part(mark: Mark, rank: int | None, part: Mark, num_ranks: int) -> Mark:
    """Return what a block holds once a rank has written its part; equal parts become one mark for the whole block."""
    if rank is None:
        return part
    parts = [part_of(mark, one) for one in range(num_ranks)]
    parts[rank] = part
    return part if all(one == part for one in parts) else (_PARTS, *parts)


@remember
def key_of(tenant: int, chain: tuple[int, ...]) -> bytes:
    """Return the key of the last block of a chain of tokens."""
    return blake2b(repr((tenant, chain)).encode(), digest_size=32).digest()


def is_of(mark: Mark, key: bytes) -> bool:
    """Tell whether a mark stands for the bytes that belong to a key: those of its tokens and its group."""
    return mark[0] == "key" and kept_under(mark[1], mark[2]) == key  # type: ignore[arg-type]
