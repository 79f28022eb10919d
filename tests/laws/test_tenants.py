"""No law breaks under faults where tenants have limits and leases have classes, and every minimum can be had."""

from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from kvlease.errors import KVLeaseError
from kvleased.core import commands
from kvleased.core.effects import Outcome, Pinned
from kvleased.core.leases import NOWHERE
from kvleased.core.limits import TenantLimits
from kvleased.core.tenants import victims
from tests.laws.acts import live
from tests.laws.world import SHAPE, Worker, World

_LIMITS: Final = {
    7: TenantLimits(min_blocks=8, max_blocks=17, weight=2.0, pinned_blocks_max=3),
    8: TenantLimits(min_blocks=6, max_blocks=16, pinned_blocks_max=4),
}
_HISTORIES: Final = 24
_STEPS: Final = 300


class LimitedWorld(World):
    """A node whose tenants have limits, and whose requests are of all classes."""

    def __init__(self, seed: int) -> None:
        """Start a node with three workers of two tenants."""
        super().__init__(seed, shape=replace(SHAPE, tenants=_LIMITS, max_pins=6))

    def send(self, command: commands.Command) -> Outcome | KVLeaseError:
        """Give a command to the core; what a law of tenants says of its answer is looked at here."""
        if isinstance(command, commands.Reserve):
            chosen = sum(command.request_id.encode())
            command = replace(command, priority=chosen % 3, retain_seconds=chosen % 5 * 7)
        if isinstance(command, commands.Pin):
            command = replace(command, tenant_digest=self.rng.choice((None, 7, 8)))
        outcome = super().send(command)
        if isinstance(outcome, Outcome) and isinstance(outcome.reply, Pinned):
            self.seen["pinned"] += outcome.reply.num_blocks
        self._compare_victims()
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
            spare = max(0, min(cached, used - _LIMITS[other].min_blocks))
            if np.count_nonzero(tenants == other) > spare:
                self.fail(f"tenant {other} would be evicted below its minimum for {tenant}")

    def _have_it_all(self, worker: Worker) -> None:
        """Have all that a tenant can have: nobody else has anything, but their minima are kept for them."""
        attached = {one.tenant for one in self.workers.values()} - {worker.tenant}
        kept = sum(_LIMITS[one].min_blocks for one in attached)
        limit = min(_LIMITS[worker.tenant].max_blocks, self.shape.usable_blocks - kept)
        for at in range(0, limit, 3):
            command = commands.Reserve(
                worker_id=worker.worker_id,
                request_id=f"all-{at}",
                keys=b"",
                num_tokens=min(3, limit - at) * self.shape.hash_tokens,
                wait_ms=60_000,
            )
            self.call(worker, command)
            self._settle()
        got = sum(len(held.blocks) for held in worker.leases.values())
        if got != limit:
            self.fail(f"after healing tenant {worker.tenant} got {got} of {limit} blocks")
        for lease_id in list(worker.leases):
            self.send(commands.Release(worker_id=worker.worker_id, lease_id=lease_id))
        worker.leases.clear()


@pytest.mark.parametrize("chunk", range(2))
def test_no_law_of_tenants_breaks_under_faults(chunk: int) -> None:
    """Whatever happens, counts and limits hold after every event, and each tenant can have what it may in the end."""
    pinned = 0

    for seed in range(chunk * _HISTORIES, (chunk + 1) * _HISTORIES):
        world = LimitedWorld(seed)
        live(world, _STEPS)
        pinned += world.seen["pinned"]

    assert pinned
