"""Own the granting of blocks: one attempt at a Reserve or an Extend, which either happens whole or changes nothing."""

from typing import Final

import numpy as np

from kvlease.errors import InvalidError, NeverFitsError, WrongStateError
from kvlease.ids import BYTES_PER_KEY, LeaseId
from kvleased.core.commands import Extend, Reserve
from kvleased.core.effects import Extended, Reserved
from kvleased.core.eviction.classes import NORMAL
from kvleased.core.flights import Purpose
from kvleased.core.leases import NOWHERE, Lease, Phase
from kvleased.core.pool import Ids
from kvleased.core.retention import check_class
from kvleased.core.room import num_available, room
from kvleased.core.search import NOTHING, Match, match
from kvleased.core.state import CacheState, pack
from kvleased.core.states import Event
from kvleased.core.tenants import check_fits
from kvleased.core.waiting import Waiter

_ACTIVE: Final = Phase.ACTIVE
_ON_HOST: Final = (Phase.EVICTED, Phase.RELOADING)
_GRANT: Final = Event.GRANT


def blocks_for(state: CacheState, num_tokens: int) -> int:
    """Return the blocks that cover `num_tokens`, or refuse a number that can never be had."""
    shape = state.shape
    if num_tokens <= 0:
        msg = f"num_tokens is {num_tokens}, it must be at least 1"
        raise InvalidError(msg)
    num_blocks = -(-num_tokens // shape.tokens_per_block)
    if (
        num_tokens > shape.longest_request_tokens
        or num_blocks > shape.max_blocks_per_lease
        or num_blocks > shape.num_blocks - shape.null_blocks
    ):
        raise _never_fits(state, num_tokens, num_blocks)
    return num_blocks


def _never_fits(
    state: CacheState, num_tokens: int, num_blocks: int
) -> NeverFitsError | WrongStateError:
    """Explain why no lease will ever cover so many tokens."""
    shape = state.shape
    limit = min(shape.max_blocks_per_lease, shape.usable_blocks)
    if shape.why_no_leases:
        return WrongStateError(shape.why_no_leases, resource="groups", rule="cannot_be_leased")
    longest = min(limit * shape.tokens_per_block, shape.longest_request_tokens)
    if num_blocks <= limit:
        msg = (
            f"{num_tokens} tokens are more than the longest request of {longest}; ask for at most those, "
            "or register the cache with more longest_request_tokens"
        )
        return NeverFitsError(
            msg,
            resource="longest_request_tokens",
            need=num_tokens,
            available=longest,
            limit=longest,
            remedies=(f"num_tokens={longest}",),
        )
    msg = (
        f"{num_tokens} tokens take {num_blocks} blocks, but a lease can never have more than {limit}; "
        f"ask for at most {longest} tokens, or register a larger pool"
    )
    return NeverFitsError(
        msg,
        resource="device_blocks",
        need=num_blocks,
        available=state.device.num_available,
        limit=limit,
        remedies=(f"num_tokens={longest}",),
    )


def check_reserve(state: CacheState, command: Reserve) -> None:
    """Refuse a Reserve that is malformed or can never fit."""
    num_blocks = blocks_for(state, command.num_tokens)
    if state.is_limited:
        check_fits(state, state.workers[command.worker_id], num_blocks)
    if command.priority != NORMAL or command.retain_seconds:
        check_class(state, command)
    if not command.keys:
        return
    if len(command.keys) % BYTES_PER_KEY:
        msg = f"keys has {len(command.keys)} bytes, which is no multiple of {BYTES_PER_KEY}"
        raise InvalidError(msg)
    num_keys = len(command.keys) // BYTES_PER_KEY
    if num_keys > num_blocks:
        msg = f"keys names {num_keys} blocks, but num_tokens covers only {num_blocks}; send fewer keys"
        raise InvalidError(msg, resource="keys", need=num_keys, limit=num_blocks)


def attempt_reserve(state: CacheState, waiter: Waiter, now: float) -> Reserved | Lease | None:
    """Grant a Reserve if that can be done now.

    Returns the reply; or the lease, while bytes of its prefix are on their way and the reply must
    wait for them; or None, when there is no room yet.
    """
    command = waiter.command
    assert isinstance(command, Reserve)
    tenant = state.workers[command.worker_id]
    may_wait, prefix = command.wait_ms > 0, NOTHING
    if command.keys:
        prefix = match(state, command.keys, tenant, use_host=may_wait and not waiter.skip_host)
    hits = prefix.blocks
    count = -(-command.num_tokens // state.shape.tokens_per_block) - len(hits)
    if not state.leases.free_rows:
        return None
    fresh = None if state.is_limited else state.device.suitable(count, tenant)
    if fresh is None:
        if count > num_available(state, tenant, hits):
            return None
        fresh = room(state, count, tenant, hits, may_wait=may_wait)
        if fresh is None:
            return None
    lease, blocks = _open(state, waiter, prefix, fresh, now)
    if lease.pending:
        return lease
    count_grant(state, lease, command.num_tokens)
    return _reserved(state, lease, blocks)


def _open(
    state: CacheState, waiter: Waiter, prefix: Match, fresh: Ids, now: float
) -> tuple[Lease, Ids]:
    """Make a lease of a prefix and of fresh blocks; returns it and all of its blocks."""
    command = waiter.command
    assert isinstance(command, Reserve)
    device, tenant = state.device, state.workers[command.worker_id]
    slots, hits = prefix.slots, prefix.blocks
    loaded, granted = fresh[: len(slots)], fresh[len(slots) :] if len(slots) else fresh
    most = waiter.device_hit_blocks_max
    device_hit_blocks = len(hits) if most is None else min(len(hits), most)
    lease = Lease(
        lease_id=LeaseId(state.next_id()),
        worker_id=command.worker_id,
        tenant=tenant,
        request=command,
        row=state.leases.free_rows.pop(),
        phase=_ACTIVE,
        deadline=now + state.shape.lease_seconds,
        granted_at=now,
        device_hit_blocks=device_hit_blocks,
        host_hit_blocks=len(slots) + len(hits) - device_hit_blocks,
        moving_to=NOWHERE,
    )
    if len(hits):
        device.hold(hits)
    if len(slots):
        flight = state.fly(Purpose.LOAD, slots, loaded, keyed=slots >= 0, lease=lease)
        device.hold(loaded)
        lease.pending.add(flight.copy_id)
    if len(granted):
        device.take(granted, _GRANT, tenant)
    if prefix.joined:
        lease.pending |= prefix.joined
    if lease.pending:
        lease.phase = Phase.LOADING
        lease.ticket, lease.ticket_deadline = waiter.ticket, waiter.deadline
    blocks = np.concatenate([prefix.entries, granted]) if len(prefix.entries) else granted
    if len(slots):
        blocks[: len(prefix.entries)][prefix.entries < 0] = loaded
    state.leases.open(lease, command.request_id, blocks, command.num_tokens)
    state.tell("lease_granted", lease, num_blocks=len(blocks))
    return lease, blocks


def count_grant(state: CacheState, lease: Lease, num_tokens: int) -> None:
    """Count each token of a request once: only when it is certain where its bytes come from."""
    tokens_per_block, counters = state.shape.tokens_per_block, state.counters
    device_tokens = lease.device_hit_blocks * tokens_per_block
    host_tokens = lease.host_hit_blocks * tokens_per_block
    counters["leases_granted"] += 1
    counters["prefix_tokens_device"] += device_tokens
    counters["prefix_tokens_host"] += host_tokens
    counters["prefix_tokens_computed"] += max(0, num_tokens - device_tokens - host_tokens)


def reserved(state: CacheState, lease: Lease) -> Reserved:
    """Return the answer to the Reserve that led to a lease."""
    on_device = lease.phase not in _ON_HOST
    return _reserved(state, lease, state.leases.blocks_of(lease) if on_device else NOWHERE)


def _reserved(state: CacheState, lease: Lease, blocks: Ids) -> Reserved:
    tokens_per_block = state.shape.tokens_per_block
    return Reserved(
        lease_id=lease.lease_id,
        block_ids=pack(blocks),
        device_hit_tokens=lease.device_hit_blocks * tokens_per_block,
        host_hit_tokens=lease.host_hit_blocks * tokens_per_block,
        row=lease.row,
    )


def attempt_extend(state: CacheState, waiter: Waiter, now: float) -> Extended | None:
    """Grant an Extend if that can be done now, or return None."""
    del now
    command = waiter.command
    assert isinstance(command, Extend)
    # The end of a lease ends its waiting calls, too.
    lease = state.leases.by_id[command.lease_id]
    if lease.phase is not Phase.ACTIVE:
        msg = f"the lease is {lease.phase.name.lower()}, only an active one can be extended"
        raise WrongStateError(msg)
    num_blocks = blocks_for(state, command.num_tokens)
    count = num_blocks - int(state.leases.rows.num_blocks[lease.row])
    if count <= 0:
        return Extended(block_ids=b"")
    if count > num_available(state, lease.tenant, NOWHERE):
        return None
    fresh = room(state, count, lease.tenant, NOWHERE, may_wait=command.wait_ms > 0)
    if fresh is None:
        return None
    state.device.take(fresh, _GRANT, lease.tenant)
    state.leases.append(lease, fresh, command.num_tokens)
    return Extended(block_ids=pack(fresh))
