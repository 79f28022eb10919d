"""The simulated stores below the host pool: what is on disk under which label, and what the remote store has.

Both keep bytes only as long as they like. A store never claims to hold what it is not sure of: it compares the label
and the checksum of what it reads, and then says at which positions of a copy there was nothing usable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from kvleased.core import CacheShape
from kvleased.core.effects import Copy, Direction, Probe
from kvleased.core.tier.labels import LABEL
from tests.laws.actors import ZERO, Job, Mark, is_of
from tests.laws.holders import tenant_of

if TYPE_CHECKING:
    from tests.laws.world import World

TORN: Final[Mark] = ("torn",)


class Label(NamedTuple):
    """What a store is told of a block."""

    key: bytes
    tenant: int
    generation: int
    position: int


def labels_of(packed: bytes) -> list[Label]:
    """Return packed labels one by one."""
    return [
        Label(
            one["key"].tobytes(), int(one["tenant"]), int(one["generation"]), int(one["position"])
        )
        for one in np.frombuffer(packed, LABEL)
    ]


def pack(labels: Sequence[Label]) -> bytes:
    """Return labels in packed form."""
    packed = np.zeros(len(labels), LABEL)
    for at, label in enumerate(labels):
        packed[at] = (label.key, label.tenant, label.generation, label.position, 0)
    return packed.tobytes()


@dataclass(eq=False)
class Stores:
    """What is in the stores of one node, and the questions put to them."""

    disk: list[tuple[Mark, Label | None]]
    """The bytes of each slot, and the label beside them; None if the label is torn."""
    remote: dict[tuple[int, bytes], Mark] = field(default_factory=dict)
    """The blocks, by tenant and key."""
    probes: dict[int, Probe] = field(default_factory=dict)
    """Questions that the remote store has not answered."""
    found: list[int] = field(default_factory=list)
    """Slots of the disk left by an earlier life that the core has not been told of yet."""
    is_read: bool = True
    """Whether there were no such slots when the core was last told that the disk works."""
    damaged: set[int] = field(default_factory=set)
    """Slots of the disk that hold something other than the core was told."""
    positions: dict[bytes, int] = field(default_factory=dict)
    """The place of each key's block in its chain, as labels give it."""
    ever_shared: set[tuple[int, bytes]] = field(default_factory=set)
    """All blocks that the remote store ever had, by tenant and key."""
    failures: float = 0.0

    @classmethod
    def of(cls, shape: CacheShape) -> Self:
        """Return the stores of a new node."""
        return cls([(ZERO, None)] * shape.num_disk_slots)

    def share(self, name: tuple[int, bytes], mark: Mark) -> None:
        """Give the remote store a block."""
        self.remote[name] = mark
        self.ever_shared.add(name)


def has_stores(world: "World") -> bool:
    """Tell whether there is any store below the host pool."""
    return bool(world.shape.num_disk_slots) or world.shape.uses_remote


# Copies ---------------------------------------------------------------------------------------------------------------


def carry_out(world: "World", job: Job, at: int) -> None:
    """Copy one block to or from a store."""
    copy, label = job.copy, job_labels(job)[at]
    if copy.direction is not Direction.LOAD:
        _compare_position(world, label)
    if copy.direction is Direction.STORE:
        _store(world, job, at, label)
    elif copy.direction is Direction.SHARE:
        _share(world, job, at, label)
    elif copy.direction is Direction.LOAD:
        _load(world, job, at, label)
    else:
        _fetch(world, job, at, label)


def job_labels(job: Job) -> list[Label]:
    """Return the labels of a copy."""
    if job.labels is None:
        job.labels = labels_of(job.copy.labels)
    return job.labels


def _compare_position(world: "World", label: Label) -> None:
    """Check that a key has one place in its chain, because it stands for all that comes before its block."""
    known = world.stores.positions.setdefault(label.key, label.position)
    if known != label.position:
        world.fail(f"{label} was at {known} in its chain before")


def _is_refused(world: "World", job: Job, at: int) -> bool:
    """Tell whether a store refuses to take a block, or to give it."""
    if world.stores.failures and world.rng.random() < world.stores.failures:
        job.failed.add(at)
        return True
    return False


def _read_host(world: "World", job: Job, at: int, label: Label) -> Mark | None:
    """Return the bytes of a slot, which must belong to the label; None if a checksum shows that they do not."""
    slot = job.sources[at]
    if slot in world.flipped:
        job.failed.add(at)
        return None
    mark = world.host[slot]
    if not is_of(mark, label.key) or tenant_of(world, mark) != label.tenant:
        world.fail(f"slot {slot} was copied down as {label} and holds {mark}")
    return mark


def _store(world: "World", job: Job, at: int, label: Label) -> None:
    slot, mark = job.targets[at], _read_host(world, job, at, label)
    world.stores.damaged.discard(slot)
    if mark is None or _is_refused(world, job, at):
        world.stores.disk[slot] = (TORN, None)
    else:
        world.stores.disk[slot] = (mark, label)


def _share(world: "World", job: Job, at: int, label: Label) -> None:
    mark = _read_host(world, job, at, label)
    if mark is not None and not _is_refused(world, job, at):
        world.stores.share((label.tenant, label.key), mark)


def _load(world: "World", job: Job, at: int, label: Label) -> None:
    slot = job.sources[at]
    mark, stored = world.stores.disk[slot]
    if slot not in world.stores.damaged:
        _compare_position(world, label)
    if stored != label and slot not in world.stores.damaged:
        world.fail(f"disk slot {slot} is to be loaded as {label}, and is labelled {stored}")
    if stored != label or _is_refused(world, job, at):
        job.failed.add(at)
        return
    block = job.targets[at]
    if mark[0] == "key":
        world.device[block] = mark
    else:
        job.failed.add(at)
        world.device[block] = _garbage(label)


def _fetch(world: "World", job: Job, at: int, label: Label) -> None:
    mark = world.stores.remote.get((label.tenant, label.key))
    if mark is not None and not _is_refused(world, job, at):
        world.device[job.targets[at]] = mark
        return
    job.failed.add(at)
    if world.rng.random() < 0.5:
        world.device[job.targets[at]] = _garbage(label)


def _garbage(label: Label) -> Mark:
    """Return part of a tenant's bytes."""
    return ("private", label.tenant, "half", label.key)


def tear(world: "World", job: Job) -> None:
    """Leave the next pair of a copy half done, as the death of a mover does."""
    if job.done >= job.num_pairs:
        return
    if job.copy.direction is Direction.STORE:
        world.stores.disk[job.targets[job.done]] = (TORN, None)
    elif job.copy.direction in (Direction.LOAD, Direction.FETCH):
        world.device[job.targets[job.done]] = _garbage(job_labels(job)[job.done])


def is_of_store(copy: Copy) -> bool:
    """Tell whether a store is one end of a copy."""
    return copy.direction in (Direction.STORE, Direction.LOAD, Direction.SHARE, Direction.FETCH)
