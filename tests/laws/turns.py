"""The law of turns: who waits keeps its place, who starts over comes first, and nobody waits who could be served."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvlease.errors import KVLeaseError
from kvlease.ids import CopyId
from kvleased.core import commands
from kvleased.core.effects import Effect, Wake

if TYPE_CHECKING:
    from tests.laws.world import World

_NO_COPY: Final = CopyId(3)


class Turns:
    """The order of the waiting calls as it was when somebody looked last."""

    def __init__(self) -> None:
        """Start with nobody waiting."""
        self.order: list[int] = []
        self._now = 0.0
        self._again: set[int] = set()
        self._asking: set[int] = set()

    def check(self, world: "World") -> None:
        """Compare the order with the last one; only time lets a call rise."""
        asked, self._asking = self._asking, set(world.cache._state.asking)
        waiters = list(world.cache._state.waiting)
        if not waiters:
            self.order = []
            self._again.clear()
            return
        _check_shares(world)
        order = [waiter.ticket for waiter in waiters]
        if world.now == self._now:
            stayed = [ticket for ticket in self.order if ticket in order]
            if stayed != [ticket for ticket in order if ticket in self.order]:
                world.fail(f"calls {self.order} came to wait in the order {order}")
        new = [waiter.ticket for waiter in waiters if isinstance(waiter.command, commands.Reserve)]
        # Who is known, and did not wait for its turn before, has been served.
        self._again.update(
            ticket
            for ticket in new
            if ticket in world.calls and ticket not in self.order and ticket not in asked
        )
        if sorted(new, key=lambda ticket: ticket not in self._again) != new:
            world.fail(f"of calls {new} those that start over, {self._again}, do not come first")
        self.order, self._now = order, world.now


def _check_shares(world: "World") -> None:
    """A call counts to its tenant with the blocks that it asks for, and the less the more weight the tenant has."""
    state, shape = world.cache._state, world.shape
    for waiter in state.waiting:
        if isinstance(waiter.command, commands.Reserve):
            limits = shape.tenants.get(state.workers[waiter.worker_id], shape.tenant_default)
            num_blocks = sum(state.covering.most(waiter.command.num_tokens))
            if waiter.tag and waiter.cost * limits.weight != num_blocks:
                world.fail(f"call {waiter.ticket} counts {waiter.cost} for {num_blocks} blocks")


def let_nothing_happen(world: "World") -> Iterable[Effect]:
    """Tell of something that changes nothing; returns what was due, and so has begun with it."""
    outcome = world.cache.handle(commands.CopyDone(copy_id=_NO_COPY), world.now)
    world.carry_out(outcome.effects)
    return outcome.effects


def leave_nobody_waiting(world: "World") -> None:
    """Let something happen that changes nothing: whoever waits could not be served before."""
    effects = let_nothing_happen(world)
    served = [
        effect.ticket
        for effect in effects
        if isinstance(effect, Wake) and not isinstance(effect.result, KVLeaseError)
    ]
    if served:
        world.fail(f"calls {served} waited although they could be served")
