"""Own what is remembered of the last blocks that left a tier: whose each one was, and when, why and for whom it left.

Here a block is named by 64 bits of its key. Departures are put aside as they come, and entered many at a time. The
entries at one place of the table form a chain, the newest first; the oldest entry of all is overwritten next.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.departures import Departures

Digests = NDArray[np.int64]
"""The first words of keys."""
Numbers = NDArray[np.int64]
"""Numbers of departures, counted from 1; 0 is none."""
Owners = NDArray[np.uint64]
"""Digests of tenants."""

ENTRIES_MIN: Final = 1 << 12
ENTRIES_MAX: Final = 1 << 20
"""Departures of blocks that are remembered, to tell why a block is missed."""
_BLOCKS_REMEMBERED: Final = 2
"""Departures that are remembered for each block of the cache."""
_PLACES_PER_ENTRY: Final = 2
_PUT_ASIDE_MAX: Final = 1 << 11
"""Departures that are put aside before they are entered."""
_STEPS_MAX: Final = 256
"""The most entries of a chain that are looked at; keys that somebody made to collide are not worth more."""


class DepartureReason(IntEnum):
    """Why a block left a tier."""

    EVICTED = 0
    """The tier's policy chose it, because there was no room."""
    DISPLACED = 1
    """An evict call asked for it, or the only magazine that held it is going to write it again."""
    CLEARED = 2
    """A clear took it."""
    RESIZED = 3
    """A resize made the tier smaller."""
    STORE_LOST = 4
    """The tier's store was lost, or is another one now."""
    DAMAGED = 5
    """Its bytes were not what their checksum says."""


class Leaving(NamedTuple):
    """Findable blocks that leave together, an entry each."""

    digests: Digests
    owners: Owners
    """The tenant whose bytes each has."""
    since: Numbers
    """The newest lease when each became findable."""
    idle_at: NDArray[np.float64]
    """The time when each was last let go of."""


class _Batch(NamedTuple):
    """Blocks that left together."""

    blocks: Leaving
    now: float
    tenant: int
    code: int


class Found(NamedTuple):
    """What is remembered of some keys, as of one grant."""

    tiers: NDArray[np.uint8]
    """For each key, bits of the tiers that had the tenant's own block at the grant, which left later."""
    foreign_tiers: NDArray[np.uint8]
    """The same of other tenants' blocks."""
    numbers: Numbers
    """For each key, the last departure of the tenant's own block before the grant; 0 if there was none."""


class History:
    """The departures of one cache."""

    def __init__(self, num_blocks: int) -> None:
        """Remember nothing yet; `num_blocks` counts the blocks of all tiers."""
        wanted = min(max(_BLOCKS_REMEMBERED * num_blocks, ENTRIES_MIN), ENTRIES_MAX)
        num_entries = 1 << (wanted - 1).bit_length()
        self.now = 0.0
        """Monotonic seconds of the command that is being carried out."""
        self.tenant = 0
        """For whom room is being made; 0 is nobody."""
        self.moment = 0
        """The newest lease; blocks that become findable are newer than this lease."""
        self.num_left = 0
        """Departures so far."""
        self.departures = Departures()
        """What is counted of the departures that were entered."""
        self._aside: list[_Batch] = []
        self._num_aside = 0
        self._mask = num_entries - 1
        # Zeroed memory costs nothing until it is written.
        self._table: Numbers = np.zeros(_PLACES_PER_ENTRY * num_entries, np.int64)
        self._digest: Digests = np.zeros(num_entries, np.int64)
        self._before: Numbers = np.zeros(num_entries, np.int64)
        self._owner: Owners = np.zeros(num_entries, np.uint64)
        self._since: Numbers = np.zeros(num_entries, np.int64)
        self._when: NDArray[np.float64] = np.zeros(num_entries, np.float64)
        self._tenant: NDArray[np.uint64] = np.zeros(num_entries, np.uint64)
        self._code: NDArray[np.uint8] = np.zeros(num_entries, np.uint8)

    def __len__(self) -> int:
        """Count the departures that are remembered."""
        return min(self.num_left, len(self._digest))

    def __repr__(self) -> str:
        """Show how much is remembered."""
        return f"<History {len(self)} of {self.num_left} departures>"

    @property
    def began(self) -> float | None:
        """When the oldest remembered departure was, in monotonic seconds; None if there is none."""
        if not self.num_left:
            return None
        self._enter()
        return float(self._when[(self.num_left - len(self) + 1) & self._mask])

    def left(self, tier: int, blocks: Leaving, why: DepartureReason) -> None:
        """Note that blocks left a tier."""
        count = len(blocks.digests)
        if not count:
            return
        self._aside.append(_Batch(blocks, self.now, self.tenant, tier << 4 | why))
        self.num_left += count
        self._num_aside += count
        if self._num_aside > _PUT_ASIDE_MAX:
            self._enter()

    def tick(self) -> None:
        """Note the time, and enter the departures that were put aside."""
        self.departures.clock.note(self.moment, self.now)
        self._enter()

    def counted(self) -> Departures:
        """Return what is counted of all departures so far."""
        self._enter()
        return self.departures

    def last_before(self, digests: Digests, num_left: Numbers) -> Numbers:
        """Return each key's last departure among the first `num_left`, a number per key; 0 if there is none."""
        self._enter()
        oldest = max(0, self.num_left - len(self._digest))
        chain = self._table[digests & (len(self._table) - 1)]
        numbers = np.zeros(len(digests), np.int64)
        (left,) = (chain > oldest).nonzero()
        for _ in range(_STEPS_MAX):
            if not len(left):
                break
            at = chain[left]
            places = at & self._mask
            is_found = (self._digest[places] == digests[left]) & (at <= num_left[left])
            numbers[left[is_found]] = at[is_found]
            chain[left] = behind = self._before[places]
            left = left[~is_found & (behind > oldest)]
        return numbers

    def find(self, digests: Digests, num_left: int, moment: int, owner: int) -> Found:
        """Return what became of a tenant's keys before a grant, which `num_left` departures preceded, and later.

        `moment` is the id of the granted lease: a block that was findable before the grant has a smaller `since`.
        """
        self._enter()
        oldest = self.num_left - len(self._digest)
        chain = self._table[digests & (len(self._table) - 1)]
        tiers, foreign_tiers = np.zeros((2, len(digests)), np.uint8)
        numbers = np.zeros(len(digests), np.int64)
        (left,) = (chain > max(0, oldest)).nonzero()
        for _ in range(_STEPS_MAX):
            if not len(left):
                break
            at = chain[left]
            places = at & self._mask
            is_same, is_own = self._digest[places] == digests[left], self._owner[places] == owner
            is_later = at > num_left
            was_there = is_same & is_later & (self._since[places] < moment)
            for bits, is_its in ((tiers, is_own), (foreign_tiers, ~is_own)):
                was_its = was_there & is_its
                bits[left[was_its]] |= np.uint8(1) << (self._code[places[was_its]] >> 4)
            is_found = is_same & is_own & ~is_later
            numbers[left[is_found]] = at[is_found]
            behind = self._before[places]
            chain[left] = behind
            left = left[~is_found & (behind > max(0, oldest))]
        return Found(tiers, foreign_tiers, numbers)

    def reasons(self, numbers: Numbers) -> NDArray[np.uint8]:
        """Return why the blocks of remembered departures left."""
        reasons: NDArray[np.uint8] = self._code[numbers & self._mask] & 0xF
        return reasons

    def tiers(self, numbers: Numbers) -> NDArray[np.uint8]:
        """Return which tier the blocks of remembered departures left."""
        tiers: NDArray[np.uint8] = self._code[numbers & self._mask] >> 4
        return tiers

    def tenants(self, numbers: Numbers) -> NDArray[np.uint64]:
        """Return the tenants for whom the blocks of remembered departures made room."""
        tenants: NDArray[np.uint64] = self._tenant[numbers & self._mask]
        return tenants

    def times(self, numbers: Numbers) -> NDArray[np.float64]:
        """Return when remembered departures were, in monotonic seconds."""
        times: NDArray[np.float64] = self._when[numbers & self._mask]
        return times

    def _enter(self) -> None:
        """Enter what was put aside, all in one go."""
        if not self._aside:
            return
        batches, self._aside = self._aside, []
        blocks = Leaving(
            *map(np.concatenate, zip(*(batch.blocks for batch in batches), strict=True))
        )
        counts = [len(batch.blocks.digests) for batch in batches]
        when = np.repeat([batch.now for batch in batches], counts)
        codes = np.repeat(np.array([batch.code for batch in batches], np.uint8), counts)
        if not self.departures.clock.is_set:
            self.departures.clock.note(self.moment, self.now)
        self.departures.count(codes, blocks.since, when, blocks.idle_at)
        kept = slice(max(0, self._num_aside - len(self._digest)), None)
        numbers = np.arange(self.num_left - self._num_aside + 1, self.num_left + 1)[kept]
        self._num_aside = 0
        digests, owners = blocks.digests[kept], blocks.owners[kept]
        tenants = np.array([batch.tenant for batch in batches], np.uint64).repeat(counts)[kept]
        since, when, codes = blocks.since[kept], when[kept], codes[kept]
        before = self._chain(numbers, digests & (len(self._table) - 1))
        for to, of in self._places_of(numbers):
            self._digest[to] = digests[of]
            self._owner[to] = owners[of]
            self._since[to] = since[of]
            self._when[to] = when[of]
            self._tenant[to] = tenants[of]
            self._code[to] = codes[of]
            self._before[to] = before[of]

    def _places_of(self, numbers: Numbers) -> Iterator[tuple[slice, slice]]:
        """Yield where consecutive departures are entered, and which they are: one piece, or two if they wrap around."""
        begin, count, size = int(numbers[0]) & self._mask, len(numbers), len(self._digest)
        num_first = min(count, size - begin)
        yield slice(begin, begin + num_first), slice(0, num_first)
        if num_first < count:
            yield slice(0, count - num_first), slice(num_first, count)

    def _chain(self, numbers: Numbers, buckets: NDArray[np.int64]) -> Numbers:
        """Put entries at the heads of their chains, and return the entry behind each."""
        table = self._table
        behind: Numbers = table[buckets]
        table[buckets] = numbers
        (lost,) = (table[buckets] != numbers).nonzero()
        if not len(lost):
            return behind
        # Several entries belong at one place: they are chained one behind the other.
        is_shared = np.zeros(len(numbers), np.bool_)
        is_shared[lost] = True
        is_shared[table[buckets[lost]] - numbers[0]] = True
        (shared,) = is_shared.nonzero()
        order = shared[buckets[shared].argsort(kind="stable")]
        ordered = buckets[order]
        follows = ordered[1:] == ordered[:-1]
        behind[order[1:][follows]] = numbers[order[:-1][follows]]
        is_newest = np.append(~follows, np.True_)
        table[ordered[is_newest]] = numbers[order[is_newest]]
        return behind
