"""Own the magazines of a cache: which there are, which processes share each, and which blocks each holds.

An engine that keeps its own block tables calls for blocks by their ids; its magazine is what it holds in this way,
outside any lease. All processes of the engine share the magazine, and it ends with the last of them: time never ends
it. `exchanging` tells what an exchange does to a magazine, and `states` what its blocks go through.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import BusyError, WrongStateError
from kvlease.ids import WorkerId
from kvleased.core.blocks.records import MAGAZINES_MAX, MagazineRecords
from kvleased.core.blocks.states import State
from kvleased.core.ids import Ids

SHORT_SECONDS: Final = 1.0
"""How long a magazine counts as short after it got less than it wanted, unless it asks again."""

NO_MAGAZINES: Final[Mapping[WorkerId, int]] = MappingProxyType({})


@dataclass(slots=True, kw_only=True, eq=False)
class Magazine:
    """What one engine holds by block id."""

    name: int
    """64 bits of the name under which its processes attached."""
    place: int
    """Where its entry is in the records."""
    tenant: int
    workers: set[WorkerId] = field(default_factory=set)
    num_blocks: int = 0
    is_vouched: bool = True
    """Whether one of its processes has spoken of it in this life of the control process. Until then its findable blocks
    may not be what their keys say: while there is no daemon, an engine may have to go on with its own blocks."""
    short_since: float | None = None
    """When it got less than it wanted, in monotonic seconds; None if it is satisfied."""
    least_blocks: int = 0
    """Fewer blocks than this do not help it, because it takes all or nothing; 0 if each block helps."""
    exchanged_at: float | None = None
    """When its last exchange was, in monotonic seconds; None if there was none in this life."""

    def __repr__(self) -> str:
        """Show life: what it holds and how many processes share it."""
        return f"<Magazine {self.place}: {self.num_blocks} blocks, {len(self.workers)} processes>"

    @property
    def bit(self) -> np.uint32:
        """Its bit in the column of holders."""
        return np.uint32(1 << self.place)

    def is_short(self, now: float) -> bool:
        """Tell whether it got less than it wanted in the last SHORT_SECONDS."""
        return self.short_since is not None and now - self.short_since < SHORT_SECONDS


class MagazineBook:
    """All magazines of one cache, findable by name and by process."""

    def __init__(self, records: MagazineRecords) -> None:
        """Take over records in which no magazine is in use."""
        self.records = records
        self.by_name: dict[int, Magazine] = {}
        self.by_worker: dict[WorkerId, Magazine] = {}

    def __len__(self) -> int:
        """Count the magazines."""
        return len(self.by_name)

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<MagazineBook {len(self)} of {MAGAZINES_MAX} magazines>"

    def of(self, worker_id: WorkerId) -> Magazine:
        """Return the magazine of a worker.

        Raises:
            WrongStateError: it attached without one.
        """
        magazine = self.by_worker.get(worker_id)
        if magazine is None:
            msg = "the worker attached without a magazine; attach with the name of a magazine"
            raise WrongStateError(msg, resource="magazine", rule="no_magazine")
        return magazine

    # Who shares them ----------------------------------------------------------------------------------------------

    def check_room(self, name: int) -> None:
        """Refuse a magazine beyond the limit."""
        if name in self.by_name or len(self) < MAGAZINES_MAX:
            return
        msg = f"the cache has {MAGAZINES_MAX} magazines, the most that it can have; end an engine first"
        raise BusyError(msg, resource="magazines", need=1, available=0, limit=MAGAZINES_MAX)

    def join(self, worker_id: WorkerId, name: int, tenant: int) -> None:
        """Let a process share a magazine, which begins with its first process."""
        magazine = self.by_name.get(name)
        if magazine is None:
            place = int(np.flatnonzero(self.records.name == 0)[0])
            self.records.sequence[place] = 0
            self.records.name[place] = name
            magazine = self.by_name[name] = Magazine(name=name, place=place, tenant=tenant)
        magazine.workers.add(worker_id)
        self.by_worker[worker_id] = magazine

    def part(self, worker_id: WorkerId) -> Magazine | None:
        """Take a process out of its magazine; returns the magazine if that was its last process."""
        magazine = self.by_worker.pop(worker_id, None)
        if magazine is None:
            return None
        magazine.workers.discard(worker_id)
        return None if magazine.workers else magazine

    def close(self, magazine: Magazine) -> Ids:
        """Forget a magazine; returns its blocks, whose holds the caller must end."""
        blocks = self.blocks_of(magazine)
        # From here on, any bits that a crash leaves behind belong to no magazine.
        self.records.name[magazine.place] = 0
        self.remove(magazine, blocks)
        del self.by_name[magazine.name]
        return blocks

    def recover(self, members: Mapping[WorkerId, tuple[int, int]]) -> Ids:
        """Continue over the records of an earlier life.

        `members` has the magazine's name and the tenant digest of each living process. Returns the blocks of magazines
        that have no living process, because nobody can vouch for them.
        """
        records, living = self.records, {name for name, _ in members.values()}
        for place, name in enumerate(records.name.tolist()):
            if name in living and name not in self.by_name:
                tenant = next(tenant for one, tenant in members.values() if one == name)
                self.by_name[name] = Magazine(
                    name=name, place=place, tenant=tenant, is_vouched=False
                )
            else:
                records.name[place] = 0
        believed = sum(1 << magazine.place for magazine in self.by_name.values())
        orphaned = np.flatnonzero(records.held_by & ~np.uint32(believed))
        records.held_by[orphaned] &= np.uint32(believed)
        for worker_id, (name, tenant) in members.items():
            self.join(worker_id, name, tenant)
        return orphaned

    def count(self) -> None:
        """Count anew what each magazine holds."""
        for magazine in self.by_name.values():
            magazine.num_blocks = len(self.blocks_of(magazine))

    # What they hold -----------------------------------------------------------------------------------------------

    def blocks_of(self, magazine: Magazine) -> Ids:
        """Return what a magazine holds, ascending."""
        return np.flatnonzero(self.records.held_by & magazine.bit)

    def holds(self, magazine: Magazine, blocks: Ids) -> NDArray[np.bool_]:
        """Tell for each block whether it is in a magazine."""
        is_held: NDArray[np.bool_] = (self.records.held_by[blocks] & magazine.bit) != 0
        return is_held

    def add(self, magazine: Magazine, blocks: Ids) -> None:
        """Put distinct blocks into a magazine that does not hold them yet."""
        self.records.held_by[blocks] |= magazine.bit
        magazine.num_blocks += len(blocks)

    def remove(self, magazine: Magazine, blocks: Ids) -> None:
        """Take distinct blocks out of the magazine that holds them."""
        self.records.held_by[blocks] &= ~magazine.bit
        magazine.num_blocks -= len(blocks)

    # Fair shares --------------------------------------------------------------------------------------------------

    def num_sharing(self, magazine: Magazine, now: float) -> int:
        """Count the magazines that have or want blocks, the given one among them."""
        others = (one for one in self.by_name.values() if one is not magazine)
        return 1 + sum(one.num_blocks > 0 or one.is_short(now) for one in others)

    def is_owed(self, magazine: Magazine, share: int, now: float) -> bool:
        """Tell whether another magazine has less than its share and got less than it wanted.

        A magazine that takes all or nothing and wants more than its share is owed nothing: it would hold up the others
        for ever.
        """
        return any(
            one.num_blocks < share and one.least_blocks <= share and one.is_short(now)
            for one in self.by_name.values()
            if one is not magazine
        )


def id_of(place: int) -> int:
    """Return the id by which people know the magazine at a place; ids begin with 1."""
    return place + 1


def contents(book: MagazineBook, states: NDArray[np.uint8]) -> tuple[tuple[int, int, int], ...]:
    """Return the place of each magazine and how many private and findable blocks it has; `states` are all blocks'."""
    found = []
    for one in sorted(book.by_name.values(), key=lambda one: one.place):
        num_private = int(np.count_nonzero(states[book.blocks_of(one)] == State.RESERVED))
        found.append((one.place, num_private, one.num_blocks - num_private))
    return tuple(found)
