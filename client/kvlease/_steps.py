"""Own a scheduler step: what its columns did to the leases, or may have done; retries are the flows' business."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease import _calls, _flows
from kvlease._calls import Ask
from kvlease._session import Grant, Session
from kvlease.errors import (
    BY_NUMBER,
    InternalError,
    InvalidError,
    KVLeaseError,
    NotYoursError,
    StaleError,
    UnavailableError,
)
from kvlease.faults import error_from_proto
from kvlease.replies import ReserveSpec, StepColumns
from kvlease.v1 import kvlease_pb2 as pb


class Sent(NamedTuple):
    """The columns of one step as they were sent."""

    verbs: NDArray[np.uint8]
    lease_ids: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    reserves: Sequence[ReserveSpec]


def step(
    session: Session, ask: Ask[pb.StepResponse], reserves: Sequence[ReserveSpec]
) -> _flows.Flow[tuple[StepColumns, list[Grant]]]:
    """Carry out one scheduler step; where it is in doubt, every operation has failed with that error."""
    request = ask.request
    assert isinstance(request, pb.StepRequest)
    sent = Sent(
        np.frombuffer(request.verbs, "u1"),
        np.frombuffer(request.lease_ids, "<i8"),
        np.frombuffer(request.num_tokens, "<i4"),
        reserves,
    )
    floor = session.begin_reserve()
    try:
        response, epoch = yield from _flows.attempts(session.link, ask)
        columns = StepColumns(
            codes=np.frombuffer(response.codes, "<i4"),
            num_blocks=np.frombuffer(response.num_blocks, "<i4"),
            block_ids=np.frombuffer(response.block_ids, "<i4"),
        )
        apply_step(session, sent, columns, epoch)
        grants = []
        for spec, answer in zip(reserves, response.reserves, strict=True):
            grants.append((yield from _granted(session, spec, answer, (floor, epoch))))
    except GeneratorExit:
        doubt_step(session, sent, UnavailableError())
        raise
    except InvalidError:
        raise
    except KVLeaseError as error:
        columns = doubt_step(session, sent, error)
        if session.raises:
            raise
        return columns, [Grant(request_id=spec.request_id, refusal=error) for spec in reserves]
    finally:
        session.end_reserve(floor)
    return columns, grants


def _granted(
    session: Session, spec: ReserveSpec, answer: pb.StepReserve, since: tuple[int, int]
) -> _flows.Flow[Grant]:
    """Take over the answer to one reserve of a step; one that cannot be trusted is asked for again by itself."""
    grant = Grant(request_id=spec.request_id)
    if answer.WhichOneof("result") == "error":
        grant.refusal = error_from_proto(answer.error)
        return grant
    floor, epoch = since
    if session.is_leftover(answer.granted.lease_id, floor):
        yield from _flows.attempts(session.link, _calls.release(answer.granted.lease_id))
    elif entered := session.enter(grant, answer.granted, epoch):
        return entered
    return (yield from _flows.reserve(session, spec, 0))


def apply_step(session: Session, sent: Sent, columns: StepColumns, epoch: int) -> None:
    """Take over what the columns of a step did to leases; costs per lease only where something changed."""
    ends = np.cumsum(columns.num_blocks)
    checked = (
        np.flatnonzero(np.isin(sent.lease_ids, list(session.doubtful))) if session.doubtful else ()
    )
    for index in {*np.flatnonzero(columns.num_blocks).tolist(), *checked}:
        grant = session.grants.get(int(sent.lease_ids[index]))
        if (
            grant is not None
            and sent.verbs[index] == pb.STEP_VERB_EXTEND
            and not columns.codes[index]
        ):
            added = columns.block_ids[ends[index] - columns.num_blocks[index] : ends[index]]
            session.extended(grant, added, epoch, int(sent.num_tokens[index]))
    for index in np.flatnonzero(columns.codes).tolist():
        error = BY_NUMBER.get(int(columns.codes[index]), InternalError)
        grant = session.grants.get(int(sent.lease_ids[index]))
        if grant is not None and issubclass(error, StaleError | NotYoursError):
            session.refused(grant, error())
    _end_released(session, sent, columns.codes == 0)


def doubt_step(session: Session, sent: Sent, error: KVLeaseError) -> StepColumns:
    """Return the columns of a step that failed as a whole; released leases count as ended, extends as doubtful."""
    session.doubtful.update(sent.lease_ids[sent.verbs == pb.STEP_VERB_EXTEND].tolist())
    _end_released(session, sent, np.ones(len(sent.verbs), bool))
    none = np.zeros(0, np.int32)
    codes = np.full(len(sent.verbs), error.number, np.int32)
    return StepColumns(codes=codes, num_blocks=np.zeros(len(sent.verbs), np.int32), block_ids=none)


def _end_released(session: Session, sent: Sent, were_done: NDArray[np.bool_]) -> None:
    for lease_id in sent.lease_ids[(sent.verbs == pb.STEP_VERB_RELEASE) & were_done].tolist():
        if grant := session.grants.get(lease_id):
            session.released(grant)
