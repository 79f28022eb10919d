"""A point of the sweep: a small world, what its daemon asks for, one fault, and what must hold afterwards."""

import os
import random
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvleased.movers.protocol import Completion
from tests.laws.disks import Driver, Pools, labels_of, payload_of
from tests.laws.sweep_server import SYSCALLS, ForkServer, run_mover

_ERRORS: Final = {
    "openat": ("EIO", "ENOSPC", "EROFS", "EMFILE"),
    "mkdir": ("ENOSPC", "EROFS"),
    "fstat": ("EIO",),
    "newfstatat": ("EIO",),
    "flock": ("EIO",),
    "getdents64": ("EIO",),
    "fallocate": ("ENOSPC", "EIO"),
    "pread64": ("EIO",),
    "preadv2": ("EIO",),
    "pwritev2": ("EIO", "ENOSPC", "EROFS"),
    "fdatasync": ("EIO", "ENOSPC"),
    "fsync": ("EIO", "ENOSPC"),
    "renameat": ("ENOSPC", "EROFS", "EIO"),
    "unlinkat": ("EIO", "EROFS"),
}
_SHORT: Final = ("pread64", "preadv2", "pwritev2")
_SHORT_BYTES: Final = 100
_KINDS_OF_POOLS: Final = (
    Pools(num_blocks=6, num_slots=6, num_disk_slots=6),
    Pools(num_blocks=6, num_slots=6, num_disk_slots=6, bytes_per_slot=5000),
    Pools(num_blocks=6, num_slots=6, num_disk_slots=6, num_pieces=4, padding_bytes=192),
    # Large enough for two threads.
    Pools(num_blocks=4, num_slots=4, num_disk_slots=4, bytes_per_slot=600 << 10),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One request of the daemon."""

    verb: str
    """`store`, `load` or `remap`."""
    slots: tuple[int, ...] = ()
    contents: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class World:
    """A store, what an earlier life left in it, and what happens to it."""

    seed: int
    pools: Pools
    left: tuple[int, ...]
    """Slots that an earlier life filled, each with the content of its own number; empty if there is no store yet."""
    has_stale: bool
    """Whether a store of another shape must give way first."""
    steps: tuple[Step, ...]

    @property
    def bytes_max(self) -> int:
        """The limit of the directory."""
        return self.pools.shape.file_bytes + self._stale.shape.file_bytes - 4096

    @property
    def _stale(self) -> Pools:
        return replace(self.pools, num_disk_slots=2)

    def furnish(self, stores: Path) -> None:
        """Make what an earlier life left."""
        if self.has_stale:
            with _own_mover(stores, self._stale, 0) as driver:
                driver.until_on()
        if self.left:
            with _own_mover(stores, self.pools, 0) as driver:
                _store(driver, Step(verb="store", slots=self.left, contents=self.left))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One fault."""

    syscall: str
    fault: str
    """The fault as strace writes it, without the number of the call."""
    nth: int
    is_kill: bool = False
    is_lasting: bool = False
    """Whether that call and all later ones fail."""
    is_lie: bool = False
    """Whether the call claims what it did not do; bytes may then be lost, but still must not be wrong."""

    def __str__(self) -> str:
        return f"{self.syscall}:{self.fault}:when={self.nth}{'+' if self.is_lasting else ''}"


@dataclass(slots=True)
class Verdict:
    """The results of a point."""

    was_hit: bool = False
    lost: int = 0
    leaked: int = 0
    wrong: int = 0
    torn: int = 0
    """Slots that were found but whose bytes were not served."""
    raised: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether everything held."""
        return not (self.lost or self.leaked or self.wrong or self.torn or self.raised)


@dataclass(slots=True)
class _Memory:
    """What the daemon knows of each slot."""

    acknowledged: dict[int, int] = field(default_factory=dict)
    """The content of each slot whose store was acknowledged, unless another was begun since."""
    possible: dict[int, set[int]] = field(default_factory=dict)
    """Contents that a slot may hold, if it holds any."""

    def began(self, slot: int, content: int) -> None:
        """Note that a store of this content was requested."""
        self.acknowledged.pop(slot, None)
        self.possible.setdefault(slot, set()).add(content)

    def ended(self, slot: int, content: int) -> None:
        """Note that the store was acknowledged."""
        self.acknowledged[slot] = content
        self.possible[slot] = {content}


def world_of(seed: int) -> World:
    """Return the world with this number."""
    rng = random.Random(seed)  # noqa: S311 - nothing is secret
    pools = _KINDS_OF_POOLS[seed % len(_KINDS_OF_POOLS)]
    slots = range(pools.num_disk_slots)
    left = tuple(sorted(rng.sample(slots, rng.randint(2, len(slots))))) if seed % 3 else ()
    contents = iter(range(100, 1000))
    steps: list[Step] = []
    for verb in ("store", *rng.choices(("store", "load", "remap"), k=2), "store", "load"):
        chosen = tuple(rng.sample(slots, rng.randint(1, len(slots) - 1)))
        named = tuple(next(contents) for _ in chosen) if verb == "store" else ()
        steps.append(Step(verb=verb, slots=() if verb == "remap" else chosen, contents=named))
    return World(
        seed=seed, pools=pools, left=left, has_stale=not left and seed % 2 == 0, steps=tuple(steps)
    )


def points_of(
    world: World, server: ForkServer, template: Path, syscalls: Sequence[str] = SYSCALLS
) -> Iterator[Point]:
    """Yield all faults that are possible in a world: every call, in every way that it can go wrong."""
    with _copied(template) as stores, server.traced():
        pid, link = server.fork(stores, world.bytes_max)
        with Driver(link, world.pools) as driver:
            _play(driver, world, _Memory())
        server.status()
    calls = server.calls(pid)
    for syscall in syscalls:
        for nth in range(1, calls[syscall] + 1):
            yield Point(syscall=syscall, fault="signal=SIGKILL", nth=nth, is_kill=True)
            for name in _ERRORS.get(syscall, ()):
                yield Point(syscall=syscall, fault=f"error={name}", nth=nth)
                yield Point(syscall=syscall, fault=f"error={name}", nth=nth, is_lasting=True)
            if syscall in _SHORT:
                yield Point(syscall=syscall, fault=f"retval={_SHORT_BYTES}", nth=nth)
            if syscall == "pwritev2":
                fault = f"retval={world.pools.shape.stride_bytes}"
                yield Point(syscall=syscall, fault=fault, nth=nth, is_lie=True)


def judge(world: World, point: Point, server: ForkServer, template: Path) -> Verdict:
    """Let a mover meet a fault, start the next mover, and check what is there."""
    verdict, memory = Verdict(), _Memory()
    for slot in world.left:
        memory.ended(slot, slot)
    with _copied(template) as stores:
        with server.traced(str(point)):
            _, link = server.fork(stores, world.bytes_max)
            with Driver(link, world.pools) as driver:
                try:
                    verdict.wrong += _play(driver, world, memory)
                except (ConnectionResetError, BrokenPipeError):
                    verdict.notes.append("the mover ended")
                except TimeoutError:
                    verdict.raised += 1
                    verdict.notes.append("the mover hangs")
            status = server.status()
        if status == -signal.SIGKILL and point.is_kill:
            verdict.was_hit = True
        else:
            verdict.was_hit = server.was_injected
            verdict.raised += status != 0
        _recover(world, memory, stores, verdict)
    if point.is_lie:
        verdict.lost = verdict.torn = 0
    return verdict


def _play(driver: Driver, world: World, memory: _Memory) -> int:
    """Go through the steps of a world; return how often wrong bytes were served."""
    driver.map()
    wrong = 0
    for step in world.steps:
        if step.verb == "remap":
            driver.unmap()
            driver.map()
        elif step.verb == "store":
            for slot, content in zip(step.slots, step.contents, strict=True):
                memory.began(slot, content)
            done = _store(driver, step)
            for position, slot in enumerate(step.slots):
                if done.is_done and position not in done.failed:
                    memory.ended(slot, step.contents[position])
        else:
            known = {slot: memory.acknowledged.get(slot, slot) for slot in step.slots}
            wrong += _wrong_loads(driver, known)
    return wrong


def _store(driver: Driver, step: Step) -> Completion:
    hosts = list(range(len(step.slots)))
    sums = [driver.fill(host, content) for host, content in zip(hosts, step.contents, strict=True)]
    return driver.store(list(step.slots), labels_of(list(step.contents)), hosts, sums)


def _wrong_loads(driver: Driver, contents: dict[int, int]) -> int:
    """Load slots; return how many blocks are said to be there but hold other bytes."""
    served = _loaded(driver, contents)
    return sum(block != payload_of(contents[slot], len(block)) for slot, block in served.items())


def _loaded(driver: Driver, contents: dict[int, int]) -> dict[int, bytes]:
    """Load slots; return the bytes of those that are said to be there."""
    driver.wipe()
    slots, blocks = list(contents), list(range(len(contents)))
    done = driver.load(slots, labels_of(list(contents.values())), blocks)
    good = done.is_done
    return {
        slot: driver.block(block)
        for slot, block in zip(slots, blocks, strict=True)
        if good and block not in done.failed
    }


def _recover(world: World, memory: _Memory, stores: Path, verdict: Verdict) -> None:
    """Start a mover that meets no fault, and compare what it has with what it must have."""
    num_slots = world.pools.num_disk_slots
    with _own_mover(stores, world.pools, world.bytes_max) as driver:
        while not driver.statuses:
            driver.hear()
        if not driver.statuses[0].is_on:
            verdict.leaked += num_slots
            verdict.notes.append(driver.statuses[0].reason)
            return
        _check_found(driver, memory, verdict)
        fresh = Step(
            verb="store",
            slots=tuple(range(num_slots)),
            contents=tuple(range(2000, 2000 + num_slots)),
        )
        _store(driver, fresh)
        kept = _loaded(driver, dict(zip(fresh.slots, fresh.contents, strict=True)))
        verdict.leaked += num_slots - len(kept)
    names = [path.name for path in stores.iterdir()]
    verdict.leaked += sum(name.endswith(".new") for name in names)
    used_bytes = sum(path.stat().st_size for path in stores.glob("*.store*"))
    verdict.leaked += used_bytes > world.bytes_max


def _check_found(driver: Driver, memory: _Memory, verdict: Verdict) -> None:
    """Compare what a store has with what it must and may have."""
    found = {slot: _content_of(label) for slot, (label, _) in driver.look().items()}
    for slot, content in found.items():
        if content not in memory.possible.get(slot, set()):
            verdict.wrong += 1
            verdict.notes.append(f"slot {slot} claims {content}")
    served = _loaded(driver, found)
    verdict.torn += len(found) - len(served)
    for slot, block in served.items():
        verdict.wrong += block != payload_of(found[slot], len(block))
    for slot, content in memory.acknowledged.items():
        if found.get(slot) != content or slot not in served:
            verdict.lost += 1
            verdict.notes.append(f"slot {slot} lost {content}")


def _content_of(label: bytes) -> int:
    return int.from_bytes(label[:32], "little") - 1


@contextmanager
def _own_mover(stores: Path, pools: Pools, bytes_max: int) -> Iterator[Driver]:
    """Fork a mover that meets no fault, and in the end wait for its exit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        os._exit(run_mover(stores, bytes_max, theirs))
    theirs.close()
    with Driver(ours, pools) as driver:
        driver.map()
        yield driver
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, "a mover without faults has ended badly"


@contextmanager
def _copied(template: Path) -> Iterator[Path]:
    """Copy a directory of stores for one point, and remove the copy afterwards."""
    stores = template.with_name("stores")
    if template.exists():
        shutil.copytree(template, stores)
    yield stores
    shutil.rmtree(stores, ignore_errors=True)
