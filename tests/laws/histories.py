"""Whole simulated histories, each made from one seed, and the tally of many of them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from kvleased.core.eviction import POLICIES
from tests.laws.acts import live
from tests.laws.apart import ApartWorld
from tests.laws.engines import MagazineWorld
from tests.laws.limited import LimitedWorld
from tests.laws.operated import OperatedWorld
from tests.laws.shapes import (
    MIXES,
    SHAPE,
    has_host,
    has_parts,
    mix_of,
    name_of,
    ranks_of,
    tiers_of,
    with_tiers,
)
from tests.laws.world import World

STEPS: Final = 500
"""Acts in a history, before it is healed."""

_HISTORIES_PER_POLICY: Final = 16
_EVENTS_A_CHECK: Final = 8
"""Events between two checks of all laws: a check takes as long as an event, and what is wrong stays so for longer."""

FOUND: Final = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError)
"""What shows that a law is broken: a violation, an assertion of the core, or anything else that it never raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken law, with the history and step in which it showed."""

    seed: int
    step: int
    text: str

    def __str__(self) -> str:
        """Return the violation, with the command that replays it."""
        return (
            f"{self.text}\n  in step {self.step}, replay: "
            f"python -m tests.laws.simulate --seed {self.seed}"
        )


@dataclass(slots=True)
class Tally:
    """The results of many histories."""

    num_histories: int = 0
    num_operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        """Number of faults of all kinds."""
        return self.faults.total()

    def add(self, other: "Tally") -> None:
        """Add another tally to this one."""
        self.num_histories += other.num_histories
        self.num_operations += other.num_operations
        self.faults += other.faults
        self.violations += other.violations


def world_of(seed: int) -> World:
    """Return the world of a history: half of them have one group, some have limits or stores; policies take turns."""
    name, policy = name_of(seed), POLICIES[seed // _HISTORIES_PER_POLICY % len(POLICIES)]
    if name == "limited":
        return LimitedWorld(seed, policy, tiers_of(seed))
    if name == "operated":
        return OperatedWorld(seed, policy, tiers_of(seed))
    if name == "magazines":
        return MagazineWorld(seed, policy, tiers_of(seed))
    if name == "ranks":
        shape = with_tiers(ranks_of(seed), tiers_of(seed))
        return ApartWorld(seed, replace(shape, eviction_policy=policy))
    shape = with_tiers(mix_of(seed) if name in MIXES else SHAPE, tiers_of(seed))
    if not has_host(seed):
        shape = replace(shape, num_slots=0)
    if has_parts(seed):
        shape = replace(shape, blocks_at_once=1)
    return World(seed, shape=replace(shape, eviction_policy=policy))


def play(seeds: Iterable[int], steps: int = STEPS) -> Tally:
    """Play the histories of these seeds to their ends, or each to its first violation.

    If something goes wrong in a history, it is played again, to find the exact event.
    """
    tally = Tally()
    for seed in seeds:
        world, violation = lived(seed, steps, _EVENTS_A_CHECK)
        if violation is not None:
            _, first = lived(seed, steps, 1)
            tally.violations.append(first or violation)
        tally.num_histories += 1
        tally.num_operations += world.num_operations
        tally.faults += world.faults
    return tally


def breaks_a_law(seed: int) -> bool:
    """Tell whether something goes wrong in one history, after whichever event."""
    return lived(seed, STEPS, _EVENTS_A_CHECK)[1] is not None


def lived(seed: int, steps: int, events_a_check: int) -> tuple[World, Violation | None]:
    """Play one history, and return its world, and the first violation if there is one."""
    world = world_of(seed)
    world.events_a_check = events_a_check
    try:
        live(world, steps)
        world.check_whole()
    except FOUND as error:
        text = f"{type(error).__name__}: {error}"
        return world, Violation(seed=seed, step=world.step, text=text)
    return world, None
