"""No law breaks under any sequence of commands that hypothesis finds, restarts over the same records included.

The simulator draws long histories with many workers. This machine is small, and shrinks what it finds to the shortest
sequence of commands that breaks a law.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlease.errors import KVLeaseError
from kvlease.groups import keeps_everything
from kvlease.ids import CopyId, Epoch, LeaseId, WorkerId
from kvleased.core import Cache, CacheShape, commands
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.checks.sound import Sound
from kvleased.core.effects import Copy, Direction, Effect, Outcome, Reserved, Stepped, Wake

SHAPE: Final = CacheShape(
    num_blocks=7,
    null_blocks=1,
    num_slots=4,
    groups=(keeps_everything(2, 4),),
    hash_tokens=2,
    hit_tokens=2,
    max_leases=4,
    max_waiting=3,
    max_pins=1,
    lease_seconds=10.0,
    layout_digest=99,
)
TENANTS: Final = {WorkerId(1): 7, WorkerId(2): 7, WorkerId(3): 8}
WORKERS: Final = st.sampled_from(sorted(TENANTS))
BLOCKS: Final = st.integers(1, SHAPE.table_width)
WAITS_MS: Final = st.sampled_from((0, 1_000, 60_000))
PICKS: Final = st.integers(0, 7)


def _keys(tenant: int, count: int, branch: int) -> bytes:
    """Return the keys of a tenant's only document; its last block has two versions."""
    names = [(tenant, at, branch if at == count - 1 else 0) for at in range(count)]
    return b"".join(bytes(name).ljust(32, b"\1") for name in names)


class CacheMachine(RuleBasedStateMachine):
    """A cache, its mover's copies, and the answers that its callers still wait for."""

    def __init__(self) -> None:
        """Start a cache with all workers attached."""
        super().__init__()
        self.now = 0.0
        self.epoch = 1
        self.records = CacheRecords.plain(SHAPE)
        self.cache = Cache(SHAPE, self.records, Epoch(self.epoch))
        self.copies: dict[CopyId, Copy] = {}
        self.waiting: set[int] = set()
        self.sound = Sound()
        self.num_requests = 0
        self.generations = self.records.device.generation.copy()
        for worker_id, tenant in TENANTS.items():
            self._send(commands.Attach(worker_id=worker_id, tenant_digest=tenant))

    # Commands -----------------------------------------------------------------------------------------------------

    def _send(self, command: commands.Command) -> object:
        """Give a command to the cache, and return its reply or the error with which it was refused."""
        try:
            outcome = self.cache.handle(command, self.now)
        except KVLeaseError as error:
            self._note(self.cache.take_effects())
            return error
        assert (outcome.reply is None) == (outcome.ticket is not None)
        self._expect(outcome)
        return outcome.reply

    def _expect(self, outcome: Outcome) -> None:
        if outcome.ticket is not None:
            assert outcome.ticket not in self.waiting
            self.waiting.add(outcome.ticket)
        self._note(outcome.effects)

    def _note(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Copy):
                assert effect.copy_id not in self.copies
                self.copies[effect.copy_id] = effect
            elif isinstance(effect, Wake):
                # Nobody is answered twice, or without having asked.
                self.waiting.remove(effect.ticket)

    def _lease(self, pick: int) -> tuple[WorkerId, LeaseId, int]:
        """Return one of the leases, with its owner and its number of blocks; or a lease that never existed."""
        rows = self.records.rows
        used = np.flatnonzero(rows.lease_id)
        if not len(used):
            return WorkerId(1), LeaseId(1), 1
        row = used[pick % len(used)]
        return (
            WorkerId(int(rows.worker_id[row])),
            LeaseId(int(rows.lease_id[row])),
            int(rows.num_blocks[row, 0]),
        )

    def _copy(self, pick: int) -> Copy:
        return self.copies[sorted(self.copies)[pick % len(self.copies)]]

    # What workers do ----------------------------------------------------------------------------------------------

    @rule(
        worker_id=WORKERS,
        num_blocks=BLOCKS,
        hits=st.integers(0, 4),
        wait_ms=WAITS_MS,
        priority=st.integers(0, 2),
    )
    def reserve(
        self, worker_id: WorkerId, num_blocks: int, hits: int, wait_ms: int, priority: int
    ) -> None:
        """A new request arrives."""
        self.num_requests += 1
        reply = self._send(
            commands.Reserve(
                worker_id=worker_id,
                request_id=f"r{self.num_requests}",
                keys=_keys(TENANTS[worker_id], min(hits, num_blocks), 0),
                num_tokens=num_blocks * SHAPE.hash_tokens,
                wait_ms=wait_ms,
                priority=priority,
            )
        )
        if isinstance(reply, Reserved):
            assert len(reply.block_ids) == 4 * num_blocks

    @rule(pick=PICKS, more=st.integers(0, 2), wait_ms=WAITS_MS)
    def extend(self, pick: int, more: int, wait_ms: int) -> None:
        """A request grows."""
        worker_id, lease_id, num_blocks = self._lease(pick)
        self._send(
            commands.Extend(
                worker_id=worker_id,
                lease_id=lease_id,
                num_tokens=(num_blocks + more) * SHAPE.hash_tokens,
                wait_ms=wait_ms,
            )
        )

    @rule(pick=PICKS, branch=st.integers(0, 1))
    def commit(self, pick: int, branch: int) -> None:
        """A request has written all of its blocks."""
        worker_id, lease_id, num_blocks = self._lease(pick)
        self._send(
            commands.Commit(
                worker_id=worker_id,
                lease_id=lease_id,
                num_tokens=num_blocks * SHAPE.hash_tokens,
                first_block=0,
                keys=_keys(TENANTS[worker_id], num_blocks, branch),
            )
        )

    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        """A request ends."""
        worker_id, lease_id, _ = self._lease(pick)
        self._send(commands.Release(worker_id=worker_id, lease_id=lease_id))

    @rule(pick=PICKS)
    def map(self, pick: int) -> None:
        """A request's row is published."""
        worker_id, lease_id, _ = self._lease(pick)
        self._send(commands.Map(worker_id=worker_id, lease_id=lease_id))

    @rule(picks=st.lists(PICKS, max_size=3), verbs=st.lists(st.integers(1, 3), min_size=3))
    def step(self, picks: list[int], verbs: list[int]) -> None:
        """A worker's scheduler takes a step over leases, some of which may not be its own."""
        leases = [self._lease(pick) for pick in picks]
        worker_id = leases[0][0] if leases else WorkerId(1)
        num_tokens = [(num_blocks + 1) * SHAPE.hash_tokens for _, _, num_blocks in leases]
        reply = self._send(
            commands.Step(
                worker_id=worker_id,
                verbs=bytes(verbs[: len(leases)]),
                lease_ids=np.array([lease_id for _, lease_id, _ in leases], np.int64).tobytes(),
                num_tokens=np.array(num_tokens, np.int32).tobytes(),
            )
        )
        if isinstance(reply, Stepped):
            counts = np.frombuffer(reply.num_blocks, np.int32)
            assert 4 * counts.sum() == len(reply.block_ids)

    @rule(pick=PICKS)
    def evict(self, pick: int) -> None:
        """A request is preempted."""
        worker_id, lease_id, _ = self._lease(pick)
        self._send(commands.Evict(worker_id=worker_id, lease_id=lease_id))

    @rule(pick=PICKS, wait_ms=WAITS_MS)
    def reload(self, pick: int, wait_ms: int) -> None:
        """A preempted request comes back."""
        worker_id, lease_id, _ = self._lease(pick)
        self._send(commands.Reload(worker_id=worker_id, lease_id=lease_id, wait_ms=wait_ms))

    @rule(num_blocks=st.integers(1, 6))
    def evict_coldest(self, num_blocks: int) -> None:
        """An operator makes room."""
        self._send(commands.Evict(num_blocks=num_blocks))

    @rule(tenant=st.sampled_from((7, 8)), count=BLOCKS)
    def reload_keys(self, tenant: int, count: int) -> None:
        """Somebody prefetches what will be needed."""
        self._send(commands.Reload(keys=_keys(tenant, count, 0)))

    @rule(worker_id=WORKERS)
    def heartbeat(self, worker_id: WorkerId) -> None:
        """A worker renews its leases."""
        lease_ids = np.frombuffer(self.cache.lease_ids_of(worker_id), np.int64).tolist()
        self._send(
            commands.Heartbeat(
                worker_id=worker_id,
                lease_ids=tuple(lease_ids),
                newest_lease_id=LeaseId(max(lease_ids, default=0)),
            )
        )

    # What happens to them -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.copies)
    @rule(pick=PICKS, end=st.sampled_from(("done", "done", "damaged", "failed", "lost")))
    def end_copy(self, pick: int, end: str) -> None:
        """A copy lands whole or damaged, fails, or is given up although it may still be written."""
        copy = self._copy(pick)
        if end == "lost":
            self._send(commands.CopyLost(copy_id=copy.copy_id))
            return
        del self.copies[copy.copy_id]
        is_damaged = end == "damaged" and copy.direction is Direction.RELOAD
        if end == "failed":
            self._send(commands.CopyFailed(copy_id=copy.copy_id))
        else:
            failed = (0,) if is_damaged else ()
            self._send(commands.CopyDone(copy_id=copy.copy_id, failed=failed))

    @rule()
    def kill_mover(self) -> None:
        """The mover dies with all its copies."""
        self.copies.clear()
        self._send(commands.MoverDied())

    @rule(seconds=st.sampled_from((1.0, 5.0, 11.0, 61.0)))
    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self._send(commands.Tick())

    @precondition(lambda self: self.waiting)
    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        """A caller goes away."""
        ticket = sorted(self.waiting)[pick % len(self.waiting)]
        self.waiting.remove(ticket)
        self._send(commands.Cancel(ticket=ticket))

    @rule(worker_id=WORKERS)
    def kill_worker(self, worker_id: WorkerId) -> None:
        """A worker dies, and another worker with its id attaches."""
        self._send(commands.WorkerDied(worker_id=worker_id))
        assert self.cache.lease_ids_of(worker_id) == b""
        self._send(commands.Attach(worker_id=worker_id, tenant_digest=TENANTS[worker_id]))

    @rule(dead=st.sets(WORKERS, max_size=1))
    def restart(self, dead: set[WorkerId]) -> None:
        """The control process and the mover are killed and started anew; meanwhile a worker may have died."""
        self.epoch += 1
        self.copies.clear()
        self.waiting.clear()
        alive = {one: tenant for one, tenant in TENANTS.items() if one not in dead}
        self.cache = Cache.recovered(SHAPE, self.records, Epoch(self.epoch), alive, self.now)
        for worker_id in dead:
            self._send(commands.Attach(worker_id=worker_id, tenant_digest=TENANTS[worker_id]))

    # Laws ---------------------------------------------------------------------------------------------------------

    @invariant()
    def no_law_is_broken(self) -> None:
        """Every invariant of the core holds."""
        assert self.cache.check(self.sound) == []

    @invariant()
    def generations_only_grow(self) -> None:
        """A block's generation never goes back, even across a restart."""
        generations = self.records.device.generation
        assert (generations >= self.generations).all()
        self.generations = generations.copy()

    @invariant()
    def copies_are_known_to_both_sides(self) -> None:
        """The cache waits for exactly the copies that the mover works on."""
        assert self.cache.census().num_copies == len(self.copies)

    def teardown(self) -> None:
        """At the end, when all workers are gone and all copies have ended, the whole pool is free or evictable."""
        for worker_id in TENANTS:
            self._send(commands.Detach(worker_id=worker_id))
        self._send(commands.MoverDied())
        census = self.cache.census()
        assert census.device["free"] + census.device["ready"] == SHAPE.usable_blocks
        assert census.device["ready_held"] == census.num_leases == census.num_waiting == 0
        assert self.cache.check() == []
        assert not self.waiting


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
