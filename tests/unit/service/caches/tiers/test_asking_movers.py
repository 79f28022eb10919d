"""Laws of questions to movers: each has one answer, and nobody waits for a mover that is away."""

import asyncio
import os
import socket

import numpy as np
import pytest

from kvlease.ids import CopyId
from kvleased.core import commands as c
from kvleased.core.effects import (
    Probe,
    Tier,
)
from kvleased.movers import protocol
from kvleased.movers.plans import pool_map
from kvleased.movers.protocol import Ask, Found, Purge, Purged, Status, Told

from .conftest import Node, labels, packets, switched_on

LABELS_MAX = protocol.LABELS_A_PACKET_MAX


async def test_probe_is_answered_in_order_however_it_was_split(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """Labels above a packet's limit are asked for in several packets, and the answer is one."""
    deep = node.registry.cache("deep")
    node.tiers.probe(deep, Probe(probe_id=9, labels=labels(LABELS_MAX + 1)))
    first, second = map(Ask.decode, packets(ends["remote-mover"]))
    assert first.labels + second.labels == labels(LABELS_MAX + 1)

    ends["remote-mover"].send(Told(number=second.number, is_present=b"\1").encode())
    ends["remote-mover"].send(Told(number=first.number, is_present=bytes(LABELS_MAX)).encode())

    expected = c.Probed(probe_id=9, is_present=bytes(LABELS_MAX) + b"\1")
    assert await node.until() == [("deep", expected)]


async def test_probe_ends_when_its_time_is_up(node: Node, ends: dict[str, socket.socket]) -> None:
    """A store that does not answer in time counts as empty, and its late answer is ignored."""
    node.tiers.probe(node.registry.cache("deep"), Probe(probe_id=9, labels=labels(1)))
    (question,) = map(Ask.decode, packets(ends["remote-mover"]))

    assert await node.until() == [("deep", c.Probed(probe_id=9))]
    ends["remote-mover"].send(Told(number=question.number, is_present=b"\1").encode())
    ends["remote-mover"].send(Status(is_on=True).encode())
    node.tiers.introduce(node.registry.cache("deep"))

    told = [type(command) for _, command in await node.until(3)]
    assert told == [c.TierChanged] * 3


async def test_probe_whose_time_is_up_keeps_what_was_told_of_its_first_labels(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """Of a question in three packets, the answers before the first one that is missing are believed."""
    node.tiers.probe(
        node.registry.cache("deep"), Probe(probe_id=9, labels=labels(2 * LABELS_MAX + 1))
    )
    first, _, third = map(Ask.decode, packets(ends["remote-mover"]))

    ends["remote-mover"].send(Told(number=third.number, is_present=b"\1").encode())
    ends["remote-mover"].send(Told(number=first.number, is_present=b"\1" * LABELS_MAX).encode())

    expected = c.Probed(probe_id=9, is_present=b"\1" * LABELS_MAX)
    assert await node.until() == [("deep", expected)]


async def test_probe_without_a_mover_ends_at_once(node: Node) -> None:
    """A probe ends at once if its mover is not there."""
    node.tiers.probe(node.registry.cache("deep"), Probe(probe_id=9, labels=labels(1)))

    assert node.take() == [("deep", c.Probed(probe_id=9))]


async def test_probe_ends_with_its_mover(node: Node, ends: dict[str, socket.socket]) -> None:
    """A probe ends when its mover goes, or when the mover does not know the cache."""
    deep = node.registry.cache("deep")
    for probe_id in (1, 2):
        node.tiers.probe(deep, Probe(probe_id=probe_id, labels=labels(1)))
    question, _ = map(Ask.decode, packets(ends["remote-mover"]))
    ends["remote-mover"].send(Told(number=question.number).encode())
    ends["remote-mover"].close()

    told = [command for _, command in await node.until(2)]
    assert told[:2] == [c.Probed(probe_id=1), c.Probed(probe_id=2)]


async def test_found_slots_are_adopted_until_the_last(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """Slots of an earlier life go to the core as they are found, and those that it adopts are counted."""
    deep = node.registry.cache("deep")
    node.tiers.introduce(deep)
    ends["disk-mover"].send(Status(is_on=True).encode())
    await node.until(3)
    ids = np.arange(3, dtype=np.int32).tobytes()
    found = Found(
        pool=deep.pool, slot_ids=ids, labels=labels(3), checksums=bytes(24), is_last=False
    )

    ends["disk-mover"].send(found.encode())

    adopt = c.Adopt(slot_ids=ids, labels=labels(3), checksums=bytes(24))
    assert await node.until() == [("deep", adopt)]
    assert [(one.status, one.num_found) for one in deep.tiers()] == [
        ("ready", 0),
        ("scanning", 2),
        ("off", 0),
    ]
    last = Found(pool=deep.pool, slot_ids=b"", labels=b"", checksums=b"", is_last=True)
    ends["disk-mover"].send(last.encode())
    async with asyncio.timeout(5):
        while not node.scanned:  # noqa: ASYNC110 - it comes by a callback of the loop
            await asyncio.sleep(0)
    assert (node.scanned, deep.is_scanned, deep.tiers()[1].status) == (["deep"], True, "ready")
    assert node.take() == [("deep", c.TierChanged(tier=Tier.DISK, is_on=True))]


async def test_core_forgets_a_disk_store_that_is_another_one(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A core is told once that the file is new, before its content; the same file is no news, in any life."""
    deep = node.registry.cache("deep")
    deep.disk_file_id, deep.is_scanned, deep.num_found[Tier.DISK] = "old", True, 5
    fd = os.memfd_create("test")
    node.tiers.map(deep, pool_map(deep.pool, deep.plan, file_id="old"), [fd])
    node.tiers.introduce(deep)
    node.take()

    def say(*, is_on: bool, file_id: str = "") -> None:
        ends["disk-mover"].send(Status(is_on=is_on, pool=deep.pool, file_id=file_id).encode())

    on, off = (c.TierChanged(tier=Tier.DISK, is_on=is_on) for is_on in (True, False))
    say(is_on=True, file_id="old")
    assert await node.until() == [("deep", on)]
    say(is_on=False)
    say(is_on=True, file_id="new")
    replaced = c.TierChanged(tier=Tier.DISK, is_on=True, is_empty=True, is_read=False)
    assert await node.until(2) == [("deep", off), ("deep", replaced)]
    assert (deep.disk_file_id, deep.is_scanned, deep.num_found[Tier.DISK]) == ("new", False, 0)
    assert node.scanned == ["deep"]
    packets(ends["disk-mover"])

    ends["disk-mover"].close()
    await node.until()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ends["disk-mover"] = ours
    node.tiers.mover_came("disk-mover", theirs, 2)
    assert protocol.PoolMap.decode(packets(ours)[0]).file_id == ""
    say(is_on=True, file_id="new")
    unread = c.TierChanged(tier=Tier.DISK, is_on=True, is_read=False)
    assert await node.until() == [("deep", unread)]
    os.close(fd)


async def test_answers_for_deleted_caches_are_dropped(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """Answers for a cache that was deleted meanwhile are dropped."""
    deep = node.registry.cache("deep")
    node.tiers.probe(deep, Probe(probe_id=1, labels=labels(1)))
    node.registry.drop_cache(deep)
    (question,) = map(Ask.decode, packets(ends["remote-mover"]))
    found = Found(pool=deep.pool, slot_ids=b"", labels=b"", checksums=b"", is_last=True)

    ends["remote-mover"].send(Told(number=question.number, is_present=b"\1").encode())
    ends["disk-mover"].send(found.encode())
    ends["disk-mover"].send(Status(is_on=True, pool=deep.pool).encode())
    node.tiers.answer_copy(deep.pool, c.CopyFailed(copy_id=CopyId(1)))
    for role in ("disk-mover", "remote-mover"):
        ends[role].send(Status(is_on=True).encode())
    async with asyncio.timeout(5):
        while not all(status.is_on for status in node.tiers._global.values()):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)

    assert not node.take()
    assert not node.scanned
    assert repr(node.tiers).startswith("<Tiers <MoverLink mover 1")


@pytest.mark.parametrize("reason", ["", "it is on fire"])
async def test_purge_is_answered_by_its_mover(
    node: Node, ends: dict[str, socket.socket], reason: str
) -> None:
    """All callers that wait for a purge get the mover's answer, once."""
    entry = await switched_on(node, ends["disk-mover"])
    asked = [asyncio.ensure_future(node.tiers.purge(entry)) for _ in range(2)]
    await asyncio.sleep(0)

    (packet, _) = packets(ends["disk-mover"])
    ends["disk-mover"].send(Purged(pool=entry.pool, reason=reason).encode())

    assert Purge.decode(packet) == Purge(pool=entry.pool)
    assert await asyncio.wait_for(asyncio.gather(*asked), 5) == [reason] * 2


async def test_purge_of_a_mover_that_ends_is_not_certain(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """If the mover ends before it answers, the file may still exist; a purge without a mover is refused."""
    entry = await switched_on(node, ends["disk-mover"])
    asked = asyncio.ensure_future(node.tiers.purge(entry))
    await asyncio.sleep(0)

    ends["disk-mover"].close()

    assert await asyncio.wait_for(asked, 5) == "its mover has ended"
    assert await node.tiers.purge(entry) == "its mover is being started"
