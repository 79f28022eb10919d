"""Own the invariants of one pool by itself: states, holds, free list, eviction order, index and seals."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.checks.sound import Sound
from kvleased.core.ids import Ids

# Reading a member of an enumeration costs as much as a small array operation.
_FREE: Final = int(State.FREE)
_READY: Final = int(State.READY)
_PARKED: Final = int(State.PARKED)
_USES: Final = (State.RESERVED, State.FILLING, State.QUARANTINED, State.SCRUBBING)
_NEVER_UNHELD: Final = np.array([byte in _USES for byte in range(256)])


def pool_violations(name: str, pool: Pool, sound: Sound) -> list[str]:
    """Return what does not hold for a pool."""
    order = [*pool.order]
    return sound.unless_known(name, _looked_at(pool, order), lambda: _pool(pool, order))


def is_any(chosen: NDArray[np.bool_]) -> bool:
    """Tell whether anything is chosen; searching bytes takes a tenth of the time of searching an array."""
    return b"\1" in chosen.tobytes()


def _looked_at(pool: Pool, order: list[int]) -> tuple[object, ...]:
    """Return all that the laws of a pool look at, except what it is made with, which never changes."""
    columns = pool.records
    return (
        columns.state.tobytes(),
        columns.generation.tobytes(),
        columns.tenant.tobytes(),
        columns.checksum.tobytes(),
        columns.position.tobytes(),
        columns.seal.tobytes(),
        columns.key.tobytes(),
        pool.holds.tobytes(),
        pool.free.ids.tobytes(),
        pool.num_parked,
        order,
        len(pool.order),
        *pool.index.pointers(),
        len(pool.index),
    )


def _pool(pool: Pool, in_order: list[int]) -> list[str]:
    """Compare holds, free list, index and order with the states, which must add up to all blocks."""
    found: list[str] = []
    states, holds = pool.records.state, pool.holds
    null_blocks = len(pool) - pool.num_usable
    is_free, is_ready, is_unheld = states == _FREE, states == _READY, holds == 0
    if is_any(states > _PARKED):
        found.append("the states do not add up to the blocks")
    if null_blocks and not (is_free & is_unheld)[:null_blocks].all():
        found.append("a null block is in use")
    if is_any(is_free > is_unheld) or is_any(holds < 0):
        found.append("a free block is held")
    if is_any(_NEVER_UNHELD[states] & is_unheld):
        found.append("a block in use is held by nobody")
    is_parked = states == _PARKED
    if is_any(is_parked > is_unheld) or np.count_nonzero(is_parked) != pool.num_parked:
        found.append("the parked blocks are held, or there are not as many as are counted")
    is_free[:null_blocks] = False
    if not _is_just(pool.free.ids, is_free):
        found.append("the free list is not the set of free blocks")
    order = np.array(in_order, np.intp)
    if not _is_just(order, is_ready & is_unheld) or len(pool.order) != len(order):
        found.append("the evictable blocks are not the ready ones that nobody holds")
    return found + _index(pool, is_ready)


def _is_just(ids: Ids, wanted: NDArray[np.bool_]) -> bool:
    """Tell whether `ids` are just the wanted ones, each once."""
    listed = np.zeros(len(wanted), np.bool_)
    listed[ids] = True
    packed = wanted.tobytes()
    return listed.tobytes() == packed and len(ids) == packed.count(1)


def _index(pool: Pool, is_ready: NDArray[np.bool_]) -> list[str]:
    """Compare the index and the seals with the ready blocks."""
    found: list[str] = []
    indexed = pool.index.blocks()
    if not _is_just(indexed, is_ready) or len(pool.index) != len(indexed):
        found.append("the index does not name exactly the ready blocks")
    is_elsewhere = pool.index.find(pool.keys_of(indexed)) != indexed
    if is_any(is_elsewhere):
        found += [
            f"block {block} is indexed under another key"
            for block in indexed[is_elsewhere].tolist()
        ]
    (ready,) = is_ready.nonzero()
    if len(ready) and is_any(~pool.are_sealed(ready)):
        found.append("a ready block's seal does not match")
    return found
