"""Own how members part from a lease that other ranks keep, and how several members' calls wait for it together.

A lease leaves the device only when every member has asked for that: until then, other ranks may still write its blocks.
"""

from collections.abc import Sequence
from copy import copy

from kvlease.errors import BusyError, KVLeaseError, UnknownLeaseError
from kvlease.ids import LeaseId, WorkerId
from kvleased.core.admission.refusals import superseded_for_lease
from kvleased.core.commands import Evict
from kvleased.core.effects import Evicted, Outcome, Wake
from kvleased.core.frames import without_frames
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.lease.ranks import Call, Members
from kvleased.core.state import CacheState
from kvleased.core.verbs.moving import deadline, evict_lease
from kvleased.counted import counted

_OWN_ID = LeaseId(0)


def part(state: CacheState, lease: Lease, worker_id: WorkerId, now: float) -> bool:
    """Take a worker out of a lease that other ranks keep, and answer its waiting calls about the lease.

    If no other rank has the lease, return False and change nothing; the caller then ends the lease.
    """
    members = lease.members
    if members is None or len(members.present) == 1:
        return False
    gone = UnknownLeaseError("the lease ended for this rank while the call waited")
    for waiter in [one for one in state.waiting if one.lease_id == lease.lease_id]:
        if waiter.worker_id == worker_id:
            state.waiting.leave(waiter.ticket)
            state.wake(waiter.ticket, gone)
    given_up = members.evicts.pop(worker_id, None)
    if given_up is not None:
        state.wake(given_up.ticket, gone)
    own = [one for one in _calls(state, lease) if one.worker_id == worker_id]
    _end_calls(state, lease, own, gone)
    state.leases.unshare(lease, members, worker_id)
    if members.all_want_down:
        _tell(state, [*members.evicts.values()], _evict(state, lease, members, now))
    return True


# Off the device -------------------------------------------------------------------------------------------------------


def evict_together(
    state: CacheState, lease: Lease, members: Members, command: Evict, now: float
) -> Outcome:
    """Move a lease off the device once all its members have asked; all their calls get the same answer."""
    worker_id = command.worker_id
    assert worker_id is not None, "an operator may not name a lease"
    if lease.phase is Phase.EVICTING:
        return wait_beside(state, lease, worker_id, command.wait_ms, now)
    if lease.phase is not Phase.ACTIVE:
        return evict_lease(state, command, now)
    withdraw_evict(state, members, worker_id)
    call = Call(
        ticket=state.next_id(),
        worker_id=worker_id,
        deadline=deadline(command.wait_ms, now),
        joined_id=_OWN_ID,
    )
    members.evicts[worker_id] = call
    if not members.all_want_down:
        return Outcome(ticket=call.ticket)
    others = [one for one in members.evicts.values() if one is not call]
    result = _evict(state, lease, members, now)
    _tell(state, others, result)
    if isinstance(result, KVLeaseError):
        # A copy, because raising gives an error its frames, and the other calls are answered with the original.
        raise copy(result)
    return Outcome(reply=result, ticket=None if result else call.ticket)


def withdraw_evict(state: CacheState, members: Members, worker_id: WorkerId) -> None:
    """Withdraw a member's evict, if there is one, because the member is about to be told where the blocks are."""
    call = members.evicts.pop(worker_id, None)
    if call is not None:
        state.wake(call.ticket, superseded_for_lease())


def end_late_evicts(state: CacheState, members: Members, now: float) -> None:
    """Refuse the evicts whose time is up before all other ranks have asked."""
    late = [call for call in members.evicts.values() if call.deadline <= now]
    if not late:
        return
    refused = _not_asked(state, members)
    for call in late:
        del members.evicts[call.worker_id]
        state.wake(call.ticket, refused)


def _not_asked(state: CacheState, members: Members) -> BusyError:
    """Explain why a lease stays on the device: ranks that may write its blocks did not ask to evict it."""
    num_ranks = len(members.present) + members.num_ranks - len(members.commits)
    num_asked = len(members.evicts)
    others = counted(num_ranks - num_asked, "rank", "of the request has", "of the request have")
    return BusyError(
        f"{others} not asked to evict the lease; try again after retry_after_ms, or with a longer wait_ms",
        resource="ranks",
        need=num_ranks,
        available=num_asked,
        limit=members.num_ranks,
        retry_after_ms=state.shape.retry_after_ms,
    )


def _evict(
    state: CacheState, lease: Lease, members: Members, now: float
) -> Evicted | KVLeaseError | None:
    """Move a lease off the device; return the answer to all calls that asked, or None while copies are under way."""
    calls = [*members.evicts.values()]
    members.evicts.clear()
    command = Evict(worker_id=lease.worker_id, lease_id=lease.lease_id)
    try:
        reply = evict_lease(state, command, now).reply
    except KVLeaseError as error:
        return without_frames(error)
    if reply is None:
        _lead(state, lease, calls)
        return None
    assert isinstance(reply, Evicted), "an evict is answered so"
    return reply


def _tell(state: CacheState, calls: Sequence[Call], result: Evicted | KVLeaseError | None) -> None:
    if result is not None:
        for call in calls:
            state.wake(call.ticket, result)


# Calls that get one answer --------------------------------------------------------------------------------------------


def joined_id(lease: Lease, worker_id: WorkerId) -> LeaseId:
    """Return the id under which a worker joined a lease; 0 if that is the lease's own id."""
    if lease.members is None:
        return _OWN_ID
    joined = lease.members.present[worker_id].joined_id
    return _OWN_ID if joined == lease.lease_id else joined


def wait_beside(
    state: CacheState, lease: Lease, worker_id: WorkerId, wait_ms: int, now: float
) -> Outcome:
    """Let a member's call wait beside the other calls that wait for its lease."""
    ticket = state.next_id()
    add_call(state, lease, worker_id, ticket, deadline(wait_ms, now))
    return Outcome(ticket=ticket)


def add_call(
    state: CacheState, lease: Lease, worker_id: WorkerId, ticket: int, until: float
) -> None:
    """Let a member's call wait for the answer that its lease's calls get, in place of the member's earlier call."""
    calls = _calls(state, lease)
    for call in calls:
        if call.worker_id == worker_id and call.ticket != ticket:
            state.effects.append(Wake(ticket=call.ticket, result=superseded_for_lease()))
    call = Call(
        ticket=ticket, worker_id=worker_id, deadline=until, joined_id=joined_id(lease, worker_id)
    )
    _lead(state, lease, [*(one for one in calls if one.worker_id != worker_id), call])


def shed_late(state: CacheState, lease: Lease, error: KVLeaseError, now: float) -> bool:
    """Refuse a lease's late calls while others wait on; return False and do nothing if no others do."""
    if lease.members is None:
        return False
    late = [one for one in _calls(state, lease) if one.deadline <= now]
    return _shed(state, lease, late, error)


def hang_up(state: CacheState, ticket: int) -> bool:
    """Forget a member's call that others wait beside; return False and do nothing if there is no such call."""
    for lease in list(state.leases.by_id.values()):
        if lease.members is None:
            continue
        for worker_id, call in list(lease.members.evicts.items()):
            if call.ticket == ticket:
                del lease.members.evicts[worker_id]
                return True
        own = [one for one in _calls(state, lease) if one.ticket == ticket]
        if own:
            return _shed(state, lease, own, None)
    return False


def calls_beside(state: CacheState, lease: Lease) -> list[Call]:
    """Return the calls that wait for a lease together; from now on, the caller has to answer them."""
    calls = [] if lease.members is None else _calls(state, lease)
    state.beside.pop(lease.ticket or 0, None)
    return calls


def _calls(state: CacheState, lease: Lease) -> list[Call]:
    """Return the calls that wait for a shared lease's next phase; the first has the lease's ticket."""
    if lease.ticket is None:
        return []
    # Until a second call comes, the only call is that of the lease's first member.
    alone = Call(
        ticket=lease.ticket,
        worker_id=lease.worker_id,
        deadline=lease.ticket_deadline,
        joined_id=_OWN_ID,
    )
    return state.beside.get(lease.ticket, [alone])


def _shed(state: CacheState, lease: Lease, calls: list[Call], error: KVLeaseError | None) -> bool:
    if not calls or len(calls) == len(_calls(state, lease)):
        return False
    _end_calls(state, lease, calls, error)
    if lease.phase is Phase.LOADING:
        assert lease.members is not None, "only members wait beside each other"
        for call in calls:
            # The worker never learned of the lease.
            state.leases.unshare(lease, lease.members, call.worker_id)
    return True


def _end_calls(
    state: CacheState, lease: Lease, ended: list[Call], error: KVLeaseError | None
) -> None:
    """Remove some of a lease's waiting calls, answering them with a refusal if one is given; the others wait on."""
    if not ended:
        return
    if error is not None:
        state.effects += [Wake(ticket=call.ticket, result=error) for call in ended]
    _lead(state, lease, [one for one in _calls(state, lease) if one not in ended])


def _lead(state: CacheState, lease: Lease, calls: list[Call]) -> None:
    """Let calls wait for a lease, the first of them under its ticket."""
    state.beside.pop(lease.ticket or 0, None)
    lease.ticket = calls[0].ticket if calls else None
    if lease.ticket is not None:
        state.beside[lease.ticket] = calls
        lease.ticket_deadline = min(call.deadline for call in calls)
