"""Own a scheduler step: what its columns did, or may have done, to the leases; retries are `flows`' business."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease._calling import calls, flows, verbs
from kvlease._calling.calls import Ask
from kvlease._calling.grants import Grant
from kvlease._calling.session import Added, Floor, Session
from kvlease.errors import (
    BY_NUMBER,
    InternalError,
    InvalidError,
    KVLeaseError,
    UnavailableError,
)
from kvlease.replies import ReserveSpec, StepColumns
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import error_from_proto

_INT32: Final = np.dtype("<i4")
_INT64: Final = np.dtype("<i8")
_EXTEND: Final[int] = pb.STEP_VERB_EXTEND
_COMMIT: Final[int] = pb.STEP_VERB_COMMIT
_RELEASE: Final[int] = pb.STEP_VERB_RELEASE
_COMMIT_BYTE: Final = bytes([_COMMIT])
_RELEASE_BYTE: Final = bytes([_RELEASE])
_BYTES_PER_BLOCK_ID: Final = _INT32.itemsize
_ONE: Final = np.array(1, _INT32).tobytes()


def step(
    session: Session, ask: Ask[pb.StepResponse], reserves: Sequence[ReserveSpec]
) -> flows.Flow[tuple[StepColumns, list[Grant]]]:
    """Carry out one scheduler step; if the step fails as a whole, every operation fails with that error."""
    request = ask.request
    assert isinstance(request, pb.StepRequest)
    # Without reserves no lease is on its way, so nothing is noted: steps are frequent.
    floor, deadline_at = None, 0.0
    if len(reserves):
        floor = Floor()
        deadline_at = session.link.clock() + session.link.deadline_seconds
    try:
        if _COMMIT_BYTE in request.verbs and (error := verbs.other_memory(session)):
            raise error
        if floor is not None:
            session.begin_reserve(floor)
        response, epoch = yield from flows.attempts(session.link, ask, deadline_at)
        columns = apply_step(session, request, response, epoch)
        grants: list[Grant] = []
        # Asking for the list's length costs less than beginning to iterate over it.
        if len(reserves) or len(response.reserves):
            answers = zip(reserves, response.reserves, strict=True)
            grants = yield from _all_granted(session, answers, epoch, deadline_at)
    except GeneratorExit:
        doubt_step(session, request, UnavailableError())
        raise
    except InvalidError:
        raise
    except KVLeaseError as error:
        columns = doubt_step(session, request, error)
        if session.raises:
            raise
        return columns, [session.fresh_grant(spec.request_id, error) for spec in reserves]
    finally:
        if floor is not None:
            session.end_reserve(floor)
    return columns, grants


def _all_granted(
    session: Session,
    answers: Iterable[tuple[ReserveSpec, pb.StepReserve]],
    epoch: int,
    deadline_at: float,
) -> flows.Flow[list[Grant]]:
    grants = []
    for spec, answer in answers:
        grants.append((yield from _granted(session, spec, answer, epoch, deadline_at)))
    return grants


def _granted(
    session: Session, spec: ReserveSpec, answer: pb.StepReserve, epoch: int, deadline_at: float
) -> flows.Flow[Grant]:
    """Take over the answer to one reserve of a step; if the lease cannot be used, reserve again in a separate call."""
    grant = session.fresh_grant(spec.request_id)
    if answer.WhichOneof("result") == "error":
        grant.refusal = error_from_proto(answer.error)
        return grant
    is_usable = verbs.other_memory(session) is None
    if is_usable and (entered := session.enter(grant, answer.granted, epoch)):
        return entered
    if session.is_leftover(answer.granted):
        ask = calls.release(answer.granted.lease_id)
        yield from flows.attempts(session.link, ask, deadline_at)
    ask_again = calls.reserve_of(spec, 0)
    return (yield from verbs.reserved(session, spec.request_id, ask_again, deadline_at))


def apply_step(
    session: Session, sent: pb.StepRequest, response: pb.StepResponse, epoch: int
) -> StepColumns:
    """Take over what the columns of a step did to leases, with a cost only for each lease that changed."""
    packed_codes, packed_ids, verbs = response.codes, response.block_ids, sent.verbs
    is_plain = session.has_plain_leases
    # Nearly always every operation was done, and comparing bytes is faster than searching an array.
    all_done = packed_codes == bytes(len(packed_codes))
    columns = StepColumns(
        codes=np.frombuffer(packed_codes, _INT32),
        num_blocks=_by_group(session, response.num_blocks),
        block_ids=np.frombuffer(packed_ids, _INT32),
        errors={} if all_done else _errors(response),
    )
    lease_ids = np.frombuffer(sent.lease_ids, _INT64)
    at = _changed(session, verbs, lease_ids, columns)
    if len(at):
        added: Iterable[Added]
        num_tokens = np.frombuffer(sent.num_tokens, _INT32)[at].tolist()
        extended = lease_ids[at].tolist()
        if is_plain:
            parts = _parts(packed_ids, columns.num_blocks[at])
            nothing: repeat[tuple[()]] = repeat(())
            added = zip(extended, parts, nothing, num_tokens, num_tokens, nothing, strict=False)
        else:
            by_lease = (
                extended,
                columns.num_blocks[at].reshape(len(at), -1).tolist(),
                num_tokens,
                _places_told(session, response.num_places, at),
            )
            added = _grouped_added(session, by_lease, packed_ids)
        session.extended(added, epoch)
    if not is_plain and _COMMIT_BYTE in verbs:
        for lease_id, tokens in _commits(sent, columns.codes == 0):
            if grant := session.grants.get(lease_id):
                session.computed(grant, tokens)
    if session.refused_in_steps or not all_done:
        _tell(session, lease_ids.tolist(), columns)
    if _RELEASE_BYTE in verbs:
        is_release = np.frombuffer(verbs, np.uint8) == _RELEASE
        _end_released(session, lease_ids[is_release & (columns.codes == 0)])
    return columns


def _errors(response: pb.StepResponse) -> dict[int, KVLeaseError]:
    return {one.index: error_from_proto(one.error) for one in response.errors}


def _parts(packed_ids: bytes, num_added: NDArray[np.int32]) -> list[bytes]:
    """Return the added blocks of each lease, for leases with one group that keeps everything."""
    if num_added.tobytes() == _ONE * len(num_added):
        # Requests that decode one token at a time get one block at a time.
        starts = range(0, len(packed_ids), _BYTES_PER_BLOCK_ID)
        return [packed_ids[start : start + _BYTES_PER_BLOCK_ID] for start in starts]
    ends = accumulate([added * _BYTES_PER_BLOCK_ID for added in num_added.tolist()], initial=0)
    return [packed_ids[begin:end] for begin, end in pairwise(ends)]


def _grouped_added(
    session: Session,
    by_lease: tuple[list[int], list[list[int]], list[int], list[list[int]]],
    packed_ids: bytes,
) -> list[Added]:
    """Return the added blocks of each lease, for leases with groups, whose windows bound what an extend covers.

    `by_lease` has the lease ids, how many blocks of each group they got, for how many tokens, and their groups' ends.
    """
    parts: list[Added] = []
    end = 0
    for lease_id, added, tokens, places in zip(*by_lease, strict=True):
        begin, end = end, end + sum(added) * _BYTES_PER_BLOCK_ID
        grant = session.grants.get(lease_id)
        covered = tokens if grant is None else grant.reach(tokens)
        parts.append((lease_id, packed_ids[begin:end], added, tokens, covered, places))
    return parts


def _places_told(session: Session, packed: bytes, at: NDArray[np.intp]) -> list[list[int]]:
    """Return the place at which each group's blocks end, for the operations at `at`; empty if the daemon told none."""
    if not packed:
        return [[]] * len(at)
    told: list[list[int]] = (
        np.frombuffer(packed, _INT32).reshape(-1, len(session.groups))[at].tolist()
    )
    return [one if any(one) else [] for one in told]


def _by_group(session: Session, packed: bytes) -> NDArray[np.int32]:
    """Return counts of blocks: [operations], or [operations, groups] if there are several groups."""
    counts = np.frombuffer(packed, _INT32)
    return counts if len(session.groups) == 1 else counts.reshape(-1, len(session.groups))


def _commits(sent: pb.StepRequest, is_wanted: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the lease and the computed tokens of each commit among the wanted operations."""
    at = (np.frombuffer(sent.verbs, np.uint8) == _COMMIT) & is_wanted
    lease_ids = np.frombuffer(sent.lease_ids, _INT64)[at].tolist()
    yield from zip(lease_ids, np.frombuffer(sent.num_tokens, _INT32)[at].tolist(), strict=True)


def _changed(
    session: Session, verbs: bytes, lease_ids: NDArray[np.int64], columns: StepColumns
) -> NDArray[np.intp]:
    """Return the operations that added blocks, and all extends done for doubtful leases, which are always checked."""
    changed: NDArray[np.intp]
    num_added: NDArray[np.signedinteger] = columns.num_blocks
    if num_added.ndim > 1:
        num_added = num_added.sum(axis=1)
    if session.doubtful:
        is_extended = (np.frombuffer(verbs, np.uint8) == _EXTEND) & (columns.codes == 0)
        is_doubtful = np.isin(lease_ids, list(session.doubtful))
        (changed,) = (is_extended & is_doubtful | (num_added != 0)).nonzero()
    else:
        (changed,) = num_added.nonzero()
    return changed


def doubt_step(session: Session, sent: pb.StepRequest, error: KVLeaseError) -> StepColumns:
    """Return the columns of a step that failed as a whole; released leases count as ended, extends as doubtful."""
    verbs = np.frombuffer(sent.verbs, np.uint8)
    lease_ids = np.frombuffer(sent.lease_ids, _INT64)
    session.doubtful.update(lease_ids[verbs == _EXTEND].tolist())
    for lease_id, tokens in _commits(sent, np.ones(len(verbs), np.bool_)):
        if grant := session.grants.get(lease_id):
            grant.give_back(tokens)
    for grant in filter(None, map(session.grants.get, lease_ids.tolist())):
        grant.refusal = error
        session.refused_in_steps.add(grant.lease_id)
    _end_released(session, lease_ids[verbs == _RELEASE])
    return StepColumns(
        codes=np.full(len(verbs), error.number, np.int32),
        num_blocks=_by_group(session, bytes(len(verbs) * len(session.groups) * _INT32.itemsize)),
        block_ids=np.zeros(0, np.int32),
        errors=dict.fromkeys(range(len(verbs)), error),
    )


def _tell(session: Session, lease_ids: list[int], columns: StepColumns) -> None:
    """Note for each lease why its last operation was refused, or that it was done; lose leases that the daemon lost."""
    for index, (lease_id, code) in enumerate(zip(lease_ids, columns.codes.tolist(), strict=True)):
        grant = session.grants.get(lease_id)
        if grant is None:
            continue
        if code:
            error = columns.errors.get(index) or BY_NUMBER.get(code, InternalError)()
            session.refused_in_steps.add(lease_id)
            session.refused(grant, error)
        elif lease_id in session.refused_in_steps:
            session.refused_in_steps.discard(lease_id)
            grant.refusal = None


def _end_released(session: Session, lease_ids: NDArray[np.int64]) -> None:
    ended = (session.grants.get(lease_id) for lease_id in lease_ids.tolist())
    session.released(*(grant for grant in ended if grant is not None))
