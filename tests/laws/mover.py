"""The simulated movers: they copy marks at their own pace, and notice which slots were damaged."""

import numpy as np

from kvleased.core import commands
from kvleased.core.blocks.states import State
from kvleased.core.effects import Direction
from tests.laws import stores
from tests.laws.actors import ZERO, Job
from tests.laws.views import audit_shared
from tests.laws.world import World


def move(world: World, job: Job, pairs: int) -> None:
    """Let a mover carry out some pairs of a batch."""
    direction, sources, targets = job.copy.direction, job.sources, job.targets
    end = min(job.num_pairs, job.done + pairs)
    for at in range(job.done, end):
        if stores.is_of_store(job.copy):
            stores.carry_out(world, job, at)
        elif direction is Direction.SCRUB:
            world.device[targets[at]] = ZERO
        elif direction is Direction.OFFLOAD:
            world.host[targets[at]] = world.device[sources[at]]
            world.flipped.discard(targets[at])
        elif direction is Direction.DUPLICATE:
            world.device[targets[at]] = world.device[sources[at]]
        else:
            world.device[targets[at]] = world.host[sources[at]]
    job.done = end


def land(world: World, job: Job) -> None:
    """Let a mover finish a batch and say so."""
    move(world, job, job.num_pairs)
    del world.jobs[job.copy.copy_id]
    world.ended_copy = job.copy.copy_id
    if job.copy.direction is Direction.RELOAD:
        job.failed.update(at for at, slot in enumerate(job.sources) if slot in world.flipped)
    checksums = b""
    if job.copy.direction in (Direction.OFFLOAD, Direction.STORE):
        checksums = np.ones(job.num_pairs, np.uint64).tobytes()
    failed = tuple(sorted(job.failed))
    is_heeded = not job.is_lost and not job.is_of_other_disk
    world.send(commands.CopyDone(copy_id=job.copy.copy_id, checksums=checksums, failed=failed))
    if job.copy.direction is Direction.OFFLOAD:
        audit_shared(world)
    if is_heeded and job.copy.direction is Direction.LOAD:
        for at in failed:
            if world.records.disk.state[job.sources[at]] != State.BAD:
                world.fail(f"disk slot {job.sources[at]} was damaged and is still in use")
