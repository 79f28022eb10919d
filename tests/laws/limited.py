"""A simulated node whose tenants have minima, maxima and budgets for pins, and whose leases are of all classes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from kvlease.errors import KVLeaseError
from kvleased.core import commands
from kvleased.core.effects import Outcome, Pinned
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.limits import TenantLimits
from kvleased.core.tenancy.tenants import victims
from kvleased.core.tier.flights import Purpose
from tests.laws.actors import Worker
from tests.laws.shapes import SHAPE, with_tiers
from tests.laws.world import World

LIMITS: Final = {
    7: TenantLimits(min_blocks=8, max_blocks=20, weight=2.0, pinned_blocks_max=3),
    8: TenantLimits(min_blocks=6, max_blocks=18, pinned_blocks_max=4),
}
_SHAPE: Final = replace(SHAPE, tenants=LIMITS, max_pins=4, max_leases=8)
"""A shape with so few rows and pins that one tenant could take them all."""


class LimitedWorld(World):
    """A node whose tenants have limits, which are compared with what they have after every event."""

    def __init__(self, seed: int, policy: str, tiers: str = "") -> None:
        """Start a node with three workers of two tenants, a policy by which blocks leave, and some stores or none."""
        shape = with_tiers(_SHAPE, tiers)
        self.limits: Mapping[int, TenantLimits] = LIMITS
        self.num_leased: Counter[int] = Counter()
        super().__init__(seed, shape=replace(shape, eviction_policy=policy))
        self.uses_classes = True

    def send(self, command: commands.Command) -> Outcome | KVLeaseError:
        """Give a command to the core, and check what the laws of tenants say of its answer."""
        if isinstance(command, commands.Pin):
            command = replace(command, tenant_digest=self.rng.choice((None, 7, 8)))
        outcome = super().send(command)
        if isinstance(outcome, Outcome) and isinstance(outcome.reply, Pinned):
            self.seen["pinned"] += outcome.reply.num_blocks
            assert isinstance(command, commands.Pin)
            if command.tenant_digest is not None and outcome.reply.num_blocks:
                self._compare_pins(command.tenant_digest)
                self._flood_pins(command, command.tenant_digest)
        self._compare_rows()
        self._compare_victims()
        self._compare_minima()
        return outcome

    def _compare_rows(self) -> None:
        """Check that a tenant that got more leases has left the other attached tenants the rows kept for them."""
        state, shape = self.cache._state, self.shape
        num_leased = Counter(lease.tenant for lease in state.leases.by_id.values())
        attached, before = set(state.workers.values()), self.num_leased
        self.num_leased = num_leased
        for tenant in num_leased - before:
            owed = sum(
                max(
                    0,
                    min(self.limits[one].leases_max, self._kept(one, shape.max_leases))
                    - num_leased[one],
                )
                for one in attached - {tenant}
            )
            if num_leased.total() + owed > shape.max_leases:
                self.fail(
                    f"tenants have {dict(num_leased)} leases, and {tenant} got one that is kept for others"
                )

    def _flood_pins(self, command: commands.Pin, tenant: int) -> None:
        """Pin the same keys as long as that is granted, and then let go of them."""
        pins = []
        while isinstance(outcome := super().send(command), Outcome):
            assert isinstance(outcome.reply, Pinned)
            if not outcome.reply.num_blocks:
                break
            pins.append(outcome.reply.pin_id)
            self._compare_pins(tenant)
        for pin_id in pins:
            super().send(commands.Unpin(pin_id=pin_id))

    def _compare_pins(self, tenant: int) -> None:
        """Check that a tenant that has pinned something has left all others the pins kept for them."""
        owners = self.records.device.tenant
        pinned = [set(owners[blocks].tolist()) for blocks in self.cache._state.pins.values()]
        num_pinned = Counter(one for ones in pinned for one in ones if len(ones) == 1)
        owed = sum(
            max(0, self._kept(one, self.shape.max_pins) - num_pinned[one])
            for one, limits in self.limits.items()
            if one != tenant and limits.pinned_blocks_max
        )
        if len(pinned) + owed > self.shape.max_pins:
            self.fail(
                f"tenants have {dict(num_pinned)} pins, and {tenant} got one that is kept for others"
            )

    def _kept(self, tenant: int, count: int) -> int:
        """Return how many rows or pins are kept for a tenant: at least the share that its minimum has of the pool."""
        usable = self.shape.usable_blocks
        rounded_up = {
            one: -(-count * limits.min_blocks // usable) for one, limits in self.limits.items()
        }
        if sum(rounded_up.values()) <= count:
            return rounded_up[tenant]
        return count * self.limits[tenant].min_blocks // usable

    def _compare_victims(self) -> None:
        """Check which blocks a call would evict: from other tenants, nothing that takes them below their minima."""
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
        """Check that what tenants hold leaves room for the minima of the attached tenants."""
        state = self.cache._state
        holds, records = state.device.holds.copy(), state.device.records
        for flight in state.flights.values():
            if flight.purpose in (Purpose.WRITE_BACK, Purpose.DISPLACE, Purpose.CLEAN):
                # Blocks that are written back are on their way out, and blocks copied in the background are soon free
                # again.
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
        """Check that what is held and guaranteed is never more than the pool."""
        if excess > 0:
            self.fail(f"tenants hold {held}, which leaves no room for their minima")

    def limit_of(self, worker: Worker) -> int:
        """Return what a worker can have: within its tenant's limits, and beside the other tenants' minima and pins."""
        pinned, attached = self.pinned(), {one.tenant for one in self.workers.values()}
        others = sum(
            max(pinned.get(one, 0), self.limits[one].min_blocks * (one in attached))
            for one in self.limits
            if one != worker.tenant
        )
        own = pinned.get(worker.tenant, 0)
        return min(self.limits[worker.tenant].max_blocks, self.shape.usable_blocks - others) - own
