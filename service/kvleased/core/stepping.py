"""Own the Step verb: the columns of one scheduler step, each operation of which succeeds alone or changes nothing."""

from collections.abc import Callable
from enum import IntEnum
from typing import Final

import numpy as np

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.ids import BYTES_PER_KEY, LeaseId, WorkerId
from kvleased.core.commands import Commit, Extend, Release, Reserve, Step
from kvleased.core.committing import commit
from kvleased.core.effects import Extended, Outcome, Reserved, Stepped
from kvleased.core.ending import release
from kvleased.core.leases import Lease, Phase
from kvleased.core.requests import extend, reserve
from kvleased.core.state import CacheState
from kvleased.core.states import Event

_NO_IDS: Final = b""
_EXTEND: Final = 1
_RELEASE: Final = 3


class StepVerb(IntEnum):
    """The operations of a step, numbered as in the protocol."""

    EXTEND = 1
    COMMIT = 2
    RELEASE = 3


_Operation = tuple[LeaseId, int, int, bytes]
"""Lease, token count, first block and keys of one operation."""


def step(state: CacheState, command: Step, now: float) -> Outcome:
    """Carry out the operations of a step in their order, then its reserves."""
    state.tenant_of(command.worker_id)
    verbs, lease_ids, num_tokens, num_keys, first_blocks = _columns(command)
    added = _extend_together(state, command.worker_id, verbs, lease_ids, num_tokens)
    codes, key_at = [0] * len(verbs), 0
    for at, verb in enumerate(verbs):
        key_end = key_at + num_keys[at] * BYTES_PER_KEY
        if added[at] is None:
            keys = command.keys[key_at:key_end]
            operation = (LeaseId(lease_ids[at]), num_tokens[at], first_blocks[at], keys)
            try:
                added[at] = _carry_out(state, command.worker_id, verb, operation, now)
            except KVLeaseError as error:
                codes[at] = error.number
        key_at = key_end
    return Outcome(
        reply=Stepped(
            codes=np.array(codes, np.int32).tobytes(),
            num_blocks=np.array([len(ids or _NO_IDS) // 4 for ids in added], np.int32).tobytes(),
            block_ids=b"".join(ids for ids in added if ids),
            reserves=tuple(_reserve(state, one, now) for one in command.reserves),
        )
    )


def _extend_together(
    state: CacheState,
    worker_id: WorkerId,
    verbs: bytes,
    lease_ids: list[int],
    num_tokens: list[int],
) -> list[bytes | None]:
    """Do the extends of a step that cannot fail: those covered already, and all others if there is room for all.

    Returns for each operation the ids that it added, or None where it is still to be done. Taking
    the blocks of all leases at once is what makes a step cheap.
    """
    added: list[bytes | None] = [None] * len(verbs)
    wanting: list[tuple[int, Lease, int]] = []
    by_id, active = state.leases.by_id, Phase.ACTIVE
    tokens_per_block, max_blocks = state.shape.tokens_per_block, state.shape.max_blocks_per_lease
    num_blocks = state.leases.rows.num_blocks.data
    # An extend of a lease that the same step releases is done, or refused, in its turn.
    ending = set[int]()
    if _RELEASE in verbs:
        ending.update(lease_ids[at] for at, verb in enumerate(verbs) if verb == _RELEASE)
    for at, verb in enumerate(verbs):
        lease = by_id.get(lease_ids[at])  # type: ignore[call-overload]  # as they came over the wire
        if verb != _EXTEND or lease is None or lease.phase is not active:
            continue
        if lease.lease_id in ending:
            continue
        needed = -(-num_tokens[at] // tokens_per_block)
        if lease.worker_id != worker_id or not 0 < needed <= max_blocks:
            continue
        missing = needed - num_blocks[lease.row]
        if missing <= 0:
            added[at] = _NO_IDS
        else:
            wanting.append((at, lease, missing))
    _grow(state, worker_id, wanting, num_tokens, added)
    return added


def _grow(
    state: CacheState,
    worker_id: WorkerId,
    wanting: list[tuple[int, Lease, int]],
    num_tokens: list[int],
    added: list[bytes | None],
) -> None:
    count = sum(missing for _, _, missing in wanting)
    is_apart = len({lease.lease_id for _, lease, _ in wanting}) == len(wanting)
    if not count or not is_apart or len(state.waiting):
        return
    tenant = state.workers[worker_id]
    fresh = state.device.suitable(count, tenant)
    if fresh is None:
        return
    state.device.take(fresh, Event.GRANT, tenant)
    start = 0
    for at, lease, missing in wanting:
        blocks = fresh[start : start + missing]
        state.leases.append(lease, blocks, num_tokens[at])
        added[at] = blocks.tobytes()
        start += missing


def _columns(command: Step) -> tuple[bytes, list[int], list[int], list[int], list[int]]:
    count = len(command.verbs)
    columns: list[list[int]] = []
    for name, dtype, packed, is_optional in (
        ("lease_ids", np.int64, command.lease_ids, False),
        ("num_tokens", np.int32, command.num_tokens, False),
        ("num_keys", np.int32, command.num_keys, True),
        ("first_blocks", np.int32, command.first_blocks, True),
    ):
        if is_optional and not packed:
            columns.append([0] * count)
            continue
        expected = count * np.dtype(dtype).itemsize
        if len(packed) != expected:
            msg = f"{name} has {len(packed)} bytes, but {count} verbs take {expected}"
            raise InvalidError(msg, resource=name, need=expected, available=len(packed))
        columns.append(np.frombuffer(packed, dtype).tolist())
    lease_ids, num_tokens, num_keys, first_blocks = columns
    named = sum(num_keys) * BYTES_PER_KEY
    if min(num_keys, default=0) < 0 or named != len(command.keys):
        msg = f"keys has {len(command.keys)} bytes, but num_keys adds up to {named}"
        raise InvalidError(msg, resource="keys", need=named, available=len(command.keys))
    return command.verbs, lease_ids, num_tokens, num_keys, first_blocks


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
