"""Laws of what a cache can ever grant: requests up to a number of tokens, in all blocks but the null blocks."""

from dataclasses import replace

import numpy as np
import pytest

from kvlease.errors import NeverFitsError, PoolFullError
from kvlease.groups import Keeps, keeps_everything
from kvlease.ids import Epoch, LeaseId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Extended, Reserved, Stepped
from kvleased.core.verbs.stepping import StepVerb
from tests.unit.service.core.builders import (
    EPOCH,
    TENANT,
    TOKENS_PER_BLOCK,
    WORKER,
    a_cache,
    answer,
    cached,
    found,
    ids,
    keys,
    records,
    release,
    reserve,
)


def ask(cache: Cache, num_tokens: int) -> Reserved:
    """Reserve blocks for a number of tokens."""
    command = c.Reserve(worker_id=WORKER, request_id="r", keys=b"", num_tokens=num_tokens)
    return answer(cache.handle(command, 0.0), Reserved)


def grow(cache: Cache, lease_id: LeaseId, num_tokens: int) -> Extended:
    """Extend a lease to a number of tokens."""
    command = c.Extend(worker_id=WORKER, lease_id=lease_id, num_tokens=num_tokens)
    return answer(cache.handle(command, 0.0), Extended)


# The longest request --------------------------------------------------------------------------------------------------


def test_longest_request_is_granted_to_the_token() -> None:
    """A request of exactly the longest admissible tokens is granted, and one more token never fits."""
    cache = a_cache(8, table_blocks=2, longest_request_tokens=7)

    assert len(ids(ask(cache, 7).block_ids)) == 2
    with pytest.raises(NeverFitsError) as refusal:
        ask(cache, 8)

    assert refusal.value.resource == "longest_request_tokens"
    assert (refusal.value.need, refusal.value.available, refusal.value.limit) == (8, 7, 7)


def test_extend_stops_at_the_longest_request() -> None:
    """A lease grows to exactly the longest admissible tokens."""
    cache = a_cache(8, table_blocks=2, longest_request_tokens=7)
    lease = ask(cache, 1)

    assert len(ids(grow(cache, lease.lease_id, 7).block_ids)) == 1
    with pytest.raises(NeverFitsError):
        grow(cache, lease.lease_id, 8)


def test_step_stops_at_the_longest_request() -> None:
    """An extend beyond the longest request is refused alone in its step, even if it would need no further block."""
    cache = a_cache(8, table_blocks=2, longest_request_tokens=7)
    lease = ask(cache, 7)
    command = c.Step(
        worker_id=WORKER,
        verbs=bytes([StepVerb.EXTEND]),
        lease_ids=np.array([lease.lease_id], np.int64).tobytes(),
        num_tokens=np.array([8], np.int32).tobytes(),
        num_keys=b"",
        first_blocks=b"",
        keys=b"",
    )

    stepped = answer(cache.handle(command, 0.0), Stepped)

    assert np.frombuffer(stepped.codes, np.int32).tolist() == [NeverFitsError.number]


@pytest.mark.parametrize(
    ("num_tokens", "resource", "need", "limit"),
    [(9, "longest_request_tokens", 9, 7), (33, "device_blocks", 9, 8)],
)
def test_refusal_names_what_would_have_to_be_larger(
    num_tokens: int, resource: str, need: int, limit: int
) -> None:
    """The pool is named only if it is too small; else its table is, and in both cases the tokens that would fit."""
    cache = a_cache(8, table_blocks=2, longest_request_tokens=7)

    with pytest.raises(NeverFitsError, match="at most 7 tokens") as refusal:
        ask(cache, num_tokens)

    assert (refusal.value.resource, refusal.value.need, refusal.value.limit) == (
        resource, need, limit,
    )  # fmt: skip


def test_refusal_counts_the_blocks_that_no_table_has() -> None:
    """In a cache of several groups, too, a request that needs more blocks than the pool has is told to have more."""
    full = keeps_everything(TOKENS_PER_BLOCK, 5)
    window = replace(full, keeps=Keeps.WINDOW, kept_tokens=TOKENS_PER_BLOCK, max_blocks=3)
    cache = a_cache(8, groups=(full, window))
    longest = cache.longest_request_tokens
    assert longest == 5 * TOKENS_PER_BLOCK

    with pytest.raises(NeverFitsError, match="register a larger pool") as refusal:
        ask(cache, longest + 1)

    assert (refusal.value.resource, refusal.value.need, refusal.value.limit) == (
        "device_blocks", 9, 8,
    )  # fmt: skip


# Null blocks ----------------------------------------------------------------------------------------------------------


def test_null_blocks_are_never_granted() -> None:
    """A full cache has granted every block except the null blocks at the start, and no lease has those."""
    cache = a_cache(8, null_blocks=2, table_blocks=6)

    lease = reserve(cache, 6)

    assert sorted(ids(lease.block_ids)) == [2, 3, 4, 5, 6, 7]
    with pytest.raises(PoolFullError) as refusal:
        reserve(cache, 1, "other")
    assert refusal.value.limit == 6
    assert cache.check() == []


def test_null_blocks_are_not_counted() -> None:
    """The states add up to the blocks that can be granted."""
    cache = a_cache(8, null_blocks=2, table_blocks=6)

    assert sum(cache._state.device.counts().values()) == 6
    assert cache.census().device["free"] == 6


def test_null_blocks_survive_a_restart() -> None:
    """After a restart the cache grants the same blocks, and finds what was committed."""
    cache = a_cache(8, null_blocks=2, table_blocks=6)
    cached(cache, keys(1, 2))

    cache = Cache.recovered(cache.shape, records(cache), Epoch(EPOCH + 1), {WORKER: TENANT}, 1.0)

    assert found(cache, keys(1, 2)) == (2, 0)
    assert cache.check() == []
    lease = reserve(cache, 6)
    assert min(ids(lease.block_ids)) == 2
    release(cache, lease.lease_id)
    assert cache.census().device["free"] == 6


def test_null_block_in_use_is_a_violation() -> None:
    """The check notices a null block that is in any state but free."""
    cache = a_cache(8, null_blocks=2, table_blocks=6)

    records(cache).device.state[1] = State.RESERVED

    assert "device: a null block is in use" in cache.check()
