"""Build engines whose ranks call separately, for the laws of the leases that they share."""

from kvlease.groups import GroupShape, Keeps, keeps_everything
from kvlease.ids import Epoch, LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import (
    Extended,
    Reserved,
    Trimmed,
)
from kvleased.core.lease.ranks import Place
from tests.unit.service.core.builders import (
    EPOCH,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WORKER,
    a_cache,
    an_extend,
    answer,
    evict,
    ids,
    land,
    records,
    reserve,
    the_copy,
)

ENGINE = 2**63 + 5
LEFT, RIGHT, THIRD = WorkerId(11), WorkerId(12), WorkerId(13)
PLACES = {LEFT: Place(ENGINE, 0), RIGHT: Place(ENGINE, 1), THIRD: Place(ENGINE, 2)}
NULL_BLOCKS = 1


def an_attach(worker_id: WorkerId) -> c.Attach:
    """Return the command by which a rank becomes known."""
    place = PLACES[worker_id]
    return c.Attach(worker_id=worker_id, tenant_digest=TENANT, engine=place.engine, rank=place.rank)


def an_engine(num_blocks: int = 8, num_slots: int = 8, **numbers: object) -> Cache:
    """Return a cache with ranks of one engine that call separately: two, unless more are asked for."""
    num_ranks = int(str(numbers.setdefault("num_ranks", 2)))
    cache = a_cache(num_blocks, num_slots, **numbers)
    for worker_id in (LEFT, RIGHT, THIRD)[:num_ranks]:
        cache.handle(an_attach(worker_id), 0.0)
    return cache


def both(cache: Cache, num_blocks: int = 1, prefix: bytes = b"") -> Reserved:
    """Return the lease of a request that both ranks have asked for."""
    reserve(cache, num_blocks, prefix=prefix, worker_id=LEFT)
    return reserve(cache, num_blocks, prefix=prefix, worker_id=RIGHT)


def extend(cache: Cache, lease_id: LeaseId, num_blocks: int, worker_id: WorkerId) -> list[int]:
    """Return the blocks that an extend of a lease tells a rank of."""
    outcome = cache.handle(an_extend(lease_id, num_blocks, worker_id=worker_id), 0.0)
    return ids(answer(outcome, Extended).block_ids)


def trim(cache: Cache, lease_id: LeaseId, num_blocks: int, worker_id: WorkerId) -> int:
    """Return how many blocks leave a lease when a rank trims it."""
    num_tokens = num_blocks * TOKENS_PER_BLOCK
    command = c.Trim(worker_id=worker_id, lease_id=lease_id, num_tokens=num_tokens)
    return answer(cache.handle(command, 0.0), Trimmed).num_given_back


def restarted(cache: Cache, *dead: WorkerId) -> Cache:
    """Return the next life of a cache; its ranks live, except for the given dead ones."""
    attached = dict.fromkeys([WORKER, STRANGER], TENANT)
    places = {
        one: place
        for one, place in PLACES.items()
        if one not in dead and place.rank < cache.shape.num_ranks
    }
    workers = attached | dict.fromkeys(places, TENANT)
    return Cache.recovered(cache.shape, records(cache), Epoch(EPOCH + 1), workers, 100.0, places)


def free(cache: Cache) -> int:
    """Return how many blocks are free."""
    return cache.census().device["free"]


def evicted_by_both(cache: Cache) -> Reserved:
    """Return a lease of two blocks that both ranks have asked to evict."""
    lease = both(cache, 2)
    evict(cache, lease.lease_id, worker_id=LEFT)
    land(cache, the_copy(evict(cache, lease.lease_id, worker_id=RIGHT)))
    return lease


WINDOW = GroupShape(
    keeps=Keeps.WINDOW,
    kept_tokens=8,
    tokens_per_block=TOKENS_PER_BLOCK,
    keys_per_block=1,
    table_blocks=16,
    max_blocks=5,
)
STATES = GroupShape(
    keeps=Keeps.STATE,
    tokens_per_block=TOKENS_PER_BLOCK,
    keys_per_block=1,
    table_blocks=16,
    max_blocks=2,
)


def grouped(*groups: GroupShape) -> Cache:
    """Return a cache with the given groups and one group that keeps everything."""
    full = keeps_everything(TOKENS_PER_BLOCK, 16)
    return an_engine(40, groups=(full, *groups), null_blocks=NULL_BLOCKS)
