"""Build caches of several groups, and a worker that runs requests in them, for the laws of groups."""

from dataclasses import replace
from math import lcm
from typing import Any, Final

import numpy as np

from kvlease.groups import GroupShape, Keeps
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.marks import key_words, marks
from kvleased.core.blocks.records import NULL
from kvleased.core.effects import Committed, Extended, Found, Mapped, Reserved
from tests.unit.service.core.builders import TENANT, WORKER, a_cache, answer, keys, records, release

HASH_TOKENS: Final = 4
TABLE: Final = 16
FULL: Final = GroupShape(
    keeps=Keeps.EVERYTHING,
    tokens_per_block=4,
    keys_per_block=1,
    table_blocks=TABLE,
    max_blocks=TABLE,
)
WIDE: Final = replace(FULL, tokens_per_block=8, keys_per_block=2)
DRAFTED: Final = replace(FULL, is_drafted=True)
WINDOW: Final = replace(FULL, keeps=Keeps.WINDOW, kept_tokens=7, max_blocks=4)
"""A window that needs 7 tokens before the next one: at most 3 blocks, and one more to write to."""
CHUNK: Final = replace(FULL, keeps=Keeps.CHUNK, kept_tokens=8, max_blocks=3)
STATE: Final = replace(FULL, keeps=Keeps.STATE, max_blocks=2)
GUESSING: Final = replace(FULL, keeps=Keeps.STATE, max_blocks=4, extra_blocks=2)
"""A group that also keeps states for two speculative tokens."""
FIXED: Final = replace(FULL, keeps=Keeps.FIXED, keys_per_block=0, table_blocks=2, max_blocks=2)


def cache_of(*groups: GroupShape, num_blocks: int = 65, **numbers: Any) -> Cache:
    """Return a cache with the given groups, whose block 0 is never granted."""
    shared = [group.tokens_per_block for group in groups if group.keys_per_block]
    numbers = {
        "num_slots": 64,
        "null_blocks": 1,
        "hash_tokens": HASH_TOKENS,
        "hit_tokens": lcm(*shared),
        "shares_prefixes": bool(shared),
    } | numbers
    return a_cache(num_blocks, groups=groups, **numbers)


def chain(num_tokens: int, branch: int = 0) -> bytes:
    """Return the keys of the first tokens of a document."""
    return keys(*(1 + at + 1000 * branch for at in range(num_tokens // HASH_TOKENS)))


def crossed(number: int) -> bytes:
    """Return two keys that no hash makes: each names for one of two groups what the other names for the other group."""
    key = keys(number)
    return key + (key_words(key) ^ marks(2)[1]).tobytes()


def reserve_tokens(
    cache: Cache,
    num_tokens: int,
    request_id: str = "request",
    prefix: bytes = b"",
    *,
    worker_id: WorkerId = WORKER,
) -> Reserved:
    """Reserve blocks for tokens; there must be room."""
    command = c.Reserve(
        worker_id=worker_id, request_id=request_id, keys=prefix, num_tokens=num_tokens
    )
    return answer(cache.handle(command, 0.0), Reserved)


def extend_tokens(cache: Cache, lease_id: LeaseId, num_tokens: int) -> Extended:
    """Extend a lease to cover tokens; there must be enough blocks."""
    command = c.Extend(worker_id=WORKER, lease_id=lease_id, num_tokens=num_tokens)
    return answer(cache.handle(command, 0.0), Extended)


def commit_tokens(
    cache: Cache,
    lease_id: LeaseId,
    num_tokens: int,
    packed: bytes | None = None,
    *,
    worker_id: WorkerId = WORKER,
) -> Committed:
    """Commit the first tokens of a document, with all of its keys or with the given ones."""
    command = c.Commit(
        worker_id=worker_id,
        lease_id=lease_id,
        num_tokens=num_tokens,
        first_block=0,
        keys=chain(num_tokens) if packed is None else packed,
    )
    return answer(cache.handle(command, 0.0), Committed)


def cached_tokens(cache: Cache, num_tokens: int, step_tokens: int = 4) -> None:
    """Cache the first tokens of a document, through a request that computes them step by step."""
    lease_id = reserve_tokens(cache, step_tokens, "cached").lease_id
    for end in range(step_tokens, num_tokens + 1, step_tokens):
        extend_tokens(cache, lease_id, end)
        commit_tokens(cache, lease_id, end)
    release(cache, lease_id)


def hit_tokens(cache: Cache, num_tokens: int, tenant: int | None = TENANT) -> int:
    """Return how many of the first tokens of a document are found."""
    return looked_up(cache, chain(num_tokens), tenant).hit_tokens


def looked_up(cache: Cache, packed: bytes, tenant: int | None = TENANT) -> Found:
    """Return the result of looking up a prefix."""
    return answer(cache.handle(c.Lookup(keys=packed, tenant_digest=tenant), 0.0), Found)


def places(cache: Cache, row: int) -> list[list[int]]:
    """Return the entries of a row group by group, NULL where no block is needed."""
    parts = cache._state.leases.parts_of(row)
    return [part.tolist() for part in parts]


def filled(cache: Cache, row: int) -> list[list[int]]:
    """Return the places of a row that have a block, group by group."""
    return [[at for at, entry in enumerate(part) if entry != NULL] for part in places(cache, row)]


def kernel_parts(cache: Cache, row: int) -> list[list[int]]:
    """Return what kernels read of a row, group by group."""
    kernel, start = records(cache).kernel_rows, 0
    parts = []
    for at, group in enumerate(cache.shape.groups):
        end = start + int(kernel.num_published[row, at])
        parts.append(kernel.kernel_ids[row, start:end].tolist())
        start += group.table_blocks * group.kernel_blocks_per_block
    return parts


def counts(packed: bytes) -> list[int]:
    """Return packed counts as a list."""
    return [int(one) for one in np.frombuffer(packed, np.int32)]


def map_lease(cache: Cache, lease_id: LeaseId) -> Mapped:
    """Publish a lease's row."""
    return answer(cache.handle(c.Map(worker_id=WORKER, lease_id=lease_id), 0.0), Mapped)
