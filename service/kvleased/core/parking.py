"""Own the way of blocks out of use and back: from the free ones of a pool, to be taken last when they come back."""

import numpy as np

from kvleased.core.pool import Ids, Pool
from kvleased.core.states import Event


def park(pool: Pool, ids: Ids) -> None:
    """Take free blocks out of use until the pool grows again."""
    free = pool.free_ids
    pool.set_free(free[~np.isin(free, ids)])
    pool.change(ids, Event.PARK)
    pool.num_parked += len(ids)


def unpark(pool: Pool, ids: Ids) -> None:
    """Have parked blocks be free again, to be taken after all that are free now."""
    pool.set_free(np.concatenate([ids, pool.free_ids]))
    pool.change(ids, Event.UNPARK)
    pool.num_parked -= len(ids)
