"""A storm over a cache: workers, movers and stores that do anything in any order, and the bytes in every tier."""

import random
from dataclasses import dataclass, field

import numpy as np

from kvlease.errors import KVLeaseError
from kvlease.ids import BYTES_PER_KEY, CopyId, LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.checks.sound import Sound
from kvleased.core.effects import (
    MOVER_OF,
    Copy,
    Direction,
    Mover,
    Outcome,
    Probe,
    Reloaded,
    Reserved,
    Tier,
    Wake,
)
from kvleased.core.tier.labels import LABEL
from tests.unit.service.core.builders import (
    MATE,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    ids,
)

TENANT_OF = {WORKER: TENANT, MATE: TENANT, STRANGER: OTHER_TENANT}
NUM_STEPS = 400
DOCS = 5
BLOCKS_A_DOC = 6

Bytes = tuple[int, bytes]
"""The content of a block: its tenant and its key."""


def chain(tenant: int, document: int, num_blocks: int) -> bytes:
    """Return the keys of the first blocks of a tenant's document."""
    first = 1000 * tenant + 10 * document + 1
    return b"".join((first + at).to_bytes(BYTES_PER_KEY, "little") for at in range(num_blocks))


def split(packed: bytes) -> list[bytes]:
    """Return packed keys one by one."""
    return [packed[at : at + BYTES_PER_KEY] for at in range(0, len(packed), BYTES_PER_KEY)]


@dataclass
class Storm:
    """A cache, the bytes of all of its tiers, and those that use it."""

    cache: Cache
    rng: random.Random
    now: float = 0.0
    bytes_of: dict[str, dict[int, Bytes | None]] = field(
        default_factory=lambda: {"device": {}, "host": {}, "disk": {}}
    )
    remote: set[Bytes] = field(default_factory=set)
    copies: dict[CopyId, Copy] = field(default_factory=dict)
    probes: dict[int, Probe] = field(default_factory=dict)
    waiting: dict[int, c.Reserve | c.Reload] = field(default_factory=dict)
    leases: dict[LeaseId, tuple[WorkerId, bytes, list[int]]] = field(default_factory=dict)
    on_host: dict[LeaseId, tuple[WorkerId, bytes, list[int]]] = field(default_factory=dict)
    num_requests: int = 0
    num_fetched: int = 0
    sound: Sound = field(default_factory=Sound)

    def send(self, command: c.Command) -> Outcome | None:
        """Send a command, carry its effects out, and check the cache."""
        try:
            outcome = self.cache.handle(command, self.now)
            effects = list(outcome.effects)
        except KVLeaseError:
            outcome, effects = None, self.cache.take_effects()
        if outcome is not None and outcome.ticket is not None:
            assert isinstance(command, c.Reserve | c.Reload | c.Evict)
            if not isinstance(command, c.Evict):
                self.waiting[outcome.ticket] = command
        if outcome is not None and outcome.reply is not None:
            self._answered(command, outcome.reply)
        for effect in effects:
            if isinstance(effect, Copy):
                self.copies[effect.copy_id] = effect
            elif isinstance(effect, Probe):
                self.probes[effect.probe_id] = effect
            elif isinstance(effect, Wake):
                waited = self.waiting.pop(effect.ticket, None)
                if waited is not None and not isinstance(effect.result, KVLeaseError):
                    self._answered(waited, effect.result)
        assert self.cache.check(self.sound) == []
        return outcome

    def _answered(self, command: c.Command, reply: object) -> None:
        if isinstance(reply, Reserved) and isinstance(command, c.Reserve):
            self._granted(command, reply)
        elif isinstance(reply, Reloaded) and isinstance(command, c.Reload) and command.lease_id:
            worker_id, keys, _ = self.on_host.pop(command.lease_id)
            self.leases[command.lease_id] = (worker_id, keys, ids(reply.block_ids))

    def _granted(self, command: c.Reserve, reply: Reserved) -> None:
        hit_tokens = (
            reply.device_hit_tokens
            + reply.host_hit_tokens
            + reply.disk_hit_tokens
            + reply.remote_hit_tokens
        )
        blocks, tenant = ids(reply.block_ids), TENANT_OF[command.worker_id]
        num_hits = hit_tokens // TOKENS_PER_BLOCK
        for block, key in zip(blocks[:num_hits], split(command.keys), strict=False):
            assert self.bytes_of["device"][block] == (tenant, key)
        for block in blocks[num_hits:]:
            self.bytes_of["device"][block] = None
        self.num_fetched += reply.remote_hit_tokens
        self.leases[reply.lease_id] = (command.worker_id, command.keys, blocks)

    # Those who use it -------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Have some worker ask for blocks for the start of one of its documents."""
        worker_id = self.rng.choice(list(TENANT_OF))
        num_blocks = self.rng.randint(1, BLOCKS_A_DOC)
        keys = chain(TENANT_OF[worker_id], self.rng.randrange(DOCS), num_blocks)
        self.num_requests += 1
        self.send(
            c.Reserve(
                worker_id=worker_id,
                request_id=str(self.num_requests),
                keys=keys,
                num_tokens=(num_blocks + self.rng.randint(0, 1)) * TOKENS_PER_BLOCK,
                wait_ms=self.rng.choice((0, WAIT_MS, WAIT_MS)),
            )
        )

    def commit(self) -> None:
        """Have a lease write what it can, and commit it."""
        if not self.leases:
            return
        lease_id = self.rng.choice(list(self.leases))
        worker_id, keys, blocks = self.leases[lease_id]
        for block, key in zip(blocks, split(keys), strict=False):
            if self.bytes_of["device"].get(block) is None:
                self.bytes_of["device"][block] = (TENANT_OF[worker_id], key)
        self.send(
            c.Commit(
                worker_id=worker_id,
                lease_id=lease_id,
                num_tokens=len(split(keys)) * TOKENS_PER_BLOCK,
                first_block=0,
                keys=keys,
            )
        )

    def release(self) -> None:
        """Have leases released."""
        for known in (self.leases, self.on_host):
            if known and self.rng.random() < 0.7:
                lease_id = self.rng.choice(list(known))
                worker_id, _, _ = known.pop(lease_id)
                self.send(c.Release(worker_id=worker_id, lease_id=lease_id))

    def evict(self) -> None:
        """Evict a lease, or the coldest blocks."""
        if self.leases and self.rng.random() < 0.4:
            lease_id = self.rng.choice(list(self.leases))
            worker_id = self.leases[lease_id][0]
            if self.send(c.Evict(worker_id=worker_id, lease_id=lease_id)) is not None:
                self.on_host[lease_id] = self.leases.pop(lease_id)
        else:
            self.send(c.Evict(num_blocks=self.rng.randint(1, 4)))

    def reload(self) -> None:
        """Bring a lease back."""
        if self.on_host:
            lease_id = self.rng.choice(list(self.on_host))
            worker_id = self.on_host[lease_id][0]
            if not any(
                isinstance(one, c.Reload) and one.lease_id == lease_id
                for one in self.waiting.values()
            ):
                self.send(c.Reload(worker_id=worker_id, lease_id=lease_id, wait_ms=WAIT_MS))

    def cancel(self) -> None:
        """Cancel a call."""
        reserves = [one for one, command in self.waiting.items() if isinstance(command, c.Reserve)]
        if reserves:
            ticket = self.rng.choice(reserves)
            del self.waiting[ticket]
            self.send(c.Cancel(ticket=ticket))

    # The movers and stores --------------------------------------------------------------------------------------------

    def land(self) -> None:
        """Let a mover end a copy, in one of several ways."""
        if not self.copies:
            return
        copy = self.copies.pop(self.rng.choice(list(self.copies)))
        chance = self.rng.random()
        if chance < 0.1:
            self.send(c.CopyFailed(copy_id=copy.copy_id))
        elif chance < 0.15:
            self.send(c.CopyLost(copy_id=copy.copy_id))
            self.copies[copy.copy_id] = copy
        else:
            self.send(c.CopyDone(copy_id=copy.copy_id, failed=self._carry_out(copy)))

    def _carry_out(self, copy: Copy) -> tuple[int, ...]:
        device, host, disk = (self.bytes_of[name] for name in ("device", "host", "disk"))
        sources, targets = ids(copy.source_ids), ids(copy.target_ids)
        labels: list[Bytes] = [
            (int(one["tenant"]), one["key"].tobytes()) for one in np.frombuffer(copy.labels, LABEL)
        ]
        failed = []
        for at in range(max(len(sources), len(targets))):
            if copy.direction is Direction.SCRUB:
                device[targets[at]] = None
            elif copy.direction is Direction.OFFLOAD:
                host[targets[at]] = device.get(sources[at])
            elif copy.direction is Direction.RELOAD:
                device[targets[at]] = host[sources[at]]
            elif copy.direction is Direction.SHARE:
                assert host[sources[at]] == labels[at]
                self.remote.add(labels[at])
            elif copy.direction is Direction.FETCH:
                device[targets[at]] = labels[at]
                if labels[at] not in self.remote:
                    failed.append(at)
            elif copy.direction is Direction.STORE:
                assert host[sources[at]] == labels[at]
                disk[targets[at]] = labels[at]
            else:
                assert copy.direction is Direction.LOAD
                device[targets[at]] = disk.get(sources[at])
                if disk.get(sources[at]) != labels[at]:
                    failed.append(at)
        return tuple(failed)

    def damage(self) -> None:
        """Give some disk slots other bytes, and have the remote store forget some blocks."""
        if self.bytes_of["disk"] and self.rng.random() < 0.2:
            self.bytes_of["disk"][self.rng.choice(list(self.bytes_of["disk"]))] = None
        if self.remote and self.rng.random() < 0.5:
            self.remote.discard(self.rng.choice(sorted(self.remote)))

    def answer(self) -> None:
        """Let the remote store answer a question."""
        if self.probes:
            probe = self.probes.pop(self.rng.choice(list(self.probes)))
            labels = np.frombuffer(probe.labels, LABEL)
            present = bytes(
                (int(one["tenant"]), one["key"].tobytes()) in self.remote for one in labels
            )
            self.send(c.Probed(probe_id=probe.probe_id, is_present=present))

    def turn(self) -> None:
        """Turn a store on or off, or let the host pool's mover hang."""
        tier = self.rng.choice((Tier.HOST, Tier.DISK, Tier.REMOTE))
        self.send(c.TierChanged(tier=tier, is_on=self.rng.random() < 0.7))

    def replace_disk(self) -> None:
        """Replace the disk store by an empty one."""
        self.bytes_of["disk"].clear()
        self.send(c.TierChanged(tier=Tier.DISK, is_on=True, is_empty=True))

    def kill(self) -> None:
        """Let a mover die."""
        mover = self.rng.choice(list(Mover))
        self.copies = {
            copy_id: copy
            for copy_id, copy in self.copies.items()
            if MOVER_OF[copy.direction] is not mover
        }
        self.send(c.MoverDied(mover=mover))

    def tick(self) -> None:
        """Let time pass while all workers live."""
        self.now += self.rng.choice((0.1, 0.5, 2.0))
        for worker_id in TENANT_OF:
            own = self.cache.lease_ids_of(worker_id)
            known = tuple(LeaseId(int(one)) for one in np.frombuffer(own, np.int64))
            self.send(c.Heartbeat(worker_id=worker_id, lease_ids=known, newest_lease_id=LeaseId(0)))
        self.send(c.Tick())

    # All of it --------------------------------------------------------------------------------------------------------

    def rage(self) -> None:
        """Do all kinds of acts, in random order."""
        acts = [
            (self.reserve, 6),
            (self.commit, 5),
            (self.release, 4),
            (self.evict, 2),
            (self.reload, 1),
            (self.land, 12),
            (self.answer, 5),
            (self.cancel, 0.5),
            (self.damage, 1.5),
            (self.turn, 0.3),
            (self.kill, 0.3),
            (self.replace_disk, 0.1),
            (self.tick, 1),
        ]
        for _ in range(NUM_STEPS):
            (act,) = self.rng.choices([one for one, _ in acts], [weight for _, weight in acts])
            act()

    def calm_down(self) -> None:
        """Let everything under way end."""
        for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE):
            self.send(c.TierChanged(tier=tier, is_on=True))
        for worker_id in TENANT_OF:
            self.send(c.WorkerDied(worker_id=worker_id))
        for _ in range(2000):
            self.now += 2.0
            self.send(c.Tick())
            for copy in list(self.copies.values()):
                del self.copies[copy.copy_id]
                self.send(c.CopyDone(copy_id=copy.copy_id, failed=self._carry_out(copy)))
            if not self.copies:
                return
        raise AssertionError("copies without end")
