"""What stores do in the simulated world, and what can go wrong with them: answers, damage, failures, other nodes."""

from typing import Final

from kvlease.ids import BYTES_PER_KEY
from kvleased.core import commands
from kvleased.core.effects import Direction, Probe, Tier
from tests.laws.actors import Mark
from tests.laws.containers import restart_container
from tests.laws.needs import kept_under
from tests.laws.picks import pick_chain, pick_worker
from tests.laws.stores import TORN, Label, is_of_store, labels_of, pack
from tests.laws.world import World

_STORES: Final = (Tier.DISK, Tier.REMOTE)
_SHARE_OFF: Final = 0.4
"""Share of the changes after which a store does not work."""
_TOLD_AT_ONCE: Final = 8
_LIES: Final = 0.15
"""Share of the slots of which a store tells something untrue."""
_OF_LABELS: Final = ("tenant", "nobody", "generation", "wild", "place", "key")
_NO_GENERATION: Final = 2**62
_STRANGER: Final = 5
_FAILURES: Final = (0.0, 0.0, 0.02, 0.15)
"""Shares of the pairs that a store fails to copy; each history has one of them."""
_SHARE_OLD: Final = 0.6
"""Share of the histories in which the disk is not empty at the beginning."""
_SHARE_LOST: Final = 0.4
_SHARE_AWAY: Final = 0.4
"""Share of the stores turned off that only lack their mover."""


def begin(world: World) -> None:
    """Choose how often the stores of a history fail, and what an earlier life has left on disk."""
    world.stores.failures = world.rng.choice(_FAILURES)
    if world.rng.random() < _SHARE_OLD:
        _fill(world)
        _seek(world)
        tell_disk(world)


def tell_disk(world: World, *, is_empty: bool = False) -> None:
    """Let the disk mover say that its store works, and whether it has told everything that is there."""
    is_read = world.stores.is_read = not world.stores.found
    world.send(commands.TierChanged(tier=Tier.DISK, is_on=True, is_empty=is_empty, is_read=is_read))


def _fill(world: World) -> None:
    """Put on disk what an earlier life may have left there."""
    for slot in range(len(world.stores.disk)):
        tenant = world.rng.choice([one.tenant for one in world.workers.values()])
        blocks = _document(world, tenant)
        if blocks:
            key, position, mark = world.rng.choice(blocks)
            label = Label(key, tenant, world.rng.randint(0, 3), position)
            world.stores.disk[slot] = (mark, label)


def _document(world: World, tenant: int) -> list[tuple[bytes, int, Mark]]:
    """Return the key, position and bytes of each block of a document."""
    chain = pick_chain(world, tenant, world.rng.randint(1, 12))
    return [
        (kept_under(chain[last], at), last, ("key", chain[last], at))
        for at, group in enumerate(world.shape.groups)
        if group.keys_per_block
        for last in range(group.keys_per_block - 1, len(chain), group.keys_per_block)
    ]


# Work -----------------------------------------------------------------------------------------------------------------


def answer(world: World) -> None:
    """Let the remote store say what it has."""
    if world.stores.probes:
        answer_one(world, world.rng.choice(list(world.stores.probes)))


def answer_one(world: World, probe_id: int) -> None:
    """Let the remote store answer one question correctly."""
    probe = world.stores.probes.pop(probe_id)
    tell(world, probe, _truth(world, probe))


def tell(world: World, probe: Probe, is_present: bytes) -> None:
    """Give an answer to the core."""
    world.send(commands.Probed(probe_id=probe.probe_id, is_present=is_present))


def _truth(world: World, probe: Probe) -> bytes:
    remote = world.stores.remote
    return bytes((label.tenant, label.key) in remote for label in labels_of(probe.labels))


def neighbour(world: World) -> None:
    """Let another node compute a document, and share it."""
    worker = pick_worker(world)
    if worker is None or not world.shape.uses_remote:
        return
    for key, _, mark in _document(world, worker.tenant):
        world.stores.share((worker.tenant, key), mark)


def mend(world: World) -> None:
    """Let the movers of stores say that these work, as they do soon after each start of the control process."""
    tell_disk(world)
    world.send(commands.TierChanged(tier=Tier.REMOTE, is_on=True))


def find(world: World, share_of_lies: float = _LIES) -> None:
    """Let the disk store tell what an earlier life left in some slots, though not always truthfully."""
    told, world.stores.found = (
        world.stores.found[:_TOLD_AT_ONCE],
        world.stores.found[_TOLD_AT_ONCE:],
    )
    slots, labels = [], []
    for slot in told:
        _, label = world.stores.disk[slot]
        if world.rng.random() < share_of_lies:
            slot, label = _lie(world, slot, label)  # noqa: PLW2901  # what is told instead
        if label is not None:
            slots.append(slot)
            labels.append(label)
    if slots:
        world.send(
            commands.Adopt(
                slot_ids=b"".join(slot.to_bytes(4, "little", signed=True) for slot in slots),
                labels=pack(labels),
                checksums=b"".join(world.rng.choice((0, 1)).to_bytes(8, "little") for _ in slots),
            )
        )
    if not (world.stores.found or world.stores.is_read or is_off(world, Tier.DISK)):
        tell_disk(world)


def find_all(world: World) -> None:
    """Let the disk store tell, truthfully, all that is left to be told."""
    while world.stores.found:
        find(world, share_of_lies=0.0)


def is_off(world: World, tier: Tier) -> bool:
    """Tell whether the core believes that a store does not work."""
    return tier in world.cache._state.tiers_off


def _keys(world: World, tenant: int) -> list[bytes]:
    """Return keys of a tenant's blocks, and one key that no block has."""
    return [world.rng.randbytes(BYTES_PER_KEY), *(key for key, _, _ in _document(world, tenant))]


def _lie(world: World, slot: int, label: Label | None) -> tuple[int, Label | None]:
    """Return something untrue about a slot; if it is believed, nothing worse than a miss follows."""
    if label is None:
        worker = pick_worker(world)
        if worker is None:
            return slot, None
        key = kept_under(pick_chain(world, worker.tenant, 1)[0], 0)
        label = Label(key, worker.tenant, 1, world.shape.groups[0].keys_per_block)
    kind = world.rng.choice((*_OF_LABELS, "slot", "missing"))
    if kind == "slot":
        return world.rng.choice((-1, len(world.stores.disk), 2**31 - 1)), label
    if kind == "missing":
        return slot, None
    lies = {
        "tenant": label._replace(tenant=_STRANGER),
        "nobody": label._replace(tenant=0),
        "generation": label._replace(generation=label.generation + world.rng.randint(1, 9)),
        "wild": label._replace(generation=_NO_GENERATION + world.rng.randint(0, 9)),
        "place": label._replace(position=label.position + 1),
        "key": label._replace(key=world.rng.choice(_keys(world, label.tenant))),
    }
    world.stores.damaged.add(slot)
    world.faults["lie"] += 1
    return slot, lies[kind]


# Faults ---------------------------------------------------------------------------------------------------------------


def answer_badly(world: World) -> None:
    """Let the remote store's answer be wrong, cut short, too long or empty, or come twice or never."""
    if not world.stores.probes:
        return
    world.faults["bad answer"] += 1
    probe = world.stores.probes.pop(world.rng.choice(list(world.stores.probes)))
    truth = _truth(world, probe)
    kind = world.rng.choice(("wrong", "all", "short", "long", "empty", "twice", "never"))
    if kind == "never":
        return
    if kind == "twice":
        tell(world, probe, truth)
    answers = {
        "wrong": world.rng.randbytes(len(truth)),
        "all": b"\1" * len(truth),
        "short": truth[: world.rng.randrange(len(truth) + 1)],
        "long": truth + b"\1\1\1",
        "empty": b"",
    }
    tell(world, probe, answers.get(kind, truth))


def forget(world: World) -> None:
    """Let the remote store forget some blocks, or all."""
    remote = world.stores.remote
    if remote:
        world.faults["forget"] += 1
        for name in world.rng.sample(sorted(remote), world.rng.randint(1, len(remote))):
            del remote[name]


def damage(world: World) -> None:
    """Change a slot of the disk: its bytes, its label (which shows by itself), or both to those of another slot."""
    disk = world.stores.disk
    if not disk:
        return
    slot = world.rng.randrange(len(disk))
    mark, label = disk[slot]
    if label is None:
        return
    world.faults["damage"] += 1
    world.stores.damaged.add(slot)
    other = world.rng.choice(disk)
    disk[slot] = world.rng.choice(((("flipped", slot), label), (mark, None), (TORN, None), other))


def dawdle(world: World) -> None:
    """Let a store not answer in time, and go on writing what nobody waits for any more."""
    jobs = [job for job in world.jobs.values() if is_of_store(job.copy) and not job.is_lost]
    if jobs:
        world.faults["copy_lost"] += 1
        job = world.rng.choice(jobs)
        job.is_lost = True
        world.send(commands.CopyLost(copy_id=job.copy.copy_id))


def turn(world: World) -> None:
    """Let a store stop working, or work again."""
    world.faults["turn"] += 1
    is_on = world.rng.random() >= _SHARE_OFF
    tier, is_mover_away = world.rng.choice(_STORES), not is_on and world.rng.random() < _SHARE_AWAY
    if is_on and tier is Tier.DISK:
        tell_disk(world)
    else:
        world.send(commands.TierChanged(tier=tier, is_on=is_on, is_mover_away=is_mover_away))


def replace_disk(world: World) -> None:
    """Replace the disk store by another one, which is empty or has what another life left there."""
    disk = world.stores.disk
    if not disk:
        return
    world.faults["disk replaced"] += 1
    disk[:] = [(TORN, None)] * len(disk)
    if world.rng.random() < _SHARE_OLD:
        _fill(world)
    world.stores.damaged.update(range(len(disk)))
    for job in world.jobs.values():
        job.is_of_other_disk = True
        job.is_lost |= job.copy.direction is Direction.STORE
    _seek(world)
    tell_disk(world, is_empty=True)


def steal(world: World) -> None:
    """Let a worker ask with another tenant's keys: it may get only blocks of its own."""
    worker = pick_worker(world)
    others = sorted({one.tenant for one in world.workers.values()} - {worker and worker.tenant})
    if worker is None or not others:
        return
    world.faults["steal"] += 1
    world.num_requests += 1
    keys = pick_chain(world, world.rng.choice(others), world.rng.randint(1, 6))
    command = commands.Reserve(
        worker_id=worker.worker_id,
        request_id=f"r{world.num_requests}",
        keys=b"".join(keys),
        num_tokens=min(world.longest_tokens, (len(keys) + 1) * world.shape.hash_tokens),
        wait_ms=world.rng.choice((0, 2000, 20_000)),
    )
    keys_max = -(-command.num_tokens // world.shape.hash_tokens)
    if len(keys) <= keys_max:
        world.call(worker, command)


def seek_again(world: World) -> None:
    """Begin a search of the disk anew before it has ended; it also finds what was written since."""
    if world.stores.disk:
        world.faults["seek again"] += 1
        _seek(world)
        if not is_off(world, Tier.DISK):
            tell_disk(world)


def _seek(world: World) -> None:
    slots = [slot for slot, (_, label) in enumerate(world.stores.disk) if label is not None]
    world.rng.shuffle(slots)
    world.stores.found = slots


def lose_all(world: World) -> None:
    """Start the whole container anew: only files and the disk store are left."""
    if world.rng.random() >= _SHARE_LOST:
        return
    world.faults["container"] += 1
    restart_container(world)
    _seek(world)
    if not is_off(world, Tier.DISK):
        tell_disk(world)
