"""Own what the calls of several ranks mean for the lease that they share: each speaks for its own part of every block.

The first rank that asks is served like a process that calls for all ranks. A rank that asks later
- for the same request joins its lease, or waits beside the first rank while that waits;
- for the same tokens is told of the blocks that it was not told of yet;
- to commit makes the blocks findable that all ranks have committed;
- to trim takes back the blocks that no rank wants any more.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import IdReusedError, WrongStateError
from kvlease.groups import Keeps
from kvlease.ids import BYTES_PER_KEY, LeaseId, WorkerId
from kvleased.core.admission.granting import attempt_extend, attempt_reserve, pack_counts, reserved
from kvleased.core.blocks.records import NULL
from kvleased.core.blocks.states import State
from kvleased.core.commands import Commit, Extend, Fork, Reload, Reserve, Trim
from kvleased.core.effects import Extended, Outcome, Reloaded, Reply, Reserved
from kvleased.core.lease.covering import Covering
from kvleased.core.lease.digests import asked_digest
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import OFF_DEVICE, Phase
from kvleased.core.lease.ranks import Member, Members
from kvleased.core.state import CacheState, pack
from kvleased.core.verbs.ending import renew
from kvleased.core.verbs.moving import attempt_reload
from kvleased.core.verbs.parting import add_call, joined_id, wait_beside, withdraw_evict
from kvleased.core.waiting import Waiter

# Reserve --------------------------------------------------------------------------------------------------------------


def find(state: CacheState, command: Reserve | Fork) -> Lease | None:
    """Return a request's lease if the calling worker shares it or may join it, else None.

    A rank that has parted from the lease may come back only if no block of the request was published, because the rank
    would write it again, and none was taken back. Otherwise the rank's call gets a new lease.
    """
    ranks = state.ranks
    if not ranks.places:
        return state.leases.find(command.worker_id, command.request_id)
    lease = state.leases.find(ranks.holder_of(command.worker_id), command.request_id)
    if lease is None or lease.members is None:
        return lease
    members, rank = lease.members, ranks.places[command.worker_id].rank
    if command.worker_id in members.present:
        return lease
    if _has_published(state, lease, members):
        return None
    if rank not in members.commits:
        return lease
    is_as_before = int(state.leases.rows.num_tokens[lease.row]) >= command.num_tokens
    return lease if is_as_before and asks_for(state, lease, command) else None


def _has_published(state: CacheState, lease: Lease, members: Members) -> bool:
    """Tell whether any of a lease's blocks were published behind the prefix that a joining rank would be told of.

    After a crash in the middle of a commit, some blocks may be published although the row does not count their tokens.
    """
    leases, row = state.leases, lease.row
    if int(leases.rows.num_computed[row]) != members.hit_tokens:
        return True
    places = leases.places_of(row)
    behind = places[state.covering.end_tokens[places] > members.hit_tokens]
    pool = state.host if lease.is_on_host else state.device
    return bool((pool.records.state[leases.entries_at(row, behind)] == State.READY).any())


def asks_for(state: CacheState, lease: Lease, command: Reserve | Fork) -> bool:
    """Tell whether a command asks for what a lease was granted for; after a restart, the row's digest tells."""
    if lease.request is None:
        return int(state.leases.rows.asked[lease.row]) == asked_digest(command)
    return is_same(lease.request, command)


def is_same(first: Reserve | Fork, command: Reserve | Fork) -> bool:
    """Tell whether a command asks for the same as an earlier one."""
    if isinstance(command, Fork):
        return isinstance(first, Fork) and (first.lease_id, first.num_tokens) == (
            command.lease_id,
            command.num_tokens,
        )
    return isinstance(first, Reserve) and (
        first.keys,
        first.num_tokens,
        first.retain_priority,
    ) == (command.keys, command.num_tokens, command.retain_priority)


def join(state: CacheState, lease: Lease, worker_id: WorkerId) -> None:
    """Let a worker share its engine's lease; a worker that does already is told of all blocks anew."""
    members = lease.members
    if members is None:
        return
    if worker_id not in members.present:
        member = Member(
            worker_id=worker_id,
            rank=state.ranks.places[worker_id].rank,
            joined_id=LeaseId(state.next_id()),
        )
        state.leases.share(lease, members, member)
    withdraw_evict(state, members, worker_id)
    tell_all(state, lease, members, worker_id)
    if lease.phase in OFF_DEVICE:
        members.present[worker_id].told = [0] * len(state.covering.groups)


def tell_all(state: CacheState, lease: Lease, members: Members, worker_id: WorkerId) -> None:
    """Note that a member is told of all blocks of a lease; from now on, no other rank's trim takes them."""
    member, rows, row = members.present[worker_id], state.leases.rows, lease.row
    member.told = rows.num_blocks[row].tolist()
    member.num_tokens = int(rows.num_tokens[row])


def join_reserved(state: CacheState, lease: Lease, worker_id: WorkerId, now: float) -> Reserved:
    """Let a worker share its engine's lease, and return the answer to its call."""
    join(state, lease, worker_id)
    renew(state, lease, now)
    return replace(reserved(state, lease), joined_id=joined_id(lease, worker_id))


def check_mates(state: CacheState, command: Reserve) -> None:
    """Refuse a Reserve if another rank waits with a different Reserve of the same request."""
    request = request_of(state, command)
    for waiter in state.callers:
        if request is not None and waiter.request == request:
            assert isinstance(waiter.command, Reserve), "only new requests have a name"
            if not is_same(waiter.command, command):
                msg = (
                    f"request {command.request_id} is already waiting for a lease with other keys, another num_tokens "
                    "or another retain_priority; use another id"
                )
                raise IdReusedError(msg, resource="request_id")


def request_of(state: CacheState, command: Reserve) -> tuple[int, str] | None:
    """Return what the calls of all ranks for one request have in common; None if one worker calls for all ranks."""
    holder = state.ranks.holder_of(command.worker_id)
    return None if holder == command.worker_id else (holder, command.request_id)


def attempt_joint_reserve(state: CacheState, waiter: Waiter, now: float) -> Reply | Lease | None:
    """Grant a Reserve as `attempt_reserve` does, or join the lease that another rank has been granted meanwhile."""
    command = waiter.command
    assert isinstance(command, Reserve)
    lease = None if waiter.request is None else find(state, command)
    if lease is None:
        return attempt_reserve(state, command, now, waiter)
    if lease.phase is not Phase.LOADING:
        return join_reserved(state, lease, command.worker_id, now)
    join(state, lease, command.worker_id)
    add_call(state, lease, command.worker_id, waiter.ticket, waiter.deadline)
    return lease


# Extend and reload ----------------------------------------------------------------------------------------------------


def attempt_joint_extend(state: CacheState, waiter: Waiter, now: float) -> Extended | None:
    """Grant an Extend as `attempt_extend` does; tell a member of all blocks that it does not know yet."""
    command, reply = waiter.command, attempt_extend(state, waiter, now)
    if reply is None or not state.ranks.places:
        return reply
    assert isinstance(command, Extend)
    lease = state.leases.by_id[command.lease_id]
    return reply if lease.members is None else tell(state, lease, lease.members, command)


def tell(state: CacheState, lease: Lease, members: Members, command: Extend) -> Extended:
    """Return the answer to an Extend of a lease that has the blocks: those that the member does not know yet."""
    leases, covering = state.leases, state.covering
    member, num_tokens = members.present[command.worker_id], command.num_tokens
    num_computed = members.computed_by(command.worker_id, int(leases.rows.num_computed[lease.row]))
    pieces = []
    for group, part in enumerate(leases.parts_of(lease.row)):
        end = min(len(part), covering.last_covered(group, num_computed, num_tokens))
        end = _end_with_states(covering, group, part, end)
        piece = np.maximum(part[member.told[group] : end], 0)
        if covering.groups[group].keeps is Keeps.STATE:
            # Empty places before the first state are left out of the answer; those between two states are not.
            (held,) = piece.nonzero()
            piece = piece[held[0] :] if len(held) else piece[:0]
        pieces.append(piece)
        member.told[group] = max(member.told[group], end)
    member.num_tokens = max(member.num_tokens, num_tokens)
    return Extended(
        block_ids=pack(np.concatenate(pieces)),
        num_blocks=pack_counts(state, np.array([len(piece) for piece in pieces])),
        covered_tokens=covering.covered(member.told, num_tokens),
        num_places=b"" if state.is_simple else pack(np.array(member.told)),
    )


def _end_with_states(covering: Covering, group: int, part: NDArray[np.int32], end: int) -> int:
    """Return where the places that a member is told of end, moved on to include its states.

    All members' states are at the same places, which the member that asked for the most tokens has decided.
    """
    shape = covering.groups[group]
    if shape.keeps is not Keeps.STATE:
        return end
    num_states = 1 + shape.extra_blocks
    first = max(0, end - num_states)
    held = first + (part[first:] != NULL).nonzero()[0][:num_states]
    return max(end, int(held[-1]) + 1) if len(held) else end


def attempt_joint_reload(state: CacheState, waiter: Waiter, now: float) -> Reloaded | Lease | None:
    """Bring a lease back as `attempt_reload` does, or wait beside another rank's call that is bringing it back."""
    command = waiter.command
    assert isinstance(command, Reload)
    assert command.lease_id is not None, "a reload of keys never waits"
    lease = state.leases.by_id[command.lease_id]
    if lease.members is None:
        return attempt_reload(state, waiter, now)
    if lease.phase is not Phase.RELOADING:
        result = attempt_reload(state, waiter, now)
        if not isinstance(result, Lease):
            return result
        lease.ticket = None
    add_call(state, lease, waiter.worker_id, waiter.ticket, waiter.deadline)
    return lease


def reload_beside(
    state: CacheState, lease: Lease, members: Members, command: Reload, now: float
) -> Outcome | None:
    """Let a member's Reload wait while the lease is on its way back; return None if the call is served like any other.

    A Reload withdraws the member's own Evict.

    Raises:
        WrongStateError: The lease is on its way down; all its members are told when it is there.

    """
    assert command.worker_id is not None, "an operator may not name a lease"
    if lease.phase is Phase.EVICTING:
        msg = "the lease is being evicted; reload it when the evict has been answered"
        raise WrongStateError(msg, resource="lease")
    withdraw_evict(state, members, command.worker_id)
    tell_all(state, lease, members, command.worker_id)
    if lease.phase is Phase.RELOADING:
        return wait_beside(state, lease, command.worker_id, command.wait_ms, now)
    return None


# Commit and trim ------------------------------------------------------------------------------------------------------


def agreed_commit(state: CacheState, members: Members, command: Commit) -> Commit:
    """Return the part of a member's Commit that all ranks have committed."""
    num_tokens = min(command.num_tokens, members.agreed(command.worker_id, command.num_tokens))
    num_keys = max(0, num_tokens // state.shape.hash_tokens - command.first_block)
    return replace(command, num_tokens=num_tokens, keys=command.keys[: num_keys * BYTES_PER_KEY])


def agreed_trim(state: CacheState, lease: Lease, members: Members, command: Trim) -> int:
    """Note how many tokens a member wants a lease to cover; return how many tokens the lease must still cover."""
    covering, rows, row = state.covering, state.leases.rows, lease.row
    member, num_computed = members.present[command.worker_id], int(rows.num_computed[row])
    own = members.computed_by(command.worker_id, num_computed)
    member.num_tokens = min(member.num_tokens, max(command.num_tokens, own))
    for group, told in enumerate(member.told):
        end = covering.last_covered(group, own, member.num_tokens)
        member.told[group] = min(told, end)
    is_uneven = bool(covering.giving_back) and members.furthest(num_computed) > num_computed
    if is_uneven or not members.have_all_joined:
        return int(rows.num_tokens[row])
    return max(one.num_tokens for one in members.present.values())


def check_no_states(members: Members | None, done: str) -> None:
    """Refuse an operation for which all ranks would have to be at the same token, if there are states."""
    if members is not None and members.is_recurrent:
        msg = f"a lease with recurrent states cannot be {done} while its ranks call apart"
        raise WrongStateError(msg, resource="lease", rule="ranks_apart")
