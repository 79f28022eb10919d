"""The memory mover that hangs and recovers, in some histories; its host pool is off meanwhile.

What it does and when is drawn from random numbers of its own, so that all other histories stay as they were. Copies may
land while the pool is off: a mover that answers again does so before anybody has told the core.
"""

import random
from typing import Final, Self

from kvleased.core import commands
from kvleased.core.effects import Tier
from tests.laws.shapes import hangs
from tests.laws.world import World

_OFTEN: Final = 0.04
"""The probability that it hangs after an act."""
_SOON: Final = 0.12
"""The probability that it recovers after an act."""


def may_hang(world: World) -> bool:
    """Tell whether the memory mover of a world hangs now and then."""
    return world.shape.num_slots > 0 and hangs(world.seed)


class Hanging:
    """When the memory mover of one history hangs."""

    def __init__(self, seed: int) -> None:
        """Draw from the history's seed."""
        self._rng = random.Random(f"{seed} hangs")  # noqa: S311 - reproducible on purpose

    @classmethod
    def of(cls, world: World) -> Self | None:
        """Return the hanging mover of a world; None if it never hangs."""
        return cls(world.seed) if may_hang(world) else None

    def go_on(self, world: World) -> None:
        """Let the mover hang, recover, or stay as it is; after a restart the core believes that it works."""
        is_off = Tier.HOST in world.cache._state.tiers_off
        if self._rng.random() < (_SOON if is_off else _OFTEN):
            world.faults["mover hung"] += not is_off
            world.send(commands.TierChanged(tier=Tier.HOST, is_on=is_off))
