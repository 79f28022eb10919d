"""What can happen in the simulated world, as a table of acts with weights; `live` draws from it."""

from collections.abc import Callable

from kvlease.errors import NotYoursError, UnknownLeaseError
from kvleased.core import commands
from kvleased.core.stepping import StepVerb
from tests.laws import faults
from tests.laws.picks import is_waited_for, pick_chain, pick_lease, pick_worker
from tests.laws.steps import Operation, take_step
from tests.laws.views import audit, compare_lookup, compare_map, read_table
from tests.laws.world import Held, Worker, World, key_of

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


def _reserve(world: World) -> None:
    worker = pick_worker(world)
    if worker is None:
        return
    command = _new_request(world, worker, world.rng.choice((0, 500, 20_000)))
    world.call(worker, command)
    if world.rng.random() < 0.1:
        world.faults["duplicate"] += 1
        world.call(worker, command)


def _new_request(world: World, worker: Worker, wait_ms: int = 0) -> commands.Reserve:
    num_blocks = world.rng.randint(1, world.shape.table_width)
    keys = pick_chain(world, worker.tenant, world.rng.randint(0, num_blocks))
    world.seen["requests"] += 1
    return commands.Reserve(
        worker_id=worker.worker_id,
        request_id=f"r{world.seen['requests']}",
        keys=b"".join(keys),
        num_tokens=num_blocks * world.shape.hash_tokens - world.rng.randint(0, 3),
        wait_ms=wait_ms,
        priority=world.rng.randint(0, 2),
    )


def _step(world: World) -> None:
    """A worker's scheduler takes one step over some of its leases, and asks for new ones in the same call."""
    worker = pick_worker(world)
    if worker is None:
        return
    leases = [
        held
        for held in worker.leases.values()
        if not held.is_moving and not held.is_evicted and not is_waited_for(world, held)
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
    tokens_per_block = world.shape.hash_tokens
    limit = world.shape.table_width * tokens_per_block
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
    found = pick_lease(world)
    if found is None:
        return
    worker, held = found
    num_tokens = len(held.blocks) * world.shape.hash_tokens + world.rng.randint(1, 6)
    if num_tokens > world.shape.table_width * world.shape.hash_tokens:
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
    found = pick_lease(world)
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
            num_tokens=last * world.shape.hash_tokens,
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
    found = pick_lease(world)
    if found is not None and not is_waited_for(world, found[1]):
        compare_map(world, *found)


def _lookup(world: World) -> None:
    worker = pick_worker(world)
    if worker is None:
        return
    keys = pick_chain(world, worker.tenant, 6)
    if worker.leases and world.rng.random() < 0.5:
        keys = world.rng.choice(list(worker.leases.values())).keys
    compare_lookup(world, worker, keys)


def _release(world: World) -> None:
    found = pick_lease(world, evicted=None)
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
        num_tokens=len(held.blocks) * world.shape.hash_tokens,
        first_block=0,
        keys=b"".join(held.keys[: len(held.blocks)]),
    )
    if not isinstance(world.send(late), UnknownLeaseError):
        world.fail("a commit of a released lease was not refused as such")


def _foreign(world: World) -> None:
    """A worker speaks of another worker's lease: nothing may come of it."""
    found = pick_lease(world)
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
    found = pick_lease(world)
    if found is None:
        return
    worker, held = found
    world.call(worker, commands.Evict(worker_id=worker.worker_id, lease_id=held.lease_id), held)


def _reload(world: World) -> None:
    found = pick_lease(world, evicted=True)
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
    worker = pick_worker(world)
    if worker is not None:
        keys = b"".join(pick_chain(world, worker.tenant, world.rng.randint(1, 6)))
        world.send(commands.Reload(worker_id=worker.worker_id, keys=keys))


def _pin(world: World) -> None:
    worker = pick_worker(world)
    if world.pins and world.rng.random() < 0.6:
        world.send(commands.Unpin(pin_id=world.pins.pop()))
    elif worker is not None:
        outcome = world.send(commands.Pin(keys=b"".join(pick_chain(world, worker.tenant, 3))))
        pin_id = getattr(getattr(outcome, "reply", None), "pin_id", None)
        if pin_id is not None:
            world.pins.append(pin_id)


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


def _cancel(world: World) -> None:
    calls = [ticket for ticket, (_, _, held) in world.calls.items() if held is None]
    if calls:
        ticket = world.rng.choice(calls)
        world.faults["cancel"] += 1
        del world.calls[ticket]
        world.send(commands.Cancel(ticket=ticket))


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
    faults.heartbeat: 10,
    _time: 5,
    _move: 8,
    _land: 22,
    faults.fail_copy: 2,
    faults.lose_copy: 1,
    faults.end_lost_copy: 1,
    faults.kill_mover: 1,
    faults.flip: 2,
    faults.stall: 2,
    faults.oversleep: 2,
    faults.kill: 2,
    faults.notice_death: 3,
    _cancel: 2,
    faults.restart: 2,
    faults.crash: 3,
}
"""Each act and how often it is drawn."""
