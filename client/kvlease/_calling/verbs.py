"""Own the course of a lease's verbs, and what a failure means for the lease; retries are `flows`' business."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from kvlease._calling import calls, flows
from kvlease._calling.calls import Ask
from kvlease._calling.failures import is_doubt
from kvlease._calling.flows import Flow
from kvlease._calling.grants import Grant, unpacked
from kvlease._calling.session import Floor, Session
from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    UnavailableError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.replies import Committed, Evicted, Explanation, Reloaded, ReserveSpec
from kvlease.v1 import kvlease_pb2 as pb

R = TypeVar("R")


def reserve(session: Session, spec: ReserveSpec, wait_ms: int) -> Flow[Grant]:
    """Return a grant: live, or refused with the reason."""
    return reserved(session, spec.request_id, calls.reserve_of(spec, wait_ms))


def fork(
    session: Session, source: Grant, request_id: str, num_tokens: int, wait_ms: int
) -> Flow[Grant]:
    """Return a grant that goes on from another lease: live, or refused with the reason.

    A repeated fork returns the lease that the first one made, as a repeated reserve does.
    """
    if not source.is_live:
        error = source.refusal or UnknownLeaseError(f"lease {source.lease_id} was released")
        if session.raises:
            raise error
        return session.fresh_grant(request_id, error)
    ask = calls.fork(source.lease_id, request_id, num_tokens, wait_ms)
    try:
        grant = yield from reserved(session, request_id, ask)
    except UnknownLeaseError as error:
        session.refused(source, error)
        raise
    if isinstance(grant.refusal, UnknownLeaseError):
        session.refused(source, grant.refusal)
    elif grant.refusal is None and source.is_live:
        source.refusal = None
    return grant


def reserved(
    session: Session, request_id: str, ask: Ask[pb.ReserveResponse], deadline_at: float = 0
) -> Flow[Grant]:
    """Return the grant that a reserve asks for: live, or refused with the reason; 0 gives it a deadline of its own."""
    link, grant = session.link, session.fresh_grant(request_id)
    floor = Floor()
    try:
        session.begin_reserve(floor)
        for _ in range(flows.ATTACHES_MAX):
            # As in `attempts`, written out to save a generator in the most frequent verbs.
            call = flows.first_try(link, ask, deadline_at)
            deadline_at = call.deadline_at
            try:
                response, epoch = (yield call), call.epoch
            except KVLeaseError as error:
                response, epoch = yield from flows.retried(link, call, error)
            link.is_reached = True
            granted = ask.read(response)
            moved = other_memory(session)
            if moved and _hit_tokens(granted) and granted.lease_id not in session.grants:
                # The caller's views are of the old memory, where these blocks hold something else.
                yield from flows.attempts(link, calls.release(granted.lease_id), deadline_at)
                raise moved
            if entered := session.enter(grant, granted, epoch):
                if entered.refusal is not None:
                    raise entered.refusal
                return entered
            if session.is_leftover(granted):
                yield from flows.attempts(link, calls.release(granted.lease_id), deadline_at)
        message = f"the daemon restarted {flows.ATTACHES_MAX} times while request {request_id!r} was being reserved"
        raise UnavailableError(message)
    except InvalidError:
        raise
    except KVLeaseError as error:
        grant.refusal = error
        if session.raises:
            raise
        return grant
    finally:
        session.end_reserve(floor)


def other_memory(session: Session) -> WrongStateError | None:
    """Return why a caller may neither use hits nor commit: its views are of memory that ended with a daemon.

    Return None if it has looked at the present memory, or never at any: then it reads and writes no memory itself.
    """
    if session.looked_at is None or session.looked_at is session.memory:
        return None
    message = (
        "the cache has had new memory since the daemon restarted, and this worker has not read it yet; "
        "read worker.device (or worker.gpu) again, and create all views of it again"
    )
    return WrongStateError(message, resource="memory", rule="other_memory")


def _hit_tokens(granted: pb.ReserveResponse) -> int:
    on_device = granted.device_hit_tokens + granted.host_hit_tokens
    return on_device + granted.disk_hit_tokens + granted.remote_hit_tokens


def extend(session: Session, grant: Grant, num_tokens: int, wait_ms: int) -> Flow[bool]:
    """Return whether the lease covers `num_tokens`."""

    def apply(response: pb.ExtendResponse, epoch: int) -> bool:
        num_added = unpacked(response.num_blocks)
        needed = response.covered_tokens or num_tokens
        num_places = unpacked(response.num_places)
        session.extended(
            ((grant.lease_id, response.block_ids, num_added, num_tokens, needed, num_places),),
            epoch,
        )
        return grant.is_live

    def doubt() -> None:
        session.doubtful.add(grant.lease_id)

    return _verb(
        session,
        grant,
        calls.extend(grant.lease_id, num_tokens, wait_ms),
        apply,
        idle=False,
        doubt=doubt,
    )


def commit(
    session: Session, grant: Grant, num_tokens: int, keys: bytes, first_block: int
) -> Flow[Committed]:
    """Make full blocks findable; blocks that no later token needs are not used any more, even if the answer is lost."""
    if grant.is_live and (error := other_memory(session)):
        return _unsent(session, grant, error, Committed())
    ask = calls.commit(grant.lease_id, num_tokens, keys, first_block)

    def apply(response: pb.CommitResponse, _: int) -> Committed:
        session.computed(grant, num_tokens)
        return ask.read(response)

    def doubt() -> None:
        grant.give_back(num_tokens)

    return _verb(session, grant, ask, apply, idle=Committed(), doubt=doubt)


def explain(session: Session, grant: Grant) -> Flow[Explanation]:
    """Return why the rest of a lease's prefix was not found."""
    ask = calls.explain_lease(grant.lease_id)

    def apply(response: pb.ExplainResponse, _: int) -> Explanation:
        return ask.read(response)

    return _verb(session, grant, ask, apply, idle=Explanation())


def trim(session: Session, grant: Grant, num_tokens: int) -> Flow[int]:
    """Take blocks back behind a token; returns how many left the lease."""
    ask = calls.trim(grant.lease_id, num_tokens)

    def apply(response: pb.TrimResponse, _: int) -> int:
        session.trimmed(grant, num_tokens, is_sure=True)
        return ask.read(response)

    def doubt() -> None:
        session.trimmed(grant, num_tokens, is_sure=False)

    return _verb(session, grant, ask, apply, idle=0, doubt=doubt)


def map_row(session: Session, grant: Grant) -> Flow[int]:
    """Publish a lease's row; returns its kernel blocks."""

    def apply(response: pb.MapResponse, _: int) -> int:
        grant.row = response.row
        return response.num_kernel_blocks

    return _verb(session, grant, calls.map_row(grant.lease_id), apply, idle=0)


def evict(session: Session, grant: Grant, wait_ms: int) -> Flow[Evicted]:
    """Move a lease to the host pool; if that is in doubt, its blocks count as gone."""
    ask = calls.evict(lease_id=grant.lease_id, wait_ms=wait_ms)

    def apply(response: pb.EvictResponse, _: int) -> Evicted:
        session.evicted(grant)
        return ask.read(response)

    evicted = yield from _verb(
        session, grant, ask, apply, idle=Evicted(), doubt=lambda: session.evicted(grant)
    )
    return replace(evicted, refusal=grant.refusal)


def reload(session: Session, grant: Grant, wait_ms: int) -> Flow[Reloaded]:
    """Bring an evicted lease back; if the daemon does not have it as evicted, the lease is lost."""

    def apply(response: pb.ReloadResponse, epoch: int) -> Reloaded:
        session.reloaded(grant, response, epoch)
        return Reloaded(num_reloaded=response.num_reloaded, num_tokens=response.num_tokens)

    reloaded = yield from _verb(
        session, grant, calls.reload_lease(grant.lease_id, wait_ms), apply, idle=Reloaded()
    )
    if grant.is_live and isinstance(grant.refusal, WrongStateError):
        session.refused(
            grant,
            UnknownLeaseError(
                f"this worker has lease {grant.lease_id} as evicted, but the daemon does not: {grant.refusal.message}"
            ),
        )
    return replace(reloaded, refusal=grant.refusal)


def release(session: Session, grant: Grant) -> Flow[bool]:
    """End a lease; it counts as ended even if the daemon learns of it only by the next heartbeat."""
    if not grant.is_live:
        return False
    link = session.link
    try:
        call = flows.first_try(link, calls.release(grant.lease_id))
        try:
            response = yield call
        except KVLeaseError as error:
            response, _ = yield from flows.retried(link, call, error)
        link.is_reached = True
    except InvalidError:
        raise
    except KVLeaseError as error:
        session.refused(grant, error)
        if session.raises:
            raise
        return False
    else:
        grant.refusal = None
        return bool(response.released)
    finally:
        session.released(grant)


def _unsent(session: Session, grant: Grant, error: KVLeaseError, idle: R) -> Flow[R]:
    """Refuse a verb of a live lease without a call; the lease stays live."""
    yield from ()
    grant.refusal = error
    if session.raises:
        raise error
    return idle


def _verb(
    session: Session,
    grant: Grant,
    ask: Ask[Any],
    apply: Callable[[Any, int], R],
    *,
    idle: R,
    doubt: Callable[[], None] = lambda: None,
) -> Flow[R]:
    """Send a verb of a live lease and apply its answer; on failure note what that means, and raise or return `idle`."""
    if not grant.is_live:
        if session.raises:
            raise grant.refusal or UnknownLeaseError(f"lease {grant.lease_id} was released")
        return idle
    try:
        response, epoch = yield from flows.attempts(session.link, ask)
    except (
        GeneratorExit
    ):  # the caller was cancelled or interrupted, but the call may still be carried out
        doubt()
        raise
    except InvalidError:
        raise
    except KVLeaseError as error:
        if is_doubt(error):
            doubt()
        session.refused(grant, error)
        if session.raises:
            raise
        return idle
    grant.refusal = None
    return apply(response, epoch)
