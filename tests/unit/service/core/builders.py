"""Build caches, keys, leases and copies for the laws of the core, so that a law shows only what it is about."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from kvlease.errors import KVLeaseError
from kvlease.groups import keeps_everything
from kvlease.ids import Epoch, LeaseId, WorkerId
from kvleased.core import Cache, CacheShape
from kvleased.core import commands as c
from kvleased.core.blocks.history import Digests, Leaving
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.blocks.states import State
from kvleased.core.effects import (
    Committed,
    Copy,
    Evicted,
    Extended,
    Found,
    Outcome,
    Reloaded,
    Reply,
    Reserved,
    Wake,
)
from kvleased.core.ids import Ids

WORKER: Final = WorkerId(1)
MATE: Final = WorkerId(2)
"""Another worker of the same tenant."""
STRANGER: Final = WorkerId(3)
"""A worker of another tenant."""
TENANT: Final = 7
OTHER_TENANT: Final = 8
EPOCH: Final = Epoch(1)
TOKENS_PER_BLOCK: Final = 4
LEASE_SECONDS: Final = 30.0
WAIT_MS: Final = 5_000
SHAPE: Final = CacheShape(
    num_blocks=8,
    num_slots=8,
    groups=(keeps_everything(TOKENS_PER_BLOCK, 8),),
    hash_tokens=TOKENS_PER_BLOCK,
    hit_tokens=TOKENS_PER_BLOCK,
    max_leases=8,
    max_waiting=8,
    max_pins=2,
    lease_seconds=LEASE_SECONDS,
    retry_after_ms=50,
    layout_digest=99,
)

_Kind = TypeVar("_Kind", bound=Reply | KVLeaseError)


def a_cache(num_blocks: int = 8, num_slots: int = 8, **numbers: Any) -> Cache:
    """Return a cache with two workers of one tenant and one of another, of one group unless `groups` are given."""
    table_blocks = numbers.pop("table_blocks", num_blocks)
    numbers.setdefault("groups", (keeps_everything(TOKENS_PER_BLOCK, table_blocks),))
    shape = replace(SHAPE, num_blocks=num_blocks, num_slots=num_slots, **numbers)
    cache = Cache(shape, CacheRecords.plain(shape), EPOCH)
    for worker_id, tenant in ((WORKER, TENANT), (MATE, TENANT), (STRANGER, OTHER_TENANT)):
        cache.handle(c.Attach(worker_id=worker_id, tenant_digest=tenant), 0.0)
    return cache


def a_full_cache(num_cached: int, num_slots: int = 8) -> Cache:
    """Return a cache with all blocks cached and evictable; the block of key 0 is the hottest."""
    cache = a_cache(num_cached, num_slots)
    cached(cache, keys(*range(num_cached)))
    return cache


def keys(*numbers: int) -> bytes:
    """Return packed keys, each made of one number."""
    return b"".join(number.to_bytes(32, "little") for number in numbers)


def leaving(
    digests: Digests, *, owner: int = TENANT, since: int = 0, idle_at: float = 0.0
) -> Leaving:
    """Return findable blocks of one owner, as they leave a tier together."""
    count = len(digests)
    owners = np.full(count, owner, np.uint64)
    return Leaving(digests, owners, np.full(count, since, np.int64), np.full(count, idle_at))


def ids(packed: bytes) -> list[int]:
    """Return packed int32 ids as a list."""
    return [int(one) for one in np.frombuffer(packed, np.int32)]


def leases_of(cache: Cache, worker_id: WorkerId = WORKER) -> list[int]:
    """Return the ids of the leases that a worker has."""
    return [int(one) for one in np.frombuffer(cache.lease_ids_of(worker_id), np.int64)]


def records(cache: Cache) -> CacheRecords:
    """Return the columns of a cache, for laws about what they say."""
    return cache._state.records


def states(cache: Cache, blocks: bytes) -> set[State]:
    """Return the states of packed device block ids."""
    return {State(state) for state in records(cache).device.state[ids(blocks)]}


# Answers --------------------------------------------------------------------------------------------------------------


def answer(outcome: Outcome, kind: type[_Kind]) -> _Kind:
    """Return the reply of an outcome, which must be of the given kind."""
    assert isinstance(outcome.reply, kind)
    return outcome.reply


def woken(outcome: Outcome, ticket: int | None, kind: type[_Kind]) -> _Kind:
    """Return an outcome's answer to the caller with the ticket, of the given kind; a refusal must hold no frame."""
    (result,) = [
        effect.result
        for effect in outcome.effects
        if isinstance(effect, Wake) and effect.ticket == ticket
    ]
    assert isinstance(result, kind)
    if isinstance(result, KVLeaseError):
        assert_holds_no_frame(result)
    return result


def assert_holds_no_frame(error: KVLeaseError) -> None:
    """Assert that an error which is kept as an answer keeps no frame of the calls that raised it."""
    assert error.__traceback__ is None
    assert error.__context__ is None


def wakes(outcome: Outcome) -> list[int]:
    """Return the tickets of all callers that an outcome answers, in order."""
    return [effect.ticket for effect in outcome.effects if isinstance(effect, Wake)]


def copies(outcome: Outcome) -> list[Copy]:
    """Return the copies that an outcome starts."""
    return [effect for effect in outcome.effects if isinstance(effect, Copy)]


def the_copy(outcome: Outcome) -> Copy:
    """Return the only copy that an outcome starts."""
    (copy,) = copies(outcome)
    return copy


def started(cache: Cache) -> Copy:
    """Return the only copy that a refused call starts in order to make room for the next try."""
    (copy,) = [effect for effect in cache.take_effects() if isinstance(effect, Copy)]
    return copy


# Acts -----------------------------------------------------------------------------------------------------------------


def a_reserve(
    num_blocks: int = 1,
    request_id: str = "request",
    prefix: bytes = b"",
    *,
    worker_id: WorkerId = WORKER,
    wait_ms: int = 0,
) -> c.Reserve:
    """Return the command that reserves some blocks."""
    return c.Reserve(
        worker_id=worker_id,
        request_id=request_id,
        keys=prefix,
        num_tokens=num_blocks * TOKENS_PER_BLOCK,
        wait_ms=wait_ms,
    )


def reserve(
    cache: Cache,
    num_blocks: int = 1,
    request_id: str = "request",
    prefix: bytes = b"",
    *,
    worker_id: WorkerId = WORKER,
    now: float = 0.0,
) -> Reserved:
    """Reserve blocks, for which there must be room."""
    command = a_reserve(num_blocks, request_id, prefix, worker_id=worker_id)
    return answer(cache.handle(command, now), Reserved)


def an_extend(
    lease_id: LeaseId, num_blocks: int, *, worker_id: WorkerId = WORKER, wait_ms: int = 0
) -> c.Extend:
    """Return the command that makes a lease cover some blocks in all."""
    num_tokens = num_blocks * TOKENS_PER_BLOCK
    return c.Extend(worker_id=worker_id, lease_id=lease_id, num_tokens=num_tokens, wait_ms=wait_ms)


def extend(cache: Cache, lease_id: LeaseId, num_blocks: int, now: float = 0.0) -> Extended:
    """Extend a lease by some blocks, for which there must be room."""
    return answer(cache.handle(an_extend(lease_id, num_blocks), now), Extended)


def commit(
    cache: Cache,
    lease_id: LeaseId,
    packed: bytes,
    first_block: int = 0,
    *,
    worker_id: WorkerId = WORKER,
    now: float = 0.0,
) -> Committed:
    """Commit a lease's blocks, starting at the given block."""
    last = first_block + len(packed) // 32
    command = c.Commit(
        worker_id=worker_id,
        lease_id=lease_id,
        num_tokens=last * TOKENS_PER_BLOCK,
        first_block=first_block,
        keys=packed,
    )
    return answer(cache.handle(command, now), Committed)


def release(cache: Cache, lease_id: LeaseId, *, worker_id: WorkerId = WORKER) -> Outcome:
    """Release a lease."""
    return cache.handle(c.Release(worker_id=worker_id, lease_id=lease_id), 0.0)


def committed(
    cache: Cache,
    packed: bytes,
    request_id: str = "committed",
    *,
    more: int = 0,
    worker_id: WorkerId = WORKER,
) -> Reserved:
    """Return a lease with blocks that are committed under the keys, and `more` private ones."""
    lease = reserve(cache, len(packed) // 32 + more, request_id, worker_id=worker_id)
    commit(cache, lease.lease_id, packed, worker_id=worker_id)
    return lease


def cached(cache: Cache, packed: bytes, *, worker_id: WorkerId = WORKER) -> list[int]:
    """Cache the blocks of keys on the device, held by nobody, and return them."""
    lease = committed(cache, packed, "cached", worker_id=worker_id)
    release(cache, lease.lease_id, worker_id=worker_id)
    return ids(lease.block_ids)


def evict(
    cache: Cache, lease_id: LeaseId, *, worker_id: WorkerId = WORKER, now: float = 0.0
) -> Outcome:
    """Ask for a lease to be moved to the host pool."""
    return cache.handle(c.Evict(worker_id=worker_id, lease_id=lease_id), now)


def evicted(
    cache: Cache, packed: bytes, *, more: int = 0, worker_id: WorkerId = WORKER
) -> Reserved:
    """Return a lease in the host pool with committed blocks and `more` private ones."""
    lease = committed(cache, packed, "evicted", more=more, worker_id=worker_id)
    outcome = evict(cache, lease.lease_id, worker_id=worker_id)
    if outcome.ticket is None:
        answer(outcome, Evicted)
    else:
        woken(land(cache, the_copy(outcome)), outcome.ticket, Evicted)
    return lease


def a_reload(
    lease_id: LeaseId, *, worker_id: WorkerId = WORKER, wait_ms: int = WAIT_MS
) -> c.Reload:
    """Return the command that brings a lease back."""
    return c.Reload(worker_id=worker_id, lease_id=lease_id, wait_ms=wait_ms)


def reload(cache: Cache, lease_id: LeaseId, *, worker_id: WorkerId = WORKER) -> Outcome:
    """Ask for a lease to be brought back."""
    return cache.handle(a_reload(lease_id, worker_id=worker_id), 0.0)


def on_host(cache: Cache, packed: bytes, *, worker_id: WorkerId = WORKER) -> None:
    """Cache the blocks of keys in the host pool and not on the device."""
    cached(cache, packed, worker_id=worker_id)
    land(cache, the_copy(cache.handle(c.Evict(keys=packed), 0.0)))


def reload_keys(cache: Cache, packed: bytes) -> Outcome:
    """Ask for the blocks of keys to be brought back."""
    return cache.handle(c.Reload(worker_id=WORKER, keys=packed), 0.0)


def land(cache: Cache, copy: Copy, *, failed: tuple[int, ...] = (), now: float = 0.0) -> Outcome:
    """Let a copy end; all of its bytes are right, except at the failed positions."""
    return cache.handle(c.CopyDone(copy_id=copy.copy_id, failed=failed), now)


def fail(cache: Cache, copy: Copy) -> Outcome:
    """Let the mover report that a copy failed."""
    return cache.handle(c.CopyFailed(copy_id=copy.copy_id), 0.0)


def lose(cache: Cache, copy: Copy) -> Outcome:
    """Let the mover miss the deadline of a copy."""
    return cache.handle(c.CopyLost(copy_id=copy.copy_id), 0.0)


def tick(cache: Cache, now: float) -> Outcome:
    """Let time pass."""
    return cache.handle(c.Tick(), now)


def found(cache: Cache, packed: bytes, tenant: int | None = TENANT) -> tuple[int, int]:
    """Return how many blocks of a prefix are cached on the device and in the host pool."""
    reply = answer(cache.handle(c.Lookup(keys=packed, tenant_digest=tenant), 0.0), Found)
    return reply.num_device_blocks, reply.num_host_blocks


def reloaded(outcome: Outcome, ticket: int | None) -> Reloaded:
    """Return the answer to a reload that must wait."""
    return woken(outcome, ticket, Reloaded)


def wait_for(
    cache: Cache, num_blocks: int, request_id: str, *, worker_id: WorkerId = WORKER
) -> int:
    """Make a reserve wait, and return its ticket."""
    command = a_reserve(num_blocks, request_id, worker_id=worker_id, wait_ms=WAIT_MS)
    ticket = cache.handle(command, 0.0).ticket
    assert ticket is not None
    return ticket


def as_ids(blocks: Collection[int]) -> Ids:
    """Return block ids as an array."""
    return np.fromiter(blocks, np.intp, len(blocks))
