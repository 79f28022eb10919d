"""Law of the simulated pool: it finds what a cache of its policy and size finds, request by request."""

import numpy as np
import pytest
from blake3 import blake3

from kvleased.core.eviction import POLICIES
from kvleased.traces.shadow import ShadowPool
from tests.unit.service.core.builders import (
    TOKENS_PER_BLOCK,
    a_cache,
    commit,
    release,
    reserve,
)
from tests.unit.service.traces.made import random_requests

NUM_BLOCKS = 24
REQUESTS = random_requests(11, num_requests=600, num_keys=120, longest=12)


@pytest.mark.parametrize("null_blocks", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_simulated_pool_finds_what_a_cache_finds(policy: str, null_blocks: int) -> None:
    """Requests that do not overlap find the same in a cache, whose null blocks hold nothing, as in the simulation."""
    cache = a_cache(
        NUM_BLOCKS + null_blocks, num_slots=0, null_blocks=null_blocks, eviction_policy=policy
    )
    pool = ShadowPool(policy, NUM_BLOCKS)
    found: list[int] = []
    expected: list[int] = []

    for request in REQUESTS:
        keys = [blake3(key.to_bytes(8, "little")).digest() for key in request]
        packed = b"".join(keys)
        lease = reserve(cache, len(keys), prefix=packed)
        commit(cache, lease.lease_id, packed)
        release(cache, lease.lease_id)
        found.append(lease.device_hit_tokens // TOKENS_PER_BLOCK)
        expected.append(pool.ask(np.frombuffer(packed, "<u8")[::4]))

    assert found == expected
    assert sum(found)
