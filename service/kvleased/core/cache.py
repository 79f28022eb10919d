"""Own one cache: `Cache.handle(command, now)` is the only way in, its Outcome the only way out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self

import numpy as np

from kvlease.errors import KVLeaseError
from kvlease.ids import Epoch, WorkerId
from kvleased.core import commands as c
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.blocks.states import State
from kvleased.core.checks.checking import violations
from kvleased.core.checks.sound import Sound
from kvleased.core.copies import adopting, landing, turning
from kvleased.core.copies.cleaning import clean
from kvleased.core.effects import Effect, Outcome, Tier, Wake
from kvleased.core.ids import IdCount
from kvleased.core.lease.ranks import NO_PLACES, Place
from kvleased.core.magazines import NO_MAGAZINES
from kvleased.core.prefix import explaining
from kvleased.core.prefix.key_counts import Counts, KeyCounts
from kvleased.core.recovery import recover
from kvleased.core.shape import CacheShape
from kvleased.core.state import CacheState, pack
from kvleased.core.tenancy.tenants import TenantFacts, list_tenants
from kvleased.core.verbs import (
    asking,
    clearing,
    committing,
    draining,
    ending,
    exchanging,
    forking,
    requests,
    resizing,
    trimming,
)
from kvleased.core.verbs.resizing import limited
from kvleased.core.verbs.seating import pump
from kvleased.core.verbs.stepping import step
from kvleased.core.views.census import Census, census
from kvleased.core.views.listing import (
    LeaseFacts,
    MagazineFacts,
    PinFacts,
    list_leases,
    list_magazines,
    list_pins,
)
from kvleased.core.views.picture import BlockFacts, Picture, block_facts, picture, pool_of
from kvleased.core.views.survey import Survey, survey
from kvleased.core.views.waiting_list import WaitingFacts, list_waiting

_Verb = Callable[..., Outcome]  # each verb takes its own kind of command

_VERBS: Final[dict[type[c.Command], _Verb]] = {
    c.Adopt: adopting.adopt,
    c.Attach: ending.attach,
    c.Cancel: landing.cancel,
    c.Commit: committing.commit,
    c.CopyDone: landing.copy_done,
    c.CopyFailed: landing.copy_failed,
    c.CopyLost: landing.copy_lost,
    c.Detach: ending.end_worker,
    c.Clear: clearing.clear,
    c.Drain: draining.drain,
    c.Evict: requests.evict,
    c.Exchange: exchanging.exchange,
    c.Explain: explaining.explain,
    c.Extend: requests.extend,
    c.Fork: forking.fork,
    c.Heartbeat: ending.heartbeat,
    c.Inventory: exchanging.inventory,
    c.Limit: resizing.limit,
    c.Lookup: committing.lookup,
    c.Map: committing.map_lease,
    c.MoverDied: landing.mover_died,
    c.Pin: committing.pin,
    c.Probed: asking.probed,
    c.Release: ending.release,
    c.Reload: requests.reload,
    c.Reserve: requests.reserve,
    c.Resize: resizing.resize,
    c.Step: step,
    c.Tick: landing.tick,
    c.TierChanged: turning.tier_changed,
    c.Trim: trimming.trim,
    c.Undrain: draining.undrain,
    c.Unpin: committing.unpin,
    c.WorkerDied: ending.end_worker,
}


class Cache:
    """The blocks of one registered model, and who may use them."""

    def __init__(
        self,
        shape: CacheShape,
        records: CacheRecords,
        epoch: Epoch,
        id_count: IdCount | None = None,
    ) -> None:
        """Start a new cache over records that are all zero; all caches of one epoch share a count of ids."""
        self._state = CacheState(shape, records, epoch, id_count)
        self._key_counts = KeyCounts(self._state.pools)

    @classmethod
    def recovered(  # noqa: PLR0913, PLR0917 - what a restart must know
        cls,
        shape: CacheShape,
        records: CacheRecords,
        epoch: Epoch,
        workers: Mapping[WorkerId, int],
        now: float,
        places: Mapping[WorkerId, Place] = NO_PLACES,
        magazines: Mapping[WorkerId, int] = NO_MAGAZINES,
        *,
        id_count: IdCount | None = None,
    ) -> Self:
        """Continue over the records of an earlier life.

        `workers` has the tenant digest of each worker whose process lives. Of some of these workers, `places` has the
        engine and rank, and `magazines` the name of the magazine that they share.
        """
        cache = cls(shape, records, epoch, id_count)
        recover(cache._state, workers, places, magazines, now)
        return cache

    def __repr__(self) -> str:
        """Show the cache's life."""
        state = self._state
        return f"<Cache {len(state.leases)} leases, {len(state.waiting)} waiting, {state.device!r}>"

    @property
    def is_draining(self) -> bool:
        """Whether no new lease is granted."""
        return self._state.is_draining

    @property
    def shape(self) -> CacheShape:
        """The numbers of the cache."""
        return self._state.shape

    @property
    def longest_request_tokens(self) -> int:
        """Tokens of the longest request that fits in the blocks that can be granted now."""
        return self._state.covering.longest_tokens

    def handle(self, command: c.Command, now: float) -> Outcome:
        """Decide what a command leads to; `now` is in monotonic seconds.

        Raises:
            KVLeaseError: The command is refused and nothing has changed, except that room for the
                next try may be on its way, and that waiting calls may have got the room there is.

        """
        state = self._state
        if state.unsettled and not requests.is_put_off(state, command):
            ending.settle(state)
        state.history.now = now
        if state.device.owners is not None:
            state.device.owners.order.now = now
        try:
            outcome = _VERBS[type(command)](state, command, now)
        except KVLeaseError:
            # Room that was made in vain may be enough for a waiting call.
            if state.effects and state.waiting.by_ticket:
                ending.settle(state)
                pump(state, now)
            raise
        if state.waiting.by_ticket:
            ending.settle(state)
            pump(state, now)
            outcome = self._answered(outcome)
        if state.dirt.is_due:
            ending.settle(state)
            if clean(state, now) and state.waiting.by_ticket:
                pump(state, now)
                outcome = self._answered(outcome)
        if state.effects:
            outcome.effects, state.effects = state.effects, []
        return outcome

    def _answered(self, outcome: Outcome) -> Outcome:
        """Replace a ticket by its reply if the same command has already served it."""
        for effect in self._state.effects:
            if isinstance(effect, Wake) and effect.ticket == outcome.ticket:
                self._state.effects.remove(effect)
                if isinstance(effect.result, KVLeaseError):
                    raise effect.result
                return Outcome(reply=effect.result)
        return outcome

    def settle(self) -> None:
        """Do the work that the last command put off until its answer was on its way; the next one would do it, too."""
        ending.settle(self._state)

    def settle_part(self) -> None:
        """Do a part of the work that `settle` does, if there is any: no more than other calls can wait for."""
        if not self.is_settled:
            ending.settle_part(self._state)

    @property
    def is_settled(self) -> bool:
        """Whether the last command left no work to do."""
        return not self._state.unsettled

    def take_effects(self) -> list[Effect]:
        """Return the effects that `handle` could not return: call it after a refusal, and after `settle`."""
        effects = self._state.effects
        self._state.effects = []
        return effects

    def census(self) -> Census:
        """Count everything at this instant."""
        self.settle()
        return census(self._state)

    def survey(self, now: float) -> Survey:
        """Look at everything at this instant; `now` is in monotonic seconds."""
        self.settle()
        return survey(self._state, now)

    def check(self, sound: Sound | None = None) -> list[str]:
        """Return every invariant that does not hold, in words; the list should be empty.

        A caller that checks after every event passes the same `sound` each time.
        """
        self.settle()
        return violations(self._state, sound or Sound()) + self._key_counts.violations()

    def count_keys(self, tenant: int, table: Counts) -> None:
        """Count a tenant's findable keys by bucket in an array, now and from now on.

        `table` is all zeros, its length is a power of two, and readers share it. Keys of a remote store do not count.
        """
        self._key_counts.begin(tenant, table)

    def stop_counting(self, tenant: int) -> None:
        """Stop counting a tenant's keys, and leave its array as it is."""
        self._key_counts.end(tenant)

    def list_leases(self, after_id: int, limit: int, now: float) -> tuple[LeaseFacts, ...]:
        """Return up to `limit` leases whose ids are above `after_id`, by id; `now` is in monotonic seconds."""
        return list_leases(self._state, after_id, limit, now)

    def list_pins(
        self, after_id: int, limit: int, tenant: int | None = None
    ) -> tuple[PinFacts, ...]:
        """Return up to `limit` pins whose ids are above `after_id`, by id; only those of `tenant` if it is given."""
        return list_pins(self._state, after_id, limit, tenant)

    def list_magazines(self, now: float) -> tuple[MagazineFacts, ...]:
        """Return what each magazine holds, by place; `now` is in monotonic seconds."""
        self.settle()
        return list_magazines(self._state, now)

    def list_tenants(self) -> tuple[TenantFacts, ...]:
        """Return what each tenant that is attached, configured or uses blocks has and may have, by digest."""
        self.settle()
        return list_tenants(self._state)

    def list_waiting(self, after_id: int, limit: int, now: float) -> tuple[WaitingFacts, ...]:
        """Return up to `limit` waiting calls whose ids are above `after_id`, by id; `now` is in monotonic seconds."""
        self.settle()
        return list_waiting(self._state, after_id, limit, now)

    def picture(self, tier: Tier, tenants: Sequence[int]) -> Picture:
        """Return what a tier looks like now; `tenants` are the digests of the tenants that it tells apart."""
        self.settle()
        return picture(self._state, tier, tenants)

    def block_facts(self, tier: Tier, block_id: int, now: float) -> BlockFacts:
        """Describe one block of a tier; `now` is in monotonic seconds.

        Raises:
            InvalidError: The tier has no such block.

        """
        self.settle()
        return block_facts(self._state, tier, block_id, now)

    def check_limits(self, command: c.Limit) -> None:
        """Refuse limits that cannot be met beside what is pinned; changes nothing.

        Raises:
            PoolFullError: Pins hold too much for these limits.

        """
        resizing.check_owed(self._state, limited(self._state.shape, command))

    def num_retired(self, tier: Tier) -> int:
        """Count a tier's retired slots if all of its other slots are parked; else return 0."""
        states = pool_of(self._state, tier).records.state
        num_bad = int(np.count_nonzero(states == State.BAD))
        num_parked = int(np.count_nonzero(states == State.PARKED))
        return num_bad if num_bad + num_parked == len(states) else 0

    def parked(self, tier: Tier) -> bytes:
        """Return the packed int32 ids of a tier's parked blocks, which are out of use until it grows again."""
        return pack(pool_of(self._state, tier).parked_ids)

    def num_leases_of(self, worker_id: WorkerId) -> int:
        """Count a worker's leases."""
        return len(self._state.leases.by_worker.get(worker_id, ()))

    def is_idle(self, worker_id: WorkerId) -> bool:
        """Tell whether a worker has no lease, and waits for none."""
        waits = any(waiter.worker_id == worker_id for waiter in self._state.waiting)
        return not waits and not self.num_leases_of(worker_id)

    def has_lease(self, lease_id: int) -> bool:
        """Tell whether a lease lives."""
        return lease_id in self._state.leases.by_id

    def lease_ids_of(self, worker_id: WorkerId) -> bytes:
        """Return the packed int64 ids of a worker's leases."""
        return np.array(sorted(self._state.leases.by_worker.get(worker_id, ())), np.int64).tobytes()

    def tenant_of(self, worker_id: WorkerId) -> int:
        """Return the tenant digest of an attached worker.

        Raises:
            UnknownWorkerError: The worker is not attached.

        """
        return self._state.tenant_of(worker_id)
