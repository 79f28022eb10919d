"""The daemon's end of a GPU's mover gets the memory that it asks for, whichever mover makes it."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from kvlease.errors import PoolFullError
from kvleased.movers import protocol
from kvleased.movers.gpu import device_link
from kvleased.movers.gpu.allotting import Allocate, Allocated
from kvleased.movers.gpu.device_link import DeviceLink, GpuRegion
from tests.unit.service.descriptors import descriptors_left
from tests.unit.service.movers.test_link import LIMITS, Owner


class FakeMover:
    """The mover's end of a link."""

    def __init__(self, link: DeviceLink, generation: int) -> None:
        ours, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.attach(ours, generation)
        self.sock.send(protocol.HERE)

    async def asked(self) -> Allocate:
        """Return the next question of the daemon."""
        await asyncio.sleep(0)
        return Allocate.decode(self.sock.recv(protocol.PACKET_BYTES_MAX))

    def answer(self, answer: Allocated, fds: list[int] = []) -> None:  # noqa: B006 - never changed
        """Answer a question."""
        socket.send_fds(self.sock, [answer.encode()], fds)


@pytest.fixture
async def link() -> AsyncIterator[DeviceLink]:
    """A link without a mover."""
    link = DeviceLink(Owner(), LIMITS)
    yield link
    link.close()


async def test_memory_comes_with_what_is_to_be_known_of_it(link: DeviceLink) -> None:
    """The descriptor that the mover sends becomes the caller's, with the region's description."""
    mover = FakeMover(link, 1)
    wanted = asyncio.ensure_future(link.allocate(1000))
    asked = await mover.asked()
    read_end, write_end = os.pipe()

    mover.answer(Allocated(number=asked.number, device_uuid="u", mapped_bytes=4096), [read_end])
    made = await wanted

    assert asked.num_bytes == 1000
    assert made.region == GpuRegion(device_uuid="u", mapped_bytes=4096)
    assert os.fstat(made.fd).st_ino == os.fstat(read_end).st_ino
    for fd in (read_end, write_end, made.fd):
        os.close(fd)
    mover.sock.close()


async def test_start_is_over_with_the_first_word_of_a_mover(link: DeviceLink) -> None:
    """The start waits for the mover's first word, so the daemon is not ready while its GPU wakes up."""
    started = asyncio.ensure_future(link.started())
    await asyncio.sleep(0)
    assert not started.done()

    mover = FakeMover(link, 1)

    async with asyncio.timeout(10):
        await started
    mover.sock.close()


async def test_refusal_says_why(link: DeviceLink) -> None:
    """The driver's reason for a refusal reaches the caller."""
    mover = FakeMover(link, 1)
    wanted = asyncio.ensure_future(link.allocate(1000))
    asked = await mover.asked()

    mover.answer(Allocated(number=asked.number, reason="lower device_bytes"))

    with pytest.raises(PoolFullError, match="lower device_bytes"):
        await wanted
    mover.sock.close()


async def test_memory_for_which_there_is_no_descriptor_is_refused_at_once(
    link: DeviceLink,
) -> None:
    """If this process may have no more descriptors, the caller is told so, and the link goes on."""
    mover = FakeMover(link, 1)
    wanted = asyncio.ensure_future(link.allocate(1000))
    asked = await mover.asked()
    read_end, write_end = os.pipe()
    mover.answer(Allocated(number=asked.number, device_uuid="u", mapped_bytes=1), [read_end])
    os.close(read_end)

    with descriptors_left(0):
        link._read()
        link._read()

    with pytest.raises(PoolFullError, match="raise the limit on descriptors"):
        await wanted
    assert link.is_attached
    assert not _is_read(write_end)
    os.close(write_end)
    mover.sock.close()


async def test_next_mover_is_asked_for_what_the_last_one_did_not_make(link: DeviceLink) -> None:
    """If a mover ends before it answers, or has not come yet, the next mover is asked the same question."""
    wanted = asyncio.ensure_future(link.allocate(1000))
    await asyncio.sleep(0)
    first = FakeMover(link, 1)
    asked = await first.asked()
    first.sock.close()
    link.died(1)

    second = FakeMover(link, 2)
    again = await second.asked()
    read_end, write_end = os.pipe()
    second.answer(Allocated(number=again.number, device_uuid="u", mapped_bytes=1), [read_end])
    made = await wanted

    assert again == asked
    for fd in (read_end, write_end, made.fd):
        os.close(fd)
    second.sock.close()


async def test_memory_that_nobody_waits_for_is_let_go_of(link: DeviceLink) -> None:
    """The descriptor of a late answer is closed, since it would keep the memory for ever."""
    mover = FakeMover(link, 1)
    wanted = asyncio.ensure_future(link.allocate(1000))
    asked = await mover.asked()
    wanted.cancel()
    await asyncio.gather(wanted, return_exceptions=True)
    read_end, write_end = os.pipe()

    mover.answer(Allocated(number=asked.number, device_uuid="u", mapped_bytes=1), [read_end])
    os.close(read_end)
    async with asyncio.timeout(10):
        # Nobody reads from a pipe whose reading ends are all closed.
        while _is_read(write_end):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)

    os.close(write_end)
    mover.sock.close()


async def test_memory_that_comes_as_its_caller_leaves_is_let_go_of(link: DeviceLink) -> None:
    """If the caller is cancelled after its answer has come, the descriptor is closed, too."""
    mover = FakeMover(link, 1)
    wanted = asyncio.ensure_future(link.allocate(1000))
    asked = await mover.asked()
    read_end, write_end = os.pipe()

    mover.answer(Allocated(number=asked.number, device_uuid="u", mapped_bytes=1), [read_end])
    link._read()
    wanted.cancel()
    os.close(read_end)
    await asyncio.gather(wanted, return_exceptions=True)

    assert wanted.cancelled()
    assert not _is_read(write_end)
    os.close(write_end)
    mover.sock.close()


async def test_mover_that_never_comes_is_waited_for_no_longer_than_said(
    link: DeviceLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no mover comes, a registration ends at its deadline and says where to look."""
    monkeypatch.setattr(device_link, "ALLOCATE_SECONDS_MAX", 0.01)

    with pytest.raises(PoolFullError, match="see the daemon's log for why"):
        await link.allocate(1000)


def _is_read(fd: int) -> bool:
    try:
        os.write(fd, b"x")
    except BrokenPipeError:
        return False
    return True
