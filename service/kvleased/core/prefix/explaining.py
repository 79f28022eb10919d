"""Own why blocks of a prefix were not found when a lease was granted; the reasons are worked out when somebody asks.

The grant only notes how many blocks had left by then. Two kinds of blocks were cached at that instant: those that are
cached now and became findable before it, and those that have left since, as the history says. The cases, in order:
- another tenant's block, which has the key only if the key was stolen, hid the block, because it was on the device;
- the block was cached, but a block before it was missing;
- a lower tier had the block, but that tier did not work, or the call could not wait for it;
- the block had left, and the history knows why;
- nothing is known of the block but that another tenant's block has its key;
- nothing is known of the block.
The remote store has no index here. If it did not work, or did not answer the call, or the call could not wait for it,
it may have any block that no tier had, and of a very long prefix any block behind those that it was asked for.
"""

from dataclasses import replace
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import WrongStateError
from kvlease.groups import Keeps, first_needed
from kvlease.ids import BYTES_PER_KEY
from kvleased.core.blocks.history import DepartureReason, Digests, Numbers
from kvleased.core.blocks.marks import WORDS_PER_KEY, key_words
from kvleased.core.blocks.pool import Pool
from kvleased.core.commands import Explain, Reserve
from kvleased.core.effects import Explained, Missed, MissReason, Outcome, Tier
from kvleased.core.lease.leases import Lease
from kvleased.core.state import TIER_NUMBERS, CacheState, split_keys
from kvleased.core.untold import Silence, Untold

RUNS_MAX: Final = 64
"""Runs of misses in one answer."""
LOWER_POLICY: Final = "leaf-lru"
"""The eviction policy of the tiers below the device."""

_TIERS: Final = tuple(TIER_NUMBERS)
_DEVICE: Final = TIER_NUMBERS[Tier.DEVICE]
_NO_TIER: Final = len(_TIERS)


class _Code(IntEnum):
    """What is known of one block; the first codes are those of `DepartureReason`."""

    EVICTED = DepartureReason.EVICTED
    DISPLACED = DepartureReason.DISPLACED
    CLEARED = DepartureReason.CLEARED
    RESIZED = DepartureReason.RESIZED
    STORE_LOST = DepartureReason.STORE_LOST
    DAMAGED = DepartureReason.DAMAGED
    DROPPED = 6
    CACHED = 7
    FOREIGN = 8
    TIER_OFF = 9
    UNKNOWN = 10
    SHORT = 11


_REASONS: Final = {
    _Code.EVICTED: MissReason.EVICTED,
    _Code.DISPLACED: MissReason.EVICTED,
    _Code.CLEARED: MissReason.CLEARED,
    _Code.RESIZED: MissReason.RESIZED,
    _Code.STORE_LOST: MissReason.STORE_LOST,
    _Code.DAMAGED: MissReason.CHECKSUM,
    _Code.DROPPED: MissReason.DROPPED,
    _Code.CACHED: MissReason.BEHIND_A_MISS,
    _Code.FOREIGN: MissReason.OTHER_TENANT,
    _Code.TIER_OFF: MissReason.TIER_OFF,
    _Code.UNKNOWN: MissReason.NEVER_COMMITTED,
    _Code.SHORT: MissReason.SHORTER_THAN_A_BLOCK,
}

_NOT_LOOKED_FOR: Final = (_Code.FOREIGN, _Code.CACHED, _Code.SHORT)
"""What is known of missed blocks for which the remote store would not be asked."""


class _InDoubt(NamedTuple):
    """Which blocks the remote store may have without having told so, and why it did not tell."""

    silence: Silence | None
    may_be_there: NDArray[np.bool_]


class _Blocks(NamedTuple):
    """What is known of some blocks, one entry each."""

    codes: NDArray[np.uint8]
    tiers: NDArray[np.uint8]
    """Number of the tier that the block left or was in."""
    are_below: NDArray[np.bool_]
    """Whether a lower tier had the block, but the call could not wait for it."""
    numbers: Numbers
    """Number of the block's last departure if that is the reason, else 0."""
    groups: NDArray[np.uint8]

    def at(self, places: NDArray[np.intp] | slice) -> "_Blocks":
        """Return what is known of some of the blocks."""
        return _Blocks(
            codes=self.codes[places],
            tiers=self.tiers[places],
            are_below=self.are_below[places],
            numbers=self.numbers[places],
            groups=self.groups[places],
        )

    def put(self, places: NDArray[np.bool_], others: "_Blocks") -> None:
        """Replace what is known of some of the blocks."""
        self.codes[places] = others.codes
        self.tiers[places] = others.tiers
        self.are_below[places] = others.are_below
        self.numbers[places] = others.numbers
        self.groups[places] = others.groups


def explain(state: CacheState, command: Explain, now: float) -> Outcome:
    """Tell where each token of a lease's prefix came from; an operator may ask about any lease.

    Raises:
        WrongStateError: An earlier life of the daemon granted the lease, and the request is no longer known.
    """
    del now
    lease = state.leases.by_id.get(command.lease_id)
    if lease is None or command.worker_id is not None:
        lease = state.lease_of(command)
    if lease.request is None:
        msg = (
            "the lease was granted before the daemon restarted, and the reasons were not kept; "
            "ask about a newer lease"
        )
        raise WrongStateError(msg, resource="lease", rule="granted_before_restart")
    hits = dict(zip(Tier, lease.hit_tokens, strict=True))
    return Outcome(
        reply=Explained(
            lease_id=lease.lease_id,
            num_tokens=lease.request.num_tokens,
            hit_tokens={tier: count for tier, count in hits.items() if count},
            misses=misses_of(state, lease),
        )
    )


def misses_of(state: CacheState, lease: Lease) -> tuple[Missed, ...]:
    """Return why the rest of a lease's prefix was not found when it was granted; nothing for a fork."""
    if lease.misses is None:
        request = lease.request
        lease.misses = _misses(state, lease, request) if isinstance(request, Reserve) else ()
    return lease.misses


def _misses(state: CacheState, lease: Lease, request: Reserve) -> tuple[Missed, ...]:
    hit_tokens = lease.tier_tokens[-1]
    hash_tokens, unit_tokens = state.covering.hash_tokens, state.covering.hit_tokens
    words = key_words(request.keys)
    ends = np.arange(hit_tokens, len(words) * hash_tokens, unit_tokens) + unit_tokens
    ends = ends[ends <= len(words) * hash_tokens]
    runs: list[Missed] = []
    if len(ends):
        units = _units(state, lease, request, ends)
        silence, first_key = _untold(state, lease, request) or (None, 0)
        is_looked_for = ~(np.isin(units.codes, _NOT_LOOKED_FOR) | units.are_below)
        may_be_there = (ends > first_key * hash_tokens) & is_looked_for
        in_doubt = _InDoubt(silence, may_be_there)
        runs = _runs(state, units, in_doubt, hit_tokens // hash_tokens, unit_tokens // hash_tokens)
        hit_tokens = int(ends[-1])
    # A call that sends no keys for some whole blocks does not look for those blocks.
    num_sent = len(words) * hash_tokens
    num_over = max(0, request.num_tokens - num_sent)
    end_tokens = num_sent + (num_over if num_over < hash_tokens else 0)
    if end_tokens > hit_tokens:
        runs.append(
            Missed(
                first_block=hit_tokens // hash_tokens,
                num_blocks=-(-(end_tokens - hit_tokens) // hash_tokens),
                reason=MissReason.SHORTER_THAN_A_BLOCK,
                num_tokens=end_tokens - hit_tokens,
            )
        )
    return _at_most(runs)


def _untold(state: CacheState, lease: Lease, request: Reserve) -> Untold | None:
    """Return the keys of which the remote store said nothing; None if there are none, or no such store."""
    if not state.shape.uses_remote:
        return None
    if not request.wait_ms:
        return Untold(Silence.NO_WAIT, 0)
    return Untold(Silence.OFF, 0) if Tier.REMOTE in lease.tiers_off else lease.untold


def _at_most(runs: list[Missed]) -> tuple[Missed, ...]:
    """Return as many runs as an answer has room for; the last one counts the runs left out."""
    left_out = runs[RUNS_MAX:]
    if left_out:
        runs[RUNS_MAX - 1] = replace(
            runs[RUNS_MAX - 1],
            num_runs_left_out=len(left_out),
            num_blocks_left_out=sum(run.num_blocks for run in left_out),
        )
    return tuple(runs[:RUNS_MAX])


# Blocks ---------------------------------------------------------------------------------------------------------------


def _units(state: CacheState, lease: Lease, request: Reserve, ends: NDArray[np.int64]) -> _Blocks:
    """Return for each end of a longer prefix, in tokens, the block because of which that prefix was not found.

    That is the first missing block of those that the tokens behind the end need. In groups that keep everything, only
    the blocks since the end before are looked at, because an earlier missing block is the reason of an earlier end.
    """
    covering, words = state.covering, key_words(request.keys)
    units = _blank(len(ends), _Code.UNKNOWN if not covering.shared else _Code.CACHED)
    is_open = np.ones(len(ends), np.bool_)
    for at in covering.shared:
        group = covering.groups[at]
        _, marked = covering.block_keys(at, words)
        blocks = _blocks(state, lease, request, marked, at)
        begins = first_needed(group, ends)
        if group.keeps is Keeps.EVERYTHING:
            begins = np.maximum(begins, (ends - covering.hit_tokens) // group.tokens_per_block)
        afters = ends // group.tokens_per_block + group.is_drafted
        # A block behind the last key cannot be cached; it is the reason only if no other block is.
        codes = np.append(blocks.codes, np.uint8(_Code.SHORT))
        (missing,) = (codes != _Code.CACHED).nonzero()
        first = missing[np.minimum(missing.searchsorted(begins), len(missing) - 1)]
        is_reason = is_open & (first < afters)
        short = is_reason & (first == len(blocks.codes))
        units.codes[short], units.groups[short] = _Code.SHORT, at
        known = is_reason & ~short
        units.put(known, blocks.at(first[known]))
        is_open &= ~is_reason
    return units


def _blank(count: int, code: int) -> _Blocks:
    return _Blocks(
        np.full(count, code, np.uint8),
        np.full(count, _NO_TIER, np.uint8),
        np.zeros(count, np.bool_),
        np.zeros(count, np.int64),
        np.zeros(count, np.uint8),
    )


def _blocks(
    state: CacheState, lease: Lease, request: Reserve, words: NDArray[np.uint64], group: int
) -> _Blocks:
    """Return what is known of a group's blocks at the time of the grant; `words` are the words of their keys."""
    blocks = _blank(len(words), _Code.UNKNOWN)
    packed, digests = words.tobytes(), _digests(words)
    found = state.history.find(digests, lease.num_left_before, lease.lease_id, lease.tenant)
    blocks.groups[:] = group
    has_left = found.numbers > 0
    numbers = found.numbers[has_left]
    blocks.numbers[has_left] = numbers
    blocks.codes[has_left] = state.history.reasons(numbers)
    blocks.tiers[has_left] = state.history.tiers(numbers)
    if lease.unserved_keys:
        is_unserved = np.array([key in lease.unserved_keys for key in split_keys(packed)], np.bool_)
        _put(blocks, is_unserved, _Code.DROPPED, TIER_NUMBERS[Tier.REMOTE])
    has_own, has_foreign, is_hidden = np.zeros((3, len(words)), np.bool_)
    for tier, pool in reversed(_pools(state)):
        number = TIER_NUMBERS[tier]
        was_there, is_foreign = _in_pool(pool, packed, lease)
        was_there |= (found.tiers >> number & 1).astype(np.bool_)
        is_foreign |= (found.foreign_tiers >> number & 1).astype(np.bool_)
        has_foreign |= is_foreign
        if tier is Tier.DEVICE:
            # It hides what is below; another tenant's slot does not.
            is_hidden = has_own & is_foreign
        has_own |= was_there
        if tier in lease.tiers_off:
            _put(blocks, was_there, _Code.TIER_OFF, number)
        elif tier in lease.skipped:
            _put(blocks, was_there, _Code.DROPPED, number)
        elif tier is Tier.DEVICE or request.wait_ms:
            _put(blocks, was_there, _Code.CACHED, number)
            blocks.are_below[was_there] = False
        else:
            # The block left the device, but a lower tier has it.
            blocks.are_below[was_there] = True
            _put(blocks, was_there & (blocks.codes == _Code.UNKNOWN), _Code.EVICTED, _DEVICE)
    _put(blocks, is_hidden | has_foreign & (blocks.codes == _Code.UNKNOWN), _Code.FOREIGN, _NO_TIER)
    return blocks


def _digests(words: NDArray[np.uint64]) -> Digests:
    assert words.shape[1] == WORDS_PER_KEY == BYTES_PER_KEY // 8, "keys have grown"
    return np.ascontiguousarray(words[:, 0]).view(np.int64)


def _pools(state: CacheState) -> tuple[tuple[Tier, Pool], ...]:
    """Return the tiers that have an index, the highest first."""
    return tuple(zip(Tier, state.pools, strict=False))


def _in_pool(
    pool: Pool, packed: bytes, lease: Lease
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Tell which packed keys have been findable since before a grant: the lease's tenant's own, and others'."""
    entries = pool.index.find(packed)
    is_there = entries >= 0
    is_there[is_there] = pool.since[entries[is_there]] < lease.lease_id
    is_foreign = is_there.copy()
    is_foreign[is_there] = pool.records.tenant[entries[is_there]] != lease.tenant
    return is_there & ~is_foreign, is_foreign


def _put(blocks: _Blocks, chosen: NDArray[np.bool_], code: _Code, tier: int) -> None:
    blocks.codes[chosen] = code
    blocks.tiers[chosen] = tier
    blocks.numbers[chosen] = 0


# Runs -----------------------------------------------------------------------------------------------------------------


def _runs(
    state: CacheState, units: _Blocks, in_doubt: _InDoubt, first_block: int, blocks_per_unit: int
) -> list[Missed]:
    """Return runs of ends that have the same reason; the first run begins at `first_block`."""
    tenants = state.history.tenants(units.numbers)
    tenants[units.numbers == 0] = 0
    silence, may_be_there = in_doubt
    columns = (units.codes, units.tiers, units.are_below, units.groups, tenants, may_be_there)
    differs = np.zeros(len(units.codes) - 1, np.bool_)
    for column in columns:
        differs |= column[1:] != column[:-1]
    begins = [0, *(differs.nonzero()[0] + 1).tolist()]
    return [
        replace(
            _run(state, units.at(slice(begin, end)), first_block, begin, blocks_per_unit),
            remote_silence=silence if may_be_there[begin] else None,
        )
        for begin, end in zip(begins, [*begins[1:], len(units.codes)], strict=True)
    ]


def _run(
    state: CacheState, units: _Blocks, first_block: int, begin: int, blocks_per_unit: int
) -> Missed:
    code, history = _Code(int(units.codes[0])), state.history
    is_cached, is_unknown = code is _Code.CACHED, code is _Code.UNKNOWN
    tier = None if is_cached or units.tiers[0] == _NO_TIER else _TIERS[units.tiers[0]]
    policy = ""
    if code is _Code.EVICTED:
        policy = LOWER_POLICY if tier is not Tier.DEVICE else state.shape.eviction_policy
    has_left = bool(units.numbers[0])
    times = history.times(units.numbers)
    return Missed(
        first_block=first_block + begin * blocks_per_unit,
        num_blocks=len(units.codes) * blocks_per_unit,
        reason=_REASONS[code],
        tier=tier,
        policy=policy,
        tenant=int(history.tenants(units.numbers)[0]) if has_left else 0,
        first_left_at=float(times.min()) if has_left else None,
        last_left_at=float(times.max()) if has_left else None,
        group=int(units.groups[0]),
        is_below=bool(units.are_below[0]),
        num_tokens=len(units.codes) * state.covering.hit_tokens if code is _Code.SHORT else 0,
        num_remembered=len(history) if is_unknown else 0,
        remembered_since=history.began if is_unknown else None,
    )
