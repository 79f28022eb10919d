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
from kvleased.core.leases import Phase
from kvleased.core.requests import extend, reserve
from kvleased.core.state import CacheState

_NO_IDS: Final = b""


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
    codes, counts, blocks = [0] * len(verbs), [0] * len(verbs), []
    by_id, rows = state.leases.by_id, state.leases.rows
    tokens_per_block, key_at = state.shape.tokens_per_block, 0
    num_blocks = rows.num_blocks
    for at, verb in enumerate(verbs):
        lease = by_id.get(lease_ids[at])
        if (
            verb == StepVerb.EXTEND
            and lease is not None
            and lease.phase is Phase.ACTIVE
            and lease.worker_id == command.worker_id
            and 0 < num_tokens[at] <= num_blocks[lease.row] * tokens_per_block
        ):
            # What most operations of a step are: the lease covers the token already.
            continue
        key_end = key_at + num_keys[at] * BYTES_PER_KEY
        operation = (lease_ids[at], num_tokens[at], first_blocks[at], command.keys[key_at:key_end])
        key_at = key_end
        try:
            added = _carry_out(state, command.worker_id, verb, operation, now)
        except KVLeaseError as error:
            codes[at] = error.number
            continue
        counts[at] = len(added) // 4
        blocks.append(added)
    return Outcome(
        reply=Stepped(
            codes=np.array(codes, np.int32).tobytes(),
            num_blocks=np.array(counts, np.int32).tobytes(),
            block_ids=b"".join(blocks),
            reserves=tuple(_reserve(state, one, now) for one in command.reserves),
        )
    )


def _columns(command: Step) -> tuple[bytes, list[LeaseId], list[int], list[int], list[int]]:
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
    return command.verbs, [LeaseId(one) for one in lease_ids], num_tokens, num_keys, first_blocks


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
