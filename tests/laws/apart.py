"""A simulated node with engines whose ranks call apart: each rank is a worker with its own part of every block.

The ranks of an engine ask for the same requests at different times, and each goes on with them as far as chance takes
it. `sharing` checks what they know.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvlease.errors import KVLeaseError, PoolFullError, WrongStateError
from kvlease.groups import Keeps
from kvlease.ids import BYTES_PER_KEY, LeaseId, WorkerId
from kvleased.core import CacheShape, commands
from kvleased.core.blocks.states import State
from kvleased.core.effects import Outcome, Reserved, Stepped, Trimmed
from kvleased.core.lease.phases import Phase
from kvleased.core.lease.ranks import Place
from kvleased.core.verbs.stepping import StepVerb
from tests.laws import agreement, sharing
from tests.laws.actors import Call, Held, Worker, are_mates
from tests.laws.answers import trim
from tests.laws.calling import call, commit_one, extend_one, release_one
from tests.laws.crashes import InterruptedWorldError
from tests.laws.holders import row_of, row_parts
from tests.laws.picks import is_waited_for, pick_lease
from tests.laws.world import World

_ENGINES: Final = {2**63 + 1: 7, 2**63 + 2: 8}
"""The tenants of the engines, by the engine's name."""
_PLAIN_TENANT: Final = 7
"""The tenant of the one process that calls for all ranks of its engine."""
_REQUESTS_KNOWN: Final = 5
"""How many of the last requests of an engine its other ranks know of."""
_SHARE_RUNNING: Final = 0.8
"""Share of a rank's calls that go to requests that another rank runs, not to those that have ended or still wait."""
_TOGETHER: Final = ("commit", "commit", "commit", "extend", "trim", "evict", "reload")
_NOBODY: Final = WorkerId(0)
_WAITS_MS: Final = (0, 500, 20_000)


@dataclass(eq=False)
class Seat:
    """The place of one rank, and the process that has or last had it."""

    place: Place
    tenant: int
    worker_id: WorkerId = _NOBODY


class ApartWorld(World):
    """A node with two engines of two ranks that call apart, and a worker that calls for all ranks of its engine."""

    def __init__(self, seed: int, shape: CacheShape) -> None:
        """Start a node in which every rank is present."""
        self.seats = [
            Seat(Place(engine, rank), tenant)
            for engine, tenant in _ENGINES.items()
            for rank in range(shape.num_ranks)
        ]
        self.asked: dict[int, list[commands.Reserve | commands.Fork]] = {}
        """The last requests of each engine."""
        super().__init__(
            seed, shape=shape, tenants=[*(one.tenant for one in self.seats), _PLAIN_TENANT]
        )

    def send(self, command: commands.Command) -> Outcome | KVLeaseError:
        """Give a command to the core; note what its answer means for the ranks, and what it made findable."""
        worker = self.workers.get(getattr(command, "worker_id", None) or WorkerId(0))
        if worker is None or worker.place is None:
            return super().send(command)
        was_ready = self.records.device.state == State.READY
        rows = self._rows_of(worker)
        is_commit = isinstance(command, commands.Commit)
        cached_before = agreement.cached_keys(self) if is_commit else set()
        try:
            outcome = super().send(command)
        except InterruptedWorldError:
            sharing.note_unanswered(self, worker, command)
            raise
        if isinstance(command, commands.Reserve | commands.Fork) and _is_known(outcome):
            self._note_asked(worker.place.engine, command)
        if isinstance(command, commands.Commit | commands.Step):
            for lease_id, parts in rows.items():
                agreement.compare_published(self, self.shared[lease_id], parts, was_ready)
        if isinstance(command, commands.Commit) and isinstance(outcome, Outcome):
            agreement.compare_due(self, command, cached_before)
        return outcome

    def answered(self, command: commands.Command, outcome: Outcome | KVLeaseError) -> None:
        """Note what an answer means for the ranks; after a commit, its own rank's waiting extend reaches farther."""
        worker = self.workers.get(getattr(command, "worker_id", None) or WorkerId(0))
        if worker is None or worker.place is None or not isinstance(outcome, Outcome):
            return
        if outcome.reply is not None:
            self._note(worker, command, outcome.reply)

    def _rows_of(self, worker: Worker) -> dict[LeaseId, list[list[int]]]:
        found = {one: row_of(self, one) for one in worker.leases}
        phases = self.records.rows.phase
        return {
            one: row_parts(self, row)
            for one, row in found.items()
            if row is not None and phases[row] in (Phase.ACTIVE, Phase.QUARANTINED)
        }

    def _note_asked(self, engine: int, command: commands.Reserve | commands.Fork) -> None:
        asked = self.asked.setdefault(engine, [])
        keys = command.keys if isinstance(command, commands.Reserve) else b""
        parts = (keys[at : at + BYTES_PER_KEY] for at in range(0, len(keys), BYTES_PER_KEY))
        if any(self.tenant_of_key.get(one) != _ENGINES[engine] for one in parts):
            return
        if all(one.request_id != command.request_id for one in asked):
            asked.append(command)
            del asked[:-_REQUESTS_KNOWN]

    def _note(self, worker: Worker, command: Any, reply: object) -> None:
        if not isinstance(reply, Stepped):
            sharing.note(self, worker, command, reply)
            return
        codes = np.frombuffer(reply.codes, np.int32).tolist()
        lease_ids = np.frombuffer(command.lease_ids, np.int64).tolist()
        num_tokens = np.frombuffer(command.num_tokens, np.int32).tolist()
        for verb, code, lease_id, count in zip(
            command.verbs, codes, lease_ids, num_tokens, strict=True
        ):
            if not code and lease_id in self.shared:
                sharing.note_operation(self, worker, StepVerb(verb), (lease_id, count))
        for one, answer in zip(command.reserves, reply.reserves, strict=True):
            if _is_known(answer):
                self._note_asked(worker.place.engine, one)  # type: ignore[union-attr]
            sharing.note(self, worker, one, answer)

    def _take(self, call: Call, result: object) -> None:
        """Note a late answer before its caller takes it, if it does."""
        if call.worker is not None and call.worker.place is not None:
            sharing.note(self, call.worker, call.command, result)
        super()._take(call, result)

    def check(self) -> None:
        """Compare the core with its own laws, with the world's, and with what each rank knows."""
        super().check()
        agreement.compare_all(self)

    # Ranks ----------------------------------------------------------------------------------------------------------

    def start_worker(self, tenant: int) -> None:
        """Let a new process attach: a missing rank's, or the one that calls for all ranks."""
        missing = [one for one in self.missing() if one.tenant == tenant]
        if missing:
            self.sit(missing[0])
        elif all(one.place is not None for one in self.workers.values()):
            super().start_worker(_PLAIN_TENANT)

    def missing(self) -> list[Seat]:
        """Return the places of ranks that have no living process."""
        return [one for one in self.seats if one.worker_id not in self.workers]

    def sit(self, seat: Seat) -> None:
        """Let a process attach at a place; it is refused as long as the death of the previous process is not known."""
        self.num_workers += 1
        worker_id = WorkerId((self.epoch << 20) + 500_000 + self.num_workers)
        is_taken = seat.worker_id in self.dead_unknown
        if not is_taken:
            seat.worker_id = worker_id
            self.workers[worker_id] = Worker(worker_id, seat.tenant, place=seat.place)
        command = commands.Attach(
            worker_id=worker_id,
            tenant_digest=seat.tenant,
            engine=seat.place.engine,
            rank=seat.place.rank,
        )
        outcome = self.send(command)
        if isinstance(outcome, WrongStateError) is not is_taken:
            self.fail(
                f"{command} came to {outcome}, and the place is {'' if is_taken else 'not '}taken"
            )

    def end_engines(self) -> None:
        """Let all ranks be present before everything must be had again."""
        for seat in self.missing():
            self.sit(seat)
        if len(self.workers) == len(self.seats):
            super().start_worker(_PLAIN_TENANT)


def sit(world: World) -> None:
    """Let processes attach for the missing ranks."""
    assert isinstance(world, ApartWorld)
    for seat in world.missing():
        world.sit(seat)
    if world.missing() == [] and len(world.workers) == len(world.seats):
        world.start_worker(_PLAIN_TENANT)


def follow(world: World) -> None:
    """Let a rank ask for a request that another rank has already asked for, or come back to it."""
    assert isinstance(world, ApartWorld)
    ranks = [one for one in world.workers.values() if one.place and not one.is_stalled]
    if not ranks:
        return
    worker = world.rng.choice(ranks)
    assert worker.place is not None
    has = {held.request_id for held in worker.leases.values()}
    asked = [one for one in world.asked.get(worker.place.engine, ()) if one.request_id not in has]
    if world.rng.random() < _SHARE_RUNNING:
        asked = [one for one in asked if one.request_id in _running(world, worker)]
    if not asked:
        return
    command: Any = world.rng.choice(asked)
    wait_ms = world.rng.choice(_WAITS_MS)
    parent = None
    if isinstance(command, commands.Fork):
        parent = worker.leases.get(command.lease_id)
        if parent is None or parent.is_moving or parent.is_evicted:
            return
    world.seen["followed"] += 1
    call(world, worker, replace(command, worker_id=worker.worker_id, wait_ms=wait_ms), parent)


def _running(world: World, worker: Worker) -> set[str]:
    """Return the requests for which the other ranks of a worker's engine have leases."""
    mates = [one for one in world.workers.values() if are_mates(one, worker)]
    return {held.request_id for mate in mates for held in mate.leases.values()}


def together(world: World) -> None:
    """Let the ranks of a request do the same, one after another, as they do if nothing holds one of them up."""
    found = pick_lease(world, evicted=None)
    if found is None or found[1].rank is None:
        return
    lease_id, kind = found[1].lease_id, world.rng.choice(_TOGETHER)
    members = [one for one in world.workers.values() if lease_id in one.leases]
    world.rng.shuffle(members)
    for worker in members:
        held = worker.leases.get(lease_id)
        if held is None or held.is_moving or worker.is_stalled:
            continue
        worker_id = worker.worker_id
        if kind == "reload" and held.is_evicted:
            command = commands.Reload(worker_id=worker_id, lease_id=lease_id, wait_ms=20_000)
            call(world, worker, command, held)
        elif held.is_evicted:
            continue
        elif kind == "commit":
            commit_one(world, worker, held)
        elif kind == "extend":
            extend_one(world, worker, held)
        elif kind == "trim":
            trim_apart(world, worker, held)
        elif kind == "evict":
            call(world, worker, commands.Evict(worker_id=worker_id, lease_id=lease_id), held)


def give_up(world: World) -> None:
    """Let a rank release a lease that it has asked to evict, whether or not others go on with it."""
    waiting = [
        (one.worker, one.held)
        for one in world.calls.values()
        if isinstance(one.command, commands.Evict) and one.held and one.held.rank is not None
        if one.worker and one.held.lease_id in one.worker.leases
        if one.worker.worker_id in world.workers
    ]
    if waiting:
        world.faults["given up"] += 1
        release_one(world, *world.rng.choice(waiting))


def _is_known(answer: Outcome | Reserved | KVLeaseError) -> bool:
    """Tell whether a request was heard: it was granted, waits, or failed only for lack of room."""
    return not isinstance(answer, KVLeaseError) or isinstance(answer, PoolFullError)


def trim_apart(world: World, worker: Worker, held: Held) -> None:
    """Let a rank forget blocks that it no longer wants; blocks that no rank wants leave the lease."""
    row, least = row_of(world, held.lease_id), max(1, held.written)
    asked = 0 if row is None else int(world.records.rows.num_tokens[row])
    if least > asked or is_waited_for(world, held):
        return
    num_tokens = world.rng.randint(least, asked)
    command = commands.Trim(
        worker_id=worker.worker_id, lease_id=held.lease_id, num_tokens=num_tokens
    )
    if any(group.keeps is Keeps.STATE for group in world.shape.groups):
        if not isinstance(world.send(command), WrongStateError):
            world.fail("a rank has trimmed a lease with states")
        return
    trim(world, held, num_tokens)
    shared = world.shared[held.lease_id]
    # A control process that does not remember how far a rank has come assumes that it is as far as possible.
    held.vain_tokens, held.is_trimming = asked if shared.is_resumed else num_tokens, False
    wants = shared.wants
    before, wants[worker.worker_id] = dict(wants), min(wants[worker.worker_id], num_tokens)
    least_left, most_left = agreement.left_by_trim(world, held)
    wants.update(before)
    outcome = world.send(command)
    if not isinstance(outcome, Outcome) or not isinstance(outcome.reply, Trimmed):
        world.fail(f"a trim of a rank came to {outcome}")
    elif not least_left <= outcome.reply.num_given_back <= most_left:
        world.fail(f"a trim was to give {least_left} to {most_left} blocks back: {outcome.reply}")


Act = Callable[[World], None]

WORK_OF_RANKS: Final[dict[Act, int]] = {follow: 50, together: 30, sit: 4, give_up: 2}
"""What also happens if ranks call apart."""
