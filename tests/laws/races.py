"""Two tiers that bring the same bytes at once, which happens by chance in only one of thousands of histories.

A call that a tier has failed does not join the copies of others from that tier. So it gets the bytes from the next tier
below, perhaps before the others do.
"""

from typing import Final

from kvleased.core import commands
from kvleased.core.effects import MOVER_OF
from tests.laws.actors import Job, Worker
from tests.laws.below import answer_one, mend
from tests.laws.calling import commit_one, release_one
from tests.laws.faults import bury_mover
from tests.laws.mover import land
from tests.laws.picks import pick_chain, pick_worker
from tests.laws.world import World

_ROUNDS_DOWN: Final = 4
"""Rounds of copies after which what was on the device is in the stores."""
_PATIENCE_MS: Final = 20_000
_LONG_CHAIN: Final = 4
_SHARE_BAD: Final = 0.3
"""Share of the copies from the next tier that also fail."""


def race(world: World) -> None:
    """Let two requests want bytes that are in several tiers: what the second one starts fails, and another helps."""
    worker = pick_worker(world)
    if worker is None:
        return
    mates = [one for one in world.workers.values() if one.tenant == worker.tenant]
    chain = _send_down(world, worker)
    if len(chain) < 2:
        return
    _ask(world, mates[0], chain[: world.rng.randint(1, len(chain) - 1)])
    before = set(world.jobs)
    _ask(world, mates[-1], chain)
    second = [job for at, job in world.jobs.items() if at not in before and not job.is_lost]
    if not second:
        return
    job, before = world.rng.choice(second), set(world.jobs)
    _end_badly(world, job)
    for copy_id in world.jobs.keys() - before:
        if copy_id in world.jobs and not world.jobs[copy_id].is_lost:
            if world.rng.random() < _SHARE_BAD:
                _end_badly(world, world.jobs[copy_id])
            else:
                land(world, world.jobs[copy_id])


def _end_badly(world: World, job: Job) -> None:
    """Let a copy fail, miss its deadline, or end with its mover."""
    kind = world.rng.choice(("copy_failed", "copy_failed", "copy_lost", "mover"))
    world.faults[kind] += 1
    if kind == "mover":
        bury_mover(world, MOVER_OF[job.copy.direction])
    elif kind == "copy_lost":
        job.is_lost = True
        world.send(commands.CopyLost(copy_id=job.copy.copy_id))
    else:
        del world.jobs[job.copy.copy_id]
        world.send(commands.CopyFailed(copy_id=job.copy.copy_id))


def _send_down(world: World, worker: Worker) -> list[bytes]:
    """Let a worker compute a request, and an operator move it down as far as it goes; return its keys."""
    mend(world)
    _end_leases(world)
    _ask(world, worker, pick_chain(world, worker.tenant, _LONG_CHAIN))
    for _ in range(_ROUNDS_DOWN):
        _land_all(world)
    keys: list[bytes] = []
    for held in [one for one in worker.leases.values() if not one.is_moving]:
        for _ in range(_ROUNDS_DOWN):
            if held.lease_id in worker.leases and not (held.is_moving or held.is_evicted):
                commit_one(world, worker, held)
        keys = held.keys[: held.computed // world.shape.hash_tokens]
    _end_leases(world)
    world.call(None, commands.Evict(num_blocks=world.shape.usable_blocks))
    for _ in range(_ROUNDS_DOWN):
        _land_all(world)
    return keys[:_LONG_CHAIN]


def _end_leases(world: World) -> None:
    """Let all awake workers end the leases that nothing is happening to."""
    for worker in world.workers.values():
        for held in [one for one in worker.leases.values() if not one.is_moving]:
            if held.lease_id in worker.leases and not worker.is_stalled:
                release_one(world, worker, held)


def _land_all(world: World) -> None:
    """Let the movers end all copies that somebody waits for."""
    for job in [one for one in world.jobs.values() if not one.is_lost]:
        if job.copy.copy_id in world.jobs:
            land(world, job)


def _ask(world: World, worker: Worker, chain: list[bytes]) -> None:
    """Let a worker ask for a chain, and the remote store say what it has of it."""
    world.num_requests += 1
    num_tokens = min(world.longest_tokens, len(chain) * world.shape.hash_tokens + 1)
    command = commands.Reserve(
        worker_id=worker.worker_id,
        request_id=f"r{world.num_requests}",
        keys=b"".join(chain[: num_tokens // world.shape.hash_tokens]),
        num_tokens=num_tokens,
        wait_ms=_PATIENCE_MS,
    )
    world.call(worker, command)
    for probe_id in list(world.stores.probes):
        answer_one(world, probe_id)
