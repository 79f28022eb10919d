"""Own the verb that leases the blocks of a running request to a second one; `landing` handles the end of its copies.

What becomes of each place of the parent's row, group by group:
- a READY block is shared, because nobody ever writes it again;
- a private block that has a computed token is copied, because the parent goes on writing it;
- any other place that needs a block gets a fresh one, up to where the new lease covers its tokens.

Which blocks have computed tokens:
- in groups that keep tokens, the blocks from the first one needed to the one with the newest token;
- in groups of recurrent layers (STATE), the block with the newest state. It is at the place of the newest token or, if
  that place is empty, at the place that the next state is written to, which may be another place in the new lease;
- in groups that stay the same for a whole request (FIXED), all blocks.

A fork never waits for room, only for its copies. Until it is answered, the parent's worker must not write the blocks
that are copied. The flight holds them, so even if the parent ends or is evicted nobody else can write them.
"""

from bisect import bisect_left
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import (
    IdReusedError,
    InvalidError,
    WrongStateError,
)
from kvlease.groups import Keeps
from kvlease.ids import LeaseId, WorkerId
from kvleased.core.admission.granting import check_tokens, reserved
from kvleased.core.admission.refusals import draining, fork_full
from kvleased.core.admission.room import num_at_once, num_available, room
from kvleased.core.blocks.records import NULL
from kvleased.core.blocks.states import Event, State
from kvleased.core.commands import Fork, Reserve
from kvleased.core.effects import Forked, Outcome
from kvleased.core.ids import Ids
from kvleased.core.lease.covering import Covering
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.state import CacheState
from kvleased.core.tenancy.keeping import lacks_row
from kvleased.core.tenancy.tenants import check_tokens_fit
from kvleased.core.tier.flights import Purpose, on_device
from kvleased.core.verbs.ending import renew
from kvleased.core.verbs.joining import asks_for, check_no_states, find, join
from kvleased.core.verbs.moving import deadline, supersede_ticket
from kvleased.core.verbs.parting import joined_id, wait_beside
from kvleased.counted import counted

_READY: Final = int(State.READY)


class _Row(NamedTuple):
    """The places of a new lease before any block is taken, all groups one after the other."""

    entries: Ids
    """The parent's blocks at places that are shared or copied, NULL elsewhere."""
    is_shared: NDArray[np.bool_]
    is_copied: NDArray[np.bool_]
    is_new: NDArray[np.bool_]
    """The places that take empty blocks."""
    afters: Ids
    """The end of each group's places."""

    @property
    def num_fresh(self) -> int:
        """How many blocks to take: those for the copies, and the empty ones."""
        return int(np.count_nonzero(self.is_copied | self.is_new))


def fork(state: CacheState, command: Fork, now: float) -> Outcome:
    """Lease the blocks of a running request to a second one; answer a repeated fork with the lease of the first."""
    state.tenant_of(command.worker_id)
    lease = find(state, command)
    if lease is not None:
        return _repeat(state, lease, command, now)
    parent = state.lease_of(command)
    check_no_states(parent.members, "forked")
    renew(state, parent, now)
    if parent.phase is not Phase.ACTIVE:
        msg = f"the lease is {parent.phase.name.lower()}; only an active lease can be forked"
        raise WrongStateError(msg, resource="lease")
    _check(state, parent, command)
    row = _row_of(state, parent, command.num_tokens)
    fresh = _room_for(state, parent, command, row.num_fresh, now)
    lease = _begin(state, parent, command, now)
    entries = _take(state, lease, row, fresh)
    if lease.pending:
        lease.phase = Phase.LOADING
        lease.ticket, lease.ticket_deadline = state.next_id(), deadline(command.wait_ms, now)
    parts = [(part,) for part in np.split(entries, row.afters[:-1].cumsum())]
    num_computed = lease.tier_tokens[0]
    state.leases.open(lease, command.request_id, parts, command.num_tokens, num_computed)
    state.tell("lease_forked", lease, num_blocks=lease.num_shared + row.num_fresh)
    if lease.pending:
        return Outcome(ticket=lease.ticket)
    return Outcome(reply=finish_fork(state, lease, now))


def finish_fork(state: CacheState, lease: Lease, now: float) -> Forked:
    """Hand a lease whose copies are all done to its worker, and return the answer to the call."""
    state.counters["leases_granted"] += 1
    state.counters["blocks_forked"] += lease.num_copied
    lease.granted_at, lease.deadline = now, now + state.shape.lease_seconds
    if lease.phase is Phase.LOADING:
        state.leases.enter(lease, Phase.ACTIVE)
    return _forked(state, lease, lease.worker_id)


def _forked(state: CacheState, lease: Lease, worker_id: WorkerId) -> Forked:
    return Forked(
        lease=replace(reserved(state, lease), joined_id=joined_id(lease, worker_id)),
        num_shared=lease.num_shared,
        num_copied=lease.num_copied,
    )


def _repeat(state: CacheState, lease: Lease, command: Fork, now: float) -> Outcome:
    if not asks_for(state, lease, command):
        msg = f"request {command.request_id} has a different lease already; release it, or use another id"
        raise IdReusedError(msg, resource="request_id")
    join(state, lease, command.worker_id)
    if lease.members is not None and lease.phase is Phase.LOADING:
        return wait_beside(state, lease, command.worker_id, command.wait_ms, now)
    if lease.phase is Phase.LOADING:
        return supersede_ticket(state, lease, command.wait_ms, now)
    renew(state, lease, now)
    return Outcome(reply=_forked(state, lease, command.worker_id))


def _check(state: CacheState, parent: Lease, command: Fork) -> None:
    """Refuse a fork while draining, or if it asks for too few or too many tokens or its request already waits."""
    if state.is_draining:
        raise draining(state)
    num_computed = int(state.leases.rows.num_computed[parent.row])
    least = max(1, num_computed)
    check_tokens(state, command.num_tokens, parent.tenant, least_tokens=least)
    if state.is_limited:
        check_tokens_fit(state, parent.tenant, command.num_tokens, least_tokens=least)
    if command.num_tokens < num_computed:
        msg = (
            f"num_tokens is {command.num_tokens}, but the lease to fork has the states of "
            f"{counted(num_computed, 'token')}; ask for at least as many"
        )
        raise InvalidError(msg, resource="num_tokens", need=command.num_tokens, limit=num_computed)
    holder_of = state.ranks.holder_of
    for waiter in state.callers:
        waiting = waiter.command
        if (
            isinstance(waiting, Reserve)
            and holder_of(waiter.worker_id) == holder_of(command.worker_id)
            and waiting.request_id == command.request_id
        ):
            msg = f"request {command.request_id} is already waiting for a lease; use another id"
            raise IdReusedError(msg, resource="request_id")


# Places ---------------------------------------------------------------------------------------------------------------


def _row_of(state: CacheState, parent: Lease, num_tokens: int) -> _Row:
    """Return which of the parent's blocks each place of a forked lease has, and which places need fresh ones."""
    leases, covering = state.leases, state.covering
    num_computed = int(leases.rows.num_computed[parent.row])
    pieces = []
    for group, part in enumerate(leases.parts_of(parent.row)):
        first, end = _computed(covering, group, num_computed, len(part))
        piece = np.full(end, NULL, np.intp)
        piece[first:end] = part[first:end]
        if covering.groups[group].keeps is Keeps.STATE and num_computed:
            piece = _newest_state(covering, group, part, num_computed, num_tokens)
        pieces.append(piece)
    ends = np.array([[len(piece) for piece in pieces]])
    computed, tokens = np.array([num_computed]), np.array([num_tokens])
    ((begins,), (afters,)) = covering.growth(computed, tokens, ends)
    entries = [
        np.concatenate([piece, np.full(after - len(piece), NULL, np.intp)])
        for piece, after in zip(pieces, afters.tolist(), strict=True)
    ]
    is_new = [
        np.arange(after) >= begin
        for begin, after in zip(begins.tolist(), afters.tolist(), strict=True)
    ]
    row = np.concatenate(entries)
    has_block = row != NULL
    is_ready = state.device.records.state[row] == _READY
    return _Row(
        entries=row,
        is_shared=has_block & is_ready,
        is_copied=has_block & ~is_ready,
        is_new=np.concatenate(is_new),
        afters=afters,
    )


def _computed(covering: Covering, group: int, num_computed: int, end: int) -> tuple[int, int]:
    """Return where a group's places with computed tokens that are still needed begin and end."""
    shape = covering.groups[group]
    if shape.keeps is Keeps.FIXED:
        return 0, end
    first = covering.first_needed(group, num_computed)
    return first, max(first, min(end, -(-num_computed // shape.tokens_per_block)))


def _newest_state(
    covering: Covering, group: int, part: NDArray[np.int32], num_computed: int, num_tokens: int
) -> Ids:
    """Return the entries of the places up to the newest state; only the last of these places has a block."""
    place = covering.first_needed(group, num_computed)
    (held,) = (part[place:] != NULL).nonzero()
    assert len(held), "a request that has computed tokens has a state"
    source = place + int(held[0])
    if source != place:
        end = covering.last_covered(group, num_computed, num_tokens)
        place = covering.first_held(group, num_computed, end)
    piece = np.full(place + 1, NULL, np.intp)
    piece[place] = part[source]
    return piece


# Blocks ---------------------------------------------------------------------------------------------------------------


def _room_for(state: CacheState, parent: Lease, command: Fork, count: int, now: float) -> Ids:
    """Return free blocks for a fork, evicting cached ones if needed; refuse it, with numbers, if there is no room."""
    tenant, fresh = parent.tenant, None
    num_ahead = len(state.waiting) if state.waiting.precedes_forks(now) else 0
    if not state.leases.free_rows or (state.keeps_rows and lacks_row(state, tenant)):
        raise fork_full(state, tenant, count, num_ahead, ())
    if not count:
        return NOWHERE
    if not num_ahead and count <= num_available(state, tenant, NOWHERE):
        fresh = room(state, count, tenant, may_wait=False)
    if fresh is None:
        # Calls that come before a fork leave it no block at all.
        at_once = 0 if num_ahead else num_at_once(state, tenant, NOWHERE)
        changes = _fewer_tokens(state, parent, command.num_tokens, at_once)
        raise fork_full(state, tenant, count, num_ahead, changes)
    return fresh


def _fewer_tokens(
    state: CacheState, parent: Lease, num_tokens: int, at_once: int
) -> tuple[str, ...]:
    """Return the largest `num_tokens` below this one for which a fork's blocks are available, if there is one."""
    least = max(1, int(state.leases.rows.num_computed[parent.row]))

    def is_too_much(num_tokens: int) -> bool:
        return _row_of(state, parent, num_tokens).num_fresh > at_once

    num_sizes = bisect_left(range(least, num_tokens), True, key=is_too_much)
    return (f"num_tokens={least + num_sizes - 1}",) if num_sizes else ()


def _begin(state: CacheState, parent: Lease, command: Fork, now: float) -> Lease:
    """Return a new lease, which has no blocks yet."""
    return Lease(
        lease_id=LeaseId(state.next_id()),
        worker_id=command.worker_id,
        tenant=parent.tenant,
        request=command,
        row=state.leases.free_rows.pop(),
        phase=Phase.ACTIVE,
        deadline=now + state.shape.lease_seconds,
        granted_at=now,
        tier_tokens=on_device(int(state.leases.rows.num_computed[parent.row])),
        moving_to=NOWHERE,
        members=state.ranks.members_for(command.worker_id),
    )


def _take(state: CacheState, lease: Lease, row: _Row, fresh: Ids) -> Ids:
    """Hold the blocks that a new lease shares, take its fresh ones, start its copies, and return its row's entries."""
    device, entries = state.device, row.entries.copy()
    sources, shared = entries[row.is_copied], entries[row.is_shared]
    targets, new = fresh[: len(sources)], fresh[len(sources) :]
    lease.num_shared, lease.num_copied = len(shared), len(sources)
    device.hold(shared)
    if len(sources):
        flight = state.fly(Purpose.FORK, sources, targets, lease=lease)
        device.hold(targets)
        lease.pending.add(flight.copy_id)
    if len(new):
        device.take(new, Event.GRANT, lease.tenant)
    entries[row.is_copied], entries[row.is_new] = targets, new
    return entries
