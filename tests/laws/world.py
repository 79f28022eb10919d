"""A simulated node around the real core: workers, a mover and memory, under a seeded clock and seeded faults.

Memory is modelled as one content mark for each block and slot. Workers write marks into their private blocks as long as
they live, even when they are stalled; the mover copies marks at its own pace. So if a block is reused or published too
early, or served under a wrong key, somebody sees a wrong mark, whatever the core itself believes.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import KVLeaseError
from kvlease.ids import CopyId, Epoch, LeaseId, PinId, WorkerId
from kvleased.core import Cache, CacheShape, commands
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.checks.sound import Sound
from kvleased.core.effects import (
    Beat,
    Committed,
    Copy,
    Direction,
    Effect,
    Evicted,
    Extended,
    Forked,
    Outcome,
    Probe,
    Reloaded,
    Reserved,
    Wake,
)
from tests.laws import answers, crashes, needs, sharing
from tests.laws.actors import ZERO, Call, Held, Job, Mark, ViolationError, Worker
from tests.laws.holders import read_row, remember_places
from tests.laws.obeying import keep_their_word
from tests.laws.refusals import explains
from tests.laws.shapes import SHAPE
from tests.laws.stores import Stores
from tests.laws.turns import Turns, leave_nobody_waiting

LONGEST_WAIT_SECONDS: Final = 60.0
_COPY_SECONDS: Final = 30.0
"""Seconds that a call waits for copies if it names no wait."""
_SHARE_OF_CLASSES: Final = 0.5
"""Share of the histories in which leases are of several classes."""
_IN_DOUBT: Final = ("BUSY", "COPY_FAILED", "DEADLINE", "POOL_FULL", "WRONG_STATE")
"""Refusals of an evict or a reload that leave a worker in doubt where its lease is."""
_MOVES: Final = (commands.Evict, commands.Reload)
_MAKE_ROOM: Final = (*_MOVES, commands.Reserve, commands.Extend, commands.Fork)
"""Commands that may be refused and yet have begun to make room for the next try."""
_OF_ROWS: Final = (commands.Extend, commands.Commit)
"""Commands whose outcome a worker reads in the block table if no answer comes."""


class World:
    """One simulated node; `live` runs it for some steps, and raises ViolationError if a law breaks."""

    def __init__(
        self, seed: int, *, shape: CacheShape = SHAPE, tenants: Iterable[int] = (7, 7, 8)
    ) -> None:
        """Start a node with one worker for each named tenant."""
        self.seed = seed
        self.rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
        self.shape = shape
        self.longest_tokens = needs.longest(shape)
        self.uses_classes = self.rng.random() < _SHARE_OF_CLASSES
        self.now = 1.0
        self.epoch = Epoch(1000)
        self.records = CacheRecords.plain(shape)
        self.cache = remember_places(Cache(shape, self.records, self.epoch))
        self.workers: dict[WorkerId, Worker] = {}
        self.num_workers = 0
        self.dead_unknown: list[WorkerId] = []
        self.device: list[Mark] = [ZERO] * shape.num_blocks
        self.host: list[Mark] = [ZERO] * shape.num_slots
        self.flipped: set[int] = set()
        self.stores = Stores.of(shape)
        self.jobs: dict[int, Job] = {}
        self.calls: dict[int, Call] = {}
        self.pins: list[PinId] = []
        self.step = self.num_operations = self.num_requests = 0
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.crash: crashes.Crash | None = None
        """What kills the control process in the middle of the next command, or of a later one."""
        self.granted: dict[LeaseId, tuple[WorkerId, str]] = {}
        """The worker and the request of each lease that a worker heard of."""
        self.shared: dict[LeaseId, sharing.Shared] = {}
        self.lease_ids: set[int] = set()
        self.newest_lease_id = 0
        self.turns = Turns()
        self.sound = Sound()
        """What held of the core at the last check."""
        self.events_a_check = 1
        """After so many events the core is compared with all of its own laws."""
        self.num_unchecked = 0
        """Events since that comparison."""
        self.tenant_of_key: dict[bytes, int] = {}
        self.generations = self.count_generations()
        self.granted_under = [-1] * shape.num_blocks
        self.ended: list[tuple[WorkerId, Held]] = []
        self.unsure: list[tuple[Worker, Held]] = []
        self.about_to_move: Held | None = None
        self.ended_copy = CopyId(0)
        self.early: Wake | None = None
        """The last answer; if a call is promised and given an answer at once, the answer comes before the promise."""
        for tenant in tenants:
            self.start_worker(tenant)

    # The core ------------------------------------------------------------------------------------------------------

    def send(self, command: commands.Command) -> Outcome | KVLeaseError:
        """Give a command to the core, carry out its effects, and check every invariant."""
        self.num_operations += 1
        self.seen[type(command).__name__] += 1
        crash, self.crash = self.crash, None
        before = b"" if isinstance(command, _MAKE_ROOM) else self.digest()
        try:
            outcome = (
                self.cache.handle(command, self.now)
                if crash is None
                else crashes.handle(self, command, crash)
            )
            effects = outcome.effects
        except KVLeaseError as error:
            self.seen[error.code] += 1
            outcome, effects = error, self.cache.take_effects()
            explains(self, error)
            if before and before != self.digest():
                self.fail(f"refused {command} changed something")
        keep_their_word(self, command, outcome, effects)
        self.answered(command, outcome)
        self.carry_out(effects)
        self.check()
        if self.cache._state.waiting.by_ticket:
            leave_nobody_waiting(self)
        if not (isinstance(outcome, Outcome) and outcome.ticket):
            # Parts of moves send their effects after the answer, or after the promise of it.
            self.carry_out(self.cache.take_effects())
        return outcome

    def answered(self, command: commands.Command, outcome: Outcome | KVLeaseError) -> None:
        """Note what an answer means before others hear what follows from it."""

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Tell movers, stores and callers what the core wants of them."""
        for effect in effects:
            if isinstance(effect, Copy):
                if effect.direction is Direction.STORE and not self.stores.is_read:
                    self.fail("something is stored before all is known that the disk has")
                self.jobs[effect.copy_id] = Job(effect)
            elif isinstance(effect, Probe):
                self.stores.probes[effect.probe_id] = effect
            elif isinstance(effect, Wake):
                self._answer(effect)

    def digest(self) -> bytes:
        """Return a digest of the state that a refused command, or a query, must not change."""
        records = self.records
        return b"".join(
            (
                records.device.state.tobytes(),
                records.device.generation.tobytes(),
                records.host.state.tobytes(),
                records.rows.lease_id.tobytes(),
                records.rows.phase.tobytes(),
                records.rows.block_ids.tobytes(),
                records.rows.num_blocks.tobytes(),
                records.rows.num_computed.tobytes(),
                records.kernel_rows.num_published.tobytes(),
                records.magazines.name.tobytes(),
                records.magazines.sequence.tobytes(),
                records.magazines.held_by.tobytes(),
            )
        )

    def count_generations(self) -> NDArray[np.uint64]:
        """Return the generations of all blocks and slots."""
        records = self.records
        return np.concatenate(
            [one.generation for one in (records.device, records.host, records.disk)]
        )

    def check(self) -> None:
        """Compare the core with the world's laws, and after so many events with its own."""
        self.num_unchecked += 1
        if self.num_unchecked >= self.events_a_check:
            self.check_whole()
        # A check does the same, so a history does not depend on how often it is checked.
        self.cache.settle()
        self._compare_ids()
        self.turns.check(self)

    def check_whole(self) -> None:
        """Compare the core with its own laws."""
        self.num_unchecked = 0
        found = self.cache.check(self.sound)
        if found:
            self.fail("; ".join(found))
        generations = self.count_generations()
        if b"\1" in (generations < self.generations).tobytes():
            self.fail("a generation went back")
        self.generations = generations

    def _compare_ids(self) -> None:
        """Check that a lease that is new since the last command has an id above all earlier ids."""
        lease_ids = set(self.records.rows.lease_id.tolist()) - {0}
        new = lease_ids - self.lease_ids
        if new and min(new) <= self.newest_lease_id:
            self.fail(f"lease id {min(new)} was issued twice")
        self.newest_lease_id = max(self.newest_lease_id, *lease_ids, 0)
        self.lease_ids = lease_ids

    def tick(self, seconds: float) -> None:
        """Let time pass, and check that calls whose deadline has passed were answered."""
        self.now += seconds
        self.send(commands.Tick())
        late = [ticket for ticket, call in self.calls.items() if call.deadline <= self.now]
        if late:
            self.fail(f"calls {late} were not answered by their deadlines")

    def fail(self, text: str) -> None:
        """Report a broken law."""
        raise ViolationError(text)

    # Workers -------------------------------------------------------------------------------------------------------

    def start_worker(self, tenant: int) -> None:
        """Let a new process attach."""
        self.num_workers += 1
        worker_id = WorkerId((self.epoch << 20) + 500_000 + self.num_workers)
        self.workers[worker_id] = Worker(worker_id, tenant)
        self.send(commands.Attach(worker_id=worker_id, tenant_digest=tenant))

    def call(
        self,
        worker: Worker | None,
        command: Any,
        held: Held | None = None,
        *,
        is_heard: bool = True,
    ) -> None:
        """Let a worker or an operator call, and take the answer when it comes, if it reaches the caller."""
        is_move = held is not None and isinstance(command, _MOVES)
        if held is not None:
            held.is_moving = is_move
        parent = sharing.parent_of(self, held, command)
        # The command may wake callers before its own answer arrives.
        self.about_to_move = held if is_move else None
        outcome = self.send(command)
        self.about_to_move = None
        if isinstance(outcome, Outcome) and outcome.ticket is not None:
            seconds = command.wait_ms / 1000 or _COPY_SECONDS
            call = Call(worker, command, held, self.now + seconds, is_heard, parent)
            self.calls[outcome.ticket] = call
            self._settle_move(held)
            if self.early is not None and self.early.ticket == outcome.ticket:
                self._answer(self.early)
            self.carry_out(self.cache.take_effects())
            return
        if held is not None:
            held.is_moving = False
        result = outcome.reply if isinstance(outcome, Outcome) else outcome
        self._take(Call(worker, command, held, self.now, is_heard, parent), result)

    def _answer(self, wake: Wake) -> None:
        call, self.early = self.calls.pop(wake.ticket, None), wake
        if call is not None:
            self._settle_move(call.held)
            self._take(call, wake.result)

    def _take(self, call: Call, result: object) -> None:
        """Let a caller that is still alive take its answer, or notice that none comes."""
        if isinstance(result, KVLeaseError):
            explains(self, result)
        worker = call.worker
        if worker is None or worker.worker_id not in self.workers:
            return
        if not call.is_heard:
            self._unheard(worker, call)
        elif isinstance(result, KVLeaseError):
            self.refused(worker, call.command, call.held, result)
        else:
            self._done(worker, call, result)

    def _unheard(self, worker: Worker, call: Call) -> None:
        """Let a worker act as it does when no answer about a lease came."""
        held = call.held
        if held is None or worker.leases.get(held.lease_id) is not held:
            return
        self._compare(worker, held)
        if isinstance(call.command, _MOVES):
            held.is_moving = True
            self.unsure.append((worker, held))
        elif isinstance(call.command, _OF_ROWS):
            read_row(self, held)

    def _settle_move(self, held: Held | None) -> None:
        """Note that a lease moves as long as a call that moves it has no answer, or the answer left a doubt."""
        if held is not None:
            is_asked = any(
                call.held is held and isinstance(call.command, _MOVES)
                for call in self.calls.values()
            )
            is_unsure = any(other is held for _, other in self.unsure)
            held.is_moving = is_asked or is_unsure or held is self.about_to_move

    def refused(
        self, worker: Worker, command: object, held: Held | None, error: KVLeaseError
    ) -> None:
        """Let a worker take a refusal; after some refusals it does not know where its lease is."""
        if held is None:
            return
        self._compare(worker, held)
        if isinstance(command, _MOVES) and error.code in _IN_DOUBT:
            held.is_moving = True
            self.unsure.append((worker, held))
        elif isinstance(command, commands.Reload) and error.code == "NEVER_FITS":
            # A lease on the device needs no room. So it is in the host pool, and limits have become too low for it.
            held.is_evicted = True

    def _compare(self, worker: Worker, held: Held) -> None:
        """Drop a lease that the core no longer has."""
        ids = np.frombuffer(self.cache.lease_ids_of(worker.worker_id), np.int64)
        if held.lease_id not in ids:
            worker.leases.pop(held.lease_id, None)

    def _done(self, worker: Worker, call: Call, reply: object) -> None:
        command, held = call.command, call.held
        if isinstance(command, commands.Reserve) and isinstance(reply, Reserved):
            answers.granted(self, worker, command, reply)
        elif held is None:
            return
        elif isinstance(command, commands.Extend) and isinstance(reply, Extended):
            answers.extended(self, worker, held, command.num_tokens, reply)
        elif isinstance(command, commands.Commit) and isinstance(reply, Committed):
            answers.committed(self, held, command.num_tokens, reply.num_given_back)
        elif isinstance(reply, Forked):
            answers.forked(self, worker, call, reply)
        elif isinstance(reply, Evicted):
            held.is_evicted = True
        elif isinstance(reply, Reloaded):
            answers.reloaded(self, held, reply)

    def pinned(self) -> dict[int, int]:
        """Count the pinned blocks by tenant; nobody else holds any block when this is asked."""
        device = self.records.device
        held = np.unique(np.concatenate([np.empty(0, np.intp), *self.cache._state.pins.values()]))
        return dict(Counter(device.tenant[held.astype(np.intp)].tolist()))

    def magazine_names(self) -> Mapping[WorkerId, int]:
        """Return the names of magazines that living processes share, for a restart; here there are none."""
        return {}

    def end_engines(self) -> None:
        """End all engines with magazines; here there are none."""

    def limit_of(self, worker: Worker) -> int:
        """Return the blocks that a worker can have if nobody else has any: all except the pinned ones."""
        del worker
        return self.shape.usable_blocks - sum(self.pinned().values())

    # Faults --------------------------------------------------------------------------------------------------------

    def known_ids(self) -> set[tuple[WorkerId, LeaseId]]:
        """Return the leases of living workers that the core knows, each with its owner."""
        return {
            (worker_id, LeaseId(lease_id))
            for worker_id in self.workers
            for lease_id in np.frombuffer(self.cache.lease_ids_of(worker_id), np.int64).tolist()
        }

    def resume(self, worker: Worker) -> None:
        """Let a worker attach again after a restart, with its inventory."""
        command = commands.Heartbeat(
            worker_id=worker.worker_id,
            lease_ids=tuple(worker.leases),
            newest_lease_id=LeaseId(self.epoch << 20),
        )
        self.send(command)

    def beat(self, worker: Worker) -> None:
        """Let a worker renew its leases, and learn how far the core has granted, as the client does."""
        command = commands.Heartbeat(
            worker_id=worker.worker_id,
            lease_ids=tuple(worker.leases),
            newest_lease_id=worker.newest_lease_id,
        )
        outcome = self.send(command)
        if not isinstance(outcome, Outcome) or not isinstance(outcome.reply, Beat):
            self.fail("a heartbeat of an attached worker was refused")
            return
        worker.newest_lease_id = max(worker.newest_lease_id, outcome.reply.newest_lease_id)

    def learn(self) -> None:
        """Let workers whose evict or reload was interrupted find out where their blocks are, by a reload."""
        for worker, held in self.unsure[:]:
            self.unsure.remove((worker, held))
            # A rank that released it may have rejoined it since, and have a new record of it.
            if worker.worker_id in self.workers and worker.leases.get(held.lease_id) is held:
                command = commands.Reload(
                    worker_id=worker.worker_id, lease_id=held.lease_id, wait_ms=1000
                )
                self.call(worker, command, held)
