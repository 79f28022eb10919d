"""Own the way of blocks out of use and back: from the free ones of a pool, to be taken last when they come back."""

import numpy as np

from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import Event
from kvleased.core.ids import Ids


def larger(num_parked: int, num_lacking: int, registering: str) -> str:
    """Return how a pool comes to grant more blocks: those that a resize took may do, else `registering` tells how."""
    if 0 < num_lacking <= num_parked:
        return f"bring some of its {num_parked} parked blocks back into use by kvlease resize"
    return registering


def park(pool: Pool, ids: Ids) -> None:
    """Take free blocks out of use until the pool grows again."""
    free = pool.free.ids
    pool.free.set(free[~np.isin(free, ids)])
    pool.change(ids, Event.PARK)
    pool.num_parked += len(ids)


def unpark(pool: Pool, ids: Ids) -> None:
    """Have parked blocks be free again, to be taken after all that are free now."""
    pool.free.set(np.concatenate([pool.free.ids, ids]))
    pool.change(ids, Event.UNPARK)
    pool.num_parked -= len(ids)
