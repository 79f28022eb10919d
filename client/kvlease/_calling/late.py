"""Own what is done about answers whose callers have gone: whatever the answers granted is given back."""

from collections.abc import Iterator

from kvlease._calling import calls, flows
from kvlease._calling.session import Session
from kvlease.transports.base import Outgoing
from kvlease.v1 import kvlease_pb2 as pb


def undoing(session: Session, reply: pb.Reply) -> Iterator[Outgoing]:
    """Yield the calls that give back what a reply grants to a worker, if its caller was cancelled or too late.

    If such a call is lost, it does no harm: heartbeats end leases that the worker does not know.
    """
    link = session.link
    if reply.epoch != link.epoch:
        return
    asks = [calls.release(one.lease_id) for one in _granted(reply) if session.gives_back(one)]
    if reply.pin.pin_id:
        asks.append(calls.unpin(reply.pin.pin_id))
    for ask in asks:
        deadline_at = link.clock() + link.deadline_seconds
        yield Outgoing(ask.verb, ask.request, deadline_at, link.token, link.epoch)


def disowning(session: Session) -> flows.Flow[None]:
    """Have the daemon end the leases that were granted by answers that never came.

    Leases granted while other reserves are on their way are left to later heartbeats.
    """
    newest = session.inventory()[1]
    yield from flows.heartbeat(session)
    # The first heartbeat tells how far the daemon has issued ids; only the next one can cover these ids.
    if session.inventory()[1] > newest:
        yield from flows.heartbeat(session)


def _granted(reply: pb.Reply) -> list[pb.ReserveResponse]:
    """Return the leases that a reply grants."""
    if reply.HasField("reserve"):
        return [reply.reserve]
    if reply.HasField("fork"):
        return [reply.fork.lease]
    reserves = reply.step.reserves
    return [one.granted for one in reserves if one.WhichOneof("result") == "granted"]
