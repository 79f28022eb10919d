"""Own the picture of a tier that people look at: a byte for the look of each cell of blocks, and one for its tenant.

How often a picture is taken, and who may see it, is decided elsewhere. Its cost is bounded: if a tier has more blocks
than a picture has cells, each cell shows several blocks, and only a few of them are looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.ids import LeaseId
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.effects import Tier
from kvleased.core.lease.phases import Phase
from kvleased.core.magazines import id_of
from kvleased.core.state import CacheState

CELLS_MAX: Final = 1 << 15
"""Cells of a picture."""
TENANTS_MAX: Final = 250
"""Tenants that are told apart in one picture."""
HOLDERS_SHOWN_MAX: Final = 8
"""Leases that are listed for one block."""
HELD: Final = len(State)
"""The look of a READY block that somebody holds; the other looks are the states."""
LOOKS: Final = (*(state.name.lower() for state in State), "held")
"""The names of the looks, each at its number."""
NOBODY: Final = 0
"""The tenant number of a block that is nobody's; tenants are numbered from 1."""
OTHERS: Final = 255
"""The number of every tenant that was not named."""

_LOOKED_AT_MAX: Final = 4
"""Blocks of a cell that are looked at."""
_ALARMING: Final = frozenset({State.QUARANTINED, State.BAD})
"""States that a cell shows if any block looked at is in one; otherwise it shows the most common look."""
_NOBODYS: Final = (State.FREE, State.PARKED)
_ALARM: Final = 1 << 5
_KEY_BYTES_SHOWN: Final = 4
_LISTS_SLOTS: Final = frozenset({Phase.EVICTED, Phase.RELOADING})

Looks = NDArray[np.uint8]
_Element = TypeVar("_Element", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One tier at one instant."""

    first_block: int
    """The block at which the first cell begins; blocks before it are never granted."""
    num_blocks: int
    blocks_per_cell: int
    looks: Looks
    """The look of each cell."""
    tenants: Looks
    """The tenant of each cell: a number from 1, in the order in which tenants were named, or NOBODY or OTHERS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One lease that lists a block."""

    lease_id: LeaseId
    phase: str
    age_seconds: float | None
    """None if the lease was granted in an earlier life of the daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """One block or slot at one instant."""

    block_id: int
    look: str
    num_holders: int
    tenant_digest: int
    """0 if it is nobody's."""
    key_prefix: str
    """The first bytes of its key in hex, too few to ask for the block; empty if it is not findable."""
    position: int
    """Its index in its chain; meaningless if it is not findable."""
    leases: tuple[Holder, ...]
    """Some of the leases that list it."""
    magazines: tuple[int, ...]
    """The ids of the magazines that hold it, as in lists of magazines."""
    num_pins: int
    also_in: tuple[str, ...]
    """Other tiers that have its key."""


def picture(
    state: CacheState, tier: Tier, tenants: Sequence[int], cells_max: int = CELLS_MAX
) -> Picture:
    """Return the picture of a tier; `tenants` are the digests of the tenants to tell apart."""
    pool = pool_of(state, tier)
    first = len(pool) - pool.num_usable
    num_blocks = pool.num_usable
    blocks_per_cell = max(1, -(-num_blocks // cells_max))
    num_shown = min(blocks_per_cell, _LOOKED_AT_MAX)
    offsets = [first + at * blocks_per_cell // num_shown for at in range(num_shown)]
    num_cells = -(-num_blocks // blocks_per_cell)
    # One row for each block of a cell that is looked at, because numpy works quickly on long rows, also with steps.
    rows = [_looks(pool, offset, blocks_per_cell, num_cells) for offset in offsets]
    looks = rows[0] if num_shown == 1 else _most_common(rows)
    digests = _every(pool.records.tenant, offsets[0], blocks_per_cell, num_cells)
    for row, offset in zip(rows[:0:-1], offsets[:0:-1], strict=True):
        others = _every(pool.records.tenant, offset, blocks_per_cell, num_cells)
        digests = np.where((rows[0] != looks) & (row == looks), others, digests)
    owners = _owners(digests, tenants)
    owners *= (looks != State.FREE) & (looks != State.PARKED)
    return Picture(
        first_block=first,
        num_blocks=num_blocks,
        blocks_per_cell=blocks_per_cell,
        looks=looks,
        tenants=owners,
    )


def block_facts(state: CacheState, tier: Tier, block_id: int, now: float) -> BlockFacts:
    """Describe one block.

    Raises:
        InvalidError: The tier has no such block.
    """
    pool = pool_of(state, tier)
    first = len(pool) - pool.num_usable
    if not first <= block_id < len(pool):
        message = f"the {tier.value} tier has blocks {first} to {len(pool) - 1}, so there is no block {block_id}"
        raise InvalidError(message, resource="block", need=block_id, limit=len(pool) - 1)
    records = pool.records
    number = int(records.state[block_id])
    num_holders = int(pool.holds[block_id])
    is_ready, is_device = number == State.READY, tier is Tier.DEVICE
    held_by = int(state.magazines.records.held_by[block_id]) if is_device else 0
    return BlockFacts(
        block_id=block_id,
        look=LOOKS[HELD if is_ready and num_holders else number],
        num_holders=num_holders,
        tenant_digest=0 if number in _NOBODYS else int(records.tenant[block_id]),
        key_prefix=records.key[block_id, :_KEY_BYTES_SHOWN].tobytes().hex() if is_ready else "",
        position=int(records.position[block_id]),
        leases=_holders(state, tier, block_id, now),
        magazines=tuple(id_of(one) for one in range(held_by.bit_length()) if held_by >> one & 1),
        num_pins=sum(block_id in blocks for blocks in state.pins.values()) if is_device else 0,
        also_in=_also_in(state, pool, block_id) if is_ready else (),
    )


def pool_of(state: CacheState, tier: Tier) -> Pool:
    """Return the pool of a tier; the remote tier has none."""
    return _pools(state)[tier]


def _pools(state: CacheState) -> dict[Tier, Pool]:
    return {Tier.DEVICE: state.device, Tier.HOST: state.host, Tier.DISK: state.disk}


def _owners(digests: NDArray[np.uint64], tenants: Sequence[int]) -> Looks:
    """Return the tenant number of each block."""
    named = np.array(tenants[:TENANTS_MAX], np.uint64)
    if not len(named):
        return np.full(digests.shape, OTHERS, np.uint8)
    order = named.argsort()
    sorted_named = named[order]
    places = sorted_named.searchsorted(digests)
    places[places == len(named)] = 0
    numbers = (order + 1).astype(np.uint8)[places]
    numbers[sorted_named[places] != digests] = OTHERS
    return numbers


def _looks(pool: Pool, first: int, step: int, num_cells: int) -> Looks:
    """Return the look of one block of each cell."""
    looks = _every(pool.records.state, first, step, num_cells).copy()
    is_held = (looks == State.READY) & (_every(pool.holds, first, step, num_cells) > 0)
    looks += is_held.view(np.uint8) * np.uint8(HELD - State.READY)
    return looks


def _every(column: NDArray[_Element], first: int, step: int, count: int) -> NDArray[_Element]:
    """Return every `step`-th entry from `first` on; if that leaves the last cell without one, also the last entry."""
    found = column[first::step]
    return found if len(found) == count else np.append(found, column[-1])


def _most_common(rows: Sequence[Looks]) -> Looks:
    """Return for each cell an alarming look if any of its blocks has one, else the look that most of them have."""
    most = np.zeros(len(rows[0]), np.uint8)
    best = np.zeros(len(rows[0]), np.uint8)
    for number in range(len(LOOKS)):
        count = np.zeros(len(most), np.uint8)
        for row in rows:
            count += row == number
        if number in _ALARMING:
            count *= np.uint8(_ALARM)
        is_more = count > best
        most[is_more] = number
        np.maximum(best, count, out=best)
    return most


def _holders(state: CacheState, tier: Tier, block_id: int, now: float) -> tuple[Holder, ...]:
    rows = state.leases.rows
    if tier is Tier.DISK:
        return ()
    listing = rows.lease_id != 0
    is_lower = np.isin(rows.phase, [int(phase) for phase in _LISTS_SLOTS])
    listing &= is_lower if tier is Tier.HOST else ~is_lower
    (live,) = listing.nonzero()
    # A row that was longer before still lists blocks behind its end, so each lease that is found is checked.
    perhaps = live[(rows.block_ids[live] == block_id).any(axis=1)].tolist()
    found = []
    for lease_id in rows.lease_id[perhaps].tolist():
        lease = state.leases.by_id[LeaseId(lease_id)]
        if block_id in state.leases.blocks_of(lease):
            age_seconds = now - lease.granted_at if np.isfinite(lease.granted_at) else None
            found.append(
                Holder(
                    lease_id=lease.lease_id, phase=lease.phase.name.lower(), age_seconds=age_seconds
                )
            )
        if len(found) == HOLDERS_SHOWN_MAX:
            break
    return tuple(found)


def _also_in(state: CacheState, pool: Pool, block_id: int) -> tuple[str, ...]:
    key = pool.records.key[block_id].tobytes()
    return tuple(
        tier.value
        for tier, other in _pools(state).items()
        if other is not pool and other.index.find(key)[0] >= 0
    )
