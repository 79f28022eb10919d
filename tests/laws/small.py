"""A world so small that all of its histories can be played: its steps by name, and what distinguishes two states."""

from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Final

import numpy as np

from kvleased.core import CacheShape, commands
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.lease.leases import Lease
from kvleased.core.tier.flights import Flight
from kvleased.core.waiting import Waiter
from tests.laws import faults
from tests.laws.actors import Call, Held, Job, Mark, Worker, key_of
from tests.laws.answers import missing, trim
from tests.laws.crashes import restart
from tests.laws.holders import verify
from tests.laws.mover import land
from tests.laws.needs import room
from tests.laws.picks import is_forked, is_waited_for
from tests.laws.views import audit, read_table
from tests.laws.world import World
from tests.laws.writing import scribble, write_up_to

_LONG_MS: Final = 60_000
_REQUESTS: Final = {
    "one": (1, 0, 0),
    "one keyed": (1, 1, _LONG_MS),
    "two keyed": (2, 1, _LONG_MS),
}
"""Requests by name: blocks, keys, and how long it may wait."""
_BUDGETS: Final = {"kill": 1, "restart": 1, "expire": 2, "flip": 1, "mover": 1, "fork": 1}
"""How often each of these may happen in one history."""
_TENANTS: Final = (7, 8)

Ranks = dict[object, int]
"""The numbers that replace ids: the first id that was issued is 0."""

Steps = Iterator[tuple[str, Callable[[], None]]]


class SmallWorld(World):
    """A world without chance: whatever can happen next is listed by name."""

    def __init__(self, shape: CacheShape) -> None:
        """Start with one worker of each tenant."""
        self.is_checked = False
        self.left = dict(_BUDGETS)
        super().__init__(0, shape=shape, tenants=_TENANTS)

    def check(self) -> None:
        """Compare the core with its laws, unless this state has been checked before."""
        if self.is_checked:
            super().check()
        else:
            self.cache.settle()
            # What it remembers of the states before decides what it takes for news.
            self.turns.check(self)

    def steps(self) -> list[str]:
        """Return the names of all steps that can be taken now."""
        return [name for name, _ in self._steps()]

    def take(self, step: str) -> None:
        """Take one step."""
        next(act for name, act in self._steps() if name == step)()

    def look_around(self) -> None:
        """Read all memory as its owners would."""
        for worker in self.workers.values():
            for held in worker.leases.values():
                verify(self, held)
        audit(self)
        read_table(self)

    # What can happen ------------------------------------------------------------------------------------------------

    def _steps(self) -> Steps:
        for at, worker in enumerate(self.workers.values()):
            yield from self._steps_of(at, worker)
        for at, job in enumerate(self.jobs.values()):
            yield from self._ends_of(f"copy {at}", job)
        yield "evict coldest", partial(self.call, None, commands.Evict(num_blocks=1))
        if self.unsure:
            yield "learn", self.learn
        for name, act in self._faults():
            kind = name.split()[0]
            if self.left[kind]:
                yield name, partial(self._spend, kind, act)
        if self.dead_unknown:
            yield "notice death", partial(faults.notice_death, self)

    def _spend(self, kind: str, act: Callable[[], None]) -> None:
        self.left[kind] -= 1
        act()

    def _faults(self) -> Steps:
        yield "restart", partial(restart, self)
        yield "expire", partial(self.tick, self.shape.lease_seconds + 1)
        if self.jobs:
            yield "mover dies", partial(self._spend, "mover", self._kill_mover)
        for at, worker in enumerate(self.workers.values()):
            yield f"kill {at}", partial(faults.replace, self, worker)
        for slot, mark in enumerate(self.host):
            if mark[0] == "key" and not self.jobs:
                yield f"flip {slot}", partial(self._flip, slot)

    def _kill_mover(self) -> None:
        self.jobs.clear()
        self.send(commands.MoverDied())

    def _flip(self, slot: int) -> None:
        self.flipped.add(slot)
        self.host[slot] = ("flipped", slot)

    def _steps_of(self, at: int, worker: Worker) -> Steps:
        for name, (num_blocks, num_keys, wait_ms) in _REQUESTS.items():
            command = commands.Reserve(
                worker_id=worker.worker_id,
                request_id=name,
                keys=b"".join(self._keys(worker.tenant)[:num_keys]),
                num_tokens=num_blocks * self.shape.hash_tokens,
                wait_ms=wait_ms,
            )
            yield f"reserve {at} {name}", partial(self.call, worker, command)
        for nth, held in enumerate(worker.leases.values()):
            if not held.is_moving:
                yield from self._uses(f"{at} {nth}", worker, held)
        for other in self.workers.values():
            for held in other.leases.values():
                if other is not worker and (other.worker_id, held.lease_id) in self.known_ids():
                    yield (
                        f"steal {at} {held.request_id}",
                        partial(self._refuse, self._release(worker, held), "NOT_YOURS"),
                    )
        for worker_id, held in self.ended[-1:]:
            if worker_id == worker.worker_id and held.keys:
                yield (
                    f"commit late {at}",
                    partial(self._refuse, self._commit_of(worker, held), "UNKNOWN_LEASE"),
                )

    def _keys(self, tenant: int) -> list[bytes]:
        keys = [key_of(tenant, (0,)), key_of(tenant, (0, 1))]
        self.tenant_of_key.update(dict.fromkeys(keys, tenant))
        return keys

    def _uses(self, name: str, worker: Worker, held: Held) -> Steps:
        worker_id, lease_id = worker.worker_id, held.lease_id
        yield f"release {name}", partial(self._end, worker, held)
        if held.is_evicted:
            reload = commands.Reload(worker_id=worker_id, lease_id=lease_id, wait_ms=_LONG_MS)
            yield f"reload {name}", partial(self.call, worker, reload, held)
            return
        evict = commands.Evict(worker_id=worker_id, lease_id=lease_id)
        yield f"evict {name}", partial(self.call, worker, evict, held)
        yield f"scribble {name}", partial(scribble, self, worker, held)
        yield from self._changes(name, worker, held)

    def _changes(self, name: str, worker: Worker, held: Held) -> Steps:
        worker_id, lease_id = worker.worker_id, held.lease_id
        now = room(self.shape.groups, held.ends)
        tokens = min(now + self.shape.hash_tokens, self.longest_tokens)
        if any(missing(self, held, tokens)):
            extend = commands.Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=tokens)
            yield f"extend {name}", partial(self.call, worker, extend, held)
        if held.computed < now and not is_forked(self, held):
            yield f"commit {name}", partial(self._commit, worker, held)
        if max(1, held.written) < now and not is_waited_for(self, held):
            yield f"trim {name}", partial(self._trim, worker, held)
        if self.left["fork"] and held.written == held.computed:
            yield f"fork {name}", partial(self._spend, "fork", partial(self._fork, worker, held))

    def _commit(self, worker: Worker, held: Held) -> None:
        tokens = room(self.shape.groups, held.ends)
        held.keys = self._keys(worker.tenant)[: tokens // self.shape.hash_tokens]
        write_up_to(self, worker, held, tokens)
        self.call(worker, self._commit_of(worker, held), held)

    def _trim(self, worker: Worker, held: Held) -> None:
        command = commands.Trim(
            worker_id=worker.worker_id, lease_id=held.lease_id, num_tokens=max(1, held.written)
        )
        trim(self, held, command.num_tokens)
        self.send(command)
        held.is_trimming = False

    def _fork(self, worker: Worker, held: Held) -> None:
        command = commands.Fork(
            worker_id=worker.worker_id,
            lease_id=held.lease_id,
            request_id=f"fork of {held.request_id}",
            num_tokens=max(1, held.computed),
        )
        self.call(worker, command, held)

    def _commit_of(self, worker: Worker, held: Held) -> commands.Commit:
        return commands.Commit(
            worker_id=worker.worker_id,
            lease_id=held.lease_id,
            num_tokens=len(held.keys) * self.shape.hash_tokens,
            first_block=0,
            keys=b"".join(held.keys),
        )

    def _release(self, worker: Worker, held: Held) -> commands.Release:
        return commands.Release(worker_id=worker.worker_id, lease_id=held.lease_id)

    def _end(self, worker: Worker, held: Held) -> None:
        del worker.leases[held.lease_id]
        self.ended.append((worker.worker_id, held))
        self.send(self._release(worker, held))

    def _refuse(self, command: commands.Command, code: str) -> None:
        outcome = self.send(command)
        if getattr(outcome, "code", "") != code:
            self.fail(f"{command} was not refused as {code}")

    def _ends_of(self, name: str, job: Job) -> Steps:
        yield f"{name} done", partial(land, self, job)
        if not job.is_lost:
            yield f"{name} failed", partial(self._fail_copy, job)
            yield f"{name} lost", partial(self._lose_copy, job)

    def _fail_copy(self, job: Job) -> None:
        del self.jobs[job.copy.copy_id]
        self.send(commands.CopyFailed(copy_id=job.copy.copy_id))

    def _lose_copy(self, job: Job) -> None:
        job.is_lost = True
        self.send(commands.CopyLost(copy_id=job.copy.copy_id))

    # What tells two states apart ------------------------------------------------------------------------------------

    def fingerprint(self) -> bytes:
        """Return a digest that is the same for all states that differ only in names."""
        state = self.cache._state
        waiters = (*state.leases.by_id.values(), *state.flights.values(), *state.waiting)
        names: set[int | None] = {one.ticket for one in waiters}
        names.update(state.leases.by_id, state.flights, state.workers, self.workers)
        names.update(self.calls, self.dead_unknown)
        rank: Ranks = {name: at for at, name in enumerate(sorted(one for one in names if one))}
        parts = (
            _pool(state.device),
            _pool(state.host),
            (state.device.records.generation.astype(np.int64) > self.granted_under).tolist(),
            [self._lease(lease, rank) for lease in state.leases.by_id.values()],
            [self._flight(flight, rank) for flight in state.flights.values()],
            [self._waiter(waiter, rank) for waiter in state.waiting],
            sorted(rank[one] for one in state.workers),
            [rank.get(one) for one in self.dead_unknown],
            [_mark(mark, rank) for mark in (*self.device, *self.host)],
            [(rank[one], job.done, job.is_lost) for one, job in self.jobs.items()],
            [self._worker(worker, rank) for worker in self.workers.values()],
            [self._call(ticket, call, rank) for ticket, call in self.calls.items()],
            [(rank.get(one), len(held.keys)) for one, held in self.ended[-1:]],
            sorted(self.left.items()),
        )
        return blake2b(repr(parts).encode(), digest_size=16).digest()

    def _left(self, deadline: float) -> float:
        """Return the time that is left; all past times count as 0."""
        return max(round(deadline - self.now, 3), 0.0)

    def _lease(self, lease: Lease, rank: Ranks) -> tuple[object, ...]:
        book = self.cache._state.leases
        return (
            rank[lease.lease_id],
            rank[lease.worker_id],
            lease.phase,
            [part.tolist() for part in book.parts_of(lease.row)],
            book.rows.num_computed.item(lease.row),
            book.rows.num_tokens.item(lease.row),
            lease.num_shared,
            lease.moving_to.tolist() if lease.pending else [],
            sorted(rank[one] for one in lease.pending),
            rank.get(lease.ticket),
            lease.next_reload is None,
            lease.request is None,
            self._left(lease.deadline),
            self._left(lease.ticket_deadline),
        )

    def _flight(self, flight: Flight, rank: Ranks) -> tuple[object, ...]:
        return (
            rank[flight.copy_id],
            flight.purpose.name,
            flight.sources.tolist(),
            flight.targets.tolist(),
            flight.keyed.tolist(),
            rank.get(flight.lease_id),
            rank.get(flight.ticket),
            flight.is_lost,
        )

    def _waiter(self, waiter: Waiter, rank: Ranks) -> tuple[object, ...]:
        return (
            rank[waiter.ticket],
            type(waiter.command).__name__,
            rank[waiter.worker_id],
            rank.get(waiter.lease_id),
            sorted(tier.value for tier in waiter.skipped),
            self._left(waiter.deadline),
        )

    def _call(self, ticket: int, call: Call, rank: Ranks) -> tuple[object, ...]:
        lease_id = None if call.held is None else call.held.lease_id
        name = type(call.command).__name__
        return (rank[ticket], name, rank.get(lease_id), self._left(call.deadline))

    def _worker(self, worker: Worker, rank: Ranks) -> tuple[object, ...]:
        unsure = [rank.get(held.lease_id) for other, held in self.unsure if other is worker]
        return (
            rank[worker.worker_id],
            [_held(held, rank) for held in worker.leases.values()],
            unsure,
        )


def _held(held: Held, rank: Ranks) -> tuple[object, ...]:
    return (
        rank.get(held.lease_id),
        held.request_id,
        len(held.keys),
        held.parts,
        [_mark(mark, rank) for marks in held.marks for mark in marks],
        held.computed,
        held.written,
        held.is_evicted,
        held.is_moving,
    )


def _pool(pool: Pool) -> tuple[object, ...]:
    states = pool.records.state
    keys = [pool.records.key[at].tobytes() for at in np.flatnonzero(states == State.READY)]
    return (
        states.tolist(),
        pool.holds.tolist(),
        pool.records.tenant.tolist(),
        keys,
        list(pool.order),
        pool.free.ids.tolist(),
    )


def _mark(mark: Mark | None, rank: Ranks) -> tuple[object, ...]:
    """Return a mark without the id of the lease that it may name."""
    if mark is None or mark[0] != "private":
        return mark or ()
    return (mark[0], mark[1], rank.get(mark[2]))
