"""The law of turns: calls keep their places, those that start over come first, and none waits that could be served."""

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
    """The order of the waiting calls at the last check."""

    def __init__(self) -> None:
        """Start with nobody waiting."""
        self.order: list[int] = []
        self._now = 0.0
        self._again: set[int] = set()
        self._asking: set[int] = set()

    def check(self, world: "World") -> None:
        """Compare the order with that of the last check; a call may rise only as time passes."""
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
        # A call that is known, but did not wait for its turn before, has been served.
        self._again.update(
            ticket
            for ticket in new
            if ticket in world.calls and ticket not in self.order and ticket not in asked
        )
        if sorted(new, key=lambda ticket: ticket not in self._again) != new:
            world.fail(f"of calls {new} those that start over, {self._again}, do not come first")
        self.order, self._now = order, world.now


def _check_shares(world: "World") -> None:
    """Check that a call counts to its tenant with the blocks that it asks for, divided by the tenant's weight."""
    state, shape = world.cache._state, world.shape
    for waiter in state.waiting:
        if isinstance(waiter.command, commands.Reserve):
            limits = shape.tenants.get(state.workers[waiter.worker_id], shape.tenant_default)
            num_blocks = sum(state.covering.most(waiter.command.num_tokens))
            if waiter.tag and waiter.cost * limits.weight != num_blocks:
                world.fail(f"call {waiter.ticket} counts {waiter.cost} for {num_blocks} blocks")


def let_nothing_happen(world: "World") -> Iterable[Effect]:
    """Send a command that changes nothing; return the effects that were due and so began with it."""
    outcome = world.cache.handle(commands.CopyDone(copy_id=_NO_COPY), world.now)
    world.carry_out(outcome.effects)
    return outcome.effects


def leave_nobody_waiting(world: "World") -> None:
    """Send a command that changes nothing, and check that it serves no waiting call: it would have waited in vain."""
    effects = let_nothing_happen(world)
    served = [
        effect.ticket
        for effect in effects
        if isinstance(effect, Wake) and not isinstance(effect.result, KVLeaseError)
    ]
    if served:
        world.fail(f"calls {served} waited although they could be served")
