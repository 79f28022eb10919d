"""Own the holdings of a pool for refusals: how many blocks each owner has, by what the blocks are held for.

No tenant is named: a block is the asking tenant's own, another tenant's, or nobody's. The holdings are counted only
when a call is refused, in a few passes over the columns, whatever the number of leases.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import Holding
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.lease.phases import Phase
from kvleased.core.state import CacheState
from kvleased.core.tier.flights import Flight

_OWNERS: Final = ("you", "others", "nobody")
(
    _LEASED,
    _PINNED,
    _COPYING,
    _CACHED,
    _QUARANTINED,
    _SCRUBBING,
    _BAD,
    _FREE,
    _IN_MAGAZINE,
    _PARKED,
) = range(10)
_WORDS: Final = (
    "leased", "pinned", "copying", "cached", "quarantined", "scrubbing", "bad", "free", "in_magazine",
    "parked",
)  # fmt: skip
_OF_STATE: Final = {
    State.FREE: _FREE,
    State.RESERVED: _LEASED,
    State.FILLING: _COPYING,
    State.READY: _CACHED,
    State.QUARANTINED: _QUARANTINED,
    State.SCRUBBING: _SCRUBBING,
    State.BAD: _BAD,
    State.PARKED: _PARKED,
}
_WORD_OF_BYTE: Final = bytes(_OF_STATE.get(byte, 0) for byte in range(256))  # type: ignore[call-overload]
_OF_LEASES: Final = (_LEASED, _PINNED, _COPYING)
"""Words of blocks that may turn out to be held by something other than a lease."""
_NOBODYS: Final = (_SCRUBBING, _BAD, _FREE, _PARKED)
_OTHERS: Final = len(_WORDS)
"""Added to the word of a block that is not the asking tenant's own."""
_READY: Final = int(State.READY)
_RESERVED: Final = int(State.RESERVED)


def holdings(state: CacheState, pool: Pool, tenant: int | None) -> tuple[Holding, ...]:
    """Return who has the blocks of a pool at this instant; they add up to all blocks that can be granted.

    Each block counts once: as leased if a lease has it, else for a magazine, else for a copy that reads it, else for a
    pin.
    """
    first = len(pool) - pool.num_usable
    # Bytes are translated in a fraction of the time that arrays are indexed.
    packed = pool.records.state.tobytes().translate(_WORD_OF_BYTE)
    words = np.frombuffer(bytearray(packed), np.uint8)
    words[(words == _CACHED) & (pool.holds > 0)] = _LEASED
    is_in_magazines = pool is state.device and len(state.magazines) > 0
    if state.flights or state.pins or is_in_magazines:
        _part_from_leases(state, pool, words)
    if tenant is None:
        words += _OTHERS
    elif not pool.is_only_of(tenant):
        words += (pool.records.tenant != tenant).view(np.uint8) * np.uint8(_OTHERS)
    words = words[first:]
    counts = np.bincount(words, minlength=2 * _OTHERS).reshape(2, _OTHERS)
    for word in _NOBODYS:
        counts[1, word] += counts[0, word]
        counts[0, word] = 0
    return tuple(
        Holding(
            owner=_OWNERS[2 if word in _NOBODYS else owner],
            state=_WORDS[word],
            num_blocks=int(counts[owner, word]),
        )
        for owner, word in zip(*counts.nonzero(), strict=True)
    )


def _part_from_leases(state: CacheState, pool: Pool, words: NDArray[np.uint8]) -> None:
    """Give blocks that no lease has, but a magazine or a pin holds or a copy reads, words of their own."""
    leases = pool.holds.copy()
    in_magazines = NOWHERE
    if pool is state.device:
        held_by = state.records.magazines.held_by
        in_magazines = held_by.nonzero()[0]
        leases -= np.bitwise_count(held_by)
    held = list(state.pins.values()) if pool is state.device else []
    for blocks in held:
        leases[blocks] -= 1
    words_of_held = [(blocks, _PINNED) for blocks in held]
    for flight in state.flights.values():
        source_pool, _ = state.ends(flight.direction)
        if source_pool is pool:
            leases[flight.sources] -= 1 + _is_leaving(state, flight)
            words_of_held.append((flight.sources, _COPYING))
    words_of_held.append((in_magazines, _IN_MAGAZINE))
    for blocks, word in words_of_held:
        is_free_of_leases = np.isin(words[blocks], _OF_LEASES) & (leases[blocks] <= 0)
        words[blocks[is_free_of_leases]] = word


def _is_leaving(state: CacheState, flight: Flight) -> bool:
    """Tell whether the sources of a copy are the blocks of a lease that is being evicted."""
    lease = state.leases.by_id.get(flight.lease_id) if flight.lease_id is not None else None
    return lease is not None and lease.phase is Phase.EVICTING
