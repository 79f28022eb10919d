"""Bugs that are switched on one by one, and each must be found: first bugs that other systems really had, then our own.

`FIELD` lists those of other systems; a docstring names the public thread that a bug is modelled on.
"""

from typing import Final

import numpy as np
import pytest

from kvlease.errors import UnknownLeaseError
from kvleased.core import cache, commands, recovery, state
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import Event, State
from kvleased.core.copies import landing
from kvleased.core.effects import Detached, Done, Outcome
from kvleased.core.ids import Ids
from kvleased.core.lease import leases
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import End, Phase
from kvleased.core.prefix.key_counts import TierCounts
from kvleased.core.verbs import ending
from tests.laws.mended import MENDED, Mutation
from tests.laws.of_adopting import OF_ADOPTING
from tests.laws.of_groups import OF_GROUPS
from tests.laws.of_magazines import OF_MAGAZINES
from tests.laws.of_operating import OF_OPERATING
from tests.laws.of_policies import OF_POLICIES
from tests.laws.of_ranks import OF_RANKS
from tests.laws.of_remedies import OF_REMEDIES
from tests.laws.of_tiers import OF_TIERS
from tests.laws.of_turns import OF_TURNS
from tests.laws.restarts import OF_RESTARTS


def expiry_frees_memory(patch: pytest.MonkeyPatch) -> None:
    """A lease that was not renewed ends, as if time proved that its worker no longer writes (Mooncake #975)."""

    def expire(world: state.CacheState, lease: Lease) -> None:
        ending.end_lease(world, lease, End.EXPIRED)

    patch.setattr(landing, "expire", expire)


def failed_copy_is_published(patch: pytest.MonkeyPatch) -> None:
    """A copy that failed is taken for a successful one (LMCache #5032, #4991)."""

    def copy_failed(world: state.CacheState, command: commands.CopyFailed, now: float) -> Outcome:
        return landing.copy_done(world, commands.CopyDone(copy_id=command.copy_id), now)

    patch.setitem(cache._VERBS, commands.CopyFailed, copy_failed)


def late_commit_of_an_older_grant(patch: pytest.MonkeyPatch) -> None:
    """A commit is matched by its worker and not by its lease (Mooncake #3030)."""

    def lease_of(self: state.CacheState, command: commands.OfLease) -> Lease:
        for lease in self.leases.by_id.values():
            if lease.lease_id == command.lease_id:
                return lease
        for lease in self.leases.by_id.values():
            if isinstance(command, commands.Commit) and lease.worker_id == command.worker_id:
                return lease
        raise UnknownLeaseError

    patch.setattr(state.CacheState, "lease_of", lease_of)


def generation_is_not_bumped(patch: pytest.MonkeyPatch) -> None:
    """A block that comes back to the free list keeps its generation (the ABA problem; vLLM #52234)."""

    def free_up(self: Pool, ids: Ids, event: Event) -> None:
        self.change(ids, event)
        self.free.add(ids)

    patch.setattr(Pool, "_free_up", free_up)


def release_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """A lease's end lets go of a shared block once too often, as a nameless counter does (LMCache #3381)."""
    let_go = Pool.let_go

    def twice(self: Pool, ids: Ids) -> None:
        let_go(self, ids)
        shared = ids[self.holds[ids] > 0]
        if len(shared) > 1:
            self.holds[shared] -= 1

    patch.setattr(Pool, "let_go", twice)


def restart_forgets_leases(patch: pytest.MonkeyPatch) -> None:
    """A restart takes every block that is not committed for a free one (Mooncake #1336)."""
    patch.setattr(recovery, "_believed_rows", lambda _: set())


def insertion_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """The first of several blocks that become findable together is not in the key counts, so its key stays absent."""
    add = TierCounts.add
    patch.setattr(TierCounts, "add", lambda self, blocks: add(self, blocks[1:]))


def held_block_is_evicted(patch: pytest.MonkeyPatch) -> None:
    """The eviction order forgets to ask who holds a block."""

    def hold(self: Pool, ids: Ids) -> None:
        self.holds[ids] += 1

    patch.setattr(Pool, "hold", hold)


def checksum_is_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """Bytes that do not match their checksum are served all the same (the fs tier of vLLM 0.32)."""

    def copy_done(world: state.CacheState, command: commands.CopyDone, now: float) -> Outcome:
        whole = commands.CopyDone(copy_id=command.copy_id, checksums=command.checksums)
        return landing.copy_done(world, whole, now)

    patch.setitem(cache._VERBS, commands.CopyDone, copy_done)


def retried_reserve_is_granted_again(patch: pytest.MonkeyPatch) -> None:
    """A repeated request gets a second lease (Mooncake #2364)."""
    patch.setattr(leases.LeaseBook, "find", lambda *_: None)


def no_scrub_between_tenants(patch: pytest.MonkeyPatch) -> None:
    """A block changes tenants with the previous tenant's bytes in it (LeftoverLocals, CVE-2023-4969)."""
    patch.setattr(Pool, "_is_suitable", lambda _, ids, __: np.ones(len(ids), np.bool_))


def owner_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Anybody who knows a lease's id may use it (the read locks of LMCache 0.5.6, which bear no name)."""

    def lease_of(self: state.CacheState, command: commands.OfLease) -> Lease:
        if command.lease_id not in self.leases.by_id:
            raise UnknownLeaseError
        return self.leases.by_id[command.lease_id]

    patch.setattr(state.CacheState, "lease_of", lease_of)


def copy_source_is_evictable(patch: pytest.MonkeyPatch) -> None:
    """Eviction ignores that a copy is reading a slot or a block (SGLang #31427)."""
    fly = state.CacheState.fly

    def careless(self: state.CacheState, *arguments: object, **named: object) -> object:
        flight = fly(self, *arguments, **named)  # type: ignore[arg-type]
        source_pool, _ = self.ends(flight.direction)
        is_cached = source_pool.records.state[flight.sources] == State.READY
        sources = flight.sources[is_cached]
        idle = sources[source_pool.holds[sources] == 1]
        source_pool.holds[idle] = 0
        source_pool.order.add(idle)
        return flight

    patch.setattr(state.CacheState, "fly", careless)


def death_cleans_nothing_up(patch: pytest.MonkeyPatch) -> None:
    """The code for a worker's death leaves the cleanup to other code, which leaves it to this code (Ray #64627)."""

    def end_worker(world: state.CacheState, command: commands.WorkerDied, now: float) -> Outcome:
        del world, command, now
        return Outcome(reply=Detached(num_leases=0))

    patch.setitem(cache._VERBS, commands.WorkerDied, end_worker)


def copy_does_not_hold_its_source(patch: pytest.MonkeyPatch) -> None:
    """A block that is being copied may be overwritten meanwhile (vLLM #52470)."""
    fly = state.CacheState.fly

    def careless(self: state.CacheState, *arguments: object, **named: object) -> object:
        flight = fly(self, *arguments, **named)  # type: ignore[arg-type]
        source_pool, _ = self.ends(flight.direction)
        if flight.purpose.name == "WRITE_BACK":
            source_pool.let_go(flight.sources)
        return flight

    patch.setattr(state.CacheState, "fly", careless)


def expired_write_becomes_readable(patch: pytest.MonkeyPatch) -> None:
    """Expiry takes an unfinished block for a finished one (LMCache #4967)."""

    def expire(world: state.CacheState, lease: Lease) -> None:
        blocks = world.leases.blocks_of(lease)
        private = blocks[world.device.records.state[blocks] == State.RESERVED]
        request = lease.request
        if lease.phase is Phase.ACTIVE and isinstance(request, commands.Reserve) and len(private):
            keys = state.split_keys(request.keys)[-len(private) :]
            new = [key for key in keys if world.device.index.get(key) < 0]
            if new:
                world.device.publish(private[: len(new)].copy(), b"".join(new), Event.COMMIT)
        ending.expire(world, lease)

    patch.setattr(landing, "expire", expire)


def lost_copy_frees_its_target(patch: pytest.MonkeyPatch) -> None:
    """A mover that does not answer is taken for one that no longer writes."""

    def copy_lost(world: state.CacheState, command: commands.CopyLost, now: float) -> Outcome:
        landing.copy_failed(world, commands.CopyFailed(copy_id=command.copy_id), now)
        return Outcome(reply=Done())

    patch.setitem(cache._VERBS, commands.CopyLost, copy_lost)


FIELD: Final[dict[str, Mutation]] = {
    "M1": expiry_frees_memory,
    "M3": copy_source_is_evictable,
    "M4": failed_copy_is_published,
    "M5": late_commit_of_an_older_grant,
    "M6": release_counts_twice,
    "M7": death_cleans_nothing_up,
    "M9": restart_forgets_leases,
    "M10": checksum_is_not_heeded,
    "M11": generation_is_not_bumped,
    "M12": expired_write_becomes_readable,
    "M14": retried_reserve_is_granted_again,
    "M15": copy_does_not_hold_its_source,
    "M17": no_scrub_between_tenants,
    "M19": owner_is_not_checked,
}
"""Bugs that other systems had, by number."""

MUTATIONS: Final[dict[str, Mutation]] = {
    **{f"{number} {one.__name__}": one for number, one in FIELD.items()},
    **{one.__name__: one for one in (held_block_is_evicted, lost_copy_frees_its_target)},
    insertion_is_not_counted.__name__: insertion_is_not_counted,
    **{one.__name__: one for one in (*MENDED, *OF_RESTARTS, *OF_POLICIES)},
    **{one.__name__: one for one, _ in (*OF_GROUPS, *OF_TURNS, *OF_MAGAZINES, *OF_OPERATING)},
    **{one.__name__: one for one, _ in (*OF_TIERS, *OF_ADOPTING, *OF_RANKS, *OF_REMEDIES)},
}
"""Every seeded bug by name; each bug that is fixed adds one."""

CACHES: Final[dict[str, str]] = {
    **{one.__name__: name for one, name in (*OF_GROUPS, *OF_TURNS, *OF_MAGAZINES, *OF_OPERATING)},
    **{one.__name__: name for one, name in (*OF_RANKS, *OF_REMEDIES)},
    "fork_heeds_no_minimum": "limited",
    "refused_call_keeps_its_room_from_those_that_wait": "state",
}
"""The cache in which a bug shows; bugs not named here show in any cache, so one with one group is used."""

STORES: Final[dict[str, str]] = {one.__name__: tiers for one, tiers in (*OF_TIERS, *OF_ADOPTING)}
"""The stores that the cache needs for a bug to show; bugs not named here need none."""

NEAR: Final[dict[str, str]] = {
    "M1 expiry_frees_memory": "cached",
    "M3 copy_source_is_evictable": "on host",
    "M4 failed_copy_is_published": "cached",
    "M5 late_commit_of_an_older_grant": "evicted",
    "M7 death_cleans_nothing_up": "evicted",
    "M9 restart_forgets_leases": "evicted",
    "M11 generation_is_not_bumped": "on host",
    "M12 expired_write_becomes_readable": "cached",
    "M14 retried_reserve_is_granted_again": "evicted",
    "M15 copy_does_not_hold_its_source": "cached",
    "M17 no_scrub_between_tenants": "on host",
    "M19 owner_is_not_checked": "evicted",
    "held_block_is_evicted": "on host",
    "lost_copy_frees_its_target": "cached",
    "restart_forgets_whose_bytes_a_free_block_holds": "evicted",
    "restart_grants_the_null_block": "cached",
    "key_on_its_way_is_committed_again": "on host",
}
"""Bugs that an exhaustive search of the tiny world finds within seconds, and the root from which it finds them."""
