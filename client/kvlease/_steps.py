"""Own a scheduler step: what its columns did to the leases, or may have done; retries are the flows' business."""

from collections.abc import Sequence
from typing import Final

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

_INT32: Final = np.dtype("<i4")
_INT64: Final = np.dtype("<i8")
_EXTEND: Final[int] = pb.STEP_VERB_EXTEND
_RELEASE: Final[int] = pb.STEP_VERB_RELEASE
_RELEASE_BYTE: Final = bytes([_RELEASE])
_BYTES_PER_BLOCK_ID: Final = _INT32.itemsize


def step(
    session: Session, ask: Ask[pb.StepResponse], reserves: Sequence[ReserveSpec]
) -> _flows.Flow[tuple[StepColumns, list[Grant]]]:
    """Carry out one scheduler step; where it is in doubt, every operation has failed with that error."""
    request = ask.request
    assert isinstance(request, pb.StepRequest)
    floor = session.begin_reserve()
    try:
        response, epoch = yield from _flows.attempts(session.link, ask)
        columns = apply_step(session, request, response, epoch)
        grants = []
        for spec, answer in zip(reserves, response.reserves, strict=True):
            grants.append((yield from _granted(session, spec, answer, epoch)))
    except GeneratorExit:
        doubt_step(session, request, UnavailableError())
        raise
    except InvalidError:
        raise
    except KVLeaseError as error:
        columns = doubt_step(session, request, error)
        if session.raises:
            raise
        return columns, [Grant(request_id=spec.request_id, refusal=error) for spec in reserves]
    finally:
        session.end_reserve(floor)
    return columns, grants


def _granted(
    session: Session, spec: ReserveSpec, answer: pb.StepReserve, epoch: int
) -> _flows.Flow[Grant]:
    """Take over the answer to one reserve of a step; one that cannot be trusted is asked for again by itself."""
    grant = Grant(request_id=spec.request_id)
    if answer.WhichOneof("result") == "error":
        grant.refusal = error_from_proto(answer.error)
        return grant
    if entered := session.enter(grant, answer.granted, epoch):
        return entered
    if session.is_leftover(answer.granted.lease_id):
        yield from _flows.attempts(session.link, _calls.release(answer.granted.lease_id))
    return (yield from _flows.reserve(session, spec, 0))


def apply_step(
    session: Session, sent: pb.StepRequest, response: pb.StepResponse, epoch: int
) -> StepColumns:
    """Take over what the columns of a step did to leases; costs per lease only where something changed."""
    packed_codes, packed_ids, verbs = response.codes, response.block_ids, sent.verbs
    columns = StepColumns(
        codes=np.frombuffer(packed_codes, _INT32),
        num_blocks=np.frombuffer(response.num_blocks, _INT32),
        block_ids=np.frombuffer(packed_ids, _INT32),
    )
    lease_ids = np.frombuffer(sent.lease_ids, _INT64)
    # Nearly always every operation was done; bytes are compared faster than an array is searched.
    all_done = packed_codes == bytes(len(packed_codes))
    at = _changed(session, verbs, lease_ids, columns)
    if len(at):
        num_tokens = np.frombuffer(sent.num_tokens, _INT32)[at].tolist()
        num_blocks = columns.num_blocks[at].tolist()
        extended, end = [], 0
        for lease_id, added, tokens in zip(
            lease_ids[at].tolist(), num_blocks, num_tokens, strict=True
        ):
            begin, end = end, end + added * _BYTES_PER_BLOCK_ID
            extended.append((lease_id, packed_ids[begin:end], tokens))
        session.extended(extended, epoch)
    if not all_done:
        _end_refused(session, lease_ids.tolist(), columns.codes.tolist())
    if _RELEASE_BYTE in verbs:
        is_release = np.frombuffer(verbs, np.uint8) == _RELEASE
        _end_released(session, lease_ids[is_release & (columns.codes == 0)])
    return columns


def _changed(
    session: Session, verbs: bytes, lease_ids: NDArray[np.int64], columns: StepColumns
) -> NDArray[np.intp]:
    """Return where extends added blocks, and where they were done for doubtful leases, which are always checked."""
    changed: NDArray[np.intp]
    if session.doubtful:
        is_extended = (np.frombuffer(verbs, np.uint8) == _EXTEND) & (columns.codes == 0)
        is_doubtful = np.isin(lease_ids, list(session.doubtful))
        (changed,) = (is_extended & is_doubtful | (columns.num_blocks != 0)).nonzero()
    else:
        (changed,) = columns.num_blocks.nonzero()
    return changed


def doubt_step(session: Session, sent: pb.StepRequest, error: KVLeaseError) -> StepColumns:
    """Return the columns of a step that failed as a whole; released leases count as ended, extends as doubtful."""
    verbs = np.frombuffer(sent.verbs, np.uint8)
    lease_ids = np.frombuffer(sent.lease_ids, _INT64)
    session.doubtful.update(lease_ids[verbs == _EXTEND].tolist())
    _end_released(session, lease_ids[verbs == _RELEASE])
    return StepColumns(
        codes=np.full(len(verbs), error.number, np.int32),
        num_blocks=np.zeros(len(verbs), np.int32),
        block_ids=np.zeros(0, np.int32),
    )


def _end_refused(session: Session, lease_ids: list[int], codes: list[int]) -> None:
    for lease_id, code in zip(lease_ids, codes, strict=True):
        if not code:
            continue
        error = BY_NUMBER.get(code, InternalError)
        grant = session.grants.get(lease_id)
        if grant is not None and issubclass(error, StaleError | NotYoursError):
            session.refused(grant, error())


def _end_released(session: Session, lease_ids: NDArray[np.int64]) -> None:
    ended = (session.grants.get(lease_id) for lease_id in lease_ids.tolist())
    session.released(*(grant for grant in ended if grant is not None))
