"""Own the granting of blocks: one attempt at a Reserve or an Extend, which either happens whole or changes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError, WrongStateError
from kvlease.groups import Counts
from kvlease.ids import BYTES_PER_KEY, LeaseId
from kvleased.core.admission.fitting import never_fits
from kvleased.core.admission.growing import grow
from kvleased.core.admission.retention import PRIORITY_NORMAL, check_class
from kvleased.core.admission.room import Kept, num_available, room
from kvleased.core.blocks.records import NULL
from kvleased.core.blocks.states import Event
from kvleased.core.commands import Extend, Reserve
from kvleased.core.effects import Extended, Reserved
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease, Pieces
from kvleased.core.lease.phases import OFF_DEVICE, Phase
from kvleased.core.prefix.bringing import attributed, bring
from kvleased.core.prefix.chains import check_distinct, check_keys
from kvleased.core.prefix.explaining import misses_of
from kvleased.core.prefix.search import NOTHING, Match, match, sources_of
from kvleased.core.state import CacheState, pack
from kvleased.core.tenancy.keeping import lacks_row
from kvleased.core.tenancy.tenants import check_tokens_fit
from kvleased.core.waiting import NO_KEYS, NO_TIERS, Waiter
from kvleased.counted import counted

_ACTIVE: Final = Phase.ACTIVE
_GRANT: Final = Event.GRANT
_NO_COUNTS: Final = b""
_NULL: Final = np.int32(NULL).tobytes()

Row = Ids | NDArray[np.int32]
"""The entries of a group's places, NULL where no block is needed."""


def check_tokens(
    state: CacheState,
    num_tokens: int,
    tenant: int,
    lease: Lease | None = None,
    *,
    num_keys: int = 0,
    least_tokens: int = 1,
) -> None:
    """Refuse a number of tokens that can never be covered, unless `lease` has the blocks for them already.

    The refusal recommends fewer tokens only if a lease can cover `least_tokens`.
    """
    if num_tokens <= 0:
        msg = f"num_tokens is {num_tokens}; it must be at least 1"
        raise InvalidError(msg, resource="num_tokens", need=num_tokens)
    if num_tokens > state.covering.longest_tokens:
        # The pool may have been larger when the lease got its blocks.
        if lease is not None and _had_been_granted(state, lease, num_tokens):
            return
        raise never_fits(state, num_tokens, tenant, num_keys, least_tokens)


def _had_been_granted(state: CacheState, lease: Lease, num_tokens: int) -> bool:
    """Tell whether a lease has the blocks for tokens that fitted before the pool was made smaller."""
    if num_tokens > state.covering.planned_tokens:
        return False
    return num_missing(state, lease, num_tokens) <= 0


def check_reserve(state: CacheState, command: Reserve) -> None:
    """Refuse a Reserve that is malformed or can never fit."""
    # What is malformed comes first: a smaller request, which a later refusal may advise, must not be refused for it.
    check_keys(command.keys)
    if (
        command.priority != PRIORITY_NORMAL
        or command.retain_seconds
        or command.retain_priority is not None
    ):
        check_class(state, command)
    tenant = state.workers[command.worker_id]
    num_keys = len(command.keys) // BYTES_PER_KEY
    check_tokens(state, command.num_tokens, tenant, num_keys=num_keys)
    if state.is_limited:
        check_tokens_fit(state, tenant, command.num_tokens, num_keys=num_keys)
    if not command.keys:
        return
    most_keys = -(-command.num_tokens // state.shape.hash_tokens)
    if num_keys > most_keys:
        msg = f"keys names {counted(num_keys, 'block')}, but num_tokens covers only {most_keys}; send fewer keys"
        raise InvalidError(msg, resource="keys", need=num_keys, limit=most_keys)
    check_distinct(command.keys)


def attempt_reserve(
    state: CacheState, command: Reserve, now: float, waiter: Waiter | None = None
) -> Reserved | Lease | None:
    """Grant a Reserve if that can be done now; its call can wait for copies only if there is a `waiter` for it.

    Returns the reply; or the lease, while bytes of its prefix are on their way and the reply must
    wait for them; or None, when there is no room yet.
    """
    tenant = state.workers[command.worker_id]
    may_wait, prefix, num_left = command.wait_ms > 0, NOTHING, state.history.num_left
    if command.keys:
        sources = sources_of(waiter) if may_wait and waiter is not None else None
        prefix = match(state, command.keys, tenant, sources)
    hits = prefix.blocks
    count, places = num_fresh(state, prefix, command.num_tokens)
    if not state.leases.free_rows or (state.keeps_rows and lacks_row(state, tenant)):
        return None
    fresh = None if state.is_limited else state.device.suitable(count, tenant)
    if fresh is None:
        if count > num_available(state, tenant, hits):
            return None
        kept = Kept(hits, prefix.below, prefix.behind)
        fresh = room(state, count, tenant, kept, may_wait=may_wait)
        if fresh is None:
            return None
    lease = _begin(state, command, waiter, prefix, now)
    lease.num_left_before = num_left
    granted = _take(state, lease, prefix, fresh)
    if lease.pending:
        assert waiter is not None, "who cannot wait is granted what is there"
        lease.phase = Phase.LOADING
        lease.brought += waiter.brought
        lease.ticket, lease.ticket_deadline = waiter.ticket, waiter.deadline
    parts: list[Pieces]
    if places is None:
        parts = [(prefix.entries, granted) if len(prefix.entries) else (granted,)]
    else:
        parts = _parts(state, prefix, granted, places)
    state.leases.open(lease, command.request_id, parts, command.num_tokens, prefix.hit_tokens)
    state.tell("lease_granted", lease, num_blocks=count + len(hits))
    if lease.pending:
        return lease
    count_grant(state, lease, command)
    return reserved(state, lease)


def num_fresh(
    state: CacheState, prefix: Match, num_tokens: int
) -> tuple[int, tuple[list[int], list[int]] | None]:
    """Return how many fresh blocks a new lease needs behind its prefix, and the places of each group for them.

    The places are None if the cache is simple.
    """
    if state.is_simple:
        return -(-num_tokens // state.covering.tokens_per_block) - len(prefix.blocks), None
    covering, hit_tokens = state.covering, prefix.hit_tokens
    begins, afters = covering.growth_of_one(hit_tokens, num_tokens, covering.hit_ends(hit_tokens))
    return sum(afters) - sum(begins) + len(prefix.below), (begins, afters)


def _begin(
    state: CacheState, command: Reserve, waiter: Waiter | None, prefix: Match, now: float
) -> Lease:
    """Return a new lease, which has no blocks yet."""
    tokens, skipped, unserved_keys = prefix.tier_tokens, NO_TIERS, NO_KEYS
    untold = None
    if waiter is not None:
        skipped, unserved_keys = waiter.skipped, waiter.unserved_keys
        untold = waiter.untold
        if waiter.brought and prefix.hit_tokens:
            tokens = attributed(state, prefix, waiter.brought)
    lease_id = state.history.moment = LeaseId(state.next_id())
    return Lease(
        lease_id=lease_id,
        worker_id=command.worker_id,
        tenant=state.workers[command.worker_id],
        request=command,
        row=state.leases.free_rows.pop(),
        phase=_ACTIVE,
        deadline=now + state.shape.lease_seconds,
        granted_at=now,
        tier_tokens=tokens,
        skipped=skipped,
        tiers_off=frozenset(state.tiers_off) if state.tiers_off else NO_TIERS,
        unserved_keys=unserved_keys,
        untold=untold,
        moving_to=NOWHERE,
        members=state.ranks.members_for(command.worker_id) if state.ranks.places else None,
    )


def _take(state: CacheState, lease: Lease, prefix: Match, fresh: Ids) -> Ids:
    """Hold a prefix and take fresh blocks for a lease; those loaded from below become entries of the prefix.

    Returns the other fresh blocks, which are the lease's own.
    """
    device, num_below, granted = state.device, len(prefix.below), fresh
    if len(prefix.blocks):
        device.hold(prefix.blocks)
        if state.dirt.counts_hits:
            state.dirt.hit(prefix.blocks)
    if num_below:
        loaded, granted = fresh[:num_below], fresh[num_below:]
        bring(state, lease, prefix, loaded)
        device.hold(loaded)
        prefix.entries[prefix.entries < 0] = loaded
    if len(granted):
        device.take(granted, _GRANT, lease.tenant)
    if prefix.joined:
        lease.pending |= prefix.joined
    return granted


def _parts(
    state: CacheState, prefix: Match, granted: Ids, places: tuple[list[int], list[int]]
) -> list[Pieces]:
    """Return the entries of each group of a new lease: those of the prefix, and the granted blocks."""
    begins, afters = places
    ends = state.covering.hit_ends(prefix.hit_tokens)
    counts = [len(part) for part in prefix.parts] or [0] * len(ends)
    parts: list[Pieces] = []
    num_hits = num_granted = 0
    for count, end, begin, after in zip(counts, ends, begins, afters, strict=True):
        fresh = granted[num_granted : num_granted + after - begin]
        if begin:
            part = np.full(after, NULL, np.intp)
            part[end - count : end] = prefix.entries[num_hits : num_hits + count]
            part[begin:] = fresh
        else:
            part = fresh
        num_hits += count
        num_granted += after - begin
        parts.append((part,))
    return parts


def count_grant(state: CacheState, lease: Lease, request: Reserve) -> None:
    """Count the tokens of a request, once it is certain where their bytes come from, so that each counts once.

    The keys that it missed are put aside, to be counted later, if any block had left before.
    """
    counters, hit_tokens, num_tokens = state.counters, lease.tier_tokens[-1], request.num_tokens
    if lease.num_left_before and request.keys:
        state.missing.put(lease)
    counters["leases_granted"] += 1
    if hit_tokens:
        device, host, disk, remote = lease.hit_tokens
        counters["prefix_tokens_device"] += device
        counters["prefix_tokens_host"] += host
        counters["prefix_tokens_disk"] += disk
        counters["prefix_tokens_remote"] += remote
    if num_tokens > hit_tokens:
        counters["prefix_tokens_computed"] += num_tokens - hit_tokens


def reserved(state: CacheState, lease: Lease) -> Reserved:
    """Return the answer to the Reserve that led to a lease."""
    leases, row, counts = state.leases, lease.row, _NO_COUNTS
    on_device = lease.phase not in OFF_DEVICE
    covered_tokens = leases.rows.num_tokens.item(row) if on_device else 0
    if state.is_simple:
        block_ids = leases.packed(row) if on_device else b""
    else:
        block_ids, counts = pack_parts(state, leases.parts_of(row) if on_device else ())
        if on_device:
            covered_tokens = state.covering.covered(
                leases.rows.num_blocks[row].tolist(), covered_tokens
            )
    device, host, disk, remote = lease.hit_tokens
    reply = Reserved(
        lease_id=lease.lease_id,
        block_ids=block_ids,
        device_hit_tokens=device,
        host_hit_tokens=host,
        row=row,
        num_blocks=counts,
        covered_tokens=covered_tokens,
    )
    # These are seldom wanted, and each further field would cost every reserve time.
    if disk or remote:
        reply = replace(reply, disk_hit_tokens=disk, remote_hit_tokens=remote)
    if isinstance(lease.request, Reserve) and lease.request.explain:
        reply = replace(reply, misses=misses_of(state, lease))
    return reply


def pack_parts(state: CacheState, parts: Sequence[Row]) -> tuple[bytes, bytes]:
    """Return the packed ids at the places of all groups, 0 where there is none, and the packed numbers of places."""
    if not parts:
        return b"", pack_counts(state, np.zeros(len(state.covering.groups), np.int64))
    ids: NDArray[np.signedinteger] = np.concatenate(parts)
    packed = pack(ids)
    # Searching bytes takes a fraction of the time of comparing numbers; bytes that look like NULL may be no NULL.
    if _NULL in packed:
        packed = pack(np.maximum(ids, 0))
    return packed, pack_counts(state, np.array([len(part) for part in parts]))


def pack_counts(state: CacheState, counts: Counts) -> bytes:
    """Return the counts of the groups as they travel; empty if there is one group."""
    return _NO_COUNTS if len(state.covering.groups) == 1 else pack(counts)


def attempt_extend(state: CacheState, waiter: Waiter, now: float) -> Extended | None:
    """Grant an Extend if that can be done now, or return None."""
    del now
    command = waiter.command
    assert isinstance(command, Extend)
    # The end of a lease ends its waiting calls, too.
    lease = state.leases.by_id[command.lease_id]
    if lease.phase is not Phase.ACTIVE:
        msg = f"the lease is {lease.phase.name.lower()}; only an active lease can be extended"
        raise WrongStateError(msg, resource="lease")
    check_tokens(state, command.num_tokens, lease.tenant, lease)
    if not state.is_simple:
        return _grow(state, lease, command)
    count = num_missing(state, lease, command.num_tokens)
    if count <= 0:
        return unextended(state, lease, command.num_tokens)
    fresh = _fresh(state, lease, count, command)
    if fresh is None:
        return None
    state.leases.append(lease, fresh, command.num_tokens)
    return Extended(block_ids=pack(fresh), covered_tokens=command.num_tokens)


def _fresh(state: CacheState, lease: Lease, count: int, command: Extend) -> Ids | None:
    """Take fresh blocks for a lease that grows, if there is room."""
    if count > num_available(state, lease.tenant, NOWHERE):
        return None
    fresh = room(state, count, lease.tenant, may_wait=command.wait_ms > 0)
    if fresh is not None:
        state.device.take(fresh, _GRANT, lease.tenant)
    return fresh


def _grow(state: CacheState, lease: Lease, command: Extend) -> Extended | None:
    """Grant an Extend in all groups, if that can be done now."""
    count = num_missing(state, lease, command.num_tokens)
    fresh = _fresh(state, lease, count, command) if count else NOWHERE
    return None if fresh is None else _grown(state, lease, command.num_tokens, fresh)


def _grown(state: CacheState, lease: Lease, num_tokens: int, fresh: Ids) -> Extended:
    begins, afters = growth_of(state, lease, num_tokens)
    blocks = grow(
        state.leases, np.array([lease.row]), begins, afters, fresh, np.array([num_tokens])
    )
    return Extended(
        block_ids=pack(blocks),
        num_blocks=pack_counts(state, (afters - begins)[0]),
        covered_tokens=state.covering.covered(afters[0].tolist(), num_tokens),
        num_places=pack(afters[0]),
    )


def unextended(state: CacheState, lease: Lease, num_tokens: int) -> Extended:
    """Return the answer to an Extend for which no block is missing."""
    if state.is_simple:
        return Extended(block_ids=b"", covered_tokens=num_tokens)
    return _grown(state, lease, num_tokens, NOWHERE)


def growth_of(state: CacheState, lease: Lease, num_tokens: int) -> tuple[Counts, Counts]:
    """Return where the fresh places that a lease needs to cover `num_tokens` begin and end, [1, groups] each."""
    begins, afters = _growth(state, lease, num_tokens)
    return np.array([begins]), np.array([afters])


def _growth(state: CacheState, lease: Lease, num_tokens: int) -> tuple[list[int], list[int]]:
    rows, row = state.leases.rows, lease.row
    num_computed, ends = rows.num_computed.item(row), rows.num_blocks[row].tolist()
    if lease.members is not None:
        num_computed = lease.members.furthest(num_computed)
    return state.covering.growth_of_one(num_computed, num_tokens, ends)


def num_missing(state: CacheState, lease: Lease, num_tokens: int) -> int:
    """Return how many fresh blocks a lease needs to cover so many tokens."""
    rows, row = state.leases.rows, lease.row
    if state.is_simple:
        num_blocks = -(-num_tokens // state.covering.tokens_per_block)
        return num_blocks - state.leases.num_blocks.item(row)
    begins, afters = _growth(state, lease, num_tokens)
    count = sum(afters) - sum(begins)
    if state.covering.guessing:
        # Blocks that the lease no longer needs at their places move on to new ones.
        ends = rows.num_blocks[row].tolist()
        count -= state.covering.num_passed_by_one(rows.num_tokens.item(row), ends, afters)
    return count
