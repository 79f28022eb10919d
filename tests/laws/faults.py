"""What can go wrong in the simulated world: copies, workers, the mover and the control process."""

from kvleased.core import commands
from tests.laws.picks import pick_lease, pick_worker
from tests.laws.world import World


def heartbeat(world: World) -> None:
    """Let every worker that is awake renew its leases."""
    for worker in world.workers.values():
        if not worker.is_stalled:
            world.beat(worker)


def fail_copy(world: World) -> None:
    """Let the mover give a copy up, and say so."""
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs:
        job = world.rng.choice(jobs)
        world.faults["copy_failed"] += 1
        del world.jobs[job.copy.copy_id]
        world.send(commands.CopyFailed(copy_id=job.copy.copy_id))


def lose_copy(world: World) -> None:
    """Let a copy not be answered in time; the mover may go on with it."""
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs:
        job = world.rng.choice(jobs)
        world.faults["copy_lost"] += 1
        job.is_lost = True
        world.send(commands.CopyLost(copy_id=job.copy.copy_id))


def end_lost_copy(world: World) -> None:
    """Let a copy end that was given up long ago."""
    lost = [job for job in world.jobs.values() if job.is_lost]
    if lost:
        world.land(world.rng.choice(lost))


def kill_mover(world: World) -> None:
    """Kill the mover in the middle of its copies."""
    world.faults["mover"] += 1
    for job in world.jobs.values():
        world.move(job, world.rng.randint(0, 2))
    world.jobs.clear()
    world.send(commands.MoverDied())


def flip(world: World) -> None:
    """Let a bit of a slot flip that no copy is touching."""
    world.faults["flip"] += 1
    slot = world.rng.randrange(world.shape.num_slots)
    busy = {target for job in world.jobs.values() for target in job.copy.target_ids}
    if slot not in busy and world.rng.random() < 0.2:
        world.flipped.add(slot)
        world.host[slot] = ("flipped", slot)


def stall(world: World) -> None:
    """Let a worker fall asleep, or wake up."""
    worker = world.rng.choice(list(world.workers.values()))
    if worker.is_stalled or world.rng.random() < 0.25:
        world.faults["stall"] += not worker.is_stalled
        worker.is_stalled = not worker.is_stalled


def oversleep(world: World) -> None:
    """One worker stalls for longer than its leases last; the others go on."""
    worker = pick_worker(world)
    if worker is None:
        return
    world.faults["stall"] += 1
    worker.is_stalled = True
    for _ in range(4):
        heartbeat(world)
        world.now += world.shape.lease_seconds / 3
        world.send(commands.Tick())
    worker.is_stalled = world.rng.random() < 0.5


def kill(world: World) -> None:
    """Kill a worker, and start another in its place; the core learns of it later."""
    if len(world.workers) > 1:
        worker = world.rng.choice(list(world.workers.values()))
        world.kill(worker)
        world.start_worker(worker.tenant)


def notice_death(world: World) -> None:
    """Tell the core of a death."""
    if world.dead_unknown:
        world.send(commands.WorkerDied(worker_id=world.dead_unknown.pop()))


def restart(world: World) -> None:
    """Kill the control process between two commands."""
    if world.rng.random() < 0.3:
        world.restart()


def crash(world: World) -> None:
    """Kill the control process somewhere in the middle of a command."""
    found = pick_lease(world)
    if found is None or world.rng.random() < 0.6:
        return
    worker, held = found
    worker_id, lease_id = worker.worker_id, held.lease_id
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs and world.rng.random() < 0.6:
        job = world.rng.choice(jobs)
        world.move(job, 10**6)
        checksums = b"\1\0\0\0\0\0\0\0" * (len(job.copy.target_ids) // 4)
        if world.flipped:
            return
        is_offload = job.copy.direction.value == "device_to_host"
        command: commands.Command = commands.CopyDone(
            copy_id=job.copy.copy_id, checksums=checksums if is_offload else b""
        )
    else:
        num_tokens = min(len(held.blocks) + 2, world.shape.table_width) * 4
        command = world.rng.choice(
            (
                commands.Reserve(worker_id=worker_id, request_id="crash", keys=b"", num_tokens=16),
                commands.Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=num_tokens),
                commands.Tick(),
                commands.Evict(num_blocks=3),
            )
        )
    world.crash_within(command, world.rng.randrange(160))
    # What a command in its middle had granted nobody has heard of; what it was doing to a lease may have happened.
    for worker in world.workers.values():
        for held in worker.leases.values():
            rows = world.records.rows
            at = [row for row in range(len(rows.lease_id)) if rows.lease_id[row] == held.lease_id]
            if at and not held.is_evicted and not held.is_moving:
                known = rows.block_ids[at[0], : rows.num_blocks[at[0], 0]].tolist()
                held.marks += [None] * (len(known) - len(held.blocks))
                held.blocks = known
