"""Laws of a disk that hangs: its tier is off until it answers, and copies not yet sent fail at once."""

import asyncio
import socket

import numpy as np

from kvlease.ids import CopyId
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Direction, Tier
from kvleased.movers import protocol
from kvleased.movers.protocol import Batch, Completion, Status

from .conftest import Node, labels, packets


async def test_disk_that_hangs_is_off_until_it_answers(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """While the disk hangs its tier is off, and copies that its mover was not sent fail at once."""
    entry, end, ids = node.registry.cache("deep"), ends["disk-mover"], np.zeros(1, np.int32)
    node.tiers.introduce(entry)
    end.send(Status(is_on=True, file_id="ab").encode())
    await node.until(3)
    for number in range(1, 4):
        node.tiers.send(entry, _load(number, ids.tobytes()))
    now = asyncio.get_running_loop().time()

    node.tiers.tick(now + 2)
    assert node.take() == []
    node.tiers.tick(now + 4)
    off = node.take()
    reason = entry.stores[Tier.DISK].reason
    batches = [Batch.decode(one) for one in packets(end) if one[:1] == protocol.BATCH]
    end.send(Completion(number=batches[0].number, is_done=True).encode())
    await node.until(1)
    node.tiers.tick(asyncio.get_running_loop().time())

    assert off == [
        ("deep", c.TierChanged(tier=Tier.DISK, is_on=False)),
        ("deep", c.CopyFailed(copy_id=CopyId(3))),
    ]
    assert reason == (
        "no copy has ended for 3 s, so the disk is hanging or is too slow; after 30 s its mover will be replaced"
    )
    assert node.take() == [("deep", c.TierChanged(tier=Tier.DISK, is_on=True, is_read=False))]
    assert not entry.stores[Tier.DISK].reason


async def test_core_forgets_a_store_that_was_replaced_while_the_disk_hung(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """The core hears of the other file before its content, even while the disk still counts as hanging."""
    entry, end = node.registry.cache("deep"), ends["disk-mover"]
    node.tiers.introduce(entry)
    end.send(Status(is_on=True, file_id="ab").encode())
    await node.until(3)
    node.tiers.send(entry, _load(1, np.zeros(1, np.int32).tobytes()))
    node.tiers.tick(asyncio.get_running_loop().time() + 4)
    node.take()

    end.send(Status(is_on=True, file_id="cd").encode())

    other = c.TierChanged(tier=Tier.DISK, is_on=True, is_empty=True, is_read=False)
    assert await node.until() == [("deep", other)]


def _load(number: int, packed_ids: bytes) -> Copy:
    return Copy(
        copy_id=CopyId(number),
        direction=Direction.LOAD,
        source_ids=packed_ids,
        target_ids=packed_ids,
        checksums=b"",
        labels=labels(1),
    )
