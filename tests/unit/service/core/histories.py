"""Own a small simulation of one cache of several groups: workers that write, a mover, and a control process that dies.

Memory is modelled as one content for each block and slot, so a block that is reused too early or served for another
group shows as wrong content, whatever the core itself believes.
"""

import random
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import numpy as np

from kvlease.errors import KVLeaseError
from kvlease.groups import GroupShape, Keeps
from kvlease.ids import CopyId, Epoch, LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import (
    Copy,
    Direction,
    Evicted,
    Extended,
    Outcome,
    Reloaded,
    Reserved,
    Stepped,
    Wake,
)
from kvleased.core.phases import Phase
from kvleased.core.records import NULL
from kvleased.core.states import State
from kvleased.core.stepping import StepVerb
from tests.unit.service.core.builders import MATE, STRANGER, TENANT, WORKER, keys, records
from tests.unit.service.core.grouped import HASH_TOKENS, cache_of

TENANTS: Final = {WORKER: TENANT, MATE: TENANT, STRANGER: TENANT + 1}
NUM_STEPS: Final = 200
COMMON_KEYS: Final = 5
"""Keys that all documents begin with."""


@dataclass
class Running:
    """A request as its worker sees it."""

    worker_id: WorkerId
    lease_id: LeaseId
    row: int
    document: int
    num_tokens: int
    covered: int
    computed: int
    is_evicted: bool = False


class CrashError(BaseException):
    """The control process was killed in the middle of a line."""


class History:
    """A cache whose workers write, whose mover copies, and whose control process may be killed."""

    def __init__(self, seed: int, groups: tuple[GroupShape, ...]) -> None:
        """Start with nothing."""
        self.rng = random.Random(seed)  # noqa: S311 - reproducible on purpose
        self.groups = groups
        self.cache = cache_of(*groups, num_blocks=49, num_slots=24, max_leases=6)
        self.records = records(self.cache)
        self.epoch = 1
        self.running: list[Running] = []
        self.copies: dict[CopyId, Copy] = {}
        self.bytes: dict[str, dict[int, object]] = {"device": {}, "host": {}}
        self.woken: dict[int, object] = {}
        self.waiting: set[int] = set()
        self.hits = 0

    def key(self, worker_id: WorkerId, document: int, at: int) -> int:
        """Return the number of a key of a tenant's document."""
        branch = document if at >= COMMON_KEYS else 0
        return 1 + at + 100 * branch + 10_000 * TENANTS[worker_id]

    def chain(self, worker_id: WorkerId, document: int, num_tokens: int) -> bytes:
        """Return the keys of the first tokens of a document."""
        return keys(*(self.key(worker_id, document, at) for at in range(num_tokens // HASH_TOKENS)))

    # The cache ----------------------------------------------------------------------------------------------------

    def send(self, command: c.Command) -> object:
        """Give the cache a command; every law holds afterwards."""
        try:
            outcome = self.cache.handle(command, 0.0)
        except KVLeaseError as error:
            self.note(Outcome(effects=self.cache.take_effects()))
            assert self.cache.check() == []
            return error
        self.note(outcome)
        assert self.cache.check() == [], command
        return outcome.reply

    def note(self, outcome: Outcome) -> None:
        """Take up what an outcome starts and answers."""
        if outcome.ticket is not None:
            self.waiting.add(outcome.ticket)
        for effect in outcome.effects:
            if isinstance(effect, Copy):
                self.copies[effect.copy_id] = effect
            elif isinstance(effect, Wake):
                self.woken[effect.ticket] = effect.result

    def answered(self, command: c.Command) -> object:
        """Give the cache a command, and let copies land until it is answered, or is given up."""
        self.woken.clear()
        reply = self.send(command)
        while reply is None and not self.woken and self.copies:
            self.land()
        for ticket in self.waiting - self.woken.keys():
            self.send(c.Cancel(ticket=ticket))
        self.waiting.clear()
        return self.woken.popitem()[1] if self.woken else reply

    def live(self) -> None:
        """Let things happen, then let all requests end: nothing is held any more."""
        acts = (
            self.reserve,
            self.compute,
            self.compute,
            self.extend,
            self.step,
            self.release,
            self.map,
        )
        rarer = (
            self.evict,
            self.reload,
            self.trim,
            self.land,
            self.make_room,
            self.crash,
            self.crash_while_moving,
        )
        for _ in range(NUM_STEPS):
            self.rng.choice(self.rng.choice((acts, acts, rarer, (self.land,))))()
        for one in self.running:
            self.send(c.Release(worker_id=one.worker_id, lease_id=one.lease_id))
        while self.copies:
            self.land()
        census = self.cache.census()
        assert census.device["free"] + census.device["ready"] == self.cache.shape.usable_blocks

    def pick(self, *, is_evicted: bool = False) -> Running | None:
        """Return one of the requests."""
        there = [one for one in self.running if one.is_evicted == is_evicted]
        return self.rng.choice(there) if there else None

    # What workers do ----------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Let a request begin, with a prefix that may be cached."""
        worker_id, document = self.rng.choice([*TENANTS]), self.rng.randrange(3)
        num_tokens = self.rng.randint(1, 56)
        named = min(num_tokens - 1, self.rng.randint(0, 56))
        command = c.Reserve(
            worker_id=worker_id,
            request_id=str(self.rng.random()),
            keys=self.chain(worker_id, document, named),
            num_tokens=num_tokens,
            wait_ms=self.rng.choice((0, 1000)),
        )
        reply = self.answered(command)
        if isinstance(reply, Reserved):
            hit_tokens = reply.device_hit_tokens + reply.host_hit_tokens
            self.hits += hit_tokens
            one = Running(
                worker_id,
                reply.lease_id,
                reply.row,
                document,
                num_tokens,
                reply.covered_tokens,
                hit_tokens,
            )
            self.running.append(one)
            self.verify(one)

    def parts(self, one: Running) -> list[list[int]]:
        """Return the places of a request, group by group."""
        return [part.tolist() for part in self.cache._state.leases.parts_of(one.row)]

    def content(self, one: Running, at: int, place: int) -> object:
        """Return what a full block of a document holds."""
        last_key = (place + 1) * self.groups[at].keys_per_block - 1
        return (at, self.key(one.worker_id, one.document, last_key))

    def verify(self, one: Running) -> None:
        """Read what the tokens to come need, as kernels would."""
        for at, part in enumerate(self.parts(one)):
            group = self.groups[at]
            if group.keeps is Keeps.FIXED:
                continue
            first = 0
            if group.keeps is Keeps.WINDOW:
                first = max(0, one.computed - group.kept_tokens) // group.tokens_per_block
            elif group.keeps is Keeps.CHUNK:
                first = (
                    one.computed // group.kept_tokens * group.kept_tokens // group.tokens_per_block
                )
            elif group.keeps is Keeps.STATE:
                first = max(one.computed - 1, 0) // group.tokens_per_block
            for place in range(first, one.computed // group.tokens_per_block):
                if group.keeps is Keeps.STATE and part[place] == NULL:
                    continue
                assert part[place] != NULL
                assert self.bytes["device"].get(part[place]) == self.content(one, at, place)

    def write(self, one: Running, num_tokens: int) -> None:
        """Write the states of the tokens up to a number of them; all their blocks are there, and the request's own."""
        for at, part in enumerate(self.parts(one)):
            group = self.groups[at]
            if group.keeps is Keeps.FIXED:
                assert NULL not in part
                continue
            first = one.computed // group.tokens_per_block
            if group.keeps is Keeps.STATE:
                self.write_state(one, at, part, num_tokens)
                continue
            for place in range(first, -(-num_tokens // group.tokens_per_block)):
                assert part[place] != NULL
                assert self.records.device.state[part[place]] == State.RESERVED
                is_full = (place + 1) * group.tokens_per_block <= num_tokens
                self.bytes["device"][part[place]] = (
                    self.content(one, at, place) if is_full else "part of a block"
                )

    def write_state(self, one: Running, at: int, part: list[int], num_tokens: int) -> None:
        """Write the state after so many tokens: to the first block at or behind its place."""
        group = self.groups[at]
        place = (num_tokens - 1) // group.tokens_per_block
        content: object = "the state inside of a block"
        if num_tokens % group.tokens_per_block == 0:
            content = self.content(one, at, place)
        while part[place] == NULL:
            place += 1
        assert self.records.device.state[part[place]] == State.RESERVED
        self.bytes["device"][part[place]] = content

    def compute(self) -> None:
        """Compute some of the tokens that are covered, and commit them."""
        one = self.pick()
        if one is None or one.covered <= one.computed:
            return
        num_tokens = self.rng.randint(one.computed + 1, one.covered)
        if self.rng.random() < 0.5:
            num_tokens = max(one.computed + 1, num_tokens // 8 * 8)
        num_tokens = min(num_tokens, one.covered)
        self.verify(one)
        self.write(one, num_tokens)
        first = one.computed // HASH_TOKENS
        packed = self.chain(one.worker_id, one.document, num_tokens)[first * 32 :]
        reply = self.send(
            c.Commit(
                worker_id=one.worker_id,
                lease_id=one.lease_id,
                num_tokens=num_tokens,
                first_block=first,
                keys=packed,
            )
        )
        assert not isinstance(reply, KVLeaseError), reply
        one.computed = num_tokens
        self.verify(one)

    def extend(self) -> None:
        """Make a request longer, or let its windows move on."""
        one = self.pick()
        if one is None:
            return
        num_tokens = min(56, max(one.num_tokens, one.covered) + self.rng.choice((0, 0, 1, 1, 5)))
        reply = self.send(
            c.Extend(worker_id=one.worker_id, lease_id=one.lease_id, num_tokens=num_tokens)
        )
        if isinstance(reply, Extended):
            one.num_tokens = num_tokens
            one.covered = reply.covered_tokens

    def step(self) -> None:
        """Extend all requests of a worker at once, at times one of them twice."""
        worker_id = self.rng.choice([*TENANTS])
        own = [one for one in self.running if one.worker_id == worker_id and not one.is_evicted]
        if self.rng.random() < 0.2:
            own += own[:1]
        tokens = [min(56, one.num_tokens + self.rng.choice((0, 1, 4))) for one in own]
        reply = self.send(
            c.Step(
                worker_id=worker_id,
                verbs=bytes([StepVerb.EXTEND] * len(own)),
                lease_ids=np.array([one.lease_id for one in own], np.int64).tobytes(),
                num_tokens=np.array(tokens, np.int32).tobytes(),
            )
        )
        assert isinstance(reply, Stepped)
        added = np.frombuffer(reply.num_blocks, np.int32).reshape(len(own), len(self.groups))
        assert added.sum() * 4 == len(reply.block_ids)
        for one, code, num_tokens in zip(
            own, np.frombuffer(reply.codes, np.int32), tokens, strict=True
        ):
            if not code:
                one.num_tokens = max(one.num_tokens, num_tokens)
                ends = [len(part) for part in self.parts(one)]
                one.covered = self.cache._state.covering.covered(ends, num_tokens)

    def release(self) -> None:
        """End a request."""
        if self.running:
            one = self.running.pop(self.rng.randrange(len(self.running)))
            self.send(c.Release(worker_id=one.worker_id, lease_id=one.lease_id))

    def map(self) -> None:
        """Show a request's blocks to kernels."""
        one = self.pick()
        if one is not None:
            self.send(c.Map(worker_id=one.worker_id, lease_id=one.lease_id))

    def trim(self) -> None:
        """Take back what lies behind some token."""
        one = self.pick()
        if one is not None and one.num_tokens > max(1, one.computed):
            num_tokens = self.rng.randint(max(1, one.computed), one.num_tokens)
            reply = self.send(
                c.Trim(worker_id=one.worker_id, lease_id=one.lease_id, num_tokens=num_tokens)
            )
            assert not isinstance(reply, KVLeaseError), reply
            one.num_tokens, one.covered = num_tokens, min(one.covered, num_tokens)
            self.verify(one)

    def evict(self) -> None:
        """Move a request to the host pool."""
        one = self.pick()
        if one is None:
            return
        reply = self.answered(c.Evict(worker_id=one.worker_id, lease_id=one.lease_id))
        one.is_evicted = isinstance(reply, Evicted)

    def reload(self) -> None:
        """Bring a request back."""
        one = self.pick(is_evicted=True)
        if one is None:
            return
        who: Any = {"worker_id": one.worker_id, "lease_id": one.lease_id}
        if isinstance(self.answered(c.Reload(**who, wait_ms=1000)), Reloaded):
            one.is_evicted = False
            self.verify(one)

    def make_room(self) -> None:
        """Evict the coldest blocks."""
        self.send(c.Evict(num_blocks=self.rng.randint(1, 12)))

    # The mover, and the end of the control process ------------------------------------------------------------------

    def land(self) -> None:
        """Let one copy end."""
        if not self.copies:
            return
        copy = self.copies.pop(self.rng.choice([*self.copies]))
        self.carry_out(copy)
        self.send(c.CopyDone(copy_id=copy.copy_id))

    def carry_out(self, copy: Copy) -> None:
        """Copy the bytes."""
        ends = {Direction.OFFLOAD: ("device", "host"), Direction.RELOAD: ("host", "device")}
        if copy.direction not in ends:
            return
        source, target = ends[copy.direction]
        sources = np.frombuffer(copy.source_ids, np.int32).tolist()
        targets = np.frombuffer(copy.target_ids, np.int32).tolist()
        for at, to in zip(sources, targets, strict=True):
            self.bytes[target][to] = self.bytes[source].get(at)

    def crash(self) -> None:
        """Kill the control process within a command, and start another one over its records."""
        one = self.pick()
        if one is None:
            return
        who: Any = {"worker_id": one.worker_id, "lease_id": one.lease_id}
        command = self.rng.choice(
            (
                c.Extend(**who, num_tokens=min(56, one.num_tokens + 9)),
                c.Trim(**who, num_tokens=max(1, one.computed, one.num_tokens - 5)),
                c.Commit(**who, num_tokens=one.computed, first_block=0, keys=b""),
                c.Map(**who),
                c.Reserve(worker_id=one.worker_id, request_id="c", keys=b"", num_tokens=20),
            )
        )
        if isinstance(command, c.Commit) and one.covered > one.computed:
            self.write(one, one.covered)
            one.computed = one.covered
            command = c.Commit(**who, num_tokens=one.covered, first_block=0, keys=b"")
        self.killed_within(command, self.rng.randrange(200))
        self.recover()

    def crash_while_moving(self) -> None:
        """Kill the control process within the beginning or the end of a lease's move between device and host."""
        one = self.rng.choice(self.running) if self.running else None
        if one is None:
            return
        who: Any = {"worker_id": one.worker_id, "lease_id": one.lease_id}
        command: c.Command = c.Reload(**who, wait_ms=1000) if one.is_evicted else c.Evict(**who)
        if self.rng.random() < 0.7:
            self.send(command)
            if not self.copies:
                one.is_evicted = self.records.rows.phase[one.row] == Phase.EVICTED
                return
            copy = self.copies.pop(self.rng.choice([*self.copies]))
            self.carry_out(copy)
            command = c.CopyDone(copy_id=copy.copy_id)
        self.killed_within(command, self.rng.randrange(150))
        self.recover(moving=one)

    def recover(self, moving: Running | None = None) -> None:
        """Start another control process over the records; only a lease whose row was being rewritten may be lost."""
        self.epoch += 1
        self.copies.clear()
        self.waiting.clear()
        self.cache = Cache.recovered(
            self.cache.shape, self.records, Epoch(self.epoch), TENANTS, 0.0
        )
        assert self.cache.check() == []
        leases = self.cache._state.leases.by_id
        if moving is not None and moving.lease_id not in leases:
            self.running.remove(moving)
        assert {one.lease_id for one in self.running} <= set(leases)
        for lost in set(leases) - {one.lease_id for one in self.running}:
            self.send(c.Release(worker_id=leases[lost].worker_id, lease_id=lost))
        for one in self.running:
            rows, ends = self.records.rows, [len(part) for part in self.parts(one)]
            one.num_tokens = int(rows.num_tokens[one.row])
            one.covered = self.cache._state.covering.covered(ends, one.num_tokens)
            one.computed = max(one.computed, int(rows.num_computed[one.row]))
            one.is_evicted = rows.phase[one.row] == Phase.EVICTED
            if not one.is_evicted:
                self.verify(one)

    def killed_within(self, command: c.Command, line: int) -> None:
        """Kill the control process at a line of the core while it handles a command."""
        left = line

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
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
            self.cache.handle(command, 0.0)
        except (CrashError, KVLeaseError):
            pass
        finally:
            sys.settrace(previous)
