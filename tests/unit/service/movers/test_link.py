"""The daemon's end of a mover answers every copy exactly once, whatever the mover does."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvlease.ids import CopyId
from kvleased.core.commands import CopyDone, CopyFailed, CopyLost, MoverDied
from kvleased.core.effects import Copy, Direction
from kvleased.movers import protocol
from kvleased.movers.link import MoverLink
from kvleased.movers.protocol import Batch, Completion, Piece, PoolMap


@dataclass
class Owner:
    """Remember what the link says."""

    answers: list[tuple[int, object]] = field(default_factory=list)
    recycled: list[int] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def answer_copy(self, pool: int, command: CopyDone | CopyFailed | CopyLost) -> None:
        """Remember an answer."""
        self.answers.append((pool, command))
        self.changed.set()

    def answer_mover_death(self, command: MoverDied) -> None:
        """Remember a death."""
        self.answers.append((0, command))

    def recycle_mover(self, generation: int) -> None:
        """Remember a request."""
        self.recycled.append(generation)


class Mover:
    """A mover that does what the test says, one packet at a time."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)

    def close(self) -> None:
        """End; the other end is the link's."""
        self.ours.close()

    def packets(self) -> list[bytes]:
        """Return what has come."""
        found: list[bytes] = []
        while True:
            try:
                packet = self.ours.recv(protocol.PACKET_BYTES_MAX)
            except BlockingIOError:
                return found
            if not packet:
                return found
            found.append(packet)

    def batches(self) -> list[Batch]:
        """Return the batches that have come."""
        return [Batch.decode(packet) for packet in self.packets() if packet[:1] == protocol.BATCH]

    def complete(self, batch: Batch, *, is_done: bool = True, failed: tuple[int, ...] = ()) -> None:
        """Answer a batch."""
        sums = batch.target_ids * 2 if is_done else b""
        self.ours.send(
            Completion(number=batch.number, is_done=is_done, checksums=sums, failed=failed).encode()
        )


def _copy(copy_id: int, count: int = 2) -> Copy:
    ids = np.arange(count, dtype=np.int32).tobytes()
    return Copy(
        copy_id=CopyId(copy_id),
        direction=Direction.OFFLOAD,
        source_ids=ids,
        target_ids=ids,
        checksums=b"",
    )


@pytest.fixture
def owner() -> Owner:
    """Nothing heard yet."""
    return Owner()


@pytest.fixture
async def link(owner: Owner) -> AsyncIterator[MoverLink]:
    """A link without a mover, with batches of up to 4 copies and a deadline of 10 seconds."""
    link = MoverLink(owner, seconds_max=10, copies_a_batch_max=4)
    yield link
    link.close()


@pytest.fixture
async def mover(link: MoverLink) -> AsyncIterator[Mover]:
    """The first mover."""
    with closing(Mover()) as mover:
        link.attach(mover.theirs, 1)
        yield mover


async def _heard(owner: Owner) -> None:
    async with asyncio.timeout(5):
        await owner.changed.wait()
    owner.changed.clear()


async def test_copy_is_split_and_answered_as_one(
    link: MoverLink, mover: Mover, owner: Owner
) -> None:
    """A copy above the size of a batch travels in several and is answered once, positions counted over all."""
    link.send(7, _copy(1, 10), with_checksums=True)
    batches = mover.batches()
    assert [batch.num_copies for batch in batches] == [4, 4, 2]

    for batch, failed in zip(batches, [(), (1,), (0,)], strict=True):
        mover.complete(batch, failed=failed)
    await _heard(owner)

    ids = np.arange(10, dtype=np.int32)
    sums = b"".join(ids[start : start + 4].tobytes() * 2 for start in (0, 4, 8))
    assert owner.answers == [(7, CopyDone(copy_id=CopyId(1), checksums=sums, failed=(5, 8)))]


async def test_refused_part_fails_the_copy(link: MoverLink, mover: Mover, owner: Owner) -> None:
    """A copy of which one part was refused has failed, once all its parts have ended."""
    link.send(7, _copy(1, 8), with_checksums=True)
    first, second = mover.batches()

    mover.complete(first, is_done=False)
    mover.complete(second)
    await _heard(owner)

    assert owner.answers == [(7, CopyFailed(copy_id=CopyId(1)))]


async def test_overdue_copy_is_lost_and_its_mover_replaced(
    link: MoverLink, mover: Mover, owner: Owner
) -> None:
    """A copy that a mover does not answer in time is lost, and that mover is asked to be replaced."""
    link.send(7, _copy(1), with_checksums=False)
    now = asyncio.get_running_loop().time()

    link.tick(now + 5)
    assert owner.answers == []
    link.tick(now + 20)

    assert owner.answers == [(7, CopyLost(copy_id=CopyId(1)))]
    assert owner.recycled == [1]
    assert mover.batches()


async def test_copy_that_no_mover_got_has_failed(link: MoverLink, owner: Owner) -> None:
    """Without a mover a copy waits, and fails at its deadline: nobody can be writing its targets."""
    link.send(7, _copy(1), with_checksums=False)

    link.tick(asyncio.get_running_loop().time() + 20)

    assert owner.answers == [(7, CopyFailed(copy_id=CopyId(1)))]
    assert owner.recycled == []


async def test_dead_mover_ends_everything_on_its_way(
    link: MoverLink, mover: Mover, owner: Owner
) -> None:
    """When a mover is proven dead the cores are told once, and nothing of it is repeated to the next one."""
    link.send(7, _copy(1), with_checksums=False)

    link.died(1)
    with closing(Mover()) as following:
        link.attach(following.theirs, 2)
        link.send(7, _copy(2), with_checksums=False)

        assert owner.answers == [(0, MoverDied())]
        assert len(following.batches()) == 1
    assert mover.batches()


async def test_next_mover_maps_the_pools_first(link: MoverLink, mover: Mover) -> None:
    """A new mover is told of every pool before the copies that waited for it."""
    fd = os.memfd_create("test")
    piece = Piece(rank=0, offset_bytes=0, block_stride_bytes=64, num_bytes=64, slot_offset_bytes=0)
    pool = PoolMap(
        pool=7, num_blocks=1, num_slots=0, bytes_per_slot=64, device_bytes=(64,), pieces=(piece,)
    )
    link.map(pool, [fd])
    kinds = [protocol.MAP, protocol.PIECES]
    assert [packet[:1] for packet in mover.packets()] == kinds
    link.died(1)
    link.send(7, _copy(1), with_checksums=False)

    with closing(Mover()) as following:
        link.attach(following.theirs, 2)

        assert [packet[:1] for packet in following.packets()] == [*kinds, protocol.BATCH]
    os.close(fd)


async def test_full_socket_delays_and_loses_nothing(
    link: MoverLink, mover: Mover, owner: Owner
) -> None:
    """More batches than the socket takes are sent as the mover reads, in their order."""
    for number in range(3_000):
        link.send(7, _copy(number), with_checksums=False)
    answered = 0
    while answered < 3_000:
        for batch in mover.batches():
            mover.complete(batch)
            answered += 1
            if answered % 100 == 0:
                await _heard(owner)
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        while len(owner.answers) < 3_000:  # noqa: ASYNC110 - the answers come by callbacks of the loop
            await asyncio.sleep(0)

    assert [answer.copy_id for _, answer in owner.answers] == list(range(3_000))  # type: ignore[attr-defined]
    assert repr(link) == "<MoverLink mover 1, 0 batches in flight>"
