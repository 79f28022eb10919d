"""Flows carried out by a script, with time passed in and nothing sent."""

from typing import Any, Final

import numpy as np

from kvlease._calling import flows, verbs
from kvlease._calling.grants import Grant
from kvlease._calling.link import Link
from kvlease._calling.session import Session
from kvlease.errors import KVLeaseError
from kvlease.plan import CachePlan
from kvlease.replies import ReserveSpec
from kvlease.transports.base import Attached, Outgoing
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import small_plan

SPEC: Final = ReserveSpec(request_id="r", num_tokens=16)


class Clock:
    """A clock that moves only in pauses."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Played:
    """A script that carries flows out: it answers each action in turn and keeps what was asked for."""

    def __init__(self, session: Session, clock: Clock, *script: Any) -> None:
        self.session, self.clock, self.script = session, clock, list(script)
        self.sent: list[Outgoing] = []
        self.attaches: list[pb.AttachRequest] = []
        self.pauses: list[float] = []

    def run(self, flow: Any) -> Any:
        """Carry out a flow and return its result."""
        try:
            action = next(flow)
            while True:
                answer = self._answer(action)
                action = (
                    flow.throw(answer) if isinstance(answer, KVLeaseError) else flow.send(answer)
                )
        except StopIteration as stop:
            return stop.value

    def _answer(self, action: Any) -> Any:
        if isinstance(action, flows.Pause):
            self.pauses.append(action.seconds)
            self.clock.now += action.seconds
            return None
        if isinstance(action, flows.Reattach):
            return self.run(flows.reattach(self.session, action.refused.deadline_at))
        if isinstance(action, flows.Attach):
            assert isinstance(action.call.request, pb.AttachRequest)
            self.attaches.append(action.call.request)
        else:
            self.sent.append(action)
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def session_of(clock: Clock, *, raises: bool, plan: CachePlan | None = None) -> Session:
    """Return an attached worker."""
    link = Link(deadline_seconds=5, clock=clock)
    session = Session(link, pb.AttachRequest(cache="demo"), raises=raises)
    session.adopt(Attached(attached(epoch=1, plan=plan), []), resumed=False)
    link.is_reached = True
    return session


def attached(
    *, epoch: int, lease_ids: tuple[int, ...] = (), plan: CachePlan | None = None
) -> pb.AttachResponse:
    """Return the answer to an attach."""
    return pb.AttachResponse(
        worker_id=7,
        token=f"token {epoch}",
        epoch=epoch,
        tenant_key=bytes(32),
        info=pb.CacheInfo(plan=(plan or small_plan()).to_proto()),
        lease_ids=np.array(lease_ids, "<i8").tobytes(),
    )


def granted(lease_id: int, *blocks: int) -> pb.ReserveResponse:
    """Return the answer to a reserve."""
    return pb.ReserveResponse(lease_id=lease_id, block_ids=ids(*(blocks or (0,))))


def ids(*blocks: int) -> bytes:
    """Pack block ids."""
    return np.array(blocks, "<i4").tobytes()


def leased(session: Session, clock: Clock, lease_id: int, *blocks: int) -> Grant:
    """Reserve a lease."""
    grant: Grant = Played(session, clock, granted(lease_id, *blocks)).run(
        verbs.reserve(session, SPEC, 0)
    )
    return grant
