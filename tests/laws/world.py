"""A simulated node around the real core: workers, a mover and memory, under a seeded clock and seeded faults.

Memory is modelled as one content mark per block and slot. Workers write marks into their private
blocks for as long as they live, also when they are stalled; the mover copies marks at its own pace.
So a block that is reused too early, published too early or served under a wrong key shows as a
wrong mark at somebody, whatever the core itself believes.
"""

import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from types import FrameType
from typing import Any, Final

import numpy as np

from kvlease.errors import KVLeaseError
from kvlease.groups import keeps_everything
from kvlease.ids import Epoch, LeaseId, PinId, WorkerId
from kvleased.core import Cache, CacheShape, commands
from kvleased.core.effects import (
    Beat,
    Copy,
    Direction,
    Evicted,
    Extended,
    Outcome,
    Reloaded,
    Reserved,
    Wake,
)
from kvleased.core.records import CacheRecords
from kvleased.core.states import State

SHAPE = CacheShape(
    num_blocks=25,
    null_blocks=1,
    num_slots=14,
    groups=(keeps_everything(4, 12),),
    hash_tokens=4,
    hit_tokens=4,
    max_leases=16,
    max_waiting=6,
    max_pins=3,
    lease_seconds=30.0,
    layout_digest=99,
)
Mark = tuple[object, ...]
ZERO: Mark = ("zero",)
_NO_LEASE: Final = LeaseId(0)
_LONGEST_WAIT_SECONDS: Final = 60.0
_IN_DOUBT: Final = ("BUSY", "COPY_FAILED", "DEADLINE", "POOL_FULL", "WRONG_STATE")
"""Refusals of an evict or a reload after which a worker does not know where its lease is."""


class ViolationError(AssertionError):
    """A law did not hold."""


class CrashError(BaseException):
    """The control process was killed in the middle of a line."""


@dataclass(eq=False)
class Held:
    """A lease as its worker sees it."""

    lease_id: LeaseId
    request_id: str
    keys: list[bytes]
    blocks: list[int]
    marks: list[Mark | None]
    is_evicted: bool = False
    is_moving: bool = False


@dataclass(eq=False)
class Worker:
    """A process with leases; `is_dead` is known to the world before it is known to the core."""

    worker_id: WorkerId
    tenant: int
    leases: dict[LeaseId, Held] = field(default_factory=dict)
    newest_lease_id: LeaseId = _NO_LEASE
    is_stalled: bool = False


@dataclass(eq=False)
class Job:
    """A batch of copies that the mover works on."""

    copy: Copy
    done: int = 0
    is_lost: bool = False


def key_of(tenant: int, chain: tuple[int, ...]) -> bytes:
    """Return the key of the last block of a chain of tokens."""
    return blake2b(repr((tenant, chain)).encode(), digest_size=32).digest()


class World:
    """One simulated node; `run` lets it live for some steps and raises ViolationError if a law breaks."""

    def __init__(self, seed: int, *, shape: CacheShape = SHAPE) -> None:
        """Start a node with three workers of two tenants."""
        self.rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
        self.shape = shape
        self.now = 1.0
        self.epoch = Epoch(1000)
        self.records = CacheRecords.plain(shape)
        self.cache = Cache(shape, self.records, self.epoch)
        self.workers: dict[WorkerId, Worker] = {}
        self.dead_unknown: list[WorkerId] = []
        self.device: list[Mark] = [ZERO] * shape.num_blocks
        self.host: list[Mark] = [ZERO] * shape.num_slots
        self.flipped: set[int] = set()
        self.jobs: dict[int, Job] = {}
        self.calls: dict[int, tuple[Worker, object, Held | None]] = {}
        self.pins: list[PinId] = []
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.highest_lease_id = self.highest_before = 0
        self.generations = self.records.device.generation.copy()
        self.granted_under = [-1] * shape.num_blocks
        self.ended: list[tuple[WorkerId, Held]] = []
        self.unsure: list[tuple[Worker, Held]] = []
        self.about_to_move: Held | None = None
        for tenant in (7, 7, 8):
            self.start_worker(tenant)

    # The core ------------------------------------------------------------------------------------------------------

    def send(self, command: commands.Command) -> Outcome | KVLeaseError:
        """Give a command to the core, carry out its effects, and check every invariant."""
        self.seen[type(command).__name__] += 1
        # The command may serve others, whose answers come before its own.
        self.highest_before = self.highest_lease_id
        before = (
            self._digest()
            if isinstance(command, commands.Commit | commands.Release | commands.Map)
            else None
        )
        try:
            outcome: Outcome | KVLeaseError = self.cache.handle(command, self.now)
        except KVLeaseError as error:
            self.seen[error.code] += 1
            outcome = error
            if before is not None and before != self._digest():
                self.fail(f"refused {command} changed something")
        effects = outcome.effects if isinstance(outcome, Outcome) else self.cache.take_effects()
        for effect in effects:
            if isinstance(effect, Copy):
                self.jobs[effect.copy_id] = Job(effect)
            elif isinstance(effect, Wake):
                self._answer(effect)
        self.check()
        return outcome

    def _digest(self) -> bytes:
        device = self.records.device
        return (
            device.state.tobytes()
            + device.generation.tobytes()
            + self.records.rows.block_ids.tobytes()
        )

    def check(self) -> None:
        """Compare the core with its own laws and with the world's."""
        found = self.cache.check()
        if found:
            self.fail("; ".join(found))
        generation = self.records.device.generation
        if (generation < self.generations).any():
            self.fail("a generation went back")
        self.generations = generation.copy()

    def fail(self, text: str) -> None:
        """Report a broken law."""
        raise ViolationError(text)

    # Workers -------------------------------------------------------------------------------------------------------

    def start_worker(self, tenant: int) -> None:
        """Let a new process attach."""
        worker_id = WorkerId((self.epoch << 20) + 500_000 + len(self.workers) + self.seen["Attach"])
        worker = Worker(worker_id, tenant)
        self.workers[worker_id] = worker
        self.send(commands.Attach(worker_id=worker_id, tenant_digest=tenant))

    def call(self, worker: Worker, command: Any, held: Held | None = None) -> None:
        """Let a worker call, and take its answer when it comes."""
        if held is not None:
            held.is_moving = isinstance(command, commands.Evict | commands.Reload)
        # The command may wake callers before its own answer is here.
        self.about_to_move = held if held is not None and held.is_moving else None
        outcome = self.send(command)
        self.about_to_move = None
        if isinstance(outcome, Outcome) and outcome.ticket is not None:
            self.calls[outcome.ticket] = (worker, command, held)
            self._settle_move(held)
            return
        if held is not None:
            held.is_moving = False
        if isinstance(outcome, KVLeaseError):
            self._refused(worker, command, held, outcome)
        else:
            self._done(worker, command, held, outcome.reply)

    def _answer(self, wake: Wake) -> None:
        call = self.calls.pop(wake.ticket, None)
        if call is None:
            return
        worker, command, held = call
        self._settle_move(held)
        if worker.worker_id not in self.workers:
            return
        if isinstance(wake.result, KVLeaseError):
            self._refused(worker, command, held, wake.result)
        else:
            self._done(worker, command, held, wake.result)

    def _settle_move(self, held: Held | None) -> None:
        """A lease moves for as long as a call that moves it is not answered, or its answer was in doubt."""
        if held is not None:
            is_asked = any(
                other is held and isinstance(command, commands.Evict | commands.Reload)
                for _, command, other in self.calls.values()
            )
            is_unsure = any(other is held for _, other in self.unsure)
            held.is_moving = is_asked or is_unsure or held is self.about_to_move

    def _refused(
        self, worker: Worker, command: object, held: Held | None, error: KVLeaseError
    ) -> None:
        if (
            error.retryable
            and error.code != "DEADLINE"
            and error.retry_after_ms is None
            and error.code != "BUSY"
        ):
            self.fail(f"{error.code} says retry, but not when")
        if error.holdings and sum(one.num_blocks for one in error.holdings) not in (
            self.shape.usable_blocks,
            self.shape.num_slots,
        ):
            self.fail(f"the holdings of a refusal do not add up: {error.holdings}")
        if held is None:
            return
        self._compare(worker, held)
        is_move = isinstance(command, commands.Evict | commands.Reload)
        if is_move and error.code in _IN_DOUBT:
            held.is_moving = True
            self.unsure.append((worker, held))

    def _compare(self, worker: Worker, held: Held) -> None:
        """Drop a lease that the core no longer has; what it has is as the worker knows it."""
        ids = np.frombuffer(self.cache.lease_ids_of(worker.worker_id), np.int64)
        if held.lease_id not in ids:
            worker.leases.pop(held.lease_id, None)

    def _done(self, worker: Worker, command: object, held: Held | None, reply: object) -> None:
        if isinstance(command, commands.Reserve) and isinstance(reply, Reserved):
            self._granted(worker, command, reply)
        elif isinstance(reply, Extended) and held is not None:
            self._extended(worker, held, np.frombuffer(reply.block_ids, np.int32).tolist())
        elif isinstance(reply, Evicted) and held is not None:
            held.is_evicted = True
        elif isinstance(reply, Reloaded) and held is not None and reply.block_ids:
            held.is_evicted = False
            held.blocks = np.frombuffer(reply.block_ids, np.int32).tolist()
            # A crash may have swallowed the answer to an extend.
            held.marks += [None] * (len(held.blocks) - len(held.marks))
            self.verify(held)

    def _granted(self, worker: Worker, command: commands.Reserve, reply: Reserved) -> None:
        worker.newest_lease_id = max(worker.newest_lease_id, reply.lease_id)
        if reply.lease_id in worker.leases:
            return
        if reply.lease_id <= self.highest_before and command.wait_ms == 0:
            self.fail("a lease id was issued twice")
        self.highest_lease_id = max(self.highest_lease_id, reply.lease_id)
        blocks = np.frombuffer(reply.block_ids, np.int32).tolist()
        keys = [command.keys[at : at + 32] for at in range(0, len(command.keys), 32)]
        hits = (reply.device_hit_tokens + reply.host_hit_tokens) // self.shape.hash_tokens
        self.seen["hits"] += hits
        marks: list[Mark | None] = [("key", key) for key in keys[:hits]]
        held = Held(
            reply.lease_id, command.request_id, keys, blocks, marks + [None] * (len(blocks) - hits)
        )
        worker.leases[reply.lease_id] = held
        for block in blocks[hits:]:
            self._check_fresh(worker, held, block)
        self.verify(held)

    def _extended(self, worker: Worker, held: Held, blocks: list[int]) -> None:
        held.blocks += blocks
        held.marks += [None] * len(blocks)
        for block in blocks:
            self._check_fresh(worker, held, block)

    def _check_fresh(self, worker: Worker, held: Held, block: int) -> None:
        for other in self.workers.values():
            for lease in other.leases.values():
                is_there = not lease.is_evicted and not lease.is_moving
                if lease is not held and is_there and block in lease.blocks:
                    self.fail(f"block {block} was granted while lease {lease.lease_id} has it")
        generation = int(self.records.device.generation[block])
        if generation <= self.granted_under[block]:
            self.fail(f"block {block} was granted twice under generation {generation}")
        self.granted_under[block] = generation
        mark = self.device[block]
        if mark[0] == "private" and mark[1] != worker.tenant:
            self.fail("a fresh block holds another tenant's bytes")
        if mark[0] == "key" and mark[1] in self._foreign_keys(worker.tenant):
            self.fail("a fresh block holds another tenant's bytes")

    def _foreign_keys(self, tenant: int) -> set[object]:
        return {key for other, key in self._known_keys if other != tenant}

    @property
    def _known_keys(self) -> set[tuple[int, bytes]]:
        if not hasattr(self, "_keys"):
            self._keys: set[tuple[int, bytes]] = set()
        return self._keys

    def verify(self, held: Held) -> None:
        """Read a lease's blocks as its worker would."""
        if held.is_evicted or held.is_moving:
            return
        for block, mark in zip(held.blocks, held.marks, strict=True):
            if mark is not None and self.device[block] != mark:
                self.fail(
                    f"block {block} of lease {held.lease_id} holds {self.device[block]}, not {mark}"
                )

    def write(self, worker: Worker, held: Held, index: int, mark: Mark) -> None:
        """Write one private block as a worker does, without asking anybody."""
        del worker
        held.marks[index] = mark
        self.device[held.blocks[index]] = mark

    # The mover -----------------------------------------------------------------------------------------------------

    def move(self, job: Job, pairs: int) -> None:
        """Let the mover carry out some pairs of a batch."""
        copy = job.copy
        targets = np.frombuffer(copy.target_ids, np.int32).tolist()
        sources = np.frombuffer(copy.source_ids, np.int32).tolist()
        for at in range(job.done, min(len(targets), job.done + pairs)):
            if copy.direction is Direction.SCRUB:
                self.device[targets[at]] = ZERO
            elif copy.direction is Direction.OFFLOAD:
                self.host[targets[at]] = self.device[sources[at]]
                self.flipped.discard(targets[at])
            elif copy.direction is Direction.DUPLICATE:
                self.device[targets[at]] = self.device[sources[at]]
            else:
                self.device[targets[at]] = self.host[sources[at]]
        job.done = min(len(targets), job.done + pairs)

    def land(self, job: Job) -> None:
        """Let the mover finish a batch and say so."""
        self.move(job, len(job.copy.target_ids))
        del self.jobs[job.copy.copy_id]
        failed: tuple[int, ...] = ()
        if job.copy.direction is Direction.RELOAD:
            sources = np.frombuffer(job.copy.source_ids, np.int32).tolist()
            failed = tuple(at for at, slot in enumerate(sources) if slot in self.flipped)
        checksums = b""
        if job.copy.direction is Direction.OFFLOAD:
            checksums = np.ones(len(job.copy.target_ids) // 4, np.uint64).tobytes()
        self.send(commands.CopyDone(copy_id=job.copy.copy_id, checksums=checksums, failed=failed))

    # Faults --------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Let the supervisor start the control process anew over the same records; the mover is new as well."""
        self.faults["restart"] += 1
        self.jobs.clear()
        self.calls.clear()
        self.pins.clear()
        self.unsure.clear()
        self.epoch = Epoch(self.epoch + self.rng.randint(1, 3))
        alive = {worker.worker_id: worker.tenant for worker in self.workers.values()}
        self.dead_unknown.clear()
        had = {
            lease_id
            for worker_id in self.workers
            for lease_id in np.frombuffer(self.cache.lease_ids_of(worker_id), np.int64).tolist()
        }
        self.cache = Cache.recovered(self.shape, self.records, self.epoch, alive, self.now)
        for worker in self.workers.values():
            kept = set(np.frombuffer(self.cache.lease_ids_of(worker.worker_id), np.int64).tolist())
            for held in list(worker.leases.values()):
                if held.lease_id not in kept:
                    if held.lease_id in had and not held.is_moving:
                        self.fail("a restart lost a lease that nothing was happening to")
                    del worker.leases[held.lease_id]
                elif held.is_moving:
                    self.unsure.append((worker, held))
            if not worker.is_stalled:
                self.resume(worker)
        self.check()

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
        """Let workers whose evict or reload was interrupted find out where their blocks are, by asking for them."""
        for worker, held in self.unsure[:]:
            self.unsure.remove((worker, held))
            if worker.worker_id in self.workers and held.lease_id in worker.leases:
                command = commands.Reload(
                    worker_id=worker.worker_id, lease_id=held.lease_id, wait_ms=1000
                )
                self.call(worker, command, held)

    def crash_within(self, command: commands.Command, line: int) -> None:
        """Kill the control process at the given line of the core while it handles a command, then restart it."""
        left = line

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            del argument
            if "kvleased/core" not in frame.f_code.co_filename:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    raise CrashError
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            self.cache.handle(command, self.now)
        except (CrashError, KVLeaseError):
            pass
        finally:
            sys.settrace(previous)
        self.faults["crash"] += 1
        self.restart()

    def kill(self, worker: Worker) -> None:
        """End a worker's process; the core learns of it later."""
        self.faults["kill"] += 1
        del self.workers[worker.worker_id]
        self.dead_unknown.append(worker.worker_id)

    # Healing -------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Stop all faults; then every live worker must be able to have the whole tier."""
        for worker_id in self.dead_unknown:
            self.send(commands.WorkerDied(worker_id=worker_id))
        self.dead_unknown.clear()
        self.jobs.clear()
        self.send(commands.MoverDied())
        for pin_id in self.pins:
            self.send(commands.Unpin(pin_id=pin_id))
        # Reserves whose callers have gone wait for nothing.
        for ticket in self.rng.sample(sorted(self.calls), len(self.calls) // 2):
            if self.calls.pop(ticket, None) is not None:
                self.send(commands.Cancel(ticket=ticket))
        self.now += _LONGEST_WAIT_SECONDS
        self.send(commands.Tick())
        if self.calls or self.cache.census().num_waiting:
            self.fail("a call was not answered by its deadline")
        self._settle()
        for worker in self.workers.values():
            self._lose_answers(worker)
        self._settle()
        for worker in list(self.workers.values()):
            # One heartbeat to learn how far the core has granted, one to disown what no answer told of.
            self.beat(worker)
            self.now += self.shape.lease_seconds
            self.beat(worker)
            for lease_id in list(worker.leases):
                self.send(commands.Release(worker_id=worker.worker_id, lease_id=lease_id))
            worker.leases.clear()
        self._settle()
        for worker in self.workers.values():
            self._have_it_all(worker)

    def _lose_answers(self, worker: Worker) -> None:
        """Let a worker reserve what there is and never learn what was granted."""
        limit = self.shape.table_width
        for at in range(0, self.shape.usable_blocks, limit):
            self.send(
                commands.Reserve(
                    worker_id=worker.worker_id,
                    request_id=f"lost-{at}",
                    keys=b"",
                    num_tokens=limit * self.shape.hash_tokens,
                )
            )

    def _settle(self) -> None:
        while self.jobs:
            self.land(next(iter(self.jobs.values())))

    def _have_it_all(self, worker: Worker) -> None:
        limit = self.shape.table_width
        for at in range(0, self.shape.usable_blocks, limit):
            num_blocks = min(limit, self.shape.usable_blocks - at)
            command = commands.Reserve(
                worker_id=worker.worker_id,
                request_id=f"all-{at}",
                keys=b"",
                num_tokens=num_blocks * self.shape.hash_tokens,
                wait_ms=60_000,
            )
            self.call(worker, command)
            self._settle()
        got = sum(len(held.blocks) for held in worker.leases.values())
        if got != self.shape.usable_blocks:
            self.fail(f"after healing a worker got {got} of {self.shape.usable_blocks} blocks")
        for lease_id in list(worker.leases):
            self.send(commands.Release(worker_id=worker.worker_id, lease_id=lease_id))
        worker.leases.clear()
        if not (self.records.device.state != State.FILLING).all():
            self.fail("something is still being filled")
