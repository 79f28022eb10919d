"""Own the blocks of one tier: which are free, findable under a key or evictable, and how often each is held.

A hold is named by its holder: a lease, a copy or a pin lists the blocks that it holds, and lets go
of each exactly once. `holds` merely counts them, so that the last one to let go knows it;
`Cache.check` compares the count with the names.
"""

from collections.abc import Container, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.eviction import EvictionOrder
from kvleased.core.records import TierRecords
from kvleased.core.seals import seal
from kvleased.core.states import CompiledTransitions, Event, State, advance

Ids = NDArray[np.intp]
"""Ids of blocks or slots, as wide as an address: arrays are indexed with these six times faster than with int32."""

# Plain numbers: reading a member of an enumeration costs as much as a small array operation.
_READY: Final = int(State.READY)
_ONE: Final = np.uint64(1)
_LAST_WORDS: Final = {
    int(State.RESERVED): Event.ABANDON,
    int(State.QUARANTINED): Event.PROVE,
}
"""What happens to a block that is not READY when its last holder lets go of it."""


class Pool:
    """The blocks of the device pool, or the slots of a lower tier; `block` stands for both here."""

    def __init__(
        self,
        records: TierRecords,
        transitions: CompiledTransitions,
        order: EvictionOrder,
        layout_digest: int,
        null_blocks: int = 0,
    ) -> None:
        """Take over columns of which every entry is FREE; the first `null_blocks` are never granted."""
        self.records = records
        self.order = order
        self.index: dict[bytes, int] = {}
        self.holds: NDArray[np.int32] = np.zeros(len(records.state), np.int32)
        self._transitions = transitions
        self._layout_digest = layout_digest
        self._null_blocks = null_blocks
        self._free: Ids = np.arange(null_blocks, len(records.state), dtype=np.intp)[::-1].copy()
        self._num_free = len(self._free)
        self._tenants: set[int] = set()
        self._offered: Ids | None = None

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
        return self._num_free

    @property
    def num_available(self) -> int:
        """Blocks that are nobody's or may be evicted."""
        return self._num_free + len(self.order)

    @property
    def free_ids(self) -> Ids:
        """The free blocks, the next to be taken last."""
        return self._free[: self._num_free]

    def counts(self) -> dict[str, int]:
        """Count the blocks by state; the states add up to all blocks that can be granted."""
        numbers = np.bincount(self.records.state[self._null_blocks :], minlength=len(State))
        return {state.name.lower(): int(numbers[state]) for state in State}

    def key_of(self, block: int) -> bytes:
        """Return the key that a READY block carries."""
        return bytes(self.records.key[block])

    def keys_of(self, ids: Ids) -> list[bytes]:
        """Return the keys that READY blocks carry."""
        packed = self.records.key[ids].tobytes()
        return [packed[at : at + BYTES_PER_KEY] for at in range(0, len(packed), BYTES_PER_KEY)]

    def unknown_to(self, other: "Pool", blocks: list[int]) -> list[int]:
        """Return those of the READY blocks whose keys the other pool does not have."""
        keys = self.keys_of(np.array(blocks, np.intp))
        return [block for block, key in zip(blocks, keys, strict=True) if key not in other.index]

    def change(self, ids: Ids, event: Event) -> None:
        """Make one transition of the table for all `ids`."""
        advance(self._transitions, self.records.state, ids, event)

    # Holds --------------------------------------------------------------------------------------------------------

    def hold(self, ids: Ids) -> None:
        """Count one more holder of each block; `ids` has no duplicates."""
        holds = self.holds
        if len(self.order):
            self.order.discard(ids[holds[ids] == 0].tolist())
        holds[ids] += 1

    def let_go(self, ids: Ids, *, coldest: bool = False) -> None:
        """Count one holder less of each block.

        What nobody holds becomes evictable (READY) or free (the rest). Blocks are given in token
        order; or, with `coldest`, in the order in which they were going to be evicted, at whose
        head they are put back.
        """
        left = self.holds[ids]
        left -= 1
        self.holds[ids] = left
        # Bytes are compared in a tenth of the time that arrays are searched.
        idle = ids if left.tobytes() == bytes(left.nbytes) else ids[left == 0]
        if not len(idle):
            return
        states = self.records.state[idle]
        packed = states.tobytes()
        if packed.count(packed[0]) == len(packed):
            self._settle(idle, packed[0], coldest=coldest)
            return
        for state in set(packed):
            self._settle(idle[states == state], state, coldest=coldest)

    def _settle(self, idle: Ids, state: int, *, coldest: bool) -> None:
        if state == _READY and coldest:
            self.order.add_coldest(idle.tolist())
        elif state == _READY:
            self.order.add(idle[::-1].tolist())
        elif state in _LAST_WORDS:
            self._free_up(idle, _LAST_WORDS[state])

    # Into and out of use ------------------------------------------------------------------------------------------

    def suitable(self, count: int, tenant: int | None = None) -> Ids | None:
        """Return `count` free blocks that need no scrubbing for `tenant`, or None; changes nothing.

        Without a tenant any free block will do: nobody but a mover sees it before it is overwritten.
        """
        if count > self._num_free:
            return None
        top = self._free[self._num_free - count : self._num_free]
        if tenant is None or self._tenants <= {tenant} or self._is_suitable(top, tenant).all():
            self._offered = top[::-1].copy()
            return self._offered
        free = self.free_ids
        matching = free[self._is_suitable(free, tenant)]
        return matching[::-1][:count].copy() if len(matching) >= count else None

    def unsuitable(self, count: int, tenant: int) -> Ids:
        """Return up to `count` free blocks that hold another tenant's bytes; changes nothing."""
        free = self.free_ids
        return free[~self._is_suitable(free, tenant)][:count].copy()

    def _is_suitable(self, ids: Ids, tenant: int) -> NDArray[np.bool_]:
        last = self.records.tenant[ids]
        suitable: NDArray[np.bool_] = (last == tenant) | (last == 0)
        return suitable

    def take(self, ids: Ids, event: Event, tenant: int | NDArray[np.uint64] | None = None) -> None:
        """Take free blocks into use, each with one holder; `tenant` names whose bytes they will hold."""
        if isinstance(tenant, int):
            self._tenants.add(tenant)
            self.records.tenant[ids] = tenant
        elif tenant is not None:
            self._tenants.update(tenant.tolist())
            self.records.tenant[ids] = tenant
        advance(self._transitions, self.records.state, ids, event)
        self.holds[ids] = 1
        if ids is not self._offered:
            free = self.free_ids
            kept = free[~np.isin(free, ids)]
            self._free[: len(kept)] = kept
        self._num_free -= len(ids)
        self._offered = None

    def end(self, ids: Ids, event: Event) -> None:
        """End a fill or scrub whose block nobody but the copy held."""
        self.holds[ids] -= 1
        assert not self.holds[ids].any(), "somebody waits for a block that comes to nothing"
        self._free_up(ids, event)

    def _free_up(self, ids: Ids, event: Event) -> None:
        # The generation goes first: an entry that a crash leaves in between then fails its seal.
        generations = self.records.generation[ids]
        generations += _ONE
        self.records.generation[ids] = generations
        advance(self._transitions, self.records.state, ids, event)
        self._offered = None
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    # Keys ---------------------------------------------------------------------------------------------------------

    def publish(self, ids: Ids, keys: list[bytes], event: Event) -> None:
        """Make blocks findable under their keys; tenant, position and checksum have been written before."""
        self.records.key[ids] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, BYTES_PER_KEY)
        self.records.seal[ids] = seal(self.records, ids, self._layout_digest)
        self.change(ids, event)
        self.index.update(zip(keys, ids.tolist(), strict=True))

    def evict(self, blocks: Iterable[int]) -> None:
        """Make evictable blocks free and their keys unknown to this tier."""
        ids = np.fromiter(blocks, np.intp)
        assert not self.holds[ids].any(), "evicting a held block"
        self.order.discard(ids.tolist())
        self._forget(ids)
        self._free_up(ids, Event.EVICT)

    def retire(self, ids: Ids) -> None:
        """Take blocks out of use for good; whoever holds them must let go afterwards."""
        self.order.discard(ids.tolist())
        self._forget(ids[self.records.state[ids] == State.READY])
        self.change(ids, Event.RETIRE)

    def _forget(self, ids: Ids) -> None:
        for row, block in zip(self.records.key[ids], ids.tolist(), strict=True):
            found = self.index.pop(row.tobytes())
            assert found == block, "index points elsewhere"

    def evictable(self, ids: Ids) -> list[int]:
        """Return those of the blocks that may be evicted, in the given order."""
        states = self.records.state[ids]
        found: list[int] = ids[(states == _READY) & (self.holds[ids] == 0)].tolist()
        return found

    def victims(self, count: int, protected: Container[int]) -> list[int]:
        """Return the blocks to evict next; changes nothing."""
        return self.order.coldest(count, protected)

    def rebuild(self) -> None:
        """Derive free list, order and index from the columns and holds, after a restart."""
        state = self.records.state
        self._tenants = set(np.unique(self.records.tenant).tolist()) - {0}
        free = np.flatnonzero(state[self._null_blocks :] == State.FREE) + self._null_blocks
        self._num_free = len(free)
        self._free[: self._num_free] = free[::-1]
        ready = np.flatnonzero(state == State.READY)
        keys = self.records.key[ready].tobytes()
        self.index = {
            keys[at * BYTES_PER_KEY : (at + 1) * BYTES_PER_KEY]: block
            for at, block in enumerate(ready.tolist())
        }
        idle = ready[self.holds[ready] == 0]
        deepest_first = np.argsort(-self.records.position[idle].astype(np.int64), kind="stable")
        self.order.add(idle[deepest_first].tolist())

    def sealed(self) -> NDArray[np.bool_]:
        """Tell of every block whether its seal matches its entry."""
        everything = np.arange(len(self), dtype=np.intp)
        return np.equal(self.records.seal, seal(self.records, everything, self._layout_digest))
