"""Own the course of every call: retries and attaching again; what a failure means for a lease is `_verbs`' business.

A flow is a generator: it yields what must be done, is sent the answer or thrown the error, and returns the result.
It neither waits nor touches a connection, so the blocking and the asynchronous client share all of it and differ only
in the doing.
"""

import logging
from collections.abc import Generator
from contextlib import suppress
from os import getpid
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from kvlease import _calls
from kvlease._calls import Ask
from kvlease._checks import check_idle
from kvlease._link import Link
from kvlease._session import Session
from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    NotYoursError,
    StaleEpochError,
    StartingError,
    UnavailableError,
    UnknownCacheError,
    UnknownWorkerError,
)
from kvlease.transports.base import Attached, Outgoing
from kvlease.v1 import kvlease_pb2 as pb

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_logger: Final = logging.getLogger("kvlease")

ATTACHES_MAX: Final = 3
"""Times that one call attaches again, or reserves again because the daemon restarted meanwhile."""
FIRST_PAUSE_SECONDS: Final = 0.005
LONGEST_PAUSE_SECONDS: Final = 0.2


class Pause(NamedTuple):
    """Wait."""

    seconds: float


class Attach(NamedTuple):
    """Send an attach over a fresh connection and answer with what it brought."""

    call: Outgoing


class Reattach(NamedTuple):
    """Run `reattach`, unless another call has done so since `stale_epoch`."""

    stale_epoch: int
    deadline_at: float


Action = Outgoing | Pause | Attach | Reattach
"""What a flow can ask its client to do; an Outgoing is sent and answered with its response."""

Flow = Generator[Action, Any, R]


def told(link: Link, ask: Ask[R]) -> Flow[R]:
    """Send a call and return its answer."""
    response, _ = yield from attempts(link, ask)
    return ask.read(response)


def streamed(link: Link, ask: Ask[Any], idle_seconds: float | None) -> Outgoing:
    """Return the call of a stream, whose first answer must come before the deadline.

    Raises:
        InvalidError: a stream cannot end after so many seconds without an answer, or this is a forked child.
    """
    check_idle(idle_seconds)
    link.check_process()
    return Outgoing(ask.verb, ask.request, link.clock() + link.deadline_seconds)


def attempts(link: Link, ask: Ask[Any]) -> Flow[tuple[Any, int]]:
    """Send a call until it is answered or its deadline is near; returns the response and the epoch that gave it.

    The cases: the connection failed or the cache's memory is not ready: again after a pause, with the same
    idempotency key; the daemon restarted: attach again, then send again; everything else is the answer.
    """
    call = first_try(link, ask)
    try:
        response = yield call
    except KVLeaseError as error:
        return (yield from retried(link, call, error))
    link.is_reached = True
    return response, call.epoch


def first_try(link: Link, ask: Ask[Any]) -> Outgoing:
    """Return the first try of a call."""
    if getpid() != link.process_id:
        link.check_process()
    if link.is_detached:
        link.check_attached()
    verb, request, _, wait_ms, cache = ask
    deadline_at = link.clock() + link.deadline_seconds
    if wait_ms:
        deadline_at += wait_ms * 1e-3
    key = link.fresh_key() if verb in _calls.KEYED else ""
    call = Outgoing(verb, request, deadline_at, link.token, link.epoch, key, cache)
    return call if link.traceparent is None else call._replace(traceparent=link.traceparent())


def retried(link: Link, call: Outgoing, error: KVLeaseError) -> Flow[tuple[Any, int]]:
    """Go on after a try that failed with `error`."""
    num_failures = num_attaches = 0
    while True:
        if isinstance(error, StaleEpochError | UnknownWorkerError):
            num_attaches += 1
            if not link.token or link.is_detached or num_attaches > ATTACHES_MAX:
                raise error
            yield Reattach(call.epoch, call.deadline_at)
        elif isinstance(error, UnavailableError | StartingError):
            yield from _pause(link, error, num_failures, call.deadline_at)
            num_failures += 1
        else:
            raise error
        call = call._replace(token=link.token, epoch=link.epoch)
        try:
            response = yield call
        except KVLeaseError as another:
            error = another
        else:
            link.is_reached = True
            return response, call.epoch


def _pause(link: Link, error: KVLeaseError, num_failures: int, deadline_at: float) -> Flow[None]:
    """Wait before the next try, longer each time; raises `error` where there is no time or no point."""
    seconds = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**num_failures) * link.jitter()
    is_absent = isinstance(error, UnavailableError)
    if is_absent and not link.is_worth_waiting():
        raise error
    # Who answers is given the time to: a try that is cut off would end in doubt, where this answer leaves none.
    seconds_needed = seconds if is_absent else 2 * seconds
    if link.clock() + seconds_needed >= deadline_at:
        if is_absent:
            link.give_up()
        raise error
    # A kept-alive connection may just have been closed: the first retry need not wait.
    if num_failures or not is_absent:
        yield Pause(seconds)


def attach(session: Session) -> Flow[None]:
    """Make the session a worker."""
    deadline_at = session.link.clock() + session.link.deadline_seconds
    attached = yield from _attached(session.link, session.request, deadline_at)
    yield from _adopted(session, attached, deadline_at, resumed=False)


def reattach(session: Session, deadline_at: float) -> Flow[None]:
    """Make the session a worker of the restarted daemon, with the leases that survived.

    The cases: the daemon knows the worker; the cache alone; or, where its memory ended too, neither, and the cache is
    registered again by a worker that knows how.
    """
    # What is cached now, nobody counts in them any more.
    session.key_counts = None
    try:
        attached = yield from _attached(session.link, session.resume_request(), deadline_at)
        resumed = True
    except (UnknownWorkerError, UnknownCacheError) as error:
        if isinstance(error, UnknownCacheError):
            yield from _registered(session, error, deadline_at)
        attached = yield from _attached(session.link, session.request, deadline_at)
        resumed = False
    yield from _adopted(session, attached, deadline_at, resumed=resumed)
    link = session.link
    if link.is_detached:
        # The worker was closed meanwhile, and its detach may have gone out under the old token: nobody else will.
        yield from _detached(link.token, deadline_at)
        raise UnknownWorkerError("the worker has detached")


def _registered(session: Session, error: UnknownCacheError, deadline_at: float) -> Flow[None]:
    """Register the cache of a worker again; raises `error` where it cannot, or where somebody has deleted the cache."""
    if session.registration is None:
        raise error
    try:
        stats: pb.StatsResponse = yield Outgoing("stats", pb.StatsRequest(), deadline_at)
    except (NotYoursError, UnknownWorkerError):
        # Who may not look cannot tell a deleted cache from one that ended with its daemon.
        raise error from None
    if stats.epoch == session.link.epoch:
        raise error
    yield Outgoing("register_cache", session.registration, deadline_at)


def _adopted(
    session: Session, attached: Attached, deadline_at: float, *, resumed: bool
) -> Flow[None]:
    """Take over what an attach brought; where that fails, end the worker that it made: nobody else would."""
    try:
        session.adopt(attached, resumed=resumed)
    except BaseException:
        if not resumed:
            yield from _detached(attached.response.token, deadline_at)
        raise


def _detached(token: str, deadline_at: float) -> Flow[None]:
    ask = _calls.detach()
    with suppress(KVLeaseError):
        yield Outgoing(ask.verb, ask.request, deadline_at, token)


def _attached(link: Link, request: pb.AttachRequest, deadline_at: float) -> Flow[Attached]:
    link.check_process()
    num_failures = 0
    while True:
        try:
            attached: Attached = yield Attach(Outgoing("attach", request, deadline_at))
        except (UnavailableError, StartingError) as error:
            yield from _pause(link, error, num_failures, deadline_at)
            num_failures += 1
        else:
            link.is_reached = True
            return attached


def heartbeat(session: Session) -> Flow[None]:
    """Renew the leases, and learn which of them the daemon has ended."""
    ask = _calls.heartbeat(*session.inventory())
    response, epoch = yield from attempts(session.link, ask)
    session.heard(ask.read(response).tolist(), response.newest_lease_id, epoch)


def detach(session: Session) -> Flow[int]:
    """End the worker; where the daemon is away, until it is back or the deadline is near.

    A worker that cannot be ended stays, with its leases, until this process has ended: the log says so.
    """
    link = session.link
    link.check_process()
    if link.has_ended:
        if session.raises:
            link.check_attached()
        return 0
    # Before the token is read: who attaches again right now gives us the new one, or sees that it must detach.
    link.is_detached = True
    ask = _calls.detach()
    # No epoch: a worker that wants to end does so in whatever life of the daemon.
    call = Outgoing(ask.verb, ask.request, link.clock() + link.deadline_seconds, link.token)
    try:
        response = yield from _insisted(link, call)
    except UnknownWorkerError:
        link.has_ended = True
        if session.raises:
            raise
        return 0
    except KVLeaseError as error:
        _warn_of_leftover(session, error)
        if session.raises:
            raise
        return 0
    finally:
        session.forget_all()
    link.has_ended = True
    return ask.read(response)


def _insisted(link: Link, call: Outgoing) -> Flow[pb.DetachResponse]:
    """Send a detach until it is answered or its deadline is near; one that an earlier try carried out is done."""
    num_failures = 0
    while True:
        try:
            response: pb.DetachResponse = yield call
        except (UnavailableError, StartingError) as error:
            # The first time it is perhaps but a connection that the daemon's restart broke.
            if num_failures:
                yield from _pause(link, error, num_failures, call.deadline_at)
            num_failures += 1
            call = call._replace(token=link.token)
        except UnknownWorkerError:
            if not num_failures:
                raise
            return pb.DetachResponse()
        else:
            return response


def _warn_of_leftover(session: Session, error: KVLeaseError) -> None:
    force = " --force" if session.death_proof == "pidfd" else ""
    # Who does not answer has perhaps ended, and its memory with it: then nobody is kept from anything.
    if_there = "if it is there yet, " if isinstance(error, UnavailableError) else ""
    _logger.warning(
        "worker %d of cache %r could not be detached: %sthe daemon keeps its blocks from others until it knows that "
        "process %d has ended, or until an operator says so by: kvlease detach %d%s (%s)",
        session.worker_id,
        session.request.cache,
        if_there,
        session.link.process_id,
        session.worker_id,
        force,
        error,
        extra={"action": "detach", "worker_id": session.worker_id, "code": error.code},
    )


class Idle(Protocol[R_co]):
    """What makes the answer that stands for a refusal, such as a reply's class."""

    def __call__(self, *, refusal: KVLeaseError) -> R_co:
        """Return an answer that says that nothing was done, and why where it has room for that."""


def not_there(*, refusal: KVLeaseError) -> bool:
    """Return what stands for a refusal where the answer is whether there was something to end."""
    del refusal
    return False


def missed(session: Session, ask: Ask[R], idle: Idle[R]) -> Flow[R]:
    """Send a call that concerns no lease; any failure is a miss that knows why, unless the worker wants it raised."""
    try:
        response, _ = yield from attempts(session.link, ask)
        return ask.read(response)
    except InvalidError:
        raise
    except KVLeaseError as error:
        if session.raises:
            raise
        return idle(refusal=error)
