"""Own the course of every call: retries and attaching again; what a failure means for a lease is `verbs`' business.

A flow is a generator: it yields an action, is sent the answer or thrown the error, and returns the result. It neither
waits nor touches a connection, so the blocking and the asynchronous client share all flows, and differ only in how they
carry out the actions.
"""

import logging
from collections.abc import Generator
from contextlib import suppress
from os import getpid
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from kvlease._calling import calls
from kvlease._calling.calls import Ask
from kvlease._calling.link import Link
from kvlease._calling.session import Session
from kvlease._checks import check_idle
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
"""How often one call attaches again, or reserves again because the daemon restarted meanwhile."""
FIRST_PAUSE_SECONDS: Final = 0.005
LONGEST_PAUSE_SECONDS: Final = 0.2


class Pause(NamedTuple):
    """Wait."""

    seconds: float


class Attach(NamedTuple):
    """Send an attach over a fresh connection; the answer is an `Attached`."""

    call: Outgoing


class Reattach(NamedTuple):
    """Run `reattach`, unless another call has already done so since the call that was refused."""

    refused: Outgoing

    def is_due(self, link: Link) -> bool:
        """Tell whether the link is still as it was: a resumed worker has another epoch, and a new one another token.

        To resume once more would end the leases that are on their way to the worker since.
        """
        return (link.token, link.epoch) == (self.refused.token, self.refused.epoch)


Action = Outgoing | Pause | Attach | Reattach
"""The actions that a flow can ask of its client; an Outgoing is sent, and answered with its response."""

Flow = Generator[Action, Any, R]


def told(link: Link, ask: Ask[R]) -> Flow[R]:
    """Send a call and return its answer."""
    response, _ = yield from attempts(link, ask)
    return ask.read(response)


def streamed(link: Link, ask: Ask[Any], idle_seconds: float | None) -> Outgoing:
    """Return the call of a stream, whose first answer must come before the deadline.

    Raises:
        InvalidError: `idle_seconds` is out of range, or this process is a forked child.
    """
    check_idle(idle_seconds)
    link.check_process()
    return Outgoing(ask.verb, ask.request, link.clock() + link.deadline_seconds)


def attempts(link: Link, ask: Ask[Any], deadline_at: float = 0) -> Flow[tuple[Any, int]]:
    """Send a call until it is answered or its deadline is near; returns the response and the epoch that gave it.

    A call that is a part of another one has that one's deadline; 0 gives it its own.

    The cases: if the connection failed or the cache's memory is not ready, send again after a pause, with the same
    idempotency key; if the daemon restarted, attach again, then send again; any other error is raised.
    """
    call = first_try(link, ask, deadline_at)
    try:
        response = yield call
    except KVLeaseError as error:
        return (yield from retried(link, call, error))
    link.is_reached = True
    return response, call.epoch


def first_try(link: Link, ask: Ask[Any], deadline_at: float = 0) -> Outgoing:
    """Return the first try of a call, which ends at `deadline_at`; 0 gives it a deadline of its own."""
    if getpid() != link.process_id:
        link.check_process()
    if link.is_detached:
        link.check_attached()
    verb, request, _, wait_ms, cache = ask
    if not deadline_at:
        deadline_at = link.clock() + link.deadline_seconds
        if wait_ms:
            deadline_at += wait_ms * 1e-3
    key = link.fresh_key() if verb in calls.KEYED else ""
    call = Outgoing(verb, request, deadline_at, link.token, link.epoch, key, cache)
    return call if link.traceparent is None else call._replace(traceparent=link.traceparent())


def retried(link: Link, call: Outgoing, error: KVLeaseError) -> Flow[tuple[Any, int]]:
    """Go on with a call whose first try failed with `error`."""
    num_failures = num_attaches = 0
    while True:
        if isinstance(error, StaleEpochError | UnknownWorkerError):
            num_attaches += 1
            if not link.token or link.is_detached or num_attaches > ATTACHES_MAX:
                raise error
            yield Reattach(call)
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
    """Wait before the next try, longer each time; raises `error` if there is no time left, or no point in waiting."""
    seconds = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**num_failures) * link.jitter()
    is_absent = isinstance(error, UnavailableError)
    if is_absent and not link.is_worth_waiting():
        raise error
    # A daemon that answers gets time to answer the next try, too: if that were cut off, it would end in doubt, while
    # the present answer leaves none.
    seconds_needed = seconds if is_absent else 2 * seconds
    if link.clock() + seconds_needed >= deadline_at:
        if is_absent:
            link.give_up()
        raise error
    # Perhaps only a kept-alive connection was closed, so the first retry need not wait.
    if num_failures or not is_absent:
        yield Pause(seconds)


def attach(session: Session) -> Flow[None]:
    """Make the session a worker."""
    deadline_at = session.link.clock() + session.link.deadline_seconds
    attached = yield from _attached(session.link, session.request, deadline_at)
    yield from _adopted(session, attached, deadline_at, resumed=False)


def reattach(session: Session, deadline_at: float) -> Flow[None]:
    """Make the session a worker of the restarted daemon, with the leases that survived.

    The cases: the daemon knows the worker; it knows only the cache; or it knows neither, as its memory ended, too. Then
    the worker registers the cache again, if it has the request for that.
    """
    # Nobody writes to the old key counts any more.
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
        # The worker was closed meanwhile, and its detach may have been sent with the old token: only this can end it.
        yield from _detached(link.token, deadline_at)
        raise UnknownWorkerError("the worker has detached")


def _registered(session: Session, error: UnknownCacheError, deadline_at: float) -> Flow[None]:
    """Register a worker's cache again; raises `error` if that is impossible, or if somebody has deleted the cache."""
    if session.registration is None:
        raise error
    try:
        stats: pb.StatsResponse = yield Outgoing("stats", pb.StatsRequest(), deadline_at)
    except (NotYoursError, UnknownWorkerError):
        # A caller that may not ask for stats cannot tell a deleted cache from one that ended with its daemon.
        raise error from None
    if stats.epoch == session.link.epoch:
        raise error
    yield Outgoing("register_cache", session.registration, deadline_at)


def _adopted(
    session: Session, attached: Attached, deadline_at: float, *, resumed: bool
) -> Flow[None]:
    """Take over what an attach brought; if that fails, end the worker that it made, as nobody else would."""
    try:
        session.adopt(attached, resumed=resumed)
    except BaseException:
        if not resumed:
            yield from _detached(attached.response.token, deadline_at)
        raise


def _detached(token: str, deadline_at: float) -> Flow[None]:
    """Try to end a worker by its token; a failure is not told, because the caller has other news to tell."""
    ask = calls.detach()
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
    ask = calls.heartbeat(*session.inventory())
    response, epoch = yield from attempts(session.link, ask)
    session.heard(ask.read(response).tolist(), response.newest_lease_id, epoch)


def detach(session: Session) -> Flow[int]:
    """End the worker; while the daemon is away, retry until it is back or the deadline is near.

    If the worker cannot be ended, the daemon keeps it and its leases until this process has ended; the log says so.
    """
    link = session.link
    link.check_process()
    if link.has_ended:
        if session.raises:
            link.check_attached()
        return 0
    # Set before the token is read: a thread that is attaching again either gives us the new token, or sees this and
    # detaches itself.
    link.is_detached = True
    ask = calls.detach()
    # Without an epoch, because the worker is to end in any life of the daemon.
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
    """Send a detach until it is answered or its deadline is near; if a retry finds no worker, an earlier try did it."""
    num_failures = 0
    while True:
        try:
            response: pb.DetachResponse = yield call
        except (UnavailableError, StartingError) as error:
            # After the first failure, retry at once: perhaps only a connection broke when the daemon restarted.
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
    # A daemon that does not answer may have ended, together with its memory; then it keeps blocks from nobody.
    if_there = "if it is still running, " if isinstance(error, UnavailableError) else ""
    _logger.warning(
        "worker %d of cache %r could not be detached: %sthe daemon gives its blocks to nobody else until it knows that "
        "process %d has ended, or until an operator says so with: kvlease detach %d%s (%s)",
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
    """A function that makes the answer that stands for a refusal, such as a reply's class."""

    def __call__(self, *, refusal: KVLeaseError) -> R_co:
        """Return an answer that says that nothing was done and, if it has a field for that, why."""


def not_there(*, refusal: KVLeaseError) -> bool:
    """Return False: the answer that stands for a refusal of a verb that tells whether there was something to end."""
    del refusal
    return False


def missed(session: Session, ask: Ask[R], idle: Idle[R]) -> Flow[R]:
    """Send a call that concerns no lease; a failure becomes a miss with its reason, unless errors are to be raised."""
    try:
        response, _ = yield from attempts(session.link, ask)
        return ask.read(response)
    except InvalidError:
        raise
    except KVLeaseError as error:
        if session.raises:
            raise
        return idle(refusal=error)
