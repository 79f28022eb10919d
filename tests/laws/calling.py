"""How a simulated worker makes one call: about a new request, or about a lease of its own."""

from typing import Final

from kvleased.core import commands
from tests.laws.actors import Held, Worker
from tests.laws.needs import room
from tests.laws.picks import pick_chain
from tests.laws.world import World
from tests.laws.writing import compute, keys_of

_UNHEARD: Final = 0.08
"""Share of the answers that do not reach their callers."""
_REPEATED: Final = 0.12
"""Share of the calls that are made twice."""
_ONE_IN_EXPLAINED: Final = 5
"""One in so many requests asks why its prefix was not longer."""
_RETAIN_SECONDS: Final = (0, 0, 5, 60)
_RETAIN_PRIORITIES: Final = (None, None, None, 0, 30, 50, 70, 100)


def call(world: World, worker: Worker, command: commands.Command, held: Held | None = None) -> None:
    """Let a worker call, perhaps twice, and perhaps without hearing the answer."""
    is_heard = world.rng.random() >= _UNHEARD
    world.faults["answer lost"] += not is_heard
    world.call(worker, command, held, is_heard=is_heard)
    if world.rng.random() < _REPEATED and (held is None or held.lease_id in worker.leases):
        world.faults["duplicate"] += 1
        world.call(worker, command, held)


def new_request(world: World, worker: Worker, wait_ms: int = 0) -> commands.Reserve:
    """Return a worker's request for the beginning of one of its tenant's documents, and some more tokens."""
    rng, hash_tokens = world.rng, world.shape.hash_tokens
    num_tokens = rng.randint(1, world.longest_tokens)
    keys = pick_chain(world, worker.tenant, rng.randint(0, -(-num_tokens // hash_tokens)))
    world.num_requests += 1
    return commands.Reserve(
        worker_id=worker.worker_id,
        request_id=f"r{world.num_requests}",
        keys=b"".join(keys),
        num_tokens=num_tokens,
        wait_ms=wait_ms,
        priority=rng.randint(0, 2) if world.uses_classes else 1,
        retain_seconds=rng.choice(_RETAIN_SECONDS) if world.uses_classes else 0,
        retain_priority=rng.choice(_RETAIN_PRIORITIES) if world.uses_classes else None,
        explain=world.num_requests % _ONE_IN_EXPLAINED == 0,
    )


def longer(world: World, held: Held, least: int = 0) -> int:
    """Return a number of tokens for a lease to cover, about as many as it does now or a few more."""
    now = min(room(world.shape.groups, held.ends), world.longest_tokens)
    return max(1, min(now + world.rng.randint(least, 6), world.longest_tokens))


def extend_one(world: World, worker: Worker, held: Held, wait_ms: int = 0) -> None:
    """Let a worker make a lease longer."""
    command = commands.Extend(
        worker_id=worker.worker_id,
        lease_id=held.lease_id,
        num_tokens=longer(world, held),
        wait_ms=wait_ms,
    )
    call(world, worker, command, held)


def commit_one(world: World, worker: Worker, held: Held) -> None:
    """Let a worker compute and commit as much as a lease has room for."""
    written = compute(world, worker, held)
    if written is None:
        return
    num_tokens, first = written
    command = commands.Commit(
        worker_id=worker.worker_id,
        lease_id=held.lease_id,
        num_tokens=num_tokens,
        first_block=first,
        keys=keys_of(world, held, num_tokens, first),
    )
    call(world, worker, command, held)


def release_one(world: World, worker: Worker, held: Held) -> None:
    """Let a worker forget a lease and say so, perhaps twice."""
    del worker.leases[held.lease_id]
    world.ended.append((worker.worker_id, held))
    command = commands.Release(worker_id=worker.worker_id, lease_id=held.lease_id)
    world.send(command)
    if world.rng.random() < 0.2:
        world.faults["duplicate"] += 1
        world.send(command)
