"""The law of remedies is about the instant of a refusal: it does not count on what leaves a tier behind the refusal."""

from dataclasses import replace
from typing import Final

import pytest

from kvleased.core import commands
from kvleased.core.shape import WritePolicy
from tests.laws.actors import Held, Worker
from tests.laws.mover import land
from tests.laws.picks import pick_chain
from tests.laws.shapes import SHAPE
from tests.laws.world import World
from tests.laws.writing import commit_up_to
from tests.unit.service.core.grouped import WINDOW

_OBEYED: Final = 0
"""The seed of a history in which remedies are obeyed."""
_TENANT: Final = 7
_TIGHT: Final = replace(
    SHAPE, num_blocks=8, num_slots=2, groups=(WINDOW,), write_policy=WritePolicy.WRITE_THROUGH
)
"""A full host pool has the window behind which a request goes on, and nothing else."""
_WAIT_MS: Final = 500


@pytest.mark.parametrize("has_copy", [False, True])
def test_remedy_does_not_count_on_what_leaves_for_a_copy_behind_the_refusal(
    *, has_copy: bool
) -> None:
    """Once no call waits, a write-through begins, and a block of the refused call's prefix leaves for it."""
    world = World(_OBEYED, shape=_TIGHT, tenants=(_TENANT,))
    (worker,) = world.workers.values()
    document, other = pick_chain(world, _TENANT, 4), pick_chain(world, _TENANT, 4)
    first = _reserved(world, worker, 16, document)
    commit_up_to(world, worker, first, 16)
    while world.jobs:
        land(world, next(iter(world.jobs.values())))
    del worker.leases[first.lease_id]
    world.send(commands.Release(worker_id=worker.worker_id, lease_id=first.lease_id))
    world.send(commands.Evict(keys=b"".join(document[2:])))
    second = _reserved(world, worker, 16, other)
    world.call(worker, _request(world, worker, 28, document, _WAIT_MS))
    if has_copy:
        commit_up_to(world, worker, second, 4)

    world.tick(_WAIT_MS / 1000)

    # With 16 tokens found, the three blocks that are left suffice for 20 tokens; else 20 tokens need four.
    obeyed = world.seen["obeyed: Reserve POOL_FULL device_blocks blocks num_tokens="]
    assert (obeyed, world.seen["remedies overtaken"]) == ((0, 1) if has_copy else (1, 0))
    assert world.cache.census().host["filling"] == has_copy


def _request(
    world: World, worker: Worker, num_tokens: int, keys: list[bytes], wait_ms: int = 0
) -> commands.Reserve:
    world.num_requests += 1
    return commands.Reserve(
        worker_id=worker.worker_id,
        request_id=f"r{world.num_requests}",
        keys=b"".join(keys),
        num_tokens=num_tokens,
        wait_ms=wait_ms,
    )


def _reserved(world: World, worker: Worker, num_tokens: int, keys: list[bytes]) -> Held:
    """Return a worker's new lease, its only one."""
    world.call(worker, _request(world, worker, num_tokens, keys))
    (held,) = worker.leases.values()
    return held
