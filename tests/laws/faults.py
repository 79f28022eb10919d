"""What can go wrong in the simulated world: copies, workers, the mover and the control process."""

from typing import Final

import numpy as np

from kvlease.errors import IdReusedError, NotYoursError, UnknownLeaseError
from kvlease.ids import BYTES_PER_KEY, CopyId, LeaseId, PinId, WorkerId
from kvleased.core import commands
from kvleased.core.effects import (
    MOVER_OF,
    Detached,
    Direction,
    Done,
    Mover,
    Outcome,
    Released,
)
from tests.laws import crashes, sharing
from tests.laws.actors import Job, Worker, are_mates
from tests.laws.crashes import Crash
from tests.laws.mover import land, move
from tests.laws.picks import pick_lease, pick_worker
from tests.laws.stores import has_stores, tear
from tests.laws.world import World


def stale(world: World) -> None:
    """Let a worker speak of a lease that it has released: nothing may come of it."""
    if not world.ended:
        return
    worker_id, held = world.rng.choice(world.ended)
    if worker_id not in world.workers or not held.keys:
        return
    if held.rank is not None and sharing.may_be_back(world, worker_id, held):
        return
    world.faults["stale"] += 1
    late = commands.Commit(
        worker_id=worker_id,
        lease_id=held.lease_id,
        num_tokens=len(held.keys) * world.shape.hash_tokens,
        first_block=0,
        keys=b"".join(held.keys),
    )
    # If ranks share the lease, the others may go on with it.
    expected = UnknownLeaseError if held.rank is None else UnknownLeaseError | NotYoursError
    if not isinstance(world.send(late), expected):
        world.fail("a commit of a released lease was not refused as such")


def foreign(world: World) -> None:
    """Let a worker speak of another worker's lease: nothing may come of it."""
    found = pick_lease(world)
    others = [one for one in world.workers.values() if found and not are_mates(one, found[0])]
    if found is None or not others:
        return
    world.faults["foreign"] += 1
    worker_id, lease_id = world.rng.choice(others).worker_id, found[1].lease_id
    command = world.rng.choice(
        (
            commands.Release(worker_id=worker_id, lease_id=lease_id),
            commands.Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=40),
            commands.Evict(worker_id=worker_id, lease_id=lease_id),
            commands.Trim(worker_id=worker_id, lease_id=lease_id, num_tokens=4),
            commands.Fork(worker_id=worker_id, lease_id=lease_id, request_id="x", num_tokens=40),
        )
    )
    if not isinstance(world.send(command), NotYoursError):
        world.fail("a command about another worker's lease was not refused as such")


def reuse_name(world: World) -> None:
    """Let a worker ask for something else under a running request's name: it must not get that request's blocks."""
    found = pick_lease(world)
    if found is None:
        return
    worker, held = found
    if held.rank is not None and sharing.is_asked_anew(world, held):
        return
    world.faults["reused"] += 1
    other = world.rng.randbytes(BYTES_PER_KEY)
    command = commands.Reserve(
        worker_id=worker.worker_id, request_id=held.request_id, keys=other, num_tokens=world.shape.hash_tokens
    )  # fmt: skip
    if not isinstance(world.send(command), IdReusedError):
        world.fail("another request got the lease of one with its name")


def cancel(world: World) -> None:
    """Let a caller go away before its answer arrives."""
    calls = [
        ticket
        for ticket, call in world.calls.items()
        if call.held is None or isinstance(call.command, commands.Fork)
    ]
    if calls:
        ticket = world.rng.choice(calls)
        world.faults["cancel"] += 1
        del world.calls[ticket]
        world.send(commands.Cancel(ticket=ticket))


def heartbeat(world: World) -> None:
    """Let every worker that is awake renew its leases."""
    for worker in world.workers.values():
        if not worker.is_stalled:
            world.beat(worker)


def fail_copy(world: World) -> None:
    """Let the mover give up a copy, and say so."""
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs:
        job = world.rng.choice(jobs)
        world.faults["copy_failed"] += 1
        del world.jobs[job.copy.copy_id]
        world.send(commands.CopyFailed(copy_id=job.copy.copy_id))


def lose_copy(world: World) -> None:
    """Let a copy miss its deadline; the mover may go on with it."""
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs:
        job = world.rng.choice(jobs)
        world.faults["copy_lost"] += 1
        job.is_lost = True
        world.send(commands.CopyLost(copy_id=job.copy.copy_id))


def end_lost_copy(world: World) -> None:
    """Let a copy end that was given up long ago, successfully or not."""
    lost = [job for job in world.jobs.values() if job.is_lost]
    if not lost:
        return
    world.faults["copy_late"] += 1
    job = world.rng.choice(lost)
    if job.copy.copy_id % _ONE_IN_FAILED:
        land(world, job)
        return
    move(world, job, job.num_pairs // 2)
    del world.jobs[job.copy.copy_id]
    world.send(commands.CopyFailed(copy_id=job.copy.copy_id))


def _may_serve(world: World) -> bool:
    """Tell whether any event may serve a waiting call, or start copies in the background."""
    return world.cache.census().num_waiting > 0 or world.cache._state.dirt.is_due


def kill_mover(world: World) -> None:
    """Kill a mover in the middle of its copies; the other movers go on with theirs."""
    world.faults["mover"] += 1
    mover = world.rng.choice(list(Mover)) if has_stores(world) else Mover.MEMORY
    for job in _jobs_of(world, mover):
        move(world, job, world.rng.randint(0, 2))
        tear(world, job)
    bury_mover(world, mover)


def bury_mover(world: World, mover: Mover) -> None:
    """Tell the core of a mover's death; its jobs are gone."""
    for job in _jobs_of(world, mover):
        del world.jobs[job.copy.copy_id]
    world.send(commands.MoverDied(mover=mover))


def _jobs_of(world: World, mover: Mover) -> list[Job]:
    return [job for job in world.jobs.values() if MOVER_OF[job.copy.direction] is mover]


def repeat_copy(world: World) -> None:
    """Let the mover answer for a copy that has ended, or that never existed."""
    world.faults["copy_unknown"] += 1
    before, may_serve = world.digest(), _may_serve(world)
    kind = world.rng.choice((commands.CopyDone, commands.CopyFailed, commands.CopyLost))
    world.send(kind(copy_id=world.ended_copy))
    if before != world.digest() and not may_serve:
        world.fail("a copy that is over changed something")


def flip(world: World) -> None:
    """Flip a bit of a slot that no copy is touching."""
    if not world.shape.num_slots:
        return
    slot = world.rng.randrange(world.shape.num_slots)
    if slot not in _written_slots(world) and slot not in world.flipped:
        world.faults["flip"] += 1
        world.flipped.add(slot)
        world.host[slot] = ("flipped", slot)


def _written_slots(world: World) -> set[int]:
    return {
        slot
        for job in world.jobs.values()
        if job.copy.direction is Direction.OFFLOAD
        for slot in np.frombuffer(job.copy.target_ids, np.int32).tolist()
    }


def stall(world: World) -> None:
    """Let a worker fall asleep, or wake up."""
    worker = world.rng.choice(list(world.workers.values()))
    if worker.is_stalled or world.rng.random() < 0.25:
        world.faults["stall"] += not worker.is_stalled
        worker.is_stalled = not worker.is_stalled


def oversleep(world: World) -> None:
    """Let one worker stall for longer than its leases last, while the others go on."""
    worker = pick_worker(world)
    if worker is None:
        return
    world.faults["stall"] += 1
    worker.is_stalled = True
    for _ in range(4):
        heartbeat(world)
        world.tick(world.shape.lease_seconds / 3)
    worker.is_stalled = world.rng.random() < 0.5


def kill(world: World) -> None:
    """Kill a worker and start another in its place; the core learns of the death later."""
    if len(world.workers) > 1:
        worker = world.rng.choice(list(world.workers.values()))
        replace(world, worker)


def replace(world: World, worker: Worker) -> None:
    """End a worker's process, of which the core learns later, and start another of the same tenant."""
    world.faults["kill"] += 1
    del world.workers[worker.worker_id]
    world.dead_unknown.append(worker.worker_id)
    world.start_worker(worker.tenant)


def notice_death(world: World) -> None:
    """Tell the core of a death, after which nothing of the dead worker may be left."""
    if world.dead_unknown:
        worker_id = world.dead_unknown.pop()
        world.send(commands.WorkerDied(worker_id=worker_id))
        if world.cache.lease_ids_of(worker_id):
            world.fail("a dead worker has leases")


def restart(world: World) -> None:
    """Kill the control process between two commands."""
    world.faults["restart"] += 1
    crashes.restart(world)


def crash(world: World) -> None:
    """Kill the control process somewhere in the middle of the next command, often where it writes."""
    if world.rng.random() < _SHARE_AIMED:
        caller, function, most = world.rng.choice(_WRITERS)
        line = world.rng.randrange(most)
        world.crash = world.crash or Crash(line, function=function, caller=caller)
    else:
        module, most = world.rng.choice(_PLACES)
        world.crash = Crash(world.rng.randrange(most), module=module)


def nonsense(world: World) -> None:
    """Let a caller say something senseless: it is refused at once, or answered as a no-op, and nothing changes."""
    worker = pick_worker(world)
    if worker is None:
        return
    world.faults["nonsense"] += 1
    command = world.rng.choice(_senseless(worker, 2 * world.longest_tokens))
    before, may_serve = world.digest(), _may_serve(world)
    outcome = world.send(command)
    if isinstance(outcome, Outcome) and (outcome.ticket or outcome.reply not in _NO_OPS):
        world.fail(f"{command} was carried out")
    if before != world.digest() and not may_serve:
        world.fail(f"{command} changed something")


_NO_OPS = (Done(), Released(released=False), Detached(num_leases=0))

_PLACES: Final = (
    ("", 400),
    ("", 100),
    ("pool", 60),
    ("leases", 60),
    ("committing", 40),
    ("ending", 40),
    ("landing", 80),
    ("mishaps", 40),
    ("moving", 50),
    ("granting", 60),
    ("forking", 90),
    ("trimming", 60),
    ("adopting", 25),
    ("asking", 40),
    ("cleaning", 40),
    ("bringing", 12),
)
"""Modules in which the control process dies, and the number of lines within which it does."""

_WRITERS: Final = (
    ("evict", "_free_up", 7),
    ("", "_free_up", 7),
    ("", "publish", 5),
    ("", "take", 14),
    ("", "retire", 4),
    ("finish_evict", "rewrite", 6),
    ("finish_evict", "rewrite", 6),
    ("finish_reload", "rewrite", 6),
    ("", "open", 14),
    ("", "append", 9),
    ("", "append_many", 9),
    ("", "close", 8),
    ("", "enter", 5),
    ("", "expire", 10),
    ("", "forget_lease", 10),
    ("", "finish_evict", 12),
    ("", "_take_over", 16),
    ("", "retire_sources", 10),
    ("commit", "_move_on", 12),
    ("", "give_back", 14),
    ("", "grow", 15),
    ("", "cut", 30),
    ("fork", "_take", 14),
    ("", "adopt", 20),
    ("adopt", "publish", 5),
    ("_store", "_start", 6),
)
"""Functions that write more than one column, their callers, and how many of their lines may be the last."""

_ONE_IN_FAILED: Final = 4
"""One in so many copies that were given up ends with the mover saying that it failed."""

_SHARE_AIMED: Final = 0.6
"""Share of the crashes that wait for such a function."""


def _senseless(worker: Worker, num_tokens: int) -> list[commands.Command]:
    """Return commands that no caller that follows the protocol sends."""
    worker_id, nobody, lease_id = worker.worker_id, WorkerId(3), LeaseId(3)
    key = bytes(BYTES_PER_KEY)
    return [
        commands.Attach(worker_id=nobody, tenant_digest=0),
        commands.Detach(worker_id=nobody),
        commands.WorkerDied(worker_id=nobody),
        commands.Heartbeat(worker_id=nobody, lease_ids=(), newest_lease_id=lease_id),
        commands.Reserve(worker_id=worker_id, request_id="x", keys=b"", num_tokens=0),
        commands.Reserve(worker_id=worker_id, request_id="x", keys=key[1:], num_tokens=9),
        commands.Reserve(worker_id=worker_id, request_id="x", keys=9 * key, num_tokens=1),
        commands.Reserve(
            worker_id=worker_id, request_id="x", keys=b"", num_tokens=num_tokens, wait_ms=9
        ),
        commands.Reserve(worker_id=worker_id, request_id="x", keys=b"", num_tokens=1, wait_ms=-1),
        commands.Reserve(worker_id=nobody, request_id="x", keys=b"", num_tokens=1),
        commands.Map(worker_id=worker_id, lease_id=lease_id),
        commands.Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=4),
        commands.Commit(
            worker_id=worker_id, lease_id=lease_id, num_tokens=4, first_block=-1, keys=key
        ),
        commands.Commit(
            worker_id=worker_id, lease_id=lease_id, num_tokens=4, first_block=0, keys=key[1:]
        ),
        commands.Reserve(
            worker_id=worker_id, request_id="x", keys=b"", num_tokens=1, priority=3, wait_ms=9
        ),
        commands.Reserve(
            worker_id=worker_id, request_id="x", keys=b"", num_tokens=1, retain_seconds=-1
        ),
        commands.Reserve(
            worker_id=worker_id, request_id="x", keys=b"", num_tokens=1, retain_priority=101
        ),
        commands.Fork(worker_id=worker_id, lease_id=lease_id, request_id="x", num_tokens=4),
        commands.Fork(worker_id=nobody, lease_id=lease_id, request_id="x", num_tokens=4),
        commands.Trim(worker_id=worker_id, lease_id=lease_id, num_tokens=4),
        commands.Evict(),
        commands.Evict(worker_id=worker_id, lease_id=lease_id, num_blocks=3),
        commands.Evict(keys=key[1:]),
        commands.Reload(worker_id=worker_id, lease_id=lease_id),
        commands.Reload(keys=key[1:]),
        commands.Release(worker_id=worker_id, lease_id=lease_id),
        commands.Unpin(pin_id=PinId(3)),
        commands.Cancel(ticket=3),
        commands.CopyDone(copy_id=CopyId(3), checksums=b"1", failed=(7,)),
        commands.Probed(probe_id=3, is_present=b"\1"),
        commands.Step(worker_id=worker_id, verbs=b"\1", lease_ids=b"", num_tokens=b""),
        commands.Step(worker_id=nobody, verbs=b"", lease_ids=b"", num_tokens=b""),
    ]
