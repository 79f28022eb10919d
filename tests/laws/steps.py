"""One scheduler step of a simulated worker: its columns, and a comparison of its answer with what the world knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvlease.errors import BY_NUMBER
from kvlease.ids import LeaseId
from kvleased.core import commands
from kvleased.core.effects import Outcome, Reserved, Stepped
from kvleased.core.verbs.stepping import StepVerb
from tests.laws import answers, sharing
from tests.laws.actors import Held, Worker
from tests.laws.answers import numbers
from tests.laws.holders import read_row
from tests.laws.world import World

_REFUSALS: Final = ("POOL_FULL", "NEVER_FITS")
_NOT_OURS: Final = ("UNKNOWN_LEASE", "NOT_YOURS")
_UNHEARD: Final = 0.06
"""Share of the answers that do not reach their callers."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step."""

    verb: StepVerb
    held: Held
    num_tokens: int = 0
    first_block: int = 0
    keys: bytes = b""


def take_step(
    world: World,
    worker: Worker,
    operations: Sequence[Operation],
    reserves: Sequence[commands.Reserve],
) -> None:
    """Let a worker send one step, and take its answer operation by operation.

    It forgets the leases that it releases before it sends the step, because others may have the blocks when the answer
    comes.
    """
    ending = {one.held.lease_id for one in operations if one.verb is StepVerb.RELEASE}
    for lease_id in ending:
        world.ended.append((worker.worker_id, worker.leases.pop(lease_id)))
    outcome = world.send(_columns(worker, operations, reserves))
    if not isinstance(outcome, Outcome) or not isinstance(outcome.reply, Stepped):
        world.fail("a step of an attached worker was refused whole")
        return
    if world.rng.random() < _UNHEARD:
        _miss(world, operations, ending)
    else:
        _take(world, worker, operations, reserves, outcome.reply)


def _miss(world: World, operations: Sequence[Operation], ending: set[LeaseId]) -> None:
    """Let a worker that heard no answer learn from the block table what became of the leases that it keeps."""
    world.faults["answer lost"] += 1
    for operation in operations:
        if operation.held.lease_id not in ending:
            read_row(world, operation.held)


def _take(
    world: World,
    worker: Worker,
    operations: Sequence[Operation],
    reserves: Sequence[commands.Reserve],
    reply: Stepped,
) -> None:
    blocks = numbers(reply.block_ids)
    num_groups = len(world.shape.groups)
    codes = numbers(reply.codes)
    counts = np.frombuffer(reply.num_blocks, np.int32).reshape(len(codes), num_groups).tolist()
    places = np.frombuffer(reply.num_places, np.int32).reshape(-1, num_groups).tolist()
    kept = worker.leases.keys()
    ended: set[LeaseId] = set()
    for at, (operation, code, added) in enumerate(zip(operations, codes, counts, strict=True)):
        held, lease_id, count = operation.held, operation.held.lease_id, sum(added)
        error = BY_NUMBER[code].code if code else ""
        _compare(world, operation, error, count, is_over=lease_id in ended)
        new, blocks = blocks[:count], blocks[count:]
        if operation.verb is StepVerb.RELEASE:
            ended.add(lease_id)
        elif lease_id in kept and operation.verb is StepVerb.COMMIT:
            answers.committed(world, held, operation.num_tokens, None)
        elif lease_id in kept and not error:
            if held.rank is None:
                answers.grow(world, worker, held, operation.num_tokens, (added, new))
                continue
            told = (added, new, places[at] if places else [])
            sharing.grow(world, worker, held, operation.num_tokens, told)
    if blocks:
        world.fail("a step added more blocks than its operations")
    for command, answer in zip(reserves, reply.reserves, strict=True):
        if isinstance(answer, Reserved):
            answers.granted(world, worker, command, answer)
        else:
            world.refused(worker, command, None, answer)


def _columns(
    worker: Worker, operations: Sequence[Operation], reserves: Sequence[commands.Reserve]
) -> commands.Step:
    return commands.Step(
        worker_id=worker.worker_id,
        verbs=bytes(one.verb for one in operations),
        lease_ids=np.array([one.held.lease_id for one in operations], np.int64).tobytes(),
        num_tokens=np.array([one.num_tokens for one in operations], np.int32).tobytes(),
        num_keys=np.array([len(one.keys) // 32 for one in operations], np.int32).tobytes(),
        first_blocks=np.array([one.first_block for one in operations], np.int32).tobytes(),
        keys=b"".join(one.keys for one in operations),
        reserves=tuple(reserves),
    )


def _compare(world: World, operation: Operation, error: str, count: int, *, is_over: bool) -> None:
    if operation.verb is not StepVerb.EXTEND:
        if count or error:
            world.fail(f"{operation.verb.name} added {count} blocks or was refused with {error!r}")
    elif is_over:
        # If ranks share the lease, the others may go on with it.
        expected = ("UNKNOWN_LEASE",) if operation.held.rank is None else _NOT_OURS
        if error not in expected or count:
            world.fail(f"a lease was extended by {count} blocks after its release")
    elif error:
        missing = sum(map(len, answers.missing(world, operation.held, operation.num_tokens)))
        if error not in _REFUSALS or not missing or count:
            world.fail(f"an extend by {missing} blocks was refused with {error}")
