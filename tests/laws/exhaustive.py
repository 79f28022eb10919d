"""Every history of a tiny world, breadth first: each command and each fault in each state that can be reached.

A state is not copied but replayed from the beginning, because the core is deterministic. So a violation comes with the
shortest path to it. States that differ only in names (ids, which are taken in the order of their issue, generations,
and past times) count as one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvlease.groups import Keeps, keeps_everything
from kvleased.core import CacheShape
from tests.laws.healing import heal
from tests.laws.histories import FOUND
from tests.laws.small import SmallWorld

Path = tuple[str, ...]

TINY: Final = CacheShape(
    num_blocks=3,
    null_blocks=1,
    num_slots=1,
    groups=(keeps_everything(4, 2),),
    hash_tokens=4,
    hit_tokens=4,
    max_leases=3,
    max_waiting=2,
    max_pins=1,
    lease_seconds=30.0,
    layout_digest=99,
)
_FULL: Final = keeps_everything(4, 2)
SHAPES: Final = {
    "tiny": TINY,
    "two slots": replace(TINY, num_slots=2),
    "two groups": replace(
        TINY,
        num_blocks=5,
        num_slots=2,
        groups=(_FULL, replace(_FULL, keeps=Keeps.WINDOW, kept_tokens=3)),
    ),
}
"""The worlds that are searched: two blocks and one or two slots, or twice as much of everything and a window besides.

All of them have two workers of two tenants.
"""

ROOTS: Final[dict[str, Path]] = {
    "empty": (),
    "cached": ("reserve 0 one keyed", "commit 0 0", "release 0 0"),
    "on host": (
        "reserve 0 one keyed",
        "commit 0 0",
        "release 0 0",
        "evict coldest",
        "copy 0 done",
    ),
    "evicted": ("reserve 0 one keyed", "scribble 0 0", "evict 0 0", "copy 0 done"),
}
"""Where searches begin: from here, states are near that are far from the empty world."""


@dataclass(slots=True, kw_only=True)
class Search:
    """The results of a search."""

    depth: int = 0
    """All histories of so many steps have been played."""
    num_transitions: int = 0
    seen: set[bytes] = field(default_factory=set)
    violation: str = ""
    path: Path = ()

    def __str__(self) -> str:
        """Return the figures, or the violation with the shortest path to it."""
        if self.violation:
            return f"{self.violation}\n  after: {', '.join(self.path)}"
        return (
            f"depth {self.depth}, {len(self.seen):,} states, {self.num_transitions:,} transitions"
        )


def search(
    shape: CacheShape, root: Path = (), *, depth: int, seconds: float = float("inf")
) -> Search:
    """Play every history of up to `depth` steps from a root; end early at a violation or when time is up."""
    found = Search()
    end = time.monotonic() + seconds
    for at, step in enumerate(root):
        _is_new(shape, root[:at], step, found)
        if found.violation:
            return found
    frontier: list[Path] = [root]
    while frontier and found.depth < depth:
        after: list[Path] = []
        for path in frontier:
            for step in _steps(shape, path):
                if time.monotonic() > end:
                    return found
                if _is_new(shape, path, step, found):
                    after.append((*path, step))
                if found.violation:
                    return found
        frontier = after
        found.depth += 1
    return found


def _steps(shape: CacheShape, path: Path) -> list[str]:
    return list(_replayed(shape, path).steps())


def _replayed(shape: CacheShape, path: Path) -> SmallWorld:
    """Return the world at the end of a path; every state on the way has been checked already."""
    world = SmallWorld(shape)
    for step in path:
        world.take(step)
    world.is_checked = True
    return world


def _is_new(shape: CacheShape, path: Path, step: str, found: Search) -> bool:
    """Take one more step, check the state that it leads to, and tell whether that state is new."""
    found.num_transitions += 1
    try:
        world = _replayed(shape, path)
        world.take(step)
        world.look_around()
        digest = world.fingerprint()
        if digest in found.seen:
            return False
        found.seen.add(digest)
        if digest[0] < _HEALED:
            heal(world)
    except FOUND as error:
        found.violation, found.path = f"{type(error).__name__}: {error}", (*path, step)
    return True


_HEALED: Final = 8
"""Of 256 states, so many are healed, after which everything must be given back."""


def search_all(seconds: float, say: Callable[[str], None]) -> int:
    """Search every world from every root, each for its share of the time; return 1 if a law was broken."""
    share = seconds / len(SHAPES) / len(ROOTS)
    is_broken = False
    for name, shape in SHAPES.items():
        for root, path in ROOTS.items():
            found = search(shape, path, depth=1_000, seconds=share)
            say(f"{name}, from {root}: {found}")
            is_broken |= bool(found.violation)
    return int(is_broken)
