"""Whole simulated histories, each from one seed, and the tally of many of them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from kvleased.core.eviction import POLICIES
from tests.laws.acts import live
from tests.laws.engines import MagazineWorld
from tests.laws.limited import LimitedWorld
from tests.laws.operated import OperatedWorld
from tests.laws.shapes import MIXES, SHAPE, name_of, tiers_of, with_tiers
from tests.laws.world import World

STEPS: Final = 500
"""Acts in a history, before it is healed."""

_HISTORIES_PER_POLICY: Final = 16

FOUND: Final = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError)
"""What shows that a law is broken: a violation, an assertion of the core, or whatever else it never raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken law, and the history and step in which it showed."""

    seed: int
    step: int
    text: str

    def __str__(self) -> str:
        """Tell it with what replays it."""
        return (
            f"{self.text}\n  in step {self.step}, replay: "
            f"python -m tests.laws.simulate --seed {self.seed}"
        )


@dataclass(slots=True)
class Tally:
    """What many histories come to."""

    num_histories: int = 0
    num_operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        """All faults of all kinds."""
        return self.faults.total()

    def add(self, other: "Tally") -> None:
        """Count another tally in."""
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
    shape = with_tiers(MIXES.get(name, SHAPE), tiers_of(seed))
    return World(seed, shape=replace(shape, eviction_policy=policy))


def play(seeds: Iterable[int], steps: int = STEPS) -> Tally:
    """Play the histories of some seeds to their ends, or to the first violation of each."""
    tally = Tally()
    for seed in seeds:
        world = world_of(seed)
        try:
            live(world, steps)
        except FOUND as error:
            text = f"{type(error).__name__}: {error}"
            tally.violations.append(Violation(seed=seed, step=world.step, text=text))
        tally.num_histories += 1
        tally.num_operations += world.num_operations
        tally.faults += world.faults
    return tally
