"""Laws of work behind an answer: a large move takes several turns of the loop, also while time passes."""

import asyncio
from types import SimpleNamespace
from typing import cast

from kvleased.answering.settling import Settling
from kvleased.caches.entries import CacheEntry
from tests.unit.service.core.builders import a_cache, evict, reserve

FOREVER = float("inf")


def unsettled() -> CacheEntry:
    """Return a cache that has begun to evict a large lease and has parts of the move before it."""
    cache = a_cache(8, 8, blocks_at_once=2)
    evict(cache, reserve(cache, 4).lease_id)
    assert not cache.is_settled
    return cast("CacheEntry", SimpleNamespace(core=cache, pool=1, name="main"))


async def test_what_would_settle_all_at_once_comes_behind_the_last_part() -> None:
    """Work that can wait runs after the last part of a large move, and the loop serves others in between."""
    entry = unsettled()
    settling = Settling(lambda *_: None)
    heard: list[str] = []
    done = asyncio.Event()

    def act(about: CacheEntry) -> None:
        heard.append("act" if about.core.is_settled else "too early")
        done.set()

    settling.once_settled(entry, act, FOREVER)
    asyncio.get_running_loop().call_soon(heard.append, "another")
    async with asyncio.timeout(5):
        await done.wait()

    assert heard == ["another", "act"]


async def test_what_can_wait_no_longer_settles_all_at_once() -> None:
    """At its deadline the waiting work runs, whatever is left of the move."""
    entry = unsettled()
    heard: list[bool] = []

    Settling(lambda *_: None).once_settled(
        entry, lambda about: heard.append(about.core.is_settled), until=0.0
    )

    assert heard == [False]
