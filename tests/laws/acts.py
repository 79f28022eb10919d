"""What can happen in the simulated world, as a table of acts with weights; `live` draws from it."""

from collections.abc import Callable

from kvlease.errors import NotYoursError, UnknownLeaseError
from kvleased.core import commands
from kvleased.core.stepping import StepVerb
from tests.laws.steps import Operation, take_step
from tests.laws.views import audit, compare_lookup, compare_map, read_table
from tests.laws.world import Held, Worker, World, key_of

_DOCUMENTS = 3
_KEEP_ALIVE_SECONDS = 8.0
_EAGERNESS = 0.2


def live(world: World, steps: int) -> None:
    """Let the world live for some steps, then heal it."""
    acts = [act for act, weight in ACTS.items() for _ in range(weight)]
    for _ in range(steps):
        world.rng.choice(acts)(world)
        if world.rng.random() < _EAGERNESS:
            world.learn()
    world.heal()


def _worker(world: World) -> Worker | None:
    awake = [worker for worker in world.workers.values() if not worker.is_stalled]
    return world.rng.choice(awake) if awake else None


def _lease(world: World, *, evicted: bool | None = False) -> tuple[Worker, Held] | None:
    found = [
        (worker, held)
        for worker in world.workers.values()
        if not worker.is_stalled
        for held in worker.leases.values()
        if not held.is_moving and (evicted is None or held.is_evicted is evicted)
    ]
    return world.rng.choice(found) if found else None


def _is_waited_for(world: World, held: Held) -> bool:
    """Tell whether a call about a lease is still to be answered, which may change it at any time."""
    return any(other is held for _, _, other in world.calls.values())


def _chain(world: World, tenant: int, num_blocks: int) -> list[bytes]:
    document = world.rng.randrange(_DOCUMENTS)
    fork = world.rng.randint(0, num_blocks)
    branch = world.rng.randrange(3)
    tokens = [
        document * 1000 + at + (100 * branch if at >= fork else 0) for at in range(num_blocks)
    ]
    keys = [key_of(tenant, tuple(tokens[: at + 1])) for at in range(num_blocks)]
    world._known_keys.update((tenant, key) for key in keys)
    return keys


def _reserve(world: World) -> None:
    worker = _worker(world)
    if worker is None:
        return
    command = _new_request(world, worker, world.rng.choice((0, 500, 20_000)))
    world.call(worker, command)
    if world.rng.random() < 0.1:
        world.faults["duplicate"] += 1
        world.call(worker, command)


def _new_request(world: World, worker: Worker, wait_ms: int = 0) -> commands.Reserve:
    num_blocks = world.rng.randint(1, world.shape.max_blocks_per_lease)
    keys = _chain(world, worker.tenant, world.rng.randint(0, num_blocks))
    world.seen["requests"] += 1
    return commands.Reserve(
        worker_id=worker.worker_id,
        request_id=f"r{world.seen['requests']}",
        keys=b"".join(keys),
        num_tokens=num_blocks * world.shape.tokens_per_block - world.rng.randint(0, 3),
        wait_ms=wait_ms,
    )


def _step(world: World) -> None:
    """A worker's scheduler takes one step over some of its leases, and asks for new ones in the same call."""
    worker = _worker(world)
    if worker is None:
        return
    leases = [
        held
        for held in worker.leases.values()
        if not held.is_moving and not held.is_evicted and not _is_waited_for(world, held)
    ]
    operations: list[Operation] = []
    for held in world.rng.sample(leases, world.rng.randint(0, min(4, len(leases)))):
        operations += _operations(world, worker, held)
    take_step(
        world,
        worker,
        operations,
        [_new_request(world, worker) for _ in range(world.rng.choice((0, 0, 1, 2)))],
    )


def _operations(world: World, worker: Worker, held: Held) -> list[Operation]:
    """Return what a step does with one lease: mostly it grows by a token; in the end, it is committed and released."""
    tokens_per_block = world.shape.tokens_per_block
    limit = world.shape.max_blocks_per_lease * tokens_per_block
    num_tokens = len(held.blocks) * tokens_per_block + world.rng.randint(-3, 6)
    extend = Operation(StepVerb.EXTEND, held, min(num_tokens, limit))
    release = Operation(StepVerb.RELEASE, held)
    commit = _write(world, worker, held)
    kind = world.rng.choice(("extend", "extend", "extend", "commit", "end", "too late"))
    if kind == "extend":
        return [extend]
    if kind == "too late":
        return [release, extend]
    committing = []
    if commit is not None:
        first, last = commit
        keys = b"".join(held.keys[first:last])
        committing = [Operation(StepVerb.COMMIT, held, last * tokens_per_block, first, keys)]
    return [*committing, extend] if kind == "commit" else [*committing, release]


def _extend(world: World) -> None:
    found = _lease(world)
    if found is None:
        return
    worker, held = found
    num_tokens = len(held.blocks) * world.shape.tokens_per_block + world.rng.randint(1, 6)
    if num_tokens > world.shape.max_blocks_per_lease * world.shape.tokens_per_block:
        return
    world.call(
        worker,
        commands.Extend(
            worker_id=worker.worker_id,
            lease_id=held.lease_id,
            num_tokens=num_tokens,
            wait_ms=world.rng.choice((0, 2000)),
        ),
        held,
    )


def _commit(world: World) -> None:
    found = _lease(world)
    if found is None:
        return
    worker, held = found
    written = _write(world, worker, held)
    if written is None:
        return
    first, last = written
    world.call(
        worker,
        commands.Commit(
            worker_id=worker.worker_id,
            lease_id=held.lease_id,
            num_tokens=last * world.shape.tokens_per_block,
            first_block=first,
            keys=b"".join(held.keys[first:last]),
        ),
        held,
    )


def _write(world: World, worker: Worker, held: Held) -> tuple[int, int] | None:
    """Let a worker fill its private blocks, and return the first and the end of those to commit."""
    first = next(
        (at for at, mark in enumerate(held.marks) if mark is None or mark[0] != "key"), None
    )
    if first is None or first >= len(held.blocks):
        return None
    for at in range(first, len(held.blocks)):
        if at >= len(held.keys):
            parent = held.keys[-1] if held.keys else b"root" + held.request_id.encode()
            key = key_of(worker.tenant, (int.from_bytes(parent[:6], "little"), at))
            held.keys.append(key)
            world._known_keys.add((worker.tenant, key))
        world.write(worker, held, at, ("key", held.keys[at]))
    return first, world.rng.randint(first + 1, len(held.blocks))


def _scribble(world: World) -> None:
    """A worker, also a stalled one, writes its private blocks whenever it likes."""
    found = [
        (worker, held)
        for worker in world.workers.values()
        for held in worker.leases.values()
        if not held.is_evicted and not held.is_moving
    ]
    if not found:
        return
    worker, held = world.rng.choice(found)
    for at, mark in enumerate(held.marks):
        if mark is None or mark[0] == "private":
            world.write(worker, held, at, ("private", worker.tenant, held.lease_id, at, world.now))


def _verify(world: World) -> None:
    for worker in world.workers.values():
        for held in worker.leases.values():
            world.verify(held)


def _audit(world: World) -> None:
    audit(world)
    read_table(world)


def _map(world: World) -> None:
    found = _lease(world)
    if found is not None and not _is_waited_for(world, found[1]):
        compare_map(world, *found)


def _lookup(world: World) -> None:
    worker = _worker(world)
    if worker is None:
        return
    keys = _chain(world, worker.tenant, 6)
    if worker.leases and world.rng.random() < 0.5:
        keys = world.rng.choice(list(worker.leases.values())).keys
    compare_lookup(world, worker, keys)


def _release(world: World) -> None:
    found = _lease(world, evicted=None)
    if found is None:
        return
    worker, held = found
    del worker.leases[held.lease_id]
    world.ended.append((worker.worker_id, held))
    command = commands.Release(worker_id=worker.worker_id, lease_id=held.lease_id)
    world.send(command)
    if world.rng.random() < 0.2:
        world.faults["duplicate"] += 1
        world.send(command)


def _stale(world: World) -> None:
    """A worker speaks of a lease that it has released: nothing may come of it."""
    if not world.ended:
        return
    worker_id, held = world.rng.choice(world.ended)
    if worker_id not in world.workers or not held.keys:
        return
    world.faults["stale"] += 1
    late = commands.Commit(
        worker_id=worker_id,
        lease_id=held.lease_id,
        num_tokens=len(held.blocks) * world.shape.tokens_per_block,
        first_block=0,
        keys=b"".join(held.keys[: len(held.blocks)]),
    )
    if not isinstance(world.send(late), UnknownLeaseError):
        world.fail("a commit of a released lease was not refused as such")


def _foreign(world: World) -> None:
    """A worker speaks of another worker's lease: nothing may come of it."""
    found = _lease(world)
    others = [worker for worker in world.workers.values() if found and worker is not found[0]]
    if found is None or not others:
        return
    world.faults["foreign"] += 1
    worker_id, lease_id = world.rng.choice(others).worker_id, found[1].lease_id
    command = world.rng.choice(
        (
            commands.Release(worker_id=worker_id, lease_id=lease_id),
            commands.Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=40),
            commands.Evict(worker_id=worker_id, lease_id=lease_id),
        )
    )
    if not isinstance(world.send(command), NotYoursError):
        world.fail("a command about another worker's lease was not refused as such")


def _evict(world: World) -> None:
    found = _lease(world)
    if found is None:
        return
    worker, held = found
    world.call(worker, commands.Evict(worker_id=worker.worker_id, lease_id=held.lease_id), held)


def _reload(world: World) -> None:
    found = _lease(world, evicted=True)
    if found is None:
        return
    worker, held = found
    world.call(
        worker,
        commands.Reload(
            worker_id=worker.worker_id,
            lease_id=held.lease_id,
            wait_ms=world.rng.choice((500, 20_000)),
        ),
        held,
    )


def _evict_cached(world: World) -> None:
    world.send(commands.Evict(num_blocks=world.rng.randint(1, 6)))


def _reload_cached(world: World) -> None:
    worker = _worker(world)
    if worker is not None:
        keys = b"".join(_chain(world, worker.tenant, world.rng.randint(1, 6)))
        world.send(commands.Reload(worker_id=worker.worker_id, keys=keys))


def _pin(world: World) -> None:
    worker = _worker(world)
    if world.pins and world.rng.random() < 0.6:
        world.send(commands.Unpin(pin_id=world.pins.pop()))
    elif worker is not None:
        outcome = world.send(commands.Pin(keys=b"".join(_chain(world, worker.tenant, 3))))
        pin_id = getattr(getattr(outcome, "reply", None), "pin_id", None)
        if pin_id is not None:
            world.pins.append(pin_id)


def _heartbeat(world: World) -> None:
    for worker in world.workers.values():
        if not worker.is_stalled:
            world.send(
                commands.Heartbeat(
                    worker_id=worker.worker_id,
                    lease_ids=tuple(worker.leases),
                    newest_lease_id=worker.newest_lease_id,
                )
            )


def _time(world: World) -> None:
    world.now += world.rng.random() * _KEEP_ALIVE_SECONDS
    world.send(commands.Tick())


def _move(world: World) -> None:
    if world.jobs:
        world.move(world.rng.choice(list(world.jobs.values())), world.rng.randint(1, 3))


def _land(world: World) -> None:
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs:
        world.land(world.rng.choice(jobs))


def _fail_copy(world: World) -> None:
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs:
        job = world.rng.choice(jobs)
        world.faults["copy_failed"] += 1
        del world.jobs[job.copy.copy_id]
        world.send(commands.CopyFailed(copy_id=job.copy.copy_id))


def _lose_copy(world: World) -> None:
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs:
        job = world.rng.choice(jobs)
        world.faults["copy_lost"] += 1
        job.is_lost = True
        world.send(commands.CopyLost(copy_id=job.copy.copy_id))


def _late_copy(world: World) -> None:
    lost = [job for job in world.jobs.values() if job.is_lost]
    if lost:
        world.land(world.rng.choice(lost))


def _kill_mover(world: World) -> None:
    world.faults["mover"] += 1
    for job in world.jobs.values():
        world.move(job, world.rng.randint(0, 2))
    world.jobs.clear()
    world.send(commands.MoverDied())


def _flip(world: World) -> None:
    world.faults["flip"] += 1
    slot = world.rng.randrange(world.shape.num_slots)
    busy = {target for job in world.jobs.values() for target in job.copy.target_ids}
    if slot not in busy and world.rng.random() < 0.2:
        world.flipped.add(slot)
        world.host[slot] = ("flipped", slot)


def _stall(world: World) -> None:
    worker = world.rng.choice(list(world.workers.values()))
    if worker.is_stalled or world.rng.random() < 0.25:
        world.faults["stall"] += not worker.is_stalled
        worker.is_stalled = not worker.is_stalled


def _oversleep(world: World) -> None:
    """One worker stalls for longer than its leases last; the others go on."""
    worker = _worker(world)
    if worker is None:
        return
    world.faults["stall"] += 1
    worker.is_stalled = True
    for _ in range(4):
        _heartbeat(world)
        world.now += world.shape.lease_seconds / 3
        world.send(commands.Tick())
    worker.is_stalled = world.rng.random() < 0.5


def _kill(world: World) -> None:
    if len(world.workers) > 1:
        worker = world.rng.choice(list(world.workers.values()))
        world.kill(worker)
        world.start_worker(worker.tenant)


def _notice_death(world: World) -> None:
    if world.dead_unknown:
        world.send(commands.WorkerDied(worker_id=world.dead_unknown.pop()))


def _cancel(world: World) -> None:
    calls = [ticket for ticket, (_, _, held) in world.calls.items() if held is None]
    if calls:
        ticket = world.rng.choice(calls)
        world.faults["cancel"] += 1
        del world.calls[ticket]
        world.send(commands.Cancel(ticket=ticket))


def _restart(world: World) -> None:
    if world.rng.random() < 0.3:
        world.restart()


def _crash(world: World) -> None:
    """Kill the control process somewhere in the middle of a command."""
    found = _lease(world)
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
        num_tokens = min(len(held.blocks) + 2, world.shape.max_blocks_per_lease) * 4
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
                known = rows.block_ids[at[0], : rows.num_blocks[at[0]]].tolist()
                held.marks += [None] * (len(known) - len(held.blocks))
                held.blocks = known


ACTS: dict[Callable[[World], None], int] = {
    _reserve: 26,
    _step: 12,
    _extend: 10,
    _commit: 16,
    _scribble: 8,
    _verify: 4,
    _audit: 2,
    _map: 3,
    _lookup: 3,
    _release: 12,
    _stale: 3,
    _foreign: 2,
    _evict: 6,
    _reload: 8,
    _evict_cached: 3,
    _reload_cached: 3,
    _pin: 2,
    _heartbeat: 10,
    _time: 5,
    _move: 8,
    _land: 22,
    _fail_copy: 2,
    _lose_copy: 1,
    _late_copy: 1,
    _kill_mover: 1,
    _flip: 2,
    _stall: 2,
    _oversleep: 2,
    _kill: 2,
    _notice_death: 3,
    _cancel: 2,
    _restart: 2,
    _crash: 3,
}
"""Each act and how often it is drawn."""
