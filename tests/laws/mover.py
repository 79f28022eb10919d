"""The simulated mover: it copies marks at its own pace, and sees which slots were damaged."""

import numpy as np

from kvleased.core import commands
from kvleased.core.effects import Direction
from tests.laws.actors import ZERO, Job
from tests.laws.world import World


def move(world: World, job: Job, pairs: int) -> None:
    """Let the mover carry out some pairs of a batch."""
    copy = job.copy
    targets = np.frombuffer(copy.target_ids, np.int32).tolist()
    sources = np.frombuffer(copy.source_ids, np.int32).tolist()
    for at in range(job.done, min(len(targets), job.done + pairs)):
        if copy.direction is Direction.SCRUB:
            world.device[targets[at]] = ZERO
        elif copy.direction is Direction.OFFLOAD:
            world.host[targets[at]] = world.device[sources[at]]
            world.flipped.discard(targets[at])
        elif copy.direction is Direction.DUPLICATE:
            world.device[targets[at]] = world.device[sources[at]]
        else:
            world.device[targets[at]] = world.host[sources[at]]
    job.done = min(len(targets), job.done + pairs)


def land(world: World, job: Job) -> None:
    """Let the mover finish a batch and say so."""
    move(world, job, len(job.copy.target_ids))
    del world.jobs[job.copy.copy_id]
    world.ended_copy = job.copy.copy_id
    failed: tuple[int, ...] = ()
    if job.copy.direction is Direction.RELOAD:
        sources = np.frombuffer(job.copy.source_ids, np.int32).tolist()
        failed = tuple(at for at, slot in enumerate(sources) if slot in world.flipped)
    checksums = b""
    if job.copy.direction is Direction.OFFLOAD:
        checksums = np.ones(len(job.copy.target_ids) // 4, np.uint64).tobytes()
    world.send(commands.CopyDone(copy_id=job.copy.copy_id, checksums=checksums, failed=failed))
