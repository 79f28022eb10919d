"""Everything that can happen in the simulated world, as a table of acts with weights; `live` draws from it."""

from collections.abc import Callable
from typing import Final

from kvleased.core import commands
from kvleased.core.effects import Outcome, Trimmed
from kvleased.core.verbs.stepping import StepVerb
from tests.laws import below, faults
from tests.laws.actors import Held, Worker
from tests.laws.answers import trim
from tests.laws.apart import WORK_OF_RANKS, ApartWorld, trim_apart
from tests.laws.calling import call, commit_one, extend_one, longer, new_request, release_one
from tests.laws.crashes import InterruptedWorldError
from tests.laws.engines import MagazineWorld
from tests.laws.exchanges import FAULTS_OF_MAGAZINES, WORK_OF_MAGAZINES
from tests.laws.hanging import Hanging
from tests.laws.healing import heal
from tests.laws.holders import row_of, verify
from tests.laws.looking import look_around
from tests.laws.mover import land, move
from tests.laws.operated import OPERATIONS, OperatedWorld
from tests.laws.picks import is_waited_for, pick_chain, pick_lease, pick_worker
from tests.laws.races import race
from tests.laws.steps import Operation, take_step
from tests.laws.stores import has_stores
from tests.laws.views import audit, compare_lookup, compare_map, read_table
from tests.laws.world import World
from tests.laws.writing import compute, keys_of, know_states, scribble

Act = Callable[[World], None]

_KEEP_ALIVE_SECONDS: Final = 8.0
_EAGERNESS: Final = 0.2
_MORE_TOKENS: Final = (0, 1, 3, 9, 30)
"""How many more tokens a fork may cover than its parent has computed."""
_STEPS_OF_A_RUN: Final = 4
_WAIT_MS: Final = 20_000
_SHARE_ENDED: Final = 0.8
_SEVERITIES: Final = (0, 1, 1, 3)
"""How much likelier than usual a fault is in one history; without some kinds it gets further with the others."""


def live(world: World, steps: int) -> None:
    """Let the world live for some steps, then heal it."""
    acts = {**ACTS, **WORK_OF_STORES, **FAULTS_OF_STORES} if has_stores(world) else ACTS
    faulty = {**FAULTS, **FAULTS_OF_STORES}
    if isinstance(world, MagazineWorld):
        acts = {**acts, **WORK_OF_MAGAZINES, **FAULTS_OF_MAGAZINES}
        faulty |= FAULTS_OF_MAGAZINES
    if isinstance(world, OperatedWorld):
        acts = {**acts, **OPERATIONS}
    if isinstance(world, ApartWorld):
        acts = {**acts, **WORK_OF_RANKS}
    weights = [
        weight * (world.rng.choice(_SEVERITIES) if act in faulty else 1)
        for act, weight in acts.items()
    ]
    if has_stores(world):
        below.begin(world)
    hanging = Hanging.of(world)
    for act in world.rng.choices(list(acts), weights, k=steps):
        world.step += 1
        try:
            act(world)
            if world.rng.random() < _EAGERNESS:
                world.learn()
            if hanging is not None:
                hanging.go_on(world)
        except InterruptedWorldError:
            pass
    world.crash = None
    heal(world)


def _reserve(world: World) -> None:
    worker = pick_worker(world)
    if worker is not None:
        call(world, worker, new_request(world, worker, world.rng.choice((0, 500, 20_000))))


def _step(world: World) -> None:
    """Let a worker's scheduler take one step over some of its leases, and ask for new ones in the same call."""
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
        [new_request(world, worker) for _ in range(world.rng.choice((0, 0, 1, 2)))],
    )


def _operations(world: World, worker: Worker, held: Held) -> list[Operation]:
    """Return what a step does with one lease: mostly it grows by a token; at the end it is committed and released."""
    extend = Operation(StepVerb.EXTEND, held, longer(world, held, -3))
    release = Operation(StepVerb.RELEASE, held)
    kind = world.rng.choice(("extend", "extend", "extend", "commit", "end", "too late"))
    if kind == "extend":
        return [extend]
    if kind == "too late":
        return [release, extend]
    written = compute(world, worker, held)
    committing = []
    if written is not None:
        num_tokens, first = written
        keys = keys_of(world, held, num_tokens, first)
        committing = [Operation(StepVerb.COMMIT, held, num_tokens, first, keys)]
    return [*committing, extend] if kind == "commit" else [*committing, release]


def _extend(world: World) -> None:
    found = pick_lease(world)
    if found is not None:
        extend_one(world, *found, wait_ms=world.rng.choice((0, 2000)))


def _commit(world: World) -> None:
    found = pick_lease(world)
    if found is not None:
        commit_one(world, *found)


def _run(world: World) -> None:
    """Let a request run for some steps: what it has computed is committed, and its windows move on."""
    found = pick_lease(world)
    if found is None:
        return
    worker, held = found
    for _ in range(world.rng.randint(1, _STEPS_OF_A_RUN)):
        for act in (commit_one, extend_one):
            if held.lease_id in worker.leases and not held.is_moving:
                act(world, worker, held)


def _fork(world: World) -> None:
    """Let a second request go on from what a running one has computed."""
    found = pick_lease(world)
    if found is None or found[1].written != found[1].computed:
        return
    worker, held = found
    world.num_requests += 1
    command = commands.Fork(
        worker_id=worker.worker_id,
        lease_id=held.lease_id,
        request_id=f"r{world.num_requests}",
        num_tokens=min(
            max(1, held.computed + world.rng.choice(_MORE_TOKENS)), world.longest_tokens
        ),
        wait_ms=world.rng.choice((0, 500, 20_000)),
    )
    call(world, worker, command, held)


def _trim(world: World) -> None:
    """Let a request need less than it asked for; its worker forgets the blocks before it says so."""
    found = pick_lease(world)
    if found is None:
        return
    worker, held = found
    if held.rank is not None:
        trim_apart(world, worker, held)
        return
    row, least = row_of(world, held.lease_id), max(1, held.written)
    asked = 0 if row is None else int(world.records.rows.num_tokens[row])
    if least > asked or is_waited_for(world, held):
        return
    num_tokens = world.rng.randint(least, asked)
    num_gone = trim(world, held, num_tokens) if num_tokens < asked else 0
    command = commands.Trim(
        worker_id=worker.worker_id, lease_id=held.lease_id, num_tokens=num_tokens
    )
    outcome = world.send(command)
    if outcome != Outcome(reply=Trimmed(num_given_back=num_gone), effects=outcome.effects):
        world.fail(f"a trim was to give {num_gone} blocks back, and came to {outcome}")
    held.is_trimming = False
    know_states(world, held)
    world.seen["trimmed"] += num_gone


def _serve(world: World) -> None:
    """Serve a request from start to end, while everything that it waits for goes on as it should."""
    worker = pick_worker(world)
    if worker is None:
        return
    command = new_request(world, worker, _WAIT_MS)
    world.call(worker, command)
    for _ in range(_STEPS_OF_A_RUN):
        for probe_id in list(world.stores.probes):
            below.answer_one(world, probe_id)
        for job in [job for job in world.jobs.values() if not job.is_lost]:
            if job.copy.copy_id in world.jobs:
                land(world, job)
    for held in list(worker.leases.values()):
        if held.request_id == command.request_id and not held.is_moving:
            commit_one(world, worker, held)
            if held.lease_id in worker.leases and world.rng.random() < _SHARE_ENDED:
                release_one(world, worker, held)


def _scribble(world: World) -> None:
    """Let a worker, perhaps a stalled one, write its private blocks, as it may do at any time."""
    found = [
        (worker, held)
        for worker in world.workers.values()
        for held in worker.leases.values()
        if not held.is_evicted and not held.is_moving
    ]
    if found:
        scribble(world, *world.rng.choice(found))


def _verify(world: World) -> None:
    for worker in world.workers.values():
        for held in worker.leases.values():
            verify(world, held)


def _audit(world: World) -> None:
    audit(world)
    read_table(world)
    look_around(world)


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
    release_one(world, *found)


def _evict(world: World) -> None:
    found = pick_lease(world)
    if found is None:
        return
    worker, held = found
    call(world, worker, commands.Evict(worker_id=worker.worker_id, lease_id=held.lease_id), held)


def _reload(world: World) -> None:
    found = pick_lease(world, evicted=True)
    if found is None:
        return
    worker, held = found
    call(
        world,
        worker,
        commands.Reload(
            worker_id=worker.worker_id,
            lease_id=held.lease_id,
            wait_ms=world.rng.choice((500, 20_000)),
        ),
        held,
    )


def _evict_cached(world: World) -> None:
    world.call(None, commands.Evict(num_blocks=world.rng.randint(1, 6)))


def _reload_cached(world: World) -> None:
    worker = pick_worker(world)
    if worker is not None:
        keys = b"".join(pick_chain(world, worker.tenant, world.rng.randint(1, 6)))
        world.call(worker, commands.Reload(worker_id=worker.worker_id, keys=keys))


def _reload_mixed(world: World) -> None:
    """Let an operator ask for keys of several tenants at once."""
    tenants = {worker.tenant for worker in world.workers.values()}
    chains = [pick_chain(world, tenant, world.rng.randint(1, 4)) for tenant in sorted(tenants)]
    world.rng.shuffle(chains)
    world.call(None, commands.Reload(keys=b"".join(key for chain in chains for key in chain)))
    if world.rng.random() < 0.5:
        faults.fail_copy(world)


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
    world.tick(world.rng.random() * _KEEP_ALIVE_SECONDS)


def _move(world: World) -> None:
    if world.jobs:
        move(world, world.rng.choice(list(world.jobs.values())), world.rng.randint(1, 3))


def _land(world: World) -> None:
    jobs = [job for job in world.jobs.values() if not job.is_lost]
    if jobs:
        land(world, world.rng.choice(jobs))


WORK: Final[dict[Act, int]] = {
    _reserve: 26,
    _step: 12,
    _extend: 8,
    _commit: 12,
    _run: 4,
    _fork: 6,
    _trim: 4,
    _scribble: 8,
    _verify: 4,
    _audit: 2,
    _map: 3,
    _lookup: 3,
    _release: 12,
    _evict: 6,
    _reload: 8,
    _evict_cached: 6,
    _reload_cached: 3,
    _reload_mixed: 4,
    _pin: 2,
    faults.heartbeat: 5,
    _time: 5,
    _move: 8,
    _land: 22,
}
"""What happens when all is well, and how often each act is drawn."""

FAULTS: Final[dict[Act, int]] = {
    faults.stale: 7,
    faults.foreign: 4,
    faults.reuse_name: 4,
    faults.cancel: 3,
    faults.nonsense: 9,
    faults.fail_copy: 5,
    faults.lose_copy: 2,
    faults.end_lost_copy: 4,
    faults.repeat_copy: 5,
    faults.kill_mover: 1,
    faults.flip: 1,
    faults.stall: 3,
    faults.oversleep: 1,
    faults.kill: 2,
    faults.notice_death: 3,
    faults.restart: 1,
    faults.crash: 7,
}
"""What goes wrong, and how often each fault is drawn in a usual history."""

ACTS: Final = {**WORK, **FAULTS}
"""Each act and how often it is drawn."""

WORK_OF_STORES: Final[dict[Act, int]] = {
    _serve: 14,
    below.answer: 24,
    below.neighbour: 4,
    below.find: 14,
    race: 3,
    below.mend: 8,
}
"""What also happens if there are stores."""

FAULTS_OF_STORES: Final[dict[Act, int]] = {
    below.answer_badly: 4,
    below.forget: 1,
    below.damage: 4,
    below.dawdle: 3,
    below.turn: 4,
    below.steal: 3,
    below.seek_again: 1,
    below.lose_all: 1,
    below.replace_disk: 1,
}
"""What also goes wrong if there are stores."""
