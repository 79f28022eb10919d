"""A simulated node whose tenants have minima, maxima and budgets for pins, and whose leases are of all classes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from kvlease.errors import KVLeaseError
from kvleased.core import commands
from kvleased.core.effects import Outcome, Pinned
from kvleased.core.flights import Purpose
from kvleased.core.leases import NOWHERE
from kvleased.core.limits import TenantLimits
from kvleased.core.tenants import victims
from tests.laws.actors import Worker
from tests.laws.shapes import SHAPE, with_tiers
from tests.laws.world import World

LIMITS: Final = {
    7: TenantLimits(min_blocks=8, max_blocks=20, weight=2.0, pinned_blocks_max=3),
    8: TenantLimits(min_blocks=6, max_blocks=18, pinned_blocks_max=4),
}
_SHAPE: Final = replace(SHAPE, tenants=LIMITS, max_pins=6)


class LimitedWorld(World):
    """A node whose tenants have limits, which it compares with what they have after every event."""

    def __init__(self, seed: int, policy: str, tiers: str = "") -> None:
        """Start a node with three workers of two tenants, whose blocks leave by a policy, and some stores or none."""
        shape = with_tiers(_SHAPE, tiers)
        self.limits: Mapping[int, TenantLimits] = LIMITS
        super().__init__(seed, shape=replace(shape, eviction_policy=policy))
        self.uses_classes = True

    def send(self, command: commands.Command) -> Outcome | KVLeaseError:
        """Give a command to the core; what a law of tenants says of its answer is looked at here."""
        if isinstance(command, commands.Pin):
            command = replace(command, tenant_digest=self.rng.choice((None, 7, 8)))
        outcome = super().send(command)
        if isinstance(outcome, Outcome) and isinstance(outcome.reply, Pinned):
            self.seen["pinned"] += outcome.reply.num_blocks
        self._compare_victims()
        self._compare_minima()
        return outcome

    def _compare_victims(self) -> None:
        """Ask whom a call would evict: of others, nothing that takes them below their minima."""
        state = self.cache._state
        usage = state.device.usage()
        tenant, count = self.rng.choice((7, 8)), self.rng.randint(1, 24)
        found = victims(state, tenant, count, NOWHERE)
        tenants = state.device.records.tenant[found]
        for other in {7, 8} - {tenant}:
            used, cached = usage.get(other, (0, 0))
            spare = max(0, min(cached, used - self.limits[other].min_blocks))
            if np.count_nonzero(tenants == other) > spare:
                self.fail(f"tenant {other} would be evicted below its minimum for {tenant}")

    def _compare_minima(self) -> None:
        """What tenants hold leaves room for the minima of those that are attached."""
        state = self.cache._state
        holds, records = state.device.holds.copy(), state.device.records
        for flight in state.flights.values():
            if flight.purpose in (Purpose.WRITE_BACK, Purpose.DISPLACE, Purpose.CLEAN):
                # What is written back is on its way out; what is copied in the background is soon nobody's again.
                holds[flight.sources] -= 1
            elif flight.purpose is Purpose.SCRUB:
                holds[flight.targets] = 0
        for blocks in state.pins.values():
            # Pins have budgets instead.
            holds[blocks] -= 1
        attached = set(state.workers.values())
        held = {one: int(((holds > 0) & (records.tenant == one)).sum()) for one in self.limits}
        kept = [
            max(held[one], self.limits[one].min_blocks * (one in attached)) for one in self.limits
        ]
        self._compare_excess(sum(kept) - self.shape.usable_blocks, f"{held} of {attached}")

    def _compare_excess(self, excess: int, held: str) -> None:
        """What is held and guaranteed is never more than the pool."""
        if excess > 0:
            self.fail(f"tenants hold {held}, which leaves no room for their minima")

    def limit_of(self, worker: Worker) -> int:
        """Return what a worker can have: within its tenant's limits, and beside the others' minima and pins."""
        pinned, attached = self.pinned(), {one.tenant for one in self.workers.values()}
        others = sum(
            max(pinned.get(one, 0), self.limits[one].min_blocks * (one in attached))
            for one in self.limits
            if one != worker.tenant
        )
        own = pinned.get(worker.tenant, 0)
        return min(self.limits[worker.tenant].max_blocks, self.shape.usable_blocks - others) - own
