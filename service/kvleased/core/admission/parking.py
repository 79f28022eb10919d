"""Own how free blocks of a pool go out of use, and how they come back: as those to be taken last."""

import numpy as np

from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import Event
from kvleased.core.ids import Ids


def larger(num_parked: int, num_lacking: int, registering: str) -> str:
    """Say how a pool can grant more blocks: by a resize if it has enough parked ones, else as `registering` says."""
    if 0 < num_lacking <= num_parked:
        return f"bring some of its {num_parked} parked blocks back into use with kvlease resize"
    return registering


def park(pool: Pool, ids: Ids) -> None:
    """Take free blocks out of use until the pool grows again."""
    free = pool.free.ids
    pool.free.set(free[~np.isin(free, ids)])
    pool.change(ids, Event.PARK)
    pool.num_parked += len(ids)


def unpark(pool: Pool, ids: Ids) -> None:
    """Make parked blocks free again, to be taken after all that are free now."""
    pool.free.set(np.concatenate([pool.free.ids, ids]))
    pool.change(ids, Event.UNPARK)
    pool.num_parked -= len(ids)
