"""A simulated node with engines that keep their own block tables; each one's magazine is compared at all times.

An engine knows what it has from the answers that it got; if one was lost, it asks for its inventory before it goes on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from kvlease.ids import BYTES_PER_KEY, WorkerId
from kvleased.core import commands
from kvleased.core.blocks.states import State
from kvleased.core.effects import Outcome
from kvleased.core.magazine_replies import Inventoried
from tests.laws.actors import Mark, Worker, is_of
from tests.laws.holders import tenant_of
from tests.laws.shapes import SHAPE, with_tiers
from tests.laws.world import World

_PLAIN_WORKERS: Final = 3
_WORKERS_MAX: Final = 9
"""Number of workers of a node above which no engine starts another process."""


@dataclass(eq=False)
class Engine:
    """One engine, as it knows itself."""

    name: int
    tenant: int
    processes: set[WorkerId] = field(default_factory=set)
    private: dict[int, Mark | None] = field(default_factory=dict)
    """The blocks that it may write, and what it wrote; None if it has not written yet."""
    held: dict[int, bytes] = field(default_factory=dict)
    """Findable blocks that it reads, with the key that it takes each for."""
    sequence: int = 0
    is_in_doubt: bool = False
    last: commands.Exchange | None = None
    """The last of its exchanges that was answered."""

    @property
    def blocks(self) -> set[int]:
        """All blocks in its magazine."""
        return self.private.keys() | self.held.keys()


class MagazineWorld(World):
    """A node with engines; `engines` are those with a living process, whether or not the core knows that yet."""

    def __init__(self, seed: int, policy: str, tiers: str = "") -> None:
        """Start a node with three workers and no engine yet."""
        self.engines: list[Engine] = []
        self.num_engines = 0
        super().__init__(seed, shape=replace(with_tiers(SHAPE, tiers), eviction_policy=policy))

    def check(self) -> None:
        """Compare the core with its own laws, with the world's, and with what engines have."""
        super().check()
        for engine in self.living():
            if not engine.is_in_doubt:
                self._compare_engine(engine)

    def living(self) -> list[Engine]:
        """Return the engines that have a living process, and forget the others."""
        for engine in self.engines:
            engine.processes &= self.workers.keys()
        self.engines = [engine for engine in self.engines if engine.processes]
        return self.engines

    def awake(self) -> list[tuple[Engine, Worker]]:
        """Return the engines' processes that are awake."""
        return [
            (engine, self.workers[one])
            for engine in self.living()
            for one in sorted(engine.processes)
            if not self.workers[one].is_stalled
        ]

    def start_engine(self, tenant: int) -> Engine:
        """Start an engine of one process."""
        self.num_engines += 1
        engine = Engine(name=900 + self.num_engines, tenant=tenant)
        self.engines.append(engine)
        self.start_process(engine)
        return engine

    def start_worker(self, tenant: int) -> None:
        """Let a new process without a magazine attach, if others of that kind have ended."""
        of_engines = {one for engine in self.engines for one in engine.processes}
        if len(self.workers.keys() - of_engines) < _PLAIN_WORKERS:
            super().start_worker(tenant)

    def start_process(self, engine: Engine) -> None:
        """Let another process of an engine attach."""
        if len(self.workers) >= _WORKERS_MAX:
            return
        self.num_workers += 1
        worker_id = WorkerId((self.epoch << 20) + 500_000 + self.num_workers)
        self.workers[worker_id] = Worker(worker_id, engine.tenant)
        engine.processes.add(worker_id)
        self.send(
            commands.Attach(worker_id=worker_id, tenant_digest=engine.tenant, magazine=engine.name)
        )

    def magazine_names(self) -> Mapping[WorkerId, int]:
        """Return the names of the magazines that living processes share."""
        return {one: engine.name for engine in self.living() for one in engine.processes}

    def end_engines(self) -> None:
        """End all engines: they drop all that they have, or their processes detach or die."""
        for engine in [*self.living()]:
            self.take_stock(engine, min(engine.processes))
            how = self.rng.choice(("drop", "detach", "die"))
            if how == "drop":
                blocks = np.array(sorted(engine.blocks), np.int32).tobytes()
                engine.is_in_doubt = True
                self.send(
                    commands.Exchange(
                        worker_id=min(engine.processes),
                        sequence=engine.sequence + 1,
                        drop_blocks=blocks,
                    )
                )
                engine.private, engine.held = {}, {}
                engine.sequence, engine.is_in_doubt = engine.sequence + 1, False
            for worker_id in sorted(engine.processes):
                del self.workers[worker_id]
                kind = commands.WorkerDied if how == "die" else commands.Detach
                self.send(kind(worker_id=worker_id))

    def take_stock(self, engine: Engine, worker_id: WorkerId) -> None:
        """Let an engine ask what it has, and compare the answer with what it knows."""
        outcome = self.send(commands.Inventory(worker_id=worker_id))
        assert isinstance(outcome, Outcome)
        assert isinstance(outcome.reply, Inventoried)
        told = outcome.reply
        blocks = np.frombuffer(told.blocks, np.int32).tolist()
        keys = [
            told.keys[at : at + BYTES_PER_KEY] for at in range(0, len(told.keys), BYTES_PER_KEY)
        ]
        held = {one: key for one, key in zip(blocks, keys, strict=True) if any(key)}
        if told.sequence == engine.sequence and (
            held != engine.held or set(blocks) != engine.blocks
        ):
            self.fail(f"engine {engine.name} has other blocks than it knows, and exchanged nothing")
        if told.sequence not in (engine.sequence, engine.sequence + 1):
            self.fail(
                f"engine {engine.name} came from exchange {engine.sequence} to {told.sequence}"
            )
        known = {**engine.private, **{one: self.device[one] for one in engine.held}}
        engine.private = {one: known.get(one) for one in blocks if one not in held}
        engine.held, engine.sequence, engine.is_in_doubt = held, told.sequence, False
        self._compare_engine(engine)

    def taken(self, engine: Engine, blocks: Iterable[int]) -> None:
        """Give an engine blocks, after a check that nobody else has them."""
        for block in blocks:
            others = [
                one.name
                for one in self.living()
                if one is not engine and not one.is_in_doubt and block in one.blocks
            ]
            leases = [
                held.lease_id
                for worker in self.workers.values()
                for held in worker.leases.values()
                if not held.is_evicted and not held.is_moving
                if block in held.blocks(self.shape.groups)
            ]
            if others or leases or block in engine.blocks:
                self.fail(f"block {block} was taken, and others have it: {others} {leases}")
            if tenant_of(self, self.device[block]) not in (None, engine.tenant):
                self.fail("a taken block holds another tenant's bytes")
            generation = int(self.records.device.generation[block])
            if generation <= self.granted_under[block]:
                self.fail(f"block {block} was granted twice under generation {generation}")
            self.granted_under[block] = generation
            engine.private[block] = None

    def _compare_engine(self, engine: Engine) -> None:
        """Check that the records have what an engine knows, and that nobody else has written its blocks."""
        records, device = self.records.magazines, self.records.device
        (places,) = (records.name == engine.name).nonzero()
        if len(places) != 1:
            self.fail(f"engine {engine.name} lives, and its magazine does not")
        (blocks,) = (records.held_by & np.uint32(1 << int(places[0]))).nonzero()
        if set(blocks.tolist()) != engine.blocks or records.sequence[places[0]] != engine.sequence:
            self.fail(f"engine {engine.name} has {blocks.tolist()}, and knows of {engine.blocks}")
        for block, mark in engine.private.items():
            if device.state[block] != State.RESERVED:
                self.fail(f"private block {block} is {State(device.state[block]).name}")
            if mark is not None and self.device[block] != mark:
                self.fail(f"private block {block} holds {self.device[block]}, not {mark}")
        for block, key in engine.held.items():
            if device.state[block] != State.READY or device.key[block].tobytes() != key:
                self.fail(f"held block {block} is not findable under its key")
            if not is_of(self.device[block], key) and self.device[block][0] != "flipped":
                self.fail(
                    f"held block {block} holds {self.device[block]}, not the bytes of {key!r}"
                )
