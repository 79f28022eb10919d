"""A simulated node whose operator drains, clears and resizes its cache, and changes what tenants may have.

These laws are checked besides those of tenants: a tenant above a lowered limit gets no more, leases are capped, a drain
grants nothing, blocks out of use are nobody's across every restart, and a clear leaves what others have.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from kvlease.errors import DrainingError, KVLeaseError, NeverFitsError, PoolFullError
from kvleased.core import commands
from kvleased.core.blocks.states import State
from kvleased.core.effects import Cleared, Outcome, Reserved, Resized, Tier
from kvleased.core.limits import TenantLimits
from tests.laws.actors import ZERO
from tests.laws.limited import LIMITS, LimitedWorld
from tests.laws.world import World

_CAPS: Final = (1, 2, 3, 2**31 - 1)
_CHANGES: Final = (commands.Limit, commands.Resize, commands.Attach, commands.Pin)
"""What may leave tenants above their limits, or minima without room; after it, both may only get better."""
_REFUSED: Final = (NeverFitsError, PoolFullError)


class OperatedWorld(LimitedWorld):
    """A node with an operator."""

    def __init__(self, seed: int, policy: str, tiers: str = "") -> None:
        """Start a node that the operator has not touched yet."""
        self.used: Counter[int] = Counter()
        self.leases: Counter[int] = Counter()
        self.excess = 0
        self.parked: frozenset[int] = frozenset()
        self.is_resizing = False
        super().__init__(seed, policy, tiers)

    def send(self, command: commands.Command) -> Outcome | KVLeaseError:
        """Give a command to the core, and check what the laws of operating say of its answer."""
        is_drained, known = self.cache.is_draining, set(self.lease_ids)
        cached = self._cached() if isinstance(command, commands.Clear) else {}
        # A resize may be cut off by a crash, and then shows only after the restart.
        self.is_resizing |= isinstance(command, commands.Resize)
        if isinstance(command, _CHANGES):
            self.excess = self.shape.num_blocks
        outcome = super().send(command)
        if isinstance(command, commands.Reserve) and is_drained:
            self._compare_drain(outcome, known)
        if isinstance(command, commands.Clear) and isinstance(outcome, Outcome):
            self._compare_clear(command, outcome, cached)
        return outcome

    def check(self) -> None:
        """Compare what tenants have with what they had before, and check the blocks that are out of use."""
        self._take_note_of_parked()
        super().check()
        state = self.cache._state
        used = Counter({one: used for one, (used, _) in state.device.usage().items()})
        leases = Counter(lease.tenant for lease in state.leases.by_id.values())
        for tenant, limits in self.limits.items():
            if used[tenant] > max(limits.max_blocks, self.used[tenant]):
                self.fail(f"tenant {tenant} uses {used[tenant]} blocks, more than before")
            if leases[tenant] > max(limits.leases_max, self.leases[tenant]):
                self.fail(f"tenant {tenant} has {leases[tenant]} leases, more than before")
        self.used, self.leases = used, leases

    def _take_note_of_parked(self) -> None:
        """Note that the memory of blocks out of use is gone, and check that there are as many as the cache counts."""
        state = self.cache._state
        is_parked = self.records.device.state == State.PARKED
        parked = frozenset(np.flatnonzero(is_parked).tolist())
        for block in parked - self.parked:
            self.device[block] = ZERO
        self.parked = parked
        for slot in np.flatnonzero(self.records.host.state == State.PARKED).tolist():
            self.host[slot] = ZERO
        if len(parked) != state.shape.parked_blocks or state.device.holds[is_parked].any():
            self.fail(f"{len(parked)} blocks are out of use, not {state.shape.parked_blocks}")
        if len(parked) != self.shape.parked_blocks:
            if not self.is_resizing:
                self.fail(
                    f"{len(parked)} blocks are out of use, and were {self.shape.parked_blocks}"
                )
            self.shape = replace(self.shape, parked_blocks=len(parked))
        self.is_resizing = False

    def _compare_excess(self, excess: int, held: str) -> None:
        """Check that an excess of what is held and guaranteed over the pool, left by changed limits, never grows."""
        if excess > max(0, self.excess):
            self.fail(f"tenants hold {held}, which leaves less room for their minima than before")
        self.excess = excess

    def _compare_drain(self, outcome: Outcome | KVLeaseError, known: set[int]) -> None:
        if isinstance(outcome, KVLeaseError):
            return
        is_old = outcome.ticket is not None or (
            isinstance(outcome.reply, Reserved) and outcome.reply.lease_id in known
        )
        if not is_old or len(self.lease_ids - known):
            self.fail("a lease was granted while the cache was drained")

    # Clear --------------------------------------------------------------------------------------------------------

    def _cached(self) -> Counter[tuple[int, int, bool]]:
        """Count the findable blocks of all tiers, by tier, tenant, and whether somebody holds them."""
        self.cache.settle()
        found: Counter[tuple[int, int, bool]] = Counter()
        for at, pool in enumerate(self.cache._state.pools):
            is_ready = pool.records.state == State.READY
            tenants, held = pool.records.tenant[is_ready], pool.holds[is_ready] > 0
            found += Counter(
                (at, one, is_held)
                for one, is_held in zip(tenants.tolist(), held.tolist(), strict=True)
            )
        return found

    def _compare_clear(
        self,
        command: commands.Clear,
        outcome: Outcome,
        before: Counter[tuple[int, int, bool]],
    ) -> None:
        """Check that a clear drops exactly what nobody held of its tenants; waiting calls may get some of the rest."""
        assert isinstance(outcome.reply, Cleared)
        wanted = [sum(
            count for (tier, tenant, is_held), count in before.items()
            if tier == at and not is_held and command.tenant_digest in (None, tenant)
        ) for at in range(3)]  # fmt: skip
        dropped = [outcome.reply.num_device, outcome.reply.num_host, outcome.reply.num_disk]
        if dropped != wanted:
            self.fail(f"a clear dropped {dropped} blocks of {wanted}")
        held = sum(
            count for (_, tenant, is_held), count in before.items()
            if is_held and command.tenant_digest in (None, tenant)
        )  # fmt: skip
        if outcome.reply.num_held != held:
            self.fail(f"a clear tells of {outcome.reply.num_held} held blocks, not {held}")

    # The operator -------------------------------------------------------------------------------------------------

    def limit(self, limits: dict[int, TenantLimits]) -> bool:
        """Change what tenants may have, if that is possible; tell whether it was."""
        command = commands.Limit(tenants=limits, tenant_default=self.shape.tenant_default)
        can_be_had = not self._is_owed_too_much(limits)
        if can_be_had:
            self.limits, self.shape = limits, replace(self.shape, tenants=limits)
        outcome = self.send(command)
        if isinstance(outcome, KVLeaseError) is can_be_had:
            self.fail(f"{command} came to {outcome}")
        return can_be_had

    def resize(self, tier: Tier, num_blocks: int) -> bool:
        """Change how many blocks can be granted, if that is possible; tell whether it was."""
        outcome = self.send(commands.Resize(tier=tier, num_blocks=num_blocks))
        if isinstance(outcome, KVLeaseError):
            assert isinstance(outcome, _REFUSED)
            return False
        assert isinstance(outcome.reply, Resized)
        pool = self.cache._state.device if tier is Tier.DEVICE else self.cache._state.host
        if pool.num_usable - int((pool.records.state == State.PARKED).sum()) != num_blocks:
            self.fail(f"a resize to {num_blocks} left {pool}")
        return True

    def end_engines(self) -> None:
        """Undo all that the operator did, so that everything can be had again."""
        while self.pins and self._is_owed_too_much(LIMITS, is_whole=True):
            self.send(commands.Unpin(pin_id=self.pins.pop()))
        self.send(commands.Undrain())
        usable = self.shape.num_blocks - self.shape.null_blocks
        is_whole = self.resize(Tier.DEVICE, usable) and self.resize(Tier.HOST, self.shape.num_slots)
        if not (is_whole and self.limit(dict(LIMITS))):
            self.fail("what the operator did could not be undone")

    def _is_owed_too_much(
        self, limits: Mapping[int, TenantLimits], *, is_whole: bool = False
    ) -> bool:
        """Tell whether pins and minima would exceed the pool, as it is now or as it was registered."""
        self.cache.settle()
        pinned, shape = self.pinned(), self.shape
        usable = shape.num_blocks - shape.null_blocks if is_whole else shape.usable_blocks
        owed = sum(max(0, one.min_blocks - pinned.get(name, 0)) for name, one in limits.items())
        return sum(pinned.values()) + owed > usable


def resize(world: World) -> None:
    """Let an operator make a pool smaller, or larger again."""
    assert isinstance(world, OperatedWorld)
    tier = world.rng.choice((Tier.DEVICE, Tier.DEVICE, Tier.HOST))
    most = world.shape.num_blocks - world.shape.null_blocks
    most = most if tier is Tier.DEVICE else world.shape.num_slots
    if world.resize(tier, world.rng.choice((most, world.rng.randint(0, most + 1)))):
        world.seen[f"resized {tier.value}"] += 1


def limit(world: World) -> None:
    """Let an operator change what tenants may have."""
    assert isinstance(world, OperatedWorld)
    usable = world.shape.num_blocks - world.shape.null_blocks
    limits = {}
    for tenant in LIMITS:
        most = world.rng.randint(4, usable)
        limits[tenant] = TenantLimits(
            min_blocks=world.rng.randint(0, min(most, 8)),
            max_blocks=most,
            # A call that waits keeps the weight with which it came, so changing weights would need two laws.
            weight=LIMITS[tenant].weight,
            pinned_blocks_max=world.rng.randint(0, 6),
            leases_max=world.rng.choice(_CAPS),
        )
    if world.limit(limits):
        world.seen["limited"] += 1


def clear(world: World) -> None:
    """Let an operator drop what is cached, of one tenant or of all."""
    tenant = world.rng.choice((None, *LIMITS))
    world.send(commands.Clear(tenant_digest=tenant))


def drain(world: World) -> None:
    """Let an operator begin a drain, or end it."""
    if not world.cache.is_draining:
        world.send(commands.Drain())
    elif isinstance(world.send(commands.Undrain()), DrainingError):
        world.fail("a drain cannot be ended")


OPERATIONS: Final = {resize: 5, limit: 4, clear: 2, drain: 2}
"""What an operator does, and how often each act is drawn."""
