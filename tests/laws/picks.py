"""The choice of what an act is about: awake workers, leases that nothing is happening to, chains of keys."""

from kvleased.core import commands
from tests.laws.actors import Held, Worker, key_of
from tests.laws.world import World

_DOCUMENTS = 3


def pick_worker(world: World) -> Worker | None:
    """Return a worker that is awake."""
    awake = [worker for worker in world.workers.values() if not worker.is_stalled]
    return world.rng.choice(awake) if awake else None


def pick_lease(world: World, *, evicted: bool | None = False) -> tuple[Worker, Held] | None:
    """Return a lease that is not moving, and its worker: on the device, in the host pool, or either."""
    found = [
        (worker, held)
        for worker in world.workers.values()
        if not worker.is_stalled
        for held in worker.leases.values()
        if not held.is_moving and (evicted is None or held.is_evicted is evicted)
    ]
    return world.rng.choice(found) if found else None


def is_waited_for(world: World, held: Held) -> bool:
    """Tell whether a call about a lease has no answer yet; it may change the lease at any time."""
    return any(call.held is held for call in world.calls.values())


def is_forked(world: World, held: Held) -> bool:
    """Tell whether a fork of a lease has no answer yet; until then its worker writes none of its blocks.

    A rank that has released the lease since, and joined it again, still awaits the fork of what it had before.
    """
    name = held.lease_id, held.rank
    return any(
        isinstance(call.command, commands.Fork)
        and call.held is not None
        and (call.held.lease_id, call.held.rank) == name
        for call in world.calls.values()
    )


def pick_chain(world: World, tenant: int, num_blocks: int) -> list[bytes]:
    """Return the keys of the first blocks of one of a tenant's documents, in one of its versions."""
    document = world.rng.randrange(_DOCUMENTS)
    fork = world.rng.randint(0, num_blocks)
    branch = world.rng.randrange(3)
    tokens = [
        document * 1000 + at + (100 * branch if at >= fork else 0) for at in range(num_blocks)
    ]
    keys = [key_of(tenant, tuple(tokens[: at + 1])) for at in range(num_blocks)]
    world.tenant_of_key.update(dict.fromkeys(keys, tenant))
    return keys
