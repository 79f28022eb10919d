"""Laws of reuse: which cached blocks a request shares, and with whom."""

import pytest

from kvlease.errors import InvalidError
from kvleased.core import commands as c
from kvleased.core.effects import Reserved
from tests.unit.service.core.builders import (
    STRANGER,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    a_cache,
    a_full_cache,
    a_reserve,
    answer,
    cached,
    committed,
    copies,
    found,
    ids,
    keys,
    land,
    on_host,
    reserve,
    the_copy,
)

LONG = 200
"""The number of blocks of a request whose prefix is not looked up as a whole."""


def test_cached_prefix_is_shared() -> None:
    """Two leases of one tenant share the blocks of a common prefix, and have private ones besides."""
    cache = a_cache()
    first = committed(cache, keys(1, 2), more=1)

    second = reserve(cache, 3, "second", keys(1, 2, 3))

    assert second.device_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert ids(second.block_ids)[:2] == ids(first.block_ids)[:2]
    assert ids(second.block_ids)[2] != ids(first.block_ids)[2]
    assert cache.check() == []


def test_prefix_ends_at_the_first_miss() -> None:
    """Cached blocks behind a gap cannot be used."""
    cache = a_cache()
    cached(cache, keys(1))
    cached(cache, keys(3))

    assert reserve(cache, 3, "r", keys(1, 2, 3)).device_hit_tokens == TOKENS_PER_BLOCK


@pytest.mark.parametrize("num_cached", [0, 1, 77, LONG])
@pytest.mark.parametrize("wait_ms", [0, WAIT_MS])
def test_prefix_of_a_long_chain_ends_at_the_first_miss(num_cached: int, wait_ms: int) -> None:
    """All keys that are cached from the first one on are found, however many a request names."""
    cache = a_cache(2 * LONG)
    on_host(cache, keys(999))
    chain = keys(*range(LONG))
    if num_cached:
        cached(cache, chain[: num_cached * 32])

    lease = answer(cache.handle(a_reserve(LONG, "r", chain, wait_ms=wait_ms), 0), Reserved)

    assert lease.device_hit_tokens == num_cached * TOKENS_PER_BLOCK
    assert cache.check() == []


def test_whole_request_can_be_cached() -> None:
    """A request whose blocks are all cached takes no free block."""
    cache = a_full_cache(4)

    lease = reserve(cache, 4, "r", keys(0, 1, 2, 3))

    assert lease.device_hit_tokens == 4 * TOKENS_PER_BLOCK
    assert cache.check() == []


def test_own_prefix_is_not_evicted_to_make_room() -> None:
    """A call neither counts nor evicts the blocks of its own prefix as room."""
    cache = a_full_cache(4)

    lease = reserve(cache, 4, "r", keys(0, 1))

    assert lease.device_hit_tokens == 2 * TOKENS_PER_BLOCK
    assert found(cache, keys(0, 1, 2, 3)) == (2, 0)
    assert cache.check() == []


@pytest.mark.parametrize("wait_ms", [0, WAIT_MS], ids=["at once", "patient"])
def test_another_tenants_block_is_a_miss(wait_ms: int) -> None:
    """A key, even a stolen one, finds only its own tenant's blocks, in either tier."""
    cache = a_cache()
    cached(cache, keys(1))
    on_host(cache, keys(2))

    for number in (1, 2):
        command = a_reserve(1, f"r{number}", keys(number), worker_id=STRANGER, wait_ms=wait_ms)
        outcome = cache.handle(command, 0.0)
        assert outcome.reply is None or answer(outcome, Reserved).device_hit_tokens == 0
        assert not any(copy.source_ids for copy in copies(outcome))


def test_prefix_ends_at_another_tenants_block() -> None:
    """The blocks before another tenant's block still count as hits."""
    cache = a_cache()
    cached(cache, keys(1))
    cached(cache, keys(2), worker_id=STRANGER)

    assert reserve(cache, 2, "r", keys(1, 2)).device_hit_tokens == TOKENS_PER_BLOCK


@pytest.mark.parametrize("hole", [0, 1, 19, 20, 30, 38, 39])
def test_prefix_ends_at_the_first_hole(hole: int) -> None:
    """If a block in the middle of a long chain is gone, the cached ones after it do not count."""
    cache = a_cache(41, num_slots=0)
    chain = keys(*range(40))
    cached(cache, chain)

    cache.handle(c.Evict(keys=keys(hole)), 0.0)

    assert found(cache, chain) == (hole, 0)
    assert reserve(cache, 41, "r", chain).device_hit_tokens == hole * TOKENS_PER_BLOCK
    assert cache.check() == []


@pytest.mark.parametrize("moved", [(0,), (3, 4), tuple(range(20)), tuple(range(1, 40))])
def test_prefix_goes_on_in_the_host_pool(moved: tuple[int, ...]) -> None:
    """A long chain is found whole, whichever of its blocks are in the host pool."""
    cache = a_cache(41, num_slots=40)
    chain = keys(*range(40))
    cached(cache, chain)

    land(cache, the_copy(cache.handle(c.Evict(keys=keys(*moved)), 0.0)))

    assert found(cache, chain) == (40 - len(moved), len(moved))
    assert reserve(cache, 41, "r", chain).device_hit_tokens == moved[0] * TOKENS_PER_BLOCK
    assert cache.check() == []


def test_long_chain_that_names_a_block_twice_is_refused() -> None:
    """A repeated key is noticed even among many."""
    cache = a_cache(41)
    cached(cache, keys(*range(40)))

    with pytest.raises(InvalidError, match="twice"):
        reserve(cache, 41, "r", keys(*range(39), 7))
