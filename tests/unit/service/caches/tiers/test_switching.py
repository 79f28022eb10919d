"""Laws of which tiers are on: a mover's word, and its end, reach the cores that they concern."""

import asyncio
import os
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from kvlease.ids import CopyId
from kvleased.caches.entries import POPULATING, READY
from kvleased.caches.tier_infos import is_up, restrictions
from kvleased.core import commands as c
from kvleased.core.effects import (
    MOVER_OF,
    Copy,
    Direction,
    Mover,
    Tier,
)
from kvleased.movers import protocol
from kvleased.movers.mover_limits import REMOTE_SECONDS_MIN
from kvleased.movers.plans import pool_map
from kvleased.movers.protocol import Batch, Completion, Status

from .conftest import Node, cache_of, packets


@pytest.mark.parametrize("direction", list(Direction))
async def test_copy_goes_to_the_mover_of_its_direction(
    node: Node, ends: dict[str, socket.socket], direction: Direction
) -> None:
    """Each direction has one mover, and its answer comes to the core that asked."""
    ids = np.arange(2, dtype=np.int32).tobytes()
    copy = Copy(
        copy_id=CopyId(5),
        direction=direction,
        source_ids=ids,
        target_ids=ids,
        checksums=b"",
        labels=b"",
    )
    roles = {Mover.MEMORY: "mover", Mover.DISK: "disk-mover", Mover.REMOTE: "remote-mover"}

    node.tiers.send(node.registry.cache("deep"), copy)

    received = {role: packets(end) for role, end in ends.items()}
    ((role, (packet,)),) = [(role, found) for role, found in received.items() if found]
    assert role == roles[MOVER_OF[direction]]
    done = Completion(number=Batch.decode(packet).number, is_done=True)
    ends[role].send(done.encode())
    assert await node.until() == [("deep", c.CopyDone(copy_id=CopyId(5)))]


async def test_pools_are_mapped_where_they_are_needed(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A store's mover learns of the caches that use it, under a name that no caller chose."""
    fd = os.memfd_create("test")
    for entry in node.registry:
        message = pool_map(entry.pool, entry.plan, store_id="ab")
        node.tiers.map(entry, message, [fd])

    maps = {
        role: [packet for packet in packets(end) if packet[:1] == protocol.MAP]
        for role, end in ends.items()
    }

    assert {role: len(found) for role, found in maps.items()} == {
        "mover": 2,
        "disk-mover": 1,
        "remote-mover": 1,
    }
    deep = node.registry.cache("deep").plan
    mapped = protocol.PoolMap.decode(maps["disk-mover"][0])
    assert (mapped.layout_fingerprint, mapped.store_id) == (deep.layout_fingerprint, "ab")
    assert mapped.num_disk_slots == deep.num_disk_slots > 0
    node.tiers.unmap(node.registry.cache("deep"))
    assert [len(packets(end)) for end in ends.values()] == [1, 1, 1]
    os.close(fd)


async def test_store_is_off_until_its_mover_says_otherwise(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A new cache's stores are off; each word of a mover reaches the caches that use its store, once."""
    deep, shallow = node.registry.cache("deep"), node.registry.cache("shallow")
    for entry in (deep, shallow):
        node.tiers.introduce(entry)
    off = [
        c.TierChanged(tier=tier, is_on=False, is_mover_away=True)
        for tier in (Tier.DISK, Tier.REMOTE)
    ]
    assert node.take() == [("deep", command) for command in off]

    for _ in range(2):
        ends["disk-mover"].send(Status(is_on=True).encode())
    on = c.TierChanged(tier=Tier.DISK, is_on=True, is_read=False)
    assert await node.until() == [("deep", on)]
    reason = "redis://:pw@host is full"
    ends["disk-mover"].send(Status(is_on=False, reason=reason, pool=deep.pool).encode())
    assert await node.until() == [("deep", c.TierChanged(tier=Tier.DISK, is_on=False))]

    shown = {tier.tier: (tier.status, tier.reason) for tier in deep.tiers()}
    assert shown == {
        "host": ("ready", ""),
        "disk": ("off", "redis://***@host is full"),
        "remote": ("off", "its mover is being started"),
    }
    assert [tier.tier for tier in shallow.tiers()] == ["host"]


async def test_latest_word_counts_for_a_cache_that_comes_later(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A mover's word on all caches holds for a later cache, unless there is one on that cache itself."""
    node.tiers.introduce(node.registry.cache("deep"))
    node.take()
    ends["remote-mover"].send(Status(is_on=True).encode())
    await node.until()

    late = cache_of(node.registry, "late", disk_bytes=1 << 20, remote_bytes=1 << 20)
    node.tiers.introduce(late)

    assert node.take() == [
        ("late", c.TierChanged(tier=Tier.DISK, is_on=False, is_mover_away=True)),
        ("late", c.TierChanged(tier=Tier.REMOTE, is_on=True)),
    ]


async def test_store_is_off_while_its_mover_is_replaced(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """When a mover goes, its tier is off until the next mover speaks; its copies fail when it is proven dead."""
    node.tiers.introduce(node.registry.cache("deep"))
    ends["disk-mover"].send(Status(is_on=True).encode())
    await node.until(3)

    ends["disk-mover"].close()

    away = c.TierChanged(tier=Tier.DISK, is_on=False, is_mover_away=True)
    assert await node.until() == [("deep", away)]
    assert node.tiers.away == "disk-mover"
    node.tiers.mover_died("disk-mover", 1)
    assert node.tiers.mover_ends["disk"] == 1
    died = c.MoverDied(mover=Mover.DISK)
    assert node.take() == [("deep", died), ("shallow", died)]


async def test_silent_store_is_replaced_and_nothing_else(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """Each mover has its own deadline; the remote mover's is a few times a call's limit."""
    ids = np.arange(2, dtype=np.int32).tobytes()
    for direction in (Direction.OFFLOAD, Direction.SHARE):
        copy = Copy(
            copy_id=CopyId(1),
            direction=direction,
            source_ids=ids,
            target_ids=ids,
            checksums=b"",
        )
        node.tiers.send(node.registry.cache("deep"), copy)
    now = asyncio.get_running_loop().time()

    assert node.tiers.figures(now)["remote"].num_sent == 1
    node.tiers.tick(now + REMOTE_SECONDS_MIN + 1)

    assert node.recycled == [("remote-mover", 1)]
    assert ("deep", c.CopyLost(copy_id=CopyId(1))) in node.take()
    assert node.tiers.away == "remote-mover"
    assert len(ends) == 3


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
async def test_tier_all_of_whose_slots_are_retired_is_degraded(node: Node, tier: Tier) -> None:
    """If all slots are retired, the store answers but keeps nothing: status, metric and readiness say so, and why."""
    deep = node.registry.cache("deep")
    deep.stores[Tier.DISK] = Status(is_on=True)
    deep.is_scanned = True
    assert not any(restrictions(node.registry).values())

    deep.core = SimpleNamespace(num_retired=lambda one: 64 if one is tier else 0)  # type: ignore[assignment]

    (found,) = [one for one in deep.tiers() if one.status == "degraded"]
    assert found.tier == tier.value
    assert found.reason.startswith("64 slots are retired")
    assert not is_up(found)
    assert restrictions(node.registry)["all slots retired"] == f"{tier.value} of deep"


async def test_remote_store_is_off_until_all_memory_of_a_cache_is_there(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """Until all memory of a cache is there, the remote mover has no pools of it, so its remote store is off."""
    entry = cache_of(node.registry, "late", remote_bytes=1 << 20)
    entry.status = POPULATING
    node.tiers.introduce(entry)
    ends["remote-mover"].send(Status(is_on=True).encode())
    meanwhile = [*node.take(), *await node.until()]
    (reason,) = [one.reason for one in entry.tiers() if one.tier == Tier.REMOTE.value]

    entry.status = READY
    node.tiers.introduce(entry)

    is_on = c.TierChanged(tier=Tier.REMOTE, is_on=True)
    assert [one for one in meanwhile if one[0] == "late"] == [
        ("late", c.TierChanged(tier=Tier.REMOTE, is_on=False, is_mover_away=True))
    ]
    assert reason == "the cache's memory is being populated"
    assert node.take() == [("late", is_on)]
