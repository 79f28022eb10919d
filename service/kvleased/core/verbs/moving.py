"""Own the moving of blocks between device and host on request: evict and reload leases, and evict cached blocks."""

from bisect import bisect_left
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import (
    KVLeaseError,
    WrongStateError,
)
from kvlease.groups import Keeps
from kvlease.ids import CopyId
from kvleased.core.admission.granting import pack_parts
from kvleased.core.admission.refusals import slots_full, slots_never_fit, superseded_for_lease
from kvleased.core.admission.retention import keep_class
from kvleased.core.admission.room import (
    Kept,
    are_dirty,
    evict_blocks,
    host_slots,
    num_available,
    num_slots_available,
    room,
)
from kvleased.core.blocks.history import DepartureReason
from kvleased.core.blocks.records import NULL
from kvleased.core.blocks.states import State
from kvleased.core.commands import Evict, Reload
from kvleased.core.effects import Evicted, Outcome, Reloaded
from kvleased.core.frames import without_frames
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.prefix.chains import check_keys
from kvleased.core.state import CacheState
from kvleased.core.tenancy.tenants import only_of, own_victims, victims
from kvleased.core.tier.flights import Purpose
from kvleased.core.waiting import WAIT_SECONDS_DEFAULT, Waiter

_LEASE_AND_COPY: Final = 2
"""Holds on a block that only its lease and a copy hold."""
_READY_BYTE: Final = bytes([State.READY])


class _Way(NamedTuple):
    """The copies that are needed to move a lease."""

    sources: Ids
    targets: Ids
    is_keyed: NDArray[np.bool_]
    """Which of the targets become READY under their source's key."""


def deadline(wait_ms: int, now: float) -> float:
    """Return the latest time at which a call that waits for copies is answered."""
    return now + (wait_ms / 1000 if wait_ms else WAIT_SECONDS_DEFAULT)


def is_large(state: CacheState, lease: Lease) -> bool:
    """Tell whether a lease has so many blocks that it is moved in parts."""
    return state.leases.num_entries(lease) > state.shape.blocks_at_once


def supersede_ticket(state: CacheState, lease: Lease, wait_ms: int, now: float) -> Outcome:
    """Let a repeated call wait in place of the first one."""
    state.wake(lease.ticket, superseded_for_lease())
    lease.ticket, lease.ticket_deadline = state.next_id(), deadline(wait_ms, now)
    lease.next_reload = None
    return Outcome(ticket=lease.ticket)


# Evict ------------------------------------------------------------------------------------------------------------


def evict_lease(state: CacheState, command: Evict, now: float) -> Outcome:
    """Move all blocks of a lease to the host pool, so that other requests can have its device blocks."""
    lease = state.lease_of(command)
    if lease.phase is Phase.EVICTED:
        return Outcome(reply=Evicted(num_evicted=0, num_offloaded=0))
    if lease.phase is Phase.EVICTING:
        return supersede_ticket(state, lease, command.wait_ms, now)
    if lease.phase is not Phase.ACTIVE:
        msg = f"the lease is {lease.phase.name.lower()}; only an active lease can be evicted"
        raise WrongStateError(msg)
    if is_large(state, lease):
        lease.ticket, lease.ticket_deadline = state.next_id(), deadline(command.wait_ms, now)
        state.unsettled.parts.append(partial(_evict_apart, state, lease, now))
        return Outcome(ticket=lease.ticket)
    way = _way_down(state, lease)
    if not len(way.targets):
        return Outcome(reply=finish_evict(state, lease, NOWHERE, now))
    _take_down(state, lease, way)
    lease.ticket, lease.ticket_deadline = state.next_id(), deadline(command.wait_ms, now)
    return Outcome(ticket=lease.ticket)


def _evict_apart(state: CacheState, lease: Lease, now: float) -> None:
    """Choose slots for a large lease, or refuse its call; the next part starts the copy."""
    answer: Evicted | KVLeaseError
    try:
        way = _way_down(state, lease)
        if len(way.targets):
            state.unsettled.parts.appendleft(partial(_take_down, state, lease, way))
            return
        answer = finish_evict(state, lease, NOWHERE, now)
    except KVLeaseError as error:
        answer = without_frames(error)
    ticket, lease.ticket = lease.ticket, None
    state.wake(ticket, answer)


def _way_down(state: CacheState, lease: Lease) -> _Way:
    """Choose slots for the blocks of a lease that have none, and hold the slots of the other blocks."""
    blocks = state.leases.blocks_of(lease)
    if _READY_BYTE not in state.device.records.state[blocks].tobytes():
        # Nearly always the case; choosing among many blocks would take as long as moving them.
        slots = lease.moving_to = _slots_for_lease(state, lease, len(blocks), NOWHERE)
        return _Way(blocks, slots, np.zeros(len(blocks), np.bool_))
    placed, is_ready = _placed(state, lease, blocks)
    missing = placed < 0
    there = placed[~missing]
    blocks, is_ready = blocks[missing], is_ready[missing]
    slots = _slots_for_lease(state, lease, len(blocks), there)
    placed[missing] = slots
    state.host.hold(there)
    lease.moving_to = placed
    return _Way(blocks, slots, is_ready)


def _placed(state: CacheState, lease: Lease, blocks: Ids) -> tuple[Ids, NDArray[np.bool_]]:
    """Return the slot that each block of a lease has already, or -1 if it has none, and which blocks are READY.

    Another tenant's slot may have the same key, if the key was stolen; its bytes are not the lease's.
    """
    is_ready = state.device.records.state[blocks] == State.READY
    placed = np.full(len(blocks), -1, np.intp)
    placed[is_ready] = state.host.index.find(state.device.keys_of(blocks[is_ready]))
    if not state.host.is_only_of(lease.tenant):
        placed[state.host.records.tenant[placed] != lease.tenant] = -1
    return placed, is_ready


def _take_down(state: CacheState, lease: Lease, way: _Way) -> None:
    """Start the copy that takes a lease to the host pool."""
    flight = state.fly(Purpose.PREEMPT, way.sources, way.targets, keyed=way.is_keyed, lease=lease)
    lease.pending.add(flight.copy_id)
    state.leases.enter(lease, Phase.EVICTING)


def _slots_for_lease(state: CacheState, lease: Lease, count: int, reused: Ids) -> Ids:
    slots = host_slots(state, count, reused)
    if slots is not None:
        return slots
    never = slots_never_fit(state, count + len(reused))
    raise never or slots_full(state, count, lease.tenant, reused, _fewer_tokens(state, lease))


def _fewer_tokens(state: CacheState, lease: Lease) -> tuple[str, ...]:
    """Return the most tokens, if any, to which a lease could be trimmed so that there are slots for the rest."""
    if lease.members is not None or any(one.keeps is Keeps.STATE for one in state.shape.groups):
        # Other ranks would have to agree to a trim, and a trim moves states.
        return ()
    rows, row = state.leases.rows, lease.row
    num_computed = int(rows.num_computed[row])
    least = max(1, num_computed)

    def is_too_much(num_tokens: int) -> bool:
        kept = [
            part[: state.covering.last_covered(at, num_computed, num_tokens)]
            for at, part in enumerate(state.leases.parts_of(row))
        ]
        blocks = np.concatenate(kept).astype(np.intp)
        placed, _ = _placed(state, lease, blocks[blocks != NULL])
        num_missing = int(np.count_nonzero(placed < 0))
        return num_missing > num_slots_available(state, placed[placed >= 0])

    num_sizes = bisect_left(range(least, int(rows.num_tokens[row])), True, key=is_too_much)
    return (f"num_tokens={least + num_sizes - 1}",) if num_sizes else ()


def finish_evict(state: CacheState, lease: Lease, copied: Ids, now: float) -> Evicted:
    """Hand a lease over to the slots that have its bytes now; its blocks are freed after the answer.

    The blocks that were copied are still held by their copy.
    """
    blocks = state.leases.blocks_of(lease)
    if state.device.has_classes:
        keep_class(state, lease, blocks)
    state.leases.rewrite(lease, lease.moving_to, Phase.EVICTED)
    num_evicted = int(np.count_nonzero(state.device.holds[blocks] == 1))
    num_evicted += int(np.count_nonzero(state.device.holds[copied] == _LEASE_AND_COPY))
    state.unsettled.left.append((state.device, blocks, True))
    lease.deadline = now + state.shape.lease_seconds
    state.counters["offloads"] += len(copied)
    state.tell("lease_evicted", lease, num_blocks=num_evicted)
    return Evicted(num_evicted=num_evicted, num_offloaded=len(copied))


def evict_cached(state: CacheState, command: Evict, now: float) -> Outcome:
    """Move cached blocks that nobody holds out of the device pool: those of given keys, or the coldest ones.

    A worker moves only its own tenant's blocks.
    """
    check_keys(command.keys)
    device, host = state.device, state.host
    tenant = None if command.worker_id is None else state.tenant_of(command.worker_id)
    if command.keys:
        known = device.cached(state.covering.every_key(command.keys))
        blocks = device.evictable(only_of(state, known, tenant))
    elif tenant is None:
        blocks = victims(state, None, command.num_blocks, NOWHERE)
    else:
        blocks = own_victims(state, tenant, command.num_blocks)
    why = DepartureReason.RESIZED if command.is_for_resize else DepartureReason.DISPLACED
    if not len(host):
        evict_blocks(state, blocks, why)
        return Outcome(reply=Evicted(num_evicted=len(blocks), num_offloaded=0))
    is_copied = are_dirty(state, blocks)
    slots = host_slots(state, int(np.count_nonzero(is_copied)), at_most=True)
    num_copied = 0 if slots is None else len(slots)
    is_copied[is_copied.nonzero()[0][num_copied:]] = False
    leaving, dirty = blocks[~is_copied], blocks[is_copied]
    evict_blocks(state, leaving, why)
    if not num_copied or slots is None:
        return Outcome(reply=Evicted(num_evicted=len(leaving), num_offloaded=0))
    flight = state.fly(Purpose.DISPLACE, dirty, slots, keyed=slots >= 0)
    flight.ticket, flight.ticket_deadline = state.next_id(), deadline(command.wait_ms, now)
    flight.num_before, flight.why = len(leaving), why
    return Outcome(ticket=flight.ticket)


# Reload -----------------------------------------------------------------------------------------------------------


def reload_after_evict(state: CacheState, lease: Lease, command: Reload, now: float) -> Outcome:
    """Let a reload wait until the copy that takes its lease down is done; `landing` then goes on with it."""
    outcome = supersede_ticket(state, lease, command.wait_ms, now)
    lease.next_reload = command
    return outcome


def attempt_reload(state: CacheState, waiter: Waiter, now: float) -> Reloaded | Lease | None:
    """Start to bring an evicted lease back if there is room for it; return a result like that of `attempt_reserve`."""
    command = waiter.command
    assert isinstance(command, Reload)
    # The end of a lease ends its waiting calls, too.
    lease = state.leases.by_id[command.lease_id]  # type: ignore[index]  # one of keys never waits
    if lease.phase is Phase.ACTIVE:
        return here(state, lease)
    if lease.phase is not Phase.EVICTED:
        msg = f"the lease is {lease.phase.name.lower()}; only an evicted lease can be reloaded"
        raise WrongStateError(msg)
    way = _way_up(state, lease)
    if way is None:
        return None
    if is_large(state, lease):
        lease.ticket, lease.ticket_deadline = waiter.ticket, waiter.deadline
        state.unsettled.parts.appendleft(partial(_bring_up_apart, state, lease, way, now))
        return lease
    _bring_up(state, lease, way)
    if not lease.pending:
        return finish_reload(state, lease, now)
    lease.ticket, lease.ticket_deadline = waiter.ticket, waiter.deadline
    return lease


def _bring_up_apart(state: CacheState, lease: Lease, way: _Way, now: float) -> None:
    _bring_up(state, lease, way)
    if not lease.pending:
        ticket, lease.ticket = lease.ticket, None
        state.wake(ticket, finish_reload(state, lease, now))


def _way_up(state: CacheState, lease: Lease) -> _Way | None:
    """Choose blocks for a lease's slots that have none, and hold the blocks of the others; return None without room.

    If other copies already bring some of the bytes, the lease waits for those copies.
    """
    slots = state.leases.blocks_of(lease)
    placed, is_keyed, joined = _blocks_above(state, lease, slots)
    missing = placed < 0
    hits = placed[~missing]
    count = int(np.count_nonzero(missing))
    if count > num_available(state, lease.tenant, hits):
        return None
    fresh = room(state, count, lease.tenant, Kept(hits), may_wait=True)
    if fresh is None:
        return None
    state.device.hold(hits)
    lease.pending |= joined
    placed[missing] = fresh
    lease.moving_to = placed
    lease.num_reloading = count
    return _Way(slots[missing], fresh, is_keyed[missing])


def _bring_up(state: CacheState, lease: Lease, way: _Way) -> None:
    """Start the copy that brings a lease back to the device, if there is anything to copy."""
    if len(way.targets):
        flight = state.fly(
            Purpose.RESUME, way.sources, way.targets, keyed=way.is_keyed, lease=lease
        )
        lease.pending.add(flight.copy_id)
    state.leases.enter(lease, Phase.RELOADING)


def _blocks_above(
    state: CacheState, lease: Lease, slots: Ids
) -> tuple[Ids, NDArray[np.bool_], set[CopyId]]:
    """Return for each slot the block with its bytes, or -1, and whether it is keyed; and the copies to wait for.

    A slot whose key another tenant's block has, or will have, comes back as a private block.
    """
    is_keyed = state.host.records.state[slots] == State.READY
    placed = np.full(len(slots), -1, np.intp)
    if b"\1" not in is_keyed.tobytes():
        return placed, is_keyed, set()
    keys = state.host.keys_of(slots[is_keyed])
    found, coming = state.device.index.find(keys), state.loading.find(keys)
    is_coming = coming >= 0
    found[is_coming] = coming[is_coming]
    placed[is_keyed] = found
    if not state.device.is_only_of(lease.tenant):
        is_foreign = (found >= 0) & (state.device.records.tenant[found] != lease.tenant)
        is_coming &= ~is_foreign
        found[is_foreign] = -1
        placed[is_keyed] = found
        is_keyed[is_keyed] = ~is_foreign
    return placed, is_keyed, set(state.loading.copy_ids(coming[is_coming]))


def finish_reload(state: CacheState, lease: Lease, now: float) -> Reloaded:
    """Hand a lease over to the blocks that have its bytes now; its slots are let go of after the answer."""
    slots = state.leases.blocks_of(lease)
    state.leases.rewrite(lease, lease.moving_to, Phase.ACTIVE)
    state.unsettled.left.append((state.host, slots, False))
    lease.deadline = now + state.shape.lease_seconds
    state.counters["reloads"] += lease.num_reloading
    state.tell("lease_reloaded", lease, num_blocks=lease.num_reloading)
    return _reloaded(state, lease, lease.num_reloading)


def here(state: CacheState, lease: Lease) -> Reloaded:
    """Return the blocks of a lease that is on the device already, so that nothing has to move."""
    return _reloaded(state, lease, 0)


def _reloaded(state: CacheState, lease: Lease, num_reloaded: int) -> Reloaded:
    if state.is_simple:
        block_ids, counts = state.leases.packed(lease.row), b""
        num_tokens = state.leases.num_entries(lease) * state.covering.tokens_per_block
    else:
        parts = state.leases.parts_of(lease.row)
        block_ids, counts = pack_parts(state, parts)
        covered_most = int(state.leases.rows.num_tokens[lease.row])
        num_tokens = state.covering.covered([len(part) for part in parts], covered_most)
    return Reloaded(
        block_ids=block_ids,
        num_reloaded=num_reloaded,
        num_tokens=num_tokens,
        row=lease.row,
        num_blocks=counts,
    )
