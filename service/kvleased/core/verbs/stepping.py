"""Own the Step verb: the columns of one scheduler step, in which each operation succeeds alone or changes nothing."""

from collections.abc import Callable
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.groups import Counts
from kvlease.ids import BYTES_PER_KEY, LeaseId, WorkerId
from kvleased.core.admission.growing import grow
from kvleased.core.blocks.states import Event
from kvleased.core.commands import Commit, Extend, Release, Reserve, Step
from kvleased.core.effects import Extended, Outcome, Reserved, Stepped
from kvleased.core.frames import without_frames
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.reasons import Detail
from kvleased.core.state import CacheState, pack
from kvleased.core.tenancy.tenants import may_take_free
from kvleased.core.verbs.committing import commit
from kvleased.core.verbs.ending import release, settle
from kvleased.core.verbs.requests import extend, reserve
from kvleased.counted import counted

ERRORS_MAX: Final = 64
"""Refused operations for which a step's answer has more than the code."""

_NOTHING: Final = Extended(block_ids=b"", covered_tokens=0)
"""What a commit or a release adds."""
_BYTES_PER_NUMBER: Final = 4
"""Bytes of an int32 in a packed column; a lease id takes twice as many."""


class StepVerb(IntEnum):
    """The operations of a step, numbered as in the protocol."""

    EXTEND = 1
    COMMIT = 2
    RELEASE = 3


_BARE: Final[dict[int, str]] = {StepVerb.EXTEND: "an extend", StepVerb.RELEASE: "a release"}
"""The verbs that take neither keys nor a first block."""
_EXTEND: Final = bytes([StepVerb.EXTEND])
_EXTENDS: Final = np.array(StepVerb.EXTEND, np.uint8)
_ZERO: Final = np.array(0, np.int32)
_ONE: Final = np.array(1, np.int32)
"""0 and 1 as arrays: to compare a column with them, or subtract them, takes half the time that plain numbers take."""
_GRANT: Final = Event.GRANT

_NO_ENDS: Final = np.zeros(0, np.int32)

_Operation = tuple[LeaseId, int, int, bytes]
"""Lease, token count, first block and keys of one operation."""

_Results = tuple[NDArray[np.bool_], NDArray[np.int32], Ids, NDArray[np.int32]]
"""Which operations of a step are done, how many blocks each of them added in each group, these blocks in the order of
the operations, and the place at which each group's blocks end now: [operations, groups], 0 for what was not done, or
empty for a cache with one group that keeps everything."""


def step(state: CacheState, command: Step, now: float) -> Outcome:
    """Carry out the operations of a step in their order, then its reserves."""
    state.tenant_of(command.worker_id)
    _check_columns(command)
    results = _extend_together(state, command)
    is_done, counts, fresh, ends = results
    errors: list[tuple[int, KVLeaseError]] = []
    # Nearly always all of them are done; bytes are searched faster than an array.
    if b"\0" not in is_done.tobytes():
        codes, block_ids = bytes(_BYTES_PER_NUMBER * len(is_done)), pack(fresh)
    else:
        codes, block_ids = _one_by_one(state, command, now, results, errors)
    reserves = [_reserve(state, one, now) for one in command.reserves] if command.reserves else ()
    return Outcome(
        reply=Stepped(
            codes=codes,
            num_blocks=counts.tobytes(),
            block_ids=block_ids,
            reserves=tuple(reserves),
            errors=tuple(errors),
            num_places=ends.tobytes(),
        )
    )


def _extend_together(state: CacheState, command: Step) -> _Results:
    """Do the extends of a step that cannot fail: those covered already, and all others if there is room for all.

    A step is cheap because all leases are looked at together.
    """
    leases, worker_id = state.leases, command.worker_id
    named = leases.names.find(command.lease_ids, worker_id)
    rows = named.rows
    # Read as unsigned, a number of tokens below 1 also lies above the longest request.
    num_tokens = np.frombuffer(command.num_tokens, np.int32)
    last_tokens = num_tokens - _ONE
    is_done = last_tokens.view(np.uint32) < state.covering.longest_of_column
    # Nearly always all are extends of active leases.
    if command.verbs != _EXTEND * len(rows):
        is_done &= np.frombuffer(command.verbs, np.uint8) == _EXTENDS
    # An extend with keys or a first block is refused in its turn; without keys, num_keys is all zeros.
    if command.keys:
        is_done &= np.frombuffer(command.num_keys, np.int32) == _ZERO
    if command.first_blocks:
        is_done &= np.frombuffer(command.first_blocks, np.int32) == _ZERO
    if not named.are_active:
        is_done &= named.is_active
    # If some lease is named twice, every operation is carried out, or refused, in its turn.
    if not named.are_distinct:
        is_done[:] = False
    if not state.is_simple:
        return _grow_together(state, worker_id, num_tokens.astype(np.int64), rows, is_done)
    counts = np.zeros(len(rows), np.int32)
    behind = last_tokens // state.covering.block_of_column - leases.num_blocks[rows]
    wants = behind >= _ZERO
    wants &= is_done
    (at,) = wants.nonzero()
    fresh = NOWHERE
    if len(at):
        added = behind[at] + _ONE
        offered = _offered(state, worker_id, sum(added.tolist()))
        if offered is None:
            is_done[at] = False
        else:
            fresh = offered
            leases.append_many(rows[at], added, fresh, num_tokens[at])
            counts[at] = added
    return is_done, counts, fresh, _NO_ENDS


def _grow_together(
    state: CacheState,
    worker_id: WorkerId,
    num_tokens: Counts,
    rows: Ids,
    is_done: NDArray[np.bool_],
) -> _Results:
    """Do the same for a cache with several groups; the counts are [operations, groups]."""
    records = state.leases.rows
    ends = records.num_blocks[rows].astype(np.int64)
    begins, afters = state.covering.growth(
        records.num_computed[rows].astype(np.int64), num_tokens, ends
    )
    passed = state.covering.passed(records.num_tokens[rows].astype(np.int64), ends, afters)
    missing = afters - begins
    is_missing = missing.any(axis=1)
    num_blocks = int(missing[is_done].sum())
    if passed is not None:
        num_blocks -= int(passed[1][is_done].sum())
    fresh: Ids | None = NOWHERE
    if num_blocks:
        fresh = _offered(state, worker_id, num_blocks)
    if fresh is None:
        fresh = NOWHERE
        is_done &= ~is_missing
    missing[~is_done] = 0
    (at,) = is_done.nonzero()
    if len(at):
        fresh = grow(state.leases, rows[at], begins[at], afters[at], fresh, num_tokens[at])
    afters[~is_done] = 0
    return is_done, missing.astype(np.int32), fresh, afters.astype(np.int32)


def _offered(state: CacheState, worker_id: WorkerId, num_blocks: int) -> Ids | None:
    """Take blocks for a worker if so many are free and no call waits for them; None otherwise."""
    if state.waiting.by_ticket:
        return None
    tenant = state.workers[worker_id]
    if state.is_limited and not may_take_free(state, tenant, num_blocks):
        return None
    blocks = state.device.suitable(num_blocks, tenant)
    if blocks is not None:
        state.device.take(blocks, _GRANT, tenant)
    return blocks


def _one_by_one(
    state: CacheState,
    command: Step,
    now: float,
    results: _Results,
    errors: list[tuple[int, KVLeaseError]],
) -> tuple[bytes, bytes]:
    """Do the operations that are not done yet, one by one; return the codes and the ids of all blocks added.

    What was done is entered into `results`, and the first refusals into `errors`.
    """
    is_done, counts, fresh, ends = results
    codes = np.zeros(len(is_done), np.int32)
    pieces: list[bytes] = []
    lease_ids = np.frombuffer(command.lease_ids, np.int64)
    num_tokens = np.frombuffer(command.num_tokens, np.int32)
    no_numbers = bytes(_BYTES_PER_NUMBER * len(codes))
    num_keys = np.frombuffer(command.num_keys or no_numbers, np.int32)
    first_blocks = np.frombuffer(command.first_blocks or no_numbers, np.int32)
    key_ends = np.cumsum(num_keys) * BYTES_PER_KEY
    start = 0
    for at, done in enumerate(is_done.tolist()):
        if done:
            num_added = int(counts[at].sum())
            pieces.append(pack(fresh[start : start + num_added]))
            start += num_added
            continue
        key_end = int(key_ends[at])
        keys = command.keys[key_end - int(num_keys[at]) * BYTES_PER_KEY : key_end]
        lease_id = LeaseId(int(lease_ids[at]))
        operation = (lease_id, int(num_tokens[at]), int(first_blocks[at]), keys)
        state.detail = Detail.FIGURES if len(errors) < ERRORS_MAX else Detail.CODE
        try:
            verb = command.verbs[at]
            _check_bare(verb, operation, at)
            added = _carry_out(state, command.worker_id, verb, operation, now)
        except KVLeaseError as error:
            codes[at] = error.number
            if len(errors) < ERRORS_MAX:
                errors.append((at, without_frames(error)))
            state.counters[f"step_refused_{error.code}"] += 1
        else:
            counts[at] = _counts_of(added)
            pieces.append(added.block_ids)
            if added.num_places:
                ends[at] = np.frombuffer(added.num_places, np.int32)
        finally:
            state.detail = Detail.ALL
    return codes.tobytes(), b"".join(pieces)


def _counts_of(added: Extended) -> NDArray[np.int32] | int:
    if added.num_blocks:
        return np.frombuffer(added.num_blocks, np.int32)
    return len(added.block_ids) // _BYTES_PER_NUMBER


def _check_columns(command: Step) -> None:
    count = len(command.verbs)
    _check("lease_ids", command.lease_ids, 2 * _BYTES_PER_NUMBER, count)
    _check("num_tokens", command.num_tokens, _BYTES_PER_NUMBER, count)
    if command.first_blocks:
        _check("first_blocks", command.first_blocks, _BYTES_PER_NUMBER, count)
    if command.num_keys or command.keys:
        _check_keys(command, count)


def _check_keys(command: Step, count: int) -> None:
    named = 0
    if command.num_keys:
        _check("num_keys", command.num_keys, _BYTES_PER_NUMBER, count)
        num_keys = np.frombuffer(command.num_keys, np.int32)
        at = int(num_keys.argmin())
        if num_keys[at] < 0:
            msg = f"num_keys[{at}] is {num_keys[at]}; it must be at least 0"
            raise InvalidError(msg, resource=f"num_keys[{at}]", need=int(num_keys[at]))
        named = int(num_keys.sum())
    need = named * BYTES_PER_KEY
    if need != len(command.keys):
        msg = (
            f"keys has {len(command.keys)} bytes, but num_keys adds up to {counted(named, 'key')} of {BYTES_PER_KEY} "
            "bytes"
        )
        raise InvalidError(msg, resource="keys", need=need, available=len(command.keys))


def _check_bare(verb: int, operation: _Operation, at: int) -> None:
    """Refuse keys or a first block with a verb that does not take them and would ignore them."""
    _, _, first_block, keys = operation
    if not (keys or first_block) or verb not in _BARE:
        return
    column = f"num_keys[{at}]" if keys else f"first_blocks[{at}]"
    number = len(keys) // BYTES_PER_KEY if keys else first_block
    msg = f"{column} is {number}; {_BARE[verb]} uses none, only a commit does; send 0 there"
    raise InvalidError(msg, resource=column, need=number, limit=0)


def _check(name: str, packed: bytes, bytes_per_item: int, count: int) -> None:
    expected = count * bytes_per_item
    if len(packed) != expected:
        msg = f"{name} has {len(packed)} bytes, but {counted(count, 'verb', 'needs', 'need')} {expected}"
        raise InvalidError(msg, resource=name, need=expected, available=len(packed))


def _extend(state: CacheState, worker_id: WorkerId, operation: _Operation, now: float) -> Extended:
    lease_id, num_tokens, _, _ = operation
    command = Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=num_tokens)
    reply = extend(state, command, now).reply
    assert isinstance(reply, Extended), "a call that may not wait is answered"
    return reply


def _commit(state: CacheState, worker_id: WorkerId, operation: _Operation, now: float) -> Extended:
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
    return _NOTHING


def _release(state: CacheState, worker_id: WorkerId, operation: _Operation, now: float) -> Extended:
    release(state, Release(worker_id=worker_id, lease_id=operation[0]), now)
    settle(state)
    return _NOTHING


_OPERATIONS: Final[dict[int, Callable[[CacheState, WorkerId, _Operation, float], Extended]]] = {
    StepVerb.EXTEND: _extend,
    StepVerb.COMMIT: _commit,
    StepVerb.RELEASE: _release,
}


def _carry_out(
    state: CacheState, worker_id: WorkerId, verb: int, operation: _Operation, now: float
) -> Extended:
    carry_out = _OPERATIONS.get(verb)
    if carry_out is None:
        msg = f"verb {verb} is not one of {[int(verb) for verb in StepVerb]}"
        raise InvalidError(msg, resource="verbs", need=verb)
    return carry_out(state, worker_id, operation, now)


def _reserve(state: CacheState, command: Reserve, now: float) -> Reserved | KVLeaseError:
    try:
        reply = reserve(state, command, now).reply
    except KVLeaseError as error:
        return without_frames(error)
    assert isinstance(reply, Reserved), "a call that may not wait is answered"
    return reply
