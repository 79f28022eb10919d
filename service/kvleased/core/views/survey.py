"""Own the survey of a cache at one instant: everything that its metrics tell.

Counting a tier's blocks by tenant takes long, so it is not done here: the columns are copied, in a tenth of the time,
to be counted later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.groups import GroupShape, Keeps, first_needed
from kvleased.core.blocks.departures import Departures
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.effects import Tier
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import TenantFacts, list_tenants
from kvleased.core.views.census import Census, census

CACHED: Final = 1
"""The kind of a block that may be evicted."""
HELD: Final = 2
"""The kind of a block that is in use or held."""
_NUM_KINDS: Final = 3
_NOBODYS: Final = frozenset({State.FREE, State.SCRUBBING, State.BAD, State.PARKED})
_KINDS: Final = np.array(
    [0 if state in _NOBODYS else CACHED if state is State.READY else HELD for state in State],
    np.uint8,
)
_LOW_BITS: Final = 16
_ON_DEVICE: Final = (Phase.LOADING, Phase.ACTIVE, Phase.EVICTING, Phase.QUARANTINED)

Spread = NDArray[np.int64]
"""[tenants + 1, kinds]: numbers of blocks; the last row is for all other tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The states, tenants and holds of a tier's blocks at one instant."""

    states: NDArray[np.uint8]
    tenants: NDArray[np.uint64]
    are_held: NDArray[np.bool_]

    def by_tenant(self, digests: Sequence[int]) -> Spread:
        """Count the blocks of each of these tenants, at most 254, and of all others, by kind."""
        kinds = _KINDS[self.states]
        kinds += (self.are_held & (kinds == CACHED)).view(np.uint8)
        codes = _numbers(self.tenants, digests) * np.uint16(_NUM_KINDS) + kinds
        num_codes = (len(digests) + 1) * _NUM_KINDS
        return np.bincount(codes, minlength=num_codes).reshape(-1, _NUM_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """The blocks of one group that live leases list; a shared block counts once for each lease."""

    num_blocks: int
    tokens_unfilled: int
    """Tokens that the blocks have room for beyond those that the leases cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything at one instant."""

    census: Census
    available_blocks: int
    """Device blocks that are free or may be evicted."""
    columns: Mapping[Tier, Columns]
    tenants: Sequence[TenantFacts]
    phases: Mapping[str, int]
    """Leases by phase."""
    lease_seconds: NDArray[np.float64]
    """Ages of the leases that this life of the daemon has granted, the youngest first."""
    quarantined_seconds: float
    """Since the first of the quarantined leases expired; 0 if there is none."""
    waiting_seconds: float
    """Since the first of the waiting calls came; 0 if there is none."""
    groups: Sequence[Filling]
    departures: Departures
    """The counts of blocks that left; counting goes on in the same object."""
    missed_keys_dropped: int
    """Missed keys that are never looked up."""


def survey(state: CacheState, now: float) -> Survey:
    """Look at everything; `now` is in monotonic seconds."""
    leases = list(state.leases.by_id.values())
    late = [lease.deadline for lease in leases if lease.phase is Phase.QUARANTINED]
    granted_at = np.array([lease.granted_at for lease in leases])
    return Survey(
        census=census(state),
        available_blocks=state.device.num_available,
        columns={
            tier: _copied(pool) for tier, pool in zip(Tier, state.pools, strict=False) if len(pool)
        },
        tenants=list_tenants(state),
        phases=_phases(leases),
        lease_seconds=np.sort(now - granted_at[np.isfinite(granted_at)]),
        quarantined_seconds=now - min(late, default=now),
        waiting_seconds=now - min((waiter.since for waiter in state.callers), default=now),
        groups=_fillings(state, leases),
        departures=state.history.counted(),
        missed_keys_dropped=state.missing.num_dropped,
    )


def _copied(pool: Pool) -> Columns:
    first, records = len(pool) - pool.num_usable, pool.records
    return Columns(
        states=records.state[first:].copy(),
        tenants=records.tenant[first:].copy(),
        are_held=pool.holds[first:] > 0,
    )


def _phases(leases: Iterable[Lease]) -> dict[str, int]:
    counts = {phase.name.lower(): 0 for phase in Phase if phase is not Phase.UNUSED}
    for lease in leases:
        counts[lease.phase.name.lower()] += 1
    return counts


def _fillings(state: CacheState, leases: Iterable[Lease]) -> tuple[Filling, ...]:
    rows = state.leases.rows
    chosen = np.array([lease.row for lease in leases if lease.phase in _ON_DEVICE], np.intp)
    ends = rows.num_blocks[chosen].astype(np.int64)
    num_tokens, num_computed = (
        column[chosen].astype(np.int64) for column in (rows.num_tokens, rows.num_computed)
    )
    return tuple(
        _filling(group, ends[:, at], num_tokens, num_computed)
        for at, group in enumerate(state.shape.groups)
    )


def _filling(
    group: GroupShape,
    ends: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    num_computed: NDArray[np.int64],
) -> Filling:
    begins = first_needed(group, num_computed)
    if group.keeps is Keeps.STATE:
        begins = np.maximum(begins, ends - 1 - group.extra_blocks)
    held = np.maximum(ends - np.minimum(begins, ends), 0)
    unfilled = 0
    if group.keeps not in (Keeps.STATE, Keeps.FIXED):
        room = (ends - group.extra_blocks) * group.tokens_per_block
        unfilled = int(np.maximum(room - num_tokens, 0).sum())
    return Filling(num_blocks=int(held.sum()), tokens_unfilled=unfilled)


def _numbers(tenants: NDArray[np.uint64], digests: Sequence[int]) -> NDArray[np.uint16]:
    """Return for each tenant its index among the digests, or the number of digests if it is not among them."""
    named, others = np.array(digests, np.uint64), len(digests)
    low = (named & np.uint64((1 << _LOW_BITS) - 1)).astype(np.intp)
    if len(set(low.tolist())) < others:
        return _numbers_by_order(tenants, named)
    # Digests are as good as random, so their lower bits find the candidate in a fifth of the time of a search.
    table = np.full(1 << _LOW_BITS, others, np.uint16)
    table[low] = np.arange(others)
    guesses = table[tenants.view(np.uint16)[::4]]
    is_other = np.append(named, np.uint64(0))[guesses] != tenants
    guesses[is_other] = others
    return guesses


def _numbers_by_order(tenants: NDArray[np.uint64], named: NDArray[np.uint64]) -> NDArray[np.uint16]:
    order = named.argsort()
    places = np.minimum(named[order].searchsorted(tenants), len(named) - 1)
    numbers = order[places].astype(np.uint16)
    numbers[named[numbers] != tenants] = len(named)
    return numbers
