"""Own the Step verb: the columns of one scheduler step, each operation of which succeeds alone or changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.ids import BYTES_PER_KEY, LeaseId, WorkerId
from kvleased.core.commands import Commit, Extend, Release, Reserve, Step
from kvleased.core.committing import commit
from kvleased.core.effects import Extended, Outcome, Reserved, Stepped
from kvleased.core.ending import release
from kvleased.core.leases import Phase
from kvleased.core.pool import Ids
from kvleased.core.requests import extend, reserve
from kvleased.core.state import CacheState, pack
from kvleased.core.states import Event

Number = TypeVar("Number", np.int32, np.int64)

_NO_IDS: Final = b""
_NOWHERE: Final[Ids] = np.empty(0, np.intp)
_ACTIVE: Final = int(Phase.ACTIVE)


class StepVerb(IntEnum):
    """The operations of a step, numbered as in the protocol."""

    EXTEND = 1
    COMMIT = 2
    RELEASE = 3


_EXTEND: Final = int(StepVerb.EXTEND)

_Operation = tuple[LeaseId, int, int, bytes]
"""Lease, token count, first block and keys of one operation."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """The operations of a step, one entry each."""

    verbs: NDArray[np.uint8]
    lease_ids: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    num_keys: NDArray[np.int32]
    first_blocks: NDArray[np.int32]


def step(state: CacheState, command: Step, now: float) -> Outcome:
    """Carry out the operations of a step in their order, then its reserves."""
    state.tenant_of(command.worker_id)
    columns = _columns(command)
    codes = np.zeros(len(columns.verbs), np.int32)
    is_done, counts, fresh = _extend_together(state, command.worker_id, columns)
    if is_done.all():
        block_ids = pack(fresh)
    else:
        block_ids = _one_by_one(state, command, now, (columns, is_done, codes, counts, fresh))
    return Outcome(
        reply=Stepped(
            codes=codes.tobytes(),
            num_blocks=counts.tobytes(),
            block_ids=block_ids,
            reserves=tuple(_reserve(state, one, now) for one in command.reserves),
        )
    )


def _extend_together(
    state: CacheState, worker_id: WorkerId, columns: _Columns
) -> tuple[NDArray[np.bool_], NDArray[np.int32], Ids]:
    """Do the extends of a step that cannot fail: those covered already, and all others if there is room for all.

    Returns which operations are done, how many blocks each added, and these blocks in the order of
    the operations. Looking at all leases at once is what makes a step cheap.
    """
    rows, row_of = state.leases.rows, state.leases.row_of
    lease_ids = columns.lease_ids.tolist()
    found = np.array([row_of.get(lease_id, -1) for lease_id in lease_ids], np.intp)
    needed = -(-columns.num_tokens // state.shape.tokens_per_block)
    is_sound = (
        (columns.verbs == _EXTEND)
        & (found >= 0)
        & (rows.worker_id[found] == worker_id)
        & (rows.phase[found] == _ACTIVE)
        & (needed > 0)
        & (needed <= state.shape.max_blocks_per_lease)
    )
    missing = needed - rows.num_blocks[found]
    is_done = is_sound & (missing <= 0)
    wants = is_sound & (missing > 0)
    counts = np.zeros(len(lease_ids), np.int32)
    fresh = _NOWHERE
    # An extend of a lease of which the step says more than that is done, or refused, in its turn.
    if len(set(lease_ids)) < len(lease_ids):
        is_done[:] = wants[:] = False
    if wants.any() and not len(state.waiting):
        tenant = state.workers[worker_id]
        offered = state.device.suitable(int(missing[wants].sum()), tenant)
        if offered is not None:
            fresh = offered
            state.device.take(fresh, Event.GRANT, tenant)
            state.leases.append_many(found[wants], missing[wants], fresh, columns.num_tokens[wants])
            counts[wants] = missing[wants]
            is_done |= wants
    return is_done, counts, fresh


def _one_by_one(
    state: CacheState,
    command: Step,
    now: float,
    results: tuple[_Columns, NDArray[np.bool_], NDArray[np.int32], NDArray[np.int32], Ids],
) -> bytes:
    """Do what is not done yet, each operation in its turn; returns the ids of all blocks that were added."""
    columns, is_done, codes, counts, fresh = results
    pieces: list[bytes] = []
    key_ends = np.cumsum(columns.num_keys) * BYTES_PER_KEY
    start = 0
    for at, done in enumerate(is_done.tolist()):
        if done:
            pieces.append(pack(fresh[start : start + counts[at]]))
            start += int(counts[at])
            continue
        key_end = int(key_ends[at])
        keys = command.keys[key_end - int(columns.num_keys[at]) * BYTES_PER_KEY : key_end]
        lease_id = LeaseId(int(columns.lease_ids[at]))
        operation = (lease_id, int(columns.num_tokens[at]), int(columns.first_blocks[at]), keys)
        try:
            added = _carry_out(state, command.worker_id, int(columns.verbs[at]), operation, now)
        except KVLeaseError as error:
            codes[at] = error.number
        else:
            counts[at] = len(added) // 4
            pieces.append(added)
    return b"".join(pieces)


def _columns(command: Step) -> _Columns:
    count = len(command.verbs)
    num_keys = _column("num_keys", np.int32, command.num_keys or bytes(4 * count), count)
    first_blocks = _column(
        "first_blocks", np.int32, command.first_blocks or bytes(4 * count), count
    )
    named = int(num_keys.sum()) * BYTES_PER_KEY if command.num_keys else 0
    if named != len(command.keys) or (command.num_keys and num_keys.min() < 0):
        msg = f"keys has {len(command.keys)} bytes, but num_keys adds up to {named}"
        raise InvalidError(msg, resource="keys", need=named, available=len(command.keys))
    return _Columns(
        np.frombuffer(command.verbs, np.uint8),
        _column("lease_ids", np.int64, command.lease_ids, count),
        _column("num_tokens", np.int32, command.num_tokens, count),
        num_keys,
        first_blocks,
    )


def _column(name: str, dtype: type[Number], packed: bytes, count: int) -> NDArray[Number]:
    expected = count * np.dtype(dtype).itemsize
    if len(packed) != expected:
        msg = f"{name} has {len(packed)} bytes, but {count} verbs take {expected}"
        raise InvalidError(msg, resource=name, need=expected, available=len(packed))
    return np.frombuffer(packed, dtype)


def _extend(state: CacheState, worker_id: WorkerId, operation: _Operation, now: float) -> bytes:
    lease_id, num_tokens, _, _ = operation
    reply = extend(
        state, Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=num_tokens), now
    ).reply
    assert isinstance(reply, Extended), "a call that may not wait is answered"
    return reply.block_ids


def _commit(state: CacheState, worker_id: WorkerId, operation: _Operation, now: float) -> bytes:
    lease_id, num_tokens, first_block, keys = operation
    commit(
        state,
        Commit(
            worker_id=worker_id,
            lease_id=lease_id,
            num_tokens=num_tokens,
            first_block=first_block,
            keys=keys,
        ),
        now,
    )
    return _NO_IDS


def _release(state: CacheState, worker_id: WorkerId, operation: _Operation, now: float) -> bytes:
    release(state, Release(worker_id=worker_id, lease_id=operation[0]), now)
    return _NO_IDS


_OPERATIONS: Final[dict[int, Callable[[CacheState, WorkerId, _Operation, float], bytes]]] = {
    StepVerb.EXTEND: _extend,
    StepVerb.COMMIT: _commit,
    StepVerb.RELEASE: _release,
}


def _carry_out(
    state: CacheState, worker_id: WorkerId, verb: int, operation: _Operation, now: float
) -> bytes:
    carry_out = _OPERATIONS.get(verb)
    if carry_out is None:
        msg = f"verb {verb} is none of {[int(verb) for verb in StepVerb]}"
        raise InvalidError(msg)
    return carry_out(state, worker_id, operation, now)


def _reserve(state: CacheState, command: Reserve, now: float) -> Reserved | KVLeaseError:
    try:
        reply = reserve(state, command, now).reply
    except KVLeaseError as error:
        return error
    assert isinstance(reply, Reserved), "a call that may not wait is answered"
    return reply
