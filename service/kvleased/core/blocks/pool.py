"""Own the blocks of one tier: which are free, findable under a key or evictable, and whose bytes they hold."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.blocks.history import DepartureReason, Leaving
from kvleased.core.blocks.holding import HOLDERS, PACKED_HOLDERS, HeldBlocks
from kvleased.core.blocks.index import KeyIndex
from kvleased.core.blocks.owners import Owners
from kvleased.core.blocks.records import TierRecords
from kvleased.core.blocks.seals import Seals
from kvleased.core.blocks.states import CompiledTransitions, Event, State, advance
from kvleased.core.blocks.tenant_digests import TenantDigests
from kvleased.core.eviction import EvictionOrder
from kvleased.core.eviction.order import deepest_first
from kvleased.core.ids import Ids

# Plain numbers, because reading a member of an enumeration costs as much as a small array operation.
_READY: Final = int(State.READY)
_EVICT: Final = Event.EVICT
_IN_USE: Final = np.array([byte not in (State.FREE, State.PARKED) for byte in range(256)])


class Pool(HeldBlocks):
    """The blocks of the device pool, or the slots of a lower tier; `block` stands for both here."""

    def __init__(
        self,
        records: TierRecords,
        transitions: CompiledTransitions,
        order: EvictionOrder,
        layout_digest: int,
        null_blocks: int = 0,
    ) -> None:
        """Take over columns in which every entry is FREE; the first `null_blocks` are never granted."""
        super().__init__(records, transitions, order, null_blocks)
        self.index = KeyIndex(records.key)
        self._seals = Seals(records, layout_digest)
        self._null_blocks = null_blocks
        self.num_parked = 0
        """Blocks that are out of use until the pool grows again."""
        self._tenants = TenantDigests()
        self.has_classes = False
        """Whether some leases are of another class than the normal one."""
        self._parts_tenants = False
        self._keys = records.key.view(np.dtype((np.void, BYTES_PER_KEY))).reshape(-1)
        """Each key as one element: writing it takes half the time of writing its bytes."""
        self._mark: NDArray[np.int32] = np.zeros(len(records.state), np.int32)
        self.tier_number = 0
        self.since: NDArray[np.int64] = np.zeros(len(records.state), np.int64)
        """The newest lease when each READY block became findable; 0 if that was in an earlier life of the process."""
        self._first_words: NDArray[np.int64] = records.key.view(np.int64)[:, 0]

    def __len__(self) -> int:
        """Count all blocks."""
        return len(self.records.state)

    def __repr__(self) -> str:
        """Show the pool's life."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts().items() if count)
        return f"<Pool {counts or 'empty'}>"

    @property
    def num_usable(self) -> int:
        """Blocks that can be granted: all but the null blocks."""
        return len(self) - self._null_blocks

    @property
    def num_free(self) -> int:
        """Blocks that are nobody's."""
        return self.free.count

    @property
    def num_available(self) -> int:
        """Blocks that are nobody's or may be evicted."""
        return self.free.count + len(self.order)

    def is_only_of(self, tenant: int) -> bool:
        """Tell whether no other tenant ever had a block."""
        return not self._tenants or (len(self._tenants) == 1 and tenant in self._tenants)

    def counts(self) -> dict[str, int]:
        """Count the blocks by state; the states add up to all blocks that can be granted."""
        numbers = np.bincount(self.records.state[self._null_blocks :], minlength=len(State))
        return {state.name.lower(): int(numbers[state]) for state in State}

    def keys_of(self, ids: Ids) -> bytes:
        """Return the packed keys that READY blocks carry."""
        return self.records.key.take(ids, axis=0).tobytes()

    def cached(self, keys: bytes) -> Ids:
        """Return the blocks of the packed keys that are known, each block once, in the order of the keys."""
        found = self.index.find(keys)
        found = found[found >= 0]
        return found if self.are_distinct(found) else np.array([*dict.fromkeys(found.tolist())])

    def is_unknown_to(self, other: "Pool", ids: Ids) -> NDArray[np.bool_]:
        """Tell for each of the READY blocks whether the other pool does not have its key."""
        if not len(other.index):
            return np.ones(len(ids), np.bool_)
        return other.index.find(self.keys_of(ids)) < 0

    def tenants_of(self, ids: Ids) -> int | NDArray[np.uint64]:
        """Return the tenants whose bytes blocks in use hold: one for each, or the only tenant that ever had any."""
        if len(self._tenants) == 1:
            return next(iter(self._tenants))
        return self.records.tenant[ids]

    def are_distinct(self, ids: Ids) -> bool:
        """Tell whether no block is named twice."""
        if not len(ids):
            return True
        order = np.arange(len(ids), dtype=np.int32)
        self._mark[ids] = order
        return self._mark[ids].tobytes() == order.tobytes()

    # Into and out of use ------------------------------------------------------------------------------------------

    def suitable(self, count: int, tenant: int | None = None) -> Ids | None:
        """Return `count` free blocks that need no scrubbing for `tenant`, or None; changes nothing.

        Without a tenant any free block will do: nobody but a mover sees it before it is overwritten.
        """
        if count > self.free.count:
            return None
        top = self.free.top(count)
        if tenant is None:
            # Nobody reads these in order, so they are best written in memory's order; narrow numbers are sorted faster.
            return self.free.offer(np.sort(top.astype(np.int32)).astype(np.intp))
        if self.is_only_of(tenant) or self._is_suitable(top, tenant).all():
            return self.free.offer(top.copy())
        free = self.free.ids
        matching = free[self._is_suitable(free, tenant)]
        return matching[:count] if len(matching) >= count else None

    def unsuitable(self, count: int, tenant: int) -> Ids:
        """Return up to `count` free blocks that hold another tenant's bytes; changes nothing."""
        free = self.free.ids
        return free[~self._is_suitable(free, tenant)][:count].copy()

    def _is_suitable(self, ids: Ids, tenant: int) -> NDArray[np.bool_]:
        last = self.records.tenant[ids]
        suitable: NDArray[np.bool_] = (last == tenant) | (last == 0)
        return suitable

    def take(
        self,
        ids: Ids,
        event: Event,
        tenant: int | NDArray[np.uint64] | None = None,
        *,
        num_holders: int = 1,
    ) -> None:
        """Take free blocks into use, each with `num_holders`; `tenant` names whose bytes they will hold."""
        if isinstance(tenant, int):
            self.records.tenant[ids] = self._tenants[tenant]
        elif tenant is not None:
            # Nearly always they are all one tenant's, which comparing bytes shows in a tenth of the time.
            is_one = tenant.tobytes() == tenant[:1].tobytes() * len(tenant)
            self._tenants.note((tenant[:1] if is_one else tenant).tolist())
            self.records.tenant[ids] = tenant
        if self.owners is not None:
            self.owners.take(ids, tenant)
        elif self._parts_tenants and (tenant is None or len(self._tenants) > 1):
            self._begin_owners().take(ids, tenant)
        advance(self._transitions, self.records.state, ids, event)
        self.holds[ids] = HOLDERS[num_holders]
        self.free.take(ids)

    @property
    def parked_ids(self) -> Ids:
        """The blocks that are out of use until the pool grows again, ascending."""
        return np.flatnonzero(self.records.state == State.PARKED)

    # Tenants and classes ------------------------------------------------------------------------------------------

    def part_tenants(self, *, at_once: bool) -> None:
        """Count what each tenant uses as soon as there are two, or at once; the order then keeps their blocks apart."""
        self._parts_tenants = True
        if at_once:
            self._begin_owners()

    @property
    def in_use(self) -> NDArray[np.bool_]:
        """Tell for every block whether somebody's bytes may be there."""
        in_use: NDArray[np.bool_] = _IN_USE[self.records.state]
        return in_use

    def usage(self) -> dict[int, tuple[int, int]]:
        """Count the blocks in use, and those of them that can be evicted, of each tenant that has any."""
        if self.owners is not None:
            return self.owners.usage()
        num_used = self.num_usable - self.free.count - self.num_parked
        return {one: (num_used, len(self.order)) for one in self._tenants if num_used}

    def begin_classes(self) -> None:
        """Begin to use the classes of leases; all leases so far were normal."""
        owners = self._begin_owners() if self.owners is None else self.owners
        owners.order.begin_classes()
        self.has_classes = True

    def _begin_owners(self) -> Owners:
        used = np.flatnonzero(self.in_use)
        owners = Owners(len(self), self.order, used, self.records.tenant[used])
        self.owners, self.order = owners, owners.order
        return owners

    # Keys ---------------------------------------------------------------------------------------------------------

    def expect(self, ids: Ids, keys: bytes) -> None:
        """Write the packed keys under which blocks will be published when they are filled."""
        self._keys[ids] = np.frombuffer(keys, self._keys.dtype)

    def publish(self, ids: Ids, keys: bytes, event: Event) -> None:
        """Make blocks findable under their packed keys; tenant, position and checksum have been written before."""
        self._keys[ids] = np.frombuffer(keys, self._keys.dtype)
        self.records.seal[ids] = self._seals.of(ids)
        advance(self._transitions, self.records.state, ids, event)
        self.index.add(ids, keys)
        if self.history is not None:
            self.since[ids] = self.history.moment
        self.order.cached(ids)

    def evict(self, ids: Ids, why: DepartureReason = DepartureReason.EVICTED) -> None:
        """Make evictable blocks free and their keys unknown to this tier."""
        assert self.holds[ids].tobytes() == PACKED_HOLDERS[0] * len(ids), "evicting a held block"
        self._leave(ids, why)
        self._free_up(ids, _EVICT)

    def retract(self, ids: Ids) -> None:
        """Make READY blocks private to their only holder, and their keys unknown to this tier."""
        self._leave(ids, DepartureReason.DISPLACED)
        self.change(ids, Event.RETRACT)

    def retire(self, ids: Ids) -> None:
        """Take blocks out of use for good; whoever holds them must let go afterwards."""
        ready = ids[self.records.state[ids] == _READY]
        self._note(ready, DepartureReason.DAMAGED)
        self.order.evicted(ids)
        self.index.discard(ready)
        self.change(ids, Event.RETIRE)

    def put_last(self, ids: Ids) -> None:
        """Move free blocks behind all other free ones; those that have been retired leave the free list."""
        free = self.free.ids[np.isin(self.free.ids, ids).argsort(kind="stable")]
        self.free.set(free[self.records.state[free] == State.FREE])

    def forget_all(self) -> int:
        """Take all findable blocks for lost and return how many; held and retired ones become free once let go of."""
        (lost,) = (self.records.state == _READY).nonzero()
        is_held = self.holds[lost] > 0
        self._leave(lost, DepartureReason.STORE_LOST)
        # Under a new generation, what the store still has could not be taken over.
        self._set_free(lost[~is_held], _EVICT)
        (retired,) = (self.records.state == State.BAD).nonzero()
        self.change(np.concatenate([lost[is_held], retired]), Event.FORGET)
        self._free_up(retired[self.holds[retired] == 0], Event.PROVE)
        return len(lost)

    def _leave(self, ids: Ids, why: DepartureReason) -> None:
        self._note(ids, why)
        self.order.evicted(ids)
        self.index.discard(ids)

    def _note(self, ids: Ids, why: DepartureReason) -> None:
        """Remember that the keys of READY blocks leave this tier."""
        if self.history is not None:
            words, owners = self._first_words[ids], self.records.tenant[ids]
            blocks = Leaving(words, owners, self.since[ids], self.idle_at[ids])
            self.history.left(self.tier_number, blocks, why)

    def evictable(self, ids: Ids) -> Ids:
        """Return those of the blocks that may be evicted, in the given order."""
        return ids[self.order.holds(ids)] if len(self.order) else ids[:0]

    def victims(self, count: int, protected: Ids) -> Ids:
        """Return the blocks to evict next; changes nothing."""
        return self.order.coldest(count, protected)

    def rebuild(self) -> None:
        """Derive free list, order and index from the columns and holds after a restart."""
        state = self.records.state
        self._tenants.note(set(np.unique(self.records.tenant).tolist()) - {0})
        if self.owners is not None or (self._parts_tenants and len(self._tenants) > 1):
            self._begin_owners()
        self.free.set(np.flatnonzero(state[self._null_blocks :] == State.FREE) + self._null_blocks)
        self.num_parked = len(self.parked_ids)
        ready = np.flatnonzero(state == _READY)
        self.index.add(ready)
        idle = ready[self.holds[ready] == 0]
        self.order.add(deepest_first(idle, self.records.position[idle]))

    def are_sealed(self, ids: Ids) -> NDArray[np.bool_]:
        """Tell for each of the blocks whether its seal matches its entry."""
        return np.equal(self.records.seal[ids], self._seals.of(ids))
