"""The laws of ranks that call apart ask for no more than a rank needs."""

from dataclasses import replace

from kvlease.groups import GroupShape
from kvleased.core import commands
from kvleased.core.blocks.states import State
from tests.laws.actors import ZERO, Worker
from tests.laws.apart import ApartWorld
from tests.laws.holders import verify
from tests.laws.shapes import shape_of
from tests.laws.writing import commit_up_to
from tests.unit.service.core.grouped import FULL, GUESSING, STATE, WIDE


def test_rank_that_asks_again_is_not_owed_the_next_places_of_its_mate() -> None:
    """Where a rank's states end depends on the tokens that it asks for, however far on its mate's growth has put them.

    Tokens that it asked for before are covered already, with all of their speculative states.
    """
    world, first, second = _shared(WIDE, GUESSING)
    for num_tokens in (7, 13, 19, 26):
        _extend(world, first, num_tokens)

    for num_tokens in (10, 10, 7, 17):
        _extend(world, second, num_tokens)

    (mine,), (others,) = first.leases.values(), second.leases.values()
    assert others.parts[1] == mine.parts[1][: len(others.parts[1])]


def test_rank_need_not_read_what_its_unanswered_commit_gave_back() -> None:
    """The block of a state that all ranks have passed may be another lease's before the last rank hears of it."""
    world, first, second = _shared(FULL, STATE)
    for num_tokens in (3, 7):
        for worker in (first, second):
            _extend(world, worker, num_tokens)
        for worker in (first, second):
            (held,) = worker.leases.values()
            is_heard = (worker, num_tokens) != (second, 7)
            commit_up_to(world, worker, held, num_tokens, is_heard=is_heard)

    (held,) = second.leases.values()
    passed = held.parts[1][0]
    assert world.records.device.state[passed] == State.FREE
    world.device[passed] = ZERO
    verify(world, held)


def _shared(*groups: GroupShape) -> tuple[ApartWorld, Worker, Worker]:
    """Return a world with a lease of two ranks."""
    world = ApartWorld(0, replace(shape_of(*groups), num_ranks=2))
    first, second = [one for one in world.workers.values() if one.place][:2]
    for worker in (first, second):
        command = commands.Reserve(
            worker_id=worker.worker_id, request_id="shared", keys=b"", num_tokens=3
        )
        world.call(worker, command)
    return world, first, second


def _extend(world: ApartWorld, worker: Worker, num_tokens: int) -> None:
    (held,) = worker.leases.values()
    command = commands.Extend(
        worker_id=worker.worker_id, lease_id=held.lease_id, num_tokens=num_tokens
    )
    world.call(worker, command, held)
